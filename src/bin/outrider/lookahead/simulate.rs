//! Settings compared in virtual time.

use std::io::Write;

use outrider::Result;
use outrider::les::replay::{Contender, Routes, misses};
use outrider::les::simulate::{Machine, run};
use outrider::les::trace::Trace;
use outrider::les::{FlashSpeed, Settings};

use crate::print;

/// Parts of a token's computation, as the bundled model's on the CPU backend: measured, and rounded.
fn machine(trace: &Trace, slowness: f64) -> Machine {
    let (layers, top_k) = (trace.shape.layers as f64, trace.shape.top_k as f64);
    let base = Machine {
        flash: FlashSpeed { bandwidth: 1.0, latency: 0.0, lanes: 2 },
        mix: 0.55 / layers,
        expert: 0.25 / layers / top_k,
        finish: 0.08 / layers,
        head: 0.12,
        foresee: 0.012 / layers,
        upload: 0.02 / layers / top_k,
        ..Machine::default()
    };
    let compute = base.compute(trace.shape.layers, trace.shape.top_k);
    let bytes = trace.expert_bytes as f64;
    let bandwidth = bytes * layers * top_k / (slowness * compute);
    Machine { flash: FlashSpeed { bandwidth, latency: 0.25 * bytes / bandwidth, lanes: 2 }, ..base }
}

/// `by_maps`: the same passes with forecasts by maps.
pub fn compare(trace: &Trace, by_maps: Option<&Trace>, slots: &[usize], slowness: &[f64], warm: usize) -> Result<()> {
    let routes = Routes::of(trace);
    let shape = trace.shape;
    let uses = ((routes.tokens() - warm) * shape.layers * shape.top_k) as f64;
    for &slots in slots {
        let missed = misses(&routes, slots, Contender::Clairvoyant, warm) as f64 / uses;
        for &slowness in slowness {
            let machine = machine(trace, slowness);
            let compute = machine.compute(shape.layers, shape.top_k);
            let bound = compute.max(compute * slowness * missed);
            for (name, settings, trained) in variants(by_maps.is_some()) {
                let trace = by_maps.filter(|_| trained).unwrap_or(trace);
                let outcome = run(trace, slots, settings, machine, warm);
                let tokens = outcome.tokens as f64;
                let time = outcome.seconds / tokens;
                print::results(|out| {
                    writeln!(
                        out,
                        "{slots:>4} slots r {slowness:<4} {name:<44} × {:.2} of {:.2}  efficiency {:.3}  hit {:>5.1} %  {:>4.0} + {:>4.0} kB  waited {:.2}",
                        (1.0 + slowness) * compute / time,
                        (1.0 + slowness) * compute / bound,
                        bound / time,
                        100.0 * outcome.hits as f64 / (outcome.hits + outcome.missed) as f64,
                        outcome.demand_bytes as f64 / tokens / 1000.0,
                        outcome.speculative_bytes as f64 / tokens / 1000.0,
                        outcome.stall_bytes / tokens / compute,
                    )
                })?;
            }
        }
    }
    Ok(())
}

/// Names, settings, and whether forecasts are by maps.
fn variants(maps: bool) -> Vec<(String, Settings, bool)> {
    let look = Settings { singly: true, ..Settings::default() };
    let mut all = vec![
        ("no overlap".to_owned(), Settings { guesses: 0, ready_first: false, ..look }, false),
        ("overlap".to_owned(), Settings { guesses: 0, ..look }, false),
    ];
    for depth in [1, 2, 3] {
        for least_chance in [0.1, 0.3, 0.5] {
            for guesses in [1, 2] {
                for trained in [false, true].into_iter().take(1 + usize::from(maps)) {
                    let how = if trained { " trained" } else { "" };
                    let name = format!("depth {depth}{how}, from {least_chance}, {guesses} at once");
                    all.push((name, Settings { depth, least_chance, guesses, ..look }, trained));
                }
            }
        }
    }
    all
}
