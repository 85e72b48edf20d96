//! The CPU backend: the reference for every kernel, with SIMD for x86-64 and wasm. Its results are the same bits on
//! every instruction set and in wasm.

pub mod kernels;
mod simd;

use std::ops::Range;

use bytemuck::pod_collect_to_vec;
use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, ready};

pub use simd::Simd;

use super::{Backend, Info, Place, Routing, WorkItem, rope_table};
use crate::error::{Error, Result};
use crate::flash::Bytes;
use crate::model::plan::{Buf, Limits, Op, Plan, StateSpec, Weight, WeightKind};
use kernels::{RowPair, RowsRef, Then};

pub struct Cpu {
    plan: Plan,
    limits: Limits,
    simd: Simd,
    buffers: Vec<Vec<f32>>,
    matrices: Vec<Vec<u8>>,
    vectors: Vec<Vec<f32>>,
    states: Vec<Vec<f32>>,
    /// Copies of the states in [`Plan::checkpointed`].
    checkpoints: Vec<Vec<Vec<f32>>>,
    slots: Vec<Vec<u8>>,
    /// Position and number of rows of the pass at hand.
    pos: usize,
    m: usize,
    /// Layers of it that have run `mix`.
    mixed: usize,
    routing: Routing,
    /// Inner activations `[chunk · top_k, width]` twice (gate and up), then outputs `[chunk · top_k, hidden]`.
    expert_gate: Vec<f32>,
    expert_up: Vec<f32>,
    expert_out: Vec<f32>,
    scratch: Vec<f32>,
    scores: Vec<f32>,
}

impl Cpu {
    pub fn new(plan: Plan, limits: Limits) -> Cpu {
        Cpu::with_simd(plan, limits, Simd::detect())
    }

    pub fn with_simd(plan: Plan, limits: Limits, simd: Simd) -> Cpu {
        let buffers = (0..plan.buffers.len()).map(|b| vec![0.0; plan.rows(Buf(b), &limits) * plan.buffers[b].width]);
        let (matrices, vectors) = (vec![Vec::new(); plan.weights.len()], vec![Vec::new(); plan.weights.len()]);
        let places = limits.chunk * plan.top_k();
        let (width, hidden) = plan.expert.map_or((0, 0), |e| (e.gate.rows, e.down.rows));
        let layouts = plan.weights.iter().filter_map(|w| match w.kind {
            WeightKind::Matrix(layout) => Some(layout),
            WeightKind::Vector { .. } => None,
        });
        let layouts = layouts.chain(plan.expert.iter().flat_map(|e| [e.gate, e.up, e.down]));
        Cpu {
            simd,
            buffers: buffers.collect(),
            matrices,
            vectors,
            states: plan.states.iter().map(|s| vec![0.0; s.len(limits.context)]).collect(),
            checkpoints: (0..limits.checkpoints)
                .map(|_| plan.checkpointed().map(|s| vec![0.0; plan.states[s.0].len(0)]).collect())
                .collect(),
            slots: vec![vec![0; plan.expert.map_or(0, |e| e.bytes())]; limits.slots],
            pos: 0,
            m: 0,
            mixed: 0,
            routing: Routing::default(),
            expert_gate: vec![0.0; places * width],
            expert_up: vec![0.0; places * width],
            expert_out: vec![0.0; places * hidden],
            scratch: vec![0.0; kernels::scratch_len(layouts)],
            scores: vec![0.0; limits.context],
            plan,
            limits,
        }
    }

    /// Workspace a CPU backend with these limits allocates, see [`Backend::workspace_bytes`].
    pub fn workspace_for(plan: &Plan, limits: &Limits) -> u64 {
        let rows = (0..plan.buffers.len()).map(|b| plan.rows(Buf(b), limits) * plan.buffers[b].width).sum::<usize>();
        let width = plan.expert.map_or(0, |e| e.gate.rows);
        let experts = limits.chunk * (plan.expert_row_len() + plan.top_k() * width);
        let layouts = plan.weights.iter().filter_map(|w| match w.kind {
            WeightKind::Matrix(layout) => Some(layout),
            WeightKind::Vector { .. } => None,
        });
        let scratch = kernels::scratch_len(layouts.chain(plan.expert.iter().flat_map(|e| [e.gate, e.up, e.down])));
        4 * (rows + experts + scratch + limits.context) as u64
    }

    fn width(&self, buf: Buf) -> usize {
        self.plan.buffers[buf.0].width
    }

    fn run(&mut self, op: &Op, m: usize) {
        match *op {
            Op::RmsNorm { x, w, y, groups, eps } => self.norm(x, None, w, y, groups, eps, m),
            Op::GatedRmsNorm { x, gate, w, y, groups, eps } => self.norm(x, Some(gate), w, y, groups, eps, m),
            Op::MatMul { x, w, bias, y, scale, add } => {
                let WeightKind::Matrix(layout) = self.plan.weights[w.0].kind else { unreachable!("a matrix") };
                let pairs: Vec<RowPair> = (0..m).map(|r| RowPair { x: r, y: r }).collect();
                let (x_width, y_width) = (self.width(x), self.width(y));
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                let x = RowsRef { data: &self.buffers[x.0], stride: x_width };
                let then = Then { bias: bias.map(|b| self.vectors[b.0].as_slice()), scale, add };
                self.simd.matmul(&layout, &self.matrices[w.0], x, &mut out, y_width, &pairs, then, &mut self.scratch);
                self.buffers[y.0] = out;
            }
            Op::ConvSilu { x, w, y, state } => {
                let width = self.width(x);
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                for (x, y) in self.buffers[x.0].chunks(width).zip(out.chunks_mut(width)).take(m) {
                    kernels::conv_silu(x, &self.vectors[w.0], &mut self.states[state.0], y);
                }
                self.buffers[y.0] = out;
            }
            Op::DeltaNet { qkv, a, b, rate, dt_bias, y, state, key_heads } => {
                let StateSpec::Delta { heads, key_dim, value_dim } = self.plan.states[state.0] else {
                    unreachable!("a delta state")
                };
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                let state = &mut self.states[state.0];
                let per_key = heads / key_heads;
                let qkv_width = 2 * key_heads * key_dim + heads * value_dim;
                for t in 0..m {
                    let row = &self.buffers[qkv.0][t * qkv_width..(t + 1) * qkv_width];
                    let (q, rest) = row.split_at(key_heads * key_dim);
                    let (k, v) = rest.split_at(key_heads * key_dim);
                    for h in 0..heads {
                        let key = h / per_key * key_dim..(h / per_key + 1) * key_dim;
                        let value = h * value_dim..(h + 1) * value_dim;
                        let a = self.buffers[a.0][t * heads + h] + self.vectors[dt_bias.0][h];
                        let decay = libm::expf(self.vectors[rate.0][h] * kernels::softplus(a));
                        let beta = kernels::sigmoid(self.buffers[b.0][t * heads + h]);
                        let y = &mut out[t * heads * value_dim..][value.clone()];
                        let state = &mut state[h * key_dim * value_dim..(h + 1) * key_dim * value_dim];
                        kernels::delta_rule(&q[key.clone()], &k[key], &v[value], decay, beta, state, y);
                    }
                }
                self.buffers[y.0] = out;
            }
            Op::GatedConv { x, w, y, state } => {
                let (width, y_width) = (self.width(x), self.width(y));
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                for (x, y) in self.buffers[x.0].chunks(width).zip(out.chunks_mut(y_width)).take(m) {
                    kernels::gated_conv(x, &self.vectors[w.0], &mut self.states[state.0], y);
                }
                self.buffers[y.0] = out;
            }
            Op::HeadNormRope { x, w, y, heads, dim, rotary, pairs, eps } => {
                let (x_width, y_width) = (self.width(x.buf), self.width(y.buf));
                let mut out = std::mem::take(&mut self.buffers[y.buf.0]);
                for (row, h) in (0..m).flat_map(|row| (0..heads).map(move |h| (row, h))) {
                    let head = &self.buffers[x.buf.0][row * x_width + x.offset + h * x.stride..][..dim];
                    let y = &mut out[row * y_width + y.offset + h * y.stride..][..dim];
                    match w {
                        Some(w) => kernels::rms_norm(head, Some(&self.vectors[w.0]), eps, y),
                        None => y.copy_from_slice(head),
                    }
                    if let Some(table) = self.plan.rope.filter(|_| rotary > 0) {
                        let table = &self.buffers[table.0][row * rotary..(row + 1) * rotary];
                        let (cos, sin) = table.split_at(rotary / 2);
                        kernels::rope(y, cos, sin, pairs);
                    }
                }
                self.buffers[y.buf.0] = out;
            }
            Op::Clamp { x, limit } => {
                let n = m * self.width(x);
                self.buffers[x.0][..n].iter_mut().for_each(|x| *x = x.max(-limit).min(limit));
            }
            Op::KvAppend { k, v, state } => {
                let StateSpec::Kv { heads, dim, value_dim } = self.plan.states[state.0] else {
                    unreachable!("a KV state")
                };
                let (keys, values) = self.states[state.0].split_at_mut(self.limits.context * heads * dim);
                for (plane, from, row) in [(keys, k, heads * dim), (values, v, heads * value_dim)] {
                    let at = self.pos * row;
                    plane[at..at + m * row].copy_from_slice(&self.buffers[from.0][..m * row]);
                }
            }
            Op::Attention { q, gate, sinks, y, state, heads, scale, window } => {
                let StateSpec::Kv { heads: kv_heads, dim, value_dim } = self.plan.states[state.0] else {
                    unreachable!("a KV state")
                };
                let (keys, values) = self.states[state.0].split_at(self.limits.context * kv_heads * dim);
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                for (row, y) in out.chunks_mut(heads * value_dim).take(m).enumerate() {
                    let end = self.pos + row + 1;
                    let first = window.map_or(0, |window| end.saturating_sub(window));
                    let scores = &mut self.scores[..end - first];
                    for (h, y) in y.chunks_mut(value_dim).enumerate() {
                        let q = &self.buffers[q.0][(row * heads + h) * dim..][..dim];
                        let of = |data, dim| {
                            let offset = h / (heads / kv_heads) * dim;
                            kernels::Plane { data, stride: kv_heads * dim, offset }
                        };
                        let sink = sinks.map(|w| self.vectors[w.0][h]);
                        kernels::attend(q, of(keys, dim), of(values, value_dim), first, scale, sink, scores, y);
                        if let Some(gate) = gate {
                            let at = row * self.plan.buffers[gate.buf.0].width + gate.offset + h * gate.stride;
                            let gate = &self.buffers[gate.buf.0][at..at + value_dim];
                            y.iter_mut().zip(gate).for_each(|(y, g)| *y *= kernels::sigmoid(*g));
                        }
                    }
                }
                self.buffers[y.0] = out;
            }
            Op::RouterScores { logits, y, scoring, bias, groups } => {
                let width = self.width(y);
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                let bias = bias.map(|b| self.vectors[b.0].as_slice());
                for (logits, y) in self.buffers[logits.0].chunks(width).zip(out.chunks_mut(width)).take(m) {
                    kernels::router_scores(logits, scoring, bias, groups, y);
                }
                self.buffers[y.0] = out;
            }
            Op::SiluMul { gate, up, y } => {
                let n = m * self.width(y);
                let mut out = std::mem::take(&mut self.buffers[y.0]);
                silu_mul(&self.buffers[gate.0][..n], &self.buffers[up.0][..n], &mut out[..n]);
                self.buffers[y.0] = out;
            }
        }
    }

    fn norm(&mut self, x: Buf, gate: Option<Buf>, w: Weight, y: Buf, groups: usize, eps: f32, m: usize) {
        let width = self.width(x);
        let part = width / groups;
        let mut out = std::mem::take(&mut self.buffers[y.0]);
        for (x, y) in self.buffers[x.0].chunks(part).zip(out.chunks_mut(part)).take(m * groups) {
            kernels::rms_norm(x, Some(&self.vectors[w.0]), eps, y);
        }
        if let Some(gate) = gate {
            let gate = &self.buffers[gate.0][..m * width];
            out.iter_mut().zip(gate).for_each(|(y, g)| *y *= kernels::silu(*g));
        }
        self.buffers[y.0] = out;
    }

    fn run_all(&mut self, ops: impl Fn(&Plan) -> &[Op], m: usize) {
        for i in 0..ops(&self.plan).len() {
            let op = ops(&self.plan)[i];
            self.run(&op, m);
        }
    }
}

fn silu_mul(gate: &[f32], up: &[f32], y: &mut [f32]) {
    y.iter_mut().zip(gate).zip(up).for_each(|((y, g), u)| *y = kernels::silu(*g) * u);
}

impl Backend for Cpu {
    fn info(&self) -> Info {
        Info { kind: "cpu", detail: self.simd.name().to_owned() }
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn write_weight<'a>(&'a mut self, weight: Weight, bytes: &'a [u8]) -> LocalBoxFuture<'a, Result<()>> {
        match self.plan.weights[weight.0].kind {
            WeightKind::Matrix(_) => self.matrices[weight.0] = bytes.to_vec(),
            WeightKind::Vector { .. } => self.vectors[weight.0] = pod_collect_to_vec(bytes),
        }
        ready(Ok(())).boxed_local()
    }

    fn reset(&mut self) -> Result<()> {
        self.states.iter_mut().for_each(|s| s.fill(0.0));
        Ok(())
    }

    fn save(&mut self, slot: usize) -> Result<()> {
        for (copy, state) in self.checkpoints[slot].iter_mut().zip(self.plan.checkpointed()) {
            copy.copy_from_slice(&self.states[state.0]);
        }
        Ok(())
    }

    fn restore(&mut self, slot: usize) -> Result<()> {
        for (copy, state) in self.checkpoints[slot].iter().zip(self.plan.checkpointed()) {
            self.states[state.0].copy_from_slice(copy);
        }
        Ok(())
    }

    fn begin(&mut self, pos: usize, embeddings: &[f32]) -> Result<()> {
        let m = embeddings.len() / self.plan.hidden;
        if m == 0 || m > self.limits.chunk || pos + m > self.limits.context {
            return Err(Error::Context { prompt: pos + m, context: self.limits.context });
        }
        (self.pos, self.m, self.mixed) = (pos, m, 0);
        self.buffers[self.plan.residual.0][..embeddings.len()].copy_from_slice(embeddings);
        if let Some(rope) = self.plan.rope {
            let table = rope_table(&self.plan, pos, m);
            self.buffers[rope.0][..table.len()].copy_from_slice(&table);
        }
        Ok(())
    }

    fn mix(&mut self, layer: usize, _: Range<usize>) -> LocalBoxFuture<'_, Result<Routing>> {
        self.run_all(|p| &p.layers[layer].mix, self.m);
        self.mixed = layer + 1;
        let mut routing = Routing::default();
        if let Some(moe) = self.plan.layers[layer].moe {
            let n = self.m * moe.top_k;
            routing = Routing { top_k: moe.top_k, ids: vec![0; n], weights: vec![0.0; n] };
            let rows = routing.ids.chunks_mut(moe.top_k).zip(routing.weights.chunks_mut(moe.top_k));
            let scores = self.buffers[moe.scores.0].chunks(moe.experts);
            for (((ids, weights), logits), scores) in
                rows.zip(self.buffers[moe.logits.0].chunks(moe.experts)).zip(scores)
            {
                kernels::top_k(scores, ids);
                if moe.scores != moe.logits {
                    kernels::by_logit(logits, ids);
                }
                kernels::router_weights(logits, &moe, ids, weights);
            }
        }
        self.routing = routing.clone();
        ready(Ok(routing)).boxed_local()
    }

    fn foresee(&mut self, ahead: Range<usize>) -> LocalBoxFuture<'_, Result<Vec<Vec<f32>>>> {
        let scores = ahead.map(|layer| {
            let distance = (layer + 1).saturating_sub(self.mixed);
            self.run_all(|p| p.layers[layer].foresee_from(distance), self.m);
            let (Some(scores), Some(moe)) = (self.plan.foreseen, self.plan.layers[layer].moe) else {
                return Vec::new();
            };
            self.buffers[scores.0][..self.m * moe.experts].to_vec()
        });
        let scores = scores.collect();
        ready(Ok(scores)).boxed_local()
    }

    fn works_while_called(&self) -> bool {
        true
    }

    fn write_slot(&mut self, slot: usize, _expert: Place, extent: &Bytes) -> Result<()> {
        let slot = &mut self.slots[slot];
        match extent {
            Bytes::Owned(bytes) => {
                let len = slot.len();
                slot.copy_from_slice(&bytes[..len]);
            }
            #[cfg(target_arch = "wasm32")]
            Bytes::Js(array) => array.subarray(0, slot.len() as u32).copy_to(slot),
        }
        Ok(())
    }

    fn settle(&mut self) -> LocalBoxFuture<'_, Result<()>> {
        ready(Ok(())).boxed_local()
    }

    fn round_trip(&mut self) -> LocalBoxFuture<'_, Result<Option<f64>>> {
        ready(Ok(None)).boxed_local()
    }

    fn run_experts(&mut self, layer: usize, items: &[WorkItem]) -> Result<()> {
        let (Some(moe), Some(shape)) = (self.plan.layers[layer].moe, self.plan.expert) else { return Ok(()) };
        let [_, up_at, down_at] = shape.offsets();
        let (width, hidden) = (shape.gate.rows, shape.down.rows);
        let x = RowsRef { data: &self.buffers[moe.x.0], stride: self.plan.buffers[moe.x.0].width };
        // Rows that use the same expert are multiplied together, so that its matrices are decoded once.
        let mut items = items.to_vec();
        items.sort_by_key(|i| i.slot);
        for group in items.chunk_by(|a, b| a.slot == b.slot) {
            let extent = &self.slots[group[0].slot as usize];
            let bias = |part: usize, rows: usize| -> Option<Vec<f32>> {
                let at = shape.bias_offsets()?[part];
                Some(pod_collect_to_vec(&extent[at..at + 4 * rows]))
            };
            let biases = [bias(0, width), bias(1, width), bias(2, hidden)];
            let [for_gate, for_up, for_down] = biases.each_ref().map(|b| Then { bias: b.as_deref(), ..Then::STORE });
            let place = |i: &WorkItem| i.row as usize * moe.top_k + i.rank as usize;
            let pairs: Vec<_> = group.iter().map(|i| RowPair { x: i.row as usize, y: place(i) }).collect();
            let (gate, up) = (&mut self.expert_gate, &mut self.expert_up);
            self.simd.matmul(&shape.gate, extent, x, gate, width, &pairs, for_gate, &mut self.scratch);
            self.simd.matmul(&shape.up, &extent[up_at..], x, up, width, &pairs, for_up, &mut self.scratch);
            for pair in &pairs {
                let row = pair.y * width..(pair.y + 1) * width;
                for (g, u) in gate[row.clone()].iter_mut().zip(&up[row]) {
                    *g = kernels::glu(moe.glu, *g, *u);
                }
            }
            let pairs: Vec<_> = pairs.iter().map(|p| RowPair { x: p.y, y: p.y }).collect();
            let act = RowsRef { data: gate, stride: width };
            let out = &mut self.expert_out;
            self.simd.matmul(&shape.down, &extent[down_at..], act, out, hidden, &pairs, for_down, &mut self.scratch);
        }
        Ok(())
    }

    fn finish_layer(&mut self, layer: usize) -> Result<()> {
        self.run_all(|p| &p.layers[layer].shared, self.m);
        let Some(moe) = self.plan.layers[layer].moe else { return Ok(()) };
        let hidden = self.plan.hidden;
        let mut residual = std::mem::take(&mut self.buffers[moe.y.0]);
        for (r, y) in residual.chunks_mut(hidden).take(self.m).enumerate() {
            for (i, y) in y.iter_mut().enumerate() {
                let mut sum = 0.0;
                for rank in r * moe.top_k..(r + 1) * moe.top_k {
                    sum += self.routing.weights[rank] * self.expert_out[rank * hidden + i];
                }
                if let Some(shared) = moe.shared {
                    let out = self.buffers[shared.out.0][r * hidden + i];
                    sum += shared.gate.map_or(out, |logit| kernels::sigmoid(self.buffers[logit.0][r]) * out);
                }
                *y += moe.scale * sum;
            }
        }
        self.buffers[moe.y.0] = residual;
        Ok(())
    }

    fn logits(&mut self, rows: Range<usize>) -> LocalBoxFuture<'_, Result<Vec<f32>>> {
        let hidden = self.plan.hidden;
        let mut out = Vec::with_capacity(rows.len() * self.plan.vocab);
        let mut start = rows.start;
        while start < rows.end {
            let n = (rows.end - start).min(self.limits.head_rows);
            let from = start * hidden;
            let (residual, head_in) = (self.plan.residual.0, self.plan.head_in.0);
            let source = self.buffers[residual][from..from + n * hidden].to_vec();
            self.buffers[head_in][..n * hidden].copy_from_slice(&source);
            self.run_all(|p| &p.head, n);
            out.extend_from_slice(&self.buffers[self.plan.logits.0][..n * self.plan.vocab]);
            start += n;
        }
        ready(Ok(out)).boxed_local()
    }

    fn residual(&mut self) -> LocalBoxFuture<'_, Result<Vec<f32>>> {
        let n = self.m * self.plan.hidden;
        ready(Ok(self.buffers[self.plan.residual.0][..n].to_vec())).boxed_local()
    }

    fn normed(&mut self, rows: usize) -> LocalBoxFuture<'_, Result<Vec<f32>>> {
        let n = rows * self.plan.hidden;
        ready(Ok(self.buffers[self.plan.head_normed.0][..n].to_vec())).boxed_local()
    }

    fn workspace_bytes(&self) -> u64 {
        Cpu::workspace_for(&self.plan, &self.limits)
    }
}

#[cfg(test)]
mod tests;
