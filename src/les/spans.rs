//! What happened when: the parts that the time of a pass went to.
//!
//! A backend that works while it is called shows its computation as it is. One that works by itself, as a GPU does, shows
//! the host's side of it: `run`, `finish` and `upload` are then the handing over, and what the device computes lies in the
//! wait for the next result.

use serde::{Deserialize, Serialize};

use super::{Origin, Shape};

/// When a pass began and ended, logits included, and its spans by their ends. All in seconds since the recording began.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    pub begin: f64,
    pub end: f64,
    pub spans: Vec<Span>,
}

/// Seconds since the recording began. A read may have begun before its pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    #[serde(flatten)]
    pub what: What,
    pub begin: f64,
    pub end: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// A layer up to its router.
    Mix {
        layer: u32,
    },
    /// Later layers' routers on an earlier state, and what the forecast makes of them.
    Foresee {
        origin: Origin,
    },
    /// So many pairs of a row and an expert.
    Run {
        layer: u32,
        pairs: u32,
    },
    /// The shared expert and the combine.
    Finish {
        layer: u32,
    },
    /// An expert's bytes into a slot.
    Upload {
        layer: u32,
        expert: u32,
    },
    /// From asking for an expert until the host has taken it up.
    Read {
        layer: u32,
        expert: u32,
        demand: bool,
        outcome: Outcome,
    },
    /// The host had nothing to do until something came.
    Stall {
        layer: u32,
        of: Awaited,
    },
    Logits,
}

/// What became of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Arrived,
    Failed,
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Awaited {
    Bytes,
    /// A device's routing, with what it computes until then.
    Results,
}

impl Span {
    pub fn seconds(&self) -> f64 {
        self.end - self.begin
    }
}

impl Timing {
    pub fn seconds(&self) -> f64 {
        self.end - self.begin
    }

    /// Why it cannot be of such a model, if it cannot.
    pub(super) fn nonsense(&self, shape: Shape) -> Option<String> {
        let times = |begin: f64, end: f64| (begin >= 0.0 && end >= begin && end.is_finite()).then_some(());
        if times(self.begin, self.end).is_none() {
            return Some(format!("a pass cannot last from {} to {}", self.begin, self.end));
        }
        self.spans.iter().find_map(|span| {
            let (layer, expert) = match span.what {
                What::Mix { layer } | What::Run { layer, .. } | What::Finish { layer } | What::Stall { layer, .. } => {
                    (layer, 0)
                }
                What::Upload { layer, expert } | What::Read { layer, expert, .. } => (layer, expert),
                What::Foresee { origin: Origin::Layer(layer) } => (layer, 0),
                What::Foresee { origin: Origin::Embedding } | What::Logits => (0, 0),
            };
            if times(span.begin, span.end).is_none() {
                return Some(format!("a span cannot last from {} to {}", span.begin, span.end));
            }
            let is_there = (layer as usize) < shape.layers && (expert as usize) < shape.experts;
            (!is_there).then(|| format!("there is no expert {expert} in a layer {layer}"))
        })
    }
}
