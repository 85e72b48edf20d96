//! Routing, experts, combine.

use proptest::prelude::*;

use super::*;
use crate::backend::{Place, Routing, WorkItem};
use crate::flash::Bytes;
use crate::model::plan::{ExpertShape, Glu, Moe, Scoring, SharedExpert};

/// A layer that routes by its first inputs, with the bytes of its experts.
pub(super) struct MoeCase {
    pub(super) case: Case,
    pub(super) experts: Vec<Bytes>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) dtype: DType,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) hidden: usize,
    pub(super) width: usize,
    pub(super) rule: Rule,
    pub(super) shared: bool,
    pub(super) chunk: usize,
    pub(super) slots: usize,
}

/// How a layer routes and what its experts are, among what architectures have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// Softmax over all experts, or over the chosen.
    Softmax,
    Renormalised,
    /// σ with a bias for the choice, an ungated shared expert, all scaled.
    Sigmoid,
    /// The best of groups, if there are groups.
    Grouped,
    /// Renormalised, with biases and clamped activations in the experts.
    Biased,
}

pub(super) fn rules() -> impl Strategy<Value = Rule> {
    proptest::sample::select(&[Rule::Softmax, Rule::Renormalised, Rule::Sigmoid, Rule::Grouped, Rule::Biased])
}

pub(super) fn moe_case(seed: u64, s: Shape) -> MoeCase {
    let mut c = CaseBuilder::new(seed);
    // The residual is wide enough for the logits; what the experts read and write is its first `hidden` columns.
    let logits = c.input(s.experts);
    let x = c.buffer(s.hidden);
    let shared = s.shared.then(|| (c.buffer(s.hidden), c.buffer(1)));
    let heads = Heads { buf: c.residual, offset: 0, stride: 0 };
    c.mix.push(copy_columns(heads, x, s.hidden));
    let mut shared_ops = Vec::new();
    if let Some((out, gate)) = shared {
        let (w, g) = (c.matrix(DType::F32, s.hidden, s.hidden), c.matrix(DType::F32, 1, s.hidden));
        shared_ops.push(Op::matmul(x, w, out));
        shared_ops.push(Op::matmul(x, g, gate));
    }
    let bias = (s.rule == Rule::Sigmoid).then(|| c.vector(s.experts, 0.0));
    let halves = (s.experts.is_multiple_of(2) && s.top_k <= s.experts / 2).then_some((2, 1));
    let (scoring, groups) = match s.rule {
        Rule::Sigmoid => (Scoring::Sigmoid, None),
        Rule::Grouped => (Scoring::Softmax, halves),
        _ => (Scoring::Softmax, None),
    };
    let mut scores = logits;
    if bias.is_some() || groups.is_some() {
        scores = c.buffer(s.experts);
        c.mix.push(Op::RouterScores { logits, y: scores, scoring, bias, groups });
    }
    let shape = ExpertShape::new(s.dtype, s.hidden, s.width, s.rule == Rule::Biased);
    let mut expert = || {
        let parts = [shape.gate, shape.up, shape.down];
        let mut bytes: Vec<u8> =
            parts.iter().flat_map(|l| encode(l, "", &c.random.values(l.rows * l.cols)).unwrap()).collect();
        for (at, rows) in shape.bias_offsets().into_iter().flatten().zip([s.width, s.width, s.hidden]) {
            bytes.resize(at, 0);
            bytes.extend(bytemuck::cast_slice(&c.random.values(rows)));
        }
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        Bytes::Owned(bytes)
    };
    let experts = (0..s.experts).map(|_| expert()).collect();
    let shared = shared.map(|(out, gate)| SharedExpert { out, gate: (s.rule != Rule::Sigmoid).then_some(gate) });
    let moe = Moe {
        logits,
        scores,
        x,
        y: c.residual,
        experts: s.experts,
        top_k: s.top_k,
        scoring,
        renormalise: match s.rule {
            Rule::Softmax | Rule::Grouped => None,
            Rule::Sigmoid => Some(1e-6),
            Rule::Renormalised | Rule::Biased => Some(0.0),
        },
        weight_scale: if s.rule == Rule::Grouped { 1.5 } else { 1.0 },
        glu: if s.rule == Rule::Biased { Glu::Clamped { alpha: 1.7, limit: 0.8 } } else { Glu::Silu },
        shared,
        scale: if s.rule == Rule::Sigmoid { 0.5 } else { 1.0 },
    };
    let layer = Layer { mix: c.mix, shared: shared_ops, moe: Some(moe), ..Layer::default() };
    let limits = Limits { context: 64, chunk: s.chunk, head_rows: 1, slots: s.slots, checkpoints: 0 };
    let mut plan = plan(c.parts, c.residual, s.hidden, vec![layer]);
    plan.expert = Some(shape);
    MoeCase { case: Case { plan, limits, weights: c.weights }, experts }
}

/// Runs the layer; every wave of experts that fits the slots goes to slots picked at random.
pub(super) fn run_layer(
    backend: &mut impl Backend,
    moe: &MoeCase,
    rows: &[f32],
    random: &mut Random,
) -> (Routing, Vec<f32>) {
    backend.begin(0, rows).unwrap();
    let routing = block_on(backend.mix(0, 0..0)).unwrap();
    let mut needed = routing.ids.clone();
    needed.sort_unstable();
    needed.dedup();
    shuffle(&mut needed, random);
    let slots = moe.case.limits.slots;
    for wave in needed.chunks(1 + random.below(slots)) {
        let mut places: Vec<u32> = (0..slots as u32).collect();
        shuffle(&mut places, random);
        for (expert, slot) in wave.iter().zip(&places) {
            let place = Place { layer: 0, expert: *expert as usize };
            backend.write_slot(*slot as usize, place, &moe.experts[*expert as usize]).unwrap();
        }
        let mut items: Vec<WorkItem> = Vec::new();
        for (i, id) in routing.ids.iter().enumerate() {
            if let Some(at) = wave.iter().position(|w| w == id) {
                let (row, rank) = ((i / routing.top_k) as u32, (i % routing.top_k) as u32);
                items.push(WorkItem { row, rank, slot: places[at] });
            }
        }
        shuffle(&mut items, random);
        let cut = random.below(items.len() + 1);
        backend.run_experts(0, &items[..cut]).unwrap();
        backend.run_experts(0, &items[cut..]).unwrap();
    }
    backend.finish_layer(0).unwrap();
    (routing, block_on(backend.residual()).unwrap())
}

fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for i in (1..items.len()).rev() {
        items.swap(i, random.below(i + 1));
    }
}

/// Within rounding of f32.
fn close(_: &MoeCase, _: &[f32], _: &Routing, expected: &[f32], got: &[f32]) {
    let d = distance(expected, got);
    assert!(d <= 2e-6, "{d} off the CPU");
}

/// `compare` is told the case, the input rows, their routing, what the CPU made of them and what the GPU did.
pub(super) fn check_moe(
    seed: u64,
    shape: Shape,
    tokens: usize,
    tuning: Tuning,
    compare: impl Fn(&MoeCase, &[f32], &Routing, &[f32], &[f32]),
) {
    let moe = moe_case(seed, shape);
    let mut random = Random::new(seed ^ 1);
    let hidden = moe.case.plan.hidden;
    // Coarse values, so that logits tie.
    let rows: Vec<f32> = random.values(tokens * hidden).iter().map(|v| (v * 6.0).round() / 6.0).collect();
    let (routing, expected) = run_layer(&mut cpu(&moe.case), &moe, &rows, &mut random);
    let Some(mut gpu) = gpu(tuning, &moe.case) else { return };
    let (got_routing, got) = run_layer(&mut gpu, &moe, &rows, &mut random);
    assert_eq!(routing.ids, got_routing.ids);
    let d = distance(&routing.weights, &got_routing.weights);
    assert!(d <= 2e-6, "weights {d} off the CPU");
    compare(&moe, &rows, &routing, &expected, &got);
    let (again, other) = run_layer(&mut gpu, &moe, &rows, &mut random);
    assert!(again == got_routing && same_bits(&got, &other), "other bits in other slots and waves");
    let one_by_one: Vec<f32> =
        rows.chunks(hidden).flat_map(|row| run_layer(&mut gpu, &moe, row, &mut random).1).collect();
    assert!(same_bits(&got, &one_by_one), "other bits one token at a time");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn experts(
        seed: u64, dtype in proptest::sample::select(&DType::ALL), experts in 1usize..20, top_k in 1usize..6,
        extra in 0usize..60, width in 1usize..50, rule in rules(), shared: bool, tokens in 1usize..9,
        slots in 1usize..12, lanes: bool,
    ) {
        let (top_k, hidden) = (top_k.min(experts), experts + extra);
        let shape = Shape { dtype, experts, top_k, hidden, width, rule, shared, chunk: tokens, slots };
        check_moe(seed, shape, tokens, Tuning::new(lanes), close);
    }
}

/// Slots spread over several arenas, items over several tiles.
#[test]
fn experts_in_arenas() {
    let shape = Shape {
        dtype: DType::Q8,
        experts: 30,
        top_k: 3,
        hidden: 33,
        width: 20,
        rule: Rule::Renormalised,
        shared: true,
        chunk: 40,
        slots: 35,
    };
    for tuning in tunings() {
        let tuning = Tuning { max_binding: 16 * 4096, ..tuning };
        let case = moe_case(1, shape).case;
        let program = Program::new(&case.plan, &case.limits, &tuning).unwrap();
        assert_eq!(program.pool.arenas.len(), 3);
        check_moe(1, shape, 40, tuning, close);
    }
}

/// Two submissions a layer where everything is resident: up to the router, and the shared expert. The experts' commands go
/// along with the next layer's.
#[test]
fn submissions_of_a_layer() {
    let shape = Shape {
        dtype: DType::Q4,
        experts: 4,
        top_k: 2,
        hidden: 32,
        width: 32,
        rule: Rule::Renormalised,
        shared: true,
        chunk: 1,
        slots: 4,
    };
    let moe = moe_case(1, shape);
    let Some(mut gpu) = gpu(Tuning::new(true), &moe.case) else { return };
    for (slot, expert) in moe.experts.iter().enumerate() {
        gpu.write_slot(slot, Place { layer: 0, expert: slot }, expert).unwrap();
    }
    gpu.begin(0, &[0.5; 32]).unwrap();
    let layer = |gpu: &mut Gpu| {
        let routing = block_on(gpu.mix(0, 0..0)).unwrap();
        let item = |(rank, id): (usize, &u32)| WorkItem { row: 0, rank: rank as u32, slot: *id };
        gpu.run_experts(0, &routing.ids.iter().enumerate().map(item).collect::<Vec<_>>()).unwrap();
        gpu.finish_layer(0).unwrap();
        gpu.stats()
    };
    let before = layer(&mut gpu);
    let after = layer(&mut gpu);
    assert_eq!(after.submissions - before.submissions, 2);
    assert_eq!(after.readbacks - before.readbacks, 1);
    assert_eq!(after.readback_bytes - before.readback_bytes, 2 * 8);
}
