//! `qwen3_5_moe_text` checkpoints: the names transformers writes, experts one by one or fused, alone or inside a
//! multimodal model.

use crate::error::{Error, Result};
use crate::model::plan::ExpertShape;
use crate::model::text_config;
use crate::pack::{FileEntry, Hash, Identity, Manifest, PackWriter, Quantisation, Sink};
use crate::tensor::{DType, Layout, encode};

use super::{Checkpoint, FILES, Options, dimension};

/// Rows of the embedding encoded at a time.
const ROWS: usize = 1024;

struct Names<'a> {
    checkpoint: &'a Checkpoint,
    /// What the checkpoint has where packs have `model.`.
    prefix: &'static str,
}

impl Names<'_> {
    /// A checkpoint's name for a pack's name.
    fn source(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", self.prefix),
            None => name.to_owned(),
        }
    }

    /// A pack's name for a checkpoint's name, if the language model has it.
    fn target(&self, source: &str) -> Option<String> {
        match source.strip_prefix(self.prefix) {
            Some(rest) => Some(format!("model.{rest}")),
            None => (source == "lm_head.weight").then(|| source.to_owned()),
        }
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let source = self.source(name);
        let tensor = self.checkpoint.tensor(&source)?;
        if tensor.shape != shape {
            let reason = format!("tensor `{source}` has shape {:?}, expected {shape:?}", tensor.shape);
            return Err(Error::format("checkpoint", reason));
        }
        self.checkpoint.all(&source)
    }
}

/// Small matrices whose rounding moves routing and decay: never below f16.
fn is_sensitive(name: &str) -> bool {
    [".mlp.gate.weight", ".shared_expert_gate.weight", ".in_proj_a.weight", ".in_proj_b.weight"]
        .iter()
        .any(|end| name.ends_with(end))
}

pub fn write<S: Sink>(
    checkpoint: &Checkpoint,
    sink: S,
    options: &Options,
    on_progress: &mut dyn FnMut(u64, u64),
) -> Result<(Manifest, S::Pack)> {
    let config = text_config(&checkpoint.config);
    let has = |name: &str| checkpoint.tensors().contains_key(name);
    let prefix = if has("model.language_model.embed_tokens.weight") { "model.language_model." } else { "model." };
    let names = Names { checkpoint, prefix };
    let [hidden, width, vocab, count, layers] =
        ["hidden_size", "moe_intermediate_size", "vocab_size", "num_experts", "num_hidden_layers"]
            .map(|name| dimension(config, name));
    let (hidden, width, vocab, count, layers) = (hidden?, width?, vocab?, count?, layers?);

    let embedding_name = names.source("model.embed_tokens.weight");
    let embedding_type = options.core.unwrap_or(checkpoint.tensor(&embedding_name)?.lossless());
    let experts = Experts::find(&names, hidden, width)?;
    let expert_type = match options.experts {
        Some(dtype) => dtype,
        None => experts.lossless(&names)?,
    };
    let shape = ExpertShape::new(expert_type, hidden, width);
    let identity = Identity {
        name: options.name.clone().unwrap_or_else(|| checkpoint.name()),
        licence: options.licence.clone(),
        architecture: crate::model::architecture(config)?.to_owned(),
        config: config.clone(),
        quantisation: Quantisation { core: embedding_type, experts: Some(expert_type) },
        provenance: provenance(checkpoint)?,
    };
    let embedding = Layout::new(embedding_type, vocab, hidden);
    let mut writer = PackWriter::new(sink, identity, embedding, Some((shape, count)), options.max_shard)?;

    let total: u64 = checkpoint.tensors().values().map(|t| t.bytes()).sum();
    let mut done = 0;
    let mut progress = |bytes: u64| {
        done += bytes;
        on_progress(done.min(total), total);
    };

    // The head of a tied model is the embedding once more, as a matrix that stays resident.
    if config.get("tie_word_embeddings").and_then(|v| v.as_bool()) == Some(true) && !has("lm_head.weight") {
        let values = names.values("model.embed_tokens.weight", &[vocab, hidden])?;
        writer.matrix("lm_head.weight", &embedding, &encode(&embedding, "lm_head.weight", &values)?)?;
    }
    for (source, tensor) in checkpoint.tensors() {
        let Some(name) = names.target(source) else { continue };
        if name == "model.embed_tokens.weight" || name.contains(".mlp.experts.") {
            continue;
        }
        let values = checkpoint.all(source)?;
        match *tensor.shape.as_slice() {
            [rows, cols] => {
                let lossless = tensor.lossless();
                let dtype = match options.core {
                    Some(DType::Q4 | DType::Q8) if is_sensitive(&name) => DType::F16,
                    Some(dtype) => dtype,
                    None => lossless,
                };
                let layout = Layout::new(dtype, rows, cols);
                layout.checked_bytes()?;
                writer.matrix(&name, &layout, &encode(&layout, &name, &values)?)?;
            }
            _ => writer.vector(&name, &tensor.shape, &values)?,
        }
        progress(tensor.bytes());
    }
    let all = checkpoint.tensor(&embedding_name)?;
    if all.shape != [vocab, hidden] {
        return Err(Error::format("checkpoint", format!("`{embedding_name}` has shape {:?}", all.shape)));
    }
    for first in (0..vocab).step_by(ROWS) {
        let rows = ROWS.min(vocab - first);
        let values = checkpoint.values(&embedding_name, first * hidden, rows * hidden)?;
        for row in values.chunks_exact(hidden) {
            writer.embedding_rows(&encode(&embedding.row(), &embedding_name, row)?)?;
        }
    }
    progress(all.bytes());
    for layer in 0..layers {
        for expert in 0..count {
            let (gate, up, down) = experts.read(&names, layer, expert, count, hidden, width)?;
            let label = format!("expert {expert} of layer {layer}");
            let mut extent = encode(&shape.gate, &label, &gate)?;
            extent.extend(encode(&shape.up, &label, &up)?);
            extent.extend(encode(&shape.down, &label, &down)?);
            writer.expert(layer, &extent)?;
            progress((3 * hidden * width) as u64 * if experts.half { 2 } else { 4 });
        }
    }
    for name in FILES {
        if let Some(bytes) = checkpoint.file(name)? {
            writer.file(name, &bytes)?;
        }
    }
    writer.finish()
}

/// Names and hashes of what a pack was made from.
fn provenance(checkpoint: &Checkpoint) -> Result<Vec<FileEntry>> {
    let names = std::iter::once("config.json").chain(checkpoint.files());
    let entry = |name: &str| {
        let path = checkpoint.dir().join(name);
        let mut hasher = blake3::Hasher::new();
        let mut file = std::fs::File::open(&path).map_err(Error::io(path.display()))?;
        let bytes = std::io::copy(&mut file, &mut hasher).map_err(Error::io(path.display()))?;
        Ok(FileEntry { file: name.to_owned(), bytes, hash: Hash(hasher.finalize().into()) })
    };
    names.map(entry).collect()
}

/// How the checkpoint keeps its experts.
struct Experts {
    /// `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] of all experts of a layer, instead of three matrices each.
    fused: bool,
    half: bool,
}

impl Experts {
    fn find(names: &Names<'_>, hidden: usize, width: usize) -> Result<Experts> {
        let fused = names.source("model.layers.0.mlp.experts.gate_up_proj");
        let single = names.source("model.layers.0.mlp.experts.0.gate_proj.weight");
        let tensors = names.checkpoint.tensors();
        let (fused, tensor) = match tensors.get(&fused) {
            Some(tensor) => (true, tensor),
            None => (false, names.checkpoint.tensor(&single)?),
        };
        if !fused && tensor.shape != [width, hidden] {
            return Err(Error::format("checkpoint", format!("`{single}` has shape {:?}", tensor.shape)));
        }
        Ok(Experts { fused, half: tensor.bytes() == tensor.shape.iter().product::<usize>() as u64 * 2 })
    }

    fn lossless(&self, names: &Names<'_>) -> Result<DType> {
        let end = if self.fused { "gate_up_proj" } else { "0.gate_proj.weight" };
        Ok(names.checkpoint.tensor(&names.source(&format!("model.layers.0.mlp.experts.{end}")))?.lossless())
    }

    /// Gate, up and down of one expert.
    fn read(
        &self,
        names: &Names<'_>,
        layer: usize,
        expert: usize,
        count: usize,
        hidden: usize,
        width: usize,
    ) -> Result<(Vec<f32>, Vec<f32>, Vec<f32>)> {
        let at = format!("model.layers.{layer}.mlp.experts");
        if !self.fused {
            let matrix =
                |part: &str, shape: [usize; 2]| names.values(&format!("{at}.{expert}.{part}_proj.weight"), &shape);
            return Ok((
                matrix("gate", [width, hidden])?,
                matrix("up", [width, hidden])?,
                matrix("down", [hidden, width])?,
            ));
        }
        let part = |name: &str, shape: [usize; 3]| {
            let source = names.source(&format!("{at}.{name}"));
            let found = &names.checkpoint.tensor(&source)?.shape;
            if *found != shape {
                return Err(Error::format("checkpoint", format!("`{source}` has shape {found:?}, expected {shape:?}")));
            }
            let len = shape[1] * shape[2];
            names.checkpoint.values(&source, expert * len, len)
        };
        let mut gate = part("gate_up_proj", [count, 2 * width, hidden])?;
        let up = gate.split_off(width * hidden);
        Ok((gate, up, part("down_proj", [count, hidden, width])?))
    }
}
