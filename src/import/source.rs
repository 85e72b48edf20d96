//! Which of a checkpoint's tensors go where in a pack, and as what.

use serde_json::Value;

use super::weights::{Described, Weights};
use crate::error::{Error, Result};
use crate::model::plan::{ExpertShape, Plan};
use crate::model::{Stored, Tensors, text_config};
use crate::tensor::{DType, Layout};

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const HEAD: &str = "lm_head.weight";

/// The types a pack stores weights in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// The smallest type that holds every weight exactly: f16 and GGUF's Q8_0 stay what they are, all else becomes f32.
    Lossless,
    Given {
        experts: DType,
        core: DType,
    },
}

impl Precision {
    /// `experts` as given, and for the core a type that costs no quality beside it.
    pub fn with_experts(experts: DType) -> Precision {
        let core = match experts {
            DType::Q4 | DType::Q8 => DType::Q8,
            float => float,
        };
        Precision::Given { experts, core }
    }
}

/// Small matrices that decide much: which experts run, how fast a state decays. They are stored one step finer than the
/// rest of the core.
const DELICATE: [&str; 4] = [
    ".mlp.gate.weight",
    ".mlp.shared_expert_gate.weight",
    ".linear_attn.in_proj_a.weight",
    ".linear_attn.in_proj_b.weight",
];

/// A checkpoint seen as the tensors of a pack.
pub struct Source<'a> {
    checkpoint: &'a dyn Weights,
    precision: Precision,
    tied: bool,
}

/// A matrix within a checkpoint's tensor.
struct Part {
    tensor: String,
    first: usize,
}

impl<'a> Source<'a> {
    pub fn new(checkpoint: &'a dyn Weights, precision: Precision) -> Source<'a> {
        let config = checkpoint.config();
        let tied = [config, text_config(config)].iter().any(|c| c["tie_word_embeddings"] == Value::Bool(true));
        Source { checkpoint, precision, tied }
    }

    /// The checkpoint's name of a core tensor: a tied head is the embedding.
    pub fn name_of<'n>(&self, core: &'n str) -> &'n str {
        if core == HEAD && self.tied { EMBEDDING } else { core }
    }

    /// The type of a matrix that is no expert's.
    pub fn core_dtype(&self, name: &str) -> Result<DType> {
        Ok(match self.precision {
            Precision::Lossless => self.checkpoint.tensor(self.name_of(name))?.exact,
            Precision::Given { core: DType::F32, .. } => DType::F32,
            Precision::Given { core, .. } if DELICATE.iter().any(|end| name.ends_with(end)) => match core {
                DType::Q4 => DType::Q8,
                _ => DType::F16,
            },
            Precision::Given { core, .. } => core,
        })
    }

    /// What the pack's manifest names as the core type.
    pub fn main_dtype(&self) -> Result<DType> {
        self.core_dtype(EMBEDDING)
    }

    /// The layout of the token embedding.
    pub fn embedding(&self, plan: &Plan) -> Result<Layout> {
        let shape = &self.checkpoint.tensor(EMBEDDING)?.shape;
        if *shape != [plan.vocab, plan.hidden] {
            let expected = [plan.vocab, plan.hidden];
            let reason = format!("`{EMBEDDING}` has shape {shape:?} where the configuration needs {expected:?}");
            return Err(Error::format("checkpoint", reason));
        }
        Ok(Layout::new(self.core_dtype(EMBEDDING)?, plan.vocab, plan.hidden))
    }

    /// A layer's expert as it lies in its extent: gate, up and down.
    pub async fn expert(&self, shape: &ExpertShape, layer: usize, expert: usize) -> Result<Vec<u8>> {
        let parts = self.expert_parts(shape, layer, expert)?;
        let mut extent = Vec::with_capacity(shape.bytes());
        for ((part, layout), own) in
            parts.iter().zip([shape.gate, shape.up, shape.down]).zip(expert_names(layer, expert))
        {
            let matrix = self.checkpoint.matrix(&part.tensor, part.first, layout).await;
            // What is wrong with a tensor of all experts is wrong with one of them.
            extent.extend(matrix.map_err(|error| match error {
                Error::Encode { dtype, reason, .. } => Error::Encode { name: own, dtype, reason },
                other => other,
            })?);
        }
        Ok(extent)
    }

    /// Bytes of a layer's experts in the checkpoint.
    pub fn expert_bytes(&self, layer: usize) -> u64 {
        let prefix = format!("model.layers.{layer}.mlp.experts.");
        self.tensors(|name| name.starts_with(&prefix)).map(|t| t.bytes).sum()
    }

    fn tensors(&self, of: impl Fn(&str) -> bool) -> impl Iterator<Item = Described> {
        let names = self.checkpoint.names().into_iter();
        names.filter(move |name| of(name)).filter_map(|name| self.checkpoint.find(name))
    }

    fn expert_parts(&self, shape: &ExpertShape, layer: usize, expert: usize) -> Result<[Part; 3]> {
        let names = expert_names(layer, expert);
        let gate_up = format!("model.layers.{layer}.mlp.experts.gate_up_proj");
        let down = format!("model.layers.{layer}.mlp.experts.down_proj");
        // What one expert has of each tensor, and how far into it each matrix begins.
        let (width, hidden) = (shape.gate.rows, shape.gate.cols);
        let (tensors, own, starts) = if self.checkpoint.find(&gate_up).is_some() {
            let own = [[2 * width, hidden], [2 * width, hidden], [hidden, width]];
            ([gate_up.clone(), gate_up, down], own, [0, width * hidden, 0])
        } else {
            (names, [[width, hidden], [width, hidden], [hidden, width]], [0; 3])
        };
        let mut parts = Vec::with_capacity(3);
        for ((tensor, own), start) in tensors.into_iter().zip(own).zip(starts) {
            let shape = &self.checkpoint.tensor(&tensor)?.shape;
            let fused = shape.len() == 3;
            if shape[usize::from(fused)..] != own || (fused && shape[0] <= expert) {
                let reason = format!("`{tensor}` has shape {shape:?}, expert {expert} needs {own:?} of it");
                return Err(Error::format("checkpoint", reason));
            }
            let skipped = if fused { expert * own[0] * own[1] } else { 0 };
            parts.push(Part { tensor, first: skipped + start });
        }
        Ok(parts.try_into().unwrap_or_else(|_| unreachable!("three matrices make an expert")))
    }
}

/// The names that an expert's gate, up and down have in a checkpoint that stores each by itself.
pub fn expert_names(layer: usize, expert: usize) -> [String; 3] {
    ["gate", "up", "down"].map(|part| format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"))
}

impl Tensors for Source<'_> {
    /// Matrices keep their two dimensions; everything else, such as norms and the taps of convolutions, is a vector.
    fn core(&self, name: &str) -> Result<Stored> {
        let tensor = self.checkpoint.tensor(self.name_of(name))?;
        Ok(match tensor.shape[..] {
            [rows, cols] => Stored::Matrix(Layout::new(self.core_dtype(name)?, rows, cols)),
            _ => Stored::Vector(tensor.len()),
        })
    }

    fn expert_dtype(&self) -> Option<DType> {
        Some(match self.precision {
            Precision::Given { experts, .. } => experts,
            Precision::Lossless => {
                // Extents are of one type: the one that holds them all.
                let mut types = self.tensors(|name| name.contains(".mlp.experts.")).map(|t| t.exact);
                let first = types.next().unwrap_or(DType::F16);
                if types.all(|t| t == first) { first } else { DType::F32 }
            }
        })
    }
}
