//! From a pack back to a checkpoint.

use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::source::{EMBEDDING, HEAD};
use crate::error::{Error, Result};
use crate::model::{MAPS, expert_tensors, text_config};
use crate::pack::{Pack, Sink};
use crate::tensor::{Layout, decode_row};

const WEIGHTS: &str = "model.safetensors";
/// Embedding rows decoded at once.
const ROWS: usize = 1024;

/// One tensor of the checkpoint and where its values come from.
struct Item {
    name: String,
    shape: Vec<usize>,
    from: From,
}

enum From {
    Core,
    Embedding,
    /// Parts of experts, one after the other.
    Experts(Vec<Part>),
}

/// A matrix of an expert: 0 gate, 1 up, 2 down.
struct Part {
    layer: usize,
    expert: usize,
    matrix: usize,
}

/// Writes a pack's weights, decoded to f32, as a checkpoint with the names it came from, beside its configuration and
/// files. `on_progress(done, total)` counts the bytes written.
pub async fn unpack<S: Sink>(pack: &Pack, mut sink: S, mut on_progress: impl FnMut(u64, u64)) -> Result<S::Pack> {
    let manifest = pack.manifest();
    let items = items(pack)?;
    let total: u64 = items.iter().map(|i| 4 * i.shape.iter().product::<usize>() as u64).sum();
    sink.append(WEIGHTS, &header(&items)?)?;
    let mut done = 0;
    // The three parts of an expert follow one another and are read at once.
    let mut last = (None, Vec::new());
    for item in &items {
        match &item.from {
            From::Core => {
                let bytes = pack.core(&item.name).await?;
                let decoded = match pack.core_layout(&item.name)?.layout() {
                    Some(layout) => decode(&layout, &bytes),
                    None => bytes,
                };
                sink.append(WEIGHTS, &decoded)?;
            }
            From::Embedding => {
                let ids: Vec<u32> = (0..manifest.embedding.rows as u32).collect();
                for ids in ids.chunks(ROWS) {
                    sink.append(WEIGHTS, &to_bytes(&pack.embedding_rows(ids).await?))?;
                }
            }
            From::Experts(parts) => {
                let shape = manifest.experts.as_ref().expect("listed with the experts").shape();
                for &Part { layer, expert, matrix } in parts {
                    if last.0 != Some((layer, expert)) {
                        last = (Some((layer, expert)), pack.expert(layer, expert).await?.into_vec());
                    }
                    let layout = [shape.gate, shape.up, shape.down][matrix];
                    sink.append(WEIGHTS, &decode(&layout, &last.1[shape.offsets()[matrix]..][..layout.bytes()]))?;
                }
            }
        }
        done += 4 * item.shape.iter().product::<usize>() as u64;
        on_progress(done, total);
    }
    let config = serde_json::to_vec_pretty(&config(&manifest.config)).expect("a JSON value");
    sink.append("config.json", &config)?;
    for entry in &manifest.files {
        let bytes = pack.file(&entry.file).await?;
        sink.append(&entry.file, &bytes.ok_or_else(|| Error::MissingFile { file: entry.file.clone() })?)?;
    }
    sink.finish()
}

/// A tied head is stored for the kernels' sake and is not part of the checkpoint.
fn tied(config: &Value) -> bool {
    [config, text_config(config)].iter().any(|c| c["tie_word_embeddings"] == Value::Bool(true))
}

/// The language model's configuration, saying that weights are f32 now.
fn config(full: &Value) -> Value {
    let mut config = text_config(full).clone();
    if let Some(fields) = config.as_object_mut() {
        fields.remove("torch_dtype");
        fields.insert("dtype".into(), "float32".into());
        if tied(full) {
            fields.insert("tie_word_embeddings".into(), true.into());
        }
    }
    config
}

fn items(pack: &Pack) -> Result<Vec<Item>> {
    let manifest = pack.manifest();
    let embedding = &manifest.embedding;
    let mut items =
        vec![Item { name: EMBEDDING.into(), shape: vec![embedding.rows, embedding.cols], from: From::Embedding }];
    let of_checkpoint = |name: &str| !name.starts_with(MAPS) && (name != HEAD || !tied(&manifest.config));
    for (name, tensor) in manifest.core.iter().filter(|(name, _)| of_checkpoint(name)) {
        items.push(Item { name: name.clone(), shape: tensor.shape.clone(), from: From::Core });
    }
    let Some(experts) = &manifest.experts else { return Ok(items) };
    let (shape, tensors) = (experts.shape(), expert_tensors(&manifest.config)?);
    let (width, hidden) = (shape.gate.rows, shape.gate.cols);
    let shapes = [[width, hidden], [width, hidden], [hidden, width]];
    for (layer, extents) in experts.layers.iter().enumerate() {
        let count = extents.as_ref().map_or(0, Vec::len);
        for expert in 0..count {
            let Some(names) = tensors.each(layer, expert) else { continue };
            items.extend(names.into_iter().zip(shapes).enumerate().map(|(matrix, (name, shape))| Item {
                name,
                shape: shape.to_vec(),
                from: From::Experts(vec![Part { layer, expert, matrix }]),
            }));
        }
        if count > 0 && tensors.each(layer, 0).is_none() {
            let [gate_up, down] = tensors.fused(layer);
            let parts = |matrices: &[usize]| {
                let part = |expert| matrices.iter().map(move |&matrix| Part { layer, expert, matrix });
                From::Experts((0..count).flat_map(part).collect())
            };
            items.push(Item { name: gate_up, shape: vec![count, 2 * width, hidden], from: parts(&[0, 1]) });
            items.push(Item { name: down, shape: vec![count, hidden, width], from: parts(&[2]) });
        }
    }
    Ok(items)
}

fn header(items: &[Item]) -> Result<Vec<u8>> {
    let mut at = 0usize;
    let mut infos = Vec::with_capacity(items.len());
    for item in items {
        let end = item.shape.iter().try_fold(4usize, |a, n| a.checked_mul(*n)).and_then(|n| at.checked_add(n));
        let end = end.ok_or_else(|| Error::format("pack", "its tensors overflow a file"))?;
        let info = TensorInfo { dtype: Dtype::F32, shape: item.shape.clone(), data_offsets: (at, end) };
        infos.push((item.name.clone(), info));
        at = end;
    }
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(about), infos).map_err(|e| Error::format("pack", e))?;
    let mut json = serde_json::to_vec(&metadata).expect("a header has string keys only");
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

fn decode(layout: &Layout, bytes: &[u8]) -> Vec<u8> {
    let mut row = vec![0.0; layout.cols];
    let mut out = Vec::with_capacity(layout.rows * layout.cols * 4);
    for r in 0..layout.rows {
        decode_row(layout, bytes, r, &mut row);
        out.extend(to_bytes(&row));
    }
    out
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
