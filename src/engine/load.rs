//! From a pack to an engine: choose a backend, divide the budget, make the core resident.

use std::ops::Range;
use std::rc::Rc;

use super::experts::Experts;
use super::ledger::{Ledger, READS_IN_FLIGHT, Request};
use super::resume::Checkpoints;
use super::self_test::Tolerance;
use super::{Counters, Engine, Stop};
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::backend::gpu::{Device, Gpu};
use crate::error::{Error, Result};
use crate::les::{Pool, Scheduler, Settings, Shape};
use crate::model::plan::{Limits, Map, Plan, Weight, WeightKind, WeightSpec};
use crate::model::{self, Stored, Tensors};
use crate::pack::{Manifest, Pack};
use crate::tensor::DType;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// The GPU where there is one, else the CPU, with a notice.
    #[default]
    Auto,
    Cpu,
    Gpu,
}

impl std::str::FromStr for BackendChoice {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(BackendChoice::Auto),
            "cpu" => Ok(BackendChoice::Cpu),
            "gpu" => Ok(BackendChoice::Gpu),
            _ => Err(format!("`{s}` is not one of auto, cpu, gpu")),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Options {
    pub backend: BackendChoice,
    /// Bytes that everything together may take; `None` for a slot for every expert.
    pub budget: Option<u64>,
    /// Positions a sequence can have; `None` for what the model was made for, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Tokens a pass takes at most, fewer where the budget is small; `None` for as many as the budget's share for
    /// activations holds and are of use. A prompt is cut into passes of so many, and each reads an expert once at most.
    pub chunk: Option<usize>,
    /// Expert slots at most, whatever the budget would hold.
    pub max_slots: Option<usize>,
    /// Multiply matrices in f16 on GPUs that can, with sums in f32; with a notice where it cannot be had. Results are
    /// coarser: every weight, activation and product is rounded to 11 bits, weights beyond ±8 and activations beyond ±8188
    /// are taken as those, and whether it is faster depends on the GPU.
    pub f16: bool,
    /// Checkpoints at most, whatever the budget would hold. Without any a sequence whose model has recurrent states goes
    /// back only to its beginning.
    pub max_checkpoints: usize,
    /// Forecast by the later layer's router alone, whatever maps the pack has. Changes speed, never a result.
    pub untrained: bool,
    /// Run the pack's self-test. Without it a GPU that computes wrongly goes unnoticed.
    pub self_test: bool,
}

/// Context where none was asked for.
pub const DEFAULT_CONTEXT: usize = 4096;

impl Default for Options {
    fn default() -> Options {
        Options {
            backend: BackendChoice::Auto,
            budget: None,
            context: None,
            chunk: None,
            max_slots: None,
            f16: false,
            max_checkpoints: 4,
            untrained: false,
            self_test: true,
        }
    }
}

impl Options {
    /// Positions a sequence of a model can have.
    pub fn context_for(&self, config: &serde_json::Value) -> usize {
        self.context.unwrap_or(DEFAULT_CONTEXT).clamp(1, model::max_context(config).max(1))
    }

    fn budget(&self) -> u64 {
        self.budget.unwrap_or(u64::MAX)
    }

    fn without_maps(&self) -> Options {
        Options { untrained: true, ..self.clone() }
    }
}

/// What of a pack is made resident.
struct Resident<'a> {
    manifest: &'a Manifest,
    maps: bool,
}

impl Tensors for Resident<'_> {
    fn core(&self, name: &str) -> Result<Stored> {
        self.manifest.stored(name)
    }

    fn expert_dtype(&self) -> Option<DType> {
        self.manifest.experts.as_ref().map(|e| e.dtype)
    }

    fn map(&self, layer: usize, distance: usize) -> Option<Stored> {
        self.core(&model::map_name(layer, distance)).ok().filter(|_| self.maps)
    }
}

/// The forward plan of a pack. What is read is sized by the manifest and what computes on it by the configuration, so
/// both must say the same.
fn plan_of(manifest: &Manifest, options: &Options) -> Result<Plan> {
    let plan = model::plan_for(&manifest.config, &Resident { manifest, maps: !options.untrained })?;
    let bad = |reason: String| Err(Error::format("pack", reason));
    let e = &manifest.embedding;
    if (e.rows, e.cols) != (plan.vocab, plan.hidden) {
        let (rows, cols, vocab, hidden) = (e.rows, e.cols, plan.vocab, plan.hidden);
        return bad(format!("the embedding is {rows} × {cols} where the configuration needs {vocab} × {hidden}"));
    }
    if let Some((experts, shape)) = manifest.experts.as_ref().zip(plan.expert)
        && experts.shape() != shape
    {
        let biases = |has: bool| if has { "with" } else { "without" };
        let (width, own, needed, theirs) = (experts.width, biases(experts.bias), shape.gate.rows, biases(shape.bias));
        return bad(format!(
            "its experts have a width of {width} {own} biases where the configuration needs {needed} {theirs}"
        ));
    }
    let held = manifest.experts.as_ref().map_or(&[][..], |e| &e.layers);
    for (layer, needed) in plan.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.moe?.experts))) {
        let held = held.get(layer).and_then(Option::as_ref).map_or(0, Vec::len);
        if held != needed {
            return bad(format!("layer {layer} has {held} experts where the configuration needs {needed}"));
        }
    }
    Ok(plan)
}

/// The smallest budget with which a pack works, from its manifest alone.
pub fn smallest_budget(manifest: &Manifest, options: &Options) -> Result<u64> {
    budgets(manifest, options).map(|budgets| budgets.start)
}

/// From the smallest budget with which a pack works to the one that holds it whole, from its manifest alone. Maps are part
/// of the whole, and give way where there is no room for them.
pub fn budgets(manifest: &Manifest, options: &Options) -> Result<Range<u64>> {
    let plan = plan_of(manifest, options)?;
    let bare = plan_of(manifest, &options.without_maps())?;
    let workspace: &dyn Fn(&Plan, &Limits) -> Result<u64> = match options.backend {
        BackendChoice::Gpu => &Gpu::workspace_for,
        _ => &|plan, limits| Ok(Cpu::workspace_for(plan, limits)),
    };
    let request = |plan| request(plan, manifest, options, workspace);
    let (_, whole) = request(&plan).divide(u64::MAX)?;
    Ok(request(&bare).smallest_budget()?..whole.total())
}

/// Bytes that reading a weight takes: where it is some rows of a tensor, those are picked from all of it.
fn read_bytes(weight: &WeightSpec) -> u64 {
    let whole = weight.rows.as_ref().and(weight.stored()).map_or(0, |whole| whole.bytes());
    (weight.bytes() + whole) as u64
}

fn request<'a>(
    plan: &'a Plan,
    manifest: &Manifest,
    options: &Options,
    workspace: &'a dyn Fn(&Plan, &Limits) -> Result<u64>,
) -> Request<'a> {
    Request {
        plan,
        slot_bytes: plan.expert.map_or(0, |e| e.bytes().next_multiple_of(crate::pack::EXTENT_ALIGN)) as u64,
        largest_read: plan.weights.iter().map(read_bytes).max().unwrap_or(0),
        // The tokens of the sequence are kept beside its states.
        host_bytes: host_bytes(manifest, plan) + 4 * options.context_for(&manifest.config) as u64,
        context: options.context_for(&manifest.config),
        chunk: options.chunk,
        row_bytes: row_bytes(plan),
        max_slots: options.max_slots.unwrap_or(usize::MAX),
        max_checkpoints: options.max_checkpoints,
        workspace,
    }
}

/// The module itself, and tokenizer, template, manifest and tables, measured at about this many times their files; and what
/// a backend keeps of each operation.
fn host_bytes(manifest: &Manifest, plan: &Plan) -> u64 {
    let files: u64 = manifest.files.iter().map(|f| f.bytes).sum();
    let extents = 256 * manifest.extents.len() as u64;
    module_bytes() + 8 * files + extents + ((plan.operations() as u64) << 10) + (1 << 20)
}

/// Layers that there are forecasts of at once: those from the layer at hand, and those from the one before it.
const FORECASTS: usize = 4;

/// What the host keeps for a token of a pass: its embedding and angles, each of its experts' choice, places and work item
/// as they go from hand to hand, and forecasts of some layers, as scores and as what is made of them.
fn row_bytes(plan: &Plan) -> u64 {
    const CHOICE: usize = 64;
    const FORECAST: usize = FORECASTS * (2 * size_of::<f32>() + 2);
    (4 * (plan.hidden + 2 * plan.inv_freq.len()) + CHOICE * plan.top_k() + FORECAST * plan.most_experts()) as u64
}

/// What a wasm module takes up in its memory before it allocates anything, constants and the stack, and what lies idle
/// between allocations, since that memory never shrinks.
#[cfg(target_arch = "wasm32")]
fn module_bytes() -> u64 {
    unsafe extern "C" {
        /// Defined by the linker; only its address means something.
        static __heap_base: u8;
    }
    (&raw const __heap_base).addr() as u64 + (512 << 10)
}

#[cfg(not(target_arch = "wasm32"))]
fn module_bytes() -> u64 {
    0
}

impl Engine {
    /// Loads a pack and runs its self-test. `on_progress(done, total)` is told as core weights become resident, in bytes.
    ///
    /// A GPU that fails, or computes something else than the pack was made with, is not used: f16 gives way to f32, and
    /// the GPU to the CPU unless it was asked for, with notices that say why.
    ///
    /// # Errors
    /// [`Error::SelfTest`] where nothing is left to give way to, [`Error::NoGpu`], [`Error::Gpu`], [`Error::DeviceLost`],
    /// [`Error::Budget`], and those of reading the pack.
    pub async fn load(pack: Pack, options: &Options, mut on_progress: impl FnMut(u64, u64)) -> Result<Engine> {
        let pack = Rc::new(pack);
        let maps = pack.manifest().has_maps() && !options.untrained;
        match Engine::load_with(&pack, options, &mut on_progress).await {
            Err(Error::Budget { .. }) if maps => {
                let mut engine = Engine::load_with(&pack, &options.without_maps(), &mut on_progress).await?;
                engine
                    .notices
                    .push("reading ahead by routers alone: the budget has no room for the pack's maps".into());
                Ok(engine)
            }
            loaded => loaded,
        }
    }

    async fn load_with(pack: &Rc<Pack>, options: &Options, on_progress: &mut impl FnMut(u64, u64)) -> Result<Engine> {
        let plan = plan_of(pack.manifest(), options)?;
        let mut notices = Vec::new();
        let mut f16 = options.f16;
        let engine = loop {
            let device = match options.backend {
                BackendChoice::Cpu => Err(None),
                _ => Device::request(f16).await.map_err(Some),
            };
            let half = device.as_ref().is_ok_and(Device::f16);
            let error = match device {
                Ok(device) => {
                    let tolerance = if half { Tolerance::F16 } else { Tolerance::F32 };
                    let made = Engine::on_gpu(device, plan.clone(), pack, options, on_progress).await;
                    match tested(made, options, tolerance).await {
                        Ok(engine) => break engine,
                        Err(e) => Some(e),
                    }
                }
                Err(e) => e,
            };
            match error {
                Some(e) if !is_of_the_gpu(&e) => return Err(e),
                Some(e) if half => {
                    f16 = false;
                    notices.push(format!("computing in f32: {e}"));
                    continue;
                }
                Some(e) if options.backend == BackendChoice::Gpu => return Err(e),
                Some(e) => notices.push(format!("running on the CPU: {e}")),
                None => {}
            }
            let made = Engine::on_cpu(plan.clone(), pack, options, on_progress).await;
            break tested(made, options, Tolerance::CPU).await?;
        };
        let info = engine.backend_info();
        // Where f16 was given up, a notice has said so.
        if f16 && !info.detail.ends_with(", f16") {
            let who = if info.kind == "gpu" { "this GPU" } else { "the CPU backend" };
            notices.push(format!("computing in f32: {who} does not multiply in f16"));
        }
        Ok(Engine { notices, ..engine })
    }

    async fn on_gpu(
        device: Device,
        plan: Plan,
        pack: &Rc<Pack>,
        options: &Options,
        on_progress: &mut impl FnMut(u64, u64),
    ) -> Result<Engine> {
        let (limits, ledger) =
            request(&plan, pack.manifest(), options, &Gpu::workspace_for).divide(options.budget())?;
        let backend = Gpu::on(device, plan, limits).await?;
        Engine::with(Box::new(backend), ledger, pack, options, on_progress).await
    }

    async fn on_cpu(
        plan: Plan,
        pack: &Rc<Pack>,
        options: &Options,
        on_progress: &mut impl FnMut(u64, u64),
    ) -> Result<Engine> {
        let workspace = |plan: &Plan, limits: &Limits| Ok(Cpu::workspace_for(plan, limits));
        let (limits, ledger) = request(&plan, pack.manifest(), options, &workspace).divide(options.budget())?;
        Engine::with(Box::new(Cpu::new(plan, limits)), ledger, pack, options, on_progress).await
    }

    async fn with(
        mut backend: Box<dyn Backend>,
        mut ledger: Ledger,
        pack: &Rc<Pack>,
        options: &Options,
        on_progress: &mut impl FnMut(u64, u64),
    ) -> Result<Engine> {
        if options.budget.is_none() {
            ledger.budget = ledger.total();
        }
        write_core(pack, backend.as_mut(), on_progress).await?;
        backend.reset()?;
        let limits = backend.limits();
        Ok(Engine {
            experts: Experts::new(pack.clone(), scheduler(backend.as_ref()), None),
            ledger,
            sequence: Vec::with_capacity(limits.context),
            checkpoints: Checkpoints::new(limits.checkpoints),
            cached: 0,
            torn: false,
            stop: Stop::default(),
            pause: None,
            recording: None,
            counters: Counters::default(),
            notices: Vec::new(),
            pack: pack.clone(),
            backend,
        })
    }

    /// Empties the pool, forgets the sequence and counts from nothing, with settings and forecasts as if the engine had just
    /// been made. What running ahead costs is measured now that every kernel has run.
    pub async fn forget_experts(&mut self) -> Result<()> {
        let costs = match self.backend.run_ahead() {
            Some(backend) => {
                let costs = backend.costs().await?;
                backend.clear_slots()?;
                Some(costs)
            }
            None => None,
        };
        let mut scheduler = scheduler(self.backend.as_ref());
        let settings = *scheduler.settings();
        scheduler.set_settings(settings.for_round_trip(costs.map_or(0.0, |costs| costs.round_trip)));
        self.experts = Experts::new(self.pack.clone(), scheduler, costs);
        self.counters = Counters { traffic: self.backend.traffic(), ..Counters::default() };
        self.reset()
    }
}

fn scheduler(backend: &dyn Backend) -> Scheduler {
    let (plan, limits) = (backend.plan(), backend.limits());
    let experts = plan.most_experts();
    let shape = Shape { layers: plan.layers.len(), experts, top_k: plan.top_k() };
    let settings = Settings { reads: READS_IN_FLIGHT, singly: backend.works_while_called(), ..Settings::default() };
    let routed = plan.layers.iter().map(|layer| layer.moe.is_some());
    Scheduler::new(shape, Pool::for_layers(shape, routed, limits.slots), settings)
}

/// An engine that has passed its pack's self-test, if there is one. Nothing of it is left in the counters.
async fn tested(made: Result<Engine>, options: &Options, tolerance: Tolerance) -> Result<Engine> {
    let mut engine = made?;
    let pack = engine.pack.clone();
    if let Some(test) = pack.manifest().self_test.as_ref().filter(|_| options.self_test) {
        engine.self_test(test, tolerance).await?;
    }
    engine.forget_experts().await?;
    Ok(engine)
}

/// Whether another backend may do better.
fn is_of_the_gpu(error: &Error) -> bool {
    matches!(error, Error::NoGpu(_) | Error::Gpu(_) | Error::DeviceLost(_) | Error::SelfTest { .. })
}

async fn write_core(pack: &Pack, backend: &mut dyn Backend, on_progress: &mut impl FnMut(u64, u64)) -> Result<()> {
    let total = backend.plan().weight_bytes();
    let mut done = 0;
    for i in 0..backend.plan().weights.len() {
        let spec = backend.plan().weights[i].clone();
        let mut bytes = pack.core(&spec.tensor).await?;
        if let WeightKind::Vector { map, .. } = spec.kind {
            apply(map, &mut bytes)?;
        }
        if let (Some(rows), Some(whole)) = (&spec.rows, spec.stored()) {
            bytes = whole.pick(&bytes, &rows.ranges);
        }
        backend.write_weight(Weight(i), &bytes).await?;
        done += spec.bytes() as u64;
        on_progress(done, total);
    }
    Ok(())
}

pub(super) fn apply(map: Map, bytes: &mut [u8]) -> Result<()> {
    let (values, rest) = bytes.as_chunks_mut::<4>();
    if !rest.is_empty() {
        return Err(Error::format("pack", "a vector is not a whole number of f32"));
    }
    for bytes in values {
        let x = f32::from_le_bytes(*bytes);
        let y = match map {
            Map::Identity => x,
            Map::PlusOne => 1.0 + x,
            Map::NegExp => -libm::expf(x),
        };
        *bytes = y.to_le_bytes();
    }
    Ok(())
}
