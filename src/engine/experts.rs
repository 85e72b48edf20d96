//! Carries out what the scheduler asks for: reads experts from flash, puts them into slots, runs them.
//!
//! Reads outlive the layer and the pass that began them, so that a guess at the next token goes on while the host samples.
//! Only a pass that was given up, by an error or because its future was dropped, takes them with it.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;

use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::future::{AbortHandle, Abortable, LocalBoxFuture, poll_fn};
use futures_util::stream::FuturesUnordered;

use super::Stop;
use super::record::Recorder;
use crate::backend::{AheadCosts, Backend, Place, Routing};
use crate::clock;
use crate::error::{Error, Result};
use crate::flash::Bytes;
use crate::les::spans::{Awaited, Outcome, What};
use crate::les::{
    Action, Counts, Event, Forecast, HotList, Key, Load, Origin, Pool, RunAhead, Scheduler, Settings, Shape,
};
use crate::pack::Pack;

/// Seconds without a single answer after which flash is taken for dead.
const PATIENCE: f64 = 30.0;

/// Seconds the host looks again and again before it sleeps: waking it takes the system longer than many a read.
#[cfg(not(target_arch = "wasm32"))]
pub const ALERT: f64 = 100e-6;
#[cfg(target_arch = "wasm32")]
pub const ALERT: f64 = 0.0;

/// Where the time went, in seconds since the engine was made.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waits {
    /// Layers waited for experts to be read.
    pub flash: f64,
    /// The host waited for results: a layer's routing, or logits. With a CPU backend that is their computation.
    pub results: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Bytecounts {
    pub demand: u64,
    pub guess: u64,
}

type Read = LocalBoxFuture<'static, (Key, Option<Result<Bytes>>)>;

pub(super) struct Experts {
    pack: Rc<Pack>,
    scheduler: Scheduler,
    reads: FuturesUnordered<Read>,
    cancels: HashMap<Key, AbortHandle>,
    landed: HashMap<Key, Bytes>,
    /// A pass was begun and not ended.
    passing: bool,
    /// Why the last read failed.
    error: Option<Error>,
    /// Reads an expert is split into: 1, but for comparison.
    pieces: usize,
    load: Load,
    pub recorder: Option<Recorder>,
    /// Of prefill, and of one token; None where the backend does not run ahead.
    run_ahead: Option<[RunAhead; 2]>,
    pub bytes: Bytecounts,
    pub waits: Waits,
}

impl Experts {
    pub fn new(pack: Rc<Pack>, scheduler: Scheduler, costs: Option<AheadCosts>) -> Experts {
        Experts {
            pack,
            scheduler,
            reads: FuturesUnordered::new(),
            cancels: HashMap::new(),
            landed: HashMap::new(),
            passing: false,
            error: None,
            pieces: 1,
            load: Load::default(),
            recorder: None,
            run_ahead: costs.map(|costs| [RunAhead::new(costs), RunAhead::new(costs)]),
            bytes: Bytecounts::default(),
            waits: Waits::default(),
        }
    }

    pub fn shape(&self) -> Shape {
        self.scheduler.shape()
    }

    pub fn pool(&self) -> &Pool {
        self.scheduler.pool()
    }

    pub fn forecast(&self) -> &Forecast {
        self.scheduler.forecast()
    }

    pub fn counts(&self) -> Counts {
        self.scheduler.counts()
    }

    pub fn settings(&self) -> &Settings {
        self.scheduler.settings()
    }

    pub fn set_settings(&mut self, settings: Settings) {
        self.scheduler.set_settings(settings);
    }

    pub fn hot_list(&self) -> HotList {
        self.scheduler.hot_list()
    }

    pub fn set_hot_list(&mut self, list: &HotList) {
        self.scheduler.set_hot_list(list);
    }

    pub fn set_pieces(&mut self, pieces: usize) {
        self.pieces = pieces.max(1);
    }

    /// Layers that a forecast from `layer` is of use for.
    pub fn wants(&self, origin: Origin) -> Range<usize> {
        let wants = match origin {
            Origin::Layer(layer) => self.scheduler.wants(Some(layer)),
            Origin::Embedding => self.scheduler.wants(None),
        };
        wants.start as usize..wants.end as usize
    }

    /// Layers that forecasts are made for at most.
    pub fn looks_ahead(&self) -> usize {
        self.scheduler.wants(None).len()
    }

    /// A pass over `rows` tokens begins.
    pub fn begin(&mut self, rows: usize) {
        if std::mem::replace(&mut self.passing, true) {
            self.abandon();
        }
        self.scheduler.on(Event::Begin { rows });
        self.scheduler.on(Event::Flash { busy: self.load.share(clock::now(), self.waits.flash) });
        self.error = None;
        self.recorder.iter_mut().for_each(|r| r.begin(rows));
    }

    /// The time, if it is recorded.
    pub fn time(&self) -> f64 {
        if self.recorder.is_some() { clock::now() } else { 0.0 }
    }

    /// Records what began at a [`time`](Self::time) and ends now.
    pub fn span(&mut self, what: What, begin: f64) {
        self.recorder.iter_mut().for_each(|r| r.span(what, begin));
    }

    /// The pass has come to its end.
    pub fn end(&mut self) {
        self.passing = false;
    }

    /// Lets go of all reads: one of them may be why the last pass was given up.
    fn abandon(&mut self) {
        self.reads.clear();
        for (key, _) in self.cancels.drain() {
            self.recorder.iter_mut().for_each(|r| r.read_ended(key, Outcome::Cancelled));
            self.scheduler.on(Event::Cancelled { key });
        }
    }

    /// Scores from `origin` for the layers from `first` on.
    pub fn predicted(&mut self, origin: Origin, first: usize, scores: &[Vec<f32>]) {
        // There are none of a layer without experts.
        for (layer, scores) in (first as u32..).zip(scores).filter(|(_, scores)| !scores.is_empty()) {
            self.scheduler.on(Event::Predicted { origin, layer, scores });
            self.recorder.iter_mut().for_each(|r| r.foreseen(origin, layer, scores));
        }
    }

    /// Begins what can be begun without anything being waited for, such as reading guesses at the next layers.
    pub async fn look_ahead(&mut self, backend: &mut dyn Backend) -> Result<()> {
        self.take_up();
        loop {
            backend.settle().await?;
            let Some(action) = self.scheduler.next_action() else { return Ok(()) };
            self.act(action, usize::MAX, backend)?;
        }
    }

    /// Reads what is worth reading while nothing is waited for, to its end.
    pub async fn warm(&mut self, backend: &mut dyn Backend, stop: &Stop) -> Result<()> {
        loop {
            self.look_ahead(backend).await?;
            if !self.scheduler.is_reading() {
                return Ok(());
            }
            self.next_ended(stop).await?;
        }
    }

    /// A layer's routing is known: begins to read what it lacks.
    pub fn routed(&mut self, layer: usize, routing: &Routing, decodes: bool) {
        self.chosen(Event::Routed { layer: layer as u32, ids: &routing.ids });
        self.learn(1, self.scheduler.lacks(), decodes);
    }

    /// The same of layers that were submitted together, the last of which may have `stopped` the pass.
    pub fn came(&mut self, first: usize, ids: &[Vec<u32>], stopped: bool, decodes: bool) {
        let last = (first + ids.len()) as u32 - 1;
        for (layer, ids) in (first as u32..).zip(ids).filter(|(_, ids)| !ids.is_empty()) {
            self.chosen(match stopped && layer == last {
                true => Event::Routed { layer, ids },
                false => Event::Ran { layer, ids },
            });
        }
        self.learn(ids.len(), stopped, decodes);
    }

    fn learn(&mut self, layers: usize, stopped: bool, decodes: bool) {
        if let Some(run_ahead) = &mut self.run_ahead {
            run_ahead[usize::from(decodes)].came(layers, !stopped);
        }
    }

    /// What running ahead was measured to cost.
    pub fn ahead_costs(&self) -> Option<AheadCosts> {
        self.run_ahead.as_ref().map(|[kind, _]| kind.costs())
    }

    /// How many of the layers that are left to submit at once, where the backend runs ahead; None to go layer by layer.
    pub fn submits(&self, left: Range<usize>, decodes: bool) -> Option<usize> {
        let holds = left.map(|layer| self.pool().holds_layer(layer as u32));
        self.run_ahead.as_ref()?[usize::from(decodes)].layers(holds, self.scheduler.run_ahead())
    }

    fn chosen(&mut self, event: Event) {
        self.take_up();
        self.scheduler.on(event);
        while let Some(Action::Read { key, demand }) = self.scheduler.next_read() {
            self.read(key, demand);
        }
    }

    /// Runs the experts of the layer that was routed last.
    ///
    /// # Errors
    /// Those of a read that failed twice; [`Error::Aborted`]; [`Error::Storage`] when flash does not answer any more.
    pub async fn run(&mut self, layer: usize, backend: &mut dyn Backend, stop: &Stop) -> Result<()> {
        loop {
            self.take_up();
            // Before an action is taken up, which must not be lost when this future is dropped.
            backend.settle().await?;
            match self.scheduler.next_action() {
                Some(action) => self.act(action, layer, backend)?,
                None if self.scheduler.layer_done() => return Ok(()),
                None => {
                    // What is there is computed meanwhile.
                    backend.start()?;
                    self.wait(layer, stop).await?;
                }
            }
        }
    }

    fn act(&mut self, action: Action, layer: usize, backend: &mut dyn Backend) -> Result<()> {
        match action {
            Action::Read { key, demand } => self.read(key, demand),
            Action::Cancel { key } => {
                if let Some(handle) = self.cancels.remove(&key) {
                    handle.abort();
                }
            }
            Action::Upload { key, slot } => {
                let bytes = self.landed.remove(&key).expect("what is uploaded has arrived");
                let start = self.time();
                let place = Place { layer: key.layer as usize, expert: key.expert as usize };
                backend.write_slot(slot as usize, place, &bytes)?;
                self.span(What::Upload { layer: key.layer, expert: key.expert }, start);
            }
            Action::Drop { key } => drop(self.landed.remove(&key)),
            Action::Run { items } => {
                let start = self.time();
                backend.run_experts(layer, &items)?;
                self.span(What::Run { layer: layer as u32, pairs: items.len() as u32 }, start);
            }
            Action::Lost { key } => {
                let unknown = || Error::Storage { path: format!("{key:?}"), reason: "its read failed".to_owned() };
                return Err(self.error.take().unwrap_or_else(unknown));
            }
        }
        Ok(())
    }

    fn read(&mut self, key: Key, demand: bool) {
        let bytes = self.pack.expert_bytes() as u64;
        *(if demand { &mut self.bytes.demand } else { &mut self.bytes.guess }) += bytes;
        self.recorder.iter_mut().for_each(|r| r.read_began(key, demand));
        let (pack, pieces) = (self.pack.clone(), self.pieces);
        let (handle, registration) = AbortHandle::new_pair();
        let read = async move { pack.expert_in(key.layer as usize, key.expert as usize, pieces).await };
        let read = async move { (key, Abortable::new(read, registration).await.ok()) };
        self.cancels.insert(key, handle);
        self.reads.push(read.boxed_local());
        // Polled once so that it is on its way before anything is computed.
        self.take_up();
    }

    /// Takes up every read that has ended, without waiting.
    fn take_up(&mut self) {
        while let Some(Some(ended)) = self.reads.next().now_or_never() {
            self.ended(ended);
        }
    }

    fn ended(&mut self, (key, result): (Key, Option<Result<Bytes>>)) {
        self.cancels.remove(&key);
        if let Some(recorder) = &mut self.recorder {
            let outcome = match &result {
                Some(Ok(_)) => Outcome::Arrived,
                Some(Err(_)) => Outcome::Failed,
                None => Outcome::Cancelled,
            };
            recorder.read_ended(key, outcome);
        }
        self.scheduler.on(match result {
            Some(Ok(bytes)) => {
                self.landed.insert(key, bytes);
                Event::Arrived { key }
            }
            Some(Err(error)) => {
                self.error = Some(error);
                Event::Failed { key }
            }
            None => Event::Cancelled { key },
        });
    }

    /// A layer waits for a read to end.
    async fn wait(&mut self, layer: usize, stop: &Stop) -> Result<()> {
        let start = clock::now();
        self.next_ended(stop).await?;
        self.waits.flash += clock::now() - start;
        self.span(What::Stall { layer: layer as u32, of: Awaited::Bytes }, start);
        Ok(())
    }

    /// Waits for a read to end, and takes it up.
    async fn next_ended(&mut self, stop: &Stop) -> Result<()> {
        let start = clock::now();
        let mut alarm = None;
        let ended = poll_fn(|context| {
            loop {
                if stop.poll(context).is_ready() {
                    return Poll::Ready(Err(Error::Aborted));
                }
                if let Poll::Ready(ended) = self.reads.poll_next_unpin(context) {
                    return Poll::Ready(Ok(ended));
                }
                if clock::now() >= start + ALERT {
                    break;
                }
                std::hint::spin_loop();
            }
            let alarm = alarm.get_or_insert_with(|| clock::sleep_until(start + PATIENCE));
            alarm.poll_unpin(context).map(|()| {
                let reason = format!("it has not answered for {PATIENCE} seconds; reload the page or check the disk");
                Err(Error::Storage { path: "experts".to_owned(), reason })
            })
        });
        let Some(ended) = ended.await? else {
            let reason = "the scheduler waits for a read that was never begun".to_owned();
            return Err(Error::Storage { path: "experts".to_owned(), reason });
        };
        self.ended(ended);
        Ok(())
    }
}
