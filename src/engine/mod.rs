//! A model, loaded: one sequence's state, prefill and decode. The engine reads what the scheduler asks for and hands it
//! to the backend; it decides neither what to load nor how to compute.

pub mod calibrate;
mod experts;
pub mod generate;
pub mod ledger;
mod load;
mod record;
mod resume;
pub mod sampler;
mod self_test;
mod warm;

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::future::LocalBoxFuture;
use futures_util::task::AtomicWaker;

use crate::backend::{AheadCosts, Backend, Info, Traffic};
use crate::clock;
use crate::error::{Error, Result};
use crate::les::spans::{Awaited, What};
use crate::les::trace::{Header, Pass, Setup, Trace};
use crate::les::{Counts, Forecast, Origin, Settings};
use crate::model::plan::Plan;
use crate::pack::Pack;
use experts::Experts;
use ledger::Ledger;
use record::Recorder;
use resume::Checkpoints;

pub use experts::{ALERT, Waits};
pub use load::{BackendChoice, Options, budgets, smallest_budget};
pub use record::OnPass;
pub use self_test::record_self_test;
pub use warm::HOT_LIST;

/// Asks a running call to stop. Clones share one flag; a signal handler may hold one.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<Flag>);

#[derive(Debug, Default)]
struct Flag {
    up: AtomicBool,
    /// Of the call that waits for flash, which may never answer.
    waker: AtomicWaker,
}

impl Stop {
    pub fn stop(&self) {
        self.0.up.store(true, Ordering::SeqCst);
        self.0.waker.wake();
    }

    pub fn clear(&self) {
        self.0.up.store(false, Ordering::SeqCst);
    }

    fn check(&self) -> Result<()> {
        if self.0.up.load(Ordering::SeqCst) { Err(Error::Aborted) } else { Ok(()) }
    }

    /// Ready once it is asked to stop.
    fn poll(&self, context: &Context) -> Poll<()> {
        self.0.waker.register(context.waker());
        if self.check().is_err() { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Called before every layer. In a browser it lets the worker's event loop run now and then, without which no message,
/// such as one that stops the call, would arrive before its end.
pub type Pause = Rc<dyn Fn() -> LocalBoxFuture<'static, ()>>;

/// Which rows of a pass get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Nothing,
    /// The last token only.
    Last,
    All,
}

/// What a pass went through, recorded for comparison with a reference.
#[derive(Debug, Clone, Default)]
pub struct Probe {
    /// `[layers + 1]` of `[tokens, hidden]`: the embeddings, then each layer's output; the last after the final norm.
    pub hidden: Vec<Vec<f32>>,
    /// By layer, `[tokens, top_k]`: expert ids by descending score, and their weights.
    pub ids: Vec<Vec<u32>>,
    pub weights: Vec<Vec<f32>>,
}

/// What the engine counted since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counters {
    pub tokens: u64,
    /// Bytes of experts that were read because a layer waited for them, and because they were guessed at.
    pub demand_bytes: u64,
    pub guess_bytes: u64,
    pub experts: Counts,
    pub waits: Waits,
    /// Of the backend.
    pub traffic: Traffic,
}

impl Counters {
    /// Bytes of experts read from flash.
    pub fn expert_bytes(&self) -> u64 {
        self.demand_bytes + self.guess_bytes
    }
}

pub struct Engine {
    pack: Rc<Pack>,
    backend: Box<dyn Backend>,
    experts: Experts,
    ledger: Ledger,
    /// The tokens that the states have taken in.
    sequence: Vec<u32>,
    checkpoints: Checkpoints,
    cached: usize,
    /// A pass failed half-way, so the states are between two tokens.
    torn: bool,
    stop: Stop,
    pause: Option<Pause>,
    /// What [`record`](Engine::record) keeps.
    recording: Option<Rc<RefCell<Vec<Pass>>>>,
    /// Tokens so far, and what the backend had been asked for before.
    counters: Counters,
    notices: Vec<String>,
}

impl Engine {
    pub fn pack(&self) -> &Pack {
        &self.pack
    }

    pub fn plan(&self) -> &Plan {
        self.backend.plan()
    }

    pub fn backend_info(&self) -> Info {
        self.backend.info()
    }

    /// Whether calls of the backend return when their work is done.
    pub fn works_while_called(&self) -> bool {
        self.backend.works_while_called()
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Positions a sequence can have.
    pub fn context(&self) -> usize {
        self.backend.limits().context
    }

    /// Tokens a pass takes at once.
    pub fn chunk(&self) -> usize {
        self.backend.limits().chunk
    }

    /// Expert slots in the pool.
    pub fn slots(&self) -> usize {
        self.experts.pool().slots()
    }

    /// Tokens of the sequence so far.
    pub fn position(&self) -> usize {
        self.sequence.len()
    }

    pub fn counters(&self) -> Counters {
        let (bytes, waits, experts) = (self.experts.bytes, self.experts.waits, self.experts.counts());
        let (now, before) = (self.backend.traffic(), self.counters.traffic);
        let traffic =
            Traffic { submissions: now.submissions - before.submissions, readbacks: now.readbacks - before.readbacks };
        Counters { demand_bytes: bytes.demand, guess_bytes: bytes.guess, experts, waits, traffic, ..self.counters }
    }

    /// How often forecasts of a layer were right.
    pub fn forecast(&self) -> &Forecast {
        self.experts.forecast()
    }

    /// How experts are read ahead. Changes speed, never a result.
    pub fn scheduling(&self) -> Settings {
        *self.experts.settings()
    }

    pub fn set_scheduling(&mut self, settings: Settings) {
        let reads = settings.reads.clamp(1, ledger::READS_IN_FLIGHT);
        self.experts.set_settings(Settings { reads, ..settings });
    }

    /// Records what passes go through from now on, with forecasts of so many layers ahead.
    pub fn record(&mut self, depth: usize) {
        let passes = Rc::new(RefCell::new(Vec::new()));
        self.recording = Some(passes.clone());
        let keep = move |pass| {
            passes.borrow_mut().push(pass);
            Ok(())
        };
        self.record_to(depth, Box::new(keep));
    }

    /// The same, handed out as passes end instead of kept.
    pub fn record_to(&mut self, depth: usize, on_pass: OnPass) {
        self.experts.recorder = Some(Recorder::new(depth, on_pass));
    }

    /// What a recording begins with.
    pub fn header(&self) -> Header {
        let setup = Setup {
            model: self.pack.manifest().name.clone(),
            backend: self.backend_info().kind.to_owned(),
            slots: self.slots(),
            context: self.context(),
            core_bytes: self.ledger.smallest - self.ledger.smallest_pool,
        };
        Header { shape: self.experts.shape(), expert_bytes: self.pack.expert_bytes(), setup: Some(setup) }
    }

    /// Ends a recording.
    pub fn take_recording(&mut self) -> Option<Trace> {
        self.experts.recorder = None;
        let Header { shape, expert_bytes, setup } = self.header();
        self.recording.take().map(|passes| Trace { shape, expert_bytes, setup, passes: passes.take() })
    }

    /// Reads every expert in several reads, as layouts that keep its matrices apart have to. For comparison.
    pub fn set_pieces(&mut self, pieces: usize) {
        self.experts.set_pieces(pieces);
    }

    /// Seconds that a result of the backend takes to come back when there is next to nothing to compute, measured now.
    pub async fn round_trip(&mut self) -> Result<Option<f64>> {
        self.backend.settle().await?;
        self.backend.round_trip().await
    }

    /// What submitting layers before their routing is known was measured to cost, where the backend can.
    pub fn ahead_costs(&self) -> Option<AheadCosts> {
        self.experts.ahead_costs()
    }

    /// What the user should know about how the model was loaded, such as a fallback to the CPU.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The flag that stops a running call at the next layer.
    pub fn stop_flag(&self) -> Stop {
        self.stop.clone()
    }

    /// Lets another flag, such as that of an engine this one takes the place of, stop calls.
    pub fn set_stop_flag(&mut self, stop: Stop) {
        self.stop = stop;
    }

    pub fn set_pause(&mut self, pause: Pause) {
        self.pause = Some(pause);
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) -> Result<()> {
        self.torn = true;
        self.backend.reset()?;
        self.sequence.clear();
        self.checkpoints.forget_after(0);
        (self.cached, self.torn) = (0, false);
        Ok(())
    }

    /// Runs `tokens` after what the sequence has so far, in chunks. Returns the logits asked for, `[rows, vocab]`.
    ///
    /// After an error the sequence is torn and the next call is refused until [`reset`](Self::reset) or
    /// [`resume`](Self::resume).
    pub async fn forward(&mut self, tokens: &[u32], want: Want, probe: Option<&mut Probe>) -> Result<Vec<f32>> {
        if self.torn {
            return Err(Error::Request("the last pass failed; reset the sequence first".to_owned()));
        }
        let end = self.position() + tokens.len();
        if end > self.context() {
            return Err(Error::Context { prompt: end, context: self.context() });
        }
        self.torn = true;
        let logits = self.chunks(tokens, want, probe).await?;
        self.torn = false;
        Ok(logits)
    }

    async fn chunks(&mut self, tokens: &[u32], want: Want, mut probe: Option<&mut Probe>) -> Result<Vec<f32>> {
        let chunk = self.chunk();
        let mut logits = Vec::new();
        let count = tokens.len().div_ceil(chunk);
        for (i, tokens) in tokens.chunks(chunk).enumerate() {
            let rows = match want {
                Want::All => 0..tokens.len(),
                Want::Last if i + 1 == count => tokens.len() - 1..tokens.len(),
                _ => 0..0,
            };
            let known = self.pass(tokens, rows.clone(), probe.as_deref_mut()).await?;
            if let Some(probe) = probe.as_deref_mut() {
                self.probe_head(rows.clone(), &mut logits, probe).await?;
            } else if let Some(known) = known {
                logits.extend(known);
            } else if !rows.is_empty() {
                let start = clock::now();
                logits.extend(self.backend.logits(rows).await?);
                self.experts.waits.results += clock::now() - start;
                self.experts.span(What::Logits, start);
            }
            self.sequence.extend_from_slice(tokens);
            self.counters.tokens += tokens.len() as u64;
            self.experts.recorder.as_mut().map_or(Ok(()), Recorder::end)?;
        }
        Ok(logits)
    }

    /// One chunk through all layers. Logits of `rows` come with it where they were at hand.
    async fn pass(
        &mut self,
        tokens: &[u32],
        rows: Range<usize>,
        mut probe: Option<&mut Probe>,
    ) -> Result<Option<Vec<f32>>> {
        self.stop.check()?;
        let mut embeddings = self.pack.embedding_rows(tokens).await?;
        let scale = self.plan().embedding_scale;
        embeddings.iter_mut().for_each(|e| *e *= scale);
        self.backend.settle().await?;
        self.backend.begin(self.sequence.len(), &embeddings)?;
        if let Some(probe) = probe.as_deref_mut() {
            append(&mut probe.hidden, 0, embeddings);
        }
        self.experts.begin(tokens.len());
        if self.backend.works_while_called() {
            self.foresee(Origin::Embedding).await?;
            self.experts.look_ahead(self.backend.as_mut()).await?;
        }
        let layers = self.backend.plan().layers.len();
        let decodes = tokens.len() == 1;
        let runs_ahead = probe.is_none() && self.backend.run_ahead().is_some_and(|b| tokens.len() <= b.most_rows());
        let (mut layer, mut logits) = (0, None);
        while layer < layers {
            if let Some(pause) = &self.pause {
                pause().await;
            }
            self.stop.check()?;
            match self.experts.submits(layer..layers, decodes).filter(|_| runs_ahead) {
                Some(count) => {
                    (layer, logits) = self.layers_ahead(layer..layer + count, rows.clone(), decodes).await?;
                }
                None => {
                    self.layer(layer, decodes, probe.as_deref_mut()).await?;
                    layer += 1;
                }
            }
        }
        self.experts.end();
        Ok(logits)
    }

    async fn layer(&mut self, layer: usize, decodes: bool, probe: Option<&mut Probe>) -> Result<()> {
        let origin = Origin::Layer(layer as u32);
        let start = clock::now();
        let routing = self.backend.mix(layer, self.ahead(origin)).await?;
        self.experts.waits.results += clock::now() - start;
        self.mixed(layer as u32, &routing.ids, start);
        if routing.top_k > 0 {
            self.experts.routed(layer, &routing, decodes);
            self.foresee(origin).await?;
            self.experts.run(layer, self.backend.as_mut(), &self.stop).await?;
        }
        self.finish_layer(layer)?;
        if let Some(probe) = probe {
            if layer + 1 < self.plan().layers.len() {
                append(&mut probe.hidden, layer + 1, self.backend.residual().await?);
            }
            append(&mut probe.ids, layer, routing.ids);
            append(&mut probe.weights, layer, routing.weights);
        }
        Ok(())
    }

    /// Records a layer's routing, which was asked for at `start`.
    fn mixed(&mut self, layer: u32, ids: &[u32], start: f64) {
        let waited = What::Stall { layer, of: Awaited::Results };
        let what = if self.backend.works_while_called() { What::Mix { layer } } else { waited };
        self.experts.recorder.iter_mut().for_each(|r| r.routed(ids));
        self.experts.span(what, start);
    }

    fn finish_layer(&mut self, layer: usize) -> Result<()> {
        let start = self.experts.time();
        self.backend.finish_layer(layer)?;
        self.experts.span(What::Finish { layer: layer as u32 }, start);
        Ok(())
    }

    /// Layers submitted together, as far as they come. Returns where to go on, and logits of `rows` if that is the end.
    async fn layers_ahead(
        &mut self,
        layers: Range<usize>,
        rows: Range<usize>,
        decodes: bool,
    ) -> Result<(usize, Option<Vec<f32>>)> {
        let Some(backend) = self.backend.run_ahead() else {
            return Err(Error::Request("this backend does not run ahead".to_owned()));
        };
        let (first, last) = (layers.start, layers.end - 1);
        let foresee = self.experts.recorder.as_ref().map_or(0, |r| r.depth).max(self.experts.looks_ahead());
        let start = clock::now();
        let came = backend.run(layers, foresee, rows).await?;
        self.experts.waits.results += clock::now() - start;
        let next = first + came.ids.len();
        for ids in &came.ids {
            self.experts.recorder.iter_mut().for_each(|r| r.routed(ids));
        }
        let waited = if came.stopped { next - 1 } else { last };
        self.experts.span(What::Stall { layer: waited as u32, of: Awaited::Results }, start);
        self.experts.came(first, &came.ids, came.stopped, decodes);
        self.experts.predicted(Origin::Layer(next as u32 - 1), next, &came.foreseen);
        if came.stopped {
            self.experts.run(next - 1, self.backend.as_mut(), &self.stop).await?;
            self.finish_layer(next - 1)?;
        } else if came.logits.is_none() {
            self.experts.look_ahead(self.backend.as_mut()).await?;
        }
        Ok((next, came.logits))
    }

    /// Layers to forecast from a state.
    fn ahead(&self, origin: Origin) -> Range<usize> {
        let wanted = self.experts.wants(origin);
        match &self.experts.recorder {
            Some(recorder) => recorder.ahead(origin, wanted, self.plan().layers.len()),
            None => wanted,
        }
    }

    /// Forecasts the layers to come from the residual as it is.
    async fn foresee(&mut self, origin: Origin) -> Result<()> {
        if let Some(states) = self.experts.recorder.as_ref().and_then(|r| r.states.clone()) {
            let state = self.backend.residual().await?;
            states.borrow_mut().push(state);
        }
        let ahead = self.ahead(origin);
        if ahead.is_empty() {
            return Ok(());
        }
        let start = self.experts.time();
        let scores = self.backend.foresee(ahead.clone()).await?;
        self.experts.predicted(origin, ahead.start, &scores);
        self.experts.span(What::Foresee { origin }, start);
        Ok(())
    }

    /// Logits and normalised hidden rows, as many rows at a time as the head takes.
    async fn probe_head(
        &mut self,
        rows: std::ops::Range<usize>,
        logits: &mut Vec<f32>,
        probe: &mut Probe,
    ) -> Result<()> {
        let (step, last) = (self.backend.limits().head_rows, self.backend.plan().layers.len());
        for start in rows.clone().step_by(step) {
            let end = (start + step).min(rows.end);
            logits.extend(self.backend.logits(start..end).await?);
            append(&mut probe.hidden, last, self.backend.normed(end - start).await?);
        }
        Ok(())
    }
}

fn append<T>(lists: &mut Vec<Vec<T>>, index: usize, values: Vec<T>) {
    if lists.len() <= index {
        lists.resize_with(index + 1, Vec::new);
    }
    lists[index].extend(values);
}
