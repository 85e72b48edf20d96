//! What the scheduler itself costs a layer, on routing made up to the flagship's statistics: every decision between one
//! router's answer and the next, with reads that end at once.
//!
//!     cargo xtask bench scheduler     (or cargo bench --bench scheduler, which builds everything anew)

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use outrider::les::synthetic::{FLAGSHIP, trace};
use outrider::les::trace::{Pass, Trace};
use outrider::les::{Action, Event, Forecast, Key, Origin, Pool, Scheduler, Settings};

const DEPTH: usize = 2;
/// 1 of 7, as in a budget of 3 GB.
const SLOTS: usize = 40 * 36;
/// Tokens before anything is measured: the pool is full then and the forecast has learnt.
const WARM: usize = 48;
const TOKENS: usize = 8;

fn recorded() -> Trace {
    trace(FLAGSHIP, 1, WARM + TOKENS, DEPTH, 1)
}

fn settings() -> Settings {
    Settings { depth: DEPTH, ..Settings::default() }
}

/// One token through all layers. Reads end when there is nothing else to do.
fn pass(scheduler: &mut Scheduler, pass: &Pass, reads: &mut Vec<Key>) {
    scheduler.on(Event::Begin { rows: pass.rows });
    let mut foreseen = pass.foreseen.iter().peekable();
    for (layer, ids) in (0..).zip(&pass.ids) {
        scheduler.on(Event::Routed { layer, ids });
        while let Some(guess) = foreseen.next_if(|guess| guess.origin == Origin::Layer(layer)) {
            scheduler.on(Event::Predicted { origin: guess.origin, layer: guess.layer, scores: &guess.scores });
        }
        loop {
            match scheduler.next_action() {
                Some(Action::Read { key, .. }) => reads.push(key),
                Some(Action::Cancel { key }) => {
                    reads.retain(|reading| *reading != key);
                    scheduler.on(Event::Cancelled { key });
                }
                Some(action) => drop(black_box(action)),
                None if scheduler.layer_done() => break,
                None => {
                    let key = reads.remove(0);
                    scheduler.on(Event::Arrived { key });
                }
            }
        }
        // Guesses arrive while the next layer computes.
        for key in reads.drain(..) {
            scheduler.on(Event::Arrived { key });
        }
    }
}

fn scheduler(c: &mut Criterion) {
    let trace = recorded();
    let (warm, measured) = trace.passes.split_at(WARM);
    let mut group = c.benchmark_group("scheduler");
    group.throughput(Throughput::Elements((TOKENS * FLAGSHIP.layers) as u64));
    group.sample_size(30);
    let ready = || {
        let mut scheduler = Scheduler::new(FLAGSHIP, Pool::new(FLAGSHIP, SLOTS), settings());
        let mut reads = Vec::new();
        warm.iter().for_each(|one| pass(&mut scheduler, one, &mut reads));
        scheduler
    };
    let run = |mut scheduler: Scheduler| {
        let mut reads = Vec::new();
        measured.iter().for_each(|one| pass(&mut scheduler, one, &mut reads));
        scheduler
    };
    group.bench_function("layer", |b| b.iter_batched(ready, run, BatchSize::LargeInput));
    group.bench_function("forecast", |b| {
        let predict = |mut forecast: Forecast| {
            for pass in measured {
                forecast.begin();
                for guess in &pass.foreseen {
                    forecast.predicted(guess.origin, guess.layer, &guess.scores);
                }
            }
            forecast
        };
        b.iter_batched(|| Forecast::new(FLAGSHIP), predict, BatchSize::LargeInput);
    });
    group.finish();
}

criterion_group!(benches, scheduler);
criterion_main!(benches);
