//! What a pool policy would have read, from a recorded routing alone.

use super::trace::Trace;
use super::{Key, Policy, Pool, Shape};

/// The choices of consecutive tokens: by token, then layer, `top_k` ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    pub shape: Shape,
    /// `[tokens, layers, top_k]`
    pub ids: Vec<u32>,
}

impl Routes {
    /// The choices of passes of one token each.
    pub fn of(trace: &Trace) -> Routes {
        Routes { shape: trace.shape, ids: trace.passes.iter().flat_map(|pass| pass.ids.concat()).collect() }
    }

    pub fn tokens(&self) -> usize {
        self.ids.len() / (self.shape.layers * self.shape.top_k).max(1)
    }

    fn keys(&self) -> impl Iterator<Item = Key> {
        let (layers, top_k) = (self.shape.layers, self.shape.top_k);
        self.ids.iter().enumerate().map(move |(i, &expert)| Key { layer: (i / top_k % layers) as u32, expert })
    }
}

/// What is compared with the pool that is used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Contender {
    /// One list for all layers, least recently used.
    Lru,
    /// The same, least frequently used.
    Lfu,
    /// A list for each layer, least recently used.
    LayerLru,
    /// [`Pool::new`].
    Lrfu,
    /// Evicts what is needed again last: no policy reads less (Belady, 1966).
    Clairvoyant,
}

/// Experts that would be read for the tokens from `from` on; those before warm the pool.
pub fn misses(routes: &Routes, slots: usize, contender: Contender, from: usize) -> u64 {
    let shape = routes.shape;
    let pool = match contender {
        Contender::Lru => Pool::with(shape, slots, 0, Policy::Lru),
        Contender::Lfu => Pool::with(shape, slots, 0, Policy::Lfu),
        Contender::LayerLru => Pool::with(shape, slots, slots / shape.layers.max(1), Policy::Lru),
        Contender::Lrfu => Pool::new(shape, slots),
        Contender::Clairvoyant => return clairvoyant(routes, slots, from),
    };
    reactive(routes, pool, from)
}

fn reactive(routes: &Routes, mut pool: Pool, from: usize) -> u64 {
    let a_token = routes.shape.layers * routes.shape.top_k;
    let keys: Vec<Key> = routes.keys().collect();
    let mut missed = 0;
    for (token, keys) in keys.chunks_exact(a_token).enumerate() {
        pool.advance(1);
        for layer in keys.chunks_exact(routes.shape.top_k) {
            for key in layer {
                pool.used(*key, 1);
            }
            for key in layer.iter().filter(|key| pool.slot_of(**key).is_none()).copied().collect::<Vec<_>>() {
                missed += u64::from(token >= from);
                // What this layer needs does not make room for each other.
                let keep = |held: Key| layer.contains(&held).then_some(f64::INFINITY);
                if let Some(slot) = pool.place(key, f64::INFINITY, keep) {
                    pool.put(key, slot);
                }
            }
        }
    }
    missed
}

fn clairvoyant(routes: &Routes, slots: usize, from: usize) -> u64 {
    let shape = routes.shape;
    let a_token = shape.layers * shape.top_k;
    let keys: Vec<usize> = routes.keys().map(|key| shape.index(key)).collect();
    // When each use's expert is used again.
    let mut next = vec![usize::MAX; keys.len()];
    let mut seen = vec![usize::MAX; shape.keys()];
    for (i, key) in keys.iter().enumerate().rev() {
        next[i] = std::mem::replace(&mut seen[*key], i);
    }
    // Held experts by their next use.
    let mut held = std::collections::BTreeSet::new();
    let mut due = vec![None; shape.keys()];
    let mut missed = 0;
    for (i, &key) in keys.iter().enumerate() {
        match due[key] {
            Some(at) => {
                held.remove(&(at, key));
            }
            None => {
                missed += u64::from(i / a_token >= from);
                if held.len() == slots {
                    let (_, last) = held.pop_last().expect("a pool is never empty");
                    due[last] = None;
                }
            }
        }
        held.insert((next[i], key));
        due[key] = Some(next[i]);
    }
    missed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Contender; 4] = [Contender::Lru, Contender::Lfu, Contender::LayerLru, Contender::Lrfu];

    fn routes(seeds: &[u32]) -> Routes {
        let shape = Shape { layers: 2, experts: 6, top_k: 2 };
        Routes { shape, ids: seeds.iter().flat_map(|s| [s % 6, (s % 6 + 1 + s / 6 % 5) % 6]).collect() }
    }

    proptest! {
        #[test]
        fn nobody_beats_the_clairvoyant(seeds in prop::collection::vec(0u32..1000, 1..100), slots in 4usize..14) {
            let routes = routes(&[&seeds[..], &seeds[..]].concat());
            let best = misses(&routes, slots, Contender::Clairvoyant, 0);
            for contender in ALL {
                prop_assert!(misses(&routes, slots, contender, 0) >= best, "{contender:?}");
            }
            let distinct: std::collections::HashSet<Key> = routes.keys().collect();
            prop_assert!(best >= distinct.len() as u64);
            for contender in ALL {
                prop_assert!(slots < 12 || misses(&routes, slots, contender, 0) == distinct.len() as u64);
            }
        }
    }

    /// A list shorter than one token's cycle through the layers never hits; windows do.
    #[test]
    fn a_global_list_below_a_cycle_never_hits() {
        let shape = Shape { layers: 4, experts: 8, top_k: 1 };
        let routes = Routes { shape, ids: [0, 1, 2, 3].repeat(50) };
        assert_eq!(misses(&routes, 3, Contender::Lru, 0), 200);
        assert_eq!(misses(&routes, 4, Contender::LayerLru, 0), 4);
        assert_eq!(misses(&routes, 4, Contender::Lrfu, 0), 4);
        assert!(misses(&routes, 3, Contender::Clairvoyant, 0) < 100);
    }
}
