//! Stored rows back to f32.

use half::f16;

use super::{DType, GROUP, Layout};

/// Decodes row `row` of a stored matrix into `out[..cols]`. `bytes` is the whole matrix.
///
/// # Panics
/// If `bytes` or `out` is shorter than the layout says.
#[inline(always)]
pub fn decode_row(layout: &Layout, bytes: &[u8], row: usize, out: &mut [f32]) {
    let [values, scales, rows] = layout.planes();
    let stride = layout.row_bytes();
    let values = &bytes[values][row * stride..(row + 1) * stride];
    let groups = layout.groups();
    let scales = &bytes[scales];
    let scale = |g: usize| {
        let at = (row * groups + g) * 2;
        [scales[at], scales[at + 1]]
    };
    let out = &mut out[..layout.cols];
    match layout.dtype {
        DType::F32 => {
            for (o, v) in out.iter_mut().zip(values.chunks_exact(4)) {
                *o = f32::from_le_bytes(v.try_into().unwrap());
            }
        }
        DType::F16 => {
            for (o, v) in out.iter_mut().zip(values.chunks_exact(2)) {
                *o = f16::from_le_bytes(v.try_into().unwrap()).to_f32();
            }
        }
        DType::Q8 => {
            for (g, (o, q)) in out.chunks_mut(GROUP).zip(values.chunks_exact(GROUP)).enumerate() {
                let d = f16::from_le_bytes(scale(g)).to_f32();
                for (o, &q) in o.iter_mut().zip(q) {
                    *o = d * f32::from(q as i8);
                }
            }
        }
        DType::Q4 => {
            let pair = &bytes[rows][row * 4..row * 4 + 4];
            let d = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
            let e = f16::from_le_bytes([pair[2], pair[3]]).to_f32();
            for (g, (o, q)) in out.chunks_mut(GROUP).zip(values.chunks_exact(GROUP / 2)).enumerate() {
                let [s, m] = scale(g);
                let (step, min) = (d * f32::from(s), e * f32::from(m));
                let mut full = [0.0; GROUP];
                let (low, high) = full.split_at_mut(GROUP / 2);
                for ((l, h), &q) in low.iter_mut().zip(high).zip(q) {
                    *l = step * f32::from(q & 15) - min;
                    *h = step * f32::from(q >> 4) - min;
                }
                o.copy_from_slice(&full[..o.len()]);
            }
        }
    }
}
