//! From checkpoints to packs, and back.

mod experts;
mod files;
pub mod gguf;
mod safetensors;
mod source;
mod unpack;
mod weights;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub use gguf::Gguf;
pub use safetensors::Checkpoint;
pub use source::Precision;
pub use unpack::unpack;
pub use weights::{Described, Weights};

use crate::chat::TOKENIZER;
use crate::error::{Error, Result, Size};
use crate::flash::{FileFlash, Flash, HttpFlash};
use crate::model::{self, Tensors};
use crate::pack::{
    FileEntry, Hash, Identity, MANIFEST, Manifest, MemorySink, Pack, PackWriter, Quantisation, Sink, check_file_name,
};
use crate::tensor::Layout;
use source::Source;

/// Bytes that a checkpoint's weights take at most, without loss, if it is packed in memory when it is opened as it is.
const MAX_IN_MEMORY: u64 = 8 << 30;
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

/// Opens a checkpoint wherever it is: a directory with `config.json` and safetensors, or the path or http(s) address of a
/// GGUF file, the first one of a split model.
///
/// # Errors
/// [`Error::Request`] for what is neither, and those of [`Checkpoint::open`] and [`Gguf::open`].
pub async fn open_checkpoint(location: &str) -> Result<Box<dyn Weights>> {
    if is_gguf(location) {
        return Ok(Box::new(open_gguf(location).await?));
    }
    Ok(Box::new(Checkpoint::open(Path::new(location))?))
}

/// Whether a path or an address is that of a GGUF file.
pub fn is_gguf(location: &str) -> bool {
    let path = if is_address(location) { location.split(['?', '#']).next().unwrap_or_default() } else { location };
    path.to_ascii_lowercase().ends_with(".gguf")
}

/// Opens a GGUF file by its path or its http(s) address.
pub async fn open_gguf(location: &str) -> Result<Gguf> {
    let (flash, file): (Rc<dyn Flash>, String) = if is_address(location) {
        let location = location.split('#').next().unwrap_or_default();
        let (path, query) = location.find('?').map_or((location, ""), |at| location.split_at(at));
        let (dir, file) = path.rsplit_once('/').unwrap_or(("", path));
        (Rc::new(HttpFlash::new(&format!("{dir}/{query}"))), file.to_owned())
    } else {
        let path = Path::new(location);
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        (Rc::new(FileFlash::open(dir)?), file)
    };
    Gguf::open(flash, &file).await
}

fn is_address(location: &str) -> bool {
    location.starts_with("http://") || location.starts_with("https://")
}

/// Opens a model wherever it is: a pack's directory, a checkpoint, which is packed in memory without loss (see
/// [`open_checkpoint`]), or the http(s) address of a pack.
///
/// # Errors
/// [`Error::Request`] for a directory that is neither, or a checkpoint too large for memory; those of [`Pack::open`] and
/// [`pack_checkpoint`].
pub async fn open_model(location: &str) -> Result<Pack> {
    if !is_gguf(location) {
        if is_address(location) {
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
    }
    let checkpoint = open_checkpoint(location).await?;
    let bytes = checkpoint.exact_bytes();
    if bytes > MAX_IN_MEMORY {
        let reason = format!(
            "its weights take {} as they are; pack it first: outrider pack {location} -o PACK --quant q4",
            Size(bytes)
        );
        return Err(Error::Request(reason));
    }
    let options = PackOptions { provenance: false, ..PackOptions::new(Precision::Lossless) };
    let packed = pack_checkpoint(&*checkpoint, &options, MemorySink::default(), |_, _| ()).await?;
    let flash: Rc<dyn Flash> = Rc::new(packed.pack);
    let pack = Pack::open(flash).await?;
    // Hashed a moment ago, when it was written.
    pack.set_verified();
    Ok(pack)
}
