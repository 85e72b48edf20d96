//! A small checkpoint, as it is and changed.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{GOLDEN_CHECKPOINTS, repository};

pub const WEIGHTS: &str = "model.safetensors";

/// A copy of a small checkpoint.
pub fn checkpoint() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", WEIGHTS] {
        std::fs::copy(repository(GOLDEN_CHECKPOINTS[0]).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

/// Shapes and values of a checkpoint's tensors.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The tensors and the configuration of the small checkpoint.
pub fn contents() -> (Tensors, Value) {
    let dir = repository(GOLDEN_CHECKPOINTS[0]);
    let bytes = std::fs::read(dir.join(WEIGHTS)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let read = |t: &TensorView| (t.shape().to_vec(), bytemuck::pod_collect_to_vec(t.data()));
    let tensors = file.iter().map(|(name, t)| (name.to_owned(), read(&t))).collect();
    (tensors, serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap())
}

/// Writes a safetensors file of one type.
pub fn save(path: &Path, tensors: &Tensors, dtype: Dtype) {
    let bytes = |v: &f32| match dtype {
        Dtype::F32 => v.to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(*v).to_le_bytes().to_vec(),
        Dtype::BF16 => half::bf16::from_f32(*v).to_le_bytes().to_vec(),
        _ => unreachable!("no type of weights"),
    };
    let stored: Vec<Vec<u8>> = tensors.values().map(|(_, values)| values.iter().flat_map(bytes).collect()).collect();
    let views = tensors
        .iter()
        .zip(&stored)
        .map(|((name, (shape, _)), bytes)| (name, TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The small checkpoint with its tensors and its configuration changed.
pub fn with_tensors(change: impl FnOnce(&mut Tensors, &mut Value)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (mut tensors, mut config) = contents();
    change(&mut tensors, &mut config);
    save(&dir.path().join(WEIGHTS), &tensors, Dtype::F32);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}
