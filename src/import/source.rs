//! Which of a checkpoint's tensors go where in a pack, and as what.

use super::weights::{Described, Weights};
use crate::error::{Error, Result};
use crate::model::plan::Plan;
use crate::model::{ExpertTensors, Stored, Tensors, expert_tensors, text_config};
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
const DELICATE: [&str; 8] = [
    ".mlp.gate.weight",
    ".mlp.router.weight",
    ".router.layer.weight",
    ".feed_forward.gate.weight",
    ".mlp.shared_expert_gate.weight",
    ".linear_attn.in_proj_a.weight",
    ".linear_attn.in_proj_b.weight",
    ".linear_attn.in_proj_ba.weight",
];

/// A checkpoint seen as the tensors of a pack.
pub struct Source<'a> {
    pub(super) checkpoint: &'a dyn Weights,
    precision: Precision,
    tied: bool,
    pub(super) experts: ExpertTensors,
}

impl<'a> Source<'a> {
    /// # Errors
    /// [`Error::UnknownArchitecture`].
    pub fn new(checkpoint: &'a dyn Weights, precision: Precision) -> Result<Source<'a>> {
        let config = checkpoint.config();
        let said = [config, text_config(config)].map(|c| c["tie_word_embeddings"].as_bool());
        // What a configuration leaves out differs by architecture; a checkpoint without a head has no other.
        let tied = said.contains(&Some(true)) || said == [None; 2] && checkpoint.find(HEAD).is_none();
        Ok(Source { checkpoint, precision, tied, experts: expert_tensors(config)? })
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

    pub(super) fn tensors(&self, of: impl Fn(&str) -> bool) -> impl Iterator<Item = Described> {
        let names = self.checkpoint.names().into_iter();
        names.filter(move |name| of(name)).filter_map(|name| self.checkpoint.find(name))
    }
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
                let mut types = self.tensors(|name| self.experts.owns(name)).map(|t| t.exact);
                let first = types.next().unwrap_or(DType::F16);
                if types.all(|t| t == first) { first } else { DType::F32 }
            }
        })
    }
}
