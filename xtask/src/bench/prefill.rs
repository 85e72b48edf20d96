//! `cargo xtask bench prefill`: how fast a prompt is read on slow flash, by the size of its passes.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{MODEL, Options, TEXT, machine, outrider, publish};
use crate::say;

const HEADING: &str = "## Reading a prompt";

/// What `outrider prefill --json` prints of a configuration.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    name: String,
    chunk: usize,
    backend: String,
    pool: f64,
    slots: usize,
    ratio: f64,
    time: f64,
    compute: f64,
    reading: f64,
    over: f64,
    ci: [f64; 2],
    reads: u64,
    bytes: u64,
    distinct_bytes: u64,
    stall_bytes: f64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Report {
    rows: Vec<Row>,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    let rounds = options.rounds.unwrap_or(15).to_string();
    let outrider = outrider(root)?;
    say!("measuring on slow flash, {rounds} rounds: some minutes, in which the machine should have nothing else to do");
    let json = outrider(&["prefill", MODEL, "--text", TEXT, "--rounds", &rounds, "--json"])?;
    let line = json.lines().last().context("the measurement printed nothing")?;
    let report: Report = serde_json::from_str(line).context("the measurement printed something else")?;
    publish(root, options, &report, HEADING, INTRODUCTION, &table(&report))
}

const INTRODUCTION: &str = "
Written by `cargo xtask bench prefill --write`; `--json` ends with the same as one object. The bundled model reads a prompt
of 512 tokens, from `tests/data/concierge/dialogues.jsonl`, on the native CPU backend, with one thread that computes and an
empty pool. Flash is held back as `cargo xtask bench les` does, *r* being that of a single token. *Chunk* is what a pass
takes at most; *auto* is what the budget has room for, here every token. The last row of each group is what a chat does,
which runs the last eight tokens by themselves to be able to come back to just before them. All rows take turns, in rounds
of both orders.
The *bound* is the larger of computing (the same prompt with every expert resident, in one pass) and reading each expert
that some token needs once; *time ÷ bound* is the median over rounds, with the interval that holds 95 % of bootstrapped
medians. *Waited* is for bytes of experts. A pass reads an expert once at most, so fewer passes read less. What remains above
the bound in one pass is flash that idles while a layer computes up to its router: on this backend that is one call, during
which four experts can be under way at most.

";

fn table(report: &Report) -> String {
    let mut out = format!("{}\n\n", machine());
    out +=
        "| slots | r | chunk | time | computing | reading once | time ÷ bound | 95 % | reads | read | of | waited |\n";
    out += "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for row in &report.rows {
        let (slots, pool, r, name) = (row.slots, 100.0 * row.pool, row.ratio, &row.name);
        let ([low, high], reads) = (row.ci, row.reads);
        let _ = writeln!(
            out,
            "| {slots} ({pool:.0} %) | {r} | {name} | {:.0} ms | {:.0} ms | {:.0} ms | {:.2} | {low:.2}–{high:.2} | {reads} | {:.1} MB | {:.1} MB | {:.0} ms |",
            row.time,
            row.compute,
            row.reading,
            row.over,
            row.bytes as f64 / 1e6,
            row.distinct_bytes as f64 / 1e6,
            row.stall_bytes,
        );
    }
    out
}
