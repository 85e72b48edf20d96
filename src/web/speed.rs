//! When the tokens of a reply came, and what each waited for.

use std::collections::VecDeque;

use serde::Serialize;
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

use crate::engine::Counters;

/// Tokens that are remembered one by one: a reply may be as long as the context.
const REMEMBERED: usize = 128;

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
    routing: f64,
    hits: u64,
    misses: u64,
    bytes_read: u64,
    bytes_guessed: u64,
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

    pub fn token(&mut self, cached: usize, counted: Counters) {
        let (time, before) = (now(), std::mem::replace(&mut self.counted, counted));
        if self.tokens == 0 {
            (self.first, self.cached) = (time, cached);
        }
        let since = if self.tokens == 0 { self.started } else { self.last };
        self.latest.truncate(REMEMBERED - 1);
        self.latest.push_front(TokenTimes {
            milliseconds: time - since,
            flash: 1000.0 * (counted.waits.flash - before.waits.flash),
            routing: 1000.0 * (counted.waits.routing - before.waits.routing),
            hits: counted.experts.hits - before.experts.hits,
            misses: counted.experts.missed() - before.experts.missed(),
            bytes_read: counted.expert_bytes() - before.expert_bytes(),
            bytes_guessed: counted.guess_bytes - before.guess_bytes,
        });
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
