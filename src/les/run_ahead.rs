//! How many layers to submit at once on a backend that looks slots up itself.
//!
//! A submission costs a round trip, and a layer in it that is not reached, because one before it lacked an expert, costs a
//! little too. With a likelihood `q` that a layer has all it needs, `n` layers take a pass `(1 − qⁿ) / (1 − q)` layers
//! further on average; the best `n` costs least for each.

use crate::backend::AheadCosts;

/// What a layer counts for after one more.
const DECAY: f64 = 0.97;
/// Layers without an expert missing that are assumed before any were seen, and layers in all.
const PRIOR: (f64, f64) = (1.0, 2.0);

/// Learns how far submissions come.
#[derive(Debug, Clone)]
pub struct RunAhead {
    costs: AheadCosts,
    /// Decayed counts of the layers that had all they needed, and of all.
    whole: f64,
    of: f64,
}

impl RunAhead {
    pub fn new(costs: AheadCosts) -> RunAhead {
        RunAhead { costs, whole: PRIOR.0, of: PRIOR.1 }
    }

    /// A submission came so far: so many layers, the last of which had all it needed or not.
    pub fn came(&mut self, layers: usize, whole: bool) {
        for i in 1..=layers {
            self.whole = self.whole * DECAY + f64::from(whole || i < layers);
            self.of = self.of * DECAY + 1.0;
        }
    }

    /// How many layers to submit, at least one, of those that are left: of each it is said whether it is certain to have
    /// all it needs.
    pub fn layers(&self, left: impl IntoIterator<Item = bool>) -> usize {
        let q = self.whole / self.of;
        let (mut best, mut least) = (1, f64::INFINITY);
        // How far `n` layers come, and how likely they are all to have what they need.
        let (mut reached, mut all) = (0.0, 1.0);
        for (n, certain) in (1..).zip(left) {
            reached += all;
            all *= if certain { 1.0 } else { q };
            let cost = (self.costs.round_trip + n as f64 * self.costs.skipped) / reached;
            if cost <= least {
                (best, least) = (n, cost);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: AheadCosts = AheadCosts { round_trip: 1e-3, skipped: 5e-5 };

    #[test]
    fn all_that_is_left_where_nothing_is_missing() {
        let mut ahead = RunAhead::new(COSTS);
        for _ in 0..40 {
            let layers = ahead.layers([false; 40]);
            ahead.came(layers, true);
        }
        assert_eq!(ahead.layers([false; 40]), 40);
        assert_eq!(ahead.layers([false; 3]), 3);
    }

    #[test]
    fn all_that_are_certain() {
        let mut ahead = RunAhead::new(AheadCosts { skipped: 1.0, ..COSTS });
        (0..100).for_each(|_| ahead.came(1, false));
        assert_eq!(ahead.layers([true; 40]), 40);
        assert_eq!(ahead.layers((0..40).map(|layer| layer < 7)), 8);
        assert_eq!(ahead.layers((0..40).map(|layer| layer > 0)), 1);
    }

    #[test]
    fn few_where_each_is_likely_to_stop() {
        let came = |every: usize, costs| {
            let mut ahead = RunAhead::new(costs);
            (0..100).for_each(|_| ahead.came(every, false));
            ahead.layers([false; 40])
        };
        let (often, seldom) = (came(1, COSTS), came(8, COSTS));
        assert!(often == 1 && seldom > 4 && seldom < 30, "{often}, {seldom}");
        // Where a layer that is skipped costs nothing, there is nothing to lose.
        assert_eq!(came(4, AheadCosts { skipped: 0.0, ..COSTS }), 40);
        assert!(came(8, AheadCosts { round_trip: 0.1, ..COSTS }) > seldom);
    }
}
