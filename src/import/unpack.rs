//! A pack back to a checkpoint: every weight as the runtime sees it, in float32 safetensors.

use std::borrow::Cow;
use std::path::Path;

use safetensors::tensor::{Dtype, View};

use crate::error::{Error, Result};
use crate::pack::{Kind, Pack};
use crate::tensor::{Layout, decode_row};

struct Values {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Values {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn decode(layout: &Layout, bytes: &[u8]) -> Vec<u8> {
    let mut values = vec![0.0; layout.rows * layout.cols];
    for (row, out) in values.chunks_exact_mut(layout.cols).enumerate() {
        decode_row(layout, bytes, row, out);
    }
    bytemuck::cast_slice(&values).to_vec()
}

/// Writes the pack's weights to `to/model.safetensors`, with its configuration and files, so that the directory is a
/// checkpoint again. `to` must be empty or not exist.
pub async fn unpack(pack: &Pack, to: &Path) -> Result<()> {
    if to.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Error::Request(format!("{} is not empty; choose another directory", to.display())));
    }
    std::fs::create_dir_all(to).map_err(Error::io(to.display()))?;
    let manifest = pack.manifest();
    let mut tensors: Vec<(String, Values)> = Vec::new();
    for (name, tensor) in &manifest.core {
        let bytes = pack.core(name).await?;
        let values = match (tensor.kind, tensor.layout()) {
            (Kind::Matrix, Some(layout)) => decode(&layout, &bytes),
            _ => bytes[..4 * tensor.len()].to_vec(),
        };
        tensors.push((name.clone(), Values { shape: tensor.shape.clone(), bytes: values }));
    }
    let e = &manifest.embedding;
    let ids: Vec<u32> = (0..e.rows as u32).collect();
    let rows = bytemuck::cast_slice(&pack.embedding_rows(&ids).await?).to_vec();
    tensors.push(("model.embed_tokens.weight".into(), Values { shape: vec![e.rows, e.cols], bytes: rows }));
    if let Some(experts) = &manifest.experts {
        let shape = experts.shape();
        let parts = [("gate", shape.gate), ("up", shape.up), ("down", shape.down)];
        for (layer, _) in experts.layers.iter().enumerate().filter(|(_, l)| l.is_some()) {
            for expert in 0..experts.count {
                let extent = pack.expert(layer, expert).await?.into_vec();
                for ((part, layout), at) in parts.iter().zip(shape.offsets()) {
                    let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
                    let values = Values { shape: vec![layout.rows, layout.cols], bytes: decode(layout, &extent[at..]) };
                    tensors.push((name, values));
                }
            }
        }
    }
    let views = tensors.iter().map(|(name, values)| (name, values));
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors"))
        .map_err(|e| Error::format("safetensors file", e))?;
    let config = serde_json::to_vec_pretty(&manifest.config).map_err(|e| Error::format("config.json", e))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = to.join(name);
        std::fs::write(&path, bytes).map_err(Error::io(path.display()))
    };
    write("config.json", &config)?;
    for file in &manifest.files {
        if let Some(bytes) = pack.file(&file.file).await? {
            write(&file.file, &bytes)?;
        }
    }
    Ok(())
}
