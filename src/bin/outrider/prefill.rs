//! `outrider prefill`: how near reading a prompt on flash as slow as a phone's comes to what neither computing nor reading
//! each expert once lets it pass, by the size of its passes.

use std::collections::HashSet;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

use outrider::engine::{Counters, Engine, Want};
use outrider::flash::Throttled;
use outrider::{Error, Result};
use serde::Serialize;

use crate::model::{Chunk, ModelArgs};
use crate::profile::Resident;
use crate::statistics::{interval, median};
use crate::{print, texts};

/// Measure how fast a prompt is read on slow flash, in passes of different sizes
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts that the prompt is taken from, one JSON object a line: `text`, or its tokens as `ids`
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Tokens of a pass at most, or auto
    #[arg(long, value_delimiter = ',', default_value = "64,256,auto")]
    chunks: Vec<Chunk>,
    /// How slow flash is: reading all experts of a token takes so many times as long as computing it
    #[arg(long, value_delimiter = ',', default_value = "2.5,6")]
    slowness: Vec<f64>,
    /// Slots in the pool, which is empty when the prompt comes
    #[arg(long, value_delimiter = ',', default_value = "128,80")]
    slots: Vec<usize>,
    /// Rounds, in each of which every configuration runs twice, in both orders
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    /// The chunk as it was asked for, and the tokens that it came to.
    name: String,
    chunk: usize,
    backend: String,
    /// Part of all experts that has a slot.
    pool: f64,
    slots: usize,
    /// Reading a token's experts ÷ computing it, one token at a time.
    ratio: f64,
    /// Milliseconds, medians: the prompt, the same with every expert resident, and reading what it needs once.
    time: f64,
    compute: f64,
    reading: f64,
    /// Time ÷ the larger of computing and reading, the median over rounds, and its 95 % interval.
    over: f64,
    ci: [f64; 2],
    /// Experts read, their bytes, and those of the experts that some token needs.
    reads: u64,
    bytes: u64,
    distinct_bytes: u64,
    /// Milliseconds that layers waited for bytes.
    stall_bytes: f64,
}

pub fn run(args: Args) -> Result<()> {
    if args.rounds == 0 || args.tokens == 0 || args.chunks.is_empty() {
        return Err(Error::Request("a measurement needs a round, a token and a chunk".to_owned()));
    }
    pollster::block_on(args.run())
}

impl Args {
    async fn run(self) -> Result<()> {
        let model = self.model.on_cpu();
        let mut resident = Runner::new(&model, "resident".to_owned(), How::Resident).await?;
        let prompt = self.prompt(&resident.engine).await?;
        let distinct = distinct(&mut resident.engine, &prompt).await?;
        let tokens: Vec<_> = prompt.iter().enumerate().map(|(i, token)| (*token, i == 0)).collect();
        let costs = Resident::measure(&mut resident.engine, &tokens).await?;
        let mut rows = Vec::new();
        for &slots in &self.slots {
            let mut runners = Vec::new();
            for chunk in &self.chunks {
                let name = chunk.to_string();
                runners.push(Runner::new(&model.with_slots(slots).with_chunk(*chunk), name, How::Empty).await?);
            }
            let chat = Runner::new(&model.with_slots(slots), "auto, in a chat".to_owned(), How::Chat).await?;
            runners.push(chat);
            for runner in &mut runners {
                // Every extent is checked before anything is slow.
                runner.run(&prompt).await?;
            }
            for &slowness in &self.slowness {
                let throttle = costs.throttle(&resident.engine, slowness);
                resident.times.clear();
                for runner in &mut runners {
                    runner.flash.set(Some(throttle));
                    runner.times.clear();
                }
                for i in 0..2 * self.rounds {
                    let mut order: Vec<&mut Runner> = runners.iter_mut().chain([&mut resident]).collect();
                    if i % 2 == 1 {
                        order.reverse();
                    }
                    for runner in order {
                        let seconds = runner.run(&prompt).await?;
                        runner.times.push(seconds);
                    }
                }
                let distinct_bytes = distinct * resident.engine.pack().expert_bytes() as u64;
                let reading = distinct_bytes as f64 / throttle.bandwidth;
                let found = runners.iter().map(|runner| runner.row(&resident, slowness, distinct_bytes, reading));
                let found: Vec<Row> = found.collect();
                if !self.json {
                    print::results(|out| found.iter().try_for_each(|row| write(out, row)))?;
                }
                rows.extend(found);
            }
        }
        match self.json {
            true => print::results(|out| writeln!(out, "{}", serde_json::json!({ "rows": rows }))),
            false => Ok(()),
        }
    }

    /// Texts one after the other, as many tokens as were asked for.
    async fn prompt(&self, engine: &Engine) -> Result<Vec<u32>> {
        let mut prompt = texts::read(&self.text, None, engine).await?.concat();
        prompt.truncate(self.tokens);
        match prompt.len() == self.tokens && self.tokens <= engine.context() {
            true => Ok(prompt),
            false => {
                let (found, context) = (prompt.len(), engine.context());
                let reason = format!("the texts have {found} tokens for a prompt of {}", self.tokens);
                Err(Error::Request(format!("{reason}, in a context of {context}")))
            }
        }
    }
}

/// How many experts the tokens of a prompt choose, all layers together.
async fn distinct(engine: &mut Engine, prompt: &[u32]) -> Result<u64> {
    engine.record(0);
    engine.reset()?;
    engine.forward(prompt, Want::Nothing, None).await?;
    let trace = engine.take_recording().expect("it was begun above");
    let chosen = trace.passes.iter().flat_map(|pass| pass.ids.iter().enumerate());
    let chosen: HashSet<_> = chosen.flat_map(|(layer, ids)| ids.iter().map(move |id| (layer, *id))).collect();
    Ok(chosen.len() as u64)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// With what an earlier run left in the pool: every expert.
    Resident,
    /// Into an empty pool.
    Empty,
    /// As a chat does, which comes back to just before the prompt's end and so runs the last tokens in a pass of their own.
    Chat,
}

struct Runner {
    name: String,
    how: How,
    engine: Engine,
    flash: Rc<Throttled>,
    /// Seconds by run, and what the last counted.
    times: Vec<f64>,
    counted: Counters,
}

impl Runner {
    async fn new(model: &ModelArgs, name: String, how: How) -> Result<Runner> {
        let (engine, flash) = model.load_throttled().await?;
        Ok(Runner { name, how, counted: engine.counters(), engine, flash, times: Vec::new() })
    }

    /// Reads the prompt as a new sequence; seconds.
    async fn run(&mut self, prompt: &[u32]) -> Result<f64> {
        match self.how {
            How::Resident => self.engine.reset()?,
            How::Empty | How::Chat => self.engine.forget_experts().await?,
        }
        let start = Instant::now();
        match self.how {
            How::Chat => self.engine.prefill(prompt).await?,
            _ => self.engine.forward(prompt, Want::Last, None).await?,
        };
        let seconds = start.elapsed().as_secs_f64();
        self.counted = self.engine.counters();
        Ok(seconds)
    }

    fn row(&self, resident: &Runner, ratio: f64, distinct_bytes: u64, reading: f64) -> Row {
        let pair = |times: &[f64]| times.iter().sum::<f64>();
        let pairs = self.times.chunks(2).zip(resident.times.chunks(2));
        let over: Vec<f64> = pairs.map(|(own, compute)| pair(own) / pair(compute).max(2.0 * reading)).collect();
        let counts = self.counted.experts;
        Row {
            name: self.name.clone(),
            chunk: self.engine.chunk(),
            backend: self.engine.backend_info().kind.to_owned(),
            pool: self.engine.slots() as f64 / resident.engine.slots() as f64,
            slots: self.engine.slots(),
            ratio,
            time: 1e3 * median(self.times.clone()),
            compute: 1e3 * median(resident.times.clone()),
            reading: 1e3 * reading,
            ci: interval(&over),
            over: median(over),
            reads: counts.demand_reads + counts.guess_reads,
            bytes: self.counted.expert_bytes(),
            distinct_bytes,
            stall_bytes: 1e3 * self.counted.waits.flash,
        }
    }
}

fn write(out: &mut impl Write, row: &Row) -> std::io::Result<()> {
    writeln!(
        out,
        "{:>4} slots r {:<4} chunk {:<15} ({:>3})  {:>7.1} ms, computing {:>6.1}, reading {:>6.1}  × {:.2} [{:.2}, {:.2}]  {:>4} reads, {:>5.1} of {:.1} MB  waited {:>6.1} ms",
        row.slots,
        row.ratio,
        row.name,
        row.chunk,
        row.time,
        row.compute,
        row.reading,
        row.over,
        row.ci[0],
        row.ci[1],
        row.reads,
        row.bytes as f64 / 1e6,
        row.distinct_bytes as f64 / 1e6,
        row.stall_bytes,
    )
}
