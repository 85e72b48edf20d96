//! Running ahead: layers are submitted before their routing is known, because the GPU itself looks up which experts have
//! slots, see `shaders/expert_lookup.wgsl`.
//!
//! All that the host learns comes back at once: what every layer chose and whether it could run it, forecasts from the
//! last one, and logits if that was the model's. A pass whose experts all have slots is one submission.

use std::ops::Range;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;

use super::program::{AHEAD, Activation, Pass, UNIFORM};
use super::readback::TRIALS;
use super::tuning::ITEMS_A_TILE;
use super::{Gpu, dispatch, floats};
use crate::backend::{Ahead, AheadCosts, Place, RunAhead};
use crate::clock;
use crate::error::{Error, Result};

/// Words of a record that say what became of a layer.
const SKIPPED: u32 = 0;
const STOPPED: u32 = 2;
/// Where the last layer that is submitted stands in [`Program::passes`](super::program::Program::passes).
const LAST: u64 = 8;

/// Which expert is in which slot, as the GPU's table says once what was written has been taken up.
pub struct SlotTable {
    /// Experts a layer has room for.
    experts: usize,
    /// Slot + 1 by entry, 0 for none.
    slots: Vec<u32>,
    /// By slot, the entry that was written last.
    held: Vec<Option<usize>>,
}

/// An entry that has changed, if one has.
pub type Entry = Option<(usize, u32)>;

impl SlotTable {
    pub fn new(layers: usize, experts: usize, slots: usize) -> SlotTable {
        SlotTable { experts, slots: vec![0; layers * experts], held: vec![None; slots] }
    }

    /// An expert is written to a slot: what changes before, and what after.
    pub fn put(&mut self, slot: usize, expert: Place) -> [Entry; 2] {
        let own = slot as u32 + 1;
        let entry = expert.layer * self.experts + expert.expert;
        let freed = self.held[slot].replace(entry).filter(|old| self.slots[*old] == own);
        let freed = freed.map(|old| {
            self.slots[old] = 0;
            (old, 0)
        });
        self.slots[entry] = own;
        [freed, Some((entry, own))]
    }

    fn clear(&mut self) {
        self.slots.fill(0);
        self.held.fill(None);
    }

    /// How many experts of a layer each arena holds.
    fn residents(&self, layer: usize, arenas: usize, slots_an_arena: usize) -> Vec<usize> {
        let mut counts = vec![0; arenas];
        for slot in self.slots[layer * self.experts..][..self.experts].iter().filter(|slot| **slot > 0) {
            counts[(*slot as usize - 1) / slots_an_arena] += 1;
        }
        counts
    }
}

impl Gpu {
    /// Writes an entry of the slot table. The way must be clear, as for a slot.
    pub(super) fn write_entry(&mut self, entry: Entry) {
        if let (Some((entry, slot)), Some(routed)) = (entry, self.program.routed) {
            self.upload(routed.table, 4 * entry as u64, &slot.to_le_bytes());
        }
    }

    /// Records a layer of a pass that may have stopped before it.
    fn record_layer(&mut self, compute: &mut wgpu::ComputePass, layer: usize, foresee: usize) {
        let (pass, stats) = (self.pass, &mut self.stats);
        let steps = &self.layers[layer];
        dispatch(compute, &steps.mix, pass, stats);
        dispatch(compute, &steps.shared, pass, stats);
        let (Some(lookup), Some(moe)) = (&steps.lookup, self.plan.layers[layer].moe) else { return };
        dispatch(compute, std::slice::from_ref(lookup), pass, stats);
        let pairs = pass.m as usize * moe.top_k;
        let pool = &self.program.pool;
        let residents = self.table.residents(layer, pool.arenas.len(), pool.slots_an_arena);
        for (experts, residents) in steps.experts.iter().zip(residents) {
            // Every expert that is chosen begins a tile, and every tile that is full.
            let tiles = if residents == 0 { 0 } else { pairs.min(residents + pairs / ITEMS_A_TILE) };
            dispatch(compute, experts, Pass { tiles: tiles as u32, ..pass }, stats);
        }
        for (distance, steps) in self.layers[layer + 1..].iter().take(foresee).enumerate() {
            if let Some(forecast) = steps.forecasts.get(distance) {
                dispatch(compute, forecast, pass, stats);
            }
        }
        dispatch(compute, steps.combine.as_slice(), pass, stats);
    }

    async fn run_layers(&mut self, layers: Range<usize>, foresee: usize, rows: Range<usize>) -> Result<Ahead> {
        let Some(routed) = self.program.routed else {
            return Err(Error::Gpu("a model without experts is not run ahead".to_owned()));
        };
        if self.pass.m as usize > routed.rows_ahead {
            return Err(Error::Gpu(format!("{} tokens are more than run ahead, {}", self.pass.m, routed.rows_ahead)));
        }
        self.device.check()?;
        let foresee = if self.program.foreseen.is_empty() { 0 } else { foresee.min(AHEAD) };
        let ends = layers.end == self.layers.len() && !rows.is_empty() && rows.len() <= self.limits.head_rows;
        if ends {
            self.make_room(UNIFORM).await?;
            self.announce_head(rows.len());
        }
        self.make_room(UNIFORM).await?;
        self.upload(self.program.passes, LAST, &(layers.end as u32 - 1).to_le_bytes());
        self.make_way().await?;
        let mut encoder = self.encoder.take().unwrap_or_else(|| self.new_encoder());
        let mut compute = encoder.begin_compute_pass(&Default::default());
        for layer in layers.clone() {
            self.record_layer(&mut compute, layer, foresee);
        }
        drop(compute);
        self.encoder = Some(encoder);
        if ends {
            self.record_head(rows.clone());
        }
        self.free(routed.read_ahead);
        let record = 4 * routed.record as u64;
        let range = layers.start as u64 * record..layers.end as u64 * record;
        let mut at = self.copy_back(routed.records, range, routed.read_ahead, 0);
        for distance in 0..foresee {
            let forecast = self.forecast_bytes();
            at = self.copy_back(self.program.foreseen[distance], 0..forecast, routed.read_ahead, at);
        }
        if ends {
            let Activation { id, stride, .. } = self.program.activations[self.plan.logits.0];
            at = self.copy_back(id, 0..4 * (rows.len() * stride) as u64, routed.read_ahead, at);
        }
        let read = self.start_read(routed.read_ahead, at).await?;
        let bytes = self.finish_read(routed.read_ahead, read).await?;
        let (records, rest) = bytes.split_at((layers.len() as u64 * record) as usize);
        let (forecasts, logits) = rest.split_at(foresee * self.forecast_bytes() as usize);
        let mut ahead = Ahead::default();
        for (layer, record) in layers.clone().zip(records.chunks_exact(record as usize)) {
            if let Some(moe) = self.plan.layers[layer].moe {
                let words: Vec<u32> = bytemuck::pod_collect_to_vec(record);
                let ids = &words[1..][..self.pass.m as usize * moe.top_k];
                if words[0] == SKIPPED {
                    return Err(Error::Gpu("a layer was skipped though nothing before it was missing".to_owned()));
                }
                if let Some(id) = ids.iter().find(|id| **id as usize >= moe.experts) {
                    return Err(Error::Gpu(format!("the router chose expert {id} of {}", moe.experts)));
                }
                ahead.ids.push(ids.to_vec());
                ahead.stopped = words[0] == STOPPED;
            } else {
                ahead.ids.push(Vec::new());
            }
            // A layer that does not route forecasts nothing.
            if (ahead.stopped || layer + 1 == layers.end) && self.plan.layers[layer].moe.is_some() {
                let after = layer + 1..self.layers.len().min(layer + 1 + foresee);
                self.unpack_foreseen(after, forecasts);
                ahead.foreseen = std::mem::take(&mut self.foreseen).1;
            }
            if ahead.stopped {
                break;
            }
        }
        if ahead.stopped {
            // The pass has its tokens again.
            self.make_room(UNIFORM).await?;
            self.announce();
        } else if ends {
            let Activation { width, stride, .. } = self.program.activations[self.plan.logits.0];
            let rows = logits.chunks_exact(4 * stride);
            ahead.logits = Some(rows.flat_map(|row| floats(&row[..4 * width])).collect());
        }
        Ok(ahead)
    }

    /// Bytes of the forecasts of one layer for the pass.
    fn forecast_bytes(&self) -> u64 {
        let stride = self.plan.foreseen.map_or(0, |buf| self.program.activations[buf.0].stride);
        4 * (self.pass.m as usize * stride) as u64
    }

    /// The time of a submission of layers that have no tokens, less that of an empty one.
    async fn time_skipping(&mut self) -> Result<AheadCosts> {
        let Some(routed) = self.program.routed else { return Ok(AheadCosts::default()) };
        let round_trip = self.time_round_trip().await?;
        self.pass = Pass { m: 1, pos: 0, tiles: 0 };
        self.make_room(UNIFORM).await?;
        self.upload(self.program.passes, 0, &[0; 8]);
        let mut times = Vec::new();
        let begun = clock::now();
        while times.len() < TRIALS && (times.is_empty() || clock::now() - begun < round_trip) {
            let start = clock::now();
            self.make_way().await?;
            let mut encoder = self.encoder.take().unwrap_or_else(|| self.new_encoder());
            let mut compute = encoder.begin_compute_pass(&Default::default());
            for layer in 0..self.layers.len() {
                self.record_layer(&mut compute, layer, 0);
            }
            drop(compute);
            self.encoder = Some(encoder);
            self.free(routed.read_ahead);
            let bytes = self.copy_back(routed.records, 0..4, routed.read_ahead, 0);
            let read = self.start_read(routed.read_ahead, bytes).await?;
            self.finish_read(routed.read_ahead, read).await?;
            times.push(clock::now() - start);
        }
        times.sort_by(f64::total_cmp);
        let skipped = (times[times.len() / 2] - round_trip).max(0.0) / self.layers.len().max(1) as f64;
        Ok(AheadCosts { round_trip, skipped })
    }

    fn new_encoder(&self) -> wgpu::CommandEncoder {
        self.device.device.create_command_encoder(&Default::default())
    }
}

impl RunAhead for Gpu {
    fn most_rows(&self) -> usize {
        self.program.routed.map_or(0, |routed| routed.rows_ahead)
    }

    fn run(&mut self, layers: Range<usize>, foresee: usize, rows: Range<usize>) -> LocalBoxFuture<'_, Result<Ahead>> {
        self.run_layers(layers, foresee, rows).boxed_local()
    }

    fn clear_slots(&mut self) -> Result<()> {
        self.device.check()?;
        let Some(routed) = self.program.routed else { return Ok(()) };
        self.table.clear();
        let buffer = self.buffer(routed.table).clone();
        self.encoder().clear_buffer(&buffer, 0, None);
        Ok(())
    }

    fn costs(&mut self) -> LocalBoxFuture<'_, Result<AheadCosts>> {
        self.time_skipping().boxed_local()
    }
}
