//! Checkpoints as `transformers` saves them: `config.json` beside one or several safetensors files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use futures_util::future::{LocalBoxFuture, ready};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde_json::Value;

use super::files;
use super::weights::{Described, Weights};
use crate::chat::TOKENIZER;
use crate::error::{Error, Result};
use crate::flash::OpenFile;
use crate::pack::check_file_name;
use crate::tensor::{DType, Layout, encode};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Longest header of a safetensors file, and longest index: as in the reference implementation.
const MAX_HEADER: u64 = 100_000_000;

/// Files beside the weights that go into a pack.
const CARRIED: [&str; 9] = [
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "README.md",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
];

/// A checkpoint's configuration and tensors. Nothing is read but headers until values are asked for.
pub struct Checkpoint {
    dir: PathBuf,
    config: Value,
    files: Vec<(String, OpenFile)>,
    tensors: HashMap<String, Tensor>,
}

#[derive(Debug, Clone)]
pub struct Tensor {
    file: usize,
    offset: u64,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl Tensor {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes in its file.
    pub fn bytes(&self) -> u64 {
        (self.len() * self.dtype.bitsize() / 8) as u64
    }
}

fn bad(path: impl std::fmt::Display, reason: impl std::fmt::Display) -> Error {
    Error::format("checkpoint", format!("{path}: {reason}"))
}

/// Names as text-only checkpoints have them.
fn canonical(name: &str) -> String {
    match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("model.{rest}"),
        None => name.to_owned(),
    }
}

impl Checkpoint {
    /// Reads the configuration and the headers of a checkpoint.
    ///
    /// # Errors
    /// [`Error::MissingFile`] without `config.json` or weights, [`Error::Format`] for headers that are not valid,
    /// [`Error::Truncated`] for files that end before their tensors do.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let config = read_json(&dir.join("config.json"))?.ok_or_else(|| missing("config.json"))?;
        let mut checkpoint = Checkpoint { dir: dir.to_owned(), config, files: Vec::new(), tensors: HashMap::new() };
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        if let Some(index) = read_json::<Index>(&dir.join(INDEX))? {
            let mut by_file = BTreeMap::<String, Vec<String>>::new();
            for (name, file) in index.weight_map {
                check_file_name(&file)?;
                by_file.entry(file).or_default().push(name);
            }
            for (file, names) in by_file {
                let held = checkpoint.add_file(&file)?;
                if let Some(name) = names.into_iter().find(|n| !held.contains_key(n)) {
                    return Err(Error::MissingTensor { name });
                }
                checkpoint.add_tensors(held)?;
            }
        } else if dir.join(SINGLE).exists() {
            let held = checkpoint.add_file(SINGLE)?;
            checkpoint.add_tensors(held)?;
        } else {
            return Err(missing(SINGLE));
        }
        Ok(checkpoint)
    }

    fn add_file(&mut self, name: &str) -> Result<HashMap<String, Tensor>> {
        let path = self.dir.join(name);
        let file = OpenFile::open(&path)?;
        let shown = path.display();
        let length = u64::from_le_bytes(file.read(0, 8)?.try_into().expect("eight bytes were read"));
        if length > MAX_HEADER {
            return Err(bad(shown, format!("a header of {length} bytes")));
        }
        let header = file.read(8, length as usize)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| bad(&shown, e))?;
        let start = 8 + length;
        let expected = start.saturating_add(metadata.data_len() as u64);
        if file.len < expected {
            return Err(Error::Truncated { path: shown.to_string(), expected, actual: file.len });
        }
        if file.len > expected {
            return Err(bad(shown, format!("{} bytes follow its tensors", file.len - expected)));
        }
        let index = self.files.len();
        let tensor = |info: &TensorInfo| Tensor {
            file: index,
            offset: start + info.data_offsets.0 as u64,
            dtype: info.dtype,
            shape: info.shape.clone(),
        };
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, tensor(info))).collect();
        self.files.push((name.to_owned(), file));
        Ok(tensors)
    }

    fn add_tensors(&mut self, tensors: HashMap<String, Tensor>) -> Result<()> {
        for (name, tensor) in tensors {
            if self.tensors.insert(canonical(&name), tensor).is_some() {
                return Err(bad(self.dir.display(), format!("tensor `{}` appears twice", name.escape_default())));
            }
        }
        Ok(())
    }

    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.find(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// `count` values of a tensor, beginning with the `first`, as f32. Exact.
    pub fn values(&self, name: &str, first: usize, count: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        if first.checked_add(count).is_none_or(|end| end > tensor.len()) {
            return Err(bad(name, format!("its shape {:?} is too small", tensor.shape)));
        }
        let read = |width: usize| {
            let offset = tensor.offset + (first * width) as u64;
            self.files[tensor.file].1.read(offset, count * width)
        };
        let pair = |b: &[u8]| [b[0], b[1]];
        match tensor.dtype {
            Dtype::F32 => Ok(read(4)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::F16 => Ok(read(2)?.chunks_exact(2).map(|b| f16::from_le_bytes(pair(b)).to_f32()).collect()),
            Dtype::BF16 => Ok(read(2)?.chunks_exact(2).map(|b| bf16::from_le_bytes(pair(b)).to_f32()).collect()),
            other => Err(bad(name, format!("it is stored as {other:?}; supported are F32, F16 and BF16"))),
        }
    }
}

impl Weights for Checkpoint {
    fn name(&self) -> String {
        let absolute = self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
        absolute.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
    }

    fn config(&self) -> &Value {
        &self.config
    }

    fn files(&self) -> Vec<(String, u64)> {
        self.files.iter().map(|(name, file)| (name.clone(), file.len)).collect()
    }

    fn read<'a>(&'a self, name: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Vec<u8>>> {
        let file = self.files.iter().find(|(n, _)| n == name).ok_or_else(|| missing(name));
        Box::pin(ready(file.and_then(|(_, file)| file.read(offset, len))))
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn find(&self, name: &str) -> Option<Described> {
        let tensor = self.tensors.get(name)?;
        let exact = if tensor.dtype == Dtype::F16 { DType::F16 } else { DType::F32 };
        Some(Described { shape: tensor.shape.clone(), exact, bytes: tensor.bytes() })
    }

    fn values<'a>(&'a self, name: &'a str, first: usize, count: usize) -> LocalBoxFuture<'a, Result<Vec<f32>>> {
        Box::pin(ready(self.values(name, first, count)))
    }

    fn matrix<'a>(&'a self, name: &'a str, first: usize, layout: Layout) -> LocalBoxFuture<'a, Result<Vec<u8>>> {
        let values = self.values(name, first, layout.rows * layout.cols);
        Box::pin(ready(values.and_then(|values| encode(&layout, name, &values))))
    }

    fn carried(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        let paths = CARRIED.iter().map(|name| self.dir.join(name)).filter(|path| path.is_file());
        files::read(&paths.collect::<Vec<_>>())
    }
}

fn missing(file: &str) -> Error {
    Error::MissingFile { file: file.to_owned() }
}

/// A JSON file, if it is there.
fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let file = match OpenFile::open(path) {
        Ok(file) => file,
        Err(Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    if file.len > MAX_HEADER {
        return Err(bad(path.display(), format!("{} bytes are too many", file.len)));
    }
    let json = file.read(0, file.len as usize)?;
    serde_json::from_slice(&json).map(Some).map_err(|e| bad(path.display(), e))
}
