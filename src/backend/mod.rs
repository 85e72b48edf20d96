//! Compute. A backend allocates what a [`Plan`] names and executes its operations; it never decides what to load.
//!
//! A pass over `m` tokens is: [`begin`](Backend::begin); for every layer [`mix`](Backend::mix), which yields the
//! router's choice, then any number of [`write_slot`](Backend::write_slot) and [`run_experts`](Backend::run_experts)
//! until every (row, rank) has run once, then [`finish_layer`](Backend::finish_layer); at the end
//! [`logits`](Backend::logits) for the rows that need them.
//!
//! Each output is computed in one canonical order that does not depend on `m`, on the slots or on the order of the
//! calls to `run_experts`, so results are bit-identical under every schedule.

pub mod cpu;
pub mod gpu;

use std::ops::Range;

use futures_util::future::LocalBoxFuture;

use crate::error::Result;
use crate::flash::Bytes;
use crate::model::plan::{Limits, Plan, Weight};

/// The router's choice for the rows of a chunk: `ids[row · top_k + rank]`, by descending logit, which is by
/// descending weight, ties to the lower id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routing {
    pub top_k: usize,
    pub ids: Vec<u32>,
    pub weights: Vec<f32>,
}

/// One expert applied to one row: output goes to place (`row`, `rank`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkItem {
    pub row: u32,
    pub rank: u32,
    pub slot: u32,
}

/// An expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub layer: usize,
    pub expert: usize,
}

/// What came of layers that were submitted together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ahead {
    /// What the layers chose that were reached, `[m · top_k]` as in [`Routing`]; nothing where there is no router.
    pub ids: Vec<Vec<u32>>,
    /// The last of them lacked an expert, and none of its experts has run. All others are finished.
    pub stopped: bool,
    /// Scores for the layers after the last one, as from [`Backend::foresee`].
    pub foreseen: Vec<Vec<f32>>,
    /// Logits of the rows asked for, if the last layer of the plan is finished.
    pub logits: Option<Vec<f32>>,
}

/// (row, rank) pairs of a pass that runs ahead, at most: each look-up compares each with each, and wide passes have little
/// to gain.
pub const PAIRS_AHEAD: usize = 256;

/// Seconds, of the backend that runs ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AheadCosts {
    /// From submitting until the host knows what came of it, beside the computation.
    pub round_trip: f64,
    /// A layer that was submitted and not reached.
    pub skipped: f64,
}

/// A backend that knows itself which experts have slots, so that layers can be submitted before their routing is known.
///
/// A layer that chooses an expert without a slot stops the pass after its router. The host goes on as after
/// [`mix`](Backend::mix).
pub trait RunAhead {
    /// Tokens that a pass may have at most.
    fn most_rows(&self) -> usize;

    /// Runs some layers of a pass that was begun, as far as the experts they choose have slots, with forecasts for up to
    /// `foresee` layers after the last one reached, and logits of `rows` after the last. An empty `rows` asks for none.
    fn run(&mut self, layers: Range<usize>, foresee: usize, rows: Range<usize>) -> LocalBoxFuture<'_, Result<Ahead>>;

    /// Forgets which expert is in which slot.
    fn clear_slots(&mut self) -> Result<()>;

    /// Measures what running ahead costs. Not to be called during a pass.
    fn costs(&mut self) -> LocalBoxFuture<'_, Result<AheadCosts>>;
}

/// What a backend was asked for so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub submissions: u64,
    pub readbacks: u64,
}

/// What a backend is, for people: `cpu (avx2)`, `gpu (llvmpipe …, Vulkan)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    pub kind: &'static str,
    pub detail: String,
}

pub trait Backend {
    fn info(&self) -> Info;

    fn plan(&self) -> &Plan;

    fn limits(&self) -> &Limits;

    /// Stores a weight: a matrix in its device layout, or a vector of f32 with its [`Map`](crate::model::plan::Map)
    /// already applied. Called once for every weight of the plan before the first pass.
    fn write_weight<'a>(&'a mut self, weight: Weight, bytes: &'a [u8]) -> LocalBoxFuture<'a, Result<()>>;

    /// Forgets the sequence: zeroes every state.
    fn reset(&mut self) -> Result<()>;

    /// Copies every state that is not [by position](crate::model::plan::StateSpec::by_position) into a checkpoint,
    /// `slot < limits.checkpoints`.
    fn save(&mut self, slot: usize) -> Result<()>;

    /// Puts back what [`save`](Self::save) copied. Keys and values stay as they are: a pass reads those before its own
    /// position only, and writes its own.
    fn restore(&mut self, slot: usize) -> Result<()>;

    /// Starts a pass over `m = embeddings.len() / hidden` tokens at positions `pos .. pos + m`, `1 ≤ m ≤ limits.chunk`.
    fn begin(&mut self, pos: usize, embeddings: &[f32]) -> Result<()>;

    /// Runs a layer up to its router and reads the choice back. Empty for a layer without routed experts.
    ///
    /// `ahead` names later layers whose [`foresee`](Self::foresee) is to follow, so that a backend whose every answer is a
    /// round trip can bring both back in one.
    fn mix(&mut self, layer: usize, ahead: Range<usize>) -> LocalBoxFuture<'_, Result<Routing>>;

    /// What the routers of the layers `ahead` make of the residual as it is now: by layer `[m, experts]` scores, higher
    /// is likelier to be chosen. After [`begin`](Self::begin) that is the embedding, after [`mix`](Self::mix) what that
    /// layer's own router saw; there `ahead` must be what `mix` was called with. Where a layer has a matrix
    /// [fitted](crate::model::plan::Layer::fitted) to the distance it takes the place of the router.
    fn foresee(&mut self, ahead: Range<usize>) -> LocalBoxFuture<'_, Result<Vec<Vec<f32>>>>;

    /// Whether calls return when their work is done, so that whoever has reads to see to hands out little at a time.
    fn works_while_called(&self) -> bool;

    /// Puts an expert's extent into a pool slot. What `run_experts` was called with before still sees the old content.
    fn write_slot(&mut self, slot: usize, expert: Place, extent: &Bytes) -> Result<()>;

    /// Waits until the backend can take up more. To be called before a pass begins, a slot is written or experts run:
    /// each may submit what was recorded before it, and adds to what waits to be taken up.
    fn settle(&mut self) -> LocalBoxFuture<'_, Result<()>>;

    /// Begins whatever it was asked for and has not begun, before the caller waits for something else. To be called after
    /// [`settle`](Self::settle).
    fn start(&mut self) -> Result<()> {
        Ok(())
    }

    /// Executes some of a layer's (row, rank) pairs. Their order does not matter.
    fn run_experts(&mut self, layer: usize, items: &[WorkItem]) -> Result<()>;

    /// The shared expert and the combine: the residual becomes the layer's output.
    fn finish_layer(&mut self, layer: usize) -> Result<()>;

    /// Logits of some rows of the chunk, `[rows.len(), vocab]`.
    fn logits(&mut self, rows: Range<usize>) -> LocalBoxFuture<'_, Result<Vec<f32>>>;

    /// The residual rows of the chunk, `[m, hidden]`. For diagnosis.
    fn residual(&mut self) -> LocalBoxFuture<'_, Result<Vec<f32>>>;

    /// The head's input after the final norm for some rows, `[rows.len(), hidden]`: valid right after `logits`.
    fn normed(&mut self, rows: usize) -> LocalBoxFuture<'_, Result<Vec<f32>>>;

    /// Seconds from asking for a result that takes next to no work until it is here. None where results need not come from
    /// anywhere.
    fn round_trip(&mut self) -> LocalBoxFuture<'_, Result<Option<f64>>>;

    /// The same backend, if it can run ahead.
    fn run_ahead(&mut self) -> Option<&mut dyn RunAhead> {
        None
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    /// Bytes this backend allocates beside weights, states and pool slots: activations, staging, parameters.
    fn workspace_bytes(&self) -> u64;
}

/// The rows of a plan's rotary table for positions `pos .. pos + m`: per row the cosines, then the sines.
pub fn rope_table(plan: &Plan, pos: usize, m: usize) -> Vec<f32> {
    let mut table = Vec::with_capacity(m * 2 * plan.inv_freq.len());
    for p in pos..pos + m {
        let angles = plan.inv_freq.iter().map(|f| p as f32 * f);
        table.extend(angles.clone().map(|a| libm::cosf(a) * plan.rope_scale));
        table.extend(angles.map(|a| libm::sinf(a) * plan.rope_scale));
    }
    table
}
