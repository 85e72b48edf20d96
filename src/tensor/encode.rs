//! f32 rows to stored blocks.
//!
//! Every weight of a quantised matrix decodes to within half a step of the original (`d` for `q8`, `d · s` for `q4`),
//! up to the rounding of the result to f32.

use half::f16;

use super::{DType, GROUP, Layout};
use crate::error::{Error, Result};

/// Steps between the lowest and the highest value of a `q4` group.
const Q4_STEPS: f64 = 15.0;

/// Encodes a matrix of `layout.rows` × `layout.cols` values, row after row, into [`Layout::bytes`] bytes.
///
/// # Errors
/// [`Error::Encode`], naming the tensor, for values that are not finite, that are too large for the type, or whose
/// number is not what the layout says.
pub fn encode(layout: &Layout, name: &str, values: &[f32]) -> Result<Vec<u8>> {
    encode_rows(layout, name, 0, values)
}

/// The same for some rows of a tensor: `layout` is theirs, and `above` how many come before them.
pub fn encode_rows(layout: &Layout, name: &str, above: usize, values: &[f32]) -> Result<Vec<u8>> {
    let fail = |reason: String| Error::Encode { name: name.to_owned(), dtype: layout.dtype.to_string(), reason };
    if values.len() != layout.rows * layout.cols {
        return Err(fail(format!("{} values for {} × {}", values.len(), layout.rows, layout.cols)));
    }
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        let (row, col) = (above + at / layout.cols, at % layout.cols);
        return Err(fail(format!("the value at row {row}, column {col} is {}", values[at])));
    }
    let [values_plane, scales_plane, rows_plane] = layout.planes();
    let mut out = vec![0; layout.bytes()];
    if layout.cols == 0 {
        return Ok(out);
    }
    for (row, x) in values.chunks_exact(layout.cols).enumerate() {
        let too_large = |v: f64| fail(format!("row {} needs {v}, which is beyond the range of f16", above + row));
        let stored = &mut out[values_plane.clone()][row * layout.row_bytes()..][..layout.row_bytes()];
        match layout.dtype {
            DType::F32 => stored.chunks_exact_mut(4).zip(x).for_each(|(o, v)| o.copy_from_slice(&v.to_le_bytes())),
            DType::F16 => {
                for (o, &v) in stored.chunks_exact_mut(2).zip(x) {
                    let h = f16::from_f32(v);
                    if !h.is_finite() {
                        return Err(too_large(f64::from(v)));
                    }
                    o.copy_from_slice(&h.to_le_bytes());
                }
            }
            DType::Q8 => {
                let mut scales = Vec::with_capacity(layout.groups() * 2);
                for (x, q) in x.chunks(GROUP).zip(stored.chunks_exact_mut(GROUP)) {
                    let need = x.iter().fold(0.0, |a: f64, v| a.max(f64::from(v.abs()))) / 127.0;
                    let d = f16_above(need).ok_or_else(|| too_large(need))?;
                    scales.extend(d.to_le_bytes());
                    if d > f16::ZERO {
                        q.iter_mut().zip(x).for_each(|(q, &v)| *q = (f64::from(v) / d.to_f64()).round() as i8 as u8);
                    }
                }
                out[scales_plane.clone()][row * scales.len()..][..scales.len()].copy_from_slice(&scales);
            }
            DType::Q4 => {
                let row_scales = RowScales::cover(x).map_err(too_large)?;
                let mut scales = Vec::with_capacity(layout.groups() * 2);
                for (x, q) in x.chunks(GROUP).zip(stored.chunks_exact_mut(GROUP / 2)) {
                    scales.extend(row_scales.encode_group(x, q));
                }
                out[scales_plane.clone()][row * scales.len()..][..scales.len()].copy_from_slice(&scales);
                let pair = &mut out[rows_plane.clone()][row * 4..][..4];
                pair[..2].copy_from_slice(&row_scales.d.to_le_bytes());
                pair[2..].copy_from_slice(&row_scales.e.to_le_bytes());
            }
        }
    }
    Ok(out)
}

/// The least f16 that is not below `x ≥ 0`, if there is a finite one.
fn f16_above(x: f64) -> Option<f16> {
    let nearest = f16::from_f64(x);
    let above = if nearest.to_f64() < x { f16::from_bits(nearest.to_bits() + 1) } else { nearest };
    above.is_finite().then_some(above)
}

/// The pair of constants that the groups of a `q4` row share.
struct RowScales {
    d: f16,
    e: f16,
}

/// Lowest and highest value of a group; the lowest is at most zero because minima are subtracted.
fn bounds(x: &[f32]) -> (f64, f64) {
    x.iter().fold((0.0, f64::NEG_INFINITY), |(lo, hi): (f64, f64), &v| (lo.min(v.into()), hi.max(v.into())))
}

impl RowScales {
    /// The smallest constants with which 8-bit scales and minima cover every group of the row. Fails with the constant
    /// that is too large.
    fn cover(row: &[f32]) -> Result<RowScales, f64> {
        let groups = || row.chunks(GROUP).map(bounds);
        let need_e = groups().fold(0.0, |a: f64, (lo, _)| a.max(-lo)) / 255.0;
        let e = f16_above(need_e).ok_or(need_e)?;
        let span = |(lo, hi): (f64, f64)| hi + e.to_f64() * least_multiple(-lo, e.to_f64());
        let need_d = groups().map(span).fold(0.0, f64::max) / Q4_STEPS / 255.0;
        let d = f16_above(need_d).ok_or(need_d)?;
        Ok(RowScales { d, e })
    }

    /// Chooses scale and minimum of a group and quantises it. A group may reach half a step beyond its lowest and its
    /// highest code, so several pairs keep every value within half a step; the one with the least squared error wins.
    fn encode_group(&self, x: &[f32], q: &mut [u8]) -> [u8; 2] {
        let (d, e) = (self.d.to_f64(), self.e.to_f64());
        let (lo, hi) = bounds(x);
        let covering = least_multiple(-lo, e);
        // Where reaching half a step below the lowest code and half a step above the highest takes the same step.
        let balanced = if e > 0.0 { (((-31.0 * lo - hi) / 32.0) / e).round().max(0.0) } else { 0.0 };
        let mut best = (f32::INFINITY, 0, 0);
        for m in (-2..=2).map(|k| balanced + f64::from(k)).chain([covering, ((balanced + covering) / 2.0).round()]) {
            let m = m.clamp(0.0, covering);
            let need = f64::max(2.0 * (-lo - e * m), (hi + e * m) / (Q4_STEPS + 0.5));
            let least = if need > 0.0 { (need / d).ceil() } else { 0.0 };
            for s in [least, least + 1.0].into_iter().filter(|s| *s <= 255.0) {
                let error = squared_error(x, (d * s) as f32, (e * m) as f32);
                if error < best.0 {
                    best = (error, s as u8, m as u8);
                }
            }
        }
        let (_, s, m) = best;
        let (step, min) = (d * f64::from(s), e * f64::from(m));
        let code =
            |v: f32| if step > 0.0 { ((f64::from(v) + min) / step).round().clamp(0.0, Q4_STEPS) as u8 } else { 0 };
        let mut codes = [code(0.0); GROUP];
        codes.iter_mut().zip(x).for_each(|(c, &v)| *c = code(v));
        let (low, high) = codes.split_at(GROUP / 2);
        q.iter_mut().zip(low).zip(high).for_each(|((q, l), h)| *q = l | h << 4);
        [s, m]
    }
}

/// The least whole number `n ≤ 255` with `n · unit ≥ x`, given that there is one.
fn least_multiple(x: f64, unit: f64) -> f64 {
    if x <= 0.0 || unit == 0.0 { 0.0 } else { (x / unit).ceil().min(255.0) }
}

fn squared_error(x: &[f32], step: f32, min: f32) -> f32 {
    // Adding and taking away 1.5 · 2²³ rounds to a whole number in two operations that every vector unit has.
    const ROUND: f32 = 12_582_912.0;
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    let error = |v: f32| {
        let q = (((v + min) * inverse).clamp(0.0, Q4_STEPS as f32) + ROUND) - ROUND;
        v - (step * q - min)
    };
    x.iter().map(|&v| error(v) * error(v)).sum()
}
