//! Writing a pack, tensor after tensor, to a directory or to memory.

use std::collections::BTreeMap;

use serde_json::Value;

use super::manifest::{
    CORE_ALIGN, CORE_EXTENT, CoreTensor, EXTENT_ALIGN, Embedding, Experts, Extent, FORMAT, FileEntry, Hash, Kind,
    MANIFEST, Manifest, Piece, Quantisation, RowPiece, Shard, VERSION, check_file_name,
};
use crate::error::{Error, Result};
use crate::model::plan::ExpertShape;
use crate::tensor::Layout;

/// Where a writer's files go.
pub trait Sink {
    /// What a finished pack is.
    type Pack;

    /// Appends to a file, which the first call makes.
    fn append(&mut self, file: &str, bytes: &[u8]) -> Result<()>;

    /// Makes all files visible at once.
    fn finish(self) -> Result<Self::Pack>;
}

/// Keeps the files in memory.
#[derive(Debug, Default)]
pub struct MemorySink {
    files: BTreeMap<String, Vec<u8>>,
}

impl Sink for MemorySink {
    type Pack = crate::flash::MemoryFlash;

    fn append(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        self.files.entry(file.to_owned()).or_default().extend_from_slice(bytes);
        Ok(())
    }

    fn finish(self) -> Result<Self::Pack> {
        Ok(crate::flash::MemoryFlash::new(self.files))
    }
}

/// What a pack says about itself.
#[derive(Debug, Clone)]
pub struct Identity {
    pub name: String,
    pub licence: Option<String>,
    pub architecture: String,
    pub config: Value,
    pub quantisation: Quantisation,
    pub provenance: Vec<FileEntry>,
}

/// Writes the tensors of a model in any order, then the manifest.
pub struct PackWriter<S: Sink> {
    sink: S,
    max_shard: u64,
    manifest: Manifest,
    core: Stream,
    rows: Stream,
    experts: Stream,
}

impl<S: Sink> PackWriter<S> {
    /// `embedding` is the layout of the whole token embedding, `experts` the shape of the routed experts and the number
    /// in a layer, `max_shard` the bytes a shard file may have.
    pub fn new(
        sink: S,
        identity: Identity,
        embedding: Layout,
        experts: Option<(ExpertShape, usize)>,
        max_shard: u64,
    ) -> Result<PackWriter<S>> {
        let stride = embedding.row().bytes() as u64;
        let experts = experts.map(|(shape, count)| Experts {
            dtype: shape.gate.dtype,
            count,
            hidden: shape.gate.cols,
            width: shape.gate.rows,
            bias: shape.bias,
            stride: shape.bytes().next_multiple_of(EXTENT_ALIGN) as u64,
            layers: Vec::new(),
        });
        let least = experts.as_ref().map_or(stride, |e| e.stride.max(stride));
        if max_shard < least {
            return Err(Error::Request(format!("shards of {max_shard} bytes cannot hold an extent of {least}")));
        }
        let Layout { dtype, rows, cols } = embedding;
        let manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            name: identity.name,
            licence: identity.licence,
            architecture: identity.architecture,
            quantisation: identity.quantisation,
            provenance: identity.provenance,
            config: identity.config,
            files: Vec::new(),
            shards: Vec::new(),
            embedding: Embedding { dtype, rows, cols, stride, pieces: Vec::new() },
            experts,
            core: BTreeMap::new(),
            extents: Vec::new(),
            self_test: None,
        };
        let max_shard = max_shard / CORE_ALIGN * CORE_ALIGN;
        let [core, rows, experts] = ["core", "embedding", "experts"].map(Stream::new);
        Ok(PackWriter { sink, max_shard, manifest, core, rows, experts })
    }

    /// Adds a core matrix in its device layout.
    pub fn matrix(&mut self, name: &str, layout: &Layout, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), layout.bytes(), "{name}: not its device layout");
        self.tensor(name, Kind::Matrix, layout, &[layout.rows, layout.cols], bytes)
    }

    /// Adds a core tensor of any shape as f32.
    ///
    /// # Errors
    /// [`Error::Encode`], naming the tensor, for values that are not finite.
    pub fn vector(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}: not its shape");
        let layout = Layout::new(crate::tensor::DType::F32, 1, values.len());
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            let (dtype, reason) = (layout.dtype.to_string(), format!("value {at} is {}", values[at]));
            return Err(Error::Encode { name: name.to_owned(), dtype, reason });
        }
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, Kind::Vector, &layout, shape, &bytes)
    }

    fn tensor(&mut self, name: &str, kind: Kind, layout: &Layout, shape: &[usize], bytes: &[u8]) -> Result<()> {
        let pieces = self.core.spread(bytes, self.max_shard, CORE_EXTENT, &mut self.manifest, &mut self.sink)?;
        let tensor = CoreTensor { kind, dtype: layout.dtype, shape: shape.to_vec(), pieces };
        match self.manifest.core.insert(name.to_owned(), tensor) {
            Some(_) => Err(Error::format("checkpoint", format!("tensor `{name}` appears twice"))),
            None => Ok(()),
        }
    }

    /// Adds the next rows of the embedding, each encoded by itself, in order.
    pub fn embedding_rows(&mut self, stored: &[u8]) -> Result<()> {
        let stride = self.manifest.embedding.stride;
        for row in stored.chunks_exact(stride as usize) {
            let first_row = self.rows.placed;
            let (shard, offset) = self.rows.place(stride, self.max_shard, &mut self.manifest);
            if offset == 0 {
                self.manifest.embedding.pieces.push(RowPiece { first_row, shard, offset });
            }
            self.rows.write(row, CORE_EXTENT, &mut self.manifest, &mut self.sink)?;
        }
        Ok(())
    }

    /// Adds the next expert of a layer: laid out as its shape says.
    pub fn expert(&mut self, layer: usize, matrices: &[u8]) -> Result<()> {
        let e = self.manifest.experts.as_mut().expect("a model with experts");
        assert_eq!(matrices.len(), e.shape().bytes(), "layer {layer}: not the shape of an expert");
        let stride = e.stride;
        if e.layers.len() <= layer {
            e.layers.resize(layer + 1, None);
        }
        e.layers[layer].get_or_insert_default().push(self.manifest.extents.len());
        self.experts.place(stride, self.max_shard, &mut self.manifest);
        let mut extent = matrices.to_vec();
        extent.resize(stride as usize, 0);
        self.experts.write(&extent, stride, &mut self.manifest, &mut self.sink)
    }

    /// Copies a file into the pack.
    pub fn file(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        check_file_name(name)?;
        self.sink.append(name, bytes)?;
        self.manifest.files.push(FileEntry { file: name.into(), bytes: bytes.len() as u64, hash: Hash::of(bytes) });
        Ok(())
    }

    /// Writes the manifest.
    ///
    /// # Errors
    /// [`Error::Format`] if parts of the model were not written.
    pub fn finish(mut self) -> Result<(Manifest, S::Pack)> {
        for stream in [&mut self.core, &mut self.rows, &mut self.experts] {
            stream.cut(&mut self.manifest);
        }
        self.manifest.validate()?;
        self.sink.append(MANIFEST, &self.manifest.to_json())?;
        Ok((self.manifest, self.sink.finish()?))
    }
}

/// Shards of one kind, written one after the other.
pub(super) struct Stream {
    prefix: String,
    shards: usize,
    /// The shard being written, its length, and where its current extent starts.
    shard: usize,
    offset: u64,
    start: u64,
    hasher: blake3::Hasher,
    /// How often something was placed.
    placed: usize,
}

impl Stream {
    pub(super) fn new(prefix: impl Into<String>) -> Stream {
        Stream {
            prefix: prefix.into(),
            shards: 0,
            shard: 0,
            offset: 0,
            start: 0,
            hasher: blake3::Hasher::new(),
            placed: 0,
        }
    }

    /// Where the next `bytes` go: a new shard if the current one has no room for them.
    fn place(&mut self, bytes: u64, max_shard: u64, manifest: &mut Manifest) -> (usize, u64) {
        if self.shards == 0 || self.offset + bytes > max_shard {
            self.cut(manifest);
            self.shard = manifest.shards.len();
            self.offset = 0;
            self.start = 0;
            manifest.shards.push(Shard { file: format!("{}-{:05}.bin", self.prefix, self.shards), bytes: 0 });
            self.shards += 1;
        }
        self.placed += 1;
        (self.shard, self.offset)
    }

    fn write(&mut self, mut bytes: &[u8], extent: u64, manifest: &mut Manifest, sink: &mut impl Sink) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        sink.append(&manifest.shards[self.shard].file, bytes)?;
        manifest.shards[self.shard].bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = (self.start + extent - self.offset) as usize;
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.hasher.update(now);
            self.offset += now.len() as u64;
            if self.offset == self.start + extent {
                self.cut(manifest);
            }
            bytes = later;
        }
        Ok(())
    }

    /// Writes a tensor, in as many pieces as shards of this size need, and what aligns the next.
    pub(super) fn spread(
        &mut self,
        bytes: &[u8],
        max_shard: u64,
        extent: u64,
        manifest: &mut Manifest,
        sink: &mut impl Sink,
    ) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = match max_shard - self.offset {
                0 => max_shard,
                room => room,
            };
            let (now, later) = rest.split_at(rest.len().min(room as usize));
            let (shard, offset) = self.place(now.len() as u64, max_shard, manifest);
            pieces.push(Piece { shard, offset, bytes: now.len() as u64 });
            self.write(now, extent, manifest, sink)?;
            rest = later;
        }
        let pad = bytes.len().next_multiple_of(CORE_ALIGN as usize) - bytes.len();
        self.write(&[0; CORE_ALIGN as usize][..pad], extent, manifest, sink)?;
        Ok(pieces)
    }

    /// Ends the current extent.
    pub(super) fn cut(&mut self, manifest: &mut Manifest) {
        if self.offset > self.start {
            let hash = Hash(self.hasher.finalize().into());
            manifest.extents.push(Extent {
                shard: self.shard,
                offset: self.start,
                bytes: self.offset - self.start,
                hash,
            });
            self.hasher.reset();
            self.start = self.offset;
        }
    }
}
