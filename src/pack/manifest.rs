//! `manifest.json`: what is where in a pack, and what every byte must hash to.
//!
//! Everything here comes from untrusted files. [`Manifest::parse`] checks every number before anything is sized by it:
//! what it returns can be indexed without further checks, and once the shards have been found to be as long as they
//! are said to be, no read allocates more than the pack really holds.

use std::collections::{BTreeMap, HashSet};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::SelfTest;
use crate::error::{Error, Result};
use crate::model::Stored;
use crate::model::plan::ExpertShape;
use crate::tensor::{DType, Layout, align16};

pub const FORMAT: &str = "outrider-pack";
pub const VERSION: u64 = 1;
pub const MANIFEST: &str = "manifest.json";

/// Largest manifest that is read; a 35 B model with 10,240 experts has one of about 1 MB.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Where core and embedding shards are cut into extents.
pub const CORE_EXTENT: u64 = 1 << 20;
/// Alignment of expert extents in their shard.
pub const EXTENT_ALIGN: usize = 4096;
/// Alignment of core tensors and embedding rows in their shard.
pub const CORE_ALIGN: u64 = 16;
/// Longest extent; an extent is read whole.
const MAX_EXTENT: u64 = 1 << 30;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`FORMAT`].
    pub format: String,
    pub version: u64,
    pub name: String,
    pub licence: Option<String>,
    /// The `model_type` of the text configuration.
    pub architecture: String,
    pub quantisation: Quantisation,
    /// The files the pack was made from.
    pub provenance: Vec<FileEntry>,
    /// The checkpoint's `config.json`.
    pub config: Value,
    /// Files copied as they are, such as the tokenizer.
    pub files: Vec<FileEntry>,
    pub shards: Vec<Shard>,
    pub embedding: Embedding,
    pub experts: Option<Experts>,
    pub core: BTreeMap<String, CoreTensor>,
    /// Together they cover every byte of every shard exactly once.
    pub extents: Vec<Extent>,
    /// Packs made before there was one have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub self_test: Option<SelfTest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantisation {
    pub core: DType,
    pub experts: Option<DType>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    pub file: String,
    pub bytes: u64,
    pub hash: Hash,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub file: String,
    pub bytes: u64,
}

/// Bytes that are hashed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(usize, u64, u64, Hash)", into = "(usize, u64, u64, Hash)")]
pub struct Extent {
    pub shard: usize,
    pub offset: u64,
    pub bytes: u64,
    pub hash: Hash,
}

impl Extent {
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

impl From<(usize, u64, u64, Hash)> for Extent {
    fn from((shard, offset, bytes, hash): (usize, u64, u64, Hash)) -> Extent {
        Extent { shard, offset, bytes, hash }
    }
}

impl From<Extent> for (usize, u64, u64, Hash) {
    fn from(e: Extent) -> Self {
        (e.shard, e.offset, e.bytes, e.hash)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Two dimensions, stored in its device layout.
    Matrix,
    /// Any shape, stored as f32 in row-major order.
    Vector,
}

/// A tensor that stays resident.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoreTensor {
    pub kind: Kind,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Where its bytes lie, in order.
    pub pieces: Vec<Piece>,
}

impl CoreTensor {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The layout of a matrix.
    pub fn layout(&self) -> Option<Layout> {
        match (self.kind, self.shape.as_slice()) {
            (Kind::Matrix, &[rows, cols]) => Some(Layout::new(self.dtype, rows, cols)),
            _ => None,
        }
    }

    /// Bytes it is stored in.
    pub fn bytes(&self) -> usize {
        self.layout().map_or(self.len() * 4, |l| l.bytes())
    }

    pub fn stored(&self) -> Stored {
        self.layout().map_or(Stored::Vector(self.len()), Stored::Matrix)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(usize, u64, u64)", into = "(usize, u64, u64)")]
pub struct Piece {
    pub shard: usize,
    pub offset: u64,
    pub bytes: u64,
}

impl From<(usize, u64, u64)> for Piece {
    fn from((shard, offset, bytes): (usize, u64, u64)) -> Piece {
        Piece { shard, offset, bytes }
    }
}

impl From<Piece> for (usize, u64, u64) {
    fn from(p: Piece) -> Self {
        (p.shard, p.offset, p.bytes)
    }
}

/// The token embedding: rows stored one by one, so that each is one small read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Embedding {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Bytes from one row to the next: those of [`Embedding::row`].
    pub stride: u64,
    pub pieces: Vec<RowPiece>,
}

/// Consecutive rows in one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowPiece {
    pub first_row: usize,
    pub shard: usize,
    pub offset: u64,
}

impl Embedding {
    /// The layout of one row stored by itself.
    pub fn row(&self) -> Layout {
        Layout::new(self.dtype, 1, self.cols)
    }
}

/// The routed experts, one extent each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    pub dtype: DType,
    /// Experts in a layer that has any.
    pub count: usize,
    pub hidden: usize,
    pub width: usize,
    /// Whether an expert's three matrices are followed by their biases.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bias: bool,
    /// Bytes of an extent: those of its [shape](Experts::shape), rounded up to a multiple of [`EXTENT_ALIGN`].
    pub stride: u64,
    /// For every layer that has experts, which extent holds each of them.
    pub layers: Vec<Option<Vec<usize>>>,
}

impl Experts {
    pub fn shape(&self) -> ExpertShape {
        ExpertShape::new(self.dtype, self.hidden, self.width, self.bias)
    }
}

/// BLAKE3, written in hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    pub fn of(bytes: &[u8]) -> Hash {
        Hash(blake3::hash(bytes).into())
    }
}

impl std::fmt::Debug for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Hash, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(d)?;
        blake3::Hash::from_hex(text.as_bytes()).map(|h| Hash(h.into())).map_err(D::Error::custom)
    }
}

fn bad(reason: impl std::fmt::Display) -> Error {
    Error::format("pack", reason)
}

/// Names of files in a pack: letters, digits, `.`, `-` and `_`, so that no name leaves the directory on any system.
pub fn check_file_name(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.chars().all(plain) {
        return Err(bad(format!("`{}` is not a plain file name", name.escape_default())));
    }
    Ok(())
}

/// What every version of a manifest has; a newer one may have any other fields.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

/// Whether this is the manifest of a pack, of whatever version.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn is_manifest(json: &[u8]) -> bool {
    serde_json::from_slice(json).is_ok_and(|head: Head| head.format == FORMAT)
}

impl Manifest {
    /// Reads and validates a manifest. Whether the shards are as long as it says is for the caller to check.
    ///
    /// # Errors
    /// [`Error::Version`] for a format version this build does not know, [`Error::Format`] with the reason for
    /// anything that does not fit together.
    pub fn parse(json: &[u8]) -> Result<Manifest> {
        // The version first, because the rest follows from it.
        let head: Head = serde_json::from_slice(json).map_err(|e| bad(format!("{MANIFEST}: {e}")))?;
        if head.format != FORMAT {
            return Err(bad(format!("{MANIFEST}: the format is `{}`, not `{FORMAT}`", head.format.escape_default())));
        }
        if head.version != VERSION {
            return Err(Error::Version { found: head.version, supported: VERSION });
        }
        let manifest: Manifest = serde_json::from_slice(json).map_err(|e| bad(format!("{MANIFEST}: {e}")))?;
        manifest.validate()?;
        Ok(manifest)
    }

    /// Files of the pack, the manifest among them.
    pub fn file_count(&self) -> usize {
        self.shards.len() + self.files.len() + 1
    }

    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest has string keys only")
    }

    /// Bytes of all files of the pack beside the manifest itself.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes).chain(self.files.iter().map(|f| f.bytes)).sum()
    }

    /// Whether there are maps, see [`put_maps`](super::put_maps).
    pub fn has_maps(&self) -> bool {
        self.core.keys().any(|name| name.starts_with(crate::model::MAPS))
    }

    /// How a core tensor is stored.
    pub fn stored(&self, name: &str) -> Result<Stored> {
        self.core.get(name).map(CoreTensor::stored).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    pub(super) fn validate(&self) -> Result<()> {
        let mut names = HashSet::from([MANIFEST]);
        let mut total = 0u64;
        let files = self.files.iter().map(|f| (&f.file, f.bytes));
        for (file, bytes) in self.shards.iter().map(|s| (&s.file, s.bytes)).chain(files) {
            check_file_name(file)?;
            if !names.insert(file) {
                return Err(bad(format!("`{file}` is listed twice")));
            }
            total = total.checked_add(bytes).ok_or_else(|| bad("the sizes of its files overflow"))?;
        }
        self.validate_extents()?;
        for (name, tensor) in &self.core {
            self.validate_core(tensor)
                .map_err(|reason| bad(format!("tensor `{}`: {reason}", name.escape_default())))?;
        }
        self.validate_embedding().map_err(|reason| bad(format!("embedding: {reason}")))?;
        self.validate_experts().map_err(|reason| bad(format!("experts: {reason}")))?;
        let tested = self.self_test.as_ref().map_or(Ok(()), |test| test.validate(self.embedding.rows));
        tested.map_err(|reason| bad(format!("self-test: {reason}")))
    }

    fn validate_extents(&self) -> Result<()> {
        let mut sorted: Vec<&Extent> = self.extents.iter().collect();
        sorted.sort_unstable_by_key(|e| (e.shard, e.offset));
        let mut sorted = sorted.into_iter().peekable();
        for (index, shard) in self.shards.iter().enumerate() {
            let mut covered = 0;
            while let Some(e) = sorted.next_if(|e| e.shard == index) {
                if e.offset != covered || e.bytes == 0 || e.bytes > shard.bytes - covered {
                    let file = &shard.file;
                    return Err(bad(format!(
                        "the extent of {} bytes at {} of `{file}` does not continue at {covered} within {} bytes",
                        e.bytes, e.offset, shard.bytes
                    )));
                }
                if e.bytes > MAX_EXTENT {
                    return Err(bad(format!("an extent of {} bytes is too long", e.bytes)));
                }
                covered += e.bytes;
            }
            if covered != shard.bytes {
                return Err(bad(format!("the extents of `{}` cover {covered} of {} bytes", shard.file, shard.bytes)));
            }
        }
        match sorted.next() {
            Some(e) => Err(bad(format!("an extent lies in shard {} of {}", e.shard, self.shards.len()))),
            None => Ok(()),
        }
    }

    /// Checks that bytes lie inside a shard.
    fn inside(&self, shard: usize, offset: u64, bytes: u64) -> Result<(), String> {
        let s = self.shards.get(shard).ok_or_else(|| format!("shard {shard} of {}", self.shards.len()))?;
        match offset.checked_add(bytes) {
            Some(end) if end <= s.bytes => Ok(()),
            _ => Err(format!("{bytes} bytes at {offset} lie outside `{}` of {} bytes", s.file, s.bytes)),
        }
    }

    fn validate_core(&self, tensor: &CoreTensor) -> Result<(), String> {
        let values = tensor.shape.iter().try_fold(1usize, |a, n| a.checked_mul(*n)).filter(|n| *n > 0);
        let values = values.ok_or_else(|| format!("its shape {:?} is empty or overflows", tensor.shape))?;
        let bytes = match tensor.kind {
            Kind::Matrix => {
                let layout = tensor.layout().ok_or_else(|| format!("a matrix of shape {:?}", tensor.shape))?;
                layout.checked_bytes().map_err(|e| e.to_string())?
            }
            Kind::Vector if tensor.dtype == DType::F32 => {
                values.checked_mul(4).ok_or_else(|| format!("its shape {:?} overflows", tensor.shape))?
            }
            Kind::Vector => return Err(format!("a vector stored as {}", tensor.dtype)),
        };
        let mut sum = 0u64;
        for piece in &tensor.pieces {
            self.inside(piece.shard, piece.offset, piece.bytes)?;
            sum = sum.checked_add(piece.bytes).ok_or("its pieces overflow")?;
        }
        // A piece repeated over and over must not ask for more memory than the pack has bytes.
        if sum != bytes as u64 || sum > self.shards.iter().map(|s| s.bytes).sum() {
            return Err(format!("its pieces have {sum} bytes, its shape needs {bytes}"));
        }
        Ok(())
    }

    fn validate_embedding(&self) -> Result<(), String> {
        let e = &self.embedding;
        if e.rows == 0 || e.cols == 0 {
            return Err(format!("{} × {} is empty", e.rows, e.cols));
        }
        let row = e.row().checked_bytes().map_err(|e| e.to_string())? as u64;
        if e.stride != row {
            return Err(format!("its stride is {}, a row of {} {} takes {row} bytes", e.stride, e.cols, e.dtype));
        }
        if e.pieces.first().is_none_or(|p| p.first_row != 0) {
            return Err("no piece starts at row 0".into());
        }
        let ends = e.pieces.iter().skip(1).map(|p| p.first_row).chain([e.rows]);
        for (piece, end) in e.pieces.iter().zip(ends) {
            let rows = end.checked_sub(piece.first_row).filter(|n| *n > 0).ok_or("its pieces are out of order")?;
            let bytes = (rows as u64).checked_mul(row).ok_or("its pieces overflow")?;
            self.inside(piece.shard, piece.offset, bytes)?;
        }
        Ok(())
    }

    fn validate_experts(&self) -> Result<(), String> {
        let dtype = self.experts.as_ref().map(|e| e.dtype);
        if dtype != self.quantisation.experts {
            return Err("their type is not the one under `quantisation`".into());
        }
        let Some(e) = &self.experts else { return Ok(()) };
        if e.hidden != self.embedding.cols || e.width == 0 || e.count == 0 {
            return Err(format!(
                "{} of {} × {} beside embeddings of {}",
                e.count, e.hidden, e.width, self.embedding.cols
            ));
        }
        // Two of the three matrices have the same shape; the third is its transpose.
        let part = |rows, cols| Layout::new(e.dtype, rows, cols).checked_bytes().map_err(|e| e.to_string());
        let sum = part(e.width, e.hidden)?.checked_mul(2).zip(Some(part(e.hidden, e.width)?));
        // Four bytes a row, which the matrices' own sizes have just been found to allow.
        let biases = if e.bias { 2 * align16(4 * e.width) + align16(4 * e.hidden) } else { 0 };
        let stride = sum.and_then(|(a, b)| a.checked_add(b)?.checked_add(biases));
        let stride = stride.and_then(|n| n.checked_next_multiple_of(EXTENT_ALIGN));
        if stride.map(|n| n as u64) != Some(e.stride) {
            return Err(format!("their stride is {}, their shape needs {stride:?}", e.stride));
        }
        for (layer, extents) in e.layers.iter().enumerate() {
            let Some(extents) = extents else { continue };
            if extents.len() != e.count {
                return Err(format!("layer {layer} has {} of {}", extents.len(), e.count));
            }
            for &index in extents {
                let extent =
                    self.extents.get(index).ok_or_else(|| format!("layer {layer}: extent {index} does not exist"))?;
                if extent.bytes != e.stride || !extent.offset.is_multiple_of(EXTENT_ALIGN as u64) {
                    return Err(format!(
                        "layer {layer}: extent {index} has {} bytes at {}, expected {} at a multiple of {EXTENT_ALIGN}",
                        extent.bytes, extent.offset, e.stride
                    ));
                }
            }
        }
        Ok(())
    }
}
