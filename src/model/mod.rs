//! What a model is: its configuration, its forward pass as a [`plan`], its tokenizer.
//!
//! An architecture is one file that turns a checkpoint's `config.json` into a [`Plan`]; [`plan_for`] picks the file.

pub mod plan;
mod qwen3_5_moe;
pub mod tokenizer;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::tensor::Layout;
use plan::{Builder, ExpertShape, Map, Plan, Weight};

/// Reads the configuration of one architecture into a forward plan.
type PlanFn = fn(&Value, &dyn Tensors) -> Result<Plan>;

/// Every supported architecture, by the `model_type` of its text configuration.
const ARCHITECTURES: [(&str, PlanFn); 1] = [("qwen3_5_moe_text", qwen3_5_moe::plan)];

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

/// The `model_type` of a configuration, if this build supports it.
pub fn architecture(config: &Value) -> Result<&'static str> {
    let name = text_config(config).get("model_type").and_then(Value::as_str).unwrap_or_default();
    ARCHITECTURES.iter().find(|(known, _)| *known == name).map(|(known, _)| *known).ok_or_else(|| {
        let supported = ARCHITECTURES.map(|(known, _)| known).join(", ");
        Error::UnknownArchitecture { name: name.to_owned(), supported }
    })
}

/// The forward plan of a model.
pub fn plan_for(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let name = architecture(config)?;
    let (_, plan) =
        ARCHITECTURES.iter().find(|(known, _)| *known == name).expect("`architecture` returns a known name");
    plan(text_config(config), tensors)
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

    fn experts(&self, hidden: usize, width: usize) -> Result<ExpertShape> {
        let dtype = self.tensors.expert_dtype().ok_or_else(|| bad_config("the model has no experts"))?;
        Ok(ExpertShape::new(dtype, hidden, width))
    }
}

fn wrong_shape(name: &str, expected: &str, found: Stored) -> Error {
    let found = match found {
        Stored::Matrix(l) => format!("a {} × {} matrix", l.rows, l.cols),
        Stored::Vector(n) => format!("a vector of {n}"),
    };
    Error::format("model", format!("tensor `{name}` is {found} where the configuration needs {expected}"))
}
