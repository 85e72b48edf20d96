//! One operation at a time.

use proptest::prelude::*;

use super::*;
use crate::model::plan::{Heads, Scoring};

const TOLERANCE: f32 = 2e-6;

fn cases() -> ProptestConfig {
    ProptestConfig { cases: 12, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() }
}

fn dtypes() -> impl Strategy<Value = DType> {
    proptest::sample::select(&DType::ALL)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn rms_norm(seed: u64, part in 1usize..90, groups in 1usize..5, tokens in 1usize..9, gated: bool) {
        let mut c = CaseBuilder::new(seed);
        let (x, gate) = (c.input(part * groups), c.input(part * groups));
        let (w, y, eps) = (c.vector(part, 1.0), c.buffer(part * groups), 1e-6);
        c.mix.push(match gated {
            true => Op::GatedRmsNorm { x, gate, w, y, groups, eps },
            false => Op::RmsNorm { x, w, y, groups, eps },
        });
        check(&c.finish(y, limits(64, 5)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn matmul(
        seed: u64, rows in 1usize..150, cols in 1usize..200, tokens in 1usize..12, dtype in dtypes(), add: bool,
        bias: bool, scaled: bool,
    ) {
        let mut c = CaseBuilder::new(seed);
        let x = c.input(cols);
        let y = if add { c.input(rows) } else { c.buffer(rows) };
        let w = c.matrix(dtype, rows, cols);
        let bias = bias.then(|| c.vector(rows, 0.5));
        c.mix.push(Op::MatMul { x, w, bias, y, scale: if scaled { 0.3 } else { 1.0 }, add });
        check(&c.finish(y, limits(64, 7)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn conv_silu(seed: u64, channels in 1usize..150, kernel in 1usize..6, tokens in 1usize..12) {
        let mut c = CaseBuilder::new(seed);
        let (x, y) = (c.input(channels), c.buffer(channels));
        let (w, state) = (c.vector(channels * kernel, 0.0), c.state(StateSpec::Conv { channels, kernel }));
        c.mix.push(Op::ConvSilu { x, w, y, state });
        check(&c.finish(y, limits(64, 6)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn delta_net(
        seed: u64, key_heads in 1usize..4, per_key in 1usize..4, key_dim in 1usize..40, value_dim in 1usize..40,
        tokens in 1usize..12,
    ) {
        let mut c = CaseBuilder::new(seed);
        let heads = key_heads * per_key;
        let qkv = c.input(2 * key_heads * key_dim + heads * value_dim);
        let (a, b) = (c.input(heads), c.input(heads));
        let (rate, dt_bias, y) = (c.vector(heads, -1.0), c.vector(heads, 0.0), c.buffer(heads * value_dim));
        let state = c.state(StateSpec::Delta { heads, key_dim, value_dim });
        c.mix.push(Op::DeltaNet { qkv, a, b, rate, dt_bias, y, state, key_heads });
        check(&c.finish(y, limits(64, 6)), tokens, seed, 10.0 * TOLERANCE);
    }

    #[test]
    fn head_norm_rope(
        seed: u64, heads in 1usize..5, dim in 1usize..70, half in 0usize..35, gap in 0usize..9, norm: bool,
        pairs in proptest::sample::select(&[Pairs::Halves, Pairs::Neighbours]), tokens in 1usize..9,
    ) {
        let half = half.min(dim / 2);
        let mut c = CaseBuilder::new(seed);
        let (x, y) = (c.input(1 + heads * (dim + gap)), c.input(2 + heads * (dim + 1)));
        let w = norm.then(|| c.vector(dim, 1.0));
        // All heads from one place, now and then; and what lies between the heads of y stays.
        let x = Heads { buf: x, offset: 1, stride: if gap == 0 { 0 } else { dim + gap } };
        let to = Heads { buf: y, offset: 2, stride: dim + 1 };
        c.mix.push(Op::HeadNormRope { x, w, y: to, heads, dim, rotary: 2 * half, pairs, eps: 1e-6 });
        let rope = (half > 0).then(|| c.parts.buffer("rope", 2 * half));
        let inv_freq = (0..half).map(|i| 1.0 / (1.0 + 3.0 * i as f32)).collect();
        let mut case = c.finish(y, limits(64, 4));
        (case.plan.rope, case.plan.inv_freq, case.plan.rope_scale) = (rope, inv_freq, 1.25);
        check(&case, tokens, seed, TOLERANCE);
    }

    #[test]
    fn attention(
        seed: u64, kv_heads in 1usize..4, per_kv in 1usize..4, dim in 1usize..40, value_dim in 1usize..40, gated: bool,
        sinks: bool, window in prop_oneof![Just(None), (1usize..9).prop_map(Some)], tokens in 1usize..12,
    ) {
        let shape = AttentionShape { kv_heads, per_kv, dim, value_dim, gated, sinks, window };
        check(&attention_case(seed, shape, limits(64, 7)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn clamp(seed: u64, width in 1usize..150, tokens in 1usize..9) {
        let mut c = CaseBuilder::new(seed);
        let x = c.input(width);
        c.mix.push(Op::Clamp { x, limit: 0.4 });
        check(&c.finish(x, limits(64, 5)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn gated_conv(seed: u64, channels in 1usize..150, kernel in 1usize..6, tokens in 1usize..12) {
        let mut c = CaseBuilder::new(seed);
        let (x, y) = (c.input(3 * channels), c.buffer(channels));
        let (w, state) = (c.vector(channels * kernel, 0.0), c.state(StateSpec::Conv { channels, kernel }));
        c.mix.push(Op::GatedConv { x, w, y, state });
        check(&c.finish(y, limits(64, 6)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn router_scores(
        seed: u64, groups in 1usize..6, size in 1usize..30, kept in 1usize..6, biased: bool, sigmoid: bool,
        tokens in 1usize..9,
    ) {
        let mut c = CaseBuilder::new(seed);
        let (logits, y) = (c.input(groups * size), c.buffer(groups * size));
        let bias = biased.then(|| c.vector(groups * size, 0.0));
        let scoring = if sigmoid { Scoring::Sigmoid } else { Scoring::Softmax };
        let groups = (groups > 1).then_some((groups, kept.min(groups)));
        c.mix.push(Op::RouterScores { logits, y, scoring, bias, groups });
        check(&c.finish(y, limits(64, 5)), tokens, seed, TOLERANCE);
    }

    #[test]
    fn silu_mul(seed: u64, width in 1usize..200, tokens in 1usize..9) {
        let mut c = CaseBuilder::new(seed);
        let (gate, up, y) = (c.input(width), c.input(width), c.buffer(width));
        c.mix.push(Op::SiluMul { gate, up, y });
        check(&c.finish(y, limits(64, 5)), tokens, seed, TOLERANCE);
    }
}

struct AttentionShape {
    kv_heads: usize,
    per_kv: usize,
    dim: usize,
    value_dim: usize,
    gated: bool,
    sinks: bool,
    window: Option<usize>,
}

fn attention_case(seed: u64, shape: AttentionShape, limits: Limits) -> Case {
    let AttentionShape { kv_heads, per_kv, dim, value_dim, gated, sinks, window } = shape;
    let mut c = CaseBuilder::new(seed);
    let heads = kv_heads * per_kv;
    let q = c.input(heads * dim);
    let (k, v) = (c.input(kv_heads * dim), c.input(kv_heads * value_dim));
    let gate = gated.then(|| Heads { buf: c.input(heads * (value_dim + 3)), offset: 2, stride: value_dim + 3 });
    let sinks = sinks.then(|| c.vector(heads, 1.0));
    let state = c.state(StateSpec::Kv { heads: kv_heads, dim, value_dim });
    let y = c.buffer(heads * value_dim);
    c.mix.push(Op::KvAppend { k, v, state });
    c.mix.push(Op::Attention { q, gate, sinks, y, state, heads, scale: 2.0, window });
    c.finish(y, limits)
}

/// Several blocks of keys, in batches that straddle their borders, and with scratch space for one token only.
fn check_blocks(window: Option<usize>, sinks: bool) {
    let shape = AttentionShape { kv_heads: 2, per_kv: 3, dim: 20, value_dim: 12, gated: true, sinks, window };
    let case = attention_case(7, shape, limits(300, 90));
    check(&case, 290, 11, TOLERANCE);
    let rows = Random::new(5).values(290 * case.plan.hidden);
    let sizes = [90, 60, 90, 50];
    for tuning in tunings() {
        let Some(mut roomy) = gpu(tuning, &case) else { return };
        let Some(mut tight) = gpu(Tuning { attention_scratch: 0, ..tuning }, &case) else { return };
        assert!(roomy.workspace_bytes() > tight.workspace_bytes());
        assert!(same_bits(&run(&mut roomy, &rows, &sizes), &run(&mut tight, &rows, &sizes)));
    }
}

#[test]
fn attention_over_blocks() {
    check_blocks(None, false);
}

/// Windows that begin within a block, and at its first key.
#[test]
fn attention_over_a_window() {
    check_blocks(Some(128), true);
    check_blocks(Some(17), false);
}

/// A matrix that is larger than a binding gives the same bits as one that is not.
#[test]
fn matmul_in_windows() {
    for dtype in DType::ALL {
        let mut c = CaseBuilder::new(3);
        let (x, y) = (c.input(170), c.buffer(1333));
        let (w, bias) = (c.matrix(dtype, 1333, 170), Some(c.vector(1333, 0.5)));
        c.mix.push(Op::MatMul { x, w, bias, y, scale: 1.0, add: false });
        let case = c.finish(y, limits(16, 5));
        let rows = Random::new(8).values(5 * case.plan.hidden);
        for tuning in tunings() {
            let Some(mut whole) = gpu(tuning, &case) else { return };
            let Some(mut cut) = gpu(Tuning { max_binding: 64_000, ..tuning }, &case) else { return };
            assert!(cut.program.weights[w.0].len() > 2, "{dtype}");
            assert!(same_bits(&run(&mut whole, &rows, &[5]), &run(&mut cut, &rows, &[5])), "{dtype}");
        }
    }
}

/// Scales of small weights are subnormal as f16, which a GPU's own conversion may flush to zero.
#[test]
fn tiny_weights_are_not_lost() {
    for dtype in [DType::Q8, DType::Q4] {
        let mut c = CaseBuilder::new(3);
        let (x, y) = (c.input(64), c.buffer(20));
        let values: Vec<f32> = c.random.values(20 * 64).iter().map(|v| v * 2e-3).collect();
        let w = c.matrix_of(dtype, 20, 64, &values);
        c.mix.push(Op::matmul(x, w, y));
        check(&c.finish(y, limits(16, 4)), 4, 9, TOLERANCE);
    }
}
