//! The matrix kernels in f16 against their twins.
//!
//! WGSL rounds to either neighbour, which is at most u = 2⁻¹⁰ of the value, and may flush what is below 2⁻¹⁴. An addend
//! w · x is rounded three times, w, x and the product, so that it is at most 3u · |w · x| off to first order, and by
//! flushing at most 2⁻¹⁴ · (|w| + |x| + 1). Sums are f32, whose own rounding is a thousandth of that, as are the terms of
//! second order: [`SLACK`] covers both.

use proptest::prelude::*;

use super::experts::{MoeCase, Rule, Shape, check_moe, moe_case};
use super::*;
use crate::backend::Routing;
use crate::flash::Bytes;
use crate::tensor::decode_row;

const U: f64 = 1.0 / 1024.0;
const FLUSHED: f64 = 1.0 / 16384.0;
const SLACK: f64 = 1.01;

fn rows_of(layout: &Layout, bytes: &[u8]) -> Vec<Vec<f32>> {
    let row = |r| {
        let mut out = vec![0.0; layout.cols];
        decode_row(layout, bytes, r, &mut out);
        out
    };
    (0..layout.rows).map(row).collect()
}

/// How far w · x may be off in f16, if x itself is off by `dx`.
fn dot_error(w: &[f32], x: &[f64], dx: &[f64]) -> f64 {
    let addend = |((w, x), dx): ((&f32, &f64), &f64)| {
        let (w, x) = (f64::from(w.abs()), x.abs() + dx);
        SLACK * (3.0 * U * w * x + FLUSHED * (w + x + 1.0)) + w * dx
    };
    w.iter().zip(x).zip(dx).map(addend).sum()
}

fn dot(w: &[f32], x: &[f64]) -> f64 {
    w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
}

fn assert_within(expected: f32, got: f32, bound: f64, what: &str) {
    assert!(got.is_finite() && f64::from((expected - got).abs()) <= bound, "{what}: {got}, not {expected} ± {bound}");
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

fn matmul_case(seed: u64, dtype: DType, [rows, cols]: [usize; 2], add: bool) -> (Case, Weight) {
    let mut c = CaseBuilder::new(seed);
    let x = c.input(cols);
    let y = if add { c.input(rows) } else { c.buffer(rows) };
    let w = c.matrix(dtype, rows, cols);
    c.mix.push(Op::MatMul { x, w, bias: None, y, scale: 1.0, add });
    (c.finish(y, limits(64, 7)), w)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn matmul(
        seed: u64, rows in 1usize..150, cols in 1usize..200, tokens in 1usize..12,
        dtype in proptest::sample::select(&DType::ALL), add: bool,
    ) {
        let (case, w) = matmul_case(seed, dtype, [rows, cols], add);
        let matrix = rows_of(&Layout::new(dtype, rows, cols), &case.weights[w.0]);
        let hidden = case.plan.hidden;
        check_on(&f16_tunings(), &case, tokens, seed, |inputs, expected, got| {
            for (token, input) in inputs.chunks(hidden).enumerate() {
                let x = as_f64(&input[..cols]);
                for (row, w) in matrix.iter().enumerate() {
                    let at = token * hidden + row;
                    let error = dot_error(w, &x, &vec![0.0; cols]);
                    // The identity that brings y to the residual rounds it once more.
                    let bound = error + U * (f64::from(expected[at].abs()) + error) + FLUSHED;
                    assert_within(expected[at], got[at], bound, "y");
                }
            }
        });
    }

    #[test]
    fn experts(
        seed: u64, dtype in proptest::sample::select(&DType::ALL), experts in 1usize..20, top_k in 1usize..6,
        extra in 0usize..60, width in 1usize..50, tokens in 1usize..9, slots in 1usize..12, lanes: bool,
    ) {
        let (top_k, hidden) = (top_k.min(experts), experts + extra);
        let (renormalise, shared, chunk) = (true, false, tokens);
        let rule = if renormalise { Rule::Renormalised } else { Rule::Softmax };
        let shape = Shape { dtype, experts, top_k, hidden, width, rule, shared, chunk, slots };
        if let Some(tuning) = f16_tunings().get(usize::from(lanes)) {
            check_moe(seed, shape, tokens, *tuning, experts_within);
        }
    }
}

/// Carries the bound through silu(gate · x) · (up · x), down and the weighted sum.
fn experts_within(moe: &MoeCase, rows: &[f32], routing: &Routing, expected: &[f32], got: &[f32]) {
    let shape = moe.case.plan.expert.unwrap();
    let hidden = moe.case.plan.hidden;
    let matrices: Vec<[Vec<Vec<f32>>; 3]> = moe
        .experts
        .iter()
        .map(|extent| {
            let Bytes::Owned(bytes) = extent;
            let [gate, up, down] = shape.offsets();
            [(shape.gate, gate), (shape.up, up), (shape.down, down)].map(|(l, at)| rows_of(&l, &bytes[at..]))
        })
        .collect();
    for (token, row) in rows.chunks(hidden).enumerate() {
        let (x, exact) = (as_f64(row), vec![0.0; hidden]);
        // f32 rounds the sum and the residual.
        let mut bound = vec![1e-5; hidden];
        for pair in token * routing.top_k..(token + 1) * routing.top_k {
            let [gate, up, down] = &matrices[routing.ids[pair] as usize];
            let inner = |(gate, up): (&Vec<f32>, &Vec<f32>)| {
                let (g, u) = (dot(gate, &x), dot(up, &x));
                let (dg, du) = (dot_error(gate, &x, &exact), dot_error(up, &x, &exact));
                let silu = g / (1.0 + (-g).exp());
                // silu is nowhere steeper than 1.1.
                (silu * u, 1.1 * dg * (u.abs() + du) + silu.abs() * du)
            };
            let (h, dh): (Vec<f64>, Vec<f64>) = gate.iter().zip(up).map(inner).unzip();
            for (bound, down) in bound.iter_mut().zip(down) {
                *bound += f64::from(routing.weights[pair]) * dot_error(down, &h, &dh);
            }
        }
        for (i, bound) in bound.iter().enumerate() {
            let at = token * hidden + i;
            assert_within(expected[at], got[at], *bound, "out");
        }
    }
}

/// Products of one, added up far beyond the integers that f16 holds.
#[test]
fn sums_are_f32() {
    let mut c = CaseBuilder::new(1);
    let (x, y) = (c.input(19_000), c.buffer(1));
    let w = c.matrix_of(DType::F16, 1, 19_000, &[1.0; 19_000]);
    c.mix.push(Op::matmul(x, w, y));
    let case = c.finish(y, limits(1, 1));
    let row: Vec<f32> = (0..19_000).map(|i| if i < 10_000 { 1.0 } else { -1.0 }).collect();
    for tuning in f16_tunings() {
        let Some(mut gpu) = gpu(tuning, &case) else { return };
        assert_eq!(run(&mut gpu, &row, &[1])[0], 1000.0);
    }
}

/// What is beyond the range of f16 is taken as the largest that is within it.
#[test]
fn nothing_overflows() {
    for dtype in DType::ALL {
        let mut c = CaseBuilder::new(1);
        let (x, y) = (c.input(64), c.buffer(2));
        let w = c.matrix_of(dtype, 2, 64, &[[3e4; 64], [-3e4; 64]].concat());
        c.mix.push(Op::matmul(x, w, y));
        let case = c.finish(y, limits(1, 1));
        for tuning in f16_tunings() {
            let Some(mut gpu) = gpu(tuning, &case) else { return };
            // 64 products of 65504, and the identity takes their sum as 8188.
            assert_eq!(run(&mut gpu, &[1e30; 64], &[1])[..2], [8188.0, -8188.0], "{dtype}");
            let once: Vec<f32> = (0..64).map(|i| if i == 40 { 1e-2 } else { 0.0 }).collect();
            let got = run(&mut gpu, &once, &[1]);
            assert!((got[0] - 8e-2).abs() < 1e-4 && got[0] == -got[1], "{dtype}: {got:?}");
        }
    }
}

/// The inner activations of an expert have no bound, and are in range again when `down` reads them.
#[test]
fn experts_do_not_overflow() {
    let shape = Shape {
        dtype: DType::Q8,
        experts: 3,
        top_k: 2,
        hidden: 40,
        width: 33,
        rule: Rule::Renormalised,
        shared: false,
        chunk: 2,
        slots: 3,
    };
    for tuning in f16_tunings() {
        let moe = moe_case(1, shape);
        let Some(mut gpu) = gpu(tuning, &moe.case) else { return };
        let rows = vec![5e4; 2 * 40];
        let (_, out) = super::experts::run_layer(&mut gpu, &moe, &rows, &mut Random::new(1));
        assert!(out.iter().all(|v| v.is_finite()), "{out:?}");
    }
}
