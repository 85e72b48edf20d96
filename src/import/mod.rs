//! From checkpoints to packs, and back.

mod experts;
mod files;
mod safetensors;
mod source;
mod unpack;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub use safetensors::Checkpoint;
pub use source::Precision;
pub use unpack::unpack;

use crate::chat::TOKENIZER;
use crate::error::{Error, Result, Size};
use crate::flash::{FileFlash, Flash, HttpFlash};
use crate::model::{self, Tensors};
use crate::pack::{
    FileEntry, Hash, Identity, MANIFEST, Manifest, MemorySink, Pack, PackWriter, Quantisation, Sink, check_file_name,
};
use crate::tensor::encode;
use source::Source;

/// Largest checkpoint that is packed in memory when it is opened as it is.
const MAX_IN_MEMORY: u64 = 8 << 30;
/// Embedding rows read at once.
const ROWS: usize = 4096;

#[derive(Debug, Clone)]
pub struct PackOptions {
    pub precision: Precision,
    /// Bytes a shard file may have.
    pub max_shard: u64,
    /// Name of the model; `None` for that of the checkpoint's directory.
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
pub fn pack_checkpoint<S: Sink>(
    checkpoint: &Checkpoint,
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

    let bytes: u64 = checkpoint.files().map(|(_, bytes)| bytes).sum();
    let total = if options.provenance { 2 * bytes } else { bytes };
    let mut done = 0;
    let mut advance = |bytes: u64| {
        done += bytes;
        on_progress(done.min(total), total);
    };
    let mut provenance = Vec::new();
    for (file, bytes) in checkpoint.files().filter(|_| options.provenance) {
        let mut hasher = blake3::Hasher::new();
        checkpoint.read_file(file, |piece| {
            hasher.update(piece);
            advance(piece.len() as u64);
        })?;
        provenance.push(FileEntry { file: file.to_owned(), bytes, hash: Hash(hasher.finalize().into()) });
    }

    let identity = Identity {
        name: options.name.clone().unwrap_or_else(|| directory_name(checkpoint.dir())),
        licence: options.licence.clone(),
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
        let values = checkpoint.values(from, 0, tensor.len())?;
        match weight.stored() {
            Some(layout) => writer.matrix(name, &layout, &encode(&layout, name, &values)?)?,
            None => writer.vector(name, &tensor.shape, &values)?,
        }
        advance(tensor.bytes());
    }
    for first in (0..embedding.rows).step_by(ROWS) {
        let rows = ROWS.min(embedding.rows - first);
        let values = checkpoint.values(source::EMBEDDING, first * embedding.cols, rows * embedding.cols)?;
        for row in values.chunks_exact(embedding.cols) {
            writer.embedding_rows(&encode(&embedding.row(), source::EMBEDDING, row)?)?;
        }
    }
    advance(checkpoint.tensor(source::EMBEDDING)?.bytes());
    if let Some(shape) = plan.expert {
        for (layer, moe) in plan.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.moe?))) {
            for expert in 0..moe.experts {
                let names = source.experts.names(layer, expert);
                writer.expert(layer, &source.expert(&shape, layer, expert)?.to_extent(&shape, &names)?)?;
            }
            advance(source.expert_bytes(layer));
        }
    }
    let notes = copy_files(checkpoint.dir(), &options.include, &mut writer)?;
    let (manifest, pack) = writer.finish()?;
    on_progress(total, total);
    Ok(Packed { manifest, pack, notes })
}

fn copy_files<S: Sink>(dir: &Path, include: &[PathBuf], writer: &mut PackWriter<S>) -> Result<Vec<String>> {
    let files = files::collect(dir, include)?;
    for (name, bytes) in &files {
        check_file_name(name)?;
        writer.file(name, bytes)?;
    }
    let lacks = |file: &str| !files.contains_key(file);
    let mut notes = Vec::new();
    if lacks(TOKENIZER) {
        notes.push(format!("{} has no {}: the pack takes token ids only", dir.display(), TOKENIZER));
    }
    Ok(notes)
}

fn directory_name(dir: &Path) -> String {
    let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    absolute.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
}

/// Opens a model wherever it is: a pack's directory, a checkpoint's directory, which is packed in memory without loss,
/// or the http(s) address of a pack.
///
/// # Errors
/// [`Error::Request`] for a directory that is neither, or a checkpoint too large for memory; those of [`Pack::open`] and
/// [`pack_checkpoint`].
pub async fn open_model(location: &str) -> Result<Pack> {
    if location.starts_with("http://") || location.starts_with("https://") {
        return Pack::open(Rc::new(HttpFlash::new(location))).await;
    }
    let dir = Path::new(location);
    let flash = FileFlash::open(dir)?;
    if dir.join(MANIFEST).exists() {
        return Pack::open(Rc::new(flash)).await;
    }
    if !dir.join("config.json").exists() {
        return Err(Error::Request(format!(
            "`{location}` holds neither a pack ({MANIFEST}) nor a checkpoint (config.json and safetensors)"
        )));
    }
    let checkpoint = Checkpoint::open(dir)?;
    let bytes: u64 = checkpoint.files().map(|(_, bytes)| bytes).sum();
    if bytes > MAX_IN_MEMORY {
        let reason =
            format!("the checkpoint has {}; pack it first: outrider pack {location} -o PACK --quant q4", Size(bytes));
        return Err(Error::Request(reason));
    }
    let options = PackOptions { provenance: false, ..PackOptions::new(Precision::Lossless) };
    let packed = pack_checkpoint(&checkpoint, &options, MemorySink::default(), |_, _| ())?;
    let flash: Rc<dyn Flash> = Rc::new(packed.pack);
    let pack = Pack::open(flash).await?;
    // Hashed a moment ago, when it was written.
    pack.set_verified();
    Ok(pack)
}
