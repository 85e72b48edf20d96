//! `outrider bench`: speed of greedy replies with every expert resident and with a part of them, interleaved in one run.

use std::io::Write;
use std::time::Instant;

use outrider::chat::Chat;
use outrider::chat::openai::{ChatRequest, Message, Role};
use outrider::engine::{Engine, Want, sampler};
use outrider::error::{Error, Result};
use serde::Serialize;

use crate::model::ModelArgs;
use crate::print;

/// Measure speed with all and with some of the experts in the pool
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// What to ask the model; may be repeated
    #[arg(long, value_name = "PROMPT", default_value = "Can you find me a restaurant in San Jose?")]
    ask: Vec<String>,
    /// Parts of the experts that the pool holds, the first the baseline of the ratios
    #[arg(long, value_delimiter = ',', default_value = "1,0.25")]
    pool: Vec<f64>,
    /// Tokens of a reply at most
    #[arg(long, default_value_t = 32)]
    tokens: usize,
    /// Rounds, in each of which every configuration runs twice, in both orders
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    backend: String,
    pool: f64,
    slots: usize,
    /// Tokens a second, medians over all runs.
    prefill: f64,
    decode: f64,
    /// Decode speed against the first row's, the median of ratios within a pair of runs.
    ratio: f64,
    /// Part of the needed experts that was in the pool, while decoding.
    hit: f64,
    expert_bytes_per_token: f64,
}

#[derive(Default)]
struct Speed {
    tokens: usize,
    seconds: f64,
}

impl Speed {
    fn add(&mut self, tokens: usize, start: Instant) {
        self.tokens += tokens;
        self.seconds += start.elapsed().as_secs_f64();
    }

    fn per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

struct Sample {
    prefill: f64,
    decode: f64,
}

pub fn run(args: Args) -> Result<()> {
    pollster::block_on(args.run())
}

impl Args {
    async fn run(self) -> Result<()> {
        if self.ask.is_empty() || self.pool.is_empty() || self.rounds == 0 {
            return Err(Error::Request("a measurement needs a question, a pool and a round".to_owned()));
        }
        let everything = self.model.load().await?.slots();
        let mut engines = Vec::new();
        for part in &self.pool {
            let slots = (everything as f64 * part).round() as usize;
            engines.push(self.model.with_slots(slots).load().await?);
        }
        let mut samples: Vec<Vec<Sample>> = engines.iter().map(|_| Vec::new()).collect();
        for engine in &mut engines {
            self.measure(engine).await?; // fills the pool and compiles what is compiled late
        }
        let warm: Vec<_> = engines.iter().map(|e| e.counters()).collect();
        for _ in 0..self.rounds {
            let order = (0..engines.len()).chain((0..engines.len()).rev());
            for i in order {
                let sample = self.measure(&mut engines[i]).await?;
                samples[i].push(sample);
            }
        }
        for (i, engine) in engines.iter().enumerate() {
            let info = engine.backend_info();
            let (now, warm) = (engine.counters(), warm[i]);
            let (hits, misses) = (now.experts.hits - warm.experts.hits, now.experts.missed() - warm.experts.missed());
            let ratios = samples[i].iter().zip(&samples[0]).map(|(a, b)| a.decode / b.decode).collect();
            let row = Row {
                backend: format!("{} ({})", info.kind, info.detail),
                pool: self.pool[i],
                slots: engine.slots(),
                prefill: median(samples[i].iter().map(|s| s.prefill).collect()),
                decode: median(samples[i].iter().map(|s| s.decode).collect()),
                ratio: median(ratios),
                hit: hits as f64 / (hits + misses).max(1) as f64,
                expert_bytes_per_token: (now.expert_bytes() - warm.expert_bytes()) as f64
                    / (now.tokens - warm.tokens).max(1) as f64,
            };
            print::results(|out| self.write(out, &row))?;
        }
        Ok(())
    }

    /// Answers every question, each in a new sequence.
    async fn measure(&self, engine: &mut Engine) -> Result<Sample> {
        let chat = Chat::of_pack(engine.pack()).await?;
        let (mut read, mut written) = (Speed::default(), Speed::default());
        for question in &self.ask {
            let request = ChatRequest {
                temperature: Some(0.0),
                max_tokens: Some(self.tokens),
                ..ChatRequest::new(vec![Message::new(Role::User, question)])
            };
            let prompt = chat.prompt(&request)?;
            let mut reply = chat.reply(&request, "bench", prompt.len(), self.tokens);
            engine.reset()?;
            let start = Instant::now();
            let mut token = sampler::argmax(&engine.forward(&prompt, Want::Last, None).await?)?;
            read.add(prompt.len(), start);
            reply.push(token)?;
            let start = Instant::now();
            while reply.finish_reason().is_none() {
                token = sampler::argmax(&engine.forward(&[token], Want::Last, None).await?)?;
                reply.push(token)?;
            }
            written.add(reply.usage().completion_tokens - 1, start);
        }
        Ok(Sample { prefill: read.per_second(), decode: written.per_second() })
    }

    fn write(&self, out: &mut impl Write, row: &Row) -> std::io::Result<()> {
        if self.json {
            return writeln!(out, "{}", serde_json::to_string(row)?);
        }
        writeln!(
            out,
            "{:<40} pool {:>4.0} %  prefill {:>8.1} tok/s  decode {:>8.1} tok/s  ratio {:.3}  hit {:>5.1} %  {:.0} kB read a token",
            row.backend,
            100.0 * row.pool,
            row.prefill,
            row.decode,
            row.ratio,
            100.0 * row.hit,
            row.expert_bytes_per_token / 1000.0
        )
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
