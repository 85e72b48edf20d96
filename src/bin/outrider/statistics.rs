//! Medians and how sure they are.

use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg32;

/// The middle value; 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => 0.5 * (values[n / 2 - 1] + values[n / 2]),
    }
}

/// The interval that holds the median of 95 % of the samples drawn from these with replacement (Efron's bootstrap).
pub fn interval(values: &[f64]) -> [f64; 2] {
    const SAMPLES: usize = 2000;
    let mut random = Pcg32::seed_from_u64(1);
    let mut draw = || values[random.next_u32() as usize % values.len()];
    let mut medians: Vec<f64> = (0..SAMPLES).map(|_| median((0..values.len()).map(|_| draw()).collect())).collect();
    medians.sort_by(f64::total_cmp);
    [medians[SAMPLES * 25 / 1000], medians[SAMPLES * 975 / 1000]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_holds_the_median() {
        let values: Vec<f64> = (0..31).map(f64::from).collect();
        let [low, high] = interval(&values);
        assert!(low < 15.0 && high > 15.0 && high - low < 20.0);
        assert_eq!(median(vec![3.0, 1.0]), 2.0);
        assert_eq!(interval(&[4.0]), [4.0, 4.0]);
    }
}
