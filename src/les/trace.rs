//! What passes went through, recorded so that they can be looked at and replayed.

use serde::{Deserialize, Serialize};

use super::{Origin, Shape};
use crate::{Error, Result};

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

    /// Reads a recording.
    ///
    /// # Errors
    /// [`Error::Format`] where a line is not what it should be.
    pub fn parse(text: &str) -> Result<Trace> {
        let bad = |line: usize, reason: String| Error::format("trace", format!("line {}: {reason}", line + 1));
        let mut lines = text.lines().enumerate();
        let (_, header) = lines.next().ok_or_else(|| bad(0, "there is none".to_owned()))?;
        let Header { shape, expert_bytes } = serde_json::from_str(header).map_err(|e| bad(0, e.to_string()))?;
        if shape.layers == 0 || shape.top_k == 0 || shape.top_k > shape.experts || expert_bytes == 0 {
            return Err(bad(0, "the shape is of no model".to_owned()));
        }
        let mut trace = Trace::new(shape, expert_bytes);
        for (at, line) in lines {
            let pass: Pass = serde_json::from_str(line).map_err(|e| bad(at, e.to_string()))?;
            let routed = |ids: &Vec<u32>| {
                ids.len() == pass.rows * shape.top_k && ids.iter().all(|id| (*id as usize) < shape.experts)
            };
            let foreseen = |guess: &Foreseen| {
                (guess.layer as usize) < shape.layers && guess.scores.len() == pass.rows * shape.experts
            };
            if pass.ids.len() != shape.layers || !pass.ids.iter().all(routed) || !pass.foreseen.iter().all(foreseen) {
                return Err(bad(at, "the pass does not fit the shape".to_owned()));
            }
            trace.passes.push(pass);
        }
        Ok(trace)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    shape: Shape,
    expert_bytes: usize,
}
