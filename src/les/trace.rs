//! What passes went through, recorded so that they can be looked at and replayed.

use serde::{Deserialize, Serialize};

use super::{Origin, Shape};

/// A recording. Written as one JSON object a line: the header, then a pass each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    pub shape: Shape,
    /// Bytes of one expert.
    pub expert_bytes: usize,
    pub passes: Vec<Pass>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Tokens it took.
    pub rows: usize,
    /// By layer, `ids[row · top_k + rank]`.
    pub ids: Vec<Vec<u32>>,
    pub foreseen: Vec<Foreseen>,
}

/// Scores of a layer's experts from an earlier state, `[rows, experts]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Foreseen {
    pub origin: Origin,
    pub layer: u32,
    pub scores: Vec<f32>,
}

impl Trace {
    pub fn new(shape: Shape, expert_bytes: usize) -> Trace {
        Trace { shape, expert_bytes, passes: Vec::new() }
    }

    /// Tokens of all passes.
    pub fn tokens(&self) -> usize {
        self.passes.iter().map(|pass| pass.rows).sum()
    }
}
