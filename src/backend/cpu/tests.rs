//! Every instruction set gives the bits of the plain build, and the plain build what f64 arithmetic gives.

use proptest::prelude::*;

use super::Simd;
use super::kernels::{self, RowPair, RowsRef, Then};
use crate::tensor::{DType, Layout, decode_row, encode};

fn numbers(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(next).collect()
}

proptest! {
    #[test]
    fn matmul_is_the_same_on_every_instruction_set(
        rows in 1usize..40, cols in 1usize..150, m in 1usize..6, dtype in 0usize..4, add: bool, bias: bool,
        seed: u32,
    ) {
        let layout = Layout::new(DType::ALL[dtype], rows, cols);
        let weights = encode(&layout, "w", &numbers(seed, rows * cols)).unwrap();
        let x = numbers(seed ^ 1, m * cols);
        let (bias, scale) = (bias.then(|| numbers(seed ^ 3, rows)), if bias { 0.75 } else { 1.0 });
        let pairs: Vec<_> = (0..m).map(|r| RowPair { x: r, y: m - 1 - r }).collect();
        let run = |simd: &Simd| {
            let mut y = numbers(seed ^ 2, m * rows);
            let mut scratch = vec![0.0; kernels::scratch_len([layout].into_iter())];
            let x = RowsRef { data: &x, stride: cols };
            let then = Then { bias: bias.as_deref(), scale, add };
            simd.matmul(&layout, &weights, x, &mut y, rows, &pairs, then, &mut scratch);
            y
        };
        let plain = run(&Simd::baseline());
        for simd in Simd::available() {
            let y = run(&simd);
            let same = plain.iter().zip(&y).all(|(a, b)| a.to_bits() == b.to_bits());
            prop_assert!(same, "{} differs", simd.name());
        }
        let before = numbers(seed ^ 2, m * rows);
        for r in 0..m {
            for n in 0..rows {
                let mut w = vec![0.0; cols];
                decode_row(&layout, &weights, n, &mut w);
                let exact: f64 = w.iter().zip(&x[r * cols..]).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                let exact = f64::from(scale) * (exact + bias.as_ref().map_or(0.0, |b| f64::from(b[n])));
                let at = (m - 1 - r) * rows + n;
                let exact = exact + if add { f64::from(before[at]) } else { 0.0 };
                prop_assert!((f64::from(plain[at]) - exact).abs() < 1e-4, "{} where {exact} is exact", plain[at]);
            }
        }
    }

    #[test]
    fn top_k_orders_by_score_and_ties_by_id(scores in prop::collection::vec(0i8..6, 1..40), k in 1usize..8) {
        let logits: Vec<f32> = scores.iter().map(|s| f32::from(*s)).collect();
        let k = k.min(logits.len());
        let mut ids = vec![0; k];
        kernels::top_k(&logits, &mut ids);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        prop_assert_eq!(&ids, &order[..k]);
    }
}
