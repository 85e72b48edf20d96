//! `cargo xtask bench`: how fast the bundled model answers, natively and in Chromium, on both backends, with every
//! expert resident and with a quarter of them; and how large what a page loads is. `cargo xtask bench les`: see [`les`].
//! `cargo xtask bench prefill`: see [`prefill`]. `cargo xtask bench flagship`: see [`flagship`]. `cargo xtask bench scheduler`: `benches/scheduler.rs`.

mod flagship;
mod les;
mod prefill;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::exec::{self, cargo};
use crate::web::{self, Profile};
use crate::{say, setup};

const MODEL: &str = "models/concierge";
const TEXT: &str = "tests/data/concierge/dialogues.jsonl";
const RECORD: &str = "benches/README.md";
const BUDGET_GZIPPED: usize = 2_000_000;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// Replies, on every backend and in Chromium
    Replies,
    /// Reading experts ahead on slow flash
    Les,
    /// Reading a prompt on slow flash
    Prefill,
    /// A 35B-A3B model on phones, predicted
    Flagship,
    /// What the scheduler's decisions cost a layer
    Scheduler,
}

#[derive(Args)]
pub struct Options {
    /// What to measure
    #[arg(value_enum, default_value = "replies")]
    subject: Subject,
    /// Print one JSON object at the end instead of tables
    #[arg(long)]
    json: bool,
    /// Write the tables to benches/README.md too
    #[arg(long)]
    write: bool,
    /// Rounds, in each of which everything is measured twice, in both orders [default: 3 of replies, 15 of les and prefill]
    #[arg(long)]
    rounds: Option<usize>,
}

/// What `outrider bench --json` and `tests/browser/bench.mjs` print.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    #[serde(default)]
    name: String,
    backend: String,
    pool: f64,
    slots: usize,
    prefill: f64,
    decode: f64,
    ratio: f64,
    hit: f64,
    expert_bytes_per_token: f64,
}

#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    bytes: usize,
    gzipped: usize,
}

#[derive(Debug, Serialize)]
struct Report {
    machine: String,
    rows: Vec<Row>,
    sizes: Vec<Part>,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    match options.subject {
        Subject::Replies => replies(root, options),
        Subject::Les => les::run(root, options),
        Subject::Prefill => prefill::run(root, options),
        Subject::Flagship => flagship::run(root, options),
        // In the profile that everything else is built in already.
        Subject::Scheduler => {
            exec::run(cargo(root).args(["bench", "--quiet", "--workspace", "--profile", "dev", "--bench", "scheduler"]))
        }
    }
}

/// Builds the command line. Where it is.
fn build(root: &Path) -> Result<PathBuf> {
    exec::run(cargo(root).args(["build", "--quiet", "--workspace", "--bins", "--tests"]))?;
    Ok(exec::target_dir(root).join("debug").join(format!("outrider{}", std::env::consts::EXE_SUFFIX)))
}

/// The command line, built: runs it with some arguments and returns what it prints.
fn outrider(root: &Path) -> Result<impl Fn(&[&str]) -> Result<String>> {
    let cli = build(root)?;
    Ok(move |args: &[&str]| exec::capture(Command::new(&cli).current_dir(root).args(args)))
}

/// Prints a report, as tables or JSON, and writes the tables to the record if that is asked for.
fn publish(
    root: &Path,
    options: &Options,
    report: &impl Serialize,
    heading: &str,
    introduction: &str,
    tables: &str,
) -> Result<()> {
    match options.json {
        true => println!("{}", serde_json::to_string(report)?),
        false => println!("{tables}"),
    }
    match options.write {
        true => record(root, heading, &format!("{introduction}{tables}")),
        false => Ok(()),
    }
}

fn replies(root: &Path, options: &Options) -> Result<()> {
    let rounds = options.rounds.unwrap_or(3).to_string();
    let chromium = setup::chromium()?;
    let driver = setup::vulkan()?;
    web::build(root, Profile::Ship, web::Step::Page)?;
    let cli = build(root)?;
    let questions = questions(root)?;

    let mut rows = Vec::new();
    for backend in ["cpu", "gpu"] {
        say!("measuring the native {} backend", backend.to_uppercase());
        let mut native = Command::new(&cli);
        native.current_dir(root).args(["bench", MODEL, "--json", "--backend", backend]);
        native.args(["--rounds", &rounds]).envs(driver.iter().map(|d| ("VK_DRIVER_FILES", d)));
        rows.extend(measure(ask(&mut native, &questions), &format!("native {backend}"))?);
    }
    for backend in ["cpu", "gpu"] {
        say!("measuring the {} backend in Chromium", backend.to_uppercase());
        let mut browser = Command::new("node");
        browser.current_dir(root).arg("tests/browser/bench.mjs").args(["--backend", backend]);
        browser.args(["--rounds", &rounds]).env("OUTRIDER_CHROMIUM", &chromium);
        rows.extend(measure(ask(&mut browser, &questions), &format!("Chromium {backend}"))?);
    }
    let report = Report { machine: machine(), rows, sizes: sizes(root)? };
    publish(root, options, &report, HEADING, INTRODUCTION, &tables(&report))?;
    let page = report.sizes.last().map_or(0, |part| part.gzipped);
    if page >= BUDGET_GZIPPED {
        bail!("the page without the model is {page} bytes gzipped; it is to stay below {BUDGET_GZIPPED}");
    }
    Ok(())
}

/// The questions whose answers the tests know, so that every backend does the same work.
fn questions(root: &Path) -> Result<Vec<String>> {
    let replies: Vec<Value> = serde_json::from_slice(&std::fs::read(root.join("tests/data/concierge/replies.json"))?)?;
    replies.iter().map(|r| Ok(r["prompt"].as_str().context("a reply has a prompt")?.to_string())).collect()
}

fn ask<'a>(command: &'a mut Command, questions: &[String]) -> &'a mut Command {
    command.args(questions.iter().flat_map(|question| ["--ask", question]))
}

fn measure(command: &mut Command, name: &str) -> Result<Vec<Row>> {
    let lines = exec::capture(command)?;
    let row = |line: &str| {
        let mut row: Row = serde_json::from_str(line).with_context(|| format!("not a row: {line}"))?;
        row.name = format!("{name}, {}", if row.pool == 1.0 { "every expert" } else { "a quarter of the experts" });
        Ok(row)
    };
    lines.lines().map(row).collect()
}

/// What a visitor loads before the model: the wasm module, all scripts, and the whole page.
fn sizes(root: &Path) -> Result<Vec<Part>> {
    let mut parts =
        [("wasm module", "wasm"), ("scripts", "js"), ("page without the model", "")].map(|(name, extension)| {
            let part = Part { name, bytes: 0, gzipped: 0 };
            (extension, part)
        });
    let mut directories = vec![root.join("www/dist")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let bytes = std::fs::read(&path)?;
            let gzipped = gzipped(&bytes)?;
            for (extension, part) in &mut parts {
                if extension.is_empty() || path.extension().is_some_and(|e| e == *extension) {
                    part.bytes += bytes.len();
                    part.gzipped += gzipped;
                }
            }
        }
    }
    Ok(parts.map(|(_, part)| part).into())
}

fn gzipped(bytes: &[u8]) -> Result<usize> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut encoder, bytes)?;
    Ok(encoder.finish()?.len())
}

/// Writes a section of the record, and leaves the others as they are.
fn record(root: &Path, heading: &str, section: &str) -> Result<()> {
    let path = root.join(RECORD);
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    std::fs::write(&path, with_section(&before, heading, section)).with_context(|| format!("writing {RECORD}"))?;
    say!("wrote {RECORD}");
    Ok(())
}

/// A document with what follows a heading replaced, up to the next of its kind.
fn with_section(document: &str, heading: &str, section: &str) -> String {
    let (mut out, mut found, mut ours) = (String::new(), false, false);
    for line in document.lines() {
        ours = if line.starts_with("## ") { line == heading } else { ours };
        if ours && line == heading {
            found = true;
            out += &format!("{heading}\n{}\n\n", section.trim_end());
        } else if !ours {
            out += line;
            out.push('\n');
        }
    }
    let out = out.trim_end();
    if found {
        format!("{out}\n")
    } else {
        format!("{out}\n\n{heading}\n{}\n", section.trim_end()).trim_start().to_owned()
    }
}

/// What the figures were measured on.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{cores} cores, {}", cpu_name())
}

fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    model.unwrap_or(std::env::consts::ARCH).to_string()
}

const HEADING: &str = "## Replies";

const INTRODUCTION: &str = "
Written by `cargo xtask bench --write`; `--json` prints the same as one object. Replies of the bundled model to the
questions of `tests/data/concierge/replies.json`, greedy, one sequence at a time. The pool sizes take turns (in rounds,
in both orders), so that what else the machine does hits both. A ratio is the median over pairs of runs, against every
expert resident in the same environment. Files are in the operating system's cache: what is measured is the path of an
expert, not a disk. Speeds are only comparable within one run on one machine; a software renderer says nothing about a
GPU.

";

fn tables(report: &Report) -> String {
    let mut out = format!("{}\n\n", report.machine);
    out += "| | runs on | slots | prompt tokens/s | reply tokens/s | ratio | hits | read a token |\n";
    out += "|---|---|---:|---:|---:|---:|---:|---:|\n";
    for row in &report.rows {
        let (name, backend, slots) = (&row.name, &row.backend, row.slots);
        let hits = 100.0 * row.hit;
        let read = row.expert_bytes_per_token / 1000.0;
        let _ = writeln!(
            out,
            "| {name} | {backend} | {slots} | {:.0} | {:.1} | {:.2} | {hits:.0} % | {read:.0} kB |",
            row.prefill, row.decode, row.ratio
        );
    }
    out += "\n| what a page loads | bytes | gzipped |\n|---|---:|---:|\n";
    for part in &report.sizes {
        let _ = writeln!(out, "| {} | {} | {} |", part.name, part.bytes, part.gzipped);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_replaced_and_added() {
        let document = "# Title\n\nWords.\n\n## One\nold\n\n## Two\nkept\n";
        let one = with_section(document, "## One", "\nnew\n");
        assert_eq!(one, "# Title\n\nWords.\n\n## One\n\nnew\n\n## Two\nkept\n");
        assert_eq!(with_section(&one, "## One", "\nnew\n"), one);
        assert_eq!(with_section("# Title\n", "## One", "new"), "# Title\n\n## One\nnew\n");
    }
}
