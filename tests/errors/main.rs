//! Whatever goes wrong is a typed error whose message says what to do, nothing is left half-done, and no file, however
//! hostile, makes the runtime panic or allocate what the file does not hold.

#[path = "../common/alloc.rs"]
mod alloc;
#[path = "../common/checkpoints.rs"]
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/gguf.rs"]
mod gguf_files;
#[path = "../common/http.rs"]
mod http;

mod checkpoint;
mod gguf;
mod hostile;
mod interrupts;
mod machine;
mod numbers;
mod packs;
mod requests;
mod served;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use outrider::engine::{BackendChoice, Engine, Options, Want};
use outrider::flash::MemoryFlash;
use outrider::tensor::DType;
use outrider::{Error, Result};
use serde_json::Value;

#[global_allocator]
static ALLOCATOR: alloc::Watching = alloc::Watching;

/// More than anything of the small packs here takes in one piece, less than what their numbers can be made to ask for.
const MOST: usize = 24 << 20;

type Files = BTreeMap<String, Vec<u8>>;

/// The files of a small pack without a tokenizer.
fn small() -> Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    let make = || common::pack(&common::repository(common::GOLDEN_CHECKPOINTS[0]), DType::Q4, DType::Q8).into_files();
    FILES.get_or_init(make).clone()
}

/// The pack with its manifest changed.
fn with_manifest(change: impl FnOnce(&mut Value)) -> Files {
    let mut files = small();
    let manifest = files.get_mut("manifest.json").unwrap();
    let mut value = serde_json::from_slice(manifest).unwrap();
    change(&mut value);
    *manifest = serde_json::to_vec(&value).unwrap();
    files
}

fn write(files: &Files, dir: &Path) {
    files.iter().for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes).unwrap());
}

fn cpu() -> Options {
    common::on(BackendChoice::Cpu)
}

/// Loads a pack on the CPU and runs a few tokens.
fn run(files: Files) -> Result<Vec<f32>> {
    let mut engine = common::load(MemoryFlash::new(files), &cpu())?;
    forward(&mut engine)
}

fn forward(engine: &mut Engine) -> Result<Vec<f32>> {
    pollster::block_on(engine.forward(&[1, 2, 3], Want::All, None))
}

/// Asserts the kind of an error, and that its message has all of `parts`.
#[track_caller]
fn assert_error<T>(result: Result<T>, code: &str, parts: &[&str]) -> Error {
    let Err(error) = result else { panic!("expected {code}, but it worked") };
    let text = error.to_string();
    assert_eq!(error.code(), code, "{text}");
    for part in parts {
        assert!(text.contains(part), "expected `{part}`: {text}");
    }
    error
}
