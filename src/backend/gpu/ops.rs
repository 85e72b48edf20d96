//! Operations to dispatches. The words given to [`Compiler::step`] are the fields of the kernel's `Op` structure in
//! order.

use super::program::{Compiler, Grid, Id, Over, Pass, Step, attention_blocks, linear};
use super::shader::Variant;
use super::tuning::{ATTENTION_BLOCK, ITEMS_A_TILE};
use crate::error::{Error, Result};
use crate::model::plan::{Buf, Glu, Moe, Op, Pairs, Scoring, StateSpec, Weight, WeightKind};
use crate::tensor::{DType, GROUP, Layout};

/// Invocations of a workgroup in kernels without lanes.
const WORKGROUP: u32 = 64;

/// Whether a kernel writes a buffer.
const READ: bool = false;
const WRITE: bool = true;

fn decoder(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "decode_f32",
        DType::F16 => "decode_f16",
        DType::Q8 => "decode_q8",
        DType::Q4 => "decode_q4",
    }
}

/// A `Matrix` of `shaders/matrix.wgsl`, `base` bytes into its buffer.
fn matrix(layout: &Layout, base: usize) -> [u32; 4] {
    let [values, scales, rows] = layout.planes().map(|plane| base + plane.start);
    [values as u32 / 16, scales as u32 / 2, rows as u32 / 4, layout.groups() as u32]
}

fn words<const N: usize>(numbers: [usize; N]) -> [u32; N] {
    numbers.map(|n| n as u32)
}

/// One invocation for each of `width` columns and each token.
fn by_token(width: usize) -> Grid {
    let x = (width as u32).div_ceil(WORKGROUP);
    Box::new(move |pass| [x, pass.m, 1])
}

/// A kernel without lanes.
fn plain(kernel: &'static str) -> Variant {
    Variant { kernel, constants: vec![("WORKGROUP", WORKGROUP)], imports: Vec::new() }
}

impl Compiler<'_> {
    fn step(&mut self, variant: Variant, over: Over, op: &[u32], buffers: Vec<(Id, bool)>, grid: Grid) -> Step {
        let (params, params_len) = self.params(op);
        Step { variant, params, params_len, over, buffers, grid }
    }

    /// A kernel whose outputs are shared by lanes; `tree` is the file that adds them up.
    fn lanes(&self, kernel: &'static str, lanes: u32, tree: &'static str) -> Variant {
        Variant {
            kernel,
            constants: vec![("WORKGROUP", self.tuning.workgroup), ("LANES", lanes)],
            imports: vec![("reduce", if lanes == 1 { "reduce_one" } else { tree })],
        }
    }

    fn read(&self, buf: Buf) -> (Id, bool) {
        (self.activation(buf).id, READ)
    }

    fn write(&self, buf: Buf) -> (Id, bool) {
        (self.activation(buf).id, WRITE)
    }

    fn vector(&self, weight: Weight) -> (Id, bool) {
        (self.program.weights[weight.0][0].id, READ)
    }

    fn state_of(&self, state: crate::model::plan::State, plane: usize, access: bool) -> (Id, bool) {
        (self.program.states[state.0][plane], access)
    }

    pub(super) fn op(&mut self, op: &Op, over: Over, out: &mut Vec<Step>) -> Result<()> {
        match *op {
            Op::RmsNorm { x, w, y, groups, eps } => {
                self.check_rows(y, over);
                let (xa, ya) = (self.activation(x), self.activation(y));
                let [g, part, xs, ys] = words([groups, xa.width / groups, xa.stride, ya.stride]);
                let buffers = vec![self.read(x), self.vector(w), self.write(y)];
                out.push(self.norm("rms_norm", over, groups, &[g, part, xs, ys, eps.to_bits()], buffers));
            }
            Op::GatedRmsNorm { x, gate, w, y, groups, eps } => {
                self.check_rows(y, over);
                let (xa, ya, ga) = (self.activation(x), self.activation(y), self.activation(gate));
                let [g, part, xs, ys, gs] = words([groups, xa.width / groups, xa.stride, ya.stride, ga.stride]);
                let buffers = vec![self.read(x), self.vector(w), self.read(gate), self.write(y)];
                out.push(self.norm("gated_rms_norm", over, groups, &[g, part, xs, ys, gs, eps.to_bits()], buffers));
            }
            Op::MatMul { y, .. } => {
                self.check_rows(y, over);
                self.matmul(op, over, out)?;
            }
            Op::ConvSilu { x, w, y, state } => {
                let StateSpec::Conv { channels, kernel } = self.plan.states[state.0] else {
                    return Err(wrong_state("a convolution"));
                };
                let [c, k, xs, ys] = words([channels, kernel, self.activation(x).stride, self.activation(y).stride]);
                let mut variant = plain("conv_silu");
                variant.constants.push(("TAPS", k));
                let buffers = vec![self.read(x), self.vector(w), self.state_of(state, 0, WRITE), self.write(y)];
                let groups = c.div_ceil(WORKGROUP);
                out.push(self.step(variant, over, &[c, k, xs, ys], buffers, Box::new(move |_| [groups, 1, 1])));
            }
            Op::DeltaNet { .. } => self.delta_net(op, over, out)?,
            Op::GatedConv { x, w, y, state } => {
                let StateSpec::Conv { channels, kernel } = self.plan.states[state.0] else {
                    return Err(wrong_state("a convolution"));
                };
                let [c, k, xs, ys] = words([channels, kernel, self.activation(x).stride, self.activation(y).stride]);
                let mut variant = plain("gated_conv");
                variant.constants.push(("TAPS", k));
                let buffers = vec![self.read(x), self.vector(w), self.state_of(state, 0, WRITE), self.write(y)];
                let groups = c.div_ceil(WORKGROUP);
                out.push(self.step(variant, over, &[c, xs, ys], buffers, Box::new(move |_| [groups, 1, 1])));
            }
            Op::HeadNormRope { x, w, y, heads, dim, rotary, pairs, eps } => {
                let mut variant = self.lanes("head_norm_rope", self.tuning.norm_lanes, "reduce_tree");
                variant.constants.push(("NORM", u32::from(w.is_some())));
                variant.constants.push(("NEIGHBOURS", u32::from(pairs == Pairs::Neighbours)));
                let table = self.plan.rope.filter(|_| rotary > 0);
                let rotary = if table.is_some() { rotary } else { 0 };
                let (xa, ya, ta) =
                    (self.activation(x.buf), self.activation(y.buf), self.activation(table.unwrap_or(x.buf)));
                let (x_at, y_at) = ([xa.stride, x.offset, x.stride], [ya.stride, y.offset, y.stride]);
                let op = [&words([heads, dim, rotary])[..], &words(x_at), &words(y_at), &words([ta.stride])].concat();
                let op = [&op[..], &[eps.to_bits()]].concat();
                // What a variant does not use is bound to something that exists.
                let w = w.map_or(self.read(x.buf), |w| self.vector(w));
                let buffers = vec![self.read(x.buf), w, self.read(table.unwrap_or(x.buf)), self.write(y.buf)];
                let grid = self.parts_grid(heads);
                out.push(self.step(variant, over, &op, buffers, grid));
            }
            Op::Clamp { x, limit } => {
                let xa = self.activation(x);
                let op = [xa.stride as u32, xa.width as u32, limit.to_bits()];
                out.push(self.step(plain("clamp"), over, &op, vec![self.write(x)], by_token(xa.width)));
            }
            Op::KvAppend { k, v, state } => {
                let StateSpec::Kv { heads, dim, value_dim } = self.plan.states[state.0] else {
                    return Err(wrong_state("a KV"));
                };
                // Width, dimensions of a head, and what a head and a position take in the cache.
                let plane = |dim: usize| {
                    let padded = dim.next_multiple_of(4);
                    words([heads * dim, dim, padded, heads * padded])
                };
                let strides = words([self.activation(k).stride, self.activation(v).stride]);
                let op = [&plane(dim)[..], &plane(value_dim), &strides].concat();
                let (keys, values) = (self.state_of(state, 0, WRITE), self.state_of(state, 1, WRITE));
                let buffers = vec![self.read(k), self.read(v), keys, values];
                out.push(self.step(plain("kv_append"), over, &op, buffers, by_token(heads * dim.max(value_dim))));
            }
            Op::RouterScores { logits, y, scoring, bias, groups } => {
                let (la, ya) = (self.activation(logits), self.activation(y));
                let (count, kept) = groups.unwrap_or((1, 1));
                let op = words([ya.width, la.stride, ya.stride, ya.width / count, kept]);
                let mut variant = plain("router_scores");
                variant.constants.push(("SIGMOID", u32::from(scoring == Scoring::Sigmoid)));
                variant.constants.push(("GROUPS", count as u32));
                variant.constants.push(("BIAS_BINDING", 4));
                variant.imports.push(bias_import(bias.is_some()));
                let mut buffers = vec![self.read(logits), self.write(y)];
                buffers.extend(bias.map(|bias| self.vector(bias)));
                out.push(self.step(variant, over, &op, buffers, by_token(ya.width)));
            }
            Op::Attention { .. } => self.attention(op, over, out)?,
            Op::SiluMul { gate, up, y } => {
                let (ga, ua, ya) = (self.activation(gate), self.activation(up), self.activation(y));
                let len = ya.stride / 4;
                let op = words([ga.stride / 4, ua.stride / 4, len, len]);
                let buffers = vec![self.read(gate), self.read(up), self.write(y)];
                out.push(self.step(plain("silu_mul"), over, &op, buffers, by_token(len)));
            }
        }
        Ok(())
    }

    /// A grid over `parts` of each token in the kernels that norm them.
    fn parts_grid(&self, parts: usize) -> Grid {
        let (parts, a_group) = (parts as u32, self.tuning.workgroup / self.tuning.norm_lanes);
        Box::new(move |pass| linear((pass.m * parts).div_ceil(a_group)))
    }

    fn norm(&mut self, kernel: &'static str, over: Over, groups: usize, op: &[u32], buffers: Vec<(Id, bool)>) -> Step {
        let variant = self.lanes(kernel, self.tuning.norm_lanes, "reduce_tree");
        let grid = self.parts_grid(groups);
        self.step(variant, over, op, buffers, grid)
    }

    /// A variant of a kernel that multiplies matrices of `dtype`.
    fn multiplier(&self, kernel: &'static str, dtype: DType) -> Variant {
        let mut variant = self.lanes(kernel, self.tuning.matmul_lanes, "reduce_tree");
        variant.imports.push(("decode", decoder(dtype)));
        variant.imports.push(("scalar", if self.tuning.f16 { "scalar_f16" } else { "scalar_f32" }));
        variant
    }

    /// Workgroups that cover `rows` of a matrix.
    fn row_groups(&self, rows: usize) -> u32 {
        (rows as u32).div_ceil(self.tuning.workgroup / self.tuning.matmul_lanes)
    }

    fn matmul(&mut self, op: &Op, over: Over, out: &mut Vec<Step>) -> Result<()> {
        let Op::MatMul { x, w, bias, y, scale, add } = *op else { unreachable!("by the caller") };
        let (xa, ya) = (self.activation(x), self.activation(y));
        let WeightKind::Matrix(whole) = self.plan.weights[w.0].kind else {
            return Err(Error::format("plan", format!("`{}` is no matrix", self.plan.weights[w.0].tensor)));
        };
        for window in self.program.weights[w.0].clone() {
            let layout = Layout { rows: window.rows.len(), ..whole };
            let rest = words([window.rows.len(), window.rows.start, xa.stride / GROUP, ya.stride, usize::from(add)]);
            let op = [&matrix(&layout, 0)[..], &rest, &[scale.to_bits()]].concat();
            let mut buffers = vec![self.read(x), (window.id, READ), (window.id, READ), self.write(y)];
            buffers.extend(bias.map(|bias| self.vector(bias)));
            let groups = self.row_groups(window.rows.len());
            let grid: Grid = Box::new(move |pass| [groups, pass.m.div_ceil(ITEMS_A_TILE as u32), 1]);
            let mut variant = self.multiplier("matmul", whole.dtype);
            variant.constants.push(("BIAS_BINDING", 6));
            variant.imports.push(bias_import(bias.is_some()));
            out.push(self.step(variant, over, &op, buffers, grid));
        }
        Ok(())
    }

    fn delta_net(&mut self, op: &Op, over: Over, out: &mut Vec<Step>) -> Result<()> {
        let Op::DeltaNet { qkv, a, b, rate, dt_bias, y, state, key_heads } = *op else { unreachable!("by the caller") };
        let StateSpec::Delta { heads, key_dim, value_dim } = self.plan.states[state.0] else {
            return Err(wrong_state("a recurrent"));
        };
        let gates = self.scratch("deltanet gates", (self.limits.chunk * heads * 16) as u64);
        let qkv_stride = self.activation(qkv).stride;
        let (a_stride, b_stride) = (self.activation(a).stride, self.activation(b).stride);
        let op = words([heads, key_heads, key_dim, qkv_stride, a_stride, b_stride]);
        let buffers =
            vec![self.read(qkv), self.read(a), self.read(b), self.vector(rate), self.vector(dt_bias), (gates, WRITE)];
        out.push(self.step(plain("delta_gates"), over, &op, buffers, by_token(heads)));

        let lanes = self.tuning.delta_lanes;
        let mut variant = self.lanes("delta_net", lanes, "reduce_planes");
        variant.constants.push(("KEY_DIM", key_dim as u32));
        let op = words([heads, key_heads, value_dim, qkv_stride, self.activation(y).stride]);
        let buffers = vec![self.read(qkv), (gates, READ), self.state_of(state, 0, WRITE), self.write(y)];
        let groups = ((heads * value_dim) as u32).div_ceil(self.tuning.workgroup / lanes);
        out.push(self.step(variant, over, &op, buffers, Box::new(move |_| [groups, 1, 1])));
        Ok(())
    }

    /// Four kernels over batches of as many tokens as the scratch buffers hold.
    fn attention(&mut self, op: &Op, over: Over, out: &mut Vec<Step>) -> Result<()> {
        let Op::Attention { q, gate, sinks, y, state, heads, scale, window } = *op else {
            unreachable!("by the caller")
        };
        let StateSpec::Kv { heads: kv_heads, dim, value_dim } = self.plan.states[state.0] else {
            return Err(wrong_state("a KV"));
        };
        let (block, blocks) = (ATTENTION_BLOCK as usize, attention_blocks(self.limits.context));
        // Vectors of four that a head takes in the caches.
        let (key_vectors, vectors) = (dim.div_ceil(4), value_dim.div_ceil(4));
        let (scores, stats, sums) = (4 * heads * blocks * block, 8 * heads * blocks, 16 * heads * blocks * vectors);
        let a_token = (scores + stats + sums) as u64;
        let batch = ((self.tuning.attention_scratch / a_token) as usize).clamp(1, self.limits.chunk);
        let scores = (self.scratch("attention scores", (batch * scores) as u64), WRITE);
        let stats = (self.scratch("attention blocks", (batch * stats) as u64), WRITE);
        let sums = (self.scratch("attention sums", (batch * sums) as u64), WRITE);
        let read = |(id, _): (Id, bool)| (id, READ);
        let (keys, values) = (self.state_of(state, 0, READ), self.state_of(state, 1, READ));
        let window = window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX));

        for first in (0..self.limits.chunk).step_by(batch) {
            let strides = words([self.activation(q).stride, self.activation(y).stride]);
            let gates = gate.map_or([0; 3], |g| words([self.activation(g.buf).stride, g.offset, g.stride]));
            let shape = words([heads, kv_heads, dim, key_vectors, value_dim, vectors, blocks, first]);
            let op = [&shape[..], &strides, &gates, &[scale.to_bits(), window]].concat();
            let variant = |kernel| {
                let mut variant = plain(kernel);
                variant.constants.push(("BLOCK", ATTENTION_BLOCK));
                variant
            };
            let (heads, vectors, first, batch) = (heads as u32, vectors as u32, first as u32, batch as u32);
            // Tokens of this batch, and blocks with keys for the chunk's last token.
            let tokens = move |pass: Pass| pass.m.saturating_sub(first).min(batch);
            let blocks = |pass: Pass| (pass.pos + pass.m).div_ceil(ATTENTION_BLOCK);

            let grid = move |p: Pass| [(p.pos + p.m).div_ceil(WORKGROUP), heads, tokens(p)];
            let buffers = vec![self.read(q), keys, scores];
            out.push(self.step(variant("attention_scores"), over, &op, buffers, Box::new(grid)));

            let grid = move |p: Pass| [(heads * blocks(p)).div_ceil(WORKGROUP), tokens(p), 1];
            out.push(self.step(variant("attention_softmax"), over, &op, vec![scores, stats], Box::new(grid)));

            let grid = move |p: Pass| [(blocks(p) * vectors).div_ceil(WORKGROUP), heads, tokens(p)];
            let buffers = vec![read(scores), values, sums];
            out.push(self.step(variant("attention_values"), over, &op, buffers, Box::new(grid)));

            let grid = move |p: Pass| [(heads * vectors).div_ceil(WORKGROUP), tokens(p), 1];
            let mut combine = variant("attention_combine");
            combine.constants.push(("GATED", u32::from(gate.is_some())));
            combine.constants.push(("SINKS", u32::from(sinks.is_some())));
            let gate = self.read(gate.map_or(q, |g| g.buf));
            let sinks = sinks.map_or(read(stats), |w| self.vector(w));
            let buffers = vec![read(stats), read(sums), gate, sinks, self.write(y)];
            out.push(self.step(combine, over, &op, buffers, Box::new(grid)));
        }
        Ok(())
    }

    pub(super) fn router(&mut self, moe: &Moe) -> Result<[Step; 2]> {
        let (logits, scores, routed) = (self.activation(moe.logits), self.activation(moe.scores), self.routed()?);
        let op = words([moe.experts, moe.top_k, scores.stride]);
        let buffers = vec![(scores.id, READ), (routed.choice, WRITE)];
        let rank = self.step(plain("router_rank"), Over::Chunk, &op, buffers, by_token(moe.experts));
        let op = words([moe.experts, moe.top_k, logits.stride, routed.weights_at]);
        let op = [&op[..], &[moe.renormalise.unwrap_or(0.0).to_bits(), moe.weight_scale.to_bits()]].concat();
        let mut variant = plain("router_weights");
        variant.constants.push(("SIGMOID", u32::from(moe.scoring == Scoring::Sigmoid)));
        variant.constants.push(("RENORMALISE", u32::from(moe.renormalise.is_some())));
        variant.constants.push(("REORDER", u32::from(moe.scores != moe.logits)));
        let buffers = vec![(logits.id, READ), (routed.choice, WRITE)];
        let grid: Grid = Box::new(|pass| [pass.m.div_ceil(WORKGROUP), 1, 1]);
        Ok([rank, self.step(variant, Over::Chunk, &op, buffers, grid)])
    }

    pub(super) fn lookup(&mut self, layer: usize, moe: &Moe) -> Result<Step> {
        let routed = self.routed()?;
        let pool = &self.program.pool;
        let (arenas, slots, slot) = (pool.arenas.len(), pool.slots_an_arena, pool.slot_bytes / 16);
        let entries = layer * self.plan.most_experts();
        let record = layer * routed.record;
        let op = words([entries, moe.top_k, arenas, slots, slot, routed.pairs_ahead, record, layer]);
        let mut variant = plain("expert_lookup");
        variant.constants.push(("PAIRS", routed.pairs_ahead as u32));
        let buffers = vec![
            (self.program.passes, WRITE),
            (routed.choice, READ),
            (routed.table, READ),
            (routed.work, WRITE),
            (routed.records, WRITE),
        ];
        Ok(self.step(variant, Over::Own, &op, buffers, Box::new(|_| [1, 1, 1])))
    }

    pub(super) fn experts(&mut self, moe: &Moe) -> Result<Vec<[Step; 2]>> {
        let (routed, x) = (self.routed()?, self.activation(moe.x));
        let shape = self.plan.expert.ok_or_else(no_experts)?;
        let [gate, up, down] = shape.offsets();
        // In words of a slot.
        let bias_at = shape.bias_offsets().unwrap_or_default().map(|bytes| bytes as u32 / 4);
        let bias = u32::from(shape.bias);
        let (glu, alpha, limit) = match moe.glu {
            Glu::Silu => ("glu_silu", 0.0, 0.0),
            Glu::Clamped { alpha, limit } => ("glu_clamped", alpha, limit),
        };
        let padded = |width: usize| width.next_multiple_of(GROUP);
        let (inner, hidden) = (padded(shape.gate.rows), padded(shape.down.rows));
        let mut steps = Vec::new();
        for (arena, slots) in self.program.pool.arenas.clone().into_iter().enumerate() {
            let common = |x: Id, y: Id| {
                vec![(routed.work, READ), (routed.work, READ), (x, READ), (slots, READ), (slots, READ), (y, WRITE)]
            };
            let op = words([shape.gate.rows, moe.top_k, x.stride / GROUP, inner, arena]);
            let ends = [bias_at[0], bias_at[1], alpha.to_bits(), limit.to_bits()];
            let op = [&matrix(&shape.gate, gate)[..], &matrix(&shape.up, up), &op, &ends].concat();
            let mut variant = self.multiplier("expert_gate_up", shape.gate.dtype);
            variant.constants.push(("BIAS", bias));
            variant.imports.push(("glu", glu));
            let grid = self.tiles_grid(shape.gate.rows);
            let gate_up = self.step(variant, Over::Chunk, &op, common(x.id, routed.inner), grid);

            let op = words([shape.down.rows, inner / GROUP, hidden, arena]);
            let op = [&matrix(&shape.down, down)[..], &op, &[bias_at[2]]].concat();
            let mut variant = self.multiplier("expert_down", shape.down.dtype);
            variant.constants.push(("BIAS", bias));
            let grid = self.tiles_grid(shape.down.rows);
            let down = self.step(variant, Over::Chunk, &op, common(routed.inner, routed.out), grid);
            steps.push([gate_up, down]);
        }
        Ok(steps)
    }

    /// A grid over the rows of an expert's matrix and the tiles of the work list.
    fn tiles_grid(&self, rows: usize) -> Grid {
        let groups = self.row_groups(rows);
        Box::new(move |pass| {
            let [y, z, _] = linear(pass.tiles);
            [groups, y, z]
        })
    }

    pub(super) fn combine(&mut self, moe: &Moe) -> Result<Step> {
        let (routed, y) = (self.routed()?, self.activation(moe.y));
        let hidden = self.plan.expert.ok_or_else(no_experts)?.down.rows;
        let gate = moe.shared.and_then(|shared| shared.gate);
        let stride = |buf: Option<Buf>| buf.map_or(0, |buf| self.activation(buf).stride);
        let strides = [stride(moe.shared.map(|shared| shared.out)), stride(gate)];
        let padded = hidden.next_multiple_of(GROUP);
        let op = words([hidden, moe.top_k, routed.weights_at, padded, y.stride, strides[0], strides[1]]);
        let op = [&op[..], &[moe.scale.to_bits()]].concat();
        let mut variant = plain("moe_combine");
        variant.constants.push(("SHARED", u32::from(moe.shared.is_some())));
        variant.constants.push(("SHARED_GATE", u32::from(gate.is_some())));
        let out = (routed.out, READ);
        let shared = moe.shared.map_or(out, |shared| self.read(shared.out));
        let gate = gate.map_or(out, |gate| self.read(gate));
        let buffers = vec![(routed.choice, READ), out, shared, gate, self.write(moe.y)];
        Ok(self.step(variant, Over::Chunk, &op, buffers, by_token(hidden)))
    }

    fn routed(&self) -> Result<super::program::Routed> {
        self.program.routed.ok_or_else(no_experts)
    }
}

/// What stands behind a kernel's import of `bias`.
fn bias_import(has: bool) -> (&'static str, &'static str) {
    ("bias", if has { "bias_vector" } else { "bias_none" })
}

fn wrong_state(expected: &str) -> Error {
    Error::format("plan", format!("an operation names a state that is not {expected} state"))
}

fn no_experts() -> Error {
    Error::format("plan", "a layer routes to experts and the plan gives none a shape")
}
