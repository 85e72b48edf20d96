//! How many layers to submit at once on a backend that looks slots up itself.
//!
//! A submission costs a round trip, and a layer in it that is not reached, because one before it lacked an expert, costs a
//! little too. With a likelihood `q` that a layer has all it needs, `n` layers take a pass `(1 − qⁿ) / (1 − q)` layers
//! further on average, and the last one the logits besides; the best `n` costs least for each. Going layer by layer costs
//! a round trip for each, and nothing else.

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

    pub fn costs(&self) -> AheadCosts {
        self.costs
    }

    /// A submission came so far: so many layers, the last of which had all it needed or not.
    pub fn came(&mut self, layers: usize, whole: bool) {
        for i in 1..=layers {
            self.whole = self.whole * DECAY + f64::from(whole || i < layers);
            self.of = self.of * DECAY + 1.0;
        }
    }

    /// How many layers to submit of those that are left, at most so many: of each it is said whether it is certain to have
    /// all it needs. None to go layer by layer.
    pub fn layers(&self, left: impl ExactSizeIterator<Item = bool>, most: usize) -> Option<usize> {
        let q = self.whole / self.of;
        let (mut best, mut least) = (None, self.costs.round_trip);
        // How far `n` layers come, and how likely they are all to have what they need.
        let (mut reached, mut all) = (0.0, 1.0);
        let count = left.len();
        for (n, certain) in (1..).zip(left).take(most) {
            reached += all;
            all *= if certain { 1.0 } else { q };
            let logits = if n == count { all } else { 0.0 };
            let skipped = (n as f64 - reached) * self.costs.skipped;
            let cost = (self.costs.round_trip + skipped) / (reached + logits);
            if cost < least || best.is_some() && cost <= least {
                (best, least) = (Some(n), cost);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: AheadCosts = AheadCosts { round_trip: 1e-3, skipped: 5e-5 };

    /// Of 40 layers, after 100 submissions that came so far.
    fn after(came: usize, whole: bool, costs: AheadCosts) -> Option<usize> {
        let mut ahead = RunAhead::new(costs);
        (0..100).for_each(|_| ahead.came(came, whole));
        ahead.layers([false; 40].into_iter(), usize::MAX)
    }

    #[test]
    fn all_that_is_left_where_nothing_is_missing() {
        assert_eq!(after(10, true, COSTS), Some(40));
    }

    #[test]
    fn few_where_each_is_likely_to_stop() {
        let seldom = after(8, false, COSTS).unwrap();
        assert!(seldom > 4 && seldom < 30, "{seldom}");
        assert!(after(8, false, AheadCosts { round_trip: 0.1, ..COSTS }).unwrap() > seldom);
        // Where a layer that is skipped costs nothing, there is nothing to lose.
        assert_eq!(after(4, false, AheadCosts { skipped: 0.0, ..COSTS }), Some(40));
    }

    #[test]
    fn none_where_each_stops() {
        assert_eq!(after(1, false, COSTS), None);
        assert_eq!(after(8, false, AheadCosts { skipped: 1.0, ..COSTS }), None);
    }

    #[test]
    fn all_that_are_certain() {
        let mut ahead = RunAhead::new(AheadCosts { skipped: 1e-3, ..COSTS });
        (0..100).for_each(|_| ahead.came(1, false));
        assert_eq!(ahead.layers([true; 40].into_iter(), usize::MAX), Some(40));
        assert_eq!(ahead.layers([true; 40].into_iter(), 5), Some(5));
        assert_eq!(ahead.layers((0..40).map(|layer| layer < 7), usize::MAX), Some(8));
        assert_eq!(ahead.layers((0..40).map(|layer| layer > 0), usize::MAX), None);
        assert_eq!(ahead.layers((0..40).map(|layer| layer > 0), 0), None);
        // The logits come with the last layer.
        assert_eq!(RunAhead::new(COSTS).layers([false].into_iter(), usize::MAX), Some(1));
    }
}
