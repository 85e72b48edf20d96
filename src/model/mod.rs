//! What a model is: its configuration, its forward pass as a [`plan`], its tokenizer.
//!
//! An architecture is one file that turns a checkpoint's `config.json` into a [`Plan`]; [`plan_for`] picks the file.

mod decoder;
mod deepseek_v2;
mod delta_net;
mod gpt_oss;
mod granitemoe;
mod lfm2_moe;
mod llama;
mod olmoe;
pub mod plan;
mod qwen3;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod rope;
pub mod tokenizer;

use std::ops::Range;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::tensor::Layout;
use plan::{Builder, ExpertShape, Map, Plan, RowsOf, Weight};

/// Reads the configuration of one architecture into a forward plan.
type PlanFn = fn(&Value, &dyn Tensors) -> Result<Plan>;

struct Architecture {
    /// The `model_type` of its text configuration.
    name: &'static str,
    plan: PlanFn,
    experts: ExpertTensors,
}

/// Every supported architecture.
const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "qwen3_5_moe_text", plan: qwen3_5_moe::plan, experts: ExpertTensors::USUAL },
    Architecture { name: "llama", plan: llama::plan, experts: ExpertTensors::USUAL },
    Architecture { name: "qwen3", plan: qwen3::plan, experts: ExpertTensors::USUAL },
    Architecture { name: "qwen3_moe", plan: qwen3_moe::plan, experts: ExpertTensors::USUAL },
    Architecture { name: "qwen3_next", plan: qwen3_next::plan, experts: ExpertTensors::USUAL },
    Architecture { name: "olmoe", plan: olmoe::plan, experts: ExpertTensors::USUAL },
    Architecture { name: "granitemoe", plan: granitemoe::plan, experts: ExpertTensors::GRANITE },
    Architecture { name: "gpt_oss", plan: gpt_oss::plan, experts: ExpertTensors::GPT_OSS },
    Architecture { name: "lfm2_moe", plan: lfm2_moe::plan, experts: ExpertTensors::LFM2 },
    Architecture { name: "deepseek_v2", plan: deepseek_v2::plan, experts: ExpertTensors::USUAL },
];

/// Where checkpoints keep a layer's routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTensors {
    /// The part of a layer that they are.
    block: &'static str,
    /// Names of an expert's gate, up and down, where each has a tensor of its own; none where checkpoints never have them.
    each: Option<[&'static str; 3]>,
    /// Names of all experts' gates and ups, and of all their downs, where they are one tensor of three dimensions.
    fused: [&'static str; 2],
    /// Fused matrices are `[experts, in, out]` instead of `[experts, out, in]`, gates and ups by turns, and biases stand
    /// beside them as `NAME_bias`.
    by_turns: bool,
}

impl ExpertTensors {
    const USUAL: ExpertTensors = ExpertTensors {
        block: "mlp.experts",
        each: Some(["gate_proj.weight", "up_proj.weight", "down_proj.weight"]),
        fused: ["gate_up_proj", "down_proj"],
        by_turns: false,
    };
    const GRANITE: ExpertTensors = ExpertTensors {
        block: "block_sparse_moe",
        each: None,
        fused: ["input_linear.weight", "output_linear.weight"],
        by_turns: false,
    };
    const GPT_OSS: ExpertTensors = ExpertTensors { each: None, by_turns: true, ..ExpertTensors::USUAL };
    const LFM2: ExpertTensors = ExpertTensors {
        block: "feed_forward.experts",
        each: Some(["w1.weight", "w3.weight", "w2.weight"]),
        ..ExpertTensors::USUAL
    };

    /// What the names of a layer's experts begin with.
    pub fn prefix(&self, layer: usize) -> String {
        format!("model.layers.{layer}.{}.", self.block)
    }

    /// Whether a tensor belongs to routed experts.
    pub fn owns(&self, tensor: &str) -> bool {
        let mut parts = tensor.strip_prefix("model.layers.").into_iter().flat_map(|rest| rest.split_once('.'));
        let owns = |rest: &str| match self.each {
            Some(_) => rest.starts_with('.'),
            None => self.fused.iter().any(|name| rest.strip_prefix('.').is_some_and(|rest| rest.starts_with(name))),
        };
        parts.any(|(_, rest)| rest.strip_prefix(self.block).is_some_and(owns))
    }

    /// An expert's gate, up and down, each a tensor of its own.
    pub fn each(&self, layer: usize, expert: usize) -> Option<[String; 3]> {
        Some(self.each?.map(|name| format!("{}{expert}.{name}", self.prefix(layer))))
    }

    /// What to call an expert's gate, up and down where one of them is at fault.
    pub fn names(&self, layer: usize, expert: usize) -> [String; 3] {
        let of_fused =
            || ["gate", "up", "down"].map(|part| format!("{part} of expert {expert} in {}", self.prefix(layer)));
        self.each(layer, expert).unwrap_or_else(of_fused)
    }

    /// Whether fused matrices are stored by turns: `[experts, hidden, 2 · width]`, gates in even columns and ups in odd ones,
    /// and `[experts, width, hidden]`, with biases.
    pub fn by_turns(&self) -> bool {
        self.by_turns
    }

    /// Gate and up of all experts of a layer, `[experts, 2 · width, hidden]`, and down, `[experts, hidden, width]`, unless
    /// they are [by turns](Self::by_turns).
    pub fn fused(&self, layer: usize) -> [String; 2] {
        self.fused.map(|name| format!("{}{name}", self.prefix(layer)))
    }
}

/// Where checkpoints with this configuration keep their experts.
pub fn expert_tensors(config: &Value) -> Result<ExpertTensors> {
    Ok(find(config)?.experts)
}

/// How a core tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    Matrix(Layout),
    /// That many f32.
    Vector(usize),
}

/// The tensors a model has, without their values.
pub trait Tensors {
    /// A tensor that stays resident.
    fn core(&self, name: &str) -> Result<Stored>;

    /// Type of the routed experts' matrices, if the model has any.
    fn expert_dtype(&self) -> Option<crate::tensor::DType>;

    /// The matrix [`map_name`], if there is one and it is to be used.
    fn map(&self, _layer: usize, _distance: usize) -> Option<Stored> {
        None
    }
}

/// Layers ahead that there are maps for at most.
pub const MAX_DISTANCE: usize = 4;

/// Name of the core tensor that foretells what `layer` chooses from what the router `distance` layers before it sees: a
/// matrix like the layer's router, see [`Layer::fitted`](plan::Layer::fitted).
pub fn map_name(layer: usize, distance: usize) -> String {
    format!("{MAPS}{layer}.{distance}.weight")
}

/// What the names of maps begin with, and of no tensor that a model computes with.
pub const MAPS: &str = "outrider.foresee.";

/// The part of a `config.json` that describes the language model: `text_config` in multimodal checkpoints.
pub fn text_config(config: &Value) -> &Value {
    config.get("text_config").unwrap_or(config)
}

fn find(config: &Value) -> Result<&'static Architecture> {
    let name = text_config(config).get("model_type").and_then(Value::as_str).unwrap_or_default();
    ARCHITECTURES.iter().find(|known| known.name == name).ok_or_else(|| {
        let supported: Vec<&str> = ARCHITECTURES.iter().map(|known| known.name).collect();
        Error::UnknownArchitecture { name: name.to_owned(), supported: supported.join(", ") }
    })
}

/// The `model_type` of a configuration, if this build supports it.
pub fn architecture(config: &Value) -> Result<&'static str> {
    Ok(find(config)?.name)
}

/// The forward plan of a model.
pub fn plan_for(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    (find(config)?.plan)(text_config(config), tensors)
}

/// Positions the model was made for, `max_position_embeddings`.
pub fn max_context(config: &Value) -> usize {
    let max = text_config(config).get("max_position_embeddings").and_then(Value::as_u64);
    max.map_or(2048, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

fn bad_config(reason: impl std::fmt::Display) -> Error {
    Error::format("config.json", reason)
}

/// Sizes from untrusted configurations stay below this, so that products of a few of them cannot overflow.
const MAX_DIM: usize = 1 << 20;

fn check_dims(dims: &[(&str, usize)]) -> Result<()> {
    match dims.iter().find(|(_, n)| *n == 0 || *n > MAX_DIM) {
        Some((name, n)) => Err(bad_config(format!("`{name}` is {n}, expected 1 to {MAX_DIM}"))),
        None => Ok(()),
    }
}

/// A [`Builder`] that looks weights up and checks their shapes.
struct Shaped<'a> {
    tensors: &'a dyn Tensors,
    parts: Builder,
}

impl Shaped<'_> {
    fn matrix(&mut self, name: impl Into<String>, rows: usize, cols: usize) -> Result<Weight> {
        let name = name.into();
        match self.tensors.core(&name)? {
            Stored::Matrix(layout) if (layout.rows, layout.cols) == (rows, cols) => Ok(self.parts.matrix(name, layout)),
            found => Err(wrong_shape(&name, &format!("a {rows} × {cols} matrix"), found)),
        }
    }

    /// A matrix of some rows of a tensor, which has `whole`. What they are is asked once the tensor is known to be so large.
    fn matrix_of(
        &mut self,
        name: impl Into<String>,
        whole: usize,
        cols: usize,
        ranges: impl FnOnce() -> Vec<Range<usize>>,
    ) -> Result<Weight> {
        let name = name.into();
        match self.tensors.core(&name)? {
            Stored::Matrix(layout) if (layout.rows, layout.cols) == (whole, cols) => {
                let ranges = ranges();
                let layout = Layout { rows: ranges.iter().map(Range::len).sum(), ..layout };
                Ok(self.parts.matrix_of(name, layout, RowsOf { whole, ranges }))
            }
            found => Err(wrong_shape(&name, &format!("a {whole} × {cols} matrix"), found)),
        }
    }

    fn vector(&mut self, name: impl Into<String>, len: usize, map: Map) -> Result<Weight> {
        let name = name.into();
        match self.tensors.core(&name)? {
            Stored::Vector(n) if n == len => Ok(self.parts.vector(name, len, map)),
            found => Err(wrong_shape(&name, &format!("a vector of {len}"), found)),
        }
    }

    /// The maps of a layer, by distance − 1.
    fn maps(&mut self, layer: usize, experts: usize, hidden: usize) -> Result<Vec<Option<Weight>>> {
        let mut maps = Vec::new();
        for distance in 1..=MAX_DISTANCE.min(layer + 1) {
            let name = map_name(layer, distance);
            maps.push(match self.tensors.map(layer, distance) {
                Some(Stored::Matrix(l)) if (l.rows, l.cols) == (experts, hidden) => Some(self.parts.matrix(name, l)),
                Some(found) => return Err(wrong_shape(&name, &format!("a {experts} × {hidden} matrix"), found)),
                None => None,
            });
        }
        maps.truncate(maps.iter().rposition(Option::is_some).map_or(0, |last| last + 1));
        Ok(maps)
    }

    fn experts(&self, hidden: usize, width: usize, bias: bool) -> Result<ExpertShape> {
        let dtype = self.tensors.expert_dtype().ok_or_else(|| bad_config("the model has no experts"))?;
        Ok(ExpertShape::new(dtype, hidden, width, bias))
    }
}

fn wrong_shape(name: &str, expected: &str, found: Stored) -> Error {
    let found = match found {
        Stored::Matrix(l) => format!("a {} × {} matrix", l.rows, l.cols),
        Stored::Vector(n) => format!("a vector of {n}"),
    };
    Error::format("model", format!("tensor `{name}` is {found} where the configuration needs {expected}"))
}
