//! Which experts are used often, kept from one visit to the next, so that the pool does not begin empty.
//!
//! What is kept is a guess like others: it decides what is read while nothing is waited for, and what makes room first,
//! never what is computed. So a list that is damaged, or of another model, is as good as none.

use std::collections::VecDeque;

use super::{Key, Pool, Shape};

/// Tokens after which what came before counts half.
const MEMORY: f32 = 4096.0;
/// What a list from an earlier visit counts for, in tokens.
const BEFORE: f32 = 512.0;
/// The least share of tokens that is worth a line.
const LEAST: f32 = 1.0 / 1024.0;

/// How often experts were used, over a longer time than the pool looks back.
#[derive(Debug)]
pub struct Frequencies {
    shape: Shape,
    tokens: f32,
    uses: Vec<f32>,
}

impl Frequencies {
    pub fn new(shape: Shape) -> Frequencies {
        Frequencies { shape, tokens: 0.0, uses: vec![0.0; shape.keys()] }
    }

    /// Goes on from an earlier visit.
    pub fn after(list: &HotList) -> Frequencies {
        let mut all = Frequencies { tokens: BEFORE, ..Frequencies::new(list.shape) };
        for (key, rate) in &list.entries {
            all.uses[list.shape.index(*key)] = BEFORE * rate;
        }
        all
    }

    pub fn advance(&mut self, tokens: usize) {
        self.tokens += tokens as f32;
        if self.tokens > 2.0 * MEMORY {
            self.tokens *= 0.5;
            self.uses.iter_mut().for_each(|uses| *uses *= 0.5);
        }
    }

    /// An expert was chosen by `rows` of the last tokens.
    pub fn used(&mut self, key: Key, rows: usize) {
        self.uses[self.shape.index(key)] += rows as f32;
    }

    /// What is worth reading first the next time: what is in the pool, by its heat, and what is used often. Half of each
    /// gives more hits in the first tokens of another dialogue of the bundled model than either alone.
    pub fn hottest(&self, pool: &Pool) -> HotList {
        let rate = |index: usize| {
            let key = self.shape.key(index);
            let often = self.uses[index] / self.tokens.max(1.0);
            let late = if pool.slot_of(key).is_some() { pool.heat(key) as f32 } else { 0.0 };
            (key, (0.5 * (often + late)).clamp(0.0, 1.0))
        };
        let mut entries: Vec<(Key, f32)> = (0..self.shape.keys()).map(rate).filter(|e| e.1 >= LEAST).collect();
        sort(&mut entries);
        entries.truncate(HotList::MOST);
        HotList { shape: self.shape, entries }
    }
}

fn sort(entries: &mut [(Key, f32)]) {
    entries.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
}

/// Experts by descending share of the tokens that are expected to use them.
#[derive(Debug, Clone, PartialEq)]
pub struct HotList {
    pub shape: Shape,
    pub entries: Vec<(Key, f32)>,
}

const MAGIC: [u8; 8] = *b"orhot\0\0\x01";
/// Magic, model, layers, experts, entries; at the end a hash.
const HEAD: usize = 8 + 32 + 4 + 4 + 4;
const HASH: usize = 32;
const ENTRY: usize = 8;

impl HotList {
    /// Entries at most.
    pub const MOST: usize = 16384;
    /// Bytes at most.
    pub const BYTES: usize = HEAD + HotList::MOST * ENTRY + HASH;

    /// As it is kept, for a model with this hash: little-endian, `(expert's index, share)` after the head.
    pub fn encode(&self, model: &[u8; 32]) -> Vec<u8> {
        let word = |n: usize| (n as u32).to_le_bytes();
        let mut out = [&MAGIC[..], model].concat();
        for n in [self.shape.layers, self.shape.experts, self.entries.len()] {
            out.extend(word(n));
        }
        for (key, rate) in &self.entries {
            out.extend(word(self.shape.index(*key)));
            out.extend(rate.to_le_bytes());
        }
        let hash = blake3::hash(&out);
        out.extend(hash.as_bytes());
        out
    }

    /// What was kept, if all of it is there and it is of this model.
    pub fn decode(bytes: &[u8], model: &[u8; 32], shape: Shape) -> Option<HotList> {
        if bytes.len() > HotList::BYTES {
            return None;
        }
        let (body, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH)?)?;
        let (head, entries) = body.split_at_checked(HEAD)?;
        let expected = HotList { shape, entries: Vec::new() }.encode(model);
        let same = head[..HEAD - 4] == expected[..HEAD - 4] && blake3::hash(body).as_bytes()[..] == *hash;
        let (entries, rest) = entries.as_chunks::<ENTRY>();
        if !same || !rest.is_empty() || head[HEAD - 4..] != (entries.len() as u32).to_le_bytes() {
            return None;
        }
        let mut seen = vec![false; shape.keys()];
        let entry = |entry: &[u8; ENTRY]| {
            let [a, b, c, d, rate @ ..] = *entry;
            let (index, rate) = (u32::from_le_bytes([a, b, c, d]) as usize, f32::from_le_bytes(rate));
            let fresh = seen.get_mut(index).is_some_and(|seen| !std::mem::replace(seen, true));
            (fresh && rate > 0.0 && rate <= 1.0).then(|| (shape.key(index), rate))
        };
        let mut entries: Vec<_> = entries.iter().map(entry).collect::<Option<_>>()?;
        sort(&mut entries);
        Some(HotList { shape, entries })
    }
}

/// What is still to be read of a list, and what was.
#[derive(Debug, Default)]
pub(super) struct Warming {
    pub left: VecDeque<Key>,
    /// By expert: read for no other reason, and not used since.
    read: Vec<bool>,
}

impl Warming {
    pub fn new(list: &HotList) -> Warming {
        let left = list.entries.iter().map(|(key, _)| *key).collect();
        Warming { left, read: vec![false; list.shape.keys()] }
    }

    pub fn read(&mut self, index: usize) {
        self.read[index] = true;
    }

    /// An expert is used. Whether it was read for that, for the first time.
    pub fn used(&mut self, index: usize) -> bool {
        self.read.get_mut(index).is_some_and(std::mem::take)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { layers: 3, experts: 8, top_k: 2 };
    const MODEL: [u8; 32] = [7; 32];

    fn some(rates: &[f32]) -> HotList {
        let mut entries: Vec<_> = rates.iter().enumerate().map(|(i, rate)| (SHAPE.key(i), *rate)).collect();
        sort(&mut entries);
        HotList { shape: SHAPE, entries }
    }

    proptest! {
        #[test]
        fn what_is_kept_comes_back(rates in prop::collection::vec(1e-6f32..=1.0, 0..24)) {
            let list = some(&rates);
            let bytes = list.encode(&MODEL);
            prop_assert!(bytes.len() <= HotList::BYTES);
            prop_assert_eq!(HotList::decode(&bytes, &MODEL, SHAPE), Some(list));
            prop_assert_eq!(HotList::decode(&bytes, &[8; 32], SHAPE), None);
            prop_assert_eq!(HotList::decode(&bytes, &MODEL, Shape { experts: 9, ..SHAPE }), None);
        }

        /// Cut short, longer, or with a bit that is another: none.
        #[test]
        fn what_is_damaged_is_none(
            rates in prop::collection::vec(1e-6f32..=1.0, 0..24), at in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let bytes = some(&rates).encode(&MODEL);
            let decode = |bytes: &[u8]| HotList::decode(bytes, &MODEL, SHAPE);
            prop_assert_eq!(decode(&bytes[..at.index(bytes.len())]), None);
            prop_assert_eq!(decode(&[&bytes[..], &[0]].concat()), None);
            let mut flipped = bytes.clone();
            flipped[at.index(bytes.len())] ^= 1 << bit;
            prop_assert_eq!(decode(&flipped), None);
        }

        /// Bytes of no origin, with a hash that fits.
        #[test]
        fn nothing_else_is_believed(entries in prop::collection::vec((0u32..40, any::<u32>()), 0..24)) {
            let mut body = HotList { shape: SHAPE, entries: Vec::new() }.encode(&MODEL)[..HEAD].to_vec();
            body[HEAD - 4..].copy_from_slice(&(entries.len() as u32).to_le_bytes());
            for (index, rate) in entries {
                body.extend(index.to_le_bytes());
                body.extend(rate.to_le_bytes());
            }
            let hash = blake3::hash(&body);
            body.extend(hash.as_bytes());
            if let Some(list) = HotList::decode(&body, &MODEL, SHAPE) {
                let fits = |(key, rate): &(Key, f32)| SHAPE.index(*key) < SHAPE.keys() && *rate > 0.0 && *rate <= 1.0;
                prop_assert!(list.entries.iter().all(fits) && list.entries.is_sorted_by(|a, b| a.1 >= b.1));
            }
        }

        #[test]
        fn shares_are_shares(uses in prop::collection::vec((0usize..24, 1usize..40, 0usize..3), 0..200)) {
            let (mut all, pool) = (Frequencies::new(SHAPE), Pool::new(SHAPE, 6));
            for (index, rows, more) in uses {
                all.advance(rows + 50 * more);
                all.used(SHAPE.key(index), rows);
            }
            let list = all.hottest(&pool);
            prop_assert!(list.entries.iter().all(|(_, rate)| (LEAST..=1.0).contains(rate)));
            let bytes = list.encode(&MODEL);
            prop_assert_eq!(HotList::decode(&bytes, &MODEL, SHAPE), Some(list));
        }
    }

    #[test]
    fn earlier_visits_are_not_forgotten() {
        let (mut all, pool) = (Frequencies::new(SHAPE), Pool::new(SHAPE, 6));
        for _ in 0..100 {
            all.advance(1);
            all.used(SHAPE.key(3), 1);
        }
        let mut next = Frequencies::after(&all.hottest(&pool));
        next.advance(1);
        next.used(SHAPE.key(5), 1);
        let order: Vec<_> = next.hottest(&pool).entries.iter().map(|(key, _)| SHAPE.index(*key)).collect();
        assert_eq!(order, [3]);
        for _ in 0..BEFORE as usize {
            next.advance(1);
            next.used(SHAPE.key(5), 1);
        }
        let order: Vec<_> = next.hottest(&pool).entries.iter().map(|(key, _)| SHAPE.index(*key)).collect();
        assert_eq!(order, [5, 3]);
    }
}
