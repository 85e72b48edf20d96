//! From checkpoints to packs, and back.

mod experts;
mod files;
mod gguf;
#[cfg(not(target_arch = "wasm32"))]
mod open;
#[cfg(not(target_arch = "wasm32"))]
mod safetensors;
mod source;
mod unpack;
mod weights;

use std::collections::HashSet;
use std::path::PathBuf;

pub use gguf::Gguf;
#[cfg(not(target_arch = "wasm32"))]
pub use open::{is_gguf, open_checkpoint, open_gguf, open_model};
#[cfg(not(target_arch = "wasm32"))]
pub use safetensors::Checkpoint;
pub use source::Precision;
pub use unpack::unpack;
pub use weights::{Described, Weights};

use crate::chat::TOKENIZER;
use crate::error::Result;
use crate::model::{self, Tensors};
use crate::pack::{FileEntry, Hash, Identity, Manifest, PackWriter, Quantisation, Sink, check_file_name};
use crate::tensor::Layout;
use source::Source;

/// Embedding rows read at once.
const ROWS: usize = 4096;
/// Bytes read at once to name a source by its hash.
const PIECE: usize = 4 << 20;

#[derive(Debug, Clone)]
pub struct PackOptions {
    pub precision: Precision,
    /// Bytes a shard file may have.
    pub max_shard: u64,
    /// Name of the model; `None` for what the checkpoint or its directory is called.
    pub name: Option<String>,
    pub licence: Option<String>,
    /// Files to copy beside those of the checkpoint; they take the place of any of the same name.
    pub include: Vec<PathBuf>,
    /// Whether the checkpoint's files are hashed to name the source.
    pub provenance: bool,
}

impl PackOptions {
    pub fn new(precision: Precision) -> PackOptions {
        PackOptions { precision, max_shard: 1 << 30, name: None, licence: None, include: vec![], provenance: true }
    }
}

/// What became of a checkpoint.
#[derive(Debug)]
pub struct Packed<P> {
    pub manifest: Manifest,
    pub pack: P,
    /// What the pack lacks, for people.
    pub notes: Vec<String>,
}

/// Packs a checkpoint, one tensor at a time. `on_progress(done, total)` counts the checkpoint's bytes.
///
/// # Errors
/// [`Error::UnknownArchitecture`], [`Error::MissingTensor`] and [`Error::Format`] for checkpoints that are not complete
/// or do not fit their configuration, [`Error::Encode`] for weights a type cannot hold.
pub async fn pack_checkpoint<S: Sink>(
    checkpoint: &dyn Weights,
    options: &PackOptions,
    sink: S,
    mut on_progress: impl FnMut(u64, u64),
) -> Result<Packed<S::Pack>> {
    let source = Source::new(checkpoint, options.precision)?;
    let architecture = model::architecture(checkpoint.config())?;
    // The plan names every tensor the model needs and checks its shape against the configuration.
    let plan = model::plan_for(checkpoint.config(), &source)?;
    let experts = plan.most_experts();
    let expert_dtype = plan.expert.and(source.expert_dtype());

    // What is wrong with these shows before any weight is read.
    let mut files = checkpoint.carried()?;
    files.extend(files::read(&options.include)?);

    let bytes: u64 = checkpoint.files().iter().map(|(_, bytes)| bytes).sum();
    let total = if options.provenance { 2 * bytes } else { bytes };
    let mut done = 0;
    let mut advance = |bytes: u64| {
        done += bytes;
        on_progress(done.min(total), total);
    };
    let mut provenance = Vec::new();
    for (file, bytes) in checkpoint.files().into_iter().filter(|_| options.provenance) {
        let mut hasher = blake3::Hasher::new();
        for offset in (0..bytes).step_by(PIECE) {
            let piece = checkpoint.read(&file, offset, (bytes - offset).min(PIECE as u64) as usize).await?;
            hasher.update(&piece);
            advance(piece.len() as u64);
        }
        provenance.push(FileEntry { file, bytes, hash: Hash(hasher.finalize().into()) });
    }

    let identity = Identity {
        name: options.name.clone().unwrap_or_else(|| checkpoint.name()),
        licence: options.licence.clone().or_else(|| checkpoint.licence()),
        architecture: architecture.to_owned(),
        config: checkpoint.config().clone(),
        quantisation: Quantisation { core: source.main_dtype()?, experts: expert_dtype },
        provenance,
    };
    let embedding = source.embedding(&plan)?;
    let shape = plan.expert.map(|shape| (shape, experts));
    let mut writer = PackWriter::new(sink, identity, embedding, shape, options.max_shard)?;

    let mut written = HashSet::new();
    for weight in &plan.weights {
        let (name, from) = (&weight.tensor, source.name_of(&weight.tensor));
        // Several weights may be made of one tensor's rows.
        if !written.insert(name) {
            continue;
        }
        let tensor = checkpoint.tensor(from)?;
        match weight.stored() {
            Some(layout) => writer.matrix(name, &layout, &checkpoint.matrix(from, 0, layout).await?)?,
            None => writer.vector(name, &tensor.shape, &checkpoint.values(from, 0, tensor.len()).await?)?,
        }
        advance(tensor.bytes);
    }
    for first in (0..embedding.rows).step_by(ROWS) {
        let rows = Layout { rows: ROWS.min(embedding.rows - first), ..embedding };
        let stored = checkpoint.matrix(source::EMBEDDING, first * embedding.cols, rows).await?;
        for row in 0..rows.rows {
            writer.embedding_rows(&rows.row_of(&stored, row))?;
        }
    }
    advance(checkpoint.tensor(source::EMBEDDING)?.bytes);
    if let Some(shape) = plan.expert {
        for (layer, moe) in plan.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.moe?))) {
            for expert in 0..moe.experts {
                writer.expert(layer, &source.expert(&shape, layer, expert).await?)?;
            }
            advance(source.expert_bytes(layer));
        }
    }
    for (name, bytes) in &files {
        check_file_name(name)?;
        writer.file(name, bytes)?;
    }
    let mut notes = Vec::new();
    if !files.contains_key(TOKENIZER) {
        notes.push(format!("{} has no {TOKENIZER}: the pack takes token ids only", checkpoint.name()));
    }
    let (manifest, pack) = writer.finish()?;
    on_progress(total, total);
    Ok(Packed { manifest, pack, notes })
}
