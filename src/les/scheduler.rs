//! What to do next: read, cancel, upload, run.
//!
//! The order of preference is the policy. What the layer at hand waits for is read first and takes any slot that it does
//! not itself still need; what is there runs while the rest arrives; guesses are read only while nothing that is waited
//! for is outstanding, nearest layer first, and only if they are likelier to be needed than what makes room for them.
//!
//! A pass over several tokens, such as a chunk of a prompt, goes through most experts of a layer, so that they stream
//! through its slots in the order in which they arrive. Each is read once at most: what was read ahead for the next layer
//! stays until that layer has run it, and nothing farther ahead is guessed at.
//!
//! A slot is chosen when the bytes have arrived, so that its old content is of use until then. An expert whose work has
//! been handed out may be overwritten at once: the one who carries the actions out does so in order.

use std::collections::VecDeque;

use super::hot::Warming;
use super::{Forecast, Frequencies, HotList, Key, Origin, Pool, Settings, Shape};
use crate::backend::WorkItem;

#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// A pass over some tokens begins. What an earlier one left undone is void.
    Begin { rows: usize },
    /// Scores of a layer's experts, `[rows, experts]`, by its router on an earlier state.
    Predicted { origin: Origin, layer: u32, scores: &'a [f32] },
    /// A layer's choice, `ids[row · top_k + rank]`.
    Routed { layer: u32, ids: &'a [u32] },
    /// The same where all of it was in slots and has run.
    Ran { layer: u32, ids: &'a [u32] },
    /// A read has brought an expert's bytes.
    Arrived { key: Key },
    /// A read has failed.
    Failed { key: Key },
    /// A read was not begun, having been cancelled.
    Cancelled { key: Key },
    /// The share of the time that layers have waited for flash, of late.
    Flash { busy: f64 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Read an expert. `demand`: the layer at hand waits for it.
    Read { key: Key, demand: bool },
    /// Do not read it after all, unless its read has begun. One of the three events about it comes nevertheless.
    Cancel { key: Key },
    /// Put the bytes that arrived into a slot.
    Upload { key: Key, slot: u32 },
    /// Let the bytes that arrived go.
    Drop { key: Key },
    /// Run these (row, rank) pairs of the layer at hand.
    Run { items: Vec<WorkItem> },
    /// A read that is waited for has failed twice: the pass cannot go on.
    Lost { key: Key },
}

/// Counted since the scheduler was made, in experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// What a pass needed of a layer and found in a slot or in memory.
    pub hits: u64,
    /// What it needed while a guess at it was being read.
    pub late: u64,
    /// What it needed and had to begin to read.
    pub misses: u64,
    pub demand_reads: u64,
    pub guess_reads: u64,
    /// Guesses that were read and then needed by the pass they were for.
    pub guesses_used: u64,
    /// Guesses that arrived when something likelier had all the slots.
    pub dropped: u64,
    pub cancelled: u64,
    /// Experts of an earlier visit that were read, and of these such as were then needed while they were there.
    pub warm_reads: u64,
    pub warm_used: u64,
}

impl Counts {
    /// What a pass needed and did not find: it had to be waited for.
    pub fn missed(&self) -> u64 {
        self.misses + self.late
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In a slot or nowhere.
    Idle,
    /// In the queue of what is waited for.
    Queued,
    Reading {
        demand: bool,
        cancelled: bool,
    },
    /// Its bytes are in memory.
    Landed {
        demand: bool,
    },
}

/// What a layer needs of one expert.
#[derive(Debug)]
struct Work {
    expert: u32,
    /// (row, rank)
    pairs: Vec<(u32, u32)>,
    run: bool,
}

const NONE: u16 = u16::MAX;

#[derive(Debug)]
pub struct Scheduler {
    shape: Shape,
    settings: Settings,
    pool: Pool,
    forecast: Forecast,
    states: Vec<State>,
    demand: VecDeque<Key>,
    reading: Vec<Key>,
    landed: VecDeque<Key>,
    /// The layer at hand and what it needs; its index by expert, or [`NONE`].
    layer: Option<u32>,
    work: Vec<Work>,
    work_of: Vec<u16>,
    ready: VecDeque<u16>,
    left: usize,
    /// Reads that failed once in this pass; what failed twice.
    failed: Vec<Key>,
    lost: Option<Key>,
    /// Guesses of this pass that are in a slot or on the way, and all there were: none is made twice.
    guessed: Vec<Key>,
    /// By expert: the pass it was tried in.
    tried: Vec<u32>,
    pass: u32,
    /// Tokens of the pass.
    rows: usize,
    busy: f64,
    frequencies: Frequencies,
    warming: Warming,
    counts: Counts,
}

impl Scheduler {
    /// # Panics
    /// If the pool is smaller than `top_k`, or `settings.reads` is 0.
    pub fn new(shape: Shape, pool: Pool, settings: Settings) -> Scheduler {
        assert!(settings.reads > 0, "nothing could be read");
        Scheduler {
            shape,
            settings,
            pool,
            forecast: Forecast::new(shape),
            states: vec![State::Idle; shape.keys()],
            demand: VecDeque::new(),
            reading: Vec::new(),
            landed: VecDeque::new(),
            layer: None,
            work: Vec::new(),
            work_of: vec![NONE; shape.experts],
            ready: VecDeque::new(),
            left: 0,
            failed: Vec::new(),
            lost: None,
            guessed: Vec::new(),
            tried: vec![0; shape.keys()],
            pass: 1,
            rows: 1,
            busy: 0.0,
            frequencies: Frequencies::new(shape),
            warming: Warming::default(),
            counts: Counts::default(),
        }
    }

    /// What is worth having in the pool the next time.
    pub fn hot_list(&self) -> HotList {
        self.frequencies.hottest(&self.pool)
    }

    /// Goes on from an earlier visit: its experts are read whenever nothing else is worth it.
    pub fn set_hot_list(&mut self, list: &HotList) {
        list.entries.iter().for_each(|(key, rate)| self.pool.expect(*key, f64::from(*rate)));
        self.frequencies = Frequencies::after(list);
        self.warming = Warming::new(list);
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn forecast(&self) -> &Forecast {
        &self.forecast
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes effect with the next pass.
    pub fn set_settings(&mut self, settings: Settings) {
        assert!(settings.reads > 0, "nothing could be read");
        self.settings = settings;
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Layers after one, or from the first, that forecasts are of use for: none where every expert has a slot.
    pub fn wants(&self, after: Option<u32>) -> std::ops::Range<u32> {
        let next = after.map_or(0, |layer| layer + 1);
        if self.settings.guesses == 0 || self.pool.holds_all() {
            return next..next;
        }
        self.guessed_at(next)
    }

    /// Layers from the next one on that guesses are made at.
    fn guessed_at(&self, next: u32) -> std::ops::Range<u32> {
        let depth = if self.rows > 1 { self.settings.depth.min(1) } else { self.settings.depth };
        next..(next + depth as u32).min(self.shape.layers as u32).max(next)
    }

    /// Layers that may be submitted before their routing is known.
    pub fn run_ahead(&self) -> usize {
        if self.settings.ready_first && self.settings.keep { self.settings.run_ahead } else { 0 }
    }

    /// Whether the layer that was routed last has run all it needs.
    pub fn layer_done(&self) -> bool {
        self.left == 0
    }

    /// Whether the layer that was routed last needs what is not in a slot.
    pub fn lacks(&self) -> bool {
        self.ready.len() < self.left
    }

    /// Whether a read is outstanding, so that an event about it is to come.
    pub fn is_reading(&self) -> bool {
        !self.reading.is_empty()
    }

    pub fn on(&mut self, event: Event) {
        match event {
            Event::Begin { rows } => self.begin(rows),
            Event::Predicted { origin, layer, scores } => self.forecast.predicted(origin, layer, scores),
            Event::Routed { layer, ids } => self.routed(layer, ids, false),
            Event::Ran { layer, ids } => self.routed(layer, ids, true),
            Event::Arrived { key } => self.arrived(key),
            Event::Failed { key } => self.failed(key),
            Event::Cancelled { key } => self.cancelled(key),
            Event::Flash { busy } => self.busy = busy.clamp(0.0, 1.0),
        }
    }

    fn begin(&mut self, rows: usize) {
        self.end_layer();
        self.rows = rows;
        self.pool.advance(rows);
        self.frequencies.advance(rows);
        self.forecast.begin();
        self.failed.clear();
        self.guessed.clear();
        self.pass += 1;
        self.lost = None;
    }

    /// What the layer at hand still waits for becomes a guess like others.
    fn end_layer(&mut self) {
        for key in self.demand.drain(..) {
            self.states[self.shape.index(key)] = State::Idle;
        }
        for key in self.reading.iter().chain(&self.landed) {
            match &mut self.states[self.shape.index(*key)] {
                State::Reading { demand, .. } | State::Landed { demand } => *demand = false,
                _ => {}
            }
        }
        for work in self.work.drain(..) {
            self.work_of[work.expert as usize] = NONE;
        }
        self.ready.clear();
        self.left = 0;
        self.layer = None;
    }

    fn routed(&mut self, layer: u32, ids: &[u32], run: bool) {
        self.end_layer();
        if !self.settings.keep {
            self.forget_layer(layer);
        }
        self.layer = Some(layer);
        self.forecast.routed(layer, ids);
        let top_k = self.shape.top_k;
        for (i, &expert) in ids.iter().enumerate() {
            let at = &mut self.work_of[expert as usize];
            if *at == NONE {
                *at = self.work.len() as u16;
                self.work.push(Work { expert, pairs: Vec::with_capacity(1), run });
            }
            let pair = ((i / top_k) as u32, (i % top_k) as u32);
            self.work[usize::from(*at)].pairs.push(pair);
        }
        self.left = self.work.len();
        for at in 0..self.work.len() {
            let key = Key { layer, expert: self.work[at].expert };
            self.pool.used(key, self.work[at].pairs.len());
            self.frequencies.used(key, self.work[at].pairs.len());
            self.counts.guesses_used += u64::from(self.guessed.contains(&key));
            if self.work[at].run {
                self.counts.hits += 1;
                self.left -= 1;
            } else {
                self.need(key, at as u16);
            }
        }
    }

    fn need(&mut self, key: Key, at: u16) {
        let warm = self.warming.used(self.shape.index(key));
        if self.pool.slot_of(key).is_some() {
            self.counts.hits += 1;
            self.counts.warm_used += u64::from(warm);
            self.ready.push_back(at);
            return;
        }
        match &mut self.states[self.shape.index(key)] {
            State::Landed { demand } => {
                self.counts.hits += 1;
                *demand = true;
            }
            State::Reading { demand, .. } => {
                self.counts.late += 1;
                *demand = true;
            }
            state => {
                self.counts.misses += 1;
                *state = State::Queued;
                self.demand.push_back(key);
            }
        }
    }

    fn forget_layer(&mut self, layer: u32) {
        for expert in 0..self.shape.experts as u32 {
            if let Some(slot) = self.pool.slot_of(Key { layer, expert }) {
                self.pool.clear(slot);
            }
        }
    }

    /// Takes a key off the reads, and says whether it is waited for.
    fn read_ended(&mut self, key: Key) -> Option<bool> {
        let at = self.reading.iter().position(|reading| *reading == key)?;
        self.reading.remove(at);
        match std::mem::replace(&mut self.states[self.shape.index(key)], State::Idle) {
            State::Reading { demand, .. } => Some(demand),
            _ => unreachable!("what is being read is in the state of being read"),
        }
    }

    fn arrived(&mut self, key: Key) {
        if let Some(demand) = self.read_ended(key) {
            self.states[self.shape.index(key)] = State::Landed { demand };
            self.landed.push_back(key);
        }
    }

    fn failed(&mut self, key: Key) {
        let again = self.failed.contains(&key);
        self.failed.push(key);
        match self.read_ended(key) {
            Some(true) if again => self.lost = Some(key),
            Some(true) => self.queue_first(key),
            _ => {}
        }
    }

    fn cancelled(&mut self, key: Key) {
        self.guessed.retain(|guessed| *guessed != key);
        match self.read_ended(key) {
            // It has become needed in the meantime.
            Some(true) => self.queue_first(key),
            Some(false) => self.counts.cancelled += 1,
            None => {}
        }
    }

    fn queue_first(&mut self, key: Key) {
        self.states[self.shape.index(key)] = State::Queued;
        self.demand.push_front(key);
    }

    /// The next thing to do, or `None` until there is another event. Actions take effect at once for what follows.
    pub fn next_action(&mut self) -> Option<Action> {
        if let Some(key) = self.lost.take() {
            return Some(Action::Lost { key });
        }
        let next = self.read_demanded().or_else(|| self.cancel_guess());
        // A device computes what is there while the host puts more into slots.
        let next = if self.settings.singly { next } else { next.or_else(|| self.run_ready()) };
        next.or_else(|| self.upload_demanded())
            .or_else(|| self.settle_guess())
            .or_else(|| self.read_guess())
            .or_else(|| self.run_ready())
    }

    /// The next read of what is waited for, ahead of everything else there is to do.
    pub fn next_read(&mut self) -> Option<Action> {
        self.read_demanded()
    }

    fn has_room(&self) -> bool {
        self.reading.len() + self.landed.len() < self.settings.reads
    }

    fn read_demanded(&mut self) -> Option<Action> {
        if !self.has_room() {
            return None;
        }
        let key = self.demand.pop_front()?;
        self.counts.demand_reads += 1;
        Some(self.read(key, true))
    }

    fn read(&mut self, key: Key, demand: bool) -> Action {
        self.states[self.shape.index(key)] = State::Reading { demand, cancelled: false };
        self.reading.push(key);
        Action::Read { key, demand }
    }

    /// Guesses whose reads have not begun make way for what is waited for, the last first.
    fn cancel_guess(&mut self) -> Option<Action> {
        if !self.is_waiting() {
            return None;
        }
        let (shape, states) = (self.shape, &mut self.states);
        let cancel =
            |key: &&Key| matches!(states[shape.index(**key)], State::Reading { demand: false, cancelled: false });
        let key = *self.reading.get(self.settings.lanes..)?.iter().rev().find(cancel)?;
        states[shape.index(key)] = State::Reading { demand: false, cancelled: true };
        Some(Action::Cancel { key })
    }

    /// Whether something is waited for.
    fn is_waiting(&self) -> bool {
        let waited = |key: &Key| matches!(self.states[self.shape.index(*key)], State::Reading { demand: true, .. });
        !self.demand.is_empty() || self.reading.iter().any(waited)
    }

    /// The worth of what is in a slot, where more is known of it than its past.
    fn worth(&self, key: Key) -> Option<f64> {
        if self.layer == Some(key.layer) {
            let at = self.work_of[key.expert as usize];
            return (at != NONE && !self.work[usize::from(at)].run).then_some(f64::INFINITY);
        }
        if self.layer.is_some_and(|layer| key.layer < layer) {
            return None;
        }
        if self.rows == 1 {
            return self.forecast.chance(key);
        }
        match self.tried[self.shape.index(key)] == self.pass {
            true => Some(f64::INFINITY),
            // Its turn comes before that of what has run.
            false => Some((self.rows as f64 * self.pool.heat(key)).min(1.0)),
        }
    }

    fn place(&self, key: Key, chance: f64) -> Option<u32> {
        self.pool.place(key, chance, |held| self.worth(held))
    }

    fn landed_at(&self, demanded: bool) -> Option<usize> {
        let state = State::Landed { demand: demanded };
        self.landed.iter().position(|key| self.states[self.shape.index(*key)] == state)
    }

    fn take_landed(&mut self, at: usize) -> Key {
        let key = self.landed.remove(at).expect("the position was found in it");
        self.states[self.shape.index(key)] = State::Idle;
        key
    }

    fn upload(&mut self, at: usize, slot: u32) -> Action {
        let key = self.take_landed(at);
        self.pool.put(key, slot);
        Action::Upload { key, slot }
    }

    fn upload_demanded(&mut self) -> Option<Action> {
        let at = self.landed_at(true)?;
        let key = self.landed[at];
        // Without a place all slots are waiting to run, and the first that has makes room.
        let slot = self.place(key, f64::INFINITY)?;
        self.ready.push_back(self.work_of[key.expert as usize]);
        Some(self.upload(at, slot))
    }

    fn run_ready(&mut self) -> Option<Action> {
        let layer = self.layer?;
        if !self.settings.ready_first && self.is_waiting() && self.landed_at(true).is_none() {
            return None;
        }
        let count = if self.settings.singly { 1 } else { self.ready.len() }.min(self.ready.len());
        let mut items = Vec::new();
        for at in self.ready.drain(..count) {
            let work = &mut self.work[usize::from(at)];
            let slot = self.pool.slot_of(Key { layer, expert: work.expert }).expect("what is ready is in a slot");
            items.extend(work.pairs.iter().map(|&(row, rank)| WorkItem { row, rank, slot }));
            work.run = true;
            self.left -= 1;
        }
        (!items.is_empty()).then_some(Action::Run { items })
    }

    /// Guesses that arrived: into a slot, or away.
    fn settle_guess(&mut self) -> Option<Action> {
        let at = self.landed_at(false)?;
        let key = self.landed[at];
        // What was read for a layer that has passed competes by its past.
        let ahead = self.layer.is_none_or(|layer| key.layer > layer);
        let chance = self.forecast.chance(key).filter(|_| ahead);
        match self.place(key, chance.unwrap_or_else(|| self.pool.heat(key))) {
            Some(slot) if self.settings.keep => Some(self.upload(at, slot)),
            // It waits for its layer, which needs it or lets it go.
            None if self.rows > 1 && ahead && self.tried[self.shape.index(key)] == self.pass => None,
            _ => {
                self.counts.dropped += 1;
                self.guessed.retain(|guessed| *guessed != key);
                Some(Action::Drop { key: self.take_landed(at) })
            }
        }
    }

    fn read_guess(&mut self) -> Option<Action> {
        // Where flash is what limits, every guess under way delays what is waited for next.
        let most =
            if self.busy > self.settings.saturated { self.settings.guesses.min(1) } else { self.settings.guesses };
        if !self.has_room() || self.is_waiting() || self.reading.len() >= most || !self.settings.keep {
            return None;
        }
        let mut layers = self.guessed_at(self.layer.map_or(0, |layer| layer + 1));
        let Some(key) = layers.find_map(|layer| self.best_guess(layer)) else { return self.read_warm() };
        self.counts.guess_reads += 1;
        self.guessed.push(key);
        self.tried[self.shape.index(key)] = self.pass;
        Some(self.read(key, false))
    }

    /// What an earlier visit had. In a pass only while flash has nothing at all to do, for a guess may come any time.
    fn read_warm(&mut self) -> Option<Action> {
        if self.rows > 1 || self.layer.is_some() && (!self.reading.is_empty() || self.busy > self.settings.saturated) {
            return None;
        }
        while let Some(key) = self.warming.left.pop_front() {
            let index = self.shape.index(key);
            let absent = self.pool.slot_of(key).is_none() && self.states[index] == State::Idle;
            // Less by a trifle, so that what is worth the same does not make room.
            if absent && self.place(key, 0.999 * self.pool.heat(key)).is_some() {
                self.warming.read(index);
                self.counts.warm_reads += 1;
                return Some(self.read(key, false));
            }
        }
        None
    }

    /// The likeliest expert of a layer that is nowhere, if it is worth reading.
    fn best_guess(&self, layer: u32) -> Option<Key> {
        let (mut best, mut least) = (None, self.settings.least_chance);
        for (expert, chance) in self.forecast.chances(layer).iter().enumerate() {
            // Most are too unlikely for anything else to matter.
            if f64::from(*chance) < least {
                continue;
            }
            let key = Key { layer, expert: expert as u32 };
            let index = self.shape.index(key);
            let absent = self.pool.slot_of(key).is_none() && self.states[index] == State::Idle;
            if absent && self.tried[index] != self.pass {
                (best, least) = (Some(key), f64::from(*chance));
            }
        }
        best.filter(|key| self.place(*key, least).is_some())
    }
}

#[cfg(test)]
mod tests;
