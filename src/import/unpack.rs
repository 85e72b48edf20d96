//! From a pack back to a checkpoint.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;

use super::experts::{Expert, transposed};
use super::source::{EMBEDDING, HEAD};
use crate::error::{Error, Result};
use crate::model::plan::ExpertShape;
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
    /// What `of` makes of each of some experts of a layer, one after the other.
    Experts {
        layer: usize,
        experts: Range<usize>,
        of: fn(&ExpertShape, &Expert) -> Vec<f32>,
    },
}

fn gate_up(_: &ExpertShape, expert: &Expert) -> Vec<f32> {
    expert.matrices[..2].concat()
}

fn gate_up_by_turns(shape: &ExpertShape, expert: &Expert) -> Vec<f32> {
    let [gate, up] = [0, 1].map(|part| transposed(&expert.matrices[part], shape.gate.cols));
    by_turns(&gate, &up)
}

fn gate_up_bias(_: &ExpertShape, expert: &Expert) -> Vec<f32> {
    expert.biases.as_ref().map_or(Vec::new(), |[gate, up, _]| by_turns(gate, up))
}

fn by_turns(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).flat_map(|(a, b)| [*a, *b]).collect()
}

/// Writes a pack's weights, decoded to f32, as a checkpoint with the names it came from, beside its configuration and
/// files. `on_progress(done, total)` counts the bytes written.
pub async fn unpack<S: Sink>(pack: &Pack, mut sink: S, mut on_progress: impl FnMut(u64, u64)) -> Result<S::Pack> {
    let manifest = pack.manifest();
    let items = items(pack)?;
    let total: u64 = items.iter().map(|i| 4 * i.shape.iter().product::<usize>() as u64).sum();
    sink.append(WEIGHTS, &header(&items)?)?;
    let mut done = 0;
    // The parts of an expert that are tensors of their own follow one another.
    let mut last: Option<((usize, usize), Expert)> = None;
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
            From::Experts { layer, experts, of } => {
                let shape = manifest.experts.as_ref().expect("listed with the experts").shape();
                for place in experts.clone().map(|expert| (*layer, expert)) {
                    let known = last.take().filter(|(known, _)| *known == place);
                    let (_, expert) = match known {
                        Some(known) => known,
                        None => {
                            let extent = pack.expert(place.0, place.1).await?.into_vec();
                            (place, Expert::from_extent(&shape, &extent))
                        }
                    };
                    sink.append(WEIGHTS, &to_bytes(&of(&shape, &expert)))?;
                    last = Some((place, expert));
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
    type Of = fn(&ExpertShape, &Expert) -> Vec<f32>;
    for (layer, extents) in experts.layers.iter().enumerate() {
        let count = extents.as_ref().map_or(0, Vec::len);
        let mut push = |name: String, shape: &[usize], experts: Range<usize>, of: Of| {
            items.push(Item { name, shape: shape.to_vec(), from: From::Experts { layer, experts, of } });
        };
        for expert in 0..count {
            if let Some([gate_name, up_name, down_name]) = tensors.each(layer, expert) {
                push(gate_name, &[width, hidden], expert..expert + 1, |_, e| e.matrices[0].clone());
                push(up_name, &[width, hidden], expert..expert + 1, |_, e| e.matrices[1].clone());
                push(down_name, &[hidden, width], expert..expert + 1, |_, e| e.matrices[2].clone());
            }
        }
        if count == 0 || tensors.each(layer, 0).is_some() {
            continue;
        }
        let ([both, one], all) = (tensors.fused(layer), 0..count);
        if tensors.by_turns() {
            push(format!("{both}_bias"), &[count, 2 * width], all.clone(), gate_up_bias);
            push(format!("{one}_bias"), &[count, hidden], all.clone(), |_, e| {
                e.biases.as_ref().map_or(Vec::new(), |b| b[2].clone())
            });
            push(both, &[count, hidden, 2 * width], all.clone(), gate_up_by_turns);
            push(one, &[count, width, hidden], all, |shape, e| transposed(&e.matrices[2], shape.down.cols));
        } else {
            push(both, &[count, 2 * width, hidden], all.clone(), gate_up);
            push(one, &[count, hidden, width], all, |_, e| e.matrices[2].clone());
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
