//! `outrider simulate --flagship --table`: the phones that come with the program, each with several budgets and readbacks,
//! and what the predictions rest on.

use std::io::Write;

use outrider::Result;
use outrider::error::Error;
use outrider::les::profile::Profile;
use outrider::les::simulate::Machine;
use outrider::les::trace::Trace;
use serde::Serialize;
use serde_json::Value;

use super::{Args, Beside, LOOK_AHEAD, Prediction, settings_on, unavoidable};
use crate::print;

/// Bytes.
const BUDGETS: [u64; 3] = [1_400_000_000, 3_000_000_000, 6_000_000_000];
/// Milliseconds until a result is back.
const READBACKS: [f64; 4] = [0.5, 1.0, 3.0, 5.0];

#[derive(Serialize)]
struct Table {
    /// Tokens that figures are means of.
    tokens: usize,
    cells: Vec<Cell>,
    assumptions: Vec<Assumptions>,
}

/// A phone with a budget and a readback.
#[derive(Serialize)]
struct Cell {
    profile: String,
    budget: u64,
    /// What was simulated instead of a budget that is too small for the model.
    smallest: Option<u64>,
    slots: usize,
    /// Milliseconds.
    readback: f64,
    #[serde(flatten)]
    prediction: Prediction,
}

/// What a phone's profile rests on.
#[derive(Serialize)]
struct Assumptions {
    profile: String,
    /// A field, its value, and why.
    fields: Vec<(String, f64, String)>,
}

pub fn run(args: &Args, trace: &Trace, warm: usize, changes: &Value) -> Result<()> {
    let Beside { core, slot, .. } = args.beside(trace)?;
    let smallest = core + trace.shape.top_k as u64 * slot;
    let pools: Vec<_> = BUDGETS
        .into_iter()
        .map(|budget| {
            let slots = (budget.max(smallest) - core) / slot;
            let slots = usize::try_from(slots).unwrap_or(usize::MAX).min(trace.shape.keys());
            (budget, slots, unavoidable(trace, slots, warm))
        })
        .collect();
    let profiles = Profile::names().map(|name| Profile::named(name).expect("it has that name"));
    let profiles = profiles.collect::<Result<Vec<Profile>>>()?;
    let cell = |profile: &Profile, (budget, slots, missed): (u64, usize, f64), readback: f64| {
        let machine = Machine { readback: 1e-3 * readback, ..profile.machine };
        let prediction = Prediction::new(machine, trace, slots, warm, missed, settings_on(machine, changes)?);
        let smallest = (budget < smallest).then_some(smallest);
        Ok(Cell { profile: profile.name.clone(), budget, smallest, slots, readback, prediction })
    };
    // A thread for each pool of each phone: they have nothing to do with each other.
    let cells = std::thread::scope(|scope| {
        let run = |(profile, pool)| scope.spawn(move || READBACKS.map(|readback| cell(profile, pool, readback)));
        let all = profiles.iter().flat_map(|profile| pools.iter().map(move |pool| (profile, *pool)));
        let running: Vec<_> = all.map(run).collect();
        running.into_iter().map(|thread| thread.join()).collect::<std::thread::Result<Vec<_>>>()
    });
    let cells = cells.map_err(|_| Error::Request("a simulation ended early".to_owned()))?;
    let cells = cells.into_iter().flatten().collect::<Result<Vec<Cell>>>()?;
    let assumptions = profiles.into_iter().map(Assumptions::of).collect();
    let table = Table { tokens: trace.passes.len() - warm, cells, assumptions };
    print::results(|out| match args.json {
        true => writeln!(out, "{}", serde_json::json!(table)),
        false => table.write(out),
    })
}

impl Assumptions {
    fn of(profile: Profile) -> Assumptions {
        let machine = serde_json::json!(profile.machine);
        let value = |field: &str| machine.pointer(&format!("/{}", field.replace('.', "/")));
        let fields = profile.assumptions.into_iter();
        let fields = fields.map(|(field, why)| {
            let value = value(&field).and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
            (field, value, why)
        });
        Assumptions { profile: profile.name, fields: fields.collect() }
    }
}

impl Table {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let Some(first) = self.cells.first() else { return Ok(()) };
        let names: Vec<_> = first.prediction.rows.iter().map(|row| row.name).collect();
        writeln!(
            out,
            "| phone | budget | slots | readback | {} | bound | hits | waits for bytes | for results |",
            names.join(" | ")
        )?;
        writeln!(out, "|---|---:|---:|---:|{}---:|---:|---:|---:|", "---:|".repeat(names.len()))?;
        for cell in &self.cells {
            let (prediction, look) = (&cell.prediction, cell.prediction.row(LOOK_AHEAD));
            let budget = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
            let budget = match cell.smallest {
                Some(smallest) => format!("{}, taken as {}", budget(cell.budget), budget(smallest)),
                None => budget(cell.budget),
            };
            write!(out, "| {} | {budget} | {} | {} ms |", cell.profile, cell.slots, cell.readback)?;
            for row in &prediction.rows {
                write!(out, " {:.2} |", row.tokens_per_second)?;
            }
            let stalls = |count: f64, ms: f64| format!("{count:.1}, {ms:.0} ms");
            let (bytes, results) =
                (stalls(look.stalls, look.stall_bytes), stalls(look.readbacks, look.stall_roundtrip));
            writeln!(out, " {:.2} | {:.0} % | {bytes} | {results} |", prediction.bound, 100.0 * look.hit)?;
        }
        for Assumptions { profile, fields } in &self.assumptions {
            writeln!(out, "\nWhat {profile} rests on:\n")?;
            for (field, value, why) in fields {
                let value = match (field.as_str(), *value) {
                    ("flash.bandwidth", bytes) => format!("{:.1} GB/s", bytes / 1e9),
                    ("flash.lanes", lanes) => format!("{lanes:.0}"),
                    ("readback", _) => "as in the table".to_owned(),
                    (_, seconds) => format!("{:.3} ms", 1e3 * seconds),
                };
                writeln!(out, "- `{field}` {value}: {why}")?;
            }
        }
        Ok(())
    }
}
