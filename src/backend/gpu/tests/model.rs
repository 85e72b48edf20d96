//! A whole model, random and small, with every kind of layer.

use std::collections::HashSet;

use serde_json::json;

use super::*;
use crate::backend::{Place, Routing, WorkItem};
use crate::error::Result;
use crate::flash::Bytes;
use crate::model::{Stored, Tensors, plan_for};

pub(super) const HIDDEN: usize = 72;
pub(super) const EXPERTS: usize = 10;
pub(super) const TOP_K: usize = 3;
const VOCAB: usize = 150;
const KEYS: usize = 3 * 12;
const VALUES: usize = 6 * 20;
const CHANNELS: usize = 2 * KEYS + VALUES;

/// Shapes of a checkpoint that exists only here.
struct Shapes(DType);

impl Tensors for Shapes {
    fn core(&self, name: &str) -> Result<Stored> {
        let matrix = |rows, cols| Stored::Matrix(Layout::new(self.0, rows, cols));
        let (rest, last) = name.trim_end_matches(".weight").rsplit_once('.').unwrap_or(("", name));
        Ok(match (last, rest.rsplit('.').next().unwrap_or_default()) {
            ("norm", "linear_attn") => Stored::Vector(20),
            ("input_layernorm" | "post_attention_layernorm" | "norm", _) => Stored::Vector(HIDDEN),
            ("q_norm" | "k_norm", _) => Stored::Vector(20),
            ("A_log" | "dt_bias", _) => Stored::Vector(6),
            ("conv1d", _) => Stored::Vector(CHANNELS * 4),
            ("in_proj_qkv", _) => matrix(CHANNELS, HIDDEN),
            ("in_proj_z", _) => matrix(VALUES, HIDDEN),
            ("in_proj_a" | "in_proj_b", _) => matrix(6, HIDDEN),
            ("out_proj", _) => matrix(HIDDEN, VALUES),
            ("q_proj", _) => matrix(2 * 4 * 20, HIDDEN),
            ("k_proj" | "v_proj", _) => matrix(2 * 20, HIDDEN),
            ("o_proj", _) => matrix(HIDDEN, 4 * 20),
            ("gate", _) => matrix(EXPERTS, HIDDEN),
            ("gate_proj" | "up_proj", _) => matrix(24, HIDDEN),
            ("down_proj", _) => matrix(HIDDEN, 24),
            ("shared_expert_gate", _) => matrix(1, HIDDEN),
            _ => matrix(VOCAB, HIDDEN),
        })
    }

    fn expert_dtype(&self) -> Option<DType> {
        Some(self.0)
    }
}

fn model_plan(dtype: DType) -> Plan {
    let config = json!({
        "model_type": "qwen3_5_moe_text", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    });
    plan_for(&config, &Shapes(dtype)).unwrap()
}

/// A matrix that keeps the size of what it multiplies.
fn random_matrix(layout: Layout, random: &mut Random) -> Vec<u8> {
    let scale = 1.7 / (layout.cols as f32).sqrt();
    let values: Vec<f32> = random.values(layout.rows * layout.cols).iter().map(|v| v * scale).collect();
    encode(&layout, "matrix", &values).unwrap()
}

pub(super) struct Model {
    pub(super) case: Case,
    /// Extents by layer and expert.
    pub(super) experts: Vec<Vec<Bytes>>,
}

pub(super) fn model(dtype: DType, limits: Limits) -> Model {
    let plan = model_plan(dtype);
    let mut random = Random::new(3);
    let weight = |kind, random: &mut Random| match kind {
        WeightKind::Matrix(layout) => random_matrix(layout, random),
        WeightKind::Vector { len, map } => {
            let mean = if map == Map::NegExp { -0.5 } else { 0.5 };
            bytemuck::pod_collect_to_vec(&random.values(len).iter().map(|v| mean + 0.4 * v).collect::<Vec<_>>())
        }
    };
    let weights = plan.weights.iter().map(|w| weight(w.kind, &mut random)).collect();
    let shape = plan.expert.unwrap();
    let mut extent = || {
        let parts = [shape.gate, shape.up, shape.down].map(|l| random_matrix(l, &mut random));
        Bytes::Owned(parts.concat())
    };
    let experts = plan.layers.iter().map(|_| (0..EXPERTS).map(|_| extent()).collect()).collect();
    Model { case: Case { plan, limits, weights }, experts }
}

/// Runs a layer's experts, in waves of as many as there are slots, and finishes it.
pub(super) fn run_all(backend: &mut impl Backend, model: &Model, layer: usize, routing: &Routing) {
    let needed: Vec<u32> = routing.ids.iter().copied().collect::<HashSet<_>>().into_iter().collect();
    for wave in needed.chunks(model.case.limits.slots) {
        for (slot, expert) in wave.iter().enumerate() {
            let place = Place { layer, expert: *expert as usize };
            backend.write_slot(slot, place, &model.experts[layer][place.expert]).unwrap();
        }
        let item = |(i, id): (usize, &u32)| {
            let slot = wave.iter().position(|w| w == id)? as u32;
            Some(WorkItem { row: (i / TOP_K) as u32, rank: (i % TOP_K) as u32, slot })
        };
        let items: Vec<WorkItem> = routing.ids.iter().enumerate().filter_map(item).collect();
        backend.run_experts(layer, &items).unwrap();
    }
    backend.finish_layer(layer).unwrap();
}

/// Logits of every token, and the experts chosen.
pub(super) fn forward(
    backend: &mut impl Backend,
    model: &Model,
    embeddings: &[f32],
    chunk: usize,
) -> (Vec<f32>, Vec<u32>) {
    let (mut pos, mut logits, mut ids) = (0, Vec::new(), Vec::new());
    backend.reset().unwrap();
    for rows in embeddings.chunks(chunk * HIDDEN) {
        backend.begin(pos, rows).unwrap();
        for layer in 0..model.experts.len() {
            let routing = block_on(backend.mix(layer, 0..0)).unwrap();
            run_all(backend, model, layer, &routing);
            ids.extend(routing.ids);
        }
        let m = rows.len() / HIDDEN;
        logits.extend(block_on(backend.logits(0..m)).unwrap());
        pos += m;
    }
    (logits, ids)
}

#[test]
fn whole_model() {
    const TOKENS: usize = 11;
    let embeddings = Random::new(4).values(TOKENS * HIDDEN);
    for (dtype, tuning) in [(DType::F32, tunings()[0]), (DType::Q4, tunings()[0]), (DType::Q8, tunings()[1])] {
        let limits = Limits { context: 32, chunk: TOKENS, head_rows: 4, slots: TOP_K, checkpoints: 0 };
        let model = model(dtype, limits);
        let (expected, chosen) = forward(&mut cpu(&model.case), &model, &embeddings, TOKENS);
        let Some(mut gpu) = gpu(tuning, &model.case) else { return };
        let (got, routed) = forward(&mut gpu, &model, &embeddings, TOKENS);
        assert_eq!(chosen, routed, "{dtype}");
        let d = distance(&expected, &got);
        assert!(d < 1e-5, "{dtype}: {d} off the CPU");
        assert_eq!(gpu.workspace_bytes(), Gpu::workspace_for(&model.case.plan, &limits).unwrap());
        for chunk in [1, 4] {
            assert!(same_bits(&got, &forward(&mut gpu, &model, &embeddings, chunk).0), "{dtype} in chunks of {chunk}");
        }
        let wide = Model { case: Case { limits: Limits { slots: EXPERTS, ..limits }, ..model.case }, ..model };
        let Some(mut roomy) = super::gpu(tuning, &wide.case) else { return };
        assert!(same_bits(&got, &forward(&mut roomy, &wide, &embeddings, 5).0), "{dtype} with all experts resident");
    }
}

/// Writes every shader the model takes, expanded, to `target/wgsl` for other WGSL compilers to read, such as `tint`:
/// `cargo test -- --ignored expanded_shaders`.
#[test]
#[ignore = "writes files"]
fn expanded_shaders() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("target/wgsl");
    std::fs::create_dir_all(&dir).unwrap();
    let limits = Limits { context: 32, chunk: 4, head_rows: 1, slots: 4, checkpoints: 0 };
    let mut variants = HashSet::new();
    for dtype in DType::ALL {
        for tuning in tunings().into_iter().chain(f16_tunings()) {
            let program = Program::new(&model_plan(dtype), &limits, &tuning).unwrap();
            for layer in program.layers {
                variants.extend(layer.mix.into_iter().chain(layer.shared).map(|s| s.variant));
                variants.extend(layer.experts.into_iter().flatten().chain(layer.combine).map(|s| s.variant));
            }
        }
    }
    for (i, variant) in variants.iter().enumerate() {
        std::fs::write(dir.join(format!("{}-{i}.wgsl", variant.kernel)), variant.source()).unwrap();
    }
}
