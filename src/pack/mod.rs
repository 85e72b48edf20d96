//! The pack: a model as a directory that any static host can serve and a browser's private file system can hold.
//!
//! - `manifest.json`: architecture, tensors, where every byte is and what it must hash to ([`Manifest`]);
//! - `core-NNNNN.bin`: what stays resident, matrices in their device layout, vectors as f32;
//! - `embedding-NNNNN.bin`: token embeddings row by row, read when a token is;
//! - `experts-NNNNN.bin`: one extent per expert (gate, up, down), aligned to 4096 bytes, so that one expert is one read;
//! - `maps-HASH-NNNNN.bin`, optional: core tensors by which experts are foreseen ([`put_maps`]);
//! - the tokenizer's files, model card and licence, copied.

#[cfg(not(target_arch = "wasm32"))]
mod directory;
mod manifest;
mod maps;
mod self_test;
mod verify;
mod writer;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::rc::Rc;

#[cfg(not(target_arch = "wasm32"))]
pub use directory::{DirectorySink, Replace, set_maps, set_self_test};
pub use manifest::{
    CORE_EXTENT, CoreTensor, EXTENT_ALIGN, Embedding, Experts, Extent, FileEntry, Hash, Kind, MANIFEST, Manifest,
    Piece, Quantisation, RowPiece, Shard, VERSION, check_file_name,
};
pub use maps::{Map, copy_with_maps, put_maps};
pub use self_test::{SelfTest, SelfTestRow};
pub use verify::{Bad, Progress, verify};
pub use writer::{Identity, MemorySink, PackWriter, Sink};

use crate::error::{Error, Result};
use crate::flash::{Bytes, Flash};
use crate::tensor::decode_row;

/// An open pack. What is read is checked against its hash the first time.
pub struct Pack {
    flash: Rc<dyn Flash>,
    manifest: Manifest,
    /// Extents of every shard in order of offset, as indices into [`Manifest::extents`].
    by_shard: Vec<Vec<usize>>,
    /// Which extents have been read and found good.
    verified: Vec<Cell<bool>>,
}

impl Pack {
    /// Reads and validates the manifest and checks that every shard is as long as it says.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a manifest or a shard, [`Error::Version`], [`Error::Format`], [`Error::Truncated`].
    pub async fn open(flash: Rc<dyn Flash>) -> Result<Pack> {
        let manifest = read_manifest(&*flash).await?;
        for shard in &manifest.shards {
            let actual = flash.size(&shard.file).await?;
            if actual != shard.bytes {
                return Err(Error::Truncated { path: shard.file.clone(), expected: shard.bytes, actual });
            }
        }
        let mut by_shard = vec![Vec::new(); manifest.shards.len()];
        for (index, extent) in manifest.extents.iter().enumerate() {
            by_shard[extent.shard].push(index);
        }
        for extents in &mut by_shard {
            extents.sort_unstable_by_key(|i| manifest.extents[*i].offset);
        }
        let verified = vec![Cell::new(false); manifest.extents.len()];
        Ok(Pack { flash, manifest, by_shard, verified })
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub fn flash(&self) -> &Rc<dyn Flash> {
        &self.flash
    }

    /// Takes every extent as verified, for a caller that has just hashed them all.
    pub fn set_verified(&self) {
        self.verified.iter().for_each(|v| v.set(true));
    }

    /// Shape and type of a core tensor.
    pub fn core_layout(&self, name: &str) -> Result<&CoreTensor> {
        self.manifest.core.get(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// The bytes of a core tensor: a matrix in its device layout, or a vector of f32.
    pub async fn core(&self, name: &str) -> Result<Vec<u8>> {
        let tensor = self.core_layout(name)?;
        let mut bytes = vec![0; tensor.bytes()];
        let mut rest = bytes.as_mut_slice();
        for piece in &tensor.pieces {
            let (out, after) = rest.split_at_mut(piece.bytes as usize);
            self.read_checked(piece.shard, piece.offset, out).await?;
            rest = after;
        }
        Ok(bytes)
    }

    /// Decoded embeddings of some tokens, `[ids.len(), hidden]`.
    pub async fn embedding_rows(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let e = &self.manifest.embedding;
        let layout = e.row();
        let mut stored = vec![0; layout.bytes()];
        let mut out = vec![0.0; ids.len() * e.cols];
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(e.cols)) {
            let row = id as usize;
            if row >= e.rows {
                return Err(Error::Request(format!("token {id} is not among the model's {}", e.rows)));
            }
            let piece = e.pieces[e.pieces.partition_point(|p| p.first_row <= row) - 1];
            let offset = piece.offset + (row - piece.first_row) as u64 * e.stride;
            self.read_checked(piece.shard, offset, &mut stored).await?;
            decode_row(&layout, &stored, 0, out);
        }
        Ok(out)
    }

    /// Bytes that [`expert`](Self::expert) reads, 0 without experts: gate, up and down as
    /// [`ExpertShape`](crate::model::plan::ExpertShape) lays them out.
    pub fn expert_bytes(&self) -> usize {
        self.manifest.experts.as_ref().map_or(0, |e| e.shape().bytes())
    }

    /// Reads one expert, in one read.
    pub async fn expert(&self, layer: usize, expert: usize) -> Result<Bytes> {
        self.expert_in(layer, expert, 1).await
    }

    /// Reads one expert in several reads, which is what an expert-major layout saves.
    pub(crate) async fn expert_in(&self, layer: usize, expert: usize, pieces: usize) -> Result<Bytes> {
        let layers = self.manifest.experts.as_ref().map_or(&[][..], |e| &e.layers);
        let index = layers.get(layer).and_then(|l| l.as_ref()?.get(expert).copied());
        let index = index.ok_or_else(|| Error::MissingTensor { name: format!("expert {expert} of layer {layer}") })?;
        let extent = &self.manifest.extents[index];
        let file = &self.manifest.shards[extent.shard].file;
        let len = self.expert_bytes();
        if self.verified[index].get() && pieces <= 1 {
            return self.flash.read(file, extent.offset, len).await;
        }
        if self.verified[index].get() {
            let starts = (0..len).step_by(len.div_ceil(pieces));
            let parts =
                starts.map(|at| self.flash.read(file, extent.offset + at as u64, len.div_ceil(pieces).min(len - at)));
            let parts = futures_util::future::try_join_all(parts).await?;
            return Ok(Bytes::Owned(parts.into_iter().map(Bytes::into_vec).collect::<Vec<_>>().concat()));
        }
        let mut bytes = self.flash.read(file, extent.offset, extent.bytes as usize).await?.into_vec();
        self.check(index, &bytes)?;
        bytes.truncate(self.expert_bytes());
        Ok(Bytes::Owned(bytes))
    }

    /// Writes some shards and every file of the pack to a sink, checking them.
    async fn copy_files(&self, sink: &mut impl Sink, keep: impl Fn(&str) -> bool) -> Result<()> {
        for (shard, extents) in self.manifest.shards.iter().zip(&self.by_shard).filter(|(s, _)| keep(&s.file)) {
            for &index in extents {
                let extent = &self.manifest.extents[index];
                let bytes = self.flash.read(&shard.file, extent.offset, extent.bytes as usize).await?.into_vec();
                self.check(index, &bytes)?;
                sink.append(&shard.file, &bytes)?;
            }
        }
        for FileEntry { file, .. } in &self.manifest.files {
            let bytes = self.file(file).await?.ok_or_else(|| Error::MissingFile { file: file.clone() })?;
            sink.append(file, &bytes)?;
        }
        Ok(())
    }

    /// A copied file such as `tokenizer.json`, if the pack has it.
    pub async fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(entry) = self.manifest.files.iter().find(|f| f.file == name) else { return Ok(None) };
        let size = self.flash.size(name).await?;
        if size != entry.bytes {
            return Err(Error::Truncated { path: name.to_owned(), expected: entry.bytes, actual: size });
        }
        let bytes = self.flash.read(name, 0, length(entry.bytes)?).await?.into_vec();
        if Hash::of(&bytes) != entry.hash {
            return Err(Error::Corrupt { path: name.to_owned(), offset: 0, len: entry.bytes });
        }
        Ok(Some(bytes))
    }

    /// Fills `out` from a shard. Extents not seen before are read whole and hashed.
    async fn read_checked(&self, shard: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let file = &self.manifest.shards[shard].file;
        let extents = &self.by_shard[shard];
        let mut done = 0;
        // The extents of a shard leave no gaps, and validation put every range inside its shard.
        let mut at = extents.partition_point(|i| self.manifest.extents[*i].end() <= offset);
        while done < out.len() {
            let index = extents[at];
            let extent = &self.manifest.extents[index];
            let from = offset + done as u64;
            let len = usize::try_from(extent.end() - from).unwrap_or(usize::MAX).min(out.len() - done);
            let target = &mut out[done..done + len];
            if self.verified[index].get() {
                self.flash.read(file, from, len).await?.copy_to(target);
            } else {
                let whole = self.flash.read(file, extent.offset, extent.bytes as usize).await?.into_vec();
                self.check(index, &whole)?;
                target.copy_from_slice(&whole[(from - extent.offset) as usize..][..len]);
            }
            done += len;
            at += 1;
        }
        Ok(())
    }

    fn check(&self, index: usize, bytes: &[u8]) -> Result<()> {
        let extent = &self.manifest.extents[index];
        if Hash::of(bytes) != extent.hash {
            let path = self.manifest.shards[extent.shard].file.clone();
            return Err(Error::Corrupt { path, offset: extent.offset, len: extent.bytes });
        }
        self.verified[index].set(true);
        Ok(())
    }
}

/// Reads and validates a pack's manifest, without looking at anything else.
pub async fn read_manifest(flash: &dyn Flash) -> Result<Manifest> {
    let size = flash.size(MANIFEST).await?;
    if size > manifest::MAX_MANIFEST_BYTES {
        return Err(Error::format("pack", format!("{MANIFEST} has {size} bytes")));
    }
    let json = flash.read(MANIFEST, 0, length(size)?).await?.into_vec();
    Manifest::parse(&json)
}

fn length(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::format("pack", format!("{bytes} bytes do not fit in memory")))
}
