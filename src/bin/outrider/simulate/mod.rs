//! `outrider simulate`: the scheduler in virtual time, on a machine that is described by a file.

mod table;

use std::io::Write;
use std::path::PathBuf;

use outrider::engine::{Options, smallest_budget};
use outrider::error::Size;
use outrider::import::open_model;
use outrider::les::profile::{FIELDS, Profile};
use outrider::les::replay::{Contender, Routes, misses};
use outrider::les::simulate::{Machine, run as simulate};
use outrider::les::synthetic::{self, FLAGSHIP, FLAGSHIP_CORE_BYTES, FLAGSHIP_EXPERT_BYTES};
use outrider::les::trace::Trace;
use outrider::les::{FlashSpeed, Settings};
use outrider::pack::EXTENT_ALIGN;
use outrider::{Error, Result};
use serde::Serialize;
use serde_json::Value;

use crate::{lookahead, print};

/// Predict speed on a machine that is described by a file
#[derive(clap::Args)]
pub struct Args {
    /// A recorded routing, one JSON object a line; its passes of one token are used
    #[arg(long, value_name = "FILE", required_unless_present = "flagship", conflicts_with = "flagship")]
    trace: Option<PathBuf>,
    /// Routing made up for a 35B-A3B model, to published statistics
    #[arg(long)]
    flagship: bool,
    /// iphone-17-pro-max, iphone-18-pro-max, or a file like profiles/iphone-17-pro-max.json
    #[arg(long, value_name = "NAME|FILE", required_unless_present = "table")]
    profile: Option<String>,
    /// Predict the phones that come with the program, each with several budgets and readbacks, as a table
    #[arg(long, requires = "flagship", conflicts_with_all = ["profile", "budget", "slots"])]
    table: bool,
    /// Memory for everything [default: 3GB for the flagship]
    #[arg(long, value_name = "SIZE", required_unless_present_any = ["flagship", "slots"])]
    budget: Option<Size>,
    /// What the budget holds beside the pool, of this pack or checkpoint [default: what was recorded with the trace]
    #[arg(long, value_name = "MODEL", requires = "trace")]
    model: Option<String>,
    /// Slots in the pool, instead of what the budget holds
    #[arg(long)]
    slots: Option<usize>,
    /// Tokens measured; as many as are made up or, of a trace, half of them fill the pool before
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A setting of the scheduler that is to be another, such as depth=3 or runAhead=0
    #[arg(long, value_name = "NAME=VALUE", value_parser = setting)]
    set: Vec<(String, Value)>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What the flagship gets unless it is said.
const FLAGSHIP_BUDGET: Size = Size(3_000_000_000);

/// Tokens that fill the pool and teach the forecast, at least.
const WARM: usize = 128;

#[derive(Serialize)]
struct Row {
    name: &'static str,
    tokens_per_second: f64,
    /// What was there, of what was needed.
    hit: f64,
    /// A token.
    demand_bytes: f64,
    speculative_bytes: f64,
    /// Milliseconds a token waited, for bytes and for results to come back.
    stall_bytes: f64,
    stall_roundtrip: f64,
    /// Layers of a token that waited for bytes, and times that results came back.
    stalls: f64,
    readbacks: f64,
    /// Of the bound.
    efficiency: f64,
}

/// Tokens a second with look-ahead when one figure of the profile is another.
#[derive(Serialize)]
struct Change {
    assumption: &'static str,
    halved: f64,
    doubled: f64,
    /// The larger difference, as part of the prediction.
    effect: f64,
}

#[derive(Serialize)]
struct Report {
    profile: String,
    slots: usize,
    #[serde(flatten)]
    prediction: Prediction,
    sensitivity: Vec<Change>,
}

pub fn run(args: Args) -> Result<()> {
    let changes = Value::Object(args.set.iter().cloned().collect());
    // As deep as any of them looks.
    let (trace, warm) = args.routing(Settings::default().for_round_trip(f64::INFINITY).with(&changes)?.depth)?;
    let Some(name) = &args.profile else { return table::run(&args, &trace, warm, &changes) };
    let profile = match Profile::named(name) {
        Some(profile) => profile?,
        None => Profile::parse(&read(name.as_ref())?)?,
    };
    let slots = args.slots(&trace)?;
    let settings = settings_on(profile.machine, &changes)?;
    let report = Report::new(profile, &trace, slots, warm, settings);
    print::results(|out| match args.json {
        true => writeln!(out, "{}", serde_json::json!(report)),
        false => report.write(out),
    })
}

fn read(path: &std::path::Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(Error::io(path.display()))
}

impl Args {
    /// A trace, and how many of its passes come before what is measured.
    fn routing(&self, depth: usize) -> Result<(Trace, usize)> {
        if self.tokens == 0 {
            return Err(Error::Request("a simulation needs a token".to_owned()));
        }
        let Some(path) = &self.trace else {
            let warm = self.tokens.max(WARM);
            let trace = synthetic::trace(FLAGSHIP, FLAGSHIP_EXPERT_BYTES, warm + self.tokens, depth, self.seed);
            return Ok((trace, warm));
        };
        let mut trace = Trace::parse(&read(path)?)?;
        trace.passes.retain(|pass| pass.rows == 1);
        if trace.passes.len() < 2 {
            return Err(Error::Request("the trace has fewer than two passes of one token".to_owned()));
        }
        let warm = trace.passes.len() - self.tokens.min(trace.passes.len() / 2);
        Ok((trace, warm))
    }

    fn slots(&self, trace: &Trace) -> Result<usize> {
        let shape = trace.shape;
        if let Some(slots) = self.slots {
            return match slots >= shape.top_k {
                true => Ok(slots.min(shape.keys())),
                false => Err(Error::Request(format!("a pool needs at least {} slots", shape.top_k))),
            };
        }
        let Beside { core, slot, context } = self.beside(trace)?;
        let budget = self.budget.unwrap_or(FLAGSHIP_BUDGET).0;
        let slots = usize::try_from(budget.saturating_sub(core) / slot).unwrap_or(usize::MAX);
        match slots >= shape.top_k {
            true => Ok(slots.min(shape.keys())),
            false => Err(Error::Budget { budget, smallest: core + shape.top_k as u64 * slot, context }),
        }
    }

    /// What a budget is for.
    fn beside(&self, trace: &Trace) -> Result<Beside> {
        let slot = trace.expert_bytes.next_multiple_of(EXTENT_ALIGN) as u64;
        if let Some(model) = &self.model {
            let pack = pollster::block_on(open_model(model))?;
            let (manifest, options) = (pack.manifest(), Options::default());
            let context = options.context_for(&manifest.config);
            let of = manifest.experts.as_ref().map(|e| (e.layers.len(), e.count, pack.expert_bytes()));
            if of != Some((trace.shape.layers, trace.shape.experts, trace.expert_bytes)) {
                return Err(Error::Request("the trace is not of this model".to_owned()));
            }
            let core = smallest_budget(manifest, &options)?.saturating_sub(trace.shape.top_k as u64 * slot);
            return Ok(Beside { core, slot, context });
        }
        match &trace.setup {
            Some(setup) => Ok(Beside { core: setup.core_bytes, slot, context: setup.context }),
            None if self.flagship => {
                Ok(Beside { core: FLAGSHIP_CORE_BYTES, slot: FLAGSHIP_EXPERT_BYTES as u64, context: 4096 })
            }
            None => {
                Err(Error::Request("the trace does not say what its model holds; give --model, or --slots".to_owned()))
            }
        }
    }
}

/// Bytes beside the pool, bytes of a slot, and the context they are for.
struct Beside {
    core: u64,
    slot: u64,
    context: usize,
}

/// As the engine is with a backend that works while it is called, or by itself, but for what is to be another.
fn settings_on(machine: Machine, changes: &Value) -> Result<Settings> {
    let settings = Settings { singly: machine.readback == 0.0, ..Settings::default() };
    settings.for_round_trip(machine.readback).with(changes)
}

/// A setting and its value.
fn setting(text: &str) -> std::result::Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("it is not of the form name=value")?;
    Ok((name.to_owned(), serde_json::from_str(value).map_err(|e| e.to_string())?))
}

/// Experts a token that a clairvoyant pool would still read.
fn unavoidable(trace: &Trace, slots: usize, warm: usize) -> f64 {
    misses(&Routes::of(trace), slots, Contender::Clairvoyant, warm) as f64 / (trace.passes.len() - warm) as f64
}

/// What a machine makes of a trace.
#[derive(Serialize)]
struct Prediction {
    /// Tokens a second that no policy can pass: the larger of computing, and reading what a clairvoyant pool would.
    bound: f64,
    rows: Vec<Row>,
}

const LOOK_AHEAD: &str = "+ look-ahead";
const RESIDENT: &str = "everything resident";

impl Prediction {
    /// `missed` is what a clairvoyant pool would still read, experts a token.
    fn new(machine: Machine, trace: &Trace, slots: usize, warm: usize, missed: f64, settings: Settings) -> Prediction {
        let shape = trace.shape;
        let measured = (trace.passes.len() - warm) as f64;
        let resident = machine.compute(shape.layers, shape.top_k);
        let bound = resident.max(missed * trace.expert_bytes as f64 / machine.flash.bandwidth);
        let names = ["on demand", "one read + pool", "+ overlap", LOOK_AHEAD];
        let mut configs: Vec<_> = names.into_iter().zip(lookahead::ladder(settings)).collect();
        if machine.readback > 0.0 {
            configs.push(("the same, layer by layer", Settings { run_ahead: 0, ..settings }));
        }
        let mut rows: Vec<Row> = configs
            .into_iter()
            .map(|(name, settings)| {
                let outcome = simulate(trace, slots, settings, machine, warm);
                Row {
                    name,
                    tokens_per_second: measured / outcome.seconds,
                    hit: outcome.hits as f64 / (outcome.hits + outcome.missed).max(1) as f64,
                    demand_bytes: outcome.demand_bytes as f64 / measured,
                    speculative_bytes: outcome.speculative_bytes as f64 / measured,
                    stall_bytes: 1e3 * outcome.stall_bytes / measured,
                    stall_roundtrip: 1e3 * outcome.stall_roundtrip / measured,
                    stalls: outcome.stalls as f64 / measured,
                    readbacks: outcome.readbacks as f64 / measured,
                    efficiency: bound * measured / outcome.seconds,
                }
            })
            .collect();
        rows.push(Row {
            name: RESIDENT,
            tokens_per_second: 1.0 / resident,
            hit: 1.0,
            demand_bytes: 0.0,
            speculative_bytes: 0.0,
            stall_bytes: 0.0,
            stall_roundtrip: 1e3 * machine.readback,
            stalls: 0.0,
            readbacks: f64::from(u8::from(machine.readback > 0.0)),
            efficiency: 1.0,
        });
        Prediction { bound: 1.0 / bound, rows }
    }

    fn row(&self, name: &str) -> &Row {
        self.rows.iter().find(|row| row.name == name).expect("every prediction has that row")
    }
}

impl Report {
    fn new(profile: Profile, trace: &Trace, slots: usize, warm: usize, settings: Settings) -> Report {
        let machine = profile.machine;
        let measured = (trace.passes.len() - warm) as f64;
        let missed = unavoidable(trace, slots, warm);
        let prediction = Prediction::new(machine, trace, slots, warm, missed, settings);
        let speed = |trace: &Trace, machine| measured / simulate(trace, slots, settings, machine, warm).seconds;
        let predicted = prediction.row(LOOK_AHEAD).tokens_per_second;
        let change = |assumption, [halved, doubled]: [f64; 2]| {
            let effect = [halved, doubled].map(|s| (s / predicted - 1.0).abs()).into_iter().fold(0.0, f64::max);
            Change { assumption, halved, doubled, effect }
        };
        // What is nothing stays nothing.
        let mut sensitivity: Vec<Change> = FIELDS
            .iter()
            .filter(|field| *(field.of)(&mut machine.clone()) > 0.0)
            .map(|field| {
                let with = |factor: f64| {
                    let mut other = machine;
                    *(field.of)(&mut other) *= factor;
                    speed(trace, other)
                };
                change(field.name, [0.5, 2.0].map(with))
            })
            .collect();
        let lanes = |lanes| speed(trace, Machine { flash: FlashSpeed { lanes, ..machine.flash }, ..machine });
        sensitivity.push(change("flash.lanes", [machine.flash.lanes.div_ceil(2), machine.flash.lanes * 2].map(lanes)));
        if trace.passes.iter().any(|pass| !pass.foreseen.is_empty()) {
            let with = |factor| speed(&synthetic::with_misses(trace, factor), machine);
            sensitivity.push(change("forecast misses", [0.5, 2.0].map(with)));
        }
        sensitivity.sort_by(|a, b| b.effect.total_cmp(&a.effect));
        Report { profile: profile.name, slots, prediction, sensitivity }
    }

    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(
            out,
            "{}, {} slots: predicted, not measured; at most {:.1} tok/s",
            self.profile, self.slots, self.prediction.bound
        )?;
        writeln!(
            out,
            "{:<24} tok/s  hit %  demand + speculative MB  waited for bytes, results ms  efficiency  readbacks",
            ""
        )?;
        for row in &self.prediction.rows {
            writeln!(
                out,
                "{:<24} {:>5.2} {:>6.1} {:>7.1} + {:>13.1} {:>19.1}, {:>10.1} {:>11.2} {:>10.1}",
                row.name,
                row.tokens_per_second,
                100.0 * row.hit,
                row.demand_bytes / 1e6,
                row.speculative_bytes / 1e6,
                row.stall_bytes,
                row.stall_roundtrip,
                row.efficiency,
                row.readbacks,
            )?;
        }
        writeln!(out, "\n{:<24} × ½ tok/s  × 2 tok/s", "if this were")?;
        for change in &self.sensitivity {
            writeln!(out, "{:<24} {:>9.2} {:>10.2}", change.assumption, change.halved, change.doubled)?;
        }
        Ok(())
    }
}
