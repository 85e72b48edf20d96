//! What tests and benches ask of an engine, `pkg/src/internal.ts`.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::clock;
use crate::engine::{Counters, Engine, Want};
use crate::error::{Error, Result};
use crate::flash::Throttle;

/// Given when an engine is made.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Internals {
    pub max_slots: Option<usize>,
    #[serde(default)]
    pub untrained: bool,
    pub throttle: Option<Throttle>,
    #[serde(default)]
    /// Changes to the scheduler's settings.
    pub scheduling: Value,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", deny_unknown_fields)]
pub(super) enum Ask {
    Throttle { throttle: Option<Throttle> },
    Logits { tokens: Vec<u32>, widths: Vec<usize> },
    Counters {},
}

/// A hash of the bits of each token's logits.
pub(super) async fn logits(engine: &mut Engine, tokens: &[u32], widths: &[usize]) -> Result<Value> {
    if widths.is_empty() || widths.contains(&0) {
        return Err(Error::Request("a pass has a token at least".to_owned()));
    }
    engine.reset()?;
    let start = clock::now();
    let (mut rest, mut hashes) = (tokens, Vec::new());
    for width in widths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at((*width).min(rest.len()));
        let logits = engine.forward(now, Want::All, None).await?;
        let of = |row: &[f32]| blake3::hash(bytemuck::cast_slice(row)).to_hex()[..16].to_owned();
        hashes.extend(logits.chunks_exact(logits.len() / now.len()).map(of));
        rest = later;
    }
    let seconds = clock::now() - start;
    Ok(json!({ "hashes": hashes, "seconds": seconds, "counters": counters(&engine.counters()) }))
}

pub(super) fn counters(counters: &Counters) -> Value {
    let c = &counters.experts;
    json!({
        "tokens": counters.tokens,
        "demandBytes": counters.demand_bytes,
        "guessBytes": counters.guess_bytes,
        "hits": c.hits,
        "late": c.late,
        "misses": c.misses,
        "guessReads": c.guess_reads,
        "guessesUsed": c.guesses_used,
        "dropped": c.dropped,
        "cancelled": c.cancelled,
        "warmReads": c.warm_reads,
        "warmUsed": c.warm_used,
        "flash": counters.waits.flash,
        "results": counters.waits.results,
        "submissions": counters.traffic.submissions,
        "readbacks": counters.traffic.readbacks,
    })
}
