//! Ridge regression (Hoerl and Kennard, 1970) from sums alone, so that memory does not grow with the rows that are seen.

/// `Σ x xᵀ` over rows.
#[derive(Debug, Clone)]
pub struct Gram {
    n: usize,
    /// `[n, n]`, of which the lower triangle is kept.
    sums: Vec<f64>,
}

impl Gram {
    pub fn new(n: usize) -> Gram {
        Gram { n, sums: vec![0.0; n * n] }
    }

    pub fn add(&mut self, x: &[f64]) {
        for (i, sums) in self.sums.chunks_exact_mut(self.n).enumerate() {
            add_scaled(&mut sums[..=i], &x[..=i], x[i]);
        }
    }

    fn get(&self, i: usize, j: usize) -> f64 {
        self.sums[i.max(j) * self.n + i.min(j)]
    }
}

/// `Σ y xᵀ` over rows, a row an output.
#[derive(Debug, Clone)]
pub struct Cross {
    n: usize,
    /// `[outputs, n]`
    sums: Vec<f64>,
}

impl Cross {
    pub fn new(outputs: usize, n: usize) -> Cross {
        Cross { n, sums: vec![0.0; outputs * n] }
    }

    pub fn add(&mut self, x: &[f64], y: &[f32]) {
        for (sums, y) in self.sums.chunks_exact_mut(self.n).zip(y) {
            add_scaled(sums, x, f64::from(*y));
        }
    }
}

fn add_scaled(sums: &mut [f64], x: &[f64], scale: f64) {
    sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += scale * x);
}

/// Lower triangular `L` with `L Lᵀ` equal to a symmetric matrix.
#[derive(Debug, Clone)]
pub struct Cholesky {
    n: usize,
    lower: Vec<f64>,
}

impl Cholesky {
    /// Factors the matrix whose lower triangle is given, `[n, n]`. None unless it is positive definite.
    pub fn new(n: usize, mut matrix: Vec<f64>) -> Option<Cholesky> {
        for i in 0..n {
            let (above, rest) = matrix.split_at_mut(i * n);
            let row = &mut rest[..n];
            for j in 0..i {
                let known = &above[j * n..][..=j];
                row[j] = (row[j] - dot(&row[..j], &known[..j])) / known[j];
            }
            let square = row[i] - dot(&row[..i], &row[..i]);
            // Not `<=`, which a NaN would pass.
            if !(square > 0.0 && square.is_finite()) {
                return None;
            }
            row[i] = square.sqrt();
        }
        Some(Cholesky { n, lower: matrix })
    }

    /// Puts the `x` of `L Lᵀ x = b` in the place of `b`.
    pub fn solve(&self, b: &mut [f64]) {
        let n = self.n;
        for i in 0..n {
            let row = &self.lower[i * n..][..=i];
            b[i] = (b[i] - dot(&row[..i], &b[..i])) / row[i];
        }
        for i in (0..n).rev() {
            let row = &self.lower[i * n..][..=i];
            b[i] /= row[i];
            let (known, x) = b.split_at_mut(i);
            add_scaled(known, &row[..i], -x[0]);
        }
    }
}

/// Sums in eight lanes, which the compiler turns into vectors.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// The `W` that minimises `Σ |y − W D x|² + λ · |W − prior|²`, `[outputs, n]`: `D` scales each input, `prior` is what little
/// data leaves things at, and `λ` is `weight` times the mean of the scaled inputs' summed squares. None where the sums are
/// not finite, or singular and `weight` is 0.
pub fn ridge(gram: &Gram, cross: &Cross, scale: &[f32], prior: &[f32], weight: f64) -> Option<Vec<f32>> {
    let n = gram.n;
    let scale: Vec<f64> = scale.iter().map(|s| f64::from(*s)).collect();
    let square: f64 = (0..n).map(|i| scale[i] * scale[i] * gram.get(i, i)).sum();
    // Where no input ever was anything but zero any positive number leaves the prior.
    let lambda = if square > 0.0 { weight * square / n as f64 } else { 1.0 };
    let scaled = |i: usize, j: usize| scale[i] * scale[j] * gram.get(i, j);
    let full: Vec<f64> = (0..n * n).map(|at| scaled(at / n, at % n)).collect();
    let mut penalised = full.clone();
    penalised.iter_mut().step_by(n + 1).for_each(|diagonal| *diagonal += lambda);
    let factor = Cholesky::new(n, penalised)?;
    let mut fitted = Vec::with_capacity(prior.len());
    for (cross, prior) in cross.sums.chunks_exact(n).zip(prior.chunks_exact(n)) {
        let prior: Vec<f64> = prior.iter().map(|p| f64::from(*p)).collect();
        let mut change: Vec<f64> = (0..n).map(|i| scale[i] * cross[i] - dot(&full[i * n..][..n], &prior)).collect();
        factor.solve(&mut change);
        fitted.extend(prior.iter().zip(change).map(|(prior, change)| (prior + change) as f32));
    }
    fitted.iter().all(|w| w.is_finite()).then_some(fitted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn product(n: usize, factor: &[f64]) -> Vec<f64> {
        let row = |i: usize| &factor[i * n..][..n];
        (0..n * n).map(|at| dot(row(at / n), row(at % n))).collect()
    }

    proptest! {
        /// `A Aᵀ + I` is positive definite, so it factors, and what solves it solves it.
        #[test]
        fn what_cholesky_solves_is_solved(n in 1usize..24, values in prop::collection::vec(-3.0f64..3.0, 24 * 25)) {
            let mut matrix = product(n, &values[..n * n]);
            matrix.iter_mut().step_by(n + 1).for_each(|d| *d += 1.0);
            let factor = Cholesky::new(n, matrix.clone()).unwrap();
            for i in 0..n {
                for j in 0..=i {
                    let back = dot(&factor.lower[i * n..][..=j], &factor.lower[j * n..][..=j]);
                    prop_assert!((back - matrix[i * n + j]).abs() < 1e-9 * (1.0 + matrix[i * n + i]));
                }
            }
            let b = &values[24 * 24..][..n];
            let mut x = b.to_vec();
            factor.solve(&mut x);
            for (i, b) in b.iter().enumerate() {
                prop_assert!((dot(&matrix[i * n..][..n], &x) - b).abs() < 1e-8, "{x:?}");
            }
        }
    }

    #[test]
    fn what_is_not_positive_definite_has_no_factor() {
        for matrix in [[1.0, 0.0, 2.0, 4.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, f64::NAN, 1.0], [-1.0, 0.0, 0.0, 1.0]] {
            assert!(Cholesky::new(2, matrix.to_vec()).is_none(), "{matrix:?}");
        }
        assert!(Cholesky::new(2, vec![1.0, 0.0, 2.0, 4.1]).is_some());
    }

    /// Three inputs of which the last is scaled, two outputs.
    fn sums(rows: usize) -> (Gram, Cross) {
        let (mut gram, mut cross) = (Gram::new(3), Cross::new(2, 3));
        for row in 0..rows {
            let x = [(row % 7) as f64 - 3.0, (row % 5) as f64, (row * row % 11) as f64 - 5.0];
            let y = [2.0 * x[0] - x[1] + 0.5 * 4.0 * x[2], x[1] - 3.0 * 4.0 * x[2]];
            gram.add(&x);
            cross.add(&x, &y.map(|y| y as f32));
        }
        (gram, cross)
    }

    const SCALE: [f32; 3] = [1.0, 1.0, 4.0];
    const TRUTH: [f32; 6] = [2.0, -1.0, 0.5, 0.0, 1.0, -3.0];
    const PRIOR: [f32; 6] = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0];

    fn distance(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn a_linear_map_is_found() {
        let (gram, cross) = sums(100);
        let fitted = |weight| ridge(&gram, &cross, &SCALE, &PRIOR, weight).unwrap();
        assert!(distance(&fitted(0.0), &TRUTH) < 1e-5, "{:?}", fitted(0.0));
        assert!(distance(&fitted(1e-6), &TRUTH) < 1e-4);
        // The more a change weighs, the nearer the prior.
        let far: Vec<f32> = [0.0, 0.1, 1.0, 10.0, 1e9].map(|weight| distance(&fitted(weight), &PRIOR)).into();
        assert!(far.is_sorted_by(|a, b| a > b) && far[4] < 1e-3, "{far:?}");
    }

    /// Solves a system by elimination with the largest pivots.
    fn eliminate(n: usize, mut matrix: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
        for i in 0..n {
            let pivot = (i..n).max_by(|a, b| matrix[*a][i].abs().total_cmp(&matrix[*b][i].abs())).unwrap();
            matrix.swap(i, pivot);
            b.swap(i, pivot);
            for j in (0..n).filter(|j| *j != i) {
                let factor = matrix[j][i] / matrix[i][i];
                let row = matrix[i].clone();
                add_scaled(&mut matrix[j], &row, -factor);
                b[j] -= factor * b[i];
            }
        }
        (0..n).map(|i| b[i] / matrix[i][i]).collect()
    }

    proptest! {
        /// The same as solving `(Σ Dx xᵀD + λ I) w = Σ y Dx + λ · prior` row by row, without sums and without Cholesky.
        #[test]
        fn it_is_what_a_direct_solve_gives(
            (n, outputs, rows) in (1usize..9, 1usize..4, 0usize..20),
            values in prop::collection::vec(-2.0f32..2.0, 20 * 12 + 9 + 27),
            weight in 1e-3f64..10.0,
        ) {
            let (seen, rest) = values.split_at(20 * 12);
            let (scale, prior) = (&rest[..n], &rest[9..][..n * outputs]);
            let rows: Vec<(Vec<f64>, &[f32])> = seen
                .chunks_exact(12)
                .take(rows)
                .map(|row| (row[..n].iter().map(|x| f64::from(*x)).collect(), &row[9..][..outputs]))
                .collect();
            let (mut gram, mut cross) = (Gram::new(n), Cross::new(outputs, n));
            for (x, y) in &rows {
                gram.add(x);
                cross.add(x, y);
            }
            let fitted = ridge(&gram, &cross, scale, prior, weight).unwrap();
            let scaled = |x: &[f64]| -> Vec<f64> { x.iter().zip(scale).map(|(x, s)| x * f64::from(*s)).collect() };
            let squares: f64 = rows.iter().flat_map(|(x, _)| scaled(x)).map(|x| x * x).sum();
            let lambda = if squares > 0.0 { weight * squares / n as f64 } else { 1.0 };
            for output in 0..outputs {
                let prior = &prior[output * n..][..n];
                let mut matrix = vec![vec![0.0; n]; n];
                let mut b: Vec<f64> = prior.iter().map(|p| lambda * f64::from(*p)).collect();
                (0..n).for_each(|i| matrix[i][i] = lambda);
                for (x, y) in &rows {
                    let x = scaled(x);
                    (0..n).for_each(|i| add_scaled(&mut matrix[i], &x, x[i]));
                    add_scaled(&mut b, &x, f64::from(y[output]));
                }
                let direct = eliminate(n, matrix, b);
                for (w, direct) in fitted[output * n..][..n].iter().zip(direct) {
                    prop_assert!((f64::from(*w) - direct).abs() < 1e-5 * (1.0 + direct.abs()), "{w} {direct}");
                }
            }
        }
    }

    #[test]
    fn nothing_seen_leaves_the_prior() {
        let (gram, cross) = (Gram::new(3), Cross::new(2, 3));
        assert_eq!(ridge(&gram, &cross, &SCALE, &PRIOR, 1e-3).unwrap(), PRIOR);
        let mut cross = cross;
        cross.add(&[1.0, 1.0, 1.0], &[f32::NAN, 1.0]);
        assert!(ridge(&gram, &cross, &SCALE, &PRIOR, 1e-3).is_none());
    }
}
