//! What is in which slot, and which expert is worth least.
//!
//! Once there are `top_k` slots for every layer each layer has a window of its own, and what is left over is an overflow
//! that all layers share: a pool without windows that is smaller than one token's cycle through the layers would never
//! hit. Below that all slots are shared. Layers that route to no experts have no window.
//!
//! An expert's *heat* estimates how likely the next token is to choose it: `(1 − d) · Σ d^age` over its uses, with ages
//! in tokens (LRFU: Lee et al., 2001). Decayed values are compared without decaying them: at any one time
//! `ln(heat) + λ·touched`, with `λ = −ln d`, orders them alike and does not change until the next use.

use std::ops::Range;

use super::{Key, Shape};

const NONE: u32 = u32::MAX;

/// What makes room. All but [`Lrfu`](Policy::Lrfu) exist to be compared with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Policy {
    /// Least recently and frequently used; `decay` is what a use counts for after one more token.
    Lrfu { decay: f64 },
    /// Least recently used.
    Lru,
    /// Least frequently used.
    Lfu,
}

impl Policy {
    /// Found by replaying the bundled model's dialogues; other values near it differ little.
    pub const DEFAULT: Policy = Policy::Lrfu { decay: 0.96 };
}

#[derive(Debug)]
pub struct Pool {
    shape: Shape,
    policy: Policy,
    /// By layer, how many before it route to experts; none for one that does not itself.
    windows: Vec<Option<usize>>,
    /// Layers that route to experts.
    routed: usize,
    /// Slots of each routed layer's own window; 0 where all are shared.
    window: usize,
    /// What each slot holds, an index of `shape`, or [`NONE`].
    held: Vec<u32>,
    /// The slot of each expert, or [`NONE`].
    table: Vec<u32>,
    /// By expert; higher is worth more. −∞ without a use.
    scores: Vec<f64>,
    /// Tokens so far, and uses.
    now: f64,
    uses: f64,
}

/// Share of the slots that layers lend each other, as a divisor.
const OVERFLOW_SHARE: usize = 4;

impl Pool {
    /// A pool for layers that all route to experts.
    ///
    /// # Panics
    /// If there are fewer than `top_k` slots.
    pub fn new(shape: Shape, slots: usize) -> Pool {
        Pool::for_layers(shape, std::iter::repeat_n(true, shape.layers), slots)
    }

    /// A pool for layers of which it is said whether they route to experts.
    ///
    /// # Panics
    /// If there are fewer than `top_k` slots.
    pub fn for_layers(shape: Shape, routed: impl Iterator<Item = bool>, slots: usize) -> Pool {
        let mut count = 0;
        let window = |routed: bool| {
            let window = routed.then_some(count);
            count += usize::from(routed);
            window
        };
        let windows = routed.map(window).collect();
        let lendable = (slots / OVERFLOW_SHARE).min(slots.saturating_sub(count * shape.top_k));
        let window = (slots - lendable).checked_div(count).unwrap_or(0);
        let window = if window >= shape.top_k && slots < count * shape.experts { window } else { 0 };
        Pool::of(shape, windows, slots, window, Policy::DEFAULT)
    }

    /// A pool with windows of a given size (0: none), the rest of its slots shared.
    pub fn with(shape: Shape, slots: usize, window: usize, policy: Policy) -> Pool {
        Pool::of(shape, (0..shape.layers).map(Some).collect(), slots, window, policy)
    }

    fn of(shape: Shape, windows: Vec<Option<usize>>, slots: usize, window: usize, policy: Policy) -> Pool {
        assert!(slots >= shape.top_k, "a pool holds at least top_k experts");
        let routed = windows.iter().flatten().count();
        assert!(window * routed <= slots, "the windows do not fit the pool");
        Pool {
            shape,
            policy,
            windows,
            routed,
            window,
            held: vec![NONE; slots],
            table: vec![NONE; shape.keys()],
            scores: vec![f64::NEG_INFINITY; shape.keys()],
            now: 0.0,
            uses: 0.0,
        }
    }

    pub fn slots(&self) -> usize {
        self.held.len()
    }

    /// Whether every expert has a place, so that none ever makes room.
    pub fn holds_all(&self) -> bool {
        self.slots() >= self.routed * self.shape.experts
    }

    /// Whether every expert of a layer is in a slot.
    pub fn holds_layer(&self, layer: u32) -> bool {
        if self.windows[layer as usize].is_none() {
            return true;
        }
        let first = self.shape.index(Key { layer, expert: 0 });
        !self.table[first..][..self.shape.experts].contains(&NONE)
    }

    /// Slots that a layer may use: its window and the overflow.
    pub fn reach(&self) -> usize {
        self.window + self.overflow().len()
    }

    fn window_of(&self, layer: u32) -> Range<usize> {
        match self.windows[layer as usize] {
            Some(before) => before * self.window..(before + 1) * self.window,
            None => 0..0,
        }
    }

    fn overflow(&self) -> Range<usize> {
        self.window * self.routed..self.held.len()
    }

    pub fn slot_of(&self, key: Key) -> Option<u32> {
        Some(self.table[self.shape.index(key)]).filter(|slot| *slot != NONE)
    }

    /// Time goes on by some tokens.
    pub fn advance(&mut self, tokens: usize) {
        self.now += tokens as f64;
    }

    /// An expert was chosen by `rows` of the last tokens.
    pub fn used(&mut self, key: Key, rows: usize) {
        let i = self.shape.index(key);
        self.uses += 1.0;
        self.scores[i] = match self.policy {
            Policy::Lru => self.uses,
            Policy::Lfu => self.scores[i].max(0.0) + rows as f64,
            Policy::Lrfu { decay } => {
                let heat = self.heat(key) + (1.0 - decay) * rows as f64;
                heat.min(1.0).ln() - decay.ln() * self.now
            }
        };
    }

    /// An expert that has not been used is taken to be used with this likelihood. Only by the policy that is in use.
    pub fn expect(&mut self, key: Key, chance: f64) {
        let i = self.shape.index(key);
        if matches!(self.policy, Policy::Lrfu { .. }) && self.scores[i] == f64::NEG_INFINITY {
            self.scores[i] = self.score_of(chance);
        }
    }

    /// How likely the next token is to choose an expert, by its earlier uses alone.
    pub fn heat(&self, key: Key) -> f64 {
        let score = self.scores[self.shape.index(key)];
        match self.policy {
            Policy::Lrfu { decay } => (score + decay.ln() * self.now).exp(),
            Policy::Lru => 1.0 / (1.0 + self.uses - score),
            Policy::Lfu => score.max(0.0) / self.now.max(1.0),
        }
    }

    /// The scale on which experts are compared: that of a likelihood of being needed.
    fn score_of(&self, chance: f64) -> f64 {
        match self.policy {
            Policy::Lrfu { decay } => chance.ln() - decay.ln() * self.now,
            Policy::Lru => self.uses + 1.0 - 1.0 / chance,
            Policy::Lfu => chance * self.now.max(1.0),
        }
    }

    /// Where an expert that is needed with likelihood `chance` would go: a slot that is empty, or else whose content is
    /// worth least, if that is less than `chance`. `keep` gives a likelihood for what it knows more of than past uses
    /// tell, which never makes it worth less; ∞ pins.
    pub fn place(&self, key: Key, chance: f64, keep: impl Fn(Key) -> Option<f64>) -> Option<u32> {
        debug_assert!(self.slot_of(key).is_none());
        let slots = self.window_of(key.layer).chain(self.overflow());
        let mut best = (f64::INFINITY, None);
        for slot in slots {
            let held = self.held[slot];
            if held == NONE {
                return Some(slot as u32);
            }
            let past = self.scores[held as usize];
            if past >= best.0 {
                continue;
            }
            let score = match keep(self.shape.key(held as usize)) {
                Some(f64::INFINITY) => continue,
                Some(chance) => self.score_of(chance).max(past),
                None => past,
            };
            if score < best.0 {
                best = (score, Some(slot as u32));
            }
        }
        best.1.filter(|_| best.0 < self.score_of(chance))
    }

    /// Gives a slot to an expert. Returns the one that made room.
    pub fn put(&mut self, key: Key, slot: u32) -> Option<Key> {
        let index = self.shape.index(key) as u32;
        let before = std::mem::replace(&mut self.held[slot as usize], index);
        if before != NONE {
            self.table[before as usize] = NONE;
        }
        self.table[index as usize] = slot;
        (before != NONE).then(|| self.shape.key(before as usize))
    }

    /// Forgets what a slot holds: it is not known to hold it.
    pub fn clear(&mut self, slot: u32) {
        let before = std::mem::replace(&mut self.held[slot as usize], NONE);
        if before != NONE {
            self.table[before as usize] = NONE;
        }
    }

    /// Experts by descending heat, those that were used at all.
    pub fn hottest(&self) -> Vec<Key> {
        let mut used: Vec<usize> = (0..self.scores.len()).filter(|i| self.scores[*i] > f64::NEG_INFINITY).collect();
        used.sort_by(|a, b| self.scores[*b].total_cmp(&self.scores[*a]));
        used.into_iter().map(|i| self.shape.key(i)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { layers: 3, experts: 8, top_k: 2 };

    fn key(layer: u32, expert: u32) -> Key {
        Key { layer, expert }
    }

    fn take(pool: &mut Pool, key: Key, chance: f64) -> bool {
        let slot = pool.place(key, chance, |_| None);
        slot.is_some_and(|slot| {
            pool.put(key, slot);
            true
        })
    }

    proptest! {
        /// Table and slots always say the same, and an expert lies where its layer may look.
        #[test]
        fn slots_and_table_agree(
            slots in 2usize..40, steps in prop::collection::vec((0u32..3, 0u32..8, 0.0f64..2.0), 0..200),
        ) {
            let mut pool = Pool::new(SHAPE, slots);
            for (layer, expert, chance) in steps {
                let key = key(layer, expert);
                pool.advance(1);
                if pool.slot_of(key).is_none() { take(&mut pool, key, chance); }
                if chance > 0.5 { pool.used(key, 1); }
                for (slot, held) in pool.held.iter().enumerate().filter(|(_, held)| **held != NONE) {
                    let key = SHAPE.key(*held as usize);
                    prop_assert_eq!(pool.slot_of(key), Some(slot as u32));
                    let reach = pool.window_of(key.layer).contains(&slot) || pool.overflow().contains(&slot);
                    prop_assert!(reach);
                }
                let resident = pool.table.iter().filter(|slot| **slot != NONE).count();
                prop_assert_eq!(resident, pool.held.iter().filter(|held| **held != NONE).count());
            }
        }

        /// The time-free scores order experts as their decayed heats do.
        #[test]
        fn scores_order_as_heat_does(uses in prop::collection::vec((0u32..8, 1usize..4), 2..100)) {
            let mut pool = Pool::new(SHAPE, 6);
            for (expert, tokens) in uses {
                pool.advance(tokens);
                pool.used(key(0, expert), 1);
            }
            pool.advance(17);
            let heats: Vec<f64> = pool.hottest().iter().map(|key| pool.heat(*key)).collect();
            prop_assert!(heats.is_sorted_by(|a, b| *a >= *b * (1.0 - 1e-9)));
            prop_assert!(heats.iter().all(|heat| (0.0..=1.0).contains(heat)));
        }
    }

    #[test]
    fn heat_is_the_rate_of_use() {
        let mut pool = Pool::new(SHAPE, 6);
        for token in 0..500 {
            pool.advance(1);
            pool.used(key(0, 0), 1);
            if token % 4 == 0 {
                pool.used(key(0, 1), 1);
            }
        }
        assert!(pool.heat(key(0, 0)) > 0.95 && (pool.heat(key(0, 1)) - 0.25).abs() < 0.05);
        assert_eq!(pool.heat(key(0, 2)), 0.0);
    }

    #[test]
    fn a_layer_keeps_its_window() {
        let mut pool = Pool::new(SHAPE, 6);
        assert_eq!(pool.window, 2);
        assert!(take(&mut pool, key(0, 1), 1.0) && take(&mut pool, key(0, 2), 1.0));
        for expert in 0..8 {
            pool.advance(1);
            take(&mut pool, key(1, expert), 1.0);
        }
        assert!(pool.slot_of(key(0, 1)).is_some() && pool.slot_of(key(0, 2)).is_some());
    }

    #[test]
    fn layers_lend_what_is_left_over() {
        let mut pool = Pool::new(SHAPE, 12);
        assert_eq!((pool.window, pool.overflow().len()), (3, 3));
        for expert in 0..6 {
            assert!(take(&mut pool, key(1, expert), 0.5));
            pool.used(key(1, expert), 1);
        }
        assert_eq!((0..6).filter(|e| pool.slot_of(key(1, *e)).is_some()).count(), 6);
    }

    #[test]
    fn what_is_worth_more_stays() {
        let mut pool = Pool::new(SHAPE, 6);
        for expert in 0..2 {
            for _ in 0..50 {
                pool.advance(1);
                pool.used(key(0, expert), 1);
            }
            assert!(take(&mut pool, key(0, expert), 1.0));
        }
        assert_eq!(pool.place(key(0, 5), 1e-3, |_| None), None);
        assert_eq!(pool.place(key(0, 5), 0.9, |_| None), pool.slot_of(key(0, 0)));
        assert_eq!(pool.place(key(0, 5), 0.9, |k| (k.expert == 0).then_some(1.0)), pool.slot_of(key(0, 1)));
        assert_eq!(pool.place(key(0, 5), f64::INFINITY, |_| Some(f64::INFINITY)), None);
    }

    /// Layers without experts take no slots from the others.
    #[test]
    fn dense_layers_have_no_window() {
        let routed = [false, true, true];
        let whole = Pool::for_layers(SHAPE, routed.into_iter(), 16);
        assert!(whole.holds_all() && whole.holds_layer(0) && !whole.holds_layer(1));
        let mut pool = Pool::for_layers(SHAPE, routed.into_iter(), 8);
        assert_eq!((pool.window, pool.overflow()), (3, 6..8));
        assert_eq!([0, 1, 2].map(|layer| pool.window_of(layer)), [0..0, 0..3, 3..6]);
        for expert in 0..8 {
            pool.advance(1);
            take(&mut pool, key(2, expert), 1.0);
        }
        assert!(take(&mut pool, key(1, 0), 1e-6), "the window of layer 1 is its own");
    }

    #[test]
    fn all_or_shared() {
        assert!(Pool::new(SHAPE, 32).holds_all());
        assert!(!Pool::new(SHAPE, 23).holds_all());
        let small = Pool::new(SHAPE, 4);
        assert_eq!((small.window, small.reach()), (0, 4));
    }
}
