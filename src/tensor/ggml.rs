//! The block formats of ggml, which GGUF files hold: a row is a sequence of blocks, each with the scales of its own
//! weights.
//!
//! | type | weights | bytes | a weight is |
//! |---|---|---|---|
//! | `F32`, `F16`, `BF16` | 1 | 4, 2, 2 | itself |
//! | `Q8_0` | 32 | 34 | `d · q`, `q` i8 |
//! | `Q4_0`, `Q5_0` | 32 | 18, 22 | `d · (q − 8)`, `d · (q − 16)` |
//! | `Q4_1`, `Q5_1` | 32 | 20, 24 | `d · q + m` |
//! | `Q2_K`, `Q4_K`, `Q5_K` | 256 | 84, 144, 176 | `(d · s) · q − (e · m)`, `s` and `m` one a group of 16 or 32 |
//! | `Q3_K`, `Q6_K` | 256 | 110, 210 | `(d · s) · q`, `s` one a group of 16, `q` signed |
//! | `IQ4_NL`, `IQ4_XS` | 32, 256 | 18, 136 | `(d · s) · table[q]`, `s` one a group of 32 in the latter |
//! | `MXFP4` | 32 | 17 | `2^(e − 128) · table[q]` (OCP Microscaling Formats, with doubled values) |
//!
//! Products and differences are rounded to f32 in the order written, as ggml's own decoders do, so that weights are the
//! same bits.

use half::{bf16, f16};

use super::{DType, GROUP, Layout};
use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
}

/// Numbers in files, names, weights and bytes of a block.
const TYPES: [(BlockType, u32, &str, usize, usize); 16] = [
    (BlockType::F32, 0, "F32", 1, 4),
    (BlockType::F16, 1, "F16", 1, 2),
    (BlockType::BF16, 30, "BF16", 1, 2),
    (BlockType::Q8_0, 8, "Q8_0", 32, 34),
    (BlockType::Q4_0, 2, "Q4_0", 32, 18),
    (BlockType::Q4_1, 3, "Q4_1", 32, 20),
    (BlockType::Q5_0, 6, "Q5_0", 32, 22),
    (BlockType::Q5_1, 7, "Q5_1", 32, 24),
    (BlockType::Q2K, 10, "Q2_K", SUPER, 84),
    (BlockType::Q3K, 11, "Q3_K", SUPER, 110),
    (BlockType::Q4K, 12, "Q4_K", SUPER, 144),
    (BlockType::Q5K, 13, "Q5_K", SUPER, 176),
    (BlockType::Q6K, 14, "Q6_K", SUPER, 210),
    (BlockType::Iq4Nl, 20, "IQ4_NL", 32, 18),
    (BlockType::Iq4Xs, 23, "IQ4_XS", SUPER, 136),
    (BlockType::Mxfp4, 39, "MXFP4", 32, 17),
];

/// Names of the types that exist and are not read here.
const OTHERS: [(u32, &str); 22] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (40, "NVFP4"),
];

/// Weights of a block with two levels of scales.
const SUPER: usize = 256;

/// What the four bits of `IQ4_NL` and `IQ4_XS` stand for.
const IQ4: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// Twice what the four bits of a Microscaling FP4 weight (E2M1) stand for.
const FP4: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

impl BlockType {
    pub fn all() -> impl Iterator<Item = BlockType> {
        TYPES.iter().map(|t| t.0)
    }

    /// The type with this number in a file. Fails with the name of one that is not supported.
    pub fn from_id(id: u32) -> Result<BlockType, String> {
        match TYPES.iter().find(|t| t.1 == id) {
            Some(t) => Ok(t.0),
            None => Err(OTHERS
                .iter()
                .find(|(known, _)| *known == id)
                .map_or_else(|| format!("type {id}"), |(_, name)| (*name).to_owned())),
        }
    }

    fn row(self) -> &'static (BlockType, u32, &'static str, usize, usize) {
        TYPES.iter().find(|t| t.0 == self).expect("every type is in the table")
    }

    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Weights of a block.
    pub fn block_len(self) -> usize {
        self.row().3
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }

    /// Bits that a weight takes, in hundredths.
    pub fn centibits(self) -> usize {
        self.block_bytes() * 800 / self.block_len()
    }

    /// The smallest type of [`Layout`] that holds every weight of this type as it is.
    pub fn exact(self) -> DType {
        match self {
            BlockType::F16 => DType::F16,
            BlockType::Q8_0 => DType::Q8,
            _ => DType::F32,
        }
    }

    /// Decodes whole blocks.
    ///
    /// # Panics
    /// If `bytes` is not the blocks of `out.len()` weights.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let (len, size) = (self.block_len(), self.block_bytes());
        assert!(out.len().is_multiple_of(len) && out.len() / len * size == bytes.len(), "whole blocks of {self}");
        let decode: fn(&[u8], &mut [f32]) = match self {
            BlockType::F32 => |b, y| y[0] = f32::from_le_bytes(b.try_into().expect("four bytes")),
            BlockType::F16 => |b, y| y[0] = half_at(b, 0),
            BlockType::BF16 => |b, y| y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            BlockType::Q8_0 => q8_0,
            BlockType::Q4_0 => |b, y| nibbles(&b[2..], y, |q| half_at(b, 0) * (f32::from(q) - 8.0)),
            BlockType::Q4_1 => |b, y| nibbles(&b[4..], y, |q| half_at(b, 0) * f32::from(q) + half_at(b, 2)),
            BlockType::Q5_0 => |b, y| fives(&b[2..], y, |q| half_at(b, 0) * (f32::from(q) - 16.0)),
            BlockType::Q5_1 => |b, y| fives(&b[4..], y, |q| half_at(b, 0) * f32::from(q) + half_at(b, 2)),
            BlockType::Q2K => q2_k,
            BlockType::Q3K => q3_k,
            BlockType::Q4K => q4_k,
            BlockType::Q5K => q5_k,
            BlockType::Q6K => q6_k,
            BlockType::Iq4Nl => |b, y| nibbles(&b[2..], y, |q| half_at(b, 0) * IQ4[usize::from(q)]),
            BlockType::Iq4Xs => iq4_xs,
            BlockType::Mxfp4 => |b, y| nibbles(&b[1..], y, |q| power_of_two(b[0]) * FP4[usize::from(q)]),
        };
        for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(len)) {
            decode(block, out);
        }
    }
}

impl std::fmt::Display for BlockType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Rows of `Q8_0` blocks as a matrix of [`DType::Q8`], bit by bit. `above` rows of the tensor come before them.
///
/// # Errors
/// [`Error::Encode`], naming the tensor, where a scale is not finite.
///
/// # Panics
/// If `blocks` is not the blocks of the layout's rows.
pub fn q8_of_q8_0(layout: &Layout, name: &str, above: usize, blocks: &[u8]) -> Result<Vec<u8>> {
    assert!(layout.dtype == DType::Q8 && layout.cols.is_multiple_of(GROUP), "{name}: {layout:?}");
    assert_eq!(blocks.len(), layout.rows * layout.groups() * BlockType::Q8_0.block_bytes(), "{name}");
    let mut out = vec![0; layout.bytes()];
    let [values, scales, _] = layout.planes();
    for (at, block) in blocks.chunks_exact(BlockType::Q8_0.block_bytes()).enumerate() {
        if !half_at(block, 0).is_finite() {
            let reason = format!("a scale of row {} is {}", above + at / layout.groups(), half_at(block, 0));
            return Err(Error::Encode { name: name.to_owned(), dtype: layout.dtype.to_string(), reason });
        }
        out[scales.start + 2 * at..][..2].copy_from_slice(&block[..2]);
        out[values.start + GROUP * at..][..GROUP].copy_from_slice(&block[2..]);
    }
    Ok(out)
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// `2^(e − 128)`, which is subnormal for the least two.
fn power_of_two(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

/// 32 weights of four bits: byte `i` holds weight `i` in its low half and `i + 16` in its high one.
fn nibbles(quants: &[u8], out: &mut [f32], weight: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for ((l, h), q) in low.iter_mut().zip(high).zip(&quants[..16]) {
        *l = weight(q & 15);
        *h = weight(q >> 4);
    }
}

/// The same with five bits, the fifth ones in a word before the rest.
fn fives(quants: &[u8], out: &mut [f32], weight: impl Fn(u8) -> f32) {
    let fifth = u32::from_le_bytes(quants[..4].try_into().expect("four bytes"));
    let bit = |i: usize| ((fifth >> i & 1) as u8) << 4;
    for (i, q) in quants[4..20].iter().enumerate() {
        out[i] = weight(q & 15 | bit(i));
        out[i + 16] = weight(q >> 4 | bit(i + 16));
    }
}

fn q8_0(b: &[u8], out: &mut [f32]) {
    let d = half_at(b, 0);
    for (o, &q) in out.iter_mut().zip(&b[2..]) {
        *o = d * f32::from(q as i8);
    }
}

/// Scales in the low and minima in the high halves of 16 bytes, 64 bytes of two bits, `d`, `e`. Each 128 weights have 32
/// bytes: the first 32 weights their lowest bits, and so on.
fn q2_k(b: &[u8], out: &mut [f32]) {
    let (scales, quants, d, e) = (&b[..16], &b[16..80], half_at(b, 80), half_at(b, 82));
    for (group, (out, &scale)) in out.chunks_exact_mut(16).zip(scales).enumerate() {
        let (step, min) = (d * f32::from(scale & 15), e * f32::from(scale >> 4));
        let (at, shift) = (group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2);
        for (o, q) in out.iter_mut().zip(&quants[at..]) {
            *o = step * f32::from(q >> shift & 3) - min;
        }
    }
}

/// 32 bytes of third bits, 64 bytes of two bits as in `q2_k`, 16 scales of six bits in 12 bytes, `d`.
fn q3_k(b: &[u8], out: &mut [f32]) {
    let (thirds, quants, scales, d) = (&b[..32], &b[32..96], &b[96..108], half_at(b, 108));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        // The low four bits lie in the first eight bytes, one after the other's high half; the high two in the last four.
        let low = scales[group % 8] >> (group / 8 * 4) & 15;
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let step = d * (f32::from(low | high << 4) - 32.0);
        let (at, shift) = (group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2);
        for (i, o) in out.iter_mut().enumerate() {
            let low = quants[at + i] >> shift & 3;
            let third = thirds[group % 2 * 16 + i] >> (group / 2) & 1;
            *o = step * (f32::from(low | third << 2) - 4.0);
        }
    }
}

/// Scale and minimum of a group of 32, six bits each: twelve bytes hold eight of both.
fn scale_and_min(packed: &[u8], group: usize) -> (f32, f32) {
    let (s, m) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let both = packed[group + 4];
        (both & 15 | packed[group - 4] >> 6 << 4, both >> 4 | packed[group] >> 6 << 4)
    };
    (f32::from(s), f32::from(m))
}

/// `d`, `e`, scales and minima, 128 bytes of four bits: each 64 weights have 32 bytes, the first half their low ones.
fn q4_k(b: &[u8], out: &mut [f32]) {
    let (d, e, packed, quants) = (half_at(b, 0), half_at(b, 2), &b[4..16], &b[16..144]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_and_min(packed, group);
        let (step, min) = (d * s, e * m);
        for (o, q) in out.iter_mut().zip(&quants[group / 2 * 32..]) {
            *o = step * f32::from(q >> (group % 2 * 4) & 15) - min;
        }
    }
}

/// As `q4_k`, with 32 bytes of fifth bits before the rest: bit `g` of byte `i` is that of weight `i` of group `g`.
fn q5_k(b: &[u8], out: &mut [f32]) {
    let (d, e, packed, fifths, quants) = (half_at(b, 0), half_at(b, 2), &b[4..16], &b[16..48], &b[48..176]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_and_min(packed, group);
        let (step, min) = (d * s, e * m);
        for ((o, q), fifth) in out.iter_mut().zip(&quants[group / 2 * 32..]).zip(fifths) {
            let q = q >> (group % 2 * 4) & 15 | (fifth >> group & 1) << 4;
            *o = step * f32::from(q) - min;
        }
    }
}

/// 128 bytes of low four bits, 64 of high two, 16 scales of eight, `d`. Each 128 weights have 64 bytes of the former,
/// low halves first, and 32 of the latter, the lowest bits first.
fn q6_k(b: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
    for (group, (out, &scale)) in out.chunks_exact_mut(16).zip(scales).enumerate() {
        let step = d * f32::from(scale as i8);
        let (half, quarter, odd) = (group / 8, group % 8 / 2, group % 2);
        let low = &low[half * 64 + quarter % 2 * 32 + odd * 16..];
        let high = &high[half * 32 + odd * 16..];
        for ((o, l), h) in out.iter_mut().zip(low).zip(high) {
            let q = l >> (quarter / 2 * 4) & 15 | (h >> (quarter * 2) & 3) << 4;
            *o = step * (f32::from(q) - 32.0);
        }
    }
}

/// `d`, the high two bits of eight scales, their low four, then four bits a weight, 32 after 32.
fn iq4_xs(b: &[u8], out: &mut [f32]) {
    let (d, high, low, quants) = (half_at(b, 0), u16::from_le_bytes([b[2], b[3]]), &b[4..8], &b[8..136]);
    for (group, (out, quants)) in out.chunks_exact_mut(32).zip(quants.chunks_exact(16)).enumerate() {
        let scale = low[group / 2] >> (group % 2 * 4) & 15 | ((high >> (2 * group) & 3) as u8) << 4;
        let step = d * (f32::from(scale) - 32.0);
        nibbles(quants, out, |q| step * IQ4[usize::from(q)]);
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::tensor::decode_row;

    fn blocks(name: &str) -> Option<(Vec<u8>, Vec<f32>)> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gguf/blocks.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let raw = file.tensor(&format!("{name}.raw")).ok()?.data().to_vec();
        Some((raw, bytemuck::pod_collect_to_vec(file.tensor(&format!("{name}.f32")).unwrap().data())))
    }

    /// Random blocks of every type against the reference's decoder. A scale that is no number gives weights that are none.
    #[test]
    fn every_type_decodes_to_the_bits_of_the_reference() {
        let mut compared = 0;
        for kind in BlockType::all().filter(|k| !matches!(k, BlockType::F32 | BlockType::F16)) {
            let (raw, expected) = blocks(kind.name()).unwrap_or_else(|| panic!("no blocks of {kind}"));
            assert_eq!(expected.len(), 32 * kind.block_len());
            let mut out = vec![0.5; expected.len()];
            kind.decode(&raw, &mut out);
            for (i, (o, e)) in out.iter().zip(&expected).enumerate() {
                assert!(o.to_bits() == e.to_bits() || (o.is_nan() && e.is_nan()), "{kind}, weight {i}: {o} for {e}");
            }
            compared += 1;
        }
        assert_eq!(compared, 14);
    }

    #[test]
    fn floats_are_themselves() {
        let mut out = [0.0; 2];
        BlockType::F32.decode(&[1.5f32.to_le_bytes(), (-0.1f32).to_le_bytes()].concat(), &mut out);
        assert_eq!(out, [1.5, -0.1]);
        BlockType::F16
            .decode(&[f16::from_f32(1.5).to_le_bytes(), f16::from_f32(-0.1).to_le_bytes()].concat(), &mut out);
        assert_eq!(out, [1.5, f16::from_f32(-0.1).to_f32()]);
    }

    #[test]
    fn q8_0_becomes_q8_without_loss() {
        let (mut raw, _) = blocks("Q8_0").unwrap();
        for block in raw.chunks_exact_mut(34).filter(|b| !half_at(b, 0).is_finite()) {
            block[1] = 0;
        }
        let layout = Layout::new(DType::Q8, 8, 4 * GROUP);
        let stored = q8_of_q8_0(&layout, "w", 0, &raw).unwrap();
        let (mut expected, mut row) = (vec![0.0; 8 * 4 * GROUP], vec![0.0; 4 * GROUP]);
        BlockType::Q8_0.decode(&raw, &mut expected);
        for (r, expected) in expected.chunks_exact(4 * GROUP).enumerate() {
            decode_row(&layout, &stored, r, &mut row);
            assert_eq!(
                row.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
                expected.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            );
        }
        raw[34 * 5..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
        let error = q8_of_q8_0(&layout, "w", 0, &raw).unwrap_err();
        assert!(
            matches!(&error, Error::Encode { name, reason, .. } if name == "w" && reason.contains("row 1")),
            "{error}"
        );
    }

    #[test]
    fn numbers_of_types_are_theirs_alone() {
        for kind in BlockType::all() {
            assert_eq!(BlockType::from_id(kind.row().1), Ok(kind));
        }
        assert_eq!(BlockType::from_id(16), Err("IQ2_XXS".to_owned()));
        assert_eq!(BlockType::from_id(4711), Err("type 4711".to_owned()));
    }
}
