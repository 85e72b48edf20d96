//! One number bounds everything allocated. The ledger adds it up before anything is, and says what fits.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::model::plan::{Limits, Plan};

/// What memory is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Weights that stay resident.
    Core,
    /// Key-value caches and recurrent states.
    State,
    /// Activations and whatever else a backend needs to compute.
    Workspace,
    /// Copies of recurrent states, for a sequence to go back to.
    Checkpoint,
    /// Bytes on their way from flash to the backend.
    Staging,
    /// Tokenizer, chat template, manifest and tables of the host.
    Host,
    /// Expert slots.
    Pool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Entry {
    pub kind: Kind,
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ledger {
    pub budget: u64,
    /// The smallest budget that works, and what of it is the pool.
    pub smallest: u64,
    pub smallest_pool: u64,
    pub entries: Vec<Entry>,
}

impl Ledger {
    pub fn total(&self) -> u64 {
        self.entries.iter().map(|e| e.bytes).sum()
    }

    pub fn bytes(&self, kind: Kind) -> u64 {
        self.entries.iter().filter(|e| e.kind == kind).map(|e| e.bytes).sum()
    }
}

/// What the caller asked for and what the backend needs, from which memory is divided.
pub struct Request<'a> {
    pub plan: &'a Plan,
    /// Bytes of one expert's extent in a slot.
    pub slot_bytes: u64,
    /// Bytes of the largest tensor read in one piece while loading.
    pub largest_read: u64,
    pub host_bytes: u64,
    pub context: usize,
    /// Tokens a pass takes at most, fewer if the budget is small; `None` for as many as are of use.
    pub chunk: Option<usize>,
    /// Bytes that the host keeps for each token of a pass, beside the backend's workspace.
    pub row_bytes: u64,
    /// Expert slots at most.
    pub max_slots: usize,
    /// Checkpoints at most; fewer if the budget is small.
    pub max_checkpoints: usize,
    /// Workspace the backend needs with some limits.
    pub workspace: &'a dyn Fn(&Plan, &Limits) -> Result<u64>,
}

/// Expert extents read at the same time.
pub const READS_IN_FLIGHT: usize = 4;

/// Rows of logits computed at once.
pub const HEAD_ROWS: usize = 4;

/// Activations take at most this part of what the core leaves, unless a pass of one token needs more, or they take nothing
/// from the pool.
const WORKSPACE_SHARE: u64 = 4;

/// Tokens of a pass that there is room for, where nobody asks for a number. A pass reads the experts of its rows once; by
/// this many rows the flagship's every expert has work for sixteen, which takes longer than to read it, and a request to
/// stop, which is heard between layers, should not wait for more.
const LARGEST_CHUNK: usize = 512;

/// Checkpoints take at most this part of what could be slots: they spare work after an edit, slots spare it all the time.
const CHECKPOINT_SHARE: u64 = 8;

impl Request<'_> {
    /// What computing takes with some limits.
    fn workspace(&self, limits: &Limits) -> Result<u64> {
        Ok((self.workspace)(self.plan, limits)? + limits.chunk as u64 * self.row_bytes)
    }

    fn limits(&self, chunk: usize, slots: usize, checkpoints: usize) -> Limits {
        Limits { context: self.context, chunk, head_rows: HEAD_ROWS.min(chunk), slots, checkpoints }
    }

    fn staging(&self) -> u64 {
        self.largest_read.max(READS_IN_FLIGHT as u64 * self.slot_bytes)
    }

    /// Everything but the workspace, the pool and the checkpoints.
    fn fixed(&self) -> u64 {
        let plan = self.plan;
        plan.weight_bytes() + plan.state_bytes(self.context) + self.staging() + self.host_bytes
    }

    fn smallest_slots(&self) -> usize {
        self.plan.top_k()
    }

    fn smallest_pool(&self) -> u64 {
        self.smallest_slots() as u64 * self.slot_bytes
    }

    /// The smallest budget that works at this context.
    pub fn smallest_budget(&self) -> Result<u64> {
        let workspace = self.workspace(&self.limits(1, self.smallest_slots(), 0))?;
        Ok(self.fixed() + workspace + self.smallest_pool())
    }

    /// The most tokens, up to what was asked for, whose activations keep to their share of `free` bytes, or fit in beside
    /// the whole `pool`.
    fn fitting_chunk(&self, free: u64, pool: u64) -> usize {
        let most = self.chunk.unwrap_or(LARGEST_CHUNK).clamp(1, self.context);
        let room = (free / WORKSPACE_SHARE).max(free.saturating_sub(pool)).min(free - self.smallest_pool());
        // A backend refuses buffers larger than it can have.
        let fits = |chunk| {
            let workspace = self.workspace(&self.limits(chunk, self.smallest_slots(), 0));
            workspace.is_ok_and(|bytes| bytes <= room)
        };
        let (mut chunk, mut beyond) = (1, most + 1);
        while beyond - chunk > 1 {
            let middle = chunk + (beyond - chunk) / 2;
            *(if fits(middle) { &mut chunk } else { &mut beyond }) = middle;
        }
        chunk
    }

    /// Divides the budget. The pool gets what is left, at most a slot for every expert.
    pub fn divide(&self, budget: u64) -> Result<(Limits, Ledger)> {
        let plan = self.plan;
        let smallest = self.smallest_budget()?;
        if budget < smallest {
            return Err(Error::Budget { budget, smallest, context: self.context });
        }
        let every = plan.layers.iter().filter_map(|l| l.moe).map(|m| m.experts).sum::<usize>();
        let free = budget - self.fixed();
        let every = every.min(self.max_slots).max(self.smallest_slots());
        let chunk = self.fitting_chunk(free, every as u64 * self.slot_bytes);
        let workspace = self.workspace(&self.limits(chunk, self.smallest_slots(), 0))?;
        let spare = free.saturating_sub(workspace + self.smallest_pool());
        let fitting = (spare / CHECKPOINT_SHARE).checked_div(plan.checkpoint_bytes()).unwrap_or(0);
        let checkpoints = self.max_checkpoints.min(usize::try_from(fitting).unwrap_or(usize::MAX));
        let checkpoint_bytes = checkpoints as u64 * plan.checkpoint_bytes();
        let free = free - checkpoint_bytes;
        // Some workspaces grow with the pool (tables of slots), so the number of slots settles from above.
        let mut slots = every;
        loop {
            let workspace = self.workspace(&self.limits(chunk, slots, checkpoints))?;
            let room = free.saturating_sub(workspace).checked_div(self.slot_bytes).unwrap_or(0);
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            if room >= slots || slots <= self.smallest_slots() {
                break;
            }
            slots = room.max(self.smallest_slots()).min(slots - 1);
        }
        let limits = self.limits(chunk, slots, checkpoints);
        let entries = vec![
            Entry { kind: Kind::Core, bytes: plan.weight_bytes() },
            Entry { kind: Kind::State, bytes: plan.state_bytes(self.context) },
            Entry { kind: Kind::Checkpoint, bytes: checkpoint_bytes },
            Entry { kind: Kind::Workspace, bytes: self.workspace(&limits)? },
            Entry { kind: Kind::Staging, bytes: self.staging() },
            Entry { kind: Kind::Host, bytes: self.host_bytes },
            Entry { kind: Kind::Pool, bytes: slots as u64 * self.slot_bytes },
        ];
        Ok((limits, Ledger { budget, smallest, smallest_pool: self.smallest_pool(), entries }))
    }
}
