//! GGUF files: as llama.cpp's tools write them, against what transformers computes on their weights in float32; and as
//! made from a checkpoint, against the checkpoint.

#[path = "../common/checkpoints.rs"]
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/gguf.rs"]
mod gguf;

#[path = "../common/http.rs"]
mod http;

mod cli;
mod converted;
mod tokenizer;

use std::path::Path;

use common::{Golden, engine, forward, greedy, max_difference, on, repository};
use outrider::engine::BackendChoice;

/// Logits and greedy tokens on the CPU, of weights as they are in the file.
fn check(file: &Path, golden: &Path) {
    let golden = Golden::open(golden);
    let mut engine = engine(file, &on(BackendChoice::Cpu));
    let ids = golden.ints("ids");
    let (logits, _) = forward(&mut engine, &ids);
    let off = max_difference(&logits, &golden.floats("logits"));
    println!("{}: logits are off by {off:e}", file.display());
    assert!(off <= 2e-4, "{}: logits are off by {off:e}", file.display());
    let expected = golden.ints("greedy");
    assert_eq!(greedy(&mut engine, &ids, expected.len()).0, expected, "{}", file.display());
}

#[test]
fn files_compute_what_the_reference_does() {
    let dir = repository("tests/data/gguf");
    for name in ["qwen3_5_moe-q4_k_m", "qwen3_moe-iq4_xs"] {
        check(&dir.join(format!("{name}.gguf")), &dir.join(format!("{name}.golden.safetensors")));
    }
}

/// The same of every file of a directory, where there are too many to keep beside the sources.
#[test]
#[ignore = "needs OUTRIDER_GGUF (a directory with NAME.gguf and NAME.golden.safetensors)"]
fn every_file_computes_what_the_reference_does() {
    let dir = std::env::var("OUTRIDER_GGUF").expect("OUTRIDER_GGUF is set");
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == "gguf")).collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        check(&file, &file.with_extension("golden.safetensors"));
    }
}
