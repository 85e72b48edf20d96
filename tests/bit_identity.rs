//! The same bits under every schedule: pool size, prefill chunk, batch width, on both backends and in f16.

mod common;

use std::path::{Path, PathBuf};

use common::{engine, f16_engine};
use outrider::engine::{BackendChoice, Engine, Options, Want};

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/qwen3_5_moe/b")
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 2 + (i * 97 + i * i * 31) % 320).collect()
}

/// Every logit of a prompt and of a few decoded tokens after it, the prompt cut into passes of the given widths.
fn run(engine: &mut Engine, prompt: &[u32], widths: &[usize]) -> Vec<u32> {
    engine.reset().unwrap();
    let mut bits = Vec::new();
    let mut forward = |engine: &mut Engine, tokens: &[u32]| {
        let logits = pollster::block_on(engine.forward(tokens, Want::All, None)).unwrap();
        bits.extend(logits.iter().map(|l| l.to_bits()));
    };
    let mut rest = prompt;
    for width in widths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at((*width).min(rest.len()));
        forward(engine, now);
        rest = later;
    }
    for token in tokens(6) {
        forward(engine, &[token]);
    }
    bits
}

fn of(backend: BackendChoice) -> impl Fn(&Options) -> Option<Engine> {
    move |options| Some(engine(&checkpoint(), &Options { backend, ..options.clone() }))
}

fn f16(options: &Options) -> Option<Engine> {
    f16_engine(&checkpoint(), options)
}

fn same_bits(load: impl Fn(&Options) -> Option<Engine>, chunks: &[usize], slots: &[usize], widths: &[&[usize]]) {
    let prompt = tokens(41);
    let mut expected: Option<Vec<u32>> = None;
    for &chunk in chunks {
        for &max_slots in slots {
            let options = Options { chunk, max_slots: Some(max_slots), ..Options::default() };
            let Some(mut engine) = load(&options) else { return };
            assert_eq!(engine.chunk(), chunk);
            assert_eq!(engine.slots(), max_slots);
            for widths in widths {
                let bits = run(&mut engine, &prompt, widths);
                match &expected {
                    None => expected = Some(bits),
                    Some(e) => assert!(*e == bits, "chunk {chunk}, {max_slots} slots, passes of {widths:?} differ"),
                }
            }
        }
    }
}

// The model has 5 layers of 11 experts and chooses 3: 3 slots are the smallest ring, 7 a larger one, 15 and 20 shares
// of 3 and 4 a layer, 55 everything.

#[test]
fn cpu_is_bit_identical_under_every_schedule() {
    same_bits(of(BackendChoice::Cpu), &[1, 7, 32], &[3, 7, 15, 20, 55], &[&[64], &[1], &[5, 2, 9]]);
}

#[test]
fn gpu_is_bit_identical_under_every_schedule() {
    same_bits(of(BackendChoice::Gpu), &[32, 5], &[55, 3, 15], &[&[64], &[5, 2, 9]]);
}

#[test]
fn f16_is_bit_identical_under_every_schedule() {
    same_bits(f16, &[32, 5], &[55, 3], &[&[17]]);
}

#[test]
#[ignore = "large matrix"]
fn gpu_is_bit_identical_under_every_schedule_in_full() {
    same_bits(of(BackendChoice::Gpu), &[1, 7, 32], &[3, 7, 15, 20, 55], &[&[64], &[1], &[5, 2, 9]]);
}

#[test]
#[ignore = "large matrix"]
fn f16_is_bit_identical_under_every_schedule_in_full() {
    same_bits(f16, &[1, 7, 32], &[3, 7, 15, 20, 55], &[&[64], &[1], &[5, 2, 9]]);
}
