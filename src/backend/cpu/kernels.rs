//! The meaning of every operation, in plain Rust. `dot` and `matmul` take most of the time and are compiled once more
//! for wider vectors in [`simd`](super::simd); the source is the same and nothing is reassociated or fused, so every
//! instruction set gives the same bits.
//!
//! Sums of squares and the delta rule's sums are taken in f64: the gated norm after a DeltaNet layer divides by a root
//! mean square that is tiny for some tokens, and enlarges whatever rounding went before it.

use crate::model::plan::{Glu, Moe, Pairs, Scoring};
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

/// One token of [`GatedConv`](crate::model::plan::Op::GatedConv): `x` is `[b | c | v]`; `state` as for [`conv_silu`].
pub fn gated_conv(x: &[f32], w: &[f32], state: &mut [f32], y: &mut [f32]) {
    let channels = y.len();
    let kernel = w.len() / channels;
    let (b, rest) = x.split_at(channels);
    let (c, v) = rest.split_at(channels);
    for i in 0..channels {
        let w = &w[i * kernel..(i + 1) * kernel];
        let own = b[i] * v[i];
        let mut sum = 0.0;
        for j in 0..kernel - 1 {
            sum += w[j] * state[j * channels + i];
        }
        y[i] = c[i] * (sum + w[kernel - 1] * own);
        // The oldest goes, this one comes.
        for j in 1..kernel {
            let next = if j + 1 < kernel { state[j * channels + i] } else { own };
            state[(j - 1) * channels + i] = next;
        }
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

/// Rotates the first `2 · cos.len()` elements of a head.
pub fn rope(head: &mut [f32], cos: &[f32], sin: &[f32], pairs: Pairs) {
    let half = cos.len();
    for (i, (cos, sin)) in cos.iter().zip(sin).enumerate() {
        let (first, second) = match pairs {
            Pairs::Halves => (i, i + half),
            Pairs::Neighbours => (2 * i, 2 * i + 1),
        };
        let (a, b) = (head[first], head[second]);
        (head[first], head[second]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

/// Where one head's keys or values lie: `stride` from position to position, from `offset` on.
#[derive(Debug, Clone, Copy)]
pub struct Plane<'a> {
    pub data: &'a [f32],
    pub stride: usize,
    pub offset: usize,
}

impl Plane<'_> {
    fn at(&self, position: usize, dim: usize) -> &[f32] {
        &self.data[position * self.stride + self.offset..][..dim]
    }
}

/// One query head over the keys and values of the positions from `first` on, as many as there are `scores`.
pub fn attend(
    q: &[f32],
    keys: Plane,
    values: Plane,
    first: usize,
    scale: f32,
    sink: Option<f32>,
    scores: &mut [f32],
    y: &mut [f32],
) {
    let mut max = sink.unwrap_or(f32::MIN);
    for (p, s) in (first..).zip(scores.iter_mut()) {
        *s = dot(q, keys.at(p, q.len())) * scale;
        max = max.max(*s);
    }
    let mut sum = sink.map_or(0.0, |sink| libm::expf(sink - max));
    let value_dim = y.len();
    y.fill(0.0);
    for (p, s) in (first..).zip(scores.iter()) {
        let e = libm::expf(s - max);
        sum += e;
        y.iter_mut().zip(values.at(p, value_dim)).for_each(|(y, v)| *y += e * v);
    }
    y.iter_mut().for_each(|y| *y /= sum);
}

/// See [`Glu`].
pub fn glu(kind: Glu, gate: f32, up: f32) -> f32 {
    match kind {
        Glu::Silu => silu(gate) * up,
        Glu::Clamped { alpha, limit } => {
            let (gate, up) = (gate.min(limit), up.max(-limit).min(limit));
            gate * sigmoid(alpha * gate) * (up + 1.0)
        }
    }
}

/// One row of [`RouterScores`](crate::model::plan::Op::RouterScores).
pub fn router_scores(
    logits: &[f32],
    scoring: Scoring,
    bias: Option<&[f32]>,
    groups: Option<(usize, usize)>,
    y: &mut [f32],
) {
    for (i, (y, l)) in y.iter_mut().zip(logits).enumerate() {
        let score = if scoring == Scoring::Sigmoid { sigmoid(*l) } else { *l };
        *y = bias.map_or(score, |bias| score + bias[i]);
    }
    let Some((count, kept)) = groups else { return };
    let size = y.len() / count;
    let best: Vec<f32> = y.chunks(size).map(|group| group.iter().copied().fold(f32::MIN, f32::max)).collect();
    let below = y.iter().copied().fold(f32::MAX, f32::min) - 1.0;
    for (group, scores) in y.chunks_mut(size).enumerate() {
        let ahead = |(other, score): (usize, &f32)| *score > best[group] || *score == best[group] && other < group;
        if best.iter().enumerate().filter(|other| ahead(*other)).count() >= kept {
            scores.fill(below);
        }
    }
}

/// The `ids.len()` largest of `scores` by descending value, ties to the lower index.
pub fn top_k(scores: &[f32], ids: &mut [u32]) {
    for rank in 0..ids.len() {
        let (chosen, rest) = ids.split_at_mut(rank);
        let mut best: Option<usize> = None;
        for (i, s) in scores.iter().enumerate() {
            if !chosen.contains(&(i as u32)) && best.is_none_or(|b| *s > scores[b]) {
                best = Some(i);
            }
        }
        rest[0] = best.expect("there are at least top_k experts") as u32;
    }
}

/// Puts what was chosen by other scores in the order of its logits, ties to the lower index.
pub fn by_logit(logits: &[f32], ids: &mut [u32]) {
    // Zeros of both signs are one.
    let logit = |id: &u32| logits[*id as usize] + 0.0;
    ids.sort_by(|a, b| logit(b).total_cmp(&logit(a)).then(a.cmp(b)));
}

/// The weights of the experts that were chosen, see [`Moe`].
pub fn router_weights(logits: &[f32], moe: &Moe, ids: &[u32], weights: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let total = match moe.scoring {
        Scoring::Softmax => logits.iter().map(|l| libm::expf(l - max)).sum(),
        Scoring::Sigmoid => 1.0,
    };
    for (weight, id) in weights.iter_mut().zip(ids) {
        let logit = logits[*id as usize];
        *weight = match moe.scoring {
            Scoring::Softmax => libm::expf(logit - max) / total,
            Scoring::Sigmoid => sigmoid(logit),
        };
    }
    if let Some(epsilon) = moe.renormalise {
        let sum = weights.iter().sum::<f32>() + epsilon;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= moe.weight_scale);
}
