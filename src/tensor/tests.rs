use proptest::prelude::*;

use super::*;

fn decode(layout: &Layout, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; layout.rows * layout.cols];
    for (row, out) in out.chunks_mut(layout.cols).enumerate() {
        decode_row(layout, bytes, row, out);
    }
    out
}

/// The step of every group, read from the planes as documented.
fn steps(layout: &Layout, bytes: &[u8]) -> Vec<f32> {
    let [_, scales, rows] = layout.planes();
    let f16_at = |at: usize| half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    let group = |g: usize| match layout.dtype {
        DType::Q8 => f16_at(scales.start + 2 * g),
        DType::Q4 => f16_at(rows.start + 4 * (g / layout.groups())) * f32::from(bytes[scales.start + 2 * g]),
        _ => unreachable!("only quantised types have steps"),
    };
    (0..layout.rows * layout.groups()).map(group).collect()
}

/// Weights of a row: a scale, an offset, and now and then an outlier or an empty group.
fn matrix() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (1usize..6, 1usize..140).prop_flat_map(|(rows, cols)| {
        let row = (-20i32..12, -1.0f32..1.0, prop::collection::vec((-1.0f32..1.0, 0u32..40), cols)).prop_map(
            |(exponent, offset, values)| {
                let scale = 2f32.powi(exponent);
                let value = |(v, odd): (f32, u32)| match odd {
                    0 => scale * v * 30.0,
                    1..6 => 0.0,
                    _ => scale * (v + offset),
                };
                values.into_iter().map(value).collect::<Vec<_>>()
            },
        );
        prop::collection::vec(row, rows).prop_map(move |rows_| (rows, cols, rows_.concat()))
    })
}

proptest! {
    /// Rows are stored alike with others and by themselves, and so are parts of a matrix.
    #[test]
    fn matrices_are_made_of_their_rows((rows, cols, values) in matrix(), at in 0usize..6) {
        for dtype in DType::ALL {
            let layout = Layout::new(dtype, rows, cols);
            let bytes = encode(&layout, "w", &values).unwrap();
            for (row, values) in values.chunks_exact(cols).enumerate() {
                prop_assert_eq!(layout.row_of(&bytes, row), encode(&layout.row(), "w", values).unwrap());
            }
            let (mut again, at) = (vec![0; layout.bytes()], at.min(rows));
            for (first, count) in [(0, at), (at, rows - at)] {
                let part = Layout { rows: count, ..layout };
                let bytes = encode(&part, "w", &values[first * cols..][..count * cols]).unwrap();
                layout.put_rows(&mut again, first, &part, &bytes);
            }
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn quantised_weights_are_within_half_a_step((rows, cols, values) in matrix()) {
        for dtype in [DType::Q8, DType::Q4] {
            let layout = Layout::new(dtype, rows, cols);
            let bytes = encode(&layout, "w", &values).unwrap();
            prop_assert_eq!(bytes.len(), layout.bytes());
            let steps = steps(&layout, &bytes);
            for (at, (v, d)) in values.iter().zip(decode(&layout, &bytes)).enumerate() {
                let step = steps[at / cols * layout.groups() + at % cols / GROUP];
                // f32 rounding of the decoded value comes on top.
                let bound = step / 2.0 + (v.abs() + step * 16.0) * f32::EPSILON;
                prop_assert!((v - d).abs() <= bound, "{dtype} {v} became {d}, step {step}");
            }
        }
    }

    #[test]
    fn floats_survive((rows, cols, values) in matrix()) {
        let f32s = Layout::new(DType::F32, rows, cols);
        prop_assert_eq!(&decode(&f32s, &encode(&f32s, "w", &values).unwrap()), &values);
        let f16s = Layout::new(DType::F16, rows, cols);
        let bytes = encode(&f16s, "w", &values).unwrap();
        let once = decode(&f16s, &bytes);
        prop_assert_eq!(encode(&f16s, "w", &once).unwrap(), bytes);
    }

    #[test]
    fn padding_columns_are_zero_in_types_without_minima((rows, cols, values) in matrix()) {
        for dtype in [DType::F32, DType::F16, DType::Q8] {
            let layout = Layout::new(dtype, rows, cols);
            let bytes = encode(&layout, "w", &values).unwrap();
            let padded = Layout::new(dtype, rows, layout.groups() * GROUP);
            for row in decode(&padded, &bytes).chunks(padded.cols) {
                prop_assert!(row[cols..].iter().all(|v| *v == 0.0));
            }
        }
    }

    #[test]
    fn shapes_from_files_never_overflow(rows: usize, cols: usize) {
        for (dtype, cols) in DType::ALL.into_iter().flat_map(|d| [(d, cols), (d, cols % 70)]) {
            let _ = Layout::new(dtype, rows, cols).checked_bytes();
        }
    }
}

#[test]
fn hard_groups() {
    let cases: [&[f32]; 8] = [
        &[0.0; 40],
        &[-255.0; 32],
        &[7.0; 33],
        &[-0.3; 5],
        &[1e-9, -1e-9],
        &[f32::MIN_POSITIVE, -6.0e4],
        &[5.0, 5.1, 5.05],
        &[-5.0, -5.1, -5.05],
    ];
    for values in cases {
        for dtype in [DType::Q8, DType::Q4] {
            let layout = Layout::new(dtype, 1, values.len());
            let bytes = encode(&layout, "w", values).unwrap();
            let steps = steps(&layout, &bytes);
            for (at, (v, d)) in values.iter().zip(decode(&layout, &bytes)).enumerate() {
                let bound = steps[at / GROUP] / 2.0 + v.abs() * 2.0 * f32::EPSILON;
                assert!((v - d).abs() <= bound, "{dtype} {values:?}: {v} became {d}, step {}", steps[at / GROUP]);
            }
        }
    }
}

#[test]
fn what_cannot_be_stored_is_refused_by_name() {
    let cases: [(DType, &[f32], &str); 5] = [
        (DType::F32, &[1.0, f32::NAN], "row 0, column 1 is NaN"),
        (DType::Q4, &[f32::INFINITY, 0.0], "column 0 is inf"),
        (DType::F16, &[0.0, 7e4], "f16"),
        (DType::Q8, &[1e9, 0.0], "f16"),
        (DType::Q4, &[3e38, -3e38], "f16"),
    ];
    for (dtype, values, reason) in cases {
        let error = encode(&Layout::new(dtype, 1, 2), "some.weight", values).unwrap_err();
        assert_eq!(error.code(), "encode");
        let text = error.to_string();
        assert!(text.contains("some.weight") && text.contains(reason), "{text}");
    }
    assert_eq!(encode(&Layout::new(DType::F32, 2, 2), "w", &[0.0; 3]).unwrap_err().code(), "encode");
}

#[test]
fn four_bit_error_is_below_a_step_that_covers_the_range() {
    // A reproducible, roughly normal sample: sums of four uniform numbers from a Weyl sequence.
    let uniform = |i: usize| (i as f64 * 0.618_033_988_749_895).fract() as f32 - 0.5;
    let values: Vec<f32> = (0..64 * 256).map(|i| (0..4).map(|k| uniform(i * 7 + k * 7919 * (i + 1))).sum()).collect();
    let layout = Layout::new(DType::Q4, 64, 256);
    let decoded = decode(&layout, &encode(&layout, "w", &values).unwrap());
    let error: f64 = values.iter().zip(&decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let range = |g: &[f32]| g.iter().fold(0f32, |a, v| a.max(*v)) - g.iter().fold(0f32, |a, v| a.min(*v));
    let covering: f64 = values.chunks(GROUP).map(|g| f64::from(range(g) / 15.0).powi(2) / 12.0 * GROUP as f64).sum();
    assert!(error < covering, "squared error {error}, {covering} with min-max scales");
}

#[test]
fn rows_are_picked_as_they_are() {
    let values: Vec<f32> = (0..9 * 70).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let ranges = [4..6, 0..1, 8..9, 2..2, 5..8];
    for dtype in DType::ALL {
        let layout = Layout::new(dtype, 9, 70);
        let stored = encode(&layout, "w", &values).unwrap();
        let (rows, all) = (Layout::new(dtype, 7, 70), decode(&layout, &stored));
        let expected: Vec<f32> = ranges.iter().flat_map(|r| all[r.start * 70..r.end * 70].to_vec()).collect();
        assert_eq!(decode(&rows, &layout.pick(&stored, &ranges)), expected, "{dtype}");
    }
}
