//! The runtime against Hugging Face transformers, in float32, on both backends: logits, hidden states, routing, greedy
//! tokens.

mod common;

use std::path::{Path, PathBuf};

use common::{Golden, engine, greedy, max_difference};
use outrider::engine::{BackendChoice, Options, Probe, Want};

fn golden_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden").join(name)
}

/// `smallest_gap` is what the reference's two best logits differ by at least, over all greedy tokens, for those tokens
/// to be compared.
fn check(checkpoint: &Path, golden: &Path, backend: BackendChoice, tolerance: f32, smallest_gap: f32) {
    let golden = Golden::open(golden);
    let options = Options { backend, ..Options::default() };
    let mut engine = engine(checkpoint, &options);
    let layers = engine.plan().layers.len();
    let mut compared = 0;
    for prompt in 0..golden.prompts() {
        let ids = golden.ids(prompt);
        let mut probe = Probe::default();
        engine.reset().unwrap();
        let logits = pollster::block_on(engine.forward(&ids, Want::All, Some(&mut probe))).unwrap();
        let off = max_difference(&logits, &golden.floats(&format!("logits.{prompt}")));
        assert!(off <= tolerance, "logits of prompt {prompt} are off by {off:e}");
        // The residual stream is not normalised, so its rows are held against their largest value.
        let hidden = golden.floats(&format!("hidden.{prompt}"));
        let width = engine.plan().hidden;
        for (row, expected) in probe.hidden.concat().chunks(width).zip(hidden.chunks(width)) {
            let scale = expected.iter().fold(1.0f32, |m, h| m.max(h.abs()));
            let off = max_difference(row, expected) / scale;
            assert!(off <= tolerance, "a hidden state of prompt {prompt} is off by {off:e}");
        }
        for layer in 0..layers {
            if engine.plan().layers[layer].moe.is_none() {
                assert!(!golden.has(&format!("topk.{prompt}.{layer}")), "layer {layer} routes in the reference");
                assert!(probe.ids[layer].is_empty() && probe.weights[layer].is_empty());
                continue;
            }
            let ids = golden.ints(&format!("topk.{prompt}.{layer}"));
            assert_eq!(probe.ids[layer], ids, "experts of layer {layer}, prompt {prompt}");
            let off = max_difference(&probe.weights[layer], &golden.floats(&format!("weights.{prompt}.{layer}")));
            assert!(off <= tolerance, "weights of layer {layer}, prompt {prompt} are off by {off:e}");
        }
        let expected = golden.ints(&format!("greedy.{prompt}"));
        let (tokens, gap) = greedy(&mut engine, &ids, expected.len());
        if gap > smallest_gap {
            assert_eq!(tokens, expected, "greedy tokens of prompt {prompt}");
            compared += 1;
        }
    }
    assert!(compared > 0, "no prompt has a margin over {smallest_gap}");
}

fn on_cpu(name: &str) {
    let dir = golden_dir(name);
    check(&dir, &dir.join("golden.safetensors"), BackendChoice::Cpu, 2e-4, 0.0);
}

fn on_gpu(name: &str) {
    let dir = golden_dir(name);
    check(&dir, &dir.join("golden.safetensors"), BackendChoice::Gpu, 2e-3, 1e-2);
}

macro_rules! goldens {
    ($($test:ident: $name:literal,)*) => {
        mod cpu_matches_the_reference {
            $(#[test] fn $test() { super::on_cpu($name); })*
        }
        mod gpu_matches_the_reference {
            $(#[test] fn $test() { super::on_gpu($name); })*
        }
    };
}

goldens! {
    llama_a: "llama/a",
    qwen3_a: "qwen3/a",
    olmoe_a: "olmoe/a",
    qwen3_next_a: "qwen3_next/a",
    granitemoe_a: "granitemoe/a",
    gpt_oss_a: "gpt_oss/a",
    lfm2_moe_a: "lfm2_moe/a",
    deepseek_v2_a: "deepseek_v2/a",
    qwen3_5_moe_a: "qwen3_5_moe/a",
    qwen3_5_moe_b: "qwen3_5_moe/b",
    qwen3_moe_a: "qwen3_moe/a",
    qwen3_moe_b: "qwen3_moe/b",
}

/// The trained model's float16 checkpoint is too large to keep beside the sources.
#[test]
#[ignore = "needs OUTRIDER_CONCIERGE (checkpoint directory) and OUTRIDER_CONCIERGE_GOLDEN (safetensors file)"]
fn trained_model_matches_the_reference() {
    let dir = PathBuf::from(std::env::var("OUTRIDER_CONCIERGE").expect("OUTRIDER_CONCIERGE is set"));
    let golden = PathBuf::from(std::env::var("OUTRIDER_CONCIERGE_GOLDEN").expect("OUTRIDER_CONCIERGE_GOLDEN is set"));
    check(&dir, &golden, BackendChoice::Cpu, 2e-4, 0.0);
    check(&dir, &golden, BackendChoice::Gpu, 2e-3, 1e-2);
}
