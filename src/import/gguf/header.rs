//! What stands at the head of a GGUF file: metadata and where each tensor lies. Format:
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::HashSet;

use super::metadata::{Kind, Metadata, Texts, Value};
use crate::error::{Error, Result};
use crate::flash::Flash;
use crate::tensor::ggml::BlockType;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
/// Bytes a header may have. Vocabularies of 250,000 tokens take about 10 MB.
const MAX_HEADER: u64 = 100_000_000;
/// Longest text by itself, such as a chat template, and longest name.
const MAX_TEXT: u64 = 16 << 20;
const MAX_NAME: u64 = 65_535;
const MAX_DIMENSIONS: u32 = 4;
const MAX_ALIGNMENT: u64 = 1 << 20;
const ALIGNMENT: u64 = 32;
/// Bytes that are read at once.
const WINDOW: u64 = 1 << 20;
/// Bytes of the description of a tensor, and of a key and a value, at least.
const LEAST_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;
const LEAST_PAIR: u64 = 8 + 4 + 1;

/// A tensor as it lies in its file.
#[derive(Debug, Clone)]
pub struct Stored {
    pub name: String,
    pub kind: BlockType,
    /// Outermost dimension first, as everywhere but in the file.
    pub shape: Vec<usize>,
    /// From the beginning of the file.
    pub offset: u64,
    pub bytes: u64,
}

impl Stored {
    /// Weights that follow one another in a row.
    pub fn cols(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    pub fn row_bytes(&self) -> usize {
        self.cols() / self.kind.block_len() * self.kind.block_bytes()
    }
}

#[derive(Debug)]
pub struct Header {
    pub metadata: Metadata,
    pub tensors: Vec<Stored>,
    /// Bytes of the file.
    pub size: u64,
}

/// Reads the header of a file. The memory it takes is bounded by what the file has of a header, and that by a constant.
///
/// # Errors
/// [`Error::Format`], [`Error::Truncated`] where the file ends before the header does or before a tensor.
pub async fn read(flash: &dyn Flash, file: &str) -> Result<Header> {
    let size = flash.size(file).await?;
    let mut reader = Reader { flash, file, size, window: Vec::new(), from: 0, at: 0 };
    let magic = reader.take(4).await?;
    if magic != MAGIC {
        let reason = format!("it begins with `{}` instead of `GGUF`", magic.escape_ascii());
        return Err(reader.bad(reason));
    }
    let version = reader.u32().await?;
    if VERSIONS.contains(&version.swap_bytes()) {
        return Err(reader.bad("it is big-endian; convert it for little-endian machines"));
    }
    if !VERSIONS.contains(&version) {
        return Err(reader.bad(format!("it has version {version}; versions 2 and 3 are supported, convert it again")));
    }
    let (tensors, pairs) = (reader.u64().await?, reader.u64().await?);
    reader.check_count("tensors", tensors, LEAST_TENSOR)?;
    reader.check_count("metadata values", pairs, LEAST_PAIR)?;

    let mut metadata = Metadata { file: file.to_owned(), ..Metadata::default() };
    for _ in 0..pairs {
        let key = reader.text("a key", MAX_NAME).await?;
        let value = reader.value(&key).await?;
        if metadata.values.contains_key(&key) {
            return Err(reader.bad(format!("the key `{}` appears twice", key.escape_default())));
        }
        metadata.values.insert(key, value);
    }
    let alignment = metadata.unsigned("general.alignment")?.unwrap_or(ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        return Err(reader.bad(format!("`general.alignment` is {alignment}, which is no power of two up to 1 MiB")));
    }

    let mut stored = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..tensors {
        let tensor = reader.tensor(alignment).await?;
        if !names.insert(tensor.name.clone()) {
            return Err(reader.bad(format!("tensor `{}` appears twice", tensor.name.escape_default())));
        }
        stored.push(tensor);
    }
    let data = reader.at.next_multiple_of(alignment);
    place(&mut stored, data, size, file)?;
    Ok(Header { metadata, tensors: stored, size })
}

/// Counts offsets from the file's beginning instead of the data's, and checks that each tensor has bytes of its own.
fn place(tensors: &mut [Stored], data: u64, size: u64, file: &str) -> Result<()> {
    let bad = |reason| Error::format("GGUF file", format!("{file}: {reason}"));
    let end = |t: &Stored| t.offset.checked_add(t.bytes);
    for tensor in &mut *tensors {
        let from_start = tensor.offset.checked_add(data);
        tensor.offset = from_start.filter(|o| o.checked_add(tensor.bytes).is_some()).ok_or_else(|| {
            bad(format!("the offset {} of tensor `{}` overflows", tensor.offset, tensor.name.escape_default()))
        })?;
    }
    let expected = tensors.iter().filter_map(end).max().unwrap_or(0);
    if expected > size {
        return Err(Error::Truncated { path: file.to_owned(), expected, actual: size });
    }
    let mut order: Vec<&Stored> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    match order.array_windows().find(|[a, b]| end(a).is_none_or(|end| end > b.offset)) {
        Some([a, b]) => {
            let (a, b) = (a.name.escape_default(), b.name.escape_default());
            Err(bad(format!("tensors `{a}` and `{b}` overlap")))
        }
        None => Ok(()),
    }
}

/// A header read window by window.
struct Reader<'a> {
    flash: &'a dyn Flash,
    file: &'a str,
    size: u64,
    /// Bytes of the file beginning with `from`.
    window: Vec<u8>,
    from: u64,
    at: u64,
}

impl Reader<'_> {
    fn bad(&self, reason: impl std::fmt::Display) -> Error {
        Error::format("GGUF file", format!("{}: {reason}", self.file))
    }

    /// Fails if this many bytes more are more than a header has.
    fn check(&self, more: u64) -> Result<()> {
        let end = self.at.saturating_add(more);
        if end > self.size {
            return Err(Error::Truncated { path: self.file.to_owned(), expected: end, actual: self.size });
        }
        if end > MAX_HEADER {
            return Err(self.bad(format!("its header is longer than {MAX_HEADER} bytes")));
        }
        Ok(())
    }

    fn check_count(&self, what: &str, count: u64, least: u64) -> Result<()> {
        match count.checked_mul(least).filter(|bytes| *bytes <= self.size - self.at) {
            Some(bytes) => self.check(bytes),
            None => {
                Err(self.bad(format!("it says that it has {count} {what}, more than its {} bytes hold", self.size)))
            }
        }
    }

    /// The next `len` bytes. No more than a window at once.
    async fn take(&mut self, len: u64) -> Result<&[u8]> {
        self.check(len)?;
        let held = self.from + self.window.len() as u64;
        if self.at + len > held {
            let wanted = len.max(WINDOW).min(self.size - self.at);
            self.window = self.flash.read(self.file, self.at, wanted as usize).await?.into_vec();
            self.from = self.at;
        }
        let start = (self.at - self.from) as usize;
        self.at += len;
        Ok(&self.window[start..][..len as usize])
    }

    async fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(4).await?.try_into().expect("four bytes")))
    }

    async fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(8).await?.try_into().expect("eight bytes")))
    }

    async fn text(&mut self, what: &str, most: u64) -> Result<String> {
        let (at, length) = (self.at, self.u64().await?);
        if length > most {
            return Err(self.bad(format!("{what} at byte {at} has {length} bytes, more than {most}")));
        }
        match String::from_utf8(self.take(length).await?.to_vec()) {
            Ok(text) => Ok(text),
            Err(_) => Err(self.bad(format!("{what} at byte {at} is not UTF-8"))),
        }
    }

    async fn kind(&mut self, key: &str) -> Result<Kind> {
        let id = self.u32().await?;
        Kind::from_id(id).ok_or_else(|| self.bad(format!("`{}` has the unknown type {id}", key.escape_default())))
    }

    async fn value(&mut self, key: &str) -> Result<Value> {
        let what = || format!("the value of `{}`", key.escape_default());
        match self.kind(key).await? {
            Kind::String => Ok(Value::Text(self.text(&what(), MAX_TEXT).await?)),
            Kind::Array => {
                let (kind, count) = (self.kind(key).await?, self.u64().await?);
                self.check_count(&format!("elements in `{}`", key.escape_default()), count, kind.bytes() as u64)?;
                match kind {
                    Kind::Array => Err(self.bad(format!("`{}` is an array of arrays", key.escape_default()))),
                    Kind::String => {
                        let mut texts = Texts::default();
                        for _ in 0..count {
                            texts.push(&self.text(&what(), MAX_TEXT).await?);
                        }
                        Ok(Value::Texts(texts))
                    }
                    fixed => {
                        let bytes = self.take(count * fixed.bytes() as u64).await?.to_vec();
                        Ok(Value::Numbers(fixed, bytes))
                    }
                }
            }
            fixed => Ok(fixed.scalar(self.take(fixed.bytes() as u64).await?)),
        }
    }

    /// A tensor whose offset still counts from the beginning of the data.
    async fn tensor(&mut self, alignment: u64) -> Result<Stored> {
        let name = self.text("the name of a tensor", MAX_NAME).await?;
        let shown = name.escape_default();
        let dimensions = self.u32().await?;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(self.bad(format!("tensor `{shown}` has {dimensions} dimensions, expected 1 to 4")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.u64().await?);
        }
        let kind = BlockType::from_id(self.u32().await?).map_err(|unknown| {
            let supported = BlockType::all().map(BlockType::name).collect::<Vec<_>>().join(", ");
            self.bad(format!("tensor `{shown}` is stored as {unknown}; supported are {supported}"))
        })?;
        let offset = self.u64().await?;
        let (block, block_bytes) = (kind.block_len() as u64, kind.block_bytes() as u64);
        let weights = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).filter(|n| *n > 0);
        // Sizes in memory are counted in usize, and a weight takes four bytes at most.
        let weights = weights.filter(|n| n.checked_mul(4).is_some_and(|bytes| isize::try_from(bytes).is_ok()));
        let Some(weights) = weights else {
            return Err(self.bad(format!("tensor `{shown}` has the dimensions {shape:?}, which is no size")));
        };
        if !shape[0].is_multiple_of(block) {
            return Err(
                self.bad(format!("a row of tensor `{shown}` has {} weights, and {kind} blocks {block}", shape[0]))
            );
        }
        if !offset.is_multiple_of(alignment) {
            return Err(self.bad(format!("the offset {offset} of tensor `{shown}` is no multiple of {alignment}")));
        }
        let shape = shape.iter().rev().map(|d| *d as usize).collect();
        Ok(Stored { kind, shape, offset, bytes: weights / block * block_bytes, name })
    }
}
