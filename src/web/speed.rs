//! When the tokens of a reply came, and what each waited for.

use std::collections::VecDeque;

use serde::Serialize;
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

use crate::engine::Counters;
use crate::les::spans::{Span, Timing};

/// Tokens that are remembered one by one: a reply may be as long as the context.
const REMEMBERED: usize = 128;
/// Spans that are remembered of all of them, but for those of the latest, which are there however many they are.
const SPANS: usize = 2048;

#[wasm_bindgen]
extern "C" {
    /// Milliseconds since some moment.
    #[wasm_bindgen(js_namespace = performance)]
    pub fn now() -> f64;
}

/// Of the reply in progress, or the last one.
#[derive(Debug, Default)]
pub struct Speed {
    prompt: usize,
    /// Tokens of the prompt that were not run.
    cached: usize,
    started: f64,
    first: f64,
    last: f64,
    tokens: usize,
    /// What the engine had counted when the last token came.
    counted: Counters,
    /// The latest first.
    latest: VecDeque<TokenTimes>,
}

/// The package's `TokenTimes`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenTimes {
    milliseconds: f64,
    flash: f64,
    results: f64,
    hits: u64,
    misses: u64,
    bytes_read: u64,
    bytes_guessed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pass: Option<PassTimes>,
}

/// The package's type of that name: what happened when, in milliseconds since the pass began.
#[derive(Debug, Serialize)]
struct PassTimes {
    milliseconds: f64,
    spans: Vec<Span>,
}

impl From<Timing> for PassTimes {
    fn from(Timing { begin, end, mut spans }: Timing) -> PassTimes {
        // To the microsecond.
        let since = |time: f64| (1e6 * (time - begin)).round() / 1e3;
        for span in &mut spans {
            (span.begin, span.end) = (since(span.begin), since(span.end));
        }
        PassTimes { milliseconds: since(end), spans }
    }
}

impl Speed {
    /// A reply begins, by an engine that has counted so much.
    pub fn start(prompt: usize, counted: Counters) -> Speed {
        Speed { prompt, started: now(), counted, ..Speed::default() }
    }

    /// Another engine goes on, which counts anew. Loading it is in the time of the token that waits for it.
    pub fn count_from(&mut self, counted: Counters) {
        self.counted = counted;
    }

    /// A token came, after a last pass whose times are known if they are recorded.
    pub fn token(&mut self, cached: usize, counted: Counters, pass: Option<Timing>) {
        let (time, before) = (now(), std::mem::replace(&mut self.counted, counted));
        if self.tokens == 0 {
            (self.first, self.cached) = (time, cached);
        }
        let since = if self.tokens == 0 { self.started } else { self.last };
        self.latest.truncate(REMEMBERED - 1);
        self.latest.push_front(TokenTimes {
            milliseconds: time - since,
            flash: 1000.0 * (counted.waits.flash - before.waits.flash),
            results: 1000.0 * (counted.waits.results - before.waits.results),
            hits: counted.experts.hits - before.experts.hits,
            misses: counted.experts.missed() - before.experts.missed(),
            bytes_read: counted.expert_bytes() - before.expert_bytes(),
            bytes_guessed: counted.guess_bytes - before.guess_bytes,
            pass: pass.map(PassTimes::from),
        });
        let mut spans = 0;
        for (i, token) in self.latest.iter_mut().enumerate() {
            spans += token.pass.as_ref().map_or(0, |pass| pass.spans.len());
            if i > 0 && spans > SPANS {
                token.pass = None;
            }
        }
        self.last = time;
        self.tokens += 1;
    }

    /// What the latest tokens waited for, the latest first.
    pub fn latest(&self) -> &VecDeque<TokenTimes> {
        &self.latest
    }

    /// Tokens of the prompt run a second, until the first token of the reply.
    pub fn prefill(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { per_second(self.prompt - self.cached, self.first - self.started) }
    }

    /// Tokens a second after the first.
    pub fn decode(&self) -> f64 {
        per_second(self.tokens.saturating_sub(1), self.last - self.first)
    }

    /// By the names that llama.cpp's server uses.
    pub fn timings(&self) -> Value {
        json!({
            "cache_n": self.cached,
            "prompt_n": self.prompt - self.cached,
            "prompt_ms": self.first - self.started,
            "prompt_per_second": self.prefill(),
            "predicted_n": self.tokens,
            "predicted_ms": self.last - self.first,
            "predicted_per_second": self.decode(),
        })
    }
}

fn per_second(count: usize, ms: f64) -> f64 {
    if ms > 0.0 { 1000.0 * count as f64 / ms } else { 0.0 }
}
