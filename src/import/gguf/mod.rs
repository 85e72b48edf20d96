//! GGUF files as checkpoints: their tensors under the names and with the values that `transformers` has.
//!
//! [`header`] reads where everything lies, [`names`] says what becomes of it for each architecture, [`tokenizer`] makes
//! the files that chatting needs. Bytes come through [`Flash`], so that a file can be on disk or at an address.

mod config;
mod header;
mod metadata;
mod names;
mod tokenizer;

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use futures_util::future::LocalBoxFuture;
use serde_json::Value;

use super::Precision;
use super::weights::{Described, Weights};
use crate::error::{Error, Result};
use crate::flash::Flash;
use crate::tensor::encode::encode_rows;
use crate::tensor::ggml::{BlockType, q8_of_q8_0};
use crate::tensor::{DType, GROUP, Layout};
use header::{Header, Stored};
use metadata::Metadata;
use names::{Change, Names};

/// Bytes that are read at once, or a row where that is more.
const WINDOW: usize = 4 << 20;
/// Parts of a split model at most, as many as five digits can name.
const MAX_PARTS: u64 = 99_999;

/// A model in GGUF, in one file or split into several. Nothing is read but headers until values are asked for.
pub struct Gguf {
    flash: Rc<dyn Flash>,
    metadata: Metadata,
    config: Value,
    files: Vec<(String, u64)>,
    tensors: HashMap<String, Tensor>,
}

/// A tensor under its new name.
struct Tensor {
    file: usize,
    stored: Stored,
    shape: Vec<usize>,
    change: Change,
}

impl Tensor {
    fn exact(&self) -> DType {
        match self.stored.kind.exact() {
            // A row or a column of blocks keeps them whole; values that are computed with do not stay blocks.
            DType::Q8 if self.change.keeps_groups() => DType::Q8,
            DType::F16 if self.change.keeps_values() => DType::F16,
            _ => DType::F32,
        }
    }
}

impl Gguf {
    /// Reads the headers of a model whose first or only file is `file`, and of the other parts, which lie beside it.
    ///
    /// # Errors
    /// [`Error::Format`] and [`Error::Truncated`] for files that are damaged or of a kind that is not supported,
    /// [`Error::UnknownArchitecture`], [`Error::NotFound`] where a part is missing.
    pub async fn open(flash: Rc<dyn Flash>, file: &str) -> Result<Gguf> {
        let first = header::read(&*flash, file).await?;
        let parts = parts(&first.metadata, file)?;
        let mut files = vec![(file.to_owned(), first.size)];
        let mut stored: Vec<(usize, Stored)> = first.tensors.into_iter().map(|t| (0, t)).collect();
        for (number, part) in parts.iter().enumerate().skip(1) {
            let Header { metadata, tensors, size } = header::read(&*flash, part).await?;
            check_part(&metadata, number as u64, parts.len() as u64)?;
            files.push((part.clone(), size));
            stored.extend(tensors.into_iter().map(|t| (number, t)));
        }
        let metadata = first.metadata;
        if let Some(all) = metadata.unsigned("split.tensors.count")?
            && all != stored.len() as u64
        {
            return Err(metadata.bad(format!("its parts have {} tensors where it says {all}", stored.len())));
        }
        let by_name = |name: &str| stored.iter().find(|(_, t)| t.name == name).map(|(_, t)| t);
        let architecture = config::architecture(&metadata)?;
        let config = config::read(&metadata, architecture, by_name)?;
        let names = Names::of(architecture, &config);
        let mut gguf = Gguf { flash, metadata, config, files, tensors: HashMap::new() };
        gguf.rename(stored, &names)?;
        Ok(gguf)
    }

    fn rename(&mut self, stored: Vec<(usize, Stored)>, names: &Names) -> Result<()> {
        let mut seen = HashMap::new();
        for (file, stored) in stored {
            if let Some(other) = seen.insert(stored.name.clone(), file) {
                let (name, a, b) = (stored.name.escape_default(), &self.files[other].0, &self.files[file].0);
                return Err(self.metadata.bad(format!("tensor `{name}` is in both {a} and {b}")));
            }
            // Others are of parts that text does not need, such as drafting heads.
            let Some(renamed) = names.rename(&stored.name) else { continue };
            let shape = renamed.shape(&stored.shape).ok_or_else(|| {
                let (name, shape) = (stored.name.escape_default(), &stored.shape);
                self.metadata.bad(format!("tensor `{name}` has the shape {shape:?}, which does not fit its metadata"))
            })?;
            self.tensors.insert(renamed.name, Tensor { file, stored, shape, change: renamed.change });
        }
        Ok(())
    }

    /// The type a tensor has in its file.
    pub fn type_of(&self, name: &str) -> Option<BlockType> {
        self.tensors.get(name).map(|tensor| tensor.stored.kind)
    }

    /// How many weights there are of each type.
    pub fn types(&self) -> Vec<(BlockType, u64)> {
        let mut counts: Vec<(BlockType, u64)> = BlockType::all().map(|kind| (kind, 0)).collect();
        for tensor in self.tensors.values() {
            let count = counts.iter_mut().find(|(kind, _)| *kind == tensor.stored.kind).expect("all are counted");
            count.1 += tensor.stored.shape.iter().product::<usize>() as u64;
        }
        counts.retain(|(_, weights)| *weights > 0);
        counts
    }

    /// The types to pack it in if nobody says otherwise: what loses nothing where the experts are floats or `Q8_0`; of
    /// other types, which no layout holds as they are, `q4` for those of up to 4.5 bits a weight, else `q8`.
    pub fn precision(&self) -> Precision {
        let experts = self.main_type(|name| name.contains(".mlp.experts."));
        match experts.or_else(|| self.main_type(|_| true)) {
            None | Some(BlockType::F32 | BlockType::F16 | BlockType::BF16 | BlockType::Q8_0) => Precision::Lossless,
            Some(kind) if kind.centibits() <= 450 => Precision::with_experts(DType::Q4),
            Some(_) => Precision::with_experts(DType::Q8),
        }
    }

    /// The type that most of the weights with such a name have.
    fn main_type(&self, of: impl Fn(&str) -> bool) -> Option<BlockType> {
        let mut counts = HashMap::new();
        for (_, tensor) in self.tensors.iter().filter(|(name, _)| of(name)) {
            *counts.entry(tensor.stored.kind).or_insert(0) += tensor.stored.shape.iter().product::<usize>();
        }
        counts.into_iter().max_by_key(|(kind, weights)| (*weights, kind.centibits())).map(|(kind, _)| kind)
    }

    /// A tensor or one expert's part of a stored one: where in the latter it begins, and its shape.
    fn locate(&self, name: &str) -> Result<(&Tensor, usize, &[usize])> {
        if let Some(tensor) = self.tensors.get(name) {
            return Ok((tensor, 0, &tensor.shape));
        }
        let of_expert = || {
            let (layer, rest) = name.split_once(".experts.")?;
            let (expert, part) = rest.strip_suffix(".weight")?.split_once('.')?;
            let tensor = self.tensors.get(&format!("{layer}.experts.{part}"))?;
            let (count, own) = tensor.shape.split_first()?;
            let expert = expert.parse::<usize>().ok().filter(|expert| expert < count && own.len() == 2)?;
            Some((tensor, expert * own.iter().product::<usize>(), own))
        };
        of_expert().ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// Bytes of whole rows in the order of the new name, window by window: what they are, and how many weights come
    /// before.
    async fn rows(&self, tensor: &Tensor, first: usize, count: usize, mut take: impl FnMut(&[u8])) -> Result<()> {
        let (cols, bytes) = (tensor.stored.cols(), tensor.stored.row_bytes());
        let ends = first.checked_add(count).filter(|end| *end <= tensor.stored.rows() * cols);
        if ends.is_none() || !first.is_multiple_of(cols) || !count.is_multiple_of(cols) {
            let name = tensor.stored.name.escape_default();
            let reason = format!("{count} weights from the {first}th on of tensor `{name}` are no rows of {cols}");
            return Err(self.metadata.bad(reason));
        }
        let (mut row, end) = (first / cols, (first + count) / cols);
        let most = (WINDOW / bytes).max(1);
        while row < end {
            let from = tensor.change.source_row(row);
            let mut run = 1;
            while run < most && row + run < end && tensor.change.source_row(row + run) == from + run {
                run += 1;
            }
            let offset = tensor.stored.offset + from as u64 * bytes as u64;
            take(&self.flash.read(&self.files[tensor.file].0, offset, run * bytes).await?.into_vec());
            row += run;
        }
        Ok(())
    }

    async fn decoded(&self, name: &str, first: usize, count: usize) -> Result<Vec<f32>> {
        let (tensor, start, _) = self.locate(name)?;
        let cols = tensor.stored.cols();
        let mut values = Vec::new();
        let mut row = vec![0.0; cols];
        self.rows(tensor, start.saturating_add(first), count, |bytes| {
            if values.is_empty() {
                values.reserve_exact(count);
            }
            for bytes in bytes.chunks_exact(tensor.stored.row_bytes()) {
                tensor.stored.kind.decode(bytes, &mut row);
                values.extend((0..cols).map(|col| tensor.change.value(row[tensor.change.source_col(col)])));
            }
        })
        .await?;
        Ok(values)
    }

    /// A matrix in its device layout, made some rows at a time.
    async fn stored(&self, name: &str, first: usize, layout: Layout) -> Result<Vec<u8>> {
        let (tensor, start, _) = self.locate(name)?;
        let exact = layout.dtype == DType::Q8 && tensor.exact() == DType::Q8 && layout.cols == tensor.stored.cols();
        let most = (WINDOW / layout.cols.max(1) / size_of::<f32>()).max(1);
        let mut out = vec![0; layout.bytes()];
        for row in (0..layout.rows).step_by(most) {
            let part = Layout { rows: most.min(layout.rows - row), ..layout };
            let (from, count) = (first + row * layout.cols, part.rows * layout.cols);
            let bytes = if exact {
                q8_of_q8_0(&part, name, row, &self.blocks(tensor, start.saturating_add(from), count).await?)?
            } else {
                encode_rows(&part, name, row, &self.decoded(name, from, count).await?)?
            };
            layout.put_rows(&mut out, row, &part, &bytes);
        }
        Ok(out)
    }

    /// The blocks of whole rows of a tensor that [keeps groups](Change::keeps_groups), in the order of the new name.
    async fn blocks(&self, tensor: &Tensor, first: usize, count: usize) -> Result<Vec<u8>> {
        let size = BlockType::Q8_0.block_bytes();
        let mut blocks = Vec::new();
        self.rows(tensor, first, count, |bytes| {
            for row in bytes.chunks_exact(tensor.stored.row_bytes()) {
                let groups = 0..tensor.stored.cols() / GROUP;
                let sources = groups.map(|group| tensor.change.source_col(group * GROUP) / GROUP * size);
                sources.for_each(|at| blocks.extend_from_slice(&row[at..at + size]));
            }
        })
        .await?;
        Ok(blocks)
    }
}

impl Weights for Gguf {
    fn name(&self) -> String {
        match self.metadata.text("general.name") {
            Ok(Some(name)) if !name.is_empty() => name.to_owned(),
            _ => {
                let file = self.files[0].0.trim_end_matches(".gguf");
                split_name(&self.files[0].0).map_or(file, |(stem, ..)| stem).to_owned()
            }
        }
    }

    fn licence(&self) -> Option<String> {
        self.metadata.text("general.license").ok().flatten().map(str::to_owned)
    }

    fn config(&self) -> &Value {
        &self.config
    }

    fn files(&self) -> Vec<(String, u64)> {
        self.files.clone()
    }

    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move { Ok(self.flash.read(file, offset, len).await?.into_vec()) })
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn find(&self, name: &str) -> Option<Described> {
        let (tensor, _, shape) = self.locate(name).ok()?;
        let parts = if shape.len() < tensor.shape.len() { tensor.shape[0] as u64 } else { 1 };
        Some(Described { shape: shape.to_vec(), exact: tensor.exact(), bytes: tensor.stored.bytes / parts })
    }

    fn values<'a>(&'a self, name: &'a str, first: usize, count: usize) -> LocalBoxFuture<'a, Result<Vec<f32>>> {
        Box::pin(self.decoded(name, first, count))
    }

    fn matrix<'a>(&'a self, name: &'a str, first: usize, layout: Layout) -> LocalBoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(self.stored(name, first, layout))
    }

    fn carried(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        let vocab = self.config["vocab_size"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        tokenizer::files(&self.metadata, vocab)
    }
}

/// `STEM`, the number and the count of `STEM-00001-of-00003.gguf`.
fn split_name(file: &str) -> Option<(&str, u64, u64)> {
    let number = |digits: &str| match digits.bytes().all(|b| b.is_ascii_digit()) && digits.len() == 5 {
        true => digits.parse().ok(),
        false => None,
    };
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    Some((stem, number(part)?, number(count)?))
}

/// The names of all files of a model, in order.
fn parts(metadata: &Metadata, file: &str) -> Result<Vec<String>> {
    let count = metadata.unsigned("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![file.to_owned()]);
    }
    let number = metadata.unsigned("split.no")?.unwrap_or(0);
    let Some((stem, 1, named)) = split_name(file).filter(|_| number == 0) else {
        let reason = format!("it is part {} of {count}; open the first one, whose name", number.saturating_add(1));
        return Err(metadata.bad(format!("{reason} ends in -00001-of-{count:05}.gguf")));
    };
    if named != count || count > MAX_PARTS {
        return Err(metadata.bad(format!("it says that it has {count} parts, and its name {named}")));
    }
    Ok((1..=count).map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf")).collect())
}

fn check_part(metadata: &Metadata, number: u64, count: u64) -> Result<()> {
    let found = (metadata.unsigned("split.no")?, metadata.unsigned("split.count")?);
    if found != (Some(number), Some(count)) {
        let (n, c) = (found.0.unwrap_or(0).saturating_add(1), found.1.unwrap_or(1));
        return Err(metadata.bad(format!("it says that it is part {n} of {c}, and its name {} of {count}", number + 1)));
    }
    Ok(())
}
