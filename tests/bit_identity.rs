//! The same bits under every schedule: pool size, prefill chunk, batch width, on both backends and in f16.

mod common;

use std::path::{Path, PathBuf};

use common::{engine, f16_engine};
use outrider::engine::{BackendChoice, Engine, Options, Want};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(name)
}

fn checkpoint() -> PathBuf {
    golden("qwen3_5_moe/b")
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 2 + (i * 97 + i * i * 31) % 250).collect()
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
    of_model(checkpoint(), backend)
}

fn of_model(model: PathBuf, backend: BackendChoice) -> impl Fn(&Options) -> Option<Engine> {
    move |options| Some(engine(&model, &Options { backend, ..options.clone() }))
}

fn f16(options: &Options) -> Option<Engine> {
    f16_engine(&checkpoint(), options)
}

/// Tokens of a pass at most; none for automatic.
type Chunks<'a> = &'a [Option<usize>];

fn same_bits(load: impl Fn(&Options) -> Option<Engine>, chunks: Chunks, slots: &[usize], widths: &[&[usize]]) {
    let prompt = tokens(41);
    let mut expected: Option<Vec<u32>> = None;
    for &chunk in chunks {
        for &max_slots in slots {
            let options = Options { chunk, max_slots: Some(max_slots), ..Options::default() };
            let Some(mut engine) = load(&options) else { return };
            // Automatically there is room for the whole prompt.
            assert!(chunk.map_or(engine.chunk() > prompt.len(), |chunk| engine.chunk() == chunk));
            assert_eq!(engine.slots(), max_slots);
            for widths in widths {
                let bits = run(&mut engine, &prompt, widths);
                match &expected {
                    None => expected = Some(bits),
                    Some(e) => assert!(*e == bits, "chunk {chunk:?}, {max_slots} slots, passes of {widths:?} differ"),
                }
            }
        }
    }
}

// The model has 5 layers of 11 experts and chooses 3: 3 slots are the smallest ring, 7 a larger one, 15 and 20 shares
// of 3 and 4 a layer, 55 everything.

#[test]
fn cpu_is_bit_identical_under_every_schedule() {
    same_bits(
        of(BackendChoice::Cpu),
        &[Some(1), Some(7), Some(32), None],
        &[3, 7, 15, 20, 55],
        &[&[64], &[1], &[5, 2, 9]],
    );
}

#[test]
fn gpu_is_bit_identical_under_every_schedule() {
    same_bits(of(BackendChoice::Gpu), &[None, Some(5)], &[55, 3, 15], &[&[64], &[5, 2, 9]]);
}

/// Architectures with what the first has not: windows, sinks and biases; short convolutions, a sigmoid router and a dense
/// layer; latent attention; no experts at all. With their `top_k`, the layers that route, and the experts of each.
const OTHERS: [(&str, [usize; 3]); 4] =
    [("gpt_oss/a", [2, 4, 8]), ("lfm2_moe/a", [2, 3, 8]), ("deepseek_v2/a", [2, 2, 8]), ("llama/a", [0, 0, 0])];

#[test]
fn other_architectures_are_bit_identical_on_the_cpu() {
    for (name, [top_k, layers, experts]) in OTHERS {
        let all = layers * experts;
        let slots = [top_k, all.min(top_k * layers + 1), all];
        let load = of_model(golden(name), BackendChoice::Cpu);
        same_bits(load, &[None, Some(7)], &slots, &[&[64], &[1], &[5, 2, 9]]);
    }
}

#[test]
fn other_architectures_are_bit_identical_on_the_gpu() {
    for (name, [top_k, layers, experts]) in OTHERS {
        let load = of_model(golden(name), BackendChoice::Gpu);
        same_bits(load, &[None, Some(5)], &[layers * experts, top_k], &[&[64], &[5, 2, 9]]);
    }
}

#[test]
fn f16_is_bit_identical_under_every_schedule() {
    same_bits(f16, &[None, Some(5)], &[55, 3], &[&[17]]);
}

#[test]
#[ignore = "large matrix"]
fn gpu_is_bit_identical_under_every_schedule_in_full() {
    same_bits(
        of(BackendChoice::Gpu),
        &[Some(1), Some(7), Some(32), None],
        &[3, 7, 15, 20, 55],
        &[&[64], &[1], &[5, 2, 9]],
    );
}

#[test]
#[ignore = "large matrix"]
fn f16_is_bit_identical_under_every_schedule_in_full() {
    same_bits(f16, &[Some(1), Some(7), Some(32), None], &[3, 7, 15, 20, 55], &[&[64], &[1], &[5, 2, 9]]);
}

/// A long prompt of the bundled model: the logits after it and after a few more tokens, however it is cut, with a small
/// pool and with a large one.
fn same_bits_of_a_long_prompt(backend: BackendChoice, chunks: Chunks, slots: &[usize]) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/concierge");
    let prompt: Vec<u32> = (0..300).map(|i| 3 + (i * 131 + i * i * 17) % 4000).collect();
    let mut expected: Option<Vec<Vec<u32>>> = None;
    for &chunk in chunks {
        for &max_slots in slots {
            let options = Options { backend, chunk, max_slots: Some(max_slots), ..Options::default() };
            let mut engine = engine(&model, &options);
            let mut last = |tokens: &[u32]| {
                let logits = pollster::block_on(engine.forward(tokens, Want::Last, None)).unwrap();
                logits.iter().map(|l| l.to_bits()).collect::<Vec<u32>>()
            };
            let bits = vec![last(&prompt), last(&[7]), last(&[1000])];
            assert!(*expected.get_or_insert(bits.clone()) == bits, "chunk {chunk:?}, {max_slots} slots differ");
        }
    }
}

#[test]
fn cpu_reads_long_prompts_alike() {
    same_bits_of_a_long_prompt(BackendChoice::Cpu, &[None, Some(64), Some(256), Some(299)], &[10, 128, 512]);
}

#[test]
fn gpu_reads_long_prompts_alike() {
    same_bits_of_a_long_prompt(BackendChoice::Gpu, &[None, Some(64)], &[10, 512]);
}
