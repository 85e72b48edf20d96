//! A Hugging Face checkpoint directory: `config.json` and safetensors, one file or several with an index.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::tensor::DType;

/// Largest header accepted, as the format's own reader has it.
const MAX_HEADER: u64 = 100 << 20;

/// Where one tensor lies.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub shape: Vec<usize>,
    file: usize,
    dtype: Dtype,
    offset: u64,
    bytes: u64,
}

impl Tensor {
    /// The type that holds its values without loss.
    pub fn lossless(&self) -> DType {
        if self.dtype == Dtype::F16 { DType::F16 } else { DType::F32 }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

pub struct Checkpoint {
    dir: PathBuf,
    pub config: Value,
    tensors: BTreeMap<String, Tensor>,
    files: Vec<(String, RefCell<File>)>,
}

impl Checkpoint {
    /// Reads the configuration and the headers; no values.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::MissingFile`], [`Error::Format`], [`Error::Truncated`].
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        if !dir.is_dir() {
            return Err(Error::NotFound { path: dir.display().to_string() });
        }
        let config = json(dir, "config.json")?.ok_or_else(|| {
            Error::format("model directory", format!("{} has neither manifest.json nor config.json", dir.display()))
        })?;
        let names = match json(dir, "model.safetensors.index.json")? {
            Some(index) => shard_names(&index)?,
            None => vec!["model.safetensors".to_owned()],
        };
        let (mut tensors, mut files) = (BTreeMap::new(), Vec::new());
        for (i, name) in names.into_iter().enumerate() {
            let path = dir.join(&name);
            let mut file = match File::open(&path) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(Error::MissingFile { file: name }),
                other => other.map_err(Error::io(path.display()))?,
            };
            for (tensor, info) in header(&mut file, &path, i)? {
                if tensors.insert(tensor.clone(), info).is_some() {
                    return Err(Error::format("checkpoint", format!("tensor `{tensor}` is in two files")));
                }
            }
            files.push((name, RefCell::new(file)));
        }
        Ok(Checkpoint { dir: dir.to_owned(), config, tensors, files })
    }

    /// Names of its safetensors files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|(name, _)| name.as_str())
    }

    /// Tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// Reads `count` values of a tensor from element `first` on, as f32.
    pub fn values(&self, name: &str, first: usize, count: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        let size = tensor.dtype.bitsize() / 8;
        let (file_name, file) = &self.files[tensor.file];
        let mut file = file.borrow_mut();
        let path = self.dir.join(file_name);
        let mut bytes = vec![0; count * size];
        let read =
            file.seek(SeekFrom::Start(tensor.offset + (first * size) as u64)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(Error::io(path.display()))?;
        Ok(match tensor.dtype {
            Dtype::F32 => bytemuck::pod_collect_to_vec(&bytes),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            _ => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        })
    }

    /// All values of a tensor.
    pub fn all(&self, name: &str) -> Result<Vec<f32>> {
        let count = self.tensor(name)?.shape.iter().product();
        self.values(name, 0, count)
    }

    /// A file beside the weights, if it is there.
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        read_if_there(&self.dir.join(name))
    }

    /// The directory's own name.
    pub fn name(&self) -> String {
        let dir = self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
        dir.file_name().map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path.display())(e)),
    }
}

fn json(dir: &Path, name: &'static str) -> Result<Option<Value>> {
    let Some(bytes) = read_if_there(&dir.join(name))? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| Error::format(name, e))
}

fn shard_names(index: &Value) -> Result<Vec<String>> {
    let bad = |reason: &str| Error::format("model.safetensors.index.json", reason);
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| bad("it has no `weight_map`"))?;
    let mut names = Vec::new();
    for file in map.values() {
        let file = file.as_str().ok_or_else(|| bad("a file name is no string"))?;
        crate::pack::check_file_name(file)?;
        names.push(file.to_owned());
    }
    names.sort();
    names.dedup();
    Ok(names)
}

/// The tensors of one safetensors file. Its length is checked first, so that no size in it can ask for more memory than
/// the file itself takes.
fn header(file: &mut File, path: &Path, index: usize) -> Result<Vec<(String, Tensor)>> {
    let bad = |reason: String| Error::format("safetensors file", format!("{}: {reason}", path.display()));
    let size = file.metadata().map_err(Error::io(path.display()))?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| bad("it is shorter than a header".into()))?;
    let header_len = u64::from_le_bytes(length);
    if header_len > MAX_HEADER || header_len > size.saturating_sub(8) {
        return Err(bad(format!("its header claims {header_len} bytes in a file of {size}")));
    }
    let mut bytes = vec![0; header_len as usize];
    file.read_exact(&mut bytes).map_err(Error::io(path.display()))?;
    // The crate checks shapes against offsets, and that the tensors cover the data without gap or overlap.
    let metadata: Metadata = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    let data = 8 + header_len;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let end_in_file = (data).checked_add(end as u64).ok_or_else(|| bad("an offset overflows".into()))?;
        if end_in_file > size {
            return Err(Error::Truncated { path: path.display().to_string(), expected: end_in_file, actual: size });
        }
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(bad(format!("tensor `{name}` has type {:?}; f32, f16 and bf16 are supported", info.dtype)));
        }
        let tensor = Tensor {
            shape: info.shape.clone(),
            file: index,
            dtype: info.dtype,
            offset: data + start as u64,
            bytes: (end - start) as u64,
        };
        tensors.push((name, tensor));
    }
    Ok(tensors)
}
