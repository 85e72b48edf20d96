//! What passes go through, handed out pass by pass as they end.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use crate::clock;
use crate::error::Result;
use crate::les::spans::{Outcome, Span, Timing, What};
use crate::les::trace::{Foreseen, Pass};
use crate::les::{Key, Origin};

/// Takes a pass that has ended. Its error becomes that of the call that ran the pass.
pub type OnPass = Box<dyn FnMut(Pass) -> Result<()>>;

pub(super) struct Recorder {
    /// Layers ahead whose forecasts are recorded.
    pub depth: usize,
    /// Takes what forecasts are made from, if that is recorded too; then with every router's own scores.
    pub states: Option<Rc<RefCell<Vec<Vec<f32>>>>>,
    start: f64,
    pass: Option<Pass>,
    begin: f64,
    spans: Vec<Span>,
    /// Reads under way: when they began, and why.
    reads: HashMap<Key, (f64, bool)>,
    on_pass: OnPass,
}

impl Recorder {
    pub fn new(depth: usize, on_pass: OnPass) -> Recorder {
        let start = clock::now();
        Recorder {
            depth,
            states: None,
            start,
            pass: None,
            begin: 0.0,
            spans: Vec::new(),
            reads: HashMap::new(),
            on_pass,
        }
    }

    /// Layers whose forecasts from `origin` are recorded.
    pub fn ahead(&self, origin: Origin, wanted: Range<usize>, layers: usize) -> Range<usize> {
        let start = match origin {
            Origin::Layer(layer) if self.states.is_some() => layer as usize,
            _ => wanted.start,
        };
        start..(wanted.start + self.depth).min(layers).max(wanted.end)
    }

    /// Seconds since the recording began.
    fn now(&self) -> f64 {
        self.at(clock::now())
    }

    /// The same for a time of the clock, to the nanosecond, which keeps lines short.
    fn at(&self, time: f64) -> f64 {
        ((time - self.start).max(0.0) * 1e9).round() / 1e9
    }

    /// A pass begins. One that was given up is not recorded.
    pub fn begin(&mut self, rows: usize) {
        if self.pass.replace(Pass { rows, ..Pass::default() }).is_some() {
            self.spans.clear();
        }
        self.begin = self.now();
    }

    pub fn end(&mut self) -> Result<()> {
        let Some(pass) = self.pass.take() else { return Ok(()) };
        let timing = Timing { begin: self.begin, end: self.now(), spans: std::mem::take(&mut self.spans) };
        (self.on_pass)(Pass { timing: Some(timing), ..pass })
    }

    pub fn routed(&mut self, ids: &[u32]) {
        self.pass.iter_mut().for_each(|pass| pass.ids.push(ids.to_vec()));
    }

    pub fn foreseen(&mut self, origin: Origin, layer: u32, scores: &[f32]) {
        if origin.distance(layer) > self.depth {
            return;
        }
        let foreseen = |scores: &[f32]| Foreseen { origin, layer, scores: scores.to_vec() };
        self.pass.iter_mut().for_each(|pass| pass.foreseen.push(foreseen(scores)));
    }

    /// What began at a time of the clock and ends now.
    pub fn span(&mut self, what: What, begin: f64) {
        let span = Span { what, begin: self.at(begin), end: self.now() };
        self.spans.push(span);
    }

    pub fn read_began(&mut self, key: Key, demand: bool) {
        self.reads.insert(key, (clock::now(), demand));
    }

    pub fn read_ended(&mut self, key: Key, outcome: Outcome) {
        // One that began before the recording is not in it.
        if let Some((begin, demand)) = self.reads.remove(&key) {
            self.span(What::Read { layer: key.layer, expert: key.expert, demand, outcome }, begin);
        }
    }
}
