//! Sums over a recording.

use outrider::les::spans::{Awaited, Outcome, Span, Timing, What};
use outrider::les::trace::{Pass, Reader, Setup};
use outrider::les::{Forecast, Shape};
use serde::Serialize;

use super::Moment;

/// What the host did, in seconds or milliseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Parts {
    mix: f64,
    foresee: f64,
    run: f64,
    finish: f64,
    logits: f64,
    upload: f64,
    stall_bytes: f64,
    stall_results: f64,
    /// The rest of the passes: fetching embeddings, deciding, asking for reads.
    other: f64,
    /// From a pass to the next of one token: choosing a token, printing it.
    between: f64,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Layer {
    pub mix: f64,
    pub run: f64,
    pub finish: f64,
    pub upload: f64,
    pub stall_bytes: f64,
    pub stall_results: f64,
    /// Experts.
    pub needed: f64,
    pub missed: f64,
}

impl Parts {
    pub fn named(&self) -> [(&'static str, f64); 10] {
        [
            ("mix", self.mix),
            ("experts", self.run),
            ("finish", self.finish),
            ("logits", self.logits),
            ("forecasts", self.foresee),
            ("uploads", self.upload),
            ("stall: demand reads", self.stall_bytes),
            ("stall: readback", self.stall_results),
            ("the rest of the pass", self.other),
            ("between passes", self.between),
        ]
    }

    pub fn total(&self) -> f64 {
        self.named().iter().map(|(_, value)| value).sum()
    }

    pub fn times(&self, by: f64) -> Parts {
        Parts {
            mix: self.mix * by,
            foresee: self.foresee * by,
            run: self.run * by,
            finish: self.finish * by,
            logits: self.logits * by,
            upload: self.upload * by,
            stall_bytes: self.stall_bytes * by,
            stall_results: self.stall_results * by,
            other: self.other * by,
            between: self.between * by,
        }
    }
}

impl Layer {
    /// Milliseconds and experts a token.
    pub fn per(&self, tokens: f64) -> Layer {
        let by = 1e3 / tokens;
        Layer {
            mix: self.mix * by,
            run: self.run * by,
            finish: self.finish * by,
            upload: self.upload * by,
            stall_bytes: self.stall_bytes * by,
            stall_results: self.stall_results * by,
            needed: self.needed / tokens,
            missed: self.missed / tokens,
        }
    }
}

pub struct Account {
    pub setup: Option<Setup>,
    shape: Shape,
    expert_bytes: f64,
    pub prompt_tokens: usize,
    pub prompt_seconds: f64,
    /// Passes of one token and how long they took.
    pub times: Vec<(usize, f64)>,
    pub parts: Parts,
    pub layers: Vec<Layer>,
    pub demand_bytes: f64,
    pub speculative_bytes: f64,
    /// Seconds of all reads, and of them while the host waited for bytes.
    pub reading: f64,
    pub waited: f64,
    forecast: Forecast,
    /// Of the last pass: its waits, for reads that reach into the next, and its end.
    stalls: Vec<Span>,
    end: Option<f64>,
}

impl Account {
    pub fn new<L: Iterator<Item = std::io::Result<String>>>(reader: &Reader<L>) -> Account {
        let header = reader.header();
        Account {
            setup: header.setup.clone(),
            shape: header.shape,
            expert_bytes: header.expert_bytes as f64,
            prompt_tokens: 0,
            prompt_seconds: 0.0,
            times: Vec::new(),
            parts: Parts::default(),
            layers: vec![Layer::default(); header.shape.layers],
            demand_bytes: 0.0,
            speculative_bytes: 0.0,
            reading: 0.0,
            waited: 0.0,
            forecast: Forecast::new(header.shape),
            stalls: Vec::new(),
            end: None,
        }
    }

    pub fn add(&mut self, at: usize, pass: &Pass) {
        self.forecast.begin();
        for guess in &pass.foreseen {
            self.forecast.predicted(guess.origin, guess.layer, &guess.scores);
        }
        for (layer, ids) in (0..).zip(&pass.ids) {
            self.forecast.routed(layer, ids);
        }
        let Some(timing) = &pass.timing else { return };
        let is_stall = |span: &&Span| matches!(span.what, What::Stall { of: Awaited::Bytes, .. });
        let before = std::mem::take(&mut self.stalls);
        self.stalls = timing.spans.iter().filter(is_stall).copied().collect();
        let end = self.end.replace(timing.end);
        if pass.rows != 1 {
            self.prompt_tokens += pass.rows;
            self.prompt_seconds += timing.seconds();
            return;
        }
        // A longer break is the user thinking.
        let between = end.map(|end| timing.begin - end).filter(|gap| !self.times.is_empty() && *gap < timing.seconds());
        self.parts.between += between.unwrap_or(0.0).max(0.0);
        self.times.push((at, timing.seconds()));
        self.add_spans(timing, &before);
        self.add_misses(pass, timing);
    }

    fn add_spans(&mut self, timing: &Timing, before: &[Span]) {
        let parts = &mut self.parts;
        let mut known = 0.0;
        for span in &timing.spans {
            let seconds = span.seconds();
            let (whole, layer) = match span.what {
                What::Mix { layer } => (&mut parts.mix, Some(&mut self.layers[layer as usize].mix)),
                What::Run { layer, .. } => (&mut parts.run, Some(&mut self.layers[layer as usize].run)),
                What::Finish { layer } => (&mut parts.finish, Some(&mut self.layers[layer as usize].finish)),
                What::Upload { layer, .. } => (&mut parts.upload, Some(&mut self.layers[layer as usize].upload)),
                What::Stall { layer, of: Awaited::Bytes } => {
                    (&mut parts.stall_bytes, Some(&mut self.layers[layer as usize].stall_bytes))
                }
                What::Stall { layer, of: Awaited::Results } => {
                    (&mut parts.stall_results, Some(&mut self.layers[layer as usize].stall_results))
                }
                What::Foresee { .. } => (&mut parts.foresee, None),
                What::Logits => (&mut parts.logits, None),
                What::Read { demand, outcome, .. } => {
                    // What was cancelled was taken back before it began.
                    if outcome != Outcome::Cancelled {
                        let bytes = if demand { &mut self.demand_bytes } else { &mut self.speculative_bytes };
                        *bytes += self.expert_bytes;
                        self.reading += seconds;
                        let stalls = before.iter().chain(&self.stalls);
                        self.waited += stalls.map(|stall| overlap(span, stall.begin, stall.end)).sum::<f64>();
                    }
                    continue;
                }
            };
            *whole += seconds;
            layer.into_iter().for_each(|layer| *layer += seconds);
            known += seconds;
        }
        parts.other += (timing.seconds() - known).max(0.0);
    }

    /// An expert is missed that arrives after its layer's routing was known.
    fn add_misses(&mut self, pass: &Pass, timing: &Timing) {
        let mut known = vec![f64::INFINITY; self.shape.layers];
        for span in &timing.spans {
            if let What::Mix { layer } | What::Stall { layer, of: Awaited::Results } = span.what {
                known[layer as usize] = span.end;
            }
        }
        for (ids, layer) in pass.ids.iter().zip(&mut self.layers) {
            layer.needed += ids.len() as f64;
        }
        for span in &timing.spans {
            if let What::Read { layer, expert, outcome: Outcome::Arrived, .. } = span.what {
                let at = layer as usize;
                let missed = span.end > known[at] && pass.ids[at].contains(&expert);
                self.layers[at].missed += f64::from(u8::from(missed));
            }
        }
    }

    /// By distance, the layers together.
    pub fn recall(&self) -> impl Iterator<Item = (usize, f64)> {
        let of = move |distance| {
            let all = (0..self.shape.layers).filter_map(move |layer| self.forecast.recall(layer, distance));
            let (found, of) = all.fold((0, 0), |(found, of), r| (found + r.found, of + r.of));
            (of > 0).then(|| (distance, found as f64 / of as f64))
        };
        (1..=self.shape.layers).filter_map(of)
    }

    pub fn slowest_and_median(&self) -> Option<(Moment, Moment)> {
        let mut times = self.times.clone();
        times.sort_by(|a, b| a.1.total_cmp(&b.1));
        let moment = |&(pass, seconds): &(usize, f64)| Moment { pass, milliseconds: 1e3 * seconds };
        Some((moment(times.last()?), moment(&times[times.len() / 2])))
    }
}

/// Seconds of a span between two times.
pub fn overlap(span: &Span, begin: f64, end: f64) -> f64 {
    (span.end.min(end) - span.begin.max(begin)).max(0.0)
}
