//! Outrider runs Mixture-of-Experts language models that are larger than memory: experts live on flash and are read
//! into a bounded pool when a token needs them; no expert is ever skipped. Native and in a browser tab.
//!
//! The rooms, top to bottom; a module may use what stands below it:

pub mod backend;
pub mod chat;
mod clock;
pub mod engine;
pub mod error;
pub mod flash;
pub mod import;
pub mod les;
pub mod model;
pub mod pack;
pub mod tensor;
#[cfg(target_arch = "wasm32")]
pub mod web;

pub use error::{Error, Result};
