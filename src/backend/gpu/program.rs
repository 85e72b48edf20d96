//! A plan, compiled for the GPU without touching one: which buffers there are and how large, and which dispatches make
//! up every part of a pass. Being pure, it also answers how much memory a backend would take before one is made.

use std::ops::Range;

use super::shader::Variant;
use super::tuning::{ATTENTION_BLOCK, ITEMS_A_TILE, Tuning};
use crate::backend::PAIRS_AHEAD;
use crate::error::{Error, Result, Size};
use crate::model::plan::{Buf, Layer, Limits, Op, Plan, Rows, StateSpec, Weight, WeightKind};
use crate::tensor::{GROUP, Layout};

/// WebGPU's default for workgroups in one dimension.
pub const MAX_GRID: u32 = 65_535;
/// WebGPU's default alignment of uniform buffer offsets.
pub const UNIFORM: u64 = 256;
/// Rows of a matrix in one window at most, so that a dispatch over them stays within [`MAX_GRID`].
const WINDOW_ROWS: usize = MAX_GRID as usize * 8;
/// Extents are uploaded whole, and packs align them so.
const EXTENT_ALIGN: usize = 4096;

/// Expert extents that may be written before the GPU is waited for: more of them keep it busier, and each takes memory
/// twice until it is taken up.
const UPLOADS_QUEUED: usize = 16;
const UPLOADS_AT_LEAST: usize = 256 << 10;
/// Layers whose foreseen scores come back together with a layer's routing.
pub const AHEAD: usize = 4;

/// A buffer of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Id(pub usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    Storage,
    Uniform,
    /// Read by kernels as uniform, and written by one.
    Pass,
    Readback,
}

#[derive(Debug, Clone)]
pub struct BufferSpec {
    pub label: String,
    pub bytes: u64,
    pub usage: Usage,
}

/// An activation buffer: rows are padded to whole groups, and the padding is always zero.
#[derive(Debug, Clone, Copy)]
pub struct Activation {
    pub id: Id,
    pub width: usize,
    /// Floats from row to row.
    pub stride: usize,
    rows: Rows,
}

/// Part of a weight with a buffer of its own: some rows of a matrix laid out as a matrix, or a whole vector.
#[derive(Debug, Clone)]
pub struct Window {
    pub id: Id,
    pub rows: Range<usize>,
    pub layout: Option<Layout>,
}

/// What the size of a dispatch depends on.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pass {
    pub m: u32,
    pub pos: u32,
    /// Tiles of work items, for the experts' kernels.
    pub tiles: u32,
}

pub type Grid = Box<dyn Fn(Pass) -> [u32; 3] + Send + Sync>;

/// Which tokens a dispatch is over: each has its `m` and `pos` in [`Program::passes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Those of the chunk.
    Chunk,
    /// The rows of logits.
    Head,
    /// Those of the chunk once it waits for experts, none before: see `shaders/expert_lookup.wgsl`.
    Forecast,
    /// The kernel finds them itself, in the buffer that the others have bound.
    Own,
}

impl Over {
    /// Where they stand in [`Program::passes`].
    pub fn offset(self) -> Option<u64> {
        match self {
            Over::Chunk => Some(0),
            Over::Head => Some(UNIFORM),
            Over::Forecast => Some(2 * UNIFORM),
            Over::Own => None,
        }
    }
}

/// One dispatch. Bindings: 0 the pass's `m` and `pos`, 1 the operation's parameters, 2… the buffers.
pub struct Step {
    pub variant: Variant,
    /// Offset of the parameters in [`Program::params`], and their length.
    pub params: u64,
    pub params_len: u64,
    pub over: Over,
    /// Buffers and whether the kernel writes them.
    pub buffers: Vec<(Id, bool)>,
    pub grid: Grid,
}

#[derive(Default)]
pub struct LayerSteps {
    pub mix: Vec<Step>,
    /// By distance; beyond the last as at 0.
    pub foresee: Vec<Vec<Step>>,
    /// The same from 1 on for a pass that was submitted ahead, by layers from the one it waits at.
    pub forecasts: Vec<Vec<Step>>,
    pub shared: Vec<Step>,
    pub lookup: Option<Step>,
    /// The experts' gate-up and down dispatches for each arena.
    pub experts: Vec<[Step; 2]>,
    pub combine: Option<Step>,
}

/// The pool: slots lie in arenas, each one binding.
#[derive(Debug, Clone, Default)]
pub struct Pool {
    pub arenas: Vec<Id>,
    pub slots_an_arena: usize,
    pub slot_bytes: usize,
}

/// Buffers of routing and of the experts' work.
#[derive(Debug, Clone, Copy)]
pub struct Routed {
    /// Ids `[chunk · top_k]`, then weights.
    pub choice: Id,
    pub read: Id,
    /// Work list, see `shaders/work.wgsl`.
    pub work: Id,
    /// Inner activations and outputs of the experts, a row for each (token, rank).
    pub inner: Id,
    pub out: Id,
    /// First weight in `choice`, in words.
    pub weights_at: usize,
    /// Rows that a pass may have for the GPU to look its experts up, and their pairs.
    pub rows_ahead: usize,
    pub pairs_ahead: usize,
    /// Slot + 1 of every expert, by layer, 0 for none.
    pub table: Id,
    /// What lookups found, see `shaders/expert_lookup.wgsl`: `record` words a layer.
    pub records: Id,
    pub record: usize,
    /// Records, forecasts and logits on their way to the host.
    pub read_ahead: Id,
}

pub struct Program {
    pub buffers: Vec<BufferSpec>,
    pub activations: Vec<Activation>,
    pub weights: Vec<Vec<Window>>,
    pub states: Vec<Vec<Id>>,
    /// By checkpoint: state and copy.
    pub checkpoints: Vec<Vec<(Id, Id)>>,
    pub pool: Pool,
    pub routed: Option<Routed>,
    /// `m` and `pos` of whatever dispatches are over, see [`Over::offset`].
    pub passes: Id,
    pub params: Id,
    pub params_bytes: Vec<u8>,
    pub read_rows: Id,
    /// Where forecasts go, by distance; the first is the plan's own buffer.
    pub foreseen: Vec<Id>,
    /// Bytes that a pass writes when it begins.
    pub begin_bytes: u64,
    pub layers: Vec<LayerSteps>,
    pub head: Vec<Step>,
}

impl Program {
    pub fn new(plan: &Plan, limits: &Limits, tuning: &Tuning) -> Result<Program> {
        let mut c = Compiler::new(plan, limits, tuning)?;
        let mut layers = Vec::new();
        for (i, layer) in plan.layers.iter().enumerate() {
            let mut steps = LayerSteps {
                mix: c.ops(&layer.mix, Over::Chunk)?,
                foresee: (0..=layer.fitted.len())
                    .map(|distance| c.ops(layer.foresee_from(distance), Over::Chunk))
                    .collect::<Result<_>>()?,
                forecasts: c.forecasts(layer)?,
                shared: c.ops(&layer.shared, Over::Chunk)?,
                ..Default::default()
            };
            if let Some(moe) = &layer.moe {
                steps.mix.extend(c.router(moe)?);
                steps.lookup = Some(c.lookup(i, moe)?);
                steps.experts = c.experts(moe)?;
                steps.combine = Some(c.combine(moe)?);
            }
            layers.push(steps);
        }
        let head = c.ops(&plan.head, Over::Head)?;
        let mut program = c.program;
        (program.layers, program.head) = (layers, head);
        let params = program.params_bytes.len().max(UNIFORM as usize);
        program.buffers[program.params.0].bytes = params as u64;
        let rows = [Some(plan.residual), plan.rope].into_iter().flatten();
        let rows: u64 = rows.map(|buf| program.buffers[program.activations[buf.0].id.0].bytes).sum();
        program.begin_bytes = rows + UNIFORM;
        for spec in &program.buffers {
            if spec.bytes > tuning.max_binding {
                return Err(Error::NoGpu(format!(
                    "`{}` takes {} and one buffer holds {}; lower the context or the chunk",
                    spec.label,
                    Size(spec.bytes),
                    Size(tuning.max_binding)
                )));
            }
        }
        Ok(program)
    }

    /// Bytes of all buffers.
    pub fn total_bytes(&self) -> u64 {
        self.buffers.iter().map(|b| b.bytes).sum()
    }

    /// Bytes beside the plan's own count of weights, states and checkpoints, and the slots. Splitting and padding of weights and
    /// states counts as workspace.
    pub fn workspace_bytes(&self, plan: &Plan, limits: &Limits) -> u64 {
        let slots = (limits.slots * self.pool.slot_bytes) as u64;
        let checkpoints = limits.checkpoints as u64 * plan.checkpoint_bytes();
        let buffers = self.total_bytes() - plan.weight_bytes() - plan.state_bytes(limits.context) - checkpoints - slots;
        buffers + self.upload_queue()
    }

    /// Bytes that may be written before the GPU is waited for.
    pub fn upload_queue(&self) -> u64 {
        (UPLOADS_QUEUED * self.pool.slot_bytes).max(UPLOADS_AT_LEAST) as u64 + self.write_bytes()
    }

    /// Bytes that are written at once at most, weights aside: an expert, a work list, or what a pass begins with.
    pub fn write_bytes(&self) -> u64 {
        let work = self.routed.map_or(0, |routed| self.buffers[routed.work.0].bytes);
        (self.pool.slot_bytes as u64).max(work).max(self.begin_bytes)
    }

    /// Where a slot lies: its arena and the byte offset there.
    pub fn slot(&self, slot: usize) -> (usize, usize) {
        let arena = slot / self.pool.slots_an_arena;
        (arena, slot % self.pool.slots_an_arena * self.pool.slot_bytes)
    }
}

/// Builds a program step by step; `ops.rs` adds the operations.
pub(super) struct Compiler<'a> {
    pub plan: &'a Plan,
    pub limits: &'a Limits,
    pub tuning: &'a Tuning,
    pub program: Program,
    /// Which of the buffers for forecasts stands for the plan's.
    distance: usize,
}

impl<'a> Compiler<'a> {
    fn new(plan: &'a Plan, limits: &'a Limits, tuning: &'a Tuning) -> Result<Compiler<'a>> {
        let program = Program {
            buffers: Vec::new(),
            activations: Vec::new(),
            weights: Vec::new(),
            states: Vec::new(),
            checkpoints: Vec::new(),
            pool: Pool::default(),
            routed: None,
            passes: Id(0),
            params: Id(0),
            params_bytes: Vec::new(),
            read_rows: Id(0),
            foreseen: Vec::new(),
            begin_bytes: 0,
            layers: Vec::new(),
            head: Vec::new(),
        };
        let mut c = Compiler { plan, limits, tuning, program, distance: 0 };
        c.program.passes = c.buffer("pass", 3 * UNIFORM, Usage::Pass);
        c.program.params = c.buffer("parameters", 0, Usage::Uniform);
        for (i, spec) in plan.buffers.iter().enumerate() {
            let stride = spec.width.next_multiple_of(GROUP);
            let rows = plan.rows(Buf(i), limits);
            let id = c.storage(&spec.name, (rows * stride * 4) as u64);
            c.program.activations.push(Activation { id, width: spec.width, stride, rows: spec.rows });
        }
        for i in 0..plan.weights.len() {
            let windows = c.weight(Weight(i))?;
            c.program.weights.push(windows);
        }
        for spec in &plan.states {
            let ids = c.state(*spec);
            c.program.states.push(ids);
        }
        c.program.checkpoints = (0..limits.checkpoints).map(|_| c.checkpoint()).collect();
        // Rows come back in batches that fit: all logits of a head pass, or at least one row of anything.
        let logits = c.activation(plan.logits);
        let widest = c.program.activations.iter().map(|a| a.stride).max().unwrap_or(0);
        let bytes = 4 * (limits.head_rows * logits.stride).max(widest) as u64;
        c.program.read_rows = c.buffer("rows read back", bytes, Usage::Readback);
        c.pool()?;
        Ok(c)
    }

    pub fn buffer(&mut self, label: &str, bytes: u64, usage: Usage) -> Id {
        self.program.buffers.push(BufferSpec { label: label.to_owned(), bytes, usage });
        Id(self.program.buffers.len() - 1)
    }

    fn storage(&mut self, label: &str, bytes: u64) -> Id {
        self.buffer(label, bytes.max(16), Usage::Storage)
    }

    /// Scratch space that operations use one after the other, as large as the largest of them needs.
    pub fn scratch(&mut self, label: &'static str, bytes: u64) -> Id {
        match self.program.buffers.iter().position(|b| b.label == label) {
            Some(i) => {
                let spec = &mut self.program.buffers[i];
                spec.bytes = spec.bytes.max(bytes);
                Id(i)
            }
            None => self.storage(label, bytes),
        }
    }

    pub fn activation(&self, buf: Buf) -> Activation {
        let activation = self.program.activations[buf.0];
        match self.program.foreseen.get(self.distance) {
            Some(id) if self.plan.foreseen == Some(buf) => Activation { id: *id, ..activation },
            _ => activation,
        }
    }

    /// A layer's forecasts from each distance, over the tokens that wait.
    fn forecasts(&mut self, layer: &Layer) -> Result<Vec<Vec<Step>>> {
        let distances = if layer.foresee.is_empty() { 0 } else { self.program.foreseen.len() };
        let mut steps = Vec::with_capacity(distances);
        for distance in 0..distances {
            self.distance = distance;
            steps.push(self.ops(layer.foresee_from(distance + 1), Over::Forecast)?);
        }
        self.distance = 0;
        Ok(steps)
    }

    /// A matrix becomes windows of rows that each fit one binding.
    fn weight(&mut self, weight: Weight) -> Result<Vec<Window>> {
        let spec = &self.plan.weights[weight.0];
        let whole = match spec.kind {
            WeightKind::Vector { .. } => {
                let id = self.buffer(&spec.tensor, spec.bytes() as u64, Usage::Storage);
                return Ok(vec![Window { id, rows: 0..1, layout: None }]);
            }
            WeightKind::Matrix(layout) => layout,
        };
        let row_bytes = (whole.bytes() as u64).div_ceil(whole.rows as u64).max(1);
        // Padding of the planes takes up to 48 bytes a window.
        let fitting = (self.tuning.max_binding.saturating_sub(48) / row_bytes) as usize;
        let rows = fitting.clamp(1, WINDOW_ROWS);
        let mut windows = Vec::new();
        for start in (0..whole.rows).step_by(rows) {
            let rows = start..whole.rows.min(start + rows);
            let layout = Layout { rows: rows.len(), ..whole };
            let id = self.buffer(&spec.tensor, layout.bytes() as u64, Usage::Storage);
            windows.push(Window { id, rows, layout: Some(layout) });
        }
        Ok(windows)
    }

    fn state(&mut self, spec: StateSpec) -> Vec<Id> {
        let context = self.limits.context;
        let mut state = |label: &str, floats: usize| self.buffer(label, 4 * floats as u64, Usage::Storage);
        match spec {
            StateSpec::Kv { heads, dim, value_dim } => {
                let floats = |dim: usize| context * heads * dim.next_multiple_of(4);
                vec![state("keys", floats(dim)), state("values", floats(value_dim))]
            }
            StateSpec::Conv { .. } => vec![state("convolution state", spec.len(0).max(1))],
            StateSpec::Delta { .. } => vec![state("recurrent state", spec.len(0))],
        }
    }

    fn checkpoint(&mut self) -> Vec<(Id, Id)> {
        let states: Vec<Id> = self.plan.checkpointed().flat_map(|s| self.program.states[s.0].clone()).collect();
        let copy = |state: Id| (state, self.buffer("checkpoint", self.program.buffers[state.0].bytes, Usage::Storage));
        states.into_iter().map(copy).collect()
    }

    fn pool(&mut self) -> Result<()> {
        let Some(shape) = self.plan.expert else { return Ok(()) };
        let slot_bytes = shape.bytes().next_multiple_of(EXTENT_ALIGN);
        let slots_an_arena = self.tuning.max_binding as usize / slot_bytes;
        if slots_an_arena == 0 {
            let (expert, most) = (Size(slot_bytes as u64), Size(self.tuning.max_binding));
            return Err(Error::NoGpu(format!("one expert takes {expert} and one buffer holds {most}")));
        }
        let mut arenas = Vec::new();
        for first in (0..self.limits.slots).step_by(slots_an_arena) {
            let slots = slots_an_arena.min(self.limits.slots - first);
            arenas.push(self.buffer("expert slots", (slots * slot_bytes) as u64, Usage::Storage));
        }
        let places = self.limits.chunk * self.plan.top_k();
        let padded = |width: usize| 4 * (places * width.next_multiple_of(GROUP)) as u64;
        // The list of items ends with what the last, partly filled tile reads beyond them.
        let work = 16 * (arenas.len() + places) + 4 * places * ITEMS_A_TILE;
        let layers = self.plan.layers.len();
        let rows_ahead = (PAIRS_AHEAD / self.plan.top_k().max(1)).clamp(1, self.limits.chunk);
        let pairs_ahead = rows_ahead * self.plan.top_k();
        let record = 1 + pairs_ahead;
        let forecast = self.plan.foreseen.map_or(0, |buf| 4 * self.activation(buf).stride as u64);
        let foreseen = |rows: usize| AHEAD as u64 * rows as u64 * forecast;
        let logits = 4 * (self.limits.head_rows * self.activation(self.plan.logits).stride) as u64;
        if let Some(buf) = self.plan.foreseen {
            self.program.foreseen.push(self.activation(buf).id);
            for _ in 1..AHEAD {
                let id = self.storage("foreseen", rows_ahead as u64 * forecast);
                self.program.foreseen.push(id);
            }
        }
        let experts = self.plan.most_experts();
        let records = 4 * (layers * record) as u64;
        self.program.routed = Some(Routed {
            choice: self.storage("routing", 8 * places as u64),
            read: self.buffer(
                "routing read back",
                8 * places.max(1) as u64 + foreseen(self.limits.chunk),
                Usage::Readback,
            ),
            work: self.storage("expert work list", work.next_multiple_of(16) as u64),
            inner: self.storage("expert inner", padded(shape.gate.rows)),
            out: self.storage("expert out", padded(shape.down.rows)),
            weights_at: places,
            rows_ahead,
            pairs_ahead,
            table: self.storage("slot table", 4 * (layers * experts) as u64),
            records: self.storage("lookups", records),
            record,
            read_ahead: self.buffer("read ahead", records + foreseen(rows_ahead) + logits, Usage::Readback),
        });
        self.program.pool = Pool { arenas, slots_an_arena, slot_bytes };
        Ok(())
    }

    fn ops(&mut self, ops: &[Op], over: Over) -> Result<Vec<Step>> {
        let mut steps = Vec::new();
        for op in ops {
            self.op(op, over, &mut steps)?;
        }
        Ok(steps)
    }

    pub fn params(&mut self, words: &[u32]) -> (u64, u64) {
        let bytes = &mut self.program.params_bytes;
        let at = bytes.len() as u64;
        bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        // Structures that hold matrices are sized in sixteens.
        let len = (words.len() * 4).next_multiple_of(16);
        bytes.resize(bytes.len().next_multiple_of(UNIFORM as usize), 0);
        (at, len as u64)
    }

    /// Whether an operation's `m` is bounded by the chunk or by the rows of logits is up to the list it stands in; its
    /// buffers must agree.
    pub fn check_rows(&self, buf: Buf, over: Over) {
        debug_assert_eq!(
            matches!(self.activation(buf).rows, Rows::Head),
            over == Over::Head,
            "{}",
            self.plan.buffers[buf.0].name
        );
    }
}

/// Blocks of keys in a context.
pub(super) fn attention_blocks(context: usize) -> usize {
    context.div_ceil(ATTENTION_BLOCK as usize)
}

/// A one-dimensional grid of `n` workgroups, folded so that no dimension exceeds the limit. See `shaders/grid.wgsl`.
pub(super) fn linear(n: u32) -> [u32; 3] {
    let x = n.min(MAX_GRID);
    [x, if x == 0 { 0 } else { n.div_ceil(x) }, 1]
}
