//! Checkpoints to packs: safetensors in, one tensor at a time.

mod checkpoint;
mod qwen3_5_moe;
mod unpack;

use std::path::Path;
use std::rc::Rc;

use serde_json::Value;

pub use checkpoint::{Checkpoint, Tensor};
pub use unpack::unpack;

use crate::error::{Error, Result};
use crate::flash::{FileFlash, HttpFlash};
use crate::pack::{DirectorySink, MANIFEST, Manifest, MemorySink, Pack, Sink};
use crate::tensor::DType;

/// Files that are copied into a pack when a checkpoint has them.
const FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
];

/// How to store a checkpoint.
#[derive(Debug, Clone)]
pub struct Options {
    /// Type of the routed experts; `None` keeps what the checkpoint has (bf16 becomes f32, so that nothing is lost).
    pub experts: Option<DType>,
    /// Type of the other matrices and of the embedding; `None` as for the experts.
    pub core: Option<DType>,
    /// Bytes a shard file has at most.
    pub max_shard: u64,
    pub name: Option<String>,
    pub licence: Option<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options { experts: None, core: None, max_shard: 1 << 30, name: None, licence: None }
    }
}

/// Packs the checkpoint directory `from` into the directory `to`. `on_progress(done, total)` counts bytes of the
/// checkpoint. A pack that could not be finished leaves nothing behind.
pub fn pack(
    from: &Path,
    to: &Path,
    replace: bool,
    options: &Options,
    on_progress: &mut dyn FnMut(u64, u64),
) -> Result<Manifest> {
    let checkpoint = Checkpoint::open(from)?;
    let sink = DirectorySink::new(to, replace)?;
    Ok(write(&checkpoint, sink, options, on_progress)?.0)
}

/// Opens a model wherever it is: a pack directory, a checkpoint directory (packed in memory without loss), or the
/// http(s) address of a pack.
pub async fn open_model(model: &str) -> Result<Pack> {
    if model.starts_with("http://") || model.starts_with("https://") {
        return Pack::open(Rc::new(HttpFlash::new(model))).await;
    }
    let dir = Path::new(model);
    if dir.join(MANIFEST).is_file() {
        return Pack::open(Rc::new(FileFlash::open(dir)?)).await;
    }
    let checkpoint = Checkpoint::open(dir)?;
    let (_, flash) = write(&checkpoint, MemorySink::default(), &Options::default(), &mut |_, _| {})?;
    let pack = Pack::open(Rc::new(flash)).await?;
    pack.set_verified();
    Ok(pack)
}

fn write<S: Sink>(
    checkpoint: &Checkpoint,
    sink: S,
    options: &Options,
    on_progress: &mut dyn FnMut(u64, u64),
) -> Result<(Manifest, S::Pack)> {
    match crate::model::architecture(&checkpoint.config)? {
        "qwen3_5_moe_text" => qwen3_5_moe::write(checkpoint, sink, options, on_progress),
        other => Err(Error::UnknownArchitecture { name: other.to_owned(), supported: "qwen3_5_moe_text".to_owned() }),
    }
}

fn dimension(config: &Value, name: &str) -> Result<usize> {
    let value = config.get(name).and_then(Value::as_u64).filter(|n| (1..=1 << 20).contains(n));
    value
        .map(|n| n as usize)
        .ok_or_else(|| Error::format("config.json", format!("`{name}` is missing or out of range")))
}
