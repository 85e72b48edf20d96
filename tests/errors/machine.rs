//! What the machine does not have: a GPU, space, a place to write to.

use std::process::{Command, Stdio};

use outrider::engine::{BackendChoice, Options};
use outrider::flash::MemoryFlash;

use crate::common::{self, outrider, repository};
use crate::{assert_error, small};

/// The Vulkan loader is told of no driver; other systems have no such switch.
#[cfg(target_os = "linux")]
#[test]
fn without_a_gpu_the_cpu_runs_and_says_so() {
    let model = repository("models/concierge");
    let chat = |backend: &str| {
        let args = [
            "chat",
            model.to_str().unwrap(),
            "hi",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
            "--cold",
            "--backend",
            backend,
        ];
        let mut command = Command::new(env!("CARGO_BIN_EXE_outrider"));
        command
            .args(args)
            .env("VK_DRIVER_FILES", "/dev/null")
            .env("VK_ICD_FILENAMES", "/dev/null")
            .stdin(Stdio::null());
        let out = command.output().unwrap();
        (out.status.code(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, stdout, stderr) = chat("gpu");
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{stderr}");
    assert!(stderr.contains("no usable GPU") && stderr.contains("use the CPU backend"), "{stderr}");
    let (code, stdout, stderr) = chat("auto");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("note: running on the CPU"), "{stderr}");
    assert_eq!(stdout, chat("cpu").1);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said_to_be_full() {
    let model = repository(common::GOLDEN_CHECKPOINTS[0]);
    let out = outrider(&["logits", model.to_str().unwrap(), "--backend", "cpu", "--tokens", "1", "--out", "/dev/full"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(out.stderr.contains("storage is full; free some space"), "{}", out.stderr);
}

#[test]
fn a_place_that_cannot_be_written_to_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let model = repository(common::GOLDEN_CHECKPOINTS[0]);
    for target in [file.clone(), file.join("pack")] {
        let args = ["pack", model.to_str().unwrap(), "-o", target.to_str().unwrap(), "--quant", "q4", "--force"];
        let out = outrider(&args);
        assert_eq!(out.status.code(), Some(1));
        assert!(out.stdout.is_empty() && out.stderr.contains(file.to_str().unwrap()), "{}", out.stderr);
    }
    let missing = dir.path().join("none/out.safetensors");
    let args =
        ["logits", model.to_str().unwrap(), "--backend", "cpu", "--tokens", "1", "--out", missing.to_str().unwrap()];
    let out = outrider(&args);
    assert!(out.status.code() == Some(1) && out.stderr.contains("none/out.safetensors"), "{}", out.stderr);
    assert_eq!(std::fs::read(&file).unwrap(), b"x");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Odd limits are made to fit, and a context larger than the model's is the model's.
#[test]
fn limits_are_made_to_fit() {
    let load = |options: Options| common::load(MemoryFlash::new(small()), &options);
    let cpu = || common::on(BackendChoice::Cpu);
    let engine =
        load(Options { context: Some(usize::MAX), chunk: Some(usize::MAX), max_slots: Some(0), ..cpu() }).unwrap();
    assert_eq!((engine.context(), engine.slots()), (512, 2));
    assert!((1..=512).contains(&engine.chunk()));
    let engine = load(Options { context: Some(0), chunk: Some(0), max_slots: Some(usize::MAX), ..cpu() }).unwrap();
    assert_eq!((engine.context(), engine.chunk(), engine.slots()), (1, 1, 32));
    assert_error(load(Options { budget: Some(0), ..cpu() }).map(|_| ()), "budget", &["0 bytes"]);
    assert!(load(Options { budget: Some(u64::MAX), ..cpu() }).is_ok());
}

#[test]
fn f16_without_a_gpu_is_a_notice() {
    let load = |f16| {
        let options = Options { f16, ..common::on(BackendChoice::Cpu) };
        common::load(MemoryFlash::new(small()), &options).unwrap()
    };
    let engine = load(true);
    assert!(matches!(engine.notices(), [notice] if notice.contains("f32")), "{:?}", engine.notices());
    assert!(load(false).notices().is_empty());
}
