//! How likely each expert of the layers to come is to be needed.
//!
//! A later layer's router applied to an earlier hidden state gives scores, but how far they can be trusted differs by
//! layer, by distance and by model. What matters of a score is how far it lies from the cut between the chosen and the
//! others, measured in standard deviations of the row's scores. How often experts at each such margin turn out to be
//! chosen is counted as the model runs, per target layer and distance, so a forecast is a calibrated likelihood from the
//! first few tokens on, and reading ahead can be weighed against what would have to make room.

use serde::{Deserialize, Serialize};

use super::{Key, Shape};

/// What a forecast was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The token's embedding.
    Embedding,
    /// The hidden state that a layer's router reads.
    Layer(u32),
}

impl Origin {
    /// Layers from the origin to `layer`; the embedding lies before layer 0.
    pub fn distance(self, layer: u32) -> usize {
        match self {
            Origin::Embedding => layer as usize + 1,
            Origin::Layer(origin) => layer.saturating_sub(origin) as usize,
        }
    }
}

/// How many of the experts that were chosen a forecast had among its own first `top_k`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recall {
    pub found: u64,
    pub of: u64,
}

impl std::iter::Sum for Recall {
    fn sum<I: Iterator<Item = Recall>>(all: I) -> Recall {
        all.fold(Recall::default(), |a, b| Recall { found: a.found + b.found, of: a.of + b.of })
    }
}

/// Bins of the margin: from −4 to +4 standard deviations.
const BINS: usize = 32;
const REACH: f32 = 4.0;
/// What a bin starts with counts as this many observations.
const PRIOR: f32 = 4.0;

#[derive(Debug, Clone)]
struct Curve {
    /// Chosen and seen, by bin.
    bins: [(f32, f32); BINS],
    recall: Recall,
}

impl Default for Curve {
    /// A slope that every router met so far is steeper than, so that guesses are few until something is known.
    fn default() -> Curve {
        let chance = |bin: usize| {
            let margin = (bin as f32 + 0.5) / BINS as f32 * 2.0 * REACH - REACH;
            1.0 / (1.0 + libm::expf(-2.0 * margin))
        };
        Curve { bins: std::array::from_fn(|bin| (PRIOR * chance(bin), PRIOR)), recall: Recall::default() }
    }
}

impl Curve {
    fn chance(&self, bin: u8) -> f32 {
        let (chosen, seen) = self.bins[usize::from(bin)];
        chosen / seen
    }
}

/// Scores of one layer for the rows of a pass.
#[derive(Debug, Clone, Default)]
struct Guess {
    distance: usize,
    rows: usize,
    /// `[rows, experts]`.
    bins: Vec<u8>,
    /// Whether it is among the row's `top_k` highest.
    first: Vec<bool>,
    /// By expert: the likelihood that some row needs it.
    chances: Vec<f32>,
}

#[derive(Debug)]
pub struct Forecast {
    shape: Shape,
    /// By target layer, then distance − 1.
    curves: Vec<Vec<Curve>>,
    /// By target layer: every guess of this pass, the nearest last.
    guesses: Vec<Vec<Guess>>,
    /// The highest scores of a row, in descending order.
    best: Vec<(i32, u32)>,
}

impl Forecast {
    pub fn new(shape: Shape) -> Forecast {
        Forecast {
            shape,
            curves: vec![Vec::new(); shape.layers],
            guesses: vec![Vec::new(); shape.layers],
            best: Vec::with_capacity(shape.top_k + 2),
        }
    }

    /// A pass begins: guesses of the one before are void.
    pub fn begin(&mut self) {
        self.guesses.iter_mut().for_each(Vec::clear);
    }

    /// Scores by which `layer` would choose if its router saw `origin`'s state: `[rows, experts]`, higher is likelier.
    pub fn predicted(&mut self, origin: Origin, layer: u32, scores: &[f32]) {
        let (experts, top_k) = (self.shape.experts, self.shape.top_k);
        let distance = origin.distance(layer);
        if distance == 0 && origin != Origin::Layer(layer) || scores.is_empty() || !scores.len().is_multiple_of(experts)
        {
            return;
        }
        let curves = &mut self.curves[layer as usize];
        if curves.len() <= distance {
            curves.resize_with(distance + 1, Curve::default);
        }
        let absent: [f32; BINS] = std::array::from_fn(|bin| 1.0 - curves[distance].chance(bin as u8));
        let rows = scores.len() / experts;
        let mut guess = Guess { distance, rows, ..Guess::default() };
        guess.bins.resize(scores.len(), 0);
        guess.first.resize(scores.len(), false);
        guess.chances.resize(experts, 1.0);
        for (row, scores) in scores.chunks_exact(experts).enumerate() {
            let first = &mut guess.first[row * experts..][..experts];
            let cut = if top_k < experts {
                // The first k, then the best of the others.
                highest(scores, top_k + 1, &mut self.best);
                let (chosen, next) = self.best.split_at(top_k);
                chosen.iter().for_each(|(_, expert)| first[*expert as usize] = true);
                let score = |best: &(i32, u32)| scores[best.1 as usize];
                let last = chosen.iter().map(score).fold(f32::INFINITY, f32::min);
                0.5 * (last + score(&next[0]))
            } else {
                first.fill(true);
                f32::NEG_INFINITY
            };
            let scale = BINS as f32 / (2.0 * REACH) / deviation(scores);
            let bins = &mut guess.bins[row * experts..][..experts];
            for (bin, score) in bins.iter_mut().zip(scores) {
                *bin = (BINS as f32 / 2.0 + (score - cut) * scale).clamp(0.0, BINS as f32 - 1.0) as u8;
            }
            for (none, bin) in guess.chances.iter_mut().zip(bins) {
                *none *= absent[usize::from(*bin) % BINS];
            }
        }
        guess.chances.iter_mut().for_each(|none| *none = 1.0 - *none);
        self.guesses[layer as usize].push(guess);
    }

    /// What a layer chose, `ids[row · top_k + rank]`: every guess at it is compared and learned from.
    pub fn routed(&mut self, layer: u32, ids: &[u32]) {
        let (experts, top_k) = (self.shape.experts, self.shape.top_k);
        for guess in std::mem::take(&mut self.guesses[layer as usize]) {
            let curve = &mut self.curves[layer as usize][guess.distance];
            for (row, ids) in ids.chunks_exact(top_k).enumerate().take(guess.rows) {
                let at = row * experts;
                for bin in &guess.bins[at..at + experts] {
                    curve.bins[usize::from(*bin)].1 += 1.0;
                }
                for id in ids {
                    let i = at + *id as usize;
                    curve.bins[usize::from(guess.bins[i])].0 += 1.0;
                    curve.recall.found += u64::from(guess.first[i]);
                    curve.recall.of += 1;
                }
            }
        }
    }

    /// The likelihood that this pass needs an expert, from the nearest guess there is.
    pub fn chance(&self, key: Key) -> Option<f64> {
        let guess = self.guesses[key.layer as usize].last()?;
        Some(f64::from(guess.chances[key.expert as usize]))
    }

    /// The same for all experts of a layer; empty without a guess.
    pub fn chances(&self, layer: u32) -> &[f32] {
        self.guesses[layer as usize].last().map_or(&[], |guess| &guess.chances)
    }

    /// Of forecasts of a layer from a distance; distance 0 is its own router's.
    pub fn recall(&self, layer: usize, distance: usize) -> Option<Recall> {
        let recall = self.curves.get(layer)?.get(distance)?.recall;
        (recall.of > 0).then_some(recall)
    }
}

/// The highest `count` scores, by descending order of [`f32::total_cmp`] and ascending index, as keys of that order.
fn highest(scores: &[f32], count: usize, best: &mut Vec<(i32, u32)>) {
    best.clear();
    for (at, score) in scores.iter().enumerate() {
        let bits = score.to_bits() as i32;
        let key = bits ^ ((bits >> 31) as u32 >> 1) as i32;
        if best.len() == count {
            if best.last().is_some_and(|worst| key <= worst.0) {
                continue;
            }
            best.pop();
        }
        let place = best.iter().rposition(|other| other.0 >= key).map_or(0, |before| before + 1);
        best.insert(place, (key, at as u32));
    }
}

/// The standard deviation, or 1 where there is none.
fn deviation(values: &[f32]) -> f32 {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / count;
    if variance > 0.0 && variance.is_finite() { libm::sqrtf(variance) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { layers: 3, experts: 8, top_k: 2 };

    fn top(scores: &[f32]) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
        ids.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
        ids.truncate(SHAPE.top_k);
        ids
    }

    proptest! {
        /// The control: a layer's own scores name its own choice.
        #[test]
        fn a_router_predicts_itself(rows in prop::collection::vec(prop::collection::vec(-9.0f32..9.0, 8), 1..6)) {
            let mut forecast = Forecast::new(SHAPE);
            forecast.predicted(Origin::Layer(1), 1, &rows.concat());
            let ids: Vec<u32> = rows.iter().flat_map(|row| top(row)).collect();
            forecast.routed(1, &ids);
            let recall = forecast.recall(1, 0).unwrap();
            prop_assert_eq!((recall.found, recall.of), (ids.len() as u64, ids.len() as u64));
        }

        /// As sorting would have it, whatever the scores.
        #[test]
        fn the_highest_are_the_first_of_all(scores in prop::collection::vec(
            prop_oneof![prop::num::f32::ANY, (-3i8..3).prop_map(f32::from)], 1..40), count in 1usize..12) {
            let mut best = Vec::new();
            highest(&scores, count, &mut best);
            let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
            ids.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
            ids.truncate(count);
            prop_assert_eq!(best.iter().map(|best| best.1).collect::<Vec<_>>(), ids);
        }

        /// Whatever the scores, likelihoods are likelihoods.
        #[test]
        fn chances_lie_between_nothing_and_one(scores in prop::collection::vec(prop::num::f32::ANY, 16)) {
            let mut forecast = Forecast::new(SHAPE);
            forecast.predicted(Origin::Embedding, 0, &scores);
            prop_assert!(forecast.chances(0).iter().all(|chance| (0.0..=1.0).contains(chance)));
            forecast.routed(0, &[0, 1, 2, 3]);
            prop_assert!(forecast.chances(0).is_empty());
        }
    }

    /// Scores that say nothing soon count for nothing, and scores that say all for all.
    #[test]
    fn trust_is_learned() {
        let mut forecast = Forecast::new(SHAPE);
        let scores: Vec<f32> = [8.0, 7.0, 1.0, 1.1, 1.2, 0.9, 0.8, 1.3].into();
        for token in 0..200u32 {
            forecast.begin();
            forecast.predicted(Origin::Layer(0), 1, &scores);
            forecast.predicted(Origin::Layer(0), 2, &scores);
            forecast.routed(1, &[0, 1]);
            forecast.routed(2, &[token % 8, (token + 3) % 8]);
        }
        forecast.predicted(Origin::Layer(0), 1, &scores);
        forecast.predicted(Origin::Layer(0), 2, &scores);
        let chance = |layer, expert| forecast.chance(Key { layer, expert }).unwrap();
        assert!(chance(1, 0) > 0.9 && chance(1, 5) < 0.1);
        assert!((chance(2, 0) - 0.25).abs() < 0.1 && (chance(2, 5) - 0.25).abs() < 0.1);
        assert_eq!(forecast.recall(1, 1), Some(Recall { found: 400, of: 400 }));
        assert_eq!(forecast.recall(2, 2).unwrap().of, 400);
        assert_eq!(forecast.recall(2, 1), None);
    }
}
