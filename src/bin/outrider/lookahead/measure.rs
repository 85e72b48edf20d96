//! The configurations, and runs that take turns.

use std::rc::Rc;
use std::time::Instant;

use outrider::engine::{Counters, Engine, Want};
use outrider::flash::{Throttle, Throttled};
use outrider::les::Settings;
use outrider::les::replay::{Contender, Routes, misses};
use outrider::les::trace::Trace;
use outrider::{Error, Result};

use super::Row;
use crate::model::ModelArgs;
use crate::statistics::{interval, median};

/// Rounds that fill the pools before anything is measured.
pub const WARM_ROUNDS: usize = 3;

/// Part of an expert's transfer time that passes before its first byte.
const LATENCY: f64 = 0.25;

/// Flash that takes so many seconds to transfer an expert.
pub fn slow(bytes: f64, transfer: f64) -> Throttle {
    Throttle { bandwidth: bytes / transfer, latency: LATENCY * transfer, lanes: 2, ..Throttle::default() }
}

/// Tokens one after the other, and where a new sequence begins.
pub struct Stream {
    pub tokens: Vec<(u32, bool)>,
}

impl Stream {
    pub fn new(texts: &[Vec<u32>], wanted: usize, context: usize) -> Result<Stream> {
        let parts = texts.iter().flat_map(|ids| ids.chunks(context));
        let tokens = parts.flat_map(|ids| ids.iter().enumerate().map(|(i, id)| (*id, i == 0)));
        let tokens: Vec<_> = tokens.take(wanted).collect();
        if tokens.len() < wanted {
            let reason =
                format!("the texts have {} tokens, and {wanted} are needed; give more, or fewer rounds", tokens.len());
            return Err(Error::Request(reason));
        }
        Ok(Stream { tokens })
    }
}

/// What every token chooses, and what could have been foreseen of it.
pub async fn record(engine: &mut Engine, stream: &Stream, depth: usize) -> Result<Trace> {
    engine.record(depth);
    for &(token, first) in &stream.tokens {
        if first {
            engine.reset()?;
        }
        engine.forward(&[token], Want::Nothing, None).await?;
    }
    Ok(engine.take_recording().expect("it was begun above"))
}

pub struct Config {
    name: &'static str,
    pub settings: Settings,
    pub pieces: usize,
    /// Foresees by the maps of the pack.
    pub trained: bool,
    /// The pool has a slot for every expert.
    everything: bool,
}

fn configs(settings: Settings, maps: bool) -> Vec<Config> {
    let [demand, pool, overlap, look] = super::ladder(settings);
    let config = |name, settings, pieces| Config { name, settings, pieces, trained: false, everything: false };
    let trained = maps.then(|| Config { trained: true, ..config("+ look-ahead trained", look, 1) });
    let ladder = [
        config("on demand, three reads", demand, 3),
        config("one read", demand, 1),
        config("+ pool", pool, 1),
        config("+ overlap", overlap, 1),
        config("+ look-ahead untrained", look, 1),
    ];
    let all = Config { everything: true, ..config("everything resident", overlap, 1) };
    ladder.into_iter().chain(trained).chain([all]).collect()
}

struct Runner {
    config: Config,
    engine: Engine,
    flash: Rc<Throttled>,
    /// Seconds a token by run, and what was counted before.
    times: Vec<f64>,
    before: Counters,
}

pub struct Bench<'a> {
    stream: &'a Stream,
    routes: &'a Routes,
    slots: usize,
    /// Tokens of a run.
    run: usize,
    runners: Vec<Runner>,
}

impl<'a> Bench<'a> {
    pub async fn new(
        model: &ModelArgs,
        slots: usize,
        stream: &'a Stream,
        routes: &'a Routes,
        run: usize,
        only: Option<&str>,
        maps: bool,
    ) -> Result<Bench<'a>> {
        let (small, large) = (model.with_slots(slots), model.with_slots(routes.shape.keys()));
        let mut runners = Vec::new();
        for mut config in configs(Settings::default(), maps) {
            let model = if config.everything { &large } else { &small };
            let model = if config.trained { model.clone() } else { model.untrained() };
            let (mut engine, flash) = model.load_throttled().await?;
            let (ends, settings) = (runners.is_empty() || config.everything, engine.scheduling());
            config.settings = Settings { reads: settings.reads, singly: settings.singly, ..config.settings };
            engine.set_pieces(config.pieces);
            engine.set_scheduling(config.settings);
            let before = engine.counters();
            if ends || only.is_none_or(|name| config.name.contains(name)) {
                runners.push(Runner { config, engine, flash, times: Vec::new(), before });
            }
        }
        Ok(Bench { stream, routes, slots, run, runners })
    }

    pub fn configs(&self) -> impl Iterator<Item = (&Config, usize)> {
        self.runners.iter().map(|runner| (&runner.config, runner.engine.slots()))
    }

    /// Without a throttle, flash is made slow by what computing takes now.
    pub async fn run(&mut self, slowness: f64, rounds: usize, throttle: Option<Throttle>) -> Result<Vec<Row>> {
        // Every pool is filled, and every extent checked, before anything is slow.
        let warm = 2 * WARM_ROUNDS * self.run;
        for runner in &mut self.runners {
            runner.flash.set(None);
            runner.decode(&self.stream.tokens[..warm]).await?;
        }
        let resident = self.runners.last_mut().expect("the last is always there");
        let compute = resident.decode(&self.stream.tokens[..warm]).await?;
        let bytes = resident.engine.pack().expert_bytes() as f64;
        let shape = self.routes.shape;
        let a_token = (shape.layers * shape.top_k) as f64;
        let throttle = throttle.unwrap_or_else(|| slow(bytes, slowness * compute / a_token));
        let bandwidth = throttle.bandwidth;
        for runner in &mut self.runners {
            runner.flash.set(Some(throttle));
            runner.times.clear();
            runner.before = runner.engine.counters();
        }
        for (i, tokens) in self.stream.tokens[warm..].chunks_exact(self.run).take(2 * rounds).enumerate() {
            let mut order: Vec<&mut Runner> = self.runners.iter_mut().collect();
            if i % 2 == 1 {
                order.reverse();
            }
            for runner in order {
                let time = runner.decode(tokens).await?;
                runner.times.push(time);
            }
        }
        let uses = (2 * rounds * self.run) as f64 * a_token;
        let end = (warm + 2 * rounds * self.run) * a_token as usize;
        let routes = Routes { shape, ids: self.routes.ids[..end].to_vec() };
        let missed = misses(&routes, self.slots, Contender::Clairvoyant, warm) as f64 / uses;
        Ok(self.rows(slowness, missed, missed * a_token * bytes / bandwidth))
    }

    fn rows(&self, slowness: f64, missed: f64, reading: f64) -> Vec<Row> {
        let (first, last) = (&self.runners[0], &self.runners[self.runners.len() - 1]);
        let bound = median(last.times.clone()).max(reading);
        let row = |runner: &Runner| {
            let pair = |times: &[f64]| times.iter().sum::<f64>();
            let ratios: Vec<f64> =
                first.times.chunks(2).zip(runner.times.chunks(2)).map(|(a, b)| pair(a) / pair(b)).collect();
            let near: Vec<f64> =
                last.times.chunks(2).zip(runner.times.chunks(2)).map(|(a, b)| pair(a) / pair(b)).collect();
            let (now, before) = (runner.engine.counters(), runner.before);
            let tokens = (now.tokens - before.tokens).max(1) as f64;
            let (hits, missed_here) =
                (now.experts.hits - before.experts.hits, now.experts.missed() - before.experts.missed());
            let all = runner.config.everything;
            Row {
                name: runner.config.name,
                backend: runner.engine.backend_info().kind.to_owned(),
                pool: runner.engine.slots() as f64 / self.routes.shape.keys() as f64,
                slots: runner.engine.slots(),
                ratio: slowness,
                speedup: median(ratios.clone()),
                ci: interval(&ratios),
                efficiency: if all { 1.0 } else { bound / median(runner.times.clone()) },
                cap: (1.0 + slowness) / if all { 1.0 } else { (missed * slowness).max(1.0) },
                hit: hits as f64 / (hits + missed_here).max(1) as f64,
                demand_bytes: (now.demand_bytes - before.demand_bytes) as f64 / tokens,
                speculative_bytes: (now.guess_bytes - before.guess_bytes) as f64 / tokens,
                stall_bytes: 1e3 * (now.waits.flash - before.waits.flash) / tokens,
                stall_roundtrip: 0.0,
                readbacks: (now.traffic.readbacks - before.traffic.readbacks) as f64 / tokens,
                resident: median(near),
                time: 1e3 * median(runner.times.clone()),
                predicted: None,
            }
        };
        self.runners.iter().map(row).collect()
    }
}

impl Runner {
    /// Seconds a token.
    async fn decode(&mut self, tokens: &[(u32, bool)]) -> Result<f64> {
        let start = Instant::now();
        for &(token, first) in tokens {
            if first {
                self.engine.reset()?;
            }
            self.engine.forward(&[token], Want::Last, None).await?;
        }
        Ok(start.elapsed().as_secs_f64() / tokens.len() as f64)
    }
}
