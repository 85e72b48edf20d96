//! The wasm-bindgen surface: what the engine worker (`pkg/src/engine-worker.ts`) calls. It translates and passes on.

mod engine;
mod errors;
mod install;
mod internal;
mod speed;

pub use engine::WebEngine;
pub use install::{WebInstallation, install};

use std::cell::RefCell;

use js_sys::Function;
use serde::Deserialize;
use wasm_bindgen::prelude::*;

use crate::engine::{BackendChoice, Options};
use crate::error::{Error, Result};
use internal::Internals;

thread_local! {
    static ON_PANIC: RefCell<Option<Function>> = const { RefCell::new(None) };
}

/// Calls `callback(message)` when the module panics, after which nothing in it may be called. The promises of calls in
/// flight do not settle by themselves.
#[wasm_bindgen(js_name = onPanic)]
pub fn on_panic(callback: Function) {
    ON_PANIC.set(Some(callback));
    std::panic::set_hook(Box::new(|info| {
        console_error_panic_hook::hook(info);
        if let Some(callback) = ON_PANIC.take() {
            // There is nobody left to tell if telling fails.
            let _ = callback.call1(&JsValue::NULL, &info.to_string().into());
        }
    }));
}

/// The package's options, as JSON.
#[derive(Deserialize)]
struct WebOptions {
    budget: Option<u64>,
    backend: String,
    context: Option<usize>,
    f16: bool,
    /// Record what happens when in each pass.
    timeline: bool,
    /// For tests and benches.
    internal: Option<Internals>,
}

impl WebOptions {
    fn parse(json: &str) -> Result<WebOptions> {
        serde_json::from_str(json).map_err(|e| Error::Request(e.to_string()))
    }

    fn engine(&self) -> Result<Options> {
        let backend: BackendChoice = self.backend.parse().map_err(Error::Request)?;
        let WebOptions { budget, context, f16, .. } = *self;
        let max_slots = self.internal.as_ref().and_then(|i| i.max_slots);
        let untrained = self.internal.as_ref().is_some_and(|i| i.untrained);
        Ok(Options { backend, budget, context, f16, max_slots, untrained, ..Options::default() })
    }
}

/// Tells the package about bytes done in a phase. What the callback throws is its own concern.
fn report(on_progress: &Function, phase: &str, done: u64, total: u64) {
    let _ = on_progress.call3(&JsValue::NULL, &phase.into(), &(done as f64).into(), &(total as f64).into());
}
