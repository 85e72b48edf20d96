//! The meaning of every operation, in plain Rust. `dot` and `matmul` take most of the time and are compiled once more
//! for wider vectors in [`simd`](super::simd); the source is the same and nothing is reassociated or fused, so every
//! instruction set gives the same bits.
//!
//! Sums of squares and the delta rule's sums are taken in f64: the gated norm after a DeltaNet layer divides by a root
//! mean square that is tiny for some tokens, and enlarges whatever rounding went before it.

use crate::tensor::{GROUP, Layout, decode_row};

/// Partial sums of a dot product, and how many products are added up before one goes to its sum.
pub const LANES: usize = 16;
const DEPTH: usize = 4;
const BLOCK: usize = LANES * DEPTH;

/// `Σ a[i] · b[i]` in the canonical order: in blocks of 64, short ones filled up with zeros. In a block, lane l takes
/// `(p[l] + p[l + 32]) + (p[l + 16] + p[l + 48])`; the lanes' sums are then added pairwise, halves first.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<BLOCK>();
    let (b_blocks, b_tail) = b.as_chunks::<BLOCK>();
    for (x, y) in a_blocks.iter().zip(b_blocks) {
        add_block(&mut acc, x, y);
    }
    if !a_tail.is_empty() {
        let (mut x, mut y) = ([0.0; BLOCK], [0.0; BLOCK]);
        x[..a_tail.len()].copy_from_slice(a_tail);
        y[..b_tail.len()].copy_from_slice(b_tail);
        add_block(&mut acc, &x, &y);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] += acc[l + width];
        }
        width /= 2;
    }
    acc[0]
}

#[inline(always)]
fn add_block(acc: &mut [f32; LANES], x: &[f32; BLOCK], y: &[f32; BLOCK]) {
    for l in 0..LANES {
        let p = |n: usize| x[n * LANES + l] * y[n * LANES + l];
        acc[l] += (p(0) + p(2)) + (p(1) + p(3));
    }
}

/// `Σ a[i] · b[i]` in f64, one after the other.
fn dot_f64(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Which rows a matrix multiplies: input row `x` of the input to output row `y` of the output.
#[derive(Debug, Clone, Copy)]
pub struct RowPair {
    pub x: usize,
    pub y: usize,
}

/// A buffer of rows `stride` apart.
#[derive(Debug, Clone, Copy)]
pub struct RowsRef<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

/// What becomes of the products of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Then<'a> {
    pub bias: Option<&'a [f32]>,
    pub scale: f32,
    pub add: bool,
}

impl Then<'_> {
    /// They are stored as they are.
    pub const STORE: Then<'static> = Then { bias: None, scale: 1.0, add: false };
}

/// `y[pair.y] (+)= scale · (W · x[pair.x] + bias)` for every pair. `weights` holds the matrix as `layout` says. Each row of W is decoded
/// once for all pairs; `scratch` is at least `layout.cols` long, padded to whole groups.
#[inline(always)]
pub fn matmul(
    layout: &Layout,
    weights: &[u8],
    x: RowsRef<'_>,
    y: &mut [f32],
    y_stride: usize,
    pairs: &[RowPair],
    then: Then<'_>,
    scratch: &mut [f32],
) {
    let row_of_w = &mut scratch[..layout.cols];
    for n in 0..layout.rows {
        decode_row(layout, weights, n, row_of_w);
        for pair in pairs {
            let at = pair.x * x.stride;
            let sum = dot(row_of_w, &x.data[at..at + layout.cols]);
            let sum = then.scale * then.bias.map_or(sum, |bias| sum + bias[n]);
            let out = &mut y[pair.y * y_stride + n];
            *out = if then.add { *out + sum } else { sum };
        }
    }
}

/// Length of the scratch row that [`matmul`] needs for any of `layouts`.
pub fn scratch_len(layouts: impl Iterator<Item = Layout>) -> usize {
    layouts.map(|l| l.cols.next_multiple_of(GROUP)).max().unwrap_or(0)
}

pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `ln(1 + e^x)`, linear above 20 as the reference has it.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1pf(libm::expf(x)) }
}

/// `y = x · rsqrt(mean(x²) + eps) · w`.
pub fn rms_norm(x: &[f32], w: Option<&[f32]>, eps: f32, y: &mut [f32]) {
    let inv = 1.0 / (dot_f64(x, x) as f32 / x.len() as f32 + eps).sqrt();
    match w {
        Some(w) => y.iter_mut().zip(x).zip(w).for_each(|((y, x), w)| *y = x * inv * w),
        None => y.iter_mut().zip(x).for_each(|(y, x)| *y = x * inv),
    }
}

/// One token of the causal depthwise convolution; `state` holds the `kernel − 1` inputs before it, oldest first, and is
/// moved on by one.
pub fn conv_silu(x: &[f32], w: &[f32], state: &mut [f32], y: &mut [f32]) {
    let channels = x.len();
    let kernel = w.len() / channels;
    for c in 0..channels {
        let w = &w[c * kernel..(c + 1) * kernel];
        let mut sum = 0.0;
        for j in 0..kernel - 1 {
            sum += w[j] * state[j * channels + c];
        }
        y[c] = silu(sum + w[kernel - 1] * x[c]);
    }
    if kernel > 1 {
        state.copy_within(channels.., 0);
        state[(kernel - 2) * channels..].copy_from_slice(x);
    }
}

/// Columns of the state that [`delta_rule`] works on at a time, so that their sums stay in registers or close by.
const DELTA_COLUMNS: usize = 32;

/// One token of one head of the gated delta rule. `state` is `[key_dim, value_dim]`; q and k are as projected.
/// `decay` multiplies the state S, `beta` the correction d:
///
/// `S ← decay · S`, `d = beta · (v − Sᵀk)`, `S ← S + k dᵀ`, `y = Sᵀq`, with unit k, unit q over √key_dim,
/// where the last is taken as `Sᵀq` of the S before the correction and `(q·k) · d`, in one pass over it.
pub fn delta_rule(q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, state: &mut [f32], y: &mut [f32]) {
    let unit = |x: &[f32]| 1.0 / (dot_f64(x, x) as f32 + 1e-6).sqrt();
    let (q_unit, k_unit, q_scale) = (unit(q), unit(k), 1.0 / (q.len() as f32).sqrt());
    let qk = || q.iter().map(|q| q * q_unit * q_scale).zip(k.iter().map(|k| k * k_unit));
    let q_dot_k = qk().map(|(q, k)| f64::from(q) * f64::from(k)).sum::<f64>() as f32;
    let width = v.len();
    for (n, (y, v)) in y.chunks_mut(DELTA_COLUMNS).zip(v.chunks(DELTA_COLUMNS)).enumerate() {
        let columns = n * DELTA_COLUMNS..n * DELTA_COLUMNS + v.len();
        let (mut by_k, mut by_q) = ([0.0f64; DELTA_COLUMNS], [0.0f64; DELTA_COLUMNS]);
        for (row, (q, k)) in state.chunks_exact_mut(width).zip(qk()) {
            for (s, (by_k, by_q)) in row[columns.clone()].iter_mut().zip(by_k.iter_mut().zip(&mut by_q)) {
                *s *= decay;
                *by_k += f64::from(*s) * f64::from(k);
                *by_q += f64::from(*s) * f64::from(q);
            }
        }
        let mut correction = [0.0f32; DELTA_COLUMNS];
        for (((y, v), d), (by_k, by_q)) in y.iter_mut().zip(v).zip(&mut correction).zip(by_k.iter().zip(&by_q)) {
            *d = beta * (v - *by_k as f32);
            *y = *by_q as f32 + q_dot_k * *d;
        }
        for (row, (_, k)) in state.chunks_exact_mut(width).zip(qk()) {
            row[columns.clone()].iter_mut().zip(&correction).for_each(|(s, d)| *s += k * d);
        }
    }
}

/// Rotates the first `2 · cos.len()` elements of a head, pairing element `i` with `i + cos.len()`.
pub fn rope(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, rest) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// One query head over the keys and values of positions `0 .. scores.len()`, each `stride` apart from `offset` on.
pub fn attend(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    stride: usize,
    offset: usize,
    scale: f32,
    scores: &mut [f32],
    y: &mut [f32],
) {
    let dim = q.len();
    let at = |p: usize| p * stride + offset..p * stride + offset + dim;
    let mut max = f32::MIN;
    for (p, s) in scores.iter_mut().enumerate() {
        *s = dot(q, &keys[at(p)]) * scale;
        max = max.max(*s);
    }
    let mut sum = 0.0;
    y.fill(0.0);
    for (p, s) in scores.iter().enumerate() {
        let e = libm::expf(s - max);
        sum += e;
        y.iter_mut().zip(&values[at(p)]).for_each(|(y, v)| *y += e * v);
    }
    y.iter_mut().for_each(|y| *y /= sum);
}

/// The `ids.len()` largest of `logits` by descending value, ties to the lower index, and their softmax over all
/// logits, divided by their sum if `renormalise`.
pub fn top_k(logits: &[f32], renormalise: bool, ids: &mut [u32], weights: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f32 = logits.iter().map(|l| libm::expf(l - max)).sum();
    for (rank, weight) in weights.iter_mut().enumerate() {
        let (chosen, rest) = ids.split_at_mut(rank);
        let mut best: Option<usize> = None;
        for (i, l) in logits.iter().enumerate() {
            if !chosen.contains(&(i as u32)) && best.is_none_or(|b| *l > logits[b]) {
                best = Some(i);
            }
        }
        let best = best.expect("there are at least top_k experts");
        rest[0] = best as u32;
        *weight = libm::expf(logits[best] - max) / total;
    }
    if renormalise {
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
    }
}
