//! Routing made up to published statistics, for models that cannot be run here.
//!
//! A token's score of an expert is its popularity, `−ZIPF · ln(rank)`, plus what the text is about, which drifts from
//! token to token (an autoregressive process), plus noise; the `top_k` highest are chosen. A forecast sees the score
//! through more noise, the farther ahead the more.
//!
//! The constants were fitted to Qwen3.6-35B-A3B: a pool hit rate of 56 and 65 % at 2000 and 3000 MiB, and a recall of
//! 80.7 % one layer ahead and 3.5 points less for each further. Larger pools come out worse than published (83.5 and 89 %
//! at 5000 and 7100 MiB) by about five points, and fewer experts are shared with the token before.

use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg32;

use super::trace::{Foreseen, Pass, Trace};
use super::{Origin, Shape};

/// 40 layers of 256 experts, 8 a token.
pub const FLAGSHIP: Shape = Shape { layers: 40, experts: 256, top_k: 8 };

/// Bytes of an expert of the flagship at 4.5 bits a weight.
pub const FLAGSHIP_EXPERT_BYTES: usize = 1_770_000;

/// What a budget holds beside the pool, at 4.5 bits a weight and a context of 4096 tokens.
pub const FLAGSHIP_CORE_BYTES: u64 = 1_400_000_000;

const ZIPF: f32 = 0.5;
/// Of the drift, in standard deviations of the noise, and what remains of it after a token.
const DRIFT: f32 = 0.6;
const STICKINESS: f32 = 0.97;
/// Noise of a forecast by layers ahead, in the same unit.
const BLUR: [f32; 4] = [0.255, 0.315, 0.38, 0.435];

/// A trace of `tokens` passes of one token each, with forecasts up to `depth` layers ahead, at most 4.
pub fn trace(shape: Shape, expert_bytes: usize, tokens: usize, depth: usize, seed: u64) -> Trace {
    let mut noise = Noise(Pcg32::seed_from_u64(seed));
    let popularity: Vec<f32> = (0..shape.layers).flat_map(|_| noise.popularity(shape.experts)).collect();
    let mut drift: Vec<f32> = popularity.iter().map(|_| noise.normal()).collect();
    let fresh = libm::sqrtf(1.0 - STICKINESS * STICKINESS);
    let pass = |_| {
        drift.iter_mut().for_each(|d| *d = STICKINESS * *d + fresh * noise.normal());
        let scores: Vec<f32> = popularity.iter().zip(&drift).map(|(p, d)| p + DRIFT * d + noise.normal()).collect();
        let scores: Vec<&[f32]> = scores.chunks_exact(shape.experts).collect();
        let mut foreseen = Vec::new();
        for origin in 0..shape.layers {
            for (ahead, scores) in scores[origin + 1..].iter().take(depth.min(BLUR.len())).enumerate() {
                let scores = scores.iter().map(|score| score + BLUR[ahead] * noise.normal()).collect();
                let layer = (origin + 1 + ahead) as u32;
                foreseen.push(Foreseen { origin: Origin::Layer(origin as u32), layer, scores });
            }
        }
        Pass { rows: 1, ids: scores.iter().map(|scores| top(scores, shape.top_k)).collect(), foreseen, timing: None }
    };
    Trace { passes: (0..tokens).map(pass).collect(), ..Trace::new(shape, expert_bytes) }
}

/// The same routing, foreseen better or worse: forecasts lack `factor` times as many of the experts that are chosen.
/// Scores change places, so that their distribution stays.
pub fn with_misses(trace: &Trace, factor: f64) -> Trace {
    let Shape { experts, top_k, .. } = trace.shape;
    let mut trace = trace.clone();
    // Experts still to be taken from forecasts or, below 0, given to them.
    let mut due = 0.0;
    for pass in &mut trace.passes {
        for guess in &mut pass.foreseen {
            let ids = pass.ids[guess.layer as usize].chunks_exact(top_k);
            for (scores, ids) in guess.scores.chunks_exact_mut(experts).zip(ids) {
                let order = top(scores, experts);
                let (first, others) = order.split_at(top_k);
                let (mut found, mut wrong): (Vec<u32>, Vec<u32>) = first.iter().partition(|id| ids.contains(id));
                let (mut missed, rest): (Vec<u32>, Vec<u32>) = others.iter().partition(|id| ids.contains(id));
                let mut rest = rest.into_iter();
                due += (factor - 1.0) * missed.len() as f64;
                while due <= -1.0
                    && let Some((a, b)) = missed.pop().zip(wrong.pop())
                {
                    scores.swap(a as usize, b as usize);
                    due += 1.0;
                }
                while due >= 1.0
                    && let Some((a, b)) = found.pop().zip(rest.next())
                {
                    scores.swap(a as usize, b as usize);
                    due -= 1.0;
                }
            }
        }
    }
    trace
}

fn top(scores: &[f32], top_k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_unstable_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
    order.truncate(top_k);
    order
}

struct Noise(Pcg32);

impl Noise {
    /// Nearly normal, with a variance of 1: a sum of four uniform numbers, the same on every platform.
    fn normal(&mut self) -> f32 {
        let bits = self.0.next_u64();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }

    /// Log popularities of a layer's experts, which are the popular ones left to chance.
    fn popularity(&mut self, experts: usize) -> Vec<f32> {
        let mut all: Vec<f32> = (1..=experts).map(|rank| -ZIPF * libm::logf(rank as f32)).collect();
        for i in (1..experts).rev() {
            all.swap(i, self.0.next_u32() as usize % (i + 1));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::les::replay::{Contender, Routes, misses};

    /// Part of the flagship, whose layers are alike.
    const PART: Shape = Shape { layers: 4, ..FLAGSHIP };

    #[test]
    fn forecasts_are_as_good_as_published() {
        let trace = trace(PART, 1, 400, 3, 1);
        for (ahead, published) in [(1, 80.7), (2, 77.2), (3, 73.7)] {
            let (mut found, mut of) = (0, 0);
            for pass in &trace.passes {
                for guess in &pass.foreseen {
                    if matches!(guess.origin, Origin::Layer(origin) if origin + ahead == guess.layer) {
                        let ids = &pass.ids[guess.layer as usize];
                        found += top(&guess.scores, PART.top_k).iter().filter(|id| ids.contains(id)).count();
                        of += ids.len();
                    }
                }
            }
            let recall = 100.0 * found as f64 / of as f64;
            assert!((recall - published).abs() < 1.0, "{recall} % {ahead} ahead");
        }
    }

    #[test]
    fn forecasts_can_be_made_better_and_worse() {
        let trace = trace(PART, 1, 100, 2, 3);
        let missed = |trace: &Trace| {
            let guesses = trace.passes.iter().flat_map(|pass| pass.foreseen.iter().map(move |guess| (pass, guess)));
            guesses.fold(0, |sum, (pass, guess)| {
                let ids = &pass.ids[guess.layer as usize];
                sum + top(&guess.scores, PART.top_k).iter().filter(|id| !ids.contains(id)).count()
            })
        };
        let before = missed(&trace) as f64;
        assert_eq!(with_misses(&trace, 1.0), trace);
        assert!((missed(&with_misses(&trace, 0.5)) as f64 / before - 0.5).abs() < 0.01);
        assert!((missed(&with_misses(&trace, 2.0)) as f64 / before - 2.0).abs() < 0.01);
    }

    #[test]
    fn pools_hit_as_often_as_published() {
        let trace = trace(PART, 1, 600, 0, 2);
        let routes = Routes::of(&trace);
        for (mib, published) in [(2000, 56.0), (3000, 65.0)] {
            let slots = (mib << 20) / FLAGSHIP_EXPERT_BYTES * PART.layers / FLAGSHIP.layers;
            let uses = (300 * PART.layers * PART.top_k) as f64;
            let hit = 100.0 * (1.0 - misses(&routes, slots, Contender::Lrfu, 300) as f64 / uses);
            assert!((hit - published).abs() < 4.0, "{hit} % at {mib} MiB");
        }
    }

    #[test]
    fn a_seed_gives_one_trace() {
        assert_eq!(trace(PART, 1, 3, 2, 7), trace(PART, 1, 3, 2, 7));
        assert_ne!(trace(PART, 1, 3, 2, 7).passes, trace(PART, 1, 3, 2, 8).passes);
    }
}
