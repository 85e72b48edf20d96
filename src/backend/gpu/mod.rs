//! The GPU backend: wgpu (Vulkan, Metal and DirectX 12 natively, WebGPU in browsers) and WGSL at WebGPU's default limits.
//!
//! A plan is compiled into a [`Program`] once: buffers, and the dispatches of every layer with their pipelines and bind
//! groups. A pass then writes one small uniform and records dispatches. Commands collect in one encoder and are submitted
//! when the host needs a result, waits for flash, or is about to write something the commands read. Layer by layer that is
//! twice a layer; where experts are likely to have slots, many layers go at once, see `ahead.rs`.

mod ahead;
mod device;
mod in_flight;
mod ops;
mod pipelines;
mod program;
mod readback;
mod shader;
#[cfg(test)]
mod tests;
mod tuning;
mod work;

use std::ops::Range;

use futures_util::future::LocalBoxFuture;
use futures_util::{FutureExt, TryFutureExt};

pub use device::Device;

use super::{Backend, Info, Place, Routing, RunAhead, Traffic, WorkItem, rope_table};
use crate::error::{Error, Result};
use crate::flash::Bytes;
use crate::model::plan::{Buf, Limits, Plan, Weight};
use crate::tensor::Layout;
use ahead::SlotTable;
use in_flight::{InFlight, SUBMISSIONS};
use pipelines::{Dispatch, Pipelines};
use program::{AHEAD, Activation, Id, Pass, Program, UNIFORM};
use tuning::Tuning;

/// What a GPU backend did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    pub submissions: u64,
    pub dispatches: u64,
    pub readbacks: u64,
    pub readback_bytes: u64,
    /// The most bytes that were written and perhaps not yet taken up.
    pub queued_bytes: u64,
    /// The most submissions that were outstanding at once.
    pub in_flight: usize,
}

#[derive(Default)]
struct Layer {
    mix: Vec<Dispatch>,
    /// By distance; beyond the last as at 0.
    foresee: Vec<Vec<Dispatch>>,
    forecasts: Vec<Vec<Dispatch>>,
    shared: Vec<Dispatch>,
    lookup: Option<Dispatch>,
    experts: Vec<[Dispatch; 2]>,
    combine: Option<Dispatch>,
}

impl Layer {
    fn foresee_from(&self, distance: usize) -> &[Dispatch] {
        self.foresee.get(distance).or(self.foresee.first()).map_or(&[], Vec::as_slice)
    }
}

pub struct Gpu {
    device: Device,
    plan: Plan,
    limits: Limits,
    program: Program,
    buffers: Vec<wgpu::Buffer>,
    layers: Vec<Layer>,
    head: Vec<Dispatch>,
    /// Commands recorded and not yet submitted.
    encoder: Option<wgpu::CommandEncoder>,
    pass: Pass,
    /// Buffers whose read-back was begun and not finished, because the caller dropped the future.
    reading: Vec<Id>,
    /// What the slot table on the GPU says.
    table: SlotTable,
    /// What came back with a layer's routing: the layers it is about, and their scores.
    foreseen: (Range<usize>, Vec<Vec<f32>>),
    /// Layers of the pass at hand that have run `mix`.
    mixed: usize,
    /// Submissions that the GPU has not finished.
    in_flight: InFlight,
    /// Bytes written since the GPU was last known to have caught up.
    queued: u64,
    stats: Stats,
}

impl Gpu {
    /// A backend on the most powerful adapter.
    ///
    /// # Errors
    /// [`Error::NoGpu`] if there is no adapter or the plan does not fit its limits, [`Error::Gpu`] if memory ran out or
    /// a pipeline failed.
    pub async fn new(plan: Plan, limits: Limits) -> Result<Gpu> {
        Gpu::on(Device::request(false).await?, plan, limits).await
    }

    /// A backend on a device that exists already, and may be shared.
    pub async fn on(device: Device, plan: Plan, limits: Limits) -> Result<Gpu> {
        let program = Program::new(&plan, &limits, &device.tuning)?;
        Gpu::with_program(device, plan, limits, program).await
    }

    async fn with_program(device: Device, plan: Plan, limits: Limits, mut program: Program) -> Result<Gpu> {
        let buffers = device.scoped(|| pipelines::buffers(&device, &program)).await?;
        let (steps, head_steps) = (std::mem::take(&mut program.layers), std::mem::take(&mut program.head));
        let made = device
            .scoped(|| {
                device.queue.write_buffer(&buffers[program.params.0], 0, &program.params_bytes);
                let pipelines = Pipelines { device: &device, program: &program, buffers: &buffers };
                let layer = |steps: program::LayerSteps| Layer {
                    mix: pipelines.dispatches(steps.mix),
                    foresee: steps.foresee.into_iter().map(|s| pipelines.dispatches(s)).collect(),
                    forecasts: steps.forecasts.into_iter().map(|s| pipelines.dispatches(s)).collect(),
                    shared: pipelines.dispatches(steps.shared),
                    lookup: steps.lookup.map(|s| pipelines.dispatch(s)),
                    experts: steps.experts.into_iter().map(|pair| pair.map(|s| pipelines.dispatch(s))).collect(),
                    combine: steps.combine.map(|s| pipelines.dispatch(s)),
                };
                let layers: Vec<Layer> = steps.into_iter().map(layer).collect();
                (layers, pipelines.dispatches(head_steps))
            })
            .await;
        // A pipeline that failed must not be handed to the next backend.
        let (layers, head) = made.inspect_err(|_| device.forget_pipelines())?;
        let table = SlotTable::new(plan.layers.len(), plan.most_experts(), limits.slots);
        let queued = std::mem::take(&mut program.params_bytes).len() as u64;
        Ok(Gpu {
            device,
            plan,
            limits,
            program,
            buffers,
            layers,
            head,
            encoder: None,
            pass: Pass::default(),
            reading: Vec::new(),
            table,
            foreseen: (0..0, Vec::new()),
            mixed: 0,
            in_flight: InFlight::default(),
            queued,
            stats: Stats { queued_bytes: queued, ..Stats::default() },
        })
    }

    /// Workspace a GPU backend with these limits allocates, see [`Backend::workspace_bytes`]. The same on every adapter.
    ///
    /// # Errors
    /// [`Error::NoGpu`] if no GPU at default limits can run the plan.
    pub fn workspace_for(plan: &Plan, limits: &Limits) -> Result<u64> {
        Ok(Program::new(plan, limits, &Tuning::new(false))?.workspace_bytes(plan, limits))
    }

    pub fn stats(&self) -> Stats {
        self.stats
    }

    fn buffer(&self, id: Id) -> &wgpu::Buffer {
        &self.buffers[id.0]
    }

    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        let device = &self.device.device;
        self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    /// Submits what was recorded. The way must be clear, see [`make_way`](Self::make_way).
    fn submit(&mut self) -> Option<wgpu::SubmissionIndex> {
        let encoder = self.encoder.take()?;
        Some(self.submit_commands([encoder.finish()]))
    }

    fn submit_commands<const N: usize>(&mut self, commands: [wgpu::CommandBuffer; N]) -> wgpu::SubmissionIndex {
        let submission = self.device.queue.submit(commands);
        self.in_flight.add(&self.device, submission.clone());
        self.stats.submissions += 1;
        self.stats.in_flight = self.in_flight.most();
        submission
    }

    /// Writes to a buffer, after the commands recorded so far: writes take effect ahead of the next submission.
    fn upload(&mut self, id: Id, offset: u64, bytes: &[u8]) {
        self.submit();
        self.device.queue.write_buffer(self.buffer(id), offset, bytes);
        self.count_queued(bytes.len());
    }

    fn count_queued(&mut self, bytes: usize) {
        self.queued += bytes as u64;
        self.stats.queued_bytes = self.stats.queued_bytes.max(self.queued);
    }

    /// Waits until what was recorded may be submitted.
    async fn make_way(&mut self) -> Result<()> {
        match self.encoder {
            Some(_) => self.in_flight.down_to(&self.device, SUBMISSIONS - 1).await,
            None => Ok(()),
        }
    }

    /// Waits until `bytes` may be written, and submitted what was recorded before them, within the queue that the ledger
    /// counts: browsers keep every write in memory of their own until the GPU comes to it.
    async fn make_room(&mut self, bytes: u64) -> Result<()> {
        if self.queued + bytes > self.program.upload_queue() {
            self.in_flight.down_to(&self.device, SUBMISSIONS - 1).await?;
            // Natively, writes go with the next submission, and there may be nothing else to submit.
            if self.submit().is_none() {
                self.submit_commands([]);
            }
            self.in_flight.down_to(&self.device, 0).await?;
            self.queued = 0;
        }
        self.make_way().await
    }

    /// Records dispatches. `choose` picks them from the layers and the head.
    fn record<'a>(&'a mut self, choose: impl FnOnce(&'a [Layer], &'a [Dispatch]) -> &'a [Dispatch], pass: Pass) {
        let dispatches = choose(&self.layers, &self.head);
        if !dispatches.is_empty() {
            let encoder =
                self.encoder.get_or_insert_with(|| self.device.device.create_command_encoder(&Default::default()));
            let mut compute = encoder.begin_compute_pass(&Default::default());
            dispatch(&mut compute, dispatches, pass, &mut self.stats);
        }
    }

    /// Records the copy of a whole buffer.
    fn copy(&mut self, from: Id, to: Id) {
        let (from, to) = (self.buffer(from).clone(), self.buffer(to).clone());
        self.encoder().copy_buffer_to_buffer(&from, 0, &to, 0, from.size());
    }

    /// Writes rows of `width` floats into an activation buffer with its padding.
    fn write_rows(&mut self, buf: Buf, values: &[f32]) {
        let Activation { id, width, stride, .. } = self.program.activations[buf.0];
        if stride == width {
            self.upload(id, 0, bytemuck::cast_slice(values));
            return;
        }
        let mut padded = vec![0.0; values.len() / width * stride];
        for (to, from) in padded.chunks_mut(stride).zip(values.chunks(width)) {
            to[..width].copy_from_slice(from);
        }
        self.upload(id, 0, bytemuck::cast_slice(&padded));
    }

    /// Records what `ahead` asks for and its way back to `target`, from offset `at`. Returns where it ends.
    fn record_foresee(&mut self, ahead: Range<usize>, target: Id, mut at: u64) -> u64 {
        let Some(scores) = self.plan.foreseen else { return at };
        let Activation { id, stride, .. } = self.program.activations[scores.0];
        let pass = self.pass;
        for layer in ahead {
            let distance = (layer + 1).saturating_sub(self.mixed);
            self.record(|layers, _| layers[layer].foresee_from(distance), pass);
            at = self.copy_back(id, 0..4 * (pass.m as usize * stride) as u64, target, at);
        }
        at
    }

    /// Scores without the padding of their rows, by layer.
    fn unpack_foreseen(&mut self, ahead: Range<usize>, bytes: &[u8]) {
        self.foreseen = (ahead.clone(), Vec::new());
        let Some(scores) = self.plan.foreseen else { return };
        let row = 4 * self.program.activations[scores.0].stride;
        let layers = ahead.zip(bytes.chunks_exact(self.pass.m as usize * row));
        let unpack = |(layer, bytes): (usize, &[u8])| {
            let experts = self.plan.layers[layer].moe.map_or(0, |moe| moe.experts);
            bytes.chunks_exact(row).flat_map(|row| floats(&row[..4 * experts])).collect()
        };
        self.foreseen.1 = layers.map(unpack).collect();
    }

    async fn run_foresee(&mut self, ahead: Range<usize>) -> Result<Vec<Vec<f32>>> {
        let known = std::mem::take(&mut self.foreseen);
        if known.0 == ahead {
            return Ok(known.1);
        }
        let Some(routed) = self.program.routed.filter(|_| ahead.len() <= AHEAD && !ahead.is_empty()) else {
            return Ok(Vec::new());
        };
        self.free(routed.read);
        let bytes = self.record_foresee(ahead.clone(), routed.read, 0);
        let read = self.start_read(routed.read, bytes).await?;
        let bytes = self.finish_read(routed.read, read).await?;
        self.unpack_foreseen(ahead, &bytes);
        Ok(std::mem::take(&mut self.foreseen.1))
    }

    async fn run_mix(&mut self, layer: usize, ahead: Range<usize>) -> Result<Routing> {
        self.foreseen = (0..0, Vec::new());
        self.device.check()?;
        let pass = self.pass;
        self.record(|layers, _| &layers[layer].mix, pass);
        self.mixed = layer + 1;
        let (Some(moe), Some(routed)) = (self.plan.layers[layer].moe, self.program.routed) else {
            self.record(|layers, _| &layers[layer].shared, pass);
            return Ok(Routing::default());
        };
        let (n, weights) = (4 * (pass.m as usize * moe.top_k) as u64, 4 * routed.weights_at as u64);
        let ahead = ahead.start..ahead.end.min(ahead.start + AHEAD);
        self.free(routed.read);
        let at = self.copy_back(routed.choice, 0..n, routed.read, 0);
        let at = self.copy_back(routed.choice, weights..weights + n, routed.read, at);
        let bytes = self.record_foresee(ahead.clone(), routed.read, at);
        let read = self.start_read(routed.read, bytes).await?;
        // The GPU computes these while the host waits, and reads experts.
        self.record(|layers, _| &layers[layer].shared, pass);
        self.make_way().await?;
        self.submit();
        let bytes = self.finish_read(routed.read, read).await?;
        let (choice, foreseen) = bytes.split_at(2 * n as usize);
        self.unpack_foreseen(ahead, foreseen);
        let (ids, weights) = choice.split_at(n as usize);
        let ids: Vec<u32> = bytemuck::pod_collect_to_vec(ids);
        if let Some(id) = ids.iter().find(|id| **id as usize >= moe.experts) {
            return Err(Error::Gpu(format!("the router chose expert {id} of {}", moe.experts)));
        }
        Ok(Routing { top_k: moe.top_k, ids, weights: floats(weights).collect() })
    }

    /// Writes which tokens the pass is over. There must be room.
    fn announce(&mut self) {
        let Pass { m, pos, .. } = self.pass;
        self.upload(self.program.passes, 0, bytemuck::cast_slice(&[m, pos]));
    }

    /// Writes how many rows the head is to take. There must be room.
    fn announce_head(&mut self, rows: usize) {
        self.upload(self.program.passes, UNIFORM, bytemuck::cast_slice(&[rows as u32, self.pass.pos]));
    }

    fn record_head(&mut self, rows: Range<usize>) {
        let residual = self.program.activations[self.plan.residual.0];
        let head_in = self.program.activations[self.plan.head_in.0].id;
        let (source, target) = (self.buffer(residual.id).clone(), self.buffer(head_in).clone());
        let row = 4 * residual.stride as u64;
        self.encoder().copy_buffer_to_buffer(&source, rows.start as u64 * row, &target, 0, rows.len() as u64 * row);
        self.record(|_, head| head, Pass { m: rows.len() as u32, ..self.pass });
    }

    async fn run_head(&mut self, rows: Range<usize>) -> Result<Vec<f32>> {
        self.device.check()?;
        if rows.end > self.pass.m as usize {
            return Err(Error::Request(format!("logits of row {} in a pass of {}", rows.end - 1, self.pass.m)));
        }
        let mut out = Vec::with_capacity(rows.len() * self.plan.vocab);
        let mut first = rows.start;
        while first < rows.end {
            let n = (rows.end - first).min(self.limits.head_rows);
            self.make_room(UNIFORM).await?;
            self.announce_head(n);
            self.record_head(first..first + n);
            out.extend(self.read_rows(self.plan.logits, 0..n).await?);
            first += n;
        }
        Ok(out)
    }

    /// Writes a matrix into its windows, or a vector into its one.
    async fn write_windows(&mut self, weight: Weight, bytes: &[u8]) -> Result<()> {
        self.device.check()?;
        let spec = &self.plan.weights[weight.0];
        let expected = spec.bytes();
        if bytes.len() > expected || bytes.len() + 16 <= expected {
            let (path, expected) = (spec.tensor.clone(), expected as u64);
            return Err(Error::Truncated { path, expected, actual: bytes.len() as u64 });
        }
        for window in self.program.weights[weight.0].clone() {
            match window.layout {
                None => self.upload_pieces(window.id, 0, bytes).await?,
                Some(layout) => {
                    let whole = Layout { rows: self.matrix_rows(weight), ..layout };
                    for (plane, (to, from)) in layout.planes().into_iter().zip(whole.planes()).enumerate() {
                        let row = to.len() / layout.rows;
                        let start = from.start + window.rows.start * row;
                        if plane == 0 || row > 0 {
                            let part = &bytes[start..start + to.len()];
                            self.upload_pieces(window.id, to.start as u64, part).await?;
                        }
                    }
                }
            }
        }
        self.device.check()
    }

    fn matrix_rows(&self, weight: Weight) -> usize {
        self.program.weights[weight.0].last().map_or(0, |w| w.rows.end)
    }

    /// Uploads bytes, whose number need not be a multiple of four, in pieces that keep the queue within its bounds.
    async fn upload_pieces(&mut self, id: Id, offset: u64, bytes: &[u8]) -> Result<()> {
        let piece = (self.program.upload_queue() / 2).next_multiple_of(4);
        for (i, part) in bytes.chunks(piece as usize).enumerate() {
            self.make_room(part.len().next_multiple_of(4) as u64).await?;
            let offset = offset + i as u64 * piece;
            let (whole, rest) = part.split_at(part.len() / 4 * 4);
            if !whole.is_empty() {
                self.upload(id, offset, whole);
            }
            if !rest.is_empty() {
                let mut last = [0; 4];
                last[..rest.len()].copy_from_slice(rest);
                self.upload(id, offset + whole.len() as u64, &last);
            }
        }
        Ok(())
    }
}

fn dispatch(compute: &mut wgpu::ComputePass, dispatches: &[Dispatch], pass: Pass, stats: &mut Stats) {
    for dispatch in dispatches {
        let [x, y, z] = (dispatch.grid)(pass);
        if x * y * z > 0 {
            compute.set_pipeline(&dispatch.pipeline);
            compute.set_bind_group(0, &dispatch.bind_group, &[]);
            compute.dispatch_workgroups(x, y, z);
            stats.dispatches += 1;
        }
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))
}

impl Backend for Gpu {
    fn info(&self) -> Info {
        Info { kind: "gpu", detail: self.device.detail().to_owned() }
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn write_weight<'a>(&'a mut self, weight: Weight, bytes: &'a [u8]) -> LocalBoxFuture<'a, Result<()>> {
        self.write_windows(weight, bytes).boxed_local()
    }

    fn reset(&mut self) -> Result<()> {
        self.device.check()?;
        for id in self.program.states.concat() {
            let buffer = self.buffer(id).clone();
            self.encoder().clear_buffer(&buffer, 0, None);
        }
        Ok(())
    }

    fn save(&mut self, slot: usize) -> Result<()> {
        self.device.check()?;
        for (state, copy) in self.program.checkpoints[slot].clone() {
            self.copy(state, copy);
        }
        Ok(())
    }

    fn restore(&mut self, slot: usize) -> Result<()> {
        self.device.check()?;
        for (state, copy) in self.program.checkpoints[slot].clone() {
            self.copy(copy, state);
        }
        Ok(())
    }

    fn begin(&mut self, pos: usize, embeddings: &[f32]) -> Result<()> {
        self.device.check()?;
        let m = embeddings.len() / self.plan.hidden;
        if m == 0 || m > self.limits.chunk || pos + m > self.limits.context {
            return Err(Error::Context { prompt: pos + m, context: self.limits.context });
        }
        self.pass = Pass { m: m as u32, pos: pos as u32, tiles: 0 };
        self.mixed = 0;
        self.announce();
        self.write_rows(self.plan.residual, embeddings);
        if let Some(rope) = self.plan.rope {
            self.write_rows(rope, &rope_table(&self.plan, pos, m));
        }
        Ok(())
    }

    fn mix(&mut self, layer: usize, ahead: Range<usize>) -> LocalBoxFuture<'_, Result<Routing>> {
        self.run_mix(layer, ahead).boxed_local()
    }

    fn foresee(&mut self, ahead: Range<usize>) -> LocalBoxFuture<'_, Result<Vec<Vec<f32>>>> {
        self.run_foresee(ahead).boxed_local()
    }

    fn works_while_called(&self) -> bool {
        false
    }

    fn write_slot(&mut self, slot: usize, expert: Place, extent: &Bytes) -> Result<()> {
        self.device.check()?;
        if slot >= self.limits.slots || extent.len() < self.plan.expert.map_or(0, |e| e.bytes()) {
            let expected = self.program.pool.slot_bytes as u64;
            return Err(Error::Truncated {
                path: format!("expert for slot {slot}"),
                expected,
                actual: extent.len() as u64,
            });
        }
        // Absent, then the weights, then present: queue order keeps table and weights consistent.
        let [freed, filled] = self.table.put(slot, expert);
        self.write_entry(freed);
        let (arena, offset) = self.program.slot(slot);
        let len = extent.len().min(self.program.pool.slot_bytes);
        let id = self.program.pool.arenas[arena];
        match extent {
            Bytes::Owned(bytes) => self.upload(id, offset as u64, &bytes[..len]),
            #[cfg(target_arch = "wasm32")]
            Bytes::Js(array) => {
                self.submit();
                let (queue, buffer) = (self.device.queue.as_webgpu(), self.buffer(id).as_webgpu());
                let (Some(queue), Some(buffer)) = (queue, buffer) else {
                    return Err(Error::Gpu("the device is not a browser's".to_owned()));
                };
                // From JavaScript's memory to the GPU, past the wasm memory.
                let part = array.subarray(0, len as u32);
                queue
                    .write_buffer_with_f64_and_u8_array(buffer, offset as f64, &part)
                    .map_err(|e| Error::Gpu(format!("an expert could not be uploaded: {e:?}")))?;
                self.count_queued(len);
            }
        }
        self.write_entry(filled);
        Ok(())
    }

    fn settle(&mut self) -> LocalBoxFuture<'_, Result<()>> {
        self.make_room(self.program.write_bytes()).boxed_local()
    }

    fn start(&mut self) -> Result<()> {
        self.device.check()?;
        self.submit();
        Ok(())
    }

    fn run_experts(&mut self, layer: usize, items: &[WorkItem]) -> Result<()> {
        self.device.check()?;
        let (Some(moe), Some(routed)) = (self.plan.layers[layer].moe, self.program.routed) else { return Ok(()) };
        if items.is_empty() {
            return Ok(());
        }
        let work = work::list(&self.program, moe.top_k, items);
        self.upload(routed.work, 0, bytemuck::cast_slice(&work.words));
        for (arena, tiles) in work.tiles.into_iter().enumerate() {
            if tiles > 0 {
                let pass = Pass { tiles, ..self.pass };
                self.record(|layers, _| &layers[layer].experts[arena], pass);
            }
        }
        Ok(())
    }

    fn finish_layer(&mut self, layer: usize) -> Result<()> {
        self.device.check()?;
        let pass = self.pass;
        self.record(|layers, _| layers[layer].combine.as_slice(), pass);
        Ok(())
    }

    fn logits(&mut self, rows: Range<usize>) -> LocalBoxFuture<'_, Result<Vec<f32>>> {
        self.run_head(rows).boxed_local()
    }

    fn residual(&mut self) -> LocalBoxFuture<'_, Result<Vec<f32>>> {
        self.read_rows(self.plan.residual, 0..self.pass.m as usize).boxed_local()
    }

    fn normed(&mut self, rows: usize) -> LocalBoxFuture<'_, Result<Vec<f32>>> {
        self.read_rows(self.plan.head_normed, 0..rows).boxed_local()
    }

    fn round_trip(&mut self) -> LocalBoxFuture<'_, Result<Option<f64>>> {
        self.time_round_trip().map_ok(Some).boxed_local()
    }

    fn run_ahead(&mut self) -> Option<&mut dyn RunAhead> {
        self.program.routed?;
        Some(self)
    }

    fn traffic(&self) -> Traffic {
        Traffic { submissions: self.stats.submissions, readbacks: self.stats.readbacks }
    }

    fn workspace_bytes(&self) -> u64 {
        self.program.workspace_bytes(&self.plan, &self.limits)
    }
}
