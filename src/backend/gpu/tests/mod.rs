//! Every kernel against its twin on the CPU backend, over shapes that are no multiple of anything; the same bits whatever
//! the batches, the slots, the waves and the windows; and what the backend promises about memory, commands and errors.

mod ahead;
mod backend;
mod experts;
mod f16;
mod model;
mod ops;

use std::sync::OnceLock;

use pollster::block_on;
use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg32;

use super::program::Program;
use super::tuning::Tuning;
use super::{Device, Gpu};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::model::plan::{
    Buf, Builder, Heads, Layer, Limits, Map, Op, Pairs, Plan, State, StateSpec, Weight, WeightKind,
};
use crate::tensor::{DType, Layout, encode};

/// The adapter all tests share. Without one the tests fail, unless `OUTRIDER_SKIP_GPU_TESTS` says that is expected.
fn device() -> Option<Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    DEVICE
        .get_or_init(|| match block_on(Device::request(true)) {
            Ok(device) => Some(device),
            Err(e) if std::env::var_os("OUTRIDER_SKIP_GPU_TESTS").is_some() => {
                eprintln!("GPU tests skipped: {e}");
                None
            }
            Err(e) => panic!("{e}. Install a Vulkan driver (Mesa's lavapipe will do) or set OUTRIDER_SKIP_GPU_TESTS"),
        })
        .clone()
}

/// Kernels as CPU adapters run them, and as GPUs do.
fn tunings() -> [Tuning; 2] {
    [Tuning::new(true), Tuning::new(false)]
}

/// The same in f16; none, loudly, on an adapter without it.
fn f16_tunings() -> Vec<Tuning> {
    match device() {
        Some(device) if device.f16() => tunings().map(|tuning| Tuning { f16: true, ..tuning }).to_vec(),
        Some(_) if std::env::var_os("OUTRIDER_REQUIRE_GPU").is_some() => panic!("this adapter has no f16"),
        Some(device) => {
            eprintln!("f16 tests skipped: {} has none", device.detail());
            Vec::new()
        }
        None => Vec::new(),
    }
}

fn gpu(tuning: Tuning, case: &Case) -> Option<Gpu> {
    let mut device = device()?;
    device.tuning = tuning;
    let program = Program::new(&case.plan, &case.limits, &tuning).unwrap();
    let mut gpu = block_on(Gpu::with_program(device, case.plan.clone(), case.limits, program)).unwrap();
    case.load(&mut gpu);
    Some(gpu)
}

fn cpu(case: &Case) -> Cpu {
    let mut cpu = Cpu::new(case.plan.clone(), case.limits);
    case.load(&mut cpu);
    cpu
}

/// Random values around zero.
struct Random(Pcg32);

impl Random {
    fn new(seed: u64) -> Random {
        Random(Pcg32::seed_from_u64(seed))
    }

    fn value(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.next_u32() as usize % n
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// A plan of one layer whose inputs are slices of the residual, with its weights.
struct Case {
    plan: Plan,
    limits: Limits,
    weights: Vec<Vec<u8>>,
}

impl Case {
    fn load(&self, backend: &mut impl Backend) {
        for (i, bytes) in self.weights.iter().enumerate() {
            block_on(backend.write_weight(Weight(i), bytes)).unwrap();
        }
        backend.reset().unwrap();
    }
}

/// Makes a [`Case`].
struct CaseBuilder {
    parts: Builder,
    random: Random,
    weights: Vec<Vec<u8>>,
    residual: Buf,
    inputs: usize,
    mix: Vec<Op>,
}

impl CaseBuilder {
    fn new(seed: u64) -> CaseBuilder {
        let mut parts = Builder::default();
        let residual = parts.buffer("residual", 0);
        let random = Random::new(seed);
        CaseBuilder { parts, random, weights: Vec::new(), residual, inputs: 0, mix: Vec::new() }
    }

    fn buffer(&mut self, width: usize) -> Buf {
        self.parts.buffer("buffer", width)
    }

    /// A buffer that holds the next `width` columns of the residual.
    fn input(&mut self, width: usize) -> Buf {
        let y = self.buffer(width);
        let x = Heads { buf: self.residual, offset: self.inputs, stride: width };
        self.inputs += width;
        self.mix.push(copy_columns(x, y, width));
        y
    }

    /// A random vector around `mean`.
    fn vector(&mut self, len: usize, mean: f32) -> Weight {
        let values: Vec<f32> = self.random.values(len).iter().map(|v| mean + 0.5 * v).collect();
        self.weights.push(bytemuck::pod_collect_to_vec(&values));
        self.parts.vector("vector", len, Map::Identity)
    }

    fn matrix(&mut self, dtype: DType, rows: usize, cols: usize) -> Weight {
        let values = self.random.values(rows * cols);
        self.matrix_of(dtype, rows, cols, &values)
    }

    fn matrix_of(&mut self, dtype: DType, rows: usize, cols: usize, values: &[f32]) -> Weight {
        let layout = Layout::new(dtype, rows, cols);
        self.weights.push(encode(&layout, "matrix", values).unwrap());
        self.parts.matrix("matrix", layout)
    }

    fn state(&mut self, spec: StateSpec) -> State {
        self.parts.state(spec)
    }

    /// The case whose residual ends as the rows of `y`, padded with zeros.
    fn finish(mut self, y: Buf, limits: Limits) -> Case {
        let width = self.parts.buffers[y.0].width;
        let hidden = self.inputs.max(width);
        let mut identity = vec![0.0; hidden * width];
        for i in 0..width {
            identity[i * width + i] = 1.0;
        }
        let w = self.matrix_of(DType::F32, hidden, width, &identity);
        self.mix.push(Op::matmul(y, w, self.residual));
        let layer = Layer { mix: self.mix, ..Layer::default() };
        let plan = plan(self.parts, self.residual, hidden, vec![layer]);
        Case { plan, limits, weights: self.weights }
    }
}

/// Copies columns to the whole of a buffer.
fn copy_columns(x: Heads, y: Buf, dim: usize) -> Op {
    let y = Heads::side_by_side(y, dim);
    Op::HeadNormRope { x, w: None, y, heads: 1, dim, rotary: 0, pairs: Pairs::Halves, eps: 0.0 }
}

/// A plan without a head worth the name.
fn plan(mut parts: Builder, residual: Buf, hidden: usize, layers: Vec<Layer>) -> Plan {
    parts.buffers[residual.0].width = hidden;
    let head_in = parts.head_buffer("head in", hidden);
    let head_normed = parts.head_buffer("head normed", hidden);
    let logits = parts.head_buffer("logits", 1);
    Plan {
        hidden,
        vocab: 1,
        buffers: parts.buffers,
        weights: parts.weights,
        states: parts.states,
        residual,
        inv_freq: Vec::new(),
        rope_scale: 1.0,
        embedding_scale: 1.0,
        rope: None,
        layers,
        expert: None,
        foreseen: None,
        head_in,
        head_normed,
        head: Vec::new(),
        logits,
    }
}

fn limits(context: usize, chunk: usize) -> Limits {
    Limits { context, chunk, head_rows: 1, slots: 0, checkpoints: 0 }
}

/// Runs the case's layer over consecutive batches and returns all rows of the residual.
fn run(backend: &mut impl Backend, rows: &[f32], batches: &[usize]) -> Vec<f32> {
    let hidden = backend.plan().hidden;
    let (mut pos, mut out) = (0, Vec::new());
    for m in batches {
        backend.begin(pos, &rows[pos * hidden..(pos + m) * hidden]).unwrap();
        block_on(backend.mix(0, 0..0)).unwrap();
        out.extend(block_on(backend.residual()).unwrap());
        pos += m;
    }
    out
}

/// Cuts `total` tokens into batches of at most `most`.
fn batches(random: &mut Random, total: usize, most: usize) -> Vec<usize> {
    let mut left = total;
    let mut out = Vec::new();
    while left > 0 {
        let m = 1 + random.below(most.min(left));
        out.push(m);
        left -= m;
    }
    out
}

/// Largest difference relative to the largest magnitude.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().chain(b).all(|v| v.is_finite()));
    let scale = a.iter().fold(1e-3, |s: f32, v| s.max(v.abs()));
    a.iter().zip(b).fold(0.0, |d: f32, (a, b)| d.max((a - b).abs())) / scale
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Holds a case against the CPU backend, and against itself in other batches, one token at a time among them.
fn check(case: &Case, tokens: usize, seed: u64, tolerance: f32) {
    check_on(&tunings(), case, tokens, seed, |_, expected, got| {
        let d = distance(expected, got);
        assert!(d <= tolerance, "{d} off the CPU");
    });
}

/// The same with a comparison of one's own, which is told the input rows, what the CPU made of them and what the GPU did.
fn check_on(tunings: &[Tuning], case: &Case, tokens: usize, seed: u64, compare: impl Fn(&[f32], &[f32], &[f32])) {
    let mut random = Random::new(seed);
    let rows = random.values(tokens * case.plan.hidden);
    let chunk = case.limits.chunk;
    let whole: Vec<usize> = (0..tokens).step_by(chunk).map(|at| chunk.min(tokens - at)).collect();
    let expected = run(&mut cpu(case), &rows, &whole);
    for tuning in tunings {
        let Some(mut gpu) = gpu(*tuning, case) else { return };
        let got = run(&mut gpu, &rows, &whole);
        compare(&rows, &expected, &got);
        for batches in [vec![1; tokens], batches(&mut random, tokens, chunk)] {
            gpu.reset().unwrap();
            assert!(same_bits(&got, &run(&mut gpu, &rows, &batches)), "other bits in batches {batches:?}");
        }
    }
}
