//! `outrider lookahead`: what each part of Lookahead Expert Scheduling gains on flash as slow as a phone's, and how near
//! it comes to what no policy can pass.

mod measure;
mod predict;
mod simulate;

use std::io::Write;
use std::path::PathBuf;

use outrider::engine::Engine;
use outrider::les::Settings;
use outrider::les::replay::{Contender, Routes};
use outrider::{Error, Result};
use serde::Serialize;

use crate::model::ModelArgs;
use crate::{print, recall, texts};
use measure::Bench;
pub use measure::slow;
use predict::{Predicted, Predictor, Verdict};

/// Measure what reading ahead gains on slow flash
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts to run the model on, one JSON object a line: `text`, or its tokens as `ids`
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// How slow flash is: reading all experts of a token takes so many times as long as computing it
    #[arg(long, value_delimiter = ',', default_value = "2.5,6")]
    slowness: Vec<f64>,
    /// Slots in the pool
    #[arg(long, value_delimiter = ',', default_value = "128,80")]
    slots: Vec<usize>,
    /// Rounds, in each of which every configuration runs twice, in both orders
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Tokens of one run
    #[arg(long, default_value_t = 24)]
    tokens: usize,
    /// Only configurations whose names contain this, beside the first and the last
    #[arg(long)]
    only: Option<String>,
    /// Compare pool policies by replaying the routing instead
    #[arg(long)]
    policies: bool,
    /// Count how often forecasts name what is chosen instead, on all the texts
    #[arg(long, conflicts_with_all = ["policies", "simulate"])]
    recall: bool,
    /// Compare settings in virtual time instead
    #[arg(long)]
    simulate: bool,
    /// Profile this machine before, and compare what the simulator predicts with what is measured
    #[arg(long, conflicts_with_all = ["policies", "simulate"])]
    predict: bool,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Layers ahead that are recorded.
const DEPTH: usize = 4;

#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    backend: String,
    /// Part of all experts that has a slot.
    pool: f64,
    slots: usize,
    /// Reading a token's experts ÷ computing it.
    ratio: f64,
    /// Against the first row, the median over rounds, and its 95 % interval.
    speedup: f64,
    ci: [f64; 2],
    /// Of what the bound allows: the larger of computing, and reading what a clairvoyant pool would still read.
    efficiency: f64,
    /// Speed-up at the bound.
    cap: f64,
    hit: f64,
    /// A token.
    demand_bytes: f64,
    speculative_bytes: f64,
    /// Milliseconds a token waited for bytes, and for the router's choice to come back.
    stall_bytes: f64,
    stall_roundtrip: f64,
    readbacks: f64,
    /// Against every expert resident.
    resident: f64,
    /// Milliseconds a token, the median.
    time: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted: Option<Predicted>,
}

/// From reading on demand to reading ahead, a part at a time: nothing, a pool, overlap, look-ahead.
pub fn ladder(look: Settings) -> [Settings; 4] {
    let overlap = Settings { guesses: 0, ..look };
    let pool = Settings { ready_first: false, ..overlap };
    [Settings { keep: false, ..pool }, pool, overlap, look]
}

pub fn run(args: Args) -> Result<()> {
    if args.rounds == 0 || args.tokens == 0 {
        return Err(Error::Request("a measurement needs a round and a token".to_owned()));
    }
    pollster::block_on(args.run())
}

impl Args {
    async fn run(self) -> Result<()> {
        let model = self.model.on_cpu();
        let mut resident = model.untrained().load().await?;
        // By the maps of the pack, which were fitted to other texts.
        let mut trained = if model.trains(&resident) { Some(model.load().await?) } else { None };
        let texts = texts::read(&self.text, None, &resident).await?;
        if self.recall {
            return write_recall(&mut resident, trained.as_mut(), &texts).await;
        }
        let wanted = self.tokens * 2 * (self.rounds + measure::WARM_ROUNDS);
        let stream = measure::Stream::new(&texts, wanted, resident.context())?;
        let trace = measure::record(&mut resident, &stream, DEPTH).await?;
        let routes = Routes::of(&trace);
        let by_maps = match &mut trained {
            Some(engine) if !self.policies => Some(measure::record(engine, &stream, DEPTH).await?),
            _ => None,
        };
        drop(trained);
        if self.simulate {
            let warm = self.tokens * 2 * measure::WARM_ROUNDS;
            return simulate::compare(&trace, by_maps.as_ref(), &self.slots, &self.slowness, warm);
        }
        if self.policies {
            return self.compare_policies(&routes, self.tokens * 2 * measure::WARM_ROUNDS);
        }
        let predictor = match self.predict {
            true => {
                let traces = (&trace, by_maps.as_ref());
                Some(Predictor::new(&mut resident, traces, &stream, self.tokens, self.rounds).await?)
            }
            false => None,
        };
        let mut groups = Vec::new();
        for &slots in &self.slots {
            let (only, maps) = (self.only.as_deref(), by_maps.is_some());
            let mut bench = Bench::new(&model, slots, &stream, &routes, self.tokens, only, maps).await?;
            for &slowness in &self.slowness {
                let slowed = match &predictor {
                    Some(predictor) => Some(predictor.slowed(&model.untrained(), slots, slowness).await?),
                    None => None,
                };
                let throttle = slowed.map(|slowed| slowed.throttle);
                let mut found = bench.run(slowness, self.rounds, throttle).await?;
                if let Some((predictor, slowed)) = predictor.as_ref().zip(slowed) {
                    let times: Vec<_> =
                        bench.configs().map(|(config, slots)| predictor.times(config, slots, &slowed)).collect();
                    found.iter_mut().zip(&times).for_each(|(row, own)| predict::compare(row, &times[0], own));
                }
                if !self.json {
                    print::results(|out| found.iter().try_for_each(|row| write(out, row)))?;
                }
                groups.push(found);
            }
        }
        let verdict = self.predict.then(|| Verdict::of(&groups));
        let rows: Vec<Row> = groups.into_iter().flatten().collect();
        print::results(|out| match (&verdict, self.json) {
            (Some(verdict), true) => writeln!(out, "{}", serde_json::json!({ "rows": rows, "verdict": verdict })),
            (None, true) => writeln!(out, "{}", serde_json::json!({ "rows": rows })),
            (Some(verdict), false) => verdict.write(out),
            (None, false) => Ok(()),
        })
    }

    /// Hit rates by policy and pool.
    fn compare_policies(&self, routes: &Routes, from: usize) -> Result<()> {
        const CONTENDERS: [(&str, Contender); 5] = [
            ("LRU", Contender::Lru),
            ("LFU", Contender::Lfu),
            ("per-layer LRU", Contender::LayerLru),
            ("used here", Contender::Lrfu),
            ("clairvoyant", Contender::Clairvoyant),
        ];
        let shape = routes.shape;
        let uses = ((routes.tokens() - from) * shape.layers * shape.top_k) as f64;
        let part = |percent: usize| shape.keys() * percent / 100;
        let small = shape.layers * (shape.top_k * 5).div_ceil(2);
        let pools = [part(10), part(15), small, part(25), part(50)];
        print::results(|out| {
            writeln!(out, "| slots | {} |", CONTENDERS.map(|c| c.0).join(" | "))?;
            writeln!(out, "|---:|{}", "---:|".repeat(CONTENDERS.len()))?;
            for slots in pools.into_iter().filter(|slots| *slots >= shape.top_k) {
                write!(out, "| {slots} ({:.0} %) |", 100.0 * slots as f64 / shape.keys() as f64)?;
                for (_, contender) in CONTENDERS {
                    let missed = outrider::les::replay::misses(routes, slots, contender, from);
                    write!(out, " {:.1} % |", 100.0 * (1.0 - missed as f64 / uses))?;
                }
                writeln!(out)?;
            }
            Ok(())
        })
    }
}

async fn write_recall(untrained: &mut Engine, trained: Option<&mut Engine>, texts: &[Vec<u32>]) -> Result<()> {
    let texts: Vec<&[u32]> = texts.iter().map(|ids| &ids[..ids.len().min(untrained.context())]).collect();
    let depth = Settings::default().depth;
    let router = untrained.recall(&texts, depth).await?;
    let maps = match trained {
        Some(engine) => Some(engine.recall(&texts, depth).await?),
        None => None,
    };
    print::results(|out| recall::write(out, &router, maps.as_ref()))
}

fn write(out: &mut impl Write, row: &Row) -> std::io::Result<()> {
    write!(
        out,
        "{:>4} slots r {:<4} {:<28} × {:>5.2} [{:.2}, {:.2}] of {:>5.2}  efficiency {:.2}  resident {:.2}  hit {:>5.1} %  {:>4.0} + {:>4.0} kB  waited {:.2} ms",
        row.slots,
        row.ratio,
        row.name,
        row.speedup,
        row.ci[0],
        row.ci[1],
        row.cap,
        row.efficiency,
        row.resident,
        100.0 * row.hit,
        row.demand_bytes / 1000.0,
        row.speculative_bytes / 1000.0,
        row.stall_bytes,
    )?;
    if let Some(p) = &row.predicted {
        let (error, time_error) = (100.0 * p.error, 100.0 * p.time_error);
        let (time, measured) = (p.time, row.time);
        write!(
            out,
            "  predicted × {:.2} ({error:+.0} %)  {time:.2} ms of {measured:.2} ({time_error:+.0} %)",
            p.speedup
        )?;
    }
    writeln!(out)
}
