//! `cargo xtask bench les`: what Lookahead Expert Scheduling gains on slow flash.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{MODEL, Options, TEXT, machine, outrider, publish};
use crate::exec;
use crate::web::{self, Profile};
use crate::{say, setup};

const HEADING: &str = "## Reading experts ahead";

/// What `outrider lookahead --json` and `tests/browser/bench-les.mjs` print of a configuration.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    name: String,
    backend: String,
    slots: usize,
    pool: f64,
    ratio: f64,
    speedup: f64,
    ci: [f64; 2],
    /// Without the routing of a whole run there is no clairvoyant pool to compare with.
    efficiency: Option<f64>,
    cap: Option<f64>,
    hit: f64,
    demand_bytes: f64,
    speculative_bytes: f64,
    stall_bytes: f64,
    stall_roundtrip: f64,
    readbacks: f64,
    resident: f64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Report {
    rows: Vec<Row>,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    let outrider = outrider(root)?;
    let lookahead = |args: &[&str]| outrider(&[&["lookahead", MODEL, "--text", TEXT], args].concat());
    say!("counting what forecasts name");
    let recall = lookahead(&["--recall"])?;
    say!("replaying the routing of {TEXT} with other pool policies");
    let policies = lookahead(&["--policies"])?;
    let rounds = options.rounds.unwrap_or(15).to_string();
    say!("measuring on slow flash, {rounds} rounds: some minutes, in which the machine should have nothing else to do");
    let json = lookahead(&["--rounds", &rounds, "--json"])?;
    let line = json.lines().last().context("the measurement printed nothing")?;
    let mut report: Report = serde_json::from_str(line).context("the measurement printed something else")?;
    report.rows.iter_mut().for_each(|row| row.backend += " (native)");
    report.rows.extend(in_chromium(root, options)?);
    publish(root, options, &report, HEADING, INTRODUCTION, &tables(&report, &policies, &recall))
}

/// The same in Chromium, with fewer rounds: a software renderer takes its time.
fn in_chromium(root: &Path, options: &Options) -> Result<Vec<Row>> {
    let chromium = match setup::chromium() {
        Ok(path) => path,
        Err(why) => {
            say!("SKIPPED: the rows of Chromium: {why:#}");
            return Ok(Vec::new());
        }
    };
    web::build(root, Profile::Dev, web::Step::Package)?;
    say!("measuring in Chromium");
    let rounds = options.rounds.unwrap_or(BROWSER_ROUNDS).min(BROWSER_ROUNDS).to_string();
    let mut browser = Command::new("node");
    browser.current_dir(root).args(["tests/browser/bench-les.mjs", "--rounds", &rounds]);
    let lines = exec::capture(browser.env("OUTRIDER_CHROMIUM", &chromium))?;
    lines.lines().map(|line| serde_json::from_str(line).with_context(|| format!("not a row: {line}"))).collect()
}

const BROWSER_ROUNDS: usize = 3;

const INTRODUCTION: &str = "
Written by `cargo xtask bench les --write`; `--json` ends with the same as one object. The bundled model decodes the
dialogues of `tests/data/concierge/dialogues.jsonl` token by token on the native CPU backend, with one thread that
computes. Its flash is held back by a model of one: two lanes, a latency of a quarter of an expert's transfer, and a
bandwidth at which reading all experts of a token takes *r* times as long as computing it. All rows take turns on the same
tokens, in rounds of both orders; *speed-up* is the median over rounds against the first row, with the interval that holds
95 % of bootstrapped medians. *Bound* is the larger of computing (everything resident) and reading what a clairvoyant pool of
that size would still read; *cap* is the speed-up at that bound, *efficiency* how much of it is reached. Bytes and waits are
those of a token: *waited* for experts' bytes, and *results* are what the GPU's routing was waited for, its computing
included, and how often something was read back. In Chromium sequences are of 24 tokens, fewer rounds are run, *cap* and
*efficiency* are not known, timers are up to milliseconds late (more than a read should take with the CPU), and the GPU is a
software renderer on the same cores: its rows say that everything works there and what is read and waited for, not how
fast a GPU is. *Untrained* foresees by the later layers' routers, *trained* by the maps of the bundled pack, which
`outrider calibrate` fitted to other dialogues.

";

fn tables(report: &Report, policies: &str, recall: &str) -> String {
    let mut out = format!("{}\n\n", machine());
    out += "| runs on | slots | r | | speed-up | 95 % | cap | efficiency | of resident | hits | demand | ahead | waited | results |\n";
    out += "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for row in &report.rows {
        let (slots, pool, r, name) = (row.slots, 100.0 * row.pool, row.ratio, &row.name);
        let ([low, high], backend) = (row.ci, &row.backend);
        let known = |figure: Option<f64>| figure.map_or("–".to_owned(), |figure| format!("{figure:.2}"));
        let results = match row.readbacks {
            0.0 => "–".to_owned(),
            readbacks => format!("{:.2} ms, {readbacks:.1}", row.stall_roundtrip),
        };
        let _ = writeln!(
            out,
            "| {backend} | {slots} ({pool:.0} %) | {r} | {name} | {:.2} | {low:.2}–{high:.2} | {} | {} | {:.2} | {:.0} % | {:.0} kB | {:.0} kB | {:.2} ms | {results} |",
            row.speedup,
            known(row.cap),
            known(row.efficiency),
            row.resident,
            100.0 * row.hit,
            row.demand_bytes / 1000.0,
            row.speculative_bytes / 1000.0,
            row.stall_bytes,
        );
    }
    out += "\nHits by pool policy, from the recorded routing of the same tokens alone:\n\n";
    out += policies.trim_end();
    out += "\n\nRecall: the share of a token's experts that a forecast of as many names, from the state so many layers before, by the\n\
        later layer's router and *by map*, on all the dialogues; before layer 0 lies the token's embedding. *Its own router*, by\n\
        the path of the forecasts, is the control.\n\n";
    out + recall.trim_end()
}
