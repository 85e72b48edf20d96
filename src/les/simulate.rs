//! The scheduler in virtual time: the same decisions, carried out against a model of the machine instead of the machine.
//!
//! What is modelled is one host thread that computes, or hands work to a device that does it in order while the host goes
//! on, and flash beside them. Events reach the scheduler when the engine would see them: between one thing it does and the
//! next.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::trace::{Pass, Trace};
use super::{Action, Counts, Event, FlashModel, FlashSpeed, Key, Load, Origin, Pool, RunAhead, Scheduler, Settings};
use crate::backend::{AheadCosts, PAIRS_AHEAD};

/// A machine, in seconds and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub flash: FlashSpeed,
    /// One token through one layer up to its router.
    pub mix: f64,
    /// One expert applied to one token.
    pub expert: f64,
    /// The rest of a layer for one token.
    pub finish: f64,
    /// Logits of one token, and choosing the next.
    pub head: f64,
    /// One later layer's router applied to one token.
    pub foresee: f64,
    /// An expert's bytes into a slot.
    pub upload: f64,
    /// From the end of a computation until the host has its result. Where that takes any time a device computes, which looks
    /// experts up itself so that layers can be submitted before their routing is known.
    pub readback: f64,
    /// A layer that was submitted so and not reached.
    #[serde(default)]
    pub skipped: f64,
    /// What a pass takes the host beside all else: fetching embeddings, deciding.
    #[serde(default)]
    pub begin: f64,
    /// What a read takes the host: asking for it, taking it up.
    #[serde(default)]
    pub request: f64,
    /// How long a waiting host looks again and again before it sleeps, and how late it is then to wake.
    #[serde(default)]
    pub alert: f64,
    #[serde(default)]
    pub wake: f64,
}

impl Machine {
    /// Seconds of computation a token takes with every expert resident. Its results come back once.
    pub fn compute(&self, layers: usize, top_k: usize) -> f64 {
        let layer = self.mix + top_k as f64 * self.expert + self.finish;
        self.begin + layers as f64 * layer + self.head + self.readback
    }
}

/// What a run took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Outcome {
    pub tokens: u64,
    pub seconds: f64,
    /// Nothing computed: what there was to do waited for bytes, and for results to come back.
    pub stall_bytes: f64,
    pub stall_roundtrip: f64,
    /// Layers that waited for bytes, and results that came back.
    pub stalls: u64,
    pub readbacks: u64,
    pub demand_bytes: u64,
    pub speculative_bytes: u64,
    pub hits: u64,
    pub missed: u64,
}

impl Outcome {
    pub fn since(&self, before: &Outcome) -> Outcome {
        Outcome {
            tokens: self.tokens - before.tokens,
            seconds: self.seconds - before.seconds,
            stall_bytes: self.stall_bytes - before.stall_bytes,
            stall_roundtrip: self.stall_roundtrip - before.stall_roundtrip,
            stalls: self.stalls - before.stalls,
            readbacks: self.readbacks - before.readbacks,
            demand_bytes: self.demand_bytes - before.demand_bytes,
            speculative_bytes: self.speculative_bytes - before.speculative_bytes,
            hits: self.hits - before.hits,
            missed: self.missed - before.missed,
        }
    }
}

/// A read under way; the one that ends first is the greatest.
#[derive(Debug, PartialEq)]
struct Read {
    end: f64,
    key: Key,
}

impl Eq for Read {}

impl PartialOrd for Read {
    fn partial_cmp(&self, other: &Read) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Read {
    fn cmp(&self, other: &Read) -> Ordering {
        other.end.total_cmp(&self.end).then_with(|| other.key.cmp(&self.key))
    }
}

/// A scheduler and the time it has come to.
pub struct Simulation {
    machine: Machine,
    flash: FlashModel,
    scheduler: Scheduler,
    expert_bytes: usize,
    /// Reads an expert is split into.
    pieces: usize,
    now: f64,
    /// When a device has done all it was given.
    device: f64,
    /// Seconds the host has waited for reads.
    waited: f64,
    reads: BinaryHeap<Read>,
    counted: Outcome,
    load: Load,
    /// Of prefill, and of one token.
    run_ahead: [RunAhead; 2],
}

impl Simulation {
    pub fn new(trace: &Trace, slots: usize, settings: Settings, machine: Machine) -> Simulation {
        let costs = AheadCosts { round_trip: machine.readback, skipped: machine.skipped };
        Simulation {
            run_ahead: [RunAhead::new(costs), RunAhead::new(costs)],
            machine,
            flash: FlashModel::new(machine.flash),
            scheduler: Scheduler::new(trace.shape, Pool::for_layers(trace.shape, trace.routed(), slots), settings),
            expert_bytes: trace.expert_bytes,
            pieces: 1,
            now: 0.0,
            device: 0.0,
            waited: 0.0,
            reads: BinaryHeap::new(),
            counted: Outcome::default(),
            load: Load::default(),
        }
    }

    /// Goes on with another machine; what is being read arrives as it would have.
    pub fn set_machine(&mut self, machine: Machine) {
        self.machine = machine;
        self.flash = FlashModel::new(machine.flash);
    }

    /// Reads every expert in several reads.
    pub fn set_pieces(&mut self, pieces: usize) {
        self.pieces = pieces.max(1);
    }

    pub fn outcome(&self) -> Outcome {
        let Counts { hits, .. } = self.scheduler.counts();
        Outcome { seconds: self.now, hits, missed: self.scheduler.counts().missed(), ..self.counted }
    }

    /// Runs a pass. `decodes`: its last token gets logits.
    pub fn pass(&mut self, pass: &Pass, decodes: bool) {
        self.now += self.machine.begin;
        self.scheduler.on(Event::Begin { rows: pass.rows });
        self.scheduler.on(Event::Flash { busy: self.load.share(self.now, self.waited) });
        if !self.has_device() {
            let ahead = self.scheduler.wants(None);
            self.compute(self.foreseeing(pass, Origin::Embedding, &ahead));
            self.predicted(pass, Origin::Embedding, ahead);
            self.act();
        }
        let layers = pass.ids.len() as u32;
        let runs_ahead = self.has_device() && pass.rows * self.scheduler.shape().top_k <= PAIRS_AHEAD;
        let (mut layer, mut whole) = (0, false);
        while layer < layers {
            let holds = (layer as usize..pass.ids.len()).map(|layer| self.scheduler.pool().holds_layer(layer as u32));
            let most = if runs_ahead { self.scheduler.run_ahead() } else { 0 };
            match self.run_ahead[usize::from(pass.rows == 1)].layers(holds, most) {
                Some(count) => (layer, whole) = self.layers_ahead(pass, layer..layer + count as u32, decodes),
                None => {
                    self.layer(pass, layer);
                    layer += 1;
                }
            }
        }
        // What came to the end in one submission has brought the logits.
        if decodes && !whole {
            self.compute(self.machine.head);
            self.read_back();
        }
        self.counted.tokens += pass.rows as u64;
    }

    fn layer(&mut self, pass: &Pass, layer: u32) {
        let ahead = self.scheduler.wants(Some(layer));
        self.compute(pass.rows as f64 * self.machine.mix);
        let foreseen = self.foreseeing(pass, Origin::Layer(layer), &ahead);
        if self.has_device() {
            // They come back together.
            self.compute(foreseen);
            self.read_back();
        }
        self.chosen(Event::Routed { layer, ids: &pass.ids[layer as usize] });
        self.run_ahead[usize::from(pass.rows == 1)].came(1, !self.scheduler.lacks());
        if !self.has_device() {
            self.compute(foreseen);
        }
        self.predicted(pass, Origin::Layer(layer), ahead);
        self.complete(pass);
    }

    /// Layers submitted together, as far as they come. Returns where to go on, and whether that is the end with the logits.
    fn layers_ahead(&mut self, pass: &Pass, layers: Range<u32>, decodes: bool) -> (u32, bool) {
        let machine = self.machine;
        let rows = pass.rows as f64;
        let (mut next, mut stopped) = (layers.start, false);
        while next < layers.end && !stopped {
            let ids = &pass.ids[next as usize];
            let lacks = |expert: &u32| self.scheduler.pool().slot_of(Key { layer: next, expert: *expert }).is_none();
            stopped = ids.iter().any(lacks);
            let experts = if stopped { 0.0 } else { ids.len() as f64 * machine.expert + rows * machine.finish };
            self.compute(rows * machine.mix + experts);
            next += 1;
        }
        let ends = !stopped && next as usize == pass.ids.len();
        self.compute(f64::from(layers.end - next) * machine.skipped);
        self.compute(if ends && decodes { machine.head } else { 0.0 });
        let ahead = self.scheduler.wants(Some(next - 1));
        self.compute(ahead.len() as f64 * rows * machine.foresee);
        self.read_back();
        for layer in layers.start..next {
            let ids = &pass.ids[layer as usize];
            self.chosen(match stopped && layer + 1 == next {
                true => Event::Routed { layer, ids },
                false => Event::Ran { layer, ids },
            });
        }
        self.run_ahead[usize::from(pass.rows == 1)].came((next - layers.start) as usize, !stopped);
        self.predicted(pass, Origin::Layer(next - 1), ahead);
        if stopped {
            self.complete(pass);
        } else {
            self.act();
        }
        (next, ends)
    }

    fn has_device(&self) -> bool {
        self.machine.readback > 0.0
    }

    /// Something is computed, by the host itself or as the next thing a device does.
    fn compute(&mut self, seconds: f64) {
        match self.has_device() {
            true => self.device = self.device.max(self.now) + seconds,
            false => self.now += seconds,
        }
    }

    /// A device's result comes back.
    fn read_back(&mut self) {
        if self.has_device() {
            self.now = self.now.max(self.device) + self.machine.readback;
            self.counted.stall_roundtrip += self.machine.readback;
            self.counted.readbacks += 1;
        }
    }

    /// A layer's choice is known.
    fn chosen(&mut self, event: Event) {
        self.deliver();
        self.scheduler.on(event);
        while let Some(Action::Read { key, demand }) = self.scheduler.next_read() {
            self.read(key, demand);
        }
    }

    /// Runs what the layer at hand still needs, and finishes it.
    fn complete(&mut self, pass: &Pass) {
        let before = self.counted.stall_bytes;
        loop {
            self.act();
            if self.scheduler.layer_done() {
                break;
            }
            let end = self.reads.peek().expect("the scheduler waits for a read").end;
            if end > self.now {
                let late = if end - self.now > self.machine.alert { self.machine.wake } else { 0.0 };
                self.counted.stall_bytes += (end + late - self.now.max(self.device)).max(0.0);
                self.waited += end + late - self.now;
                self.now = end + late;
            }
        }
        self.counted.stalls += u64::from(self.counted.stall_bytes > before);
        self.compute(pass.rows as f64 * self.machine.finish);
    }

    /// Seconds that forecasts take.
    fn foreseeing(&self, pass: &Pass, origin: Origin, ahead: &Range<u32>) -> f64 {
        let known = pass.foreseen.iter().filter(|g| g.origin == origin && ahead.contains(&g.layer)).count();
        known as f64 * pass.rows as f64 * self.machine.foresee
    }

    fn predicted(&mut self, pass: &Pass, origin: Origin, ahead: Range<u32>) {
        for guess in pass.foreseen.iter().filter(|g| g.origin == origin && ahead.contains(&g.layer)) {
            self.scheduler.on(Event::Predicted { origin, layer: guess.layer, scores: &guess.scores });
        }
    }

    fn deliver(&mut self) {
        while let Some(read) = self.reads.peek().filter(|read| read.end <= self.now) {
            let key = read.key;
            self.reads.pop();
            self.scheduler.on(Event::Arrived { key });
        }
    }

    fn read(&mut self, key: Key, demand: bool) {
        let bytes = self.expert_bytes as u64;
        *(if demand { &mut self.counted.demand_bytes } else { &mut self.counted.speculative_bytes }) += bytes;
        let mut end = self.now;
        for _ in 0..self.pieces {
            end = self.flash.read(self.now, self.expert_bytes / self.pieces);
            self.now += self.machine.request;
        }
        self.reads.push(Read { end, key });
    }

    /// Does what there is to do.
    fn act(&mut self) {
        loop {
            self.deliver();
            match self.scheduler.next_action() {
                Some(Action::Read { key, demand }) => self.read(key, demand),
                // A read that was asked for is on its way: the model has no queue to take it out of.
                Some(Action::Cancel { .. } | Action::Drop { .. }) => {}
                Some(Action::Upload { .. }) => self.now += self.machine.upload,
                Some(Action::Run { items }) => self.compute(items.len() as f64 * self.machine.expert),
                Some(Action::Lost { .. }) => unreachable!("no read fails here"),
                None => return,
            }
        }
    }
}

/// Simulates a trace's passes, each of which gets logits, after `warm` others that fill the pool.
pub fn run(trace: &Trace, slots: usize, settings: Settings, machine: Machine, warm: usize) -> Outcome {
    let mut simulation = Simulation::new(trace, slots, settings, machine);
    let (before, after) = trace.passes.split_at(warm);
    before.iter().for_each(|pass| simulation.pass(pass, true));
    let start = simulation.outcome();
    after.iter().for_each(|pass| simulation.pass(pass, true));
    simulation.outcome().since(&start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::les::Shape;

    const SHAPE: Shape = Shape { layers: 2, experts: 4, top_k: 1 };

    fn machine() -> Machine {
        let flash = FlashSpeed { bandwidth: 100.0, latency: 0.0, lanes: 1 };
        Machine {
            flash,
            mix: 1.0,
            expert: 1.0,
            finish: 1.0,
            head: 1.0,
            foresee: 0.0,
            upload: 0.0,
            ..Machine::default()
        }
    }

    fn trace(foreseen: bool) -> Trace {
        // Token by token other experts, so that nothing is there already.
        let pass = |token: u32| {
            let expert = token % 4;
            let scores = (0..4).map(|e| if e == expert { 9.0 } else { 0.1 * e as f32 }).collect();
            let guess = Foreseen { origin: Origin::Layer(0), layer: 1, scores };
            let foreseen = if foreseen { vec![guess] } else { vec![] };
            Pass { rows: 1, ids: vec![vec![expert]; 2], foreseen, timing: None }
        };
        Trace { passes: (0..40).map(pass).collect(), ..Trace::new(SHAPE, 100) }
    }

    fn seconds(trace: &Trace, slots: usize, settings: Settings) -> f64 {
        let mut simulation = Simulation::new(trace, slots, settings, machine());
        for pass in &trace.passes[..36] {
            simulation.pass(pass, true);
        }
        let before = simulation.outcome();
        for pass in &trace.passes[36..] {
            simulation.pass(pass, true);
        }
        simulation.outcome().since(&before).seconds / 4.0
    }

    use crate::les::trace::Foreseen;

    /// With everything there, one result of a token comes back; and layers that wait for reads are waited for as before.
    #[test]
    fn layers_are_submitted_ahead() {
        let device = Machine { readback: 1.0, ..machine() };
        let trace = trace(false);
        let run = |slots, run_ahead| run(&trace, slots, Settings { run_ahead, ..Settings::default() }, device, 36);
        let (one_by_one, ahead) = (run(8, 0), run(8, usize::MAX));
        assert_eq!((one_by_one.readbacks, ahead.readbacks), (4 * 3, 4));
        assert_eq!((one_by_one.seconds, ahead.seconds), (4.0 * 10.0, 4.0 * 8.0));
        assert_eq!(device.compute(2, 1), 8.0);
        // Every layer waits for a read of 1 and for its choice.
        let (one_by_one, ahead) = (run(2, 0), run(2, usize::MAX));
        assert_eq!((one_by_one.seconds, ahead.seconds), (4.0 * 12.0, 4.0 * 12.0));
        assert_eq!((ahead.readbacks, ahead.stall_bytes, ahead.stalls), (4 * 3, 4.0 * 2.0, 4 * 2));
    }

    /// A device computes what is there while the host waits for the rest and puts it into a slot.
    #[test]
    fn uploads_hide_behind_a_device() {
        // Every token finds one of its two experts.
        let pass = |token: u32| Pass { rows: 1, ids: vec![vec![token % 4, (token + 1) % 4]], ..Pass::default() };
        let trace =
            Trace { passes: (0..40).map(pass).collect(), ..Trace::new(Shape { layers: 1, experts: 4, top_k: 2 }, 100) };
        let seconds = |upload| {
            let machine = Machine { readback: 0.5, expert: 3.0, upload, ..machine() };
            run(&trace, 2, Settings { run_ahead: 0, ..Settings::default() }, machine, 36)
        };
        for upload in [0.0, 1.0] {
            let outcome = seconds(upload);
            assert_eq!((outcome.seconds, outcome.stall_bytes), (4.0 * 10.0, 0.0), "{upload}");
        }
        assert_eq!(seconds(3.0).seconds, 4.0 * 11.0);
    }

    #[test]
    fn reads_hide_behind_computation_when_foreseen() {
        let settings = Settings { reads: 2, ..Settings::default() };
        // 7 to compute; without a forecast each of two layers waits for its read of 1.
        assert_eq!(seconds(&trace(false), 8, settings), 7.0);
        assert_eq!(seconds(&trace(false), 2, settings), 9.0);
        assert_eq!(seconds(&trace(true), 2, settings), 8.0);
        assert_eq!(machine().compute(2, 1), 7.0);
    }
}
