//! The meaning of every operation, in plain Rust. `dot` and `matmul` take most of the time and are compiled once more
//! for wider vectors in [`simd`](super::simd); the source is the same and nothing is reassociated or fused, so every
//! instruction set gives the same bits.

use crate::tensor::{GROUP, Layout, decode_row};

/// Partial sums of a dot product: element `i` goes to lane `i % LANES`; lanes are then added pairwise, halves first.
pub const LANES: usize = 16;

/// `Σ a[i] · b[i]` in the canonical order.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<LANES>();
    let (b_blocks, b_tail) = b.as_chunks::<LANES>();
    for (x, y) in a_blocks.iter().zip(b_blocks) {
        for l in 0..LANES {
            acc[l] += x[l] * y[l];
        }
    }
    for (l, (x, y)) in a_tail.iter().zip(b_tail).enumerate() {
        acc[l] += x * y;
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

/// `y[pair.y] (+)= W · x[pair.x]` for every pair. `weights` holds the matrix as `layout` says. Each row of W is decoded
/// once for all pairs; `scratch` is at least `layout.cols` long, padded to whole groups.
#[inline(always)]
pub fn matmul(
    layout: &Layout,
    weights: &[u8],
    x: RowsRef<'_>,
    y: &mut [f32],
    y_stride: usize,
    pairs: &[RowPair],
    add: bool,
    scratch: &mut [f32],
) {
    let row_of_w = &mut scratch[..layout.cols];
    for n in 0..layout.rows {
        decode_row(layout, weights, n, row_of_w);
        for pair in pairs {
            let at = pair.x * x.stride;
            let sum = dot(row_of_w, &x.data[at..at + layout.cols]);
            let out = &mut y[pair.y * y_stride + n];
            *out = if add { *out + sum } else { sum };
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
    let inv = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
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

/// One token of one head of the gated delta rule. `state` is `[key_dim, value_dim]`; q and k are as projected.
/// `decay` multiplies the state, `beta` the correction.
pub fn delta_rule(q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, state: &mut [f32], y: &mut [f32]) {
    let unit = |x: &[f32]| 1.0 / (dot(x, x) + 1e-6).sqrt();
    let (q_unit, k_unit) = (unit(q) * (1.0 / (q.len() as f32).sqrt()), unit(k));
    let width = v.len();
    y.fill(0.0);
    for (row, k) in state.chunks_exact_mut(width).zip(k) {
        let k = k * k_unit;
        for (s, y) in row.iter_mut().zip(&mut *y) {
            *s *= decay;
            *y += *s * k;
        }
    }
    // y holds what the state recalls for k; it becomes the correction.
    y.iter_mut().zip(v).for_each(|(y, v)| *y = beta * (v - *y));
    for (row, k) in state.chunks_exact_mut(width).zip(k) {
        let k = k * k_unit;
        row.iter_mut().zip(&*y).for_each(|(s, d)| *s += k * d);
    }
    y.fill(0.0);
    for (row, q) in state.chunks_exact(width).zip(q) {
        let q = q * q_unit;
        row.iter().zip(&mut *y).for_each(|(s, y)| *y += s * q);
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
