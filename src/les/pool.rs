//! Which expert is in which slot.
//!
//! Once there are `top_k` slots for every layer each layer has an equal share of its own, in which the least often used
//! expert makes room (a shared pool smaller than one token's cycle would never hit). Below that all layers share one
//! ring. A layer whose rows need more experts than it may have slots runs in waves; each expert is loaded at most once
//! a pass.

use crate::backend::WorkItem;

const ABSENT: u32 = u32::MAX;

/// An expert to be read into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub layer: u32,
    pub expert: u32,
    pub slot: u32,
}

/// One round of a layer: what can run at once, then what can run when `loads` are done. The loads of a wave overwrite
/// slots that earlier waves used, so they must be issued after the earlier waves' work was.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wave {
    pub ready: Vec<WorkItem>,
    pub loads: Vec<Load>,
    pub after: Vec<WorkItem>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Experts that a pass needed and found, and that it had to read. Each counts once a pass and layer.
    pub hits: u64,
    pub misses: u64,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// `layer · experts + expert`, or [`ABSENT`].
    holds: u32,
    used: u64,
}

#[derive(Debug)]
pub struct Pool {
    layers: usize,
    experts: usize,
    slots: Vec<Slot>,
    /// Slots of each layer's own share; 0 where all layers share one ring.
    share: usize,
    /// Next slot of the ring.
    hand: usize,
    /// Slot of each (layer, expert), or [`ABSENT`].
    table: Vec<u32>,
    /// How often each (layer, expert) was needed, halved from time to time.
    uses: Vec<u32>,
    pass: u64,
    stats: PoolStats,
}

/// Uses at which a layer's counts are halved, so that old favourites make room.
const AGE_AT: u32 = 64;

impl Pool {
    /// A pool of `slots` slots for `layers` layers of `experts` experts, `top_k` of them chosen a row.
    ///
    /// # Panics
    /// If there are fewer than `top_k` slots.
    pub fn new(layers: usize, experts: usize, top_k: usize, slots: usize) -> Pool {
        assert!(slots >= top_k, "a pool holds at least top_k experts");
        let share = if layers > 0 && slots >= layers * top_k { (slots / layers).min(experts) } else { 0 };
        Pool {
            layers,
            experts,
            slots: vec![Slot { holds: ABSENT, used: 0 }; slots],
            share,
            hand: 0,
            table: vec![ABSENT; layers * experts],
            uses: vec![0; layers * experts],
            pass: 0,
            stats: PoolStats::default(),
        }
    }

    pub fn stats(&self) -> PoolStats {
        self.stats
    }

    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Slots each layer has for itself, 0 where all share one ring.
    pub fn share(&self) -> usize {
        self.share
    }

    /// Plans a layer for rows that chose `ids[row · top_k + rank]`. The slots are taken at once: a load that fails must
    /// be taken back with [`forget`](Self::forget).
    pub fn plan(&mut self, layer: usize, ids: &[u32], top_k: usize) -> Vec<Wave> {
        self.pass += 1;
        let needed = distinct(ids, self.experts);
        let base = layer * self.experts;
        self.age(base);
        for &e in &needed {
            self.uses[base + e as usize] += 1;
        }
        let (resident, missing): (Vec<u32>, Vec<u32>) =
            needed.iter().copied().partition(|&e| self.table[base + e as usize] != ABSENT);
        self.stats.hits += resident.len() as u64;
        self.stats.misses += missing.len() as u64;

        let mut waves = vec![Wave { ready: self.items(base, ids, top_k, &resident), ..Wave::default() }];
        for &e in &resident {
            self.slots[self.table[base + e as usize] as usize].used = self.pass;
        }
        let window = if self.share > 0 { layer * self.share..(layer + 1) * self.share } else { 0..self.slots.len() };
        // Slots that the wave at hand may not overwrite: what it reads.
        let mut busy: Vec<usize> = resident.iter().map(|&e| self.table[base + e as usize] as usize).collect();
        let mut wave_experts = Vec::new();
        for &e in &missing {
            if busy.len() == window.len() {
                self.close_wave(&mut waves, base, ids, top_k, &mut wave_experts);
                waves.push(Wave::default());
                busy.clear();
            }
            let slot = self.victim(window.clone(), &busy);
            busy.push(slot);
            let held = std::mem::replace(&mut self.slots[slot], Slot { holds: (base as u32) + e, used: self.pass });
            if held.holds != ABSENT {
                self.table[held.holds as usize] = ABSENT;
            }
            self.table[base + e as usize] = slot as u32;
            waves.last_mut().expect("there is a wave").loads.push(Load {
                layer: layer as u32,
                expert: e,
                slot: slot as u32,
            });
            wave_experts.push(e);
        }
        self.close_wave(&mut waves, base, ids, top_k, &mut wave_experts);
        waves
    }

    /// Takes back loads whose bytes never arrived.
    pub fn forget(&mut self, loads: &[Load]) {
        for load in loads {
            let holds = load.layer * self.experts as u32 + load.expert;
            if self.slots[load.slot as usize].holds == holds {
                self.slots[load.slot as usize] = Slot { holds: ABSENT, used: 0 };
                self.table[holds as usize] = ABSENT;
            }
        }
    }

    fn close_wave(&self, waves: &mut [Wave], base: usize, ids: &[u32], top_k: usize, experts: &mut Vec<u32>) {
        waves.last_mut().expect("there is a wave").after = self.items(base, ids, top_k, experts);
        experts.clear();
    }

    /// The (row, rank) pairs that chose one of `experts`.
    fn items(&self, base: usize, ids: &[u32], top_k: usize, experts: &[u32]) -> Vec<WorkItem> {
        let mut wanted = vec![false; self.experts];
        experts.iter().for_each(|&e| wanted[e as usize] = true);
        let chosen = ids.iter().enumerate().filter(|(_, e)| wanted[**e as usize]);
        let item = |(i, e): (usize, &u32)| WorkItem {
            row: (i / top_k) as u32,
            rank: (i % top_k) as u32,
            slot: self.table[base + *e as usize],
        };
        chosen.map(item).collect()
    }

    /// The slot to fill next: an empty one, else of the least often, least recently used expert (in a share), else the
    /// next one round the ring.
    fn victim(&mut self, window: std::ops::Range<usize>, busy: &[usize]) -> usize {
        if self.share == 0 {
            loop {
                let slot = self.hand;
                self.hand = (self.hand + 1) % self.slots.len();
                if !busy.contains(&slot) {
                    return slot;
                }
            }
        }
        let free = window.filter(|s| !busy.contains(s));
        let cost = |s: &usize| match self.slots[*s] {
            Slot { holds: ABSENT, .. } => (0, 0),
            Slot { holds, used } => (1 + self.uses[holds as usize], used),
        };
        free.min_by_key(cost).expect("the caller leaves a slot that is not busy")
    }

    fn age(&mut self, base: usize) {
        let counts = &mut self.uses[base..base + self.experts];
        if counts.iter().any(|c| *c >= AGE_AT) {
            counts.iter_mut().for_each(|c| *c /= 2);
        }
    }

    /// Number of layers the pool serves.
    pub fn layers(&self) -> usize {
        self.layers
    }
}

/// Distinct ids in the order they first appear.
fn distinct(ids: &[u32], experts: usize) -> Vec<u32> {
    let mut seen = vec![false; experts];
    ids.iter().copied().filter(|&e| !std::mem::replace(&mut seen[e as usize], true)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Executes waves against a model of the slots; checks that each (row, rank) runs once, on its own expert.
    fn execute(held: &mut HashMap<u32, (u32, u32)>, layer: usize, ids: &[u32], top_k: usize, waves: &[Wave]) {
        let mut done = vec![0; ids.len()];
        let mut run = |held: &HashMap<u32, (u32, u32)>, items: &[WorkItem]| {
            for i in items {
                let at = i.row as usize * top_k + i.rank as usize;
                done[at] += 1;
                assert_eq!(held.get(&i.slot), Some(&(layer as u32, ids[at])), "the slot holds another expert");
            }
        };
        for wave in waves {
            run(held, &wave.ready);
            for load in &wave.loads {
                held.insert(load.slot, (load.layer, load.expert));
            }
            run(held, &wave.after);
        }
        assert!(done.iter().all(|d| *d == 1));
    }

    proptest! {
        #[test]
        fn every_pair_runs_once_on_its_expert(
            layers in 1usize..5, experts in 1usize..20, k in 1usize..5, extra in 0usize..40,
            passes in prop::collection::vec((0usize..5, prop::collection::vec(0u32..1000, 1..40)), 1..40),
        ) {
            let k = k.min(experts);
            let mut pool = Pool::new(layers, experts, k, k + extra);
            let mut held = HashMap::new();
            for (layer, seeds) in passes {
                let layer = layer % layers;
                // Rows of k different experts.
                let ids: Vec<u32> = seeds.iter()
                    .flat_map(|s| (0..k as u32).map(move |r| (s + r) % experts as u32)).collect();
                let waves = pool.plan(layer, &ids, k);
                execute(&mut held, layer, &ids, k, &waves);
                let loads: usize = waves.iter().map(|w| w.loads.len()).sum();
                prop_assert!(loads <= distinct(&ids, experts).len());
            }
        }

        #[test]
        fn forgotten_loads_are_loaded_again(k in 1usize..5, slots in 0usize..10) {
            let mut pool = Pool::new(1, 16, k, k + slots);
            let ids: Vec<u32> = (0..k as u32).collect();
            let first = pool.plan(0, &ids, k);
            for wave in &first { pool.forget(&wave.loads); }
            let again = pool.plan(0, &ids, k);
            prop_assert_eq!(again.iter().map(|w| w.loads.len()).sum::<usize>(), k);
        }
    }

    #[test]
    fn a_layer_keeps_its_share() {
        let mut pool = Pool::new(2, 8, 2, 4);
        assert_eq!(pool.share(), 2);
        pool.plan(0, &[1, 2], 2);
        for e in 0..8 {
            pool.plan(1, &[e, (e + 1) % 8], 2);
        }
        assert!(pool.plan(0, &[1, 2], 2)[0].loads.is_empty());
    }
}
