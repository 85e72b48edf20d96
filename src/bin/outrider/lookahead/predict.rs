//! The simulator against reality: what it makes of a configuration from a profile of this machine that was measured
//! beforehand, and from what a run with every expert resident chose and could foresee. Nothing of the runs that it is
//! compared with reaches it.

use std::io::Write;

use outrider::Result;
use outrider::engine::Engine;
use outrider::flash::Throttle;
use outrider::les::FlashSpeed;
use outrider::les::simulate::{Machine, Simulation};
use outrider::les::trace::Trace;
use serde::Serialize;

use super::Row;
use super::measure::{Config, Stream, WARM_ROUNDS};
use crate::model::ModelArgs;
use crate::profile::Resident;
use crate::statistics::median;

/// Tokens that each part of the profile is measured on.
const TOKENS: usize = 96;

pub struct Predictor<'a> {
    trace: &'a Trace,
    /// With forecasts by maps.
    by_maps: Option<&'a Trace>,
    resident: Resident,
    tokens: &'a [(u32, bool)],
    /// Tokens of a run, and runs.
    run: usize,
    runs: usize,
}

/// Predictions that differ by less are no order.
const ALIKE: f64 = 0.01;

/// A machine, and the throttle that makes it one.
#[derive(Clone, Copy)]
pub struct Slowed {
    pub throttle: Throttle,
    machine: Machine,
}

/// Of a row.
#[derive(Debug, Serialize)]
pub struct Predicted {
    /// Speed-up against the first row.
    pub speedup: f64,
    /// Relative.
    pub error: f64,
    /// Milliseconds a token.
    pub time: f64,
    pub time_error: f64,
}

impl<'a> Predictor<'a> {
    pub async fn new(
        engine: &mut Engine,
        (trace, by_maps): (&'a Trace, Option<&'a Trace>),
        stream: &'a Stream,
        run: usize,
        rounds: usize,
    ) -> Result<Predictor<'a>> {
        let tokens = &stream.tokens[..TOKENS.min(stream.tokens.len())];
        let resident = Resident::measure(engine, tokens).await?;
        Ok(Predictor { trace, by_maps, resident, tokens, run, runs: 2 * rounds })
    }

    /// Measures flash of some slowness, and what reading from it takes the host.
    pub async fn slowed(&self, model: &ModelArgs, slots: usize, slowness: f64) -> Result<Slowed> {
        let (mut engine, flash) = model.with_slots(slots).load_throttled().await?;
        self.resident.warm(&mut engine, self.tokens).await?;
        let throttle = self.resident.throttle(&engine, slowness);
        flash.set(Some(throttle));
        let (machine, _) = self.resident.machine(&mut engine, self.tokens).await?;
        Ok(Slowed { throttle, machine })
    }

    /// Seconds a token by run, in virtual time.
    pub fn times(&self, config: &Config, slots: usize, slowed: &Slowed) -> Vec<f64> {
        let trace = self.by_maps.filter(|_| config.trained).unwrap_or(self.trace);
        let mut simulation = Simulation::new(trace, slots, config.settings, slowed.machine);
        simulation.set_pieces(config.pieces);
        let (warm, measured) = trace.passes.split_at(2 * WARM_ROUNDS * self.run);
        // Pools are filled before flash is slow.
        let fast = FlashSpeed { bandwidth: f64::INFINITY, latency: 0.0, lanes: 1 };
        simulation.set_machine(Machine { flash: fast, ..slowed.machine });
        warm.iter().for_each(|pass| simulation.pass(pass, true));
        simulation.set_machine(slowed.machine);
        let mut before = simulation.outcome().seconds;
        let mut run = |passes: &[_]| {
            passes.iter().for_each(|pass| simulation.pass(pass, true));
            let now = simulation.outcome().seconds;
            (now - std::mem::replace(&mut before, now)) / self.run as f64
        };
        measured.chunks_exact(self.run).take(self.runs).map(&mut run).collect()
    }
}

/// Compares a row with what the first and it should have taken.
pub fn compare(row: &mut Row, first: &[f64], own: &[f64]) {
    let pair = |times: &[f64]| times.iter().sum::<f64>();
    let ratios = first.chunks(2).zip(own.chunks(2)).map(|(a, b)| pair(a) / pair(b)).collect();
    let (speedup, time) = (median(ratios), 1e3 * median(own.to_vec()));
    let (error, time_error) = (speedup / row.speedup - 1.0, time / row.time - 1.0);
    row.predicted = Some(Predicted { speedup, error, time, time_error });
}

/// How right the predictions were.
#[derive(Serialize)]
pub struct Verdict {
    /// Of speed-ups but the first, which is 1 by definition, and of times.
    median_error: f64,
    worst_error: f64,
    median_time_error: f64,
    worst_time_error: f64,
    /// Pairs of rows whose intervals do not overlap, those of them that were predicted alike, and in the wrong order.
    pairs: usize,
    alike: Vec<String>,
    misordered: Vec<String>,
}

impl Verdict {
    /// Of rows in groups that have one pool and one flash.
    pub fn of(groups: &[Vec<Row>]) -> Verdict {
        let all = |rows: &'_ [Row], error: fn(&Predicted) -> f64| -> Vec<f64> {
            rows.iter().filter_map(|row| row.predicted.as_ref()).map(|p| error(p).abs()).collect()
        };
        let speedups: Vec<f64> =
            groups.iter().filter_map(|rows| rows.get(1..)).flat_map(|rows| all(rows, |p| p.error)).collect();
        let times: Vec<f64> = groups.iter().flat_map(|rows| all(rows, |p| p.time_error)).collect();
        let worst = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
        let (mut pairs, mut alike, mut misordered) = (0, Vec::new(), Vec::new());
        for rows in groups {
            for (i, a) in rows.iter().enumerate() {
                for b in &rows[i + 1..] {
                    let apart = a.ci[1] < b.ci[0] || b.ci[1] < a.ci[0];
                    let (Some(x), Some(y), true) = (&a.predicted, &b.predicted, apart) else { continue };
                    pairs += 1;
                    let list = match (x.speedup / y.speedup - 1.0).abs() < ALIKE {
                        true => &mut alike,
                        false if (a.speedup < b.speedup) != (x.speedup < y.speedup) => &mut misordered,
                        false => continue,
                    };
                    list.push(format!("{}/{} at {} slots, r {}", a.name, b.name, a.slots.min(b.slots), a.ratio));
                }
            }
        }
        Verdict {
            worst_error: worst(&speedups),
            median_error: median(speedups),
            worst_time_error: worst(&times),
            median_time_error: median(times),
            pairs,
            alike,
            misordered,
        }
    }

    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let right = self.pairs - self.alike.len() - self.misordered.len();
        let list = |what: &str, pairs: &[String]| match pairs {
            [] => String::new(),
            _ => format!("; {what}: {}", pairs.join(", ")),
        };
        writeln!(
            out,
            "speed-ups predicted with a median error of {:.1} %, worst {:.1} %; times with {:.1} %, worst {:.1} %; of {} pairs whose intervals are apart {right} in the right order{}{}",
            100.0 * self.median_error,
            100.0 * self.worst_error,
            100.0 * self.median_time_error,
            100.0 * self.worst_time_error,
            self.pairs,
            list("predicted alike", &self.alike),
            list("in the wrong order", &self.misordered),
        )
    }
}
