//! Weight matrices as the kernels read them: block formats, their device layout, encoding and decoding.
//!
//! A matrix of `rows` × `cols` is stored in up to three *planes*, each 16-byte aligned, one after the other. Columns
//! are padded to a multiple of [`GROUP`]; the padding decodes to zero or is never multiplied.
//!
//! | type | values plane, per row | scales plane, per row | rows plane, per row | bits a weight |
//! |---|---|---|---|---|
//! | `f32` | `cols` × f32 | | | 32 |
//! | `f16` | `cols` × f16 | | | 16 |
//! | `q8` | `cols` × i8 | one f16 `d` a group | | 8.5 |
//! | `q4` | 16 bytes a group: byte `b` holds elements `b` (low nibble) and `b + 16` (high) | `s` u8, `m` u8 a group | f16 `d`, f16 `e` | 4.5 + 32 a row |
//!
//! `q8` decodes to `d · q`; `q4` to `(d · s) · q − e · m`, `q` in 0..=15. All products and differences are rounded to
//! f32 in the order written, so that every decoder gives the same bits.

pub mod decode;
pub mod encode;
pub mod ggml;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use decode::decode_row;
pub use encode::encode;

use crate::error::{Error, Result};

/// Columns that share a scale.
pub const GROUP: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    F32,
    F16,
    Q8,
    Q4,
}

impl DType {
    pub const ALL: [DType; 4] = [DType::F32, DType::F16, DType::Q8, DType::Q4];

    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Q8 => "q8",
            DType::Q4 => "q4",
        }
    }

    /// Bytes of the values, scales and rows planes for one group, one group and one row.
    const fn unit_bytes(self) -> (usize, usize, usize) {
        match self {
            DType::F32 => (4 * GROUP, 0, 0),
            DType::F16 => (2 * GROUP, 0, 0),
            DType::Q8 => (GROUP, 2, 0),
            DType::Q4 => (GROUP / 2, 2, 4),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| format!("`{s}` is not one of f32, f16, q8, q4"))
    }
}

/// The shape and type of a stored matrix; everything about where its bytes lie follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
}

impl Layout {
    pub const fn new(dtype: DType, rows: usize, cols: usize) -> Layout {
        Layout { dtype, rows, cols }
    }

    /// Groups of [`GROUP`] columns in a row, the last one padded.
    pub const fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Bytes of one row in the values plane.
    pub const fn row_bytes(&self) -> usize {
        self.groups() * self.dtype.unit_bytes().0
    }

    /// Byte ranges of the three planes (values, scales, rows) within the matrix; a plane a type lacks is empty.
    pub const fn planes(&self) -> [Range<usize>; 3] {
        let (v, s, r) = self.dtype.unit_bytes();
        let values = self.rows * self.groups() * v;
        let scales_at = align16(values);
        let scales = self.rows * self.groups() * s;
        let rows_at = scales_at + align16(scales);
        [0..values, scales_at..scales_at + scales, rows_at..rows_at + self.rows * r]
    }

    /// Bytes of the whole matrix, a multiple of 16.
    pub const fn bytes(&self) -> usize {
        align16(self.planes()[2].end)
    }

    /// As [`bytes`](Self::bytes), refusing shapes whose size does not fit in memory. For shapes read from files.
    pub fn checked_bytes(&self) -> Result<usize> {
        let too_big =
            || Error::format("tensor shape", format!("{} × {} {} overflows", self.rows, self.cols, self.dtype));
        let padded = self.cols.max(1).checked_next_multiple_of(GROUP).ok_or_else(too_big)?;
        let most = self.rows.checked_mul(padded).and_then(|n| n.checked_mul(4)).ok_or_else(too_big)?;
        if most > isize::MAX as usize / 2 {
            return Err(too_big());
        }
        Ok(self.bytes())
    }

    /// A stored matrix of some rows of one that is stored so. Ranges must lie within it.
    pub fn pick(&self, stored: &[u8], ranges: &[Range<usize>]) -> Vec<u8> {
        let picked = Layout { rows: ranges.iter().map(Range::len).sum(), ..*self };
        let mut out = vec![0; picked.bytes()];
        for (from, to) in self.planes().into_iter().zip(picked.planes()) {
            let row = from.len() / self.rows.max(1);
            let mut at = to.start;
            for range in ranges {
                let bytes = &stored[from.start + range.start * row..from.start + range.end * row];
                out[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            }
        }
        out
    }

    /// The layout of a single row stored by itself, as embedding rows are.
    pub const fn row(&self) -> Layout {
        Layout { rows: 1, ..*self }
    }

    /// Puts rows that were stored by themselves as `rows` says into a matrix, from row `first` on.
    ///
    /// # Panics
    /// If the matrix has fewer rows, or others.
    pub fn put_rows(&self, matrix: &mut [u8], first: usize, rows: &Layout, bytes: &[u8]) {
        assert!(
            rows.dtype == self.dtype && rows.cols == self.cols && first + rows.rows <= self.rows,
            "{self:?}, {rows:?}"
        );
        for (to, from) in self.planes().into_iter().zip(rows.planes()) {
            let at = to.start + first * (from.len() / rows.rows.max(1));
            matrix[at..at + from.len()].copy_from_slice(&bytes[from]);
        }
    }

    /// One row of a stored matrix as it is stored by itself.
    ///
    /// # Panics
    /// If the matrix has no such row.
    pub fn row_of(&self, bytes: &[u8], row: usize) -> Vec<u8> {
        let mut out = vec![0; self.row().bytes()];
        for (from, to) in self.planes().into_iter().zip(self.row().planes()) {
            let len = to.len();
            out[to].copy_from_slice(&bytes[from][row * len..][..len]);
        }
        out
    }
}

pub const fn align16(n: usize) -> usize {
    n.next_multiple_of(16)
}

#[cfg(test)]
mod tests;
