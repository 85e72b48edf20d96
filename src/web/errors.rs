//! Errors as the package throws them: an `Error` with `code` and `details` beside its message.

use js_sys::{Object, Reflect};
use wasm_bindgen::JsValue;

use crate::error::Error;

pub(super) fn to_js(error: Error) -> JsValue {
    let js = js_sys::Error::new(&error.to_string());
    let details = Object::new();
    for (name, value) in details_of(&error) {
        set(&details, name, value);
    }
    set(&js, "code", error.code().into());
    set(&js, "details", details.into());
    js.into()
}

fn set(object: &Object, name: &str, value: JsValue) {
    // Setting a property of an object made here cannot fail.
    let _ = Reflect::set(object, &name.into(), &value);
}

/// What an error is about, by the names of its fields.
fn details_of(error: &Error) -> Vec<(&'static str, JsValue)> {
    let number = |n: u64| JsValue::from_f64(n as f64);
    let text = |s: &String| JsValue::from_str(s);
    match error {
        Error::NotFound { path } => vec![("path", text(path))],
        Error::Http { url, status } => vec![("url", text(url)), ("status", number(u64::from(*status)))],
        Error::Network { url, reason } => vec![("url", text(url)), ("reason", text(reason))],
        Error::Truncated { path, expected, actual } => {
            vec![("path", text(path)), ("expected", number(*expected)), ("actual", number(*actual))]
        }
        Error::Corrupt { path, offset, len } => {
            vec![("path", text(path)), ("offset", number(*offset)), ("length", number(*len))]
        }
        Error::Version { found, supported } => vec![("found", number(*found)), ("supported", number(*supported))],
        Error::UnknownArchitecture { name, .. } | Error::MissingTensor { name } => vec![("name", text(name))],
        Error::MissingFile { file } => vec![("file", text(file))],
        Error::Budget { budget, smallest, context } => {
            vec![("budget", number(*budget)), ("smallest", number(*smallest)), ("context", number(*context as u64))]
        }
        Error::Context { prompt, context } => {
            vec![("prompt", number(*prompt as u64)), ("context", number(*context as u64))]
        }
        Error::SelfTest { backend, reason } => vec![("backend", JsValue::from_str(backend)), ("reason", text(reason))],
        Error::Quota { needed } => vec![("needed", number(*needed))],
        Error::Storage { path, reason } => vec![("path", text(path)), ("reason", text(reason))],
        _ => Vec::new(),
    }
}
