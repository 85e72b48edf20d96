//! `cargo xtask bench les`: what Lookahead Expert Scheduling gains on slow flash.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{MODEL, Options, machine, record};
use crate::exec::{self, cargo};
use crate::say;

const TEXT: &str = "tests/data/concierge/dialogues.jsonl";
const HEADING: &str = "## Reading experts ahead";

/// What `outrider lookahead --json` prints of a configuration.
#[derive(Debug, Deserialize)]
struct Row {
    name: String,
    slots: usize,
    pool: f64,
    ratio: f64,
    speedup: f64,
    ci: [f64; 2],
    efficiency: f64,
    cap: f64,
    hit: f64,
    demand_bytes: f64,
    speculative_bytes: f64,
    stall_bytes: f64,
    resident: f64,
}

#[derive(Debug, Deserialize)]
struct Report {
    rows: Vec<Row>,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    exec::run(cargo(root).args(["build", "--quiet", "--workspace", "--bins", "--tests"]))?;
    let cli = exec::target_dir(root).join("debug").join(format!("outrider{}", std::env::consts::EXE_SUFFIX));
    let lookahead = |args: &[&str]| {
        let mut command = Command::new(&cli);
        command.current_dir(root).args(["lookahead", MODEL, "--text", TEXT]).args(args);
        exec::capture(&mut command)
    };
    say!("replaying the routing of {TEXT} with other pool policies");
    let policies = lookahead(&["--policies"])?;
    let rounds = options.rounds.unwrap_or(15).to_string();
    say!("measuring on slow flash, {rounds} rounds: some minutes, in which the machine should have nothing else to do");
    let json = lookahead(&["--rounds", &rounds, "--json"])?;
    let line = json.lines().last().context("the measurement printed nothing")?;
    let report: Report = serde_json::from_str(line).context("the measurement printed something else")?;
    let tables = tables(&report, &policies);
    if options.json {
        println!("{line}");
    } else {
        println!("{tables}");
    }
    if options.write {
        record(root, HEADING, &format!("{INTRODUCTION}{tables}"))?;
    }
    Ok(())
}

const INTRODUCTION: &str = "
Written by `cargo xtask bench les --write`; `--json` ends with the same as one object. The bundled model decodes the
dialogues of `tests/data/concierge/dialogues.jsonl` token by token on the native CPU backend, with one thread that
computes. Its flash is held back by a model of one: two lanes, a latency of a quarter of an expert's transfer, and a
bandwidth at which reading all experts of a token takes *r* times as long as computing it. All rows take turns on the same
tokens, in rounds of both orders; *speed-up* is the median over rounds against the first row, with the interval that holds
95 % of bootstrapped medians. *Bound* is the larger of computing (everything resident) and reading what a clairvoyant pool of
that size would still read; *cap* is the speed-up at that bound, *efficiency* how much of it is reached. Bytes and waits are
those of a token.

";

fn tables(report: &Report, policies: &str) -> String {
    let mut out = format!("{}\n\n", machine());
    out += "| slots | r | | speed-up | 95 % | cap | efficiency | of resident | hits | demand | ahead | waited |\n";
    out += "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for row in &report.rows {
        let (slots, pool, r, name) = (row.slots, 100.0 * row.pool, row.ratio, &row.name);
        let [low, high] = row.ci;
        let _ = writeln!(
            out,
            "| {slots} ({pool:.0} %) | {r} | {name} | {:.2} | {low:.2}–{high:.2} | {:.2} | {:.2} | {:.2} | {:.0} % | {:.0} kB | {:.0} kB | {:.2} ms |",
            row.speedup,
            row.cap,
            row.efficiency,
            row.resident,
            100.0 * row.hit,
            row.demand_bytes / 1000.0,
            row.speculative_bytes / 1000.0,
            row.stall_bytes,
        );
    }
    out += "\nHits by pool policy, from the recorded routing of the same tokens alone:\n\n";
    out + policies.trim_end()
}
