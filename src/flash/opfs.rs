//! The browser's side of flash: files in the Origin Private File System, which flash workers own, and a web server. Both
//! are JavaScript objects of the package (`pkg/src/flash-files.ts` and `pkg/src/server.ts`).

use std::fmt::Display;
use std::ops::Range;

use futures_util::future::LocalBoxFuture;
use js_sys::{Reflect, Uint8Array};
use wasm_bindgen::prelude::*;

use super::install::{Body, Source, Store};
use super::{Bytes, Flash};
use crate::error::{Error, Result};

#[wasm_bindgen]
extern "C" {
    /// The files of one pack. Offsets and lengths are whole numbers below 2⁵³.
    #[wasm_bindgen(typescript_type = "Files")]
    pub type Files;

    #[wasm_bindgen(method, catch)]
    async fn read(this: &Files, file: &str, offset: f64, length: f64) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn size(this: &Files, file: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn write(this: &Files, file: &str, offset: f64, bytes: Uint8Array) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn resize(this: &Files, file: &str, length: f64) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn flush(this: &Files, file: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn remove(this: &Files, file: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn list(this: &Files) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn free(this: &Files) -> Result<JsValue, JsValue>;

    /// The files of one pack on a web server.
    #[wasm_bindgen(typescript_type = "Server")]
    pub type Server;

    #[wasm_bindgen(method, catch)]
    async fn get(this: &Server, file: &str, start: Option<f64>, end: Option<f64>) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn peek(this: &Server, file: &str, anew: bool) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch)]
    async fn pause(this: &Server, attempt: u32) -> Result<JsValue, JsValue>;

    type ServerBody;

    #[wasm_bindgen(method, catch)]
    async fn next(this: &ServerBody) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method)]
    fn cancel(this: &ServerBody);
    #[wasm_bindgen(method, getter)]
    fn tag(this: &ServerBody) -> Option<String>;
}

/// A pack in the Origin Private File System.
pub struct OpfsFlash {
    files: Files,
}

impl OpfsFlash {
    pub fn new(files: Files) -> OpfsFlash {
        OpfsFlash { files }
    }
}

impl Flash for OpfsFlash {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        Box::pin(async move {
            let bytes = self.files.read(file, offset as f64, len as f64).await.map_err(|e| from_js(file, &e))?;
            bytes.dyn_into().map(Bytes::Js).map_err(|_| misbehaved(file, "read gave no bytes"))
        })
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        Box::pin(async move {
            let size = self.files.size(file).await.map_err(|e| from_js(file, &e))?;
            size.as_f64().map(|n| n as u64).ok_or_else(|| misbehaved(file, "size gave no number"))
        })
    }
}

impl Store for OpfsFlash {
    fn write<'a>(&'a self, file: &'a str, offset: u64, bytes: Bytes) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let bytes = match bytes {
                Bytes::Js(array) => array,
                Bytes::Owned(bytes) => Uint8Array::from(bytes.as_slice()),
            };
            done(file, self.files.write(file, offset as f64, bytes).await)
        })
    }

    fn resize<'a>(&'a self, file: &'a str, len: u64) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move { done(file, self.files.resize(file, len as f64).await) })
    }

    fn flush<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move { done(file, self.files.flush(file).await) })
    }

    fn remove<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move { done(file, self.files.remove(file).await) })
    }

    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<String>>> {
        Box::pin(async move {
            let names = self.files.list().await.map_err(|e| from_js("/", &e))?;
            Ok(js_sys::Array::from(&names).iter().filter_map(|name| name.as_string()).collect())
        })
    }

    fn free(&self) -> LocalBoxFuture<'_, Result<Option<u64>>> {
        Box::pin(async move {
            let free = self.files.free().await.map_err(|e| from_js("/", &e))?;
            Ok(free.as_f64().map(|n| n as u64))
        })
    }
}

impl Source for Server {
    fn get<'a>(&'a self, file: &'a str, range: Option<Range<u64>>) -> LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>> {
        Box::pin(async move {
            let (start, end) = range.map(|r| (r.start as f64, r.end as f64)).unzip();
            let body = Server::get(self, file, start, end).await.map_err(|e| from_js(file, &e))?;
            Ok(Download::of(file, body))
        })
    }

    fn peek<'a>(&'a self, file: &'a str, anew: bool) -> LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>> {
        Box::pin(async move {
            let body = Server::peek(self, file, anew).await.map_err(|e| from_js(file, &e))?;
            Ok(Download::of(file, body))
        })
    }

    fn pause(&self, attempt: u32) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            // A timer that fails only makes the wait shorter.
            let _ = Server::pause(self, attempt).await;
        })
    }
}

struct Download {
    body: ServerBody,
    file: String,
}

impl Download {
    fn of(file: &str, body: JsValue) -> Box<dyn Body> {
        Box::new(Download { body: body.unchecked_into(), file: file.to_owned() })
    }
}

impl Body for Download {
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Option<Bytes>>> {
        Box::pin(async move {
            let bytes = self.body.next().await.map_err(|e| from_js(&self.file, &e))?;
            if bytes.is_undefined() {
                return Ok(None);
            }
            bytes.dyn_into().map(|b| Some(Bytes::Js(b))).map_err(|_| misbehaved(&self.file, "a body gave no bytes"))
        })
    }

    fn tag(&self) -> Option<String> {
        self.body.tag()
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        self.body.cancel();
    }
}

fn done(file: &str, result: Result<JsValue, JsValue>) -> Result<()> {
    result.map(drop).map_err(|e| from_js(file, &e))
}

fn misbehaved(file: &str, reason: impl Display) -> Error {
    Error::Storage { path: file.to_owned(), reason: reason.to_string() }
}

/// What the package threw, an `OutriderError` unless something unforeseen happened.
fn from_js(file: &str, error: &JsValue) -> Error {
    let field = |object: &JsValue, name: &str| Reflect::get(object, &name.into()).unwrap_or_default();
    let details = field(error, "details");
    let text = |name| field(&details, name).as_string().unwrap_or_default();
    let number = |name| field(&details, name).as_f64().unwrap_or_default() as u64;
    match field(error, "code").as_string().as_deref() {
        Some("not_found") => Error::NotFound { path: text("path") },
        Some("truncated") => {
            Error::Truncated { path: text("path"), expected: number("expected"), actual: number("actual") }
        }
        Some("http") => Error::Http { url: text("url"), status: number("status") as u16 },
        Some("network") => Error::Network { url: text("url"), reason: text("reason") },
        Some("quota") => Error::Quota { needed: number("needed") },
        Some("storage") => Error::Storage { path: text("path"), reason: text("reason") },
        _ => {
            let message = field(error, "message").as_string();
            misbehaved(file, message.unwrap_or_else(|| format!("{error:?}")))
        }
    }
}
