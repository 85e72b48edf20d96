//! `outrider profile`: this machine with a model, measured, as a file for `outrider simulate`.

pub mod compute;
mod flash;

use std::io::Write;
use std::path::PathBuf;

use outrider::engine::{ALERT, Engine};
use outrider::flash::Throttle;
use outrider::les::Settings;
use outrider::les::profile::Profile;
use outrider::les::simulate::Machine;
use outrider::{Error, Result};

use crate::model::ModelArgs;
use crate::statistics::median;
use crate::{lookahead, print};
use compute::{Costs, Token};

/// Measure this machine, for `outrider simulate`
///
/// The machine should have nothing else to do meanwhile.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Where to write the profile [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Make flash so slow that reading all experts of a token takes so many times as long as computing it
    #[arg(long)]
    slowness: Option<f64>,
    /// Tokens that each measurement takes
    #[arg(long, default_value_t = 64)]
    tokens: usize,
}

/// How often what takes no model is measured.
const TRIPS: usize = 15;

/// What a token takes with experts in the pool.
pub struct Resident {
    costs: Costs,
    /// Of a device's results.
    readback: f64,
    /// A layer that is submitted and not reached.
    skipped: f64,
    wake: f64,
    /// Seconds a token computes: what slowness is relative to.
    pub compute: f64,
}

pub fn run(args: Args) -> Result<()> {
    if args.tokens == 0 || args.slowness.is_some_and(|slowness| !(slowness.is_finite() && slowness > 0.0)) {
        return Err(Error::Request("a measurement needs a token, and a slowness above 0".to_owned()));
    }
    let profile = pollster::block_on(args.profile())?;
    let text = serde_json::to_string_pretty(&profile).expect("a profile is numbers and texts") + "\n";
    // What comes of a measurement can be used.
    Profile::parse(&text)?;
    match &args.out {
        Some(path) => std::fs::write(path, text).map_err(Error::io(path.display())),
        None => print::results(|out| write!(out, "{text}")),
    }
}

impl Args {
    async fn profile(&self) -> Result<Profile> {
        let (mut engine, flash) = self.model.load_throttled().await?;
        let header = engine.header();
        let (shape, setup) = (header.shape, header.setup.expect("an engine knows what it is"));
        if header.expert_bytes == 0 {
            return Err(Error::Request("the model has no experts to read".to_owned()));
        }
        let tokens = tokens(self.tokens, engine.plan().vocab, engine.context());
        let resident = Resident::measure(&mut engine, &tokens).await?;
        drop(engine);
        let slots = (shape.keys() / 4).max(shape.top_k);
        let (mut engine, throttled) = self.model.with_slots(slots).load_throttled().await?;
        drop(flash);
        resident.warm(&mut engine, &tokens).await?;
        let throttle = self.slowness.map(|slowness| resident.throttle(&engine, slowness));
        throttled.set(throttle);
        let (machine, reasons) = resident.machine(&mut engine, &tokens).await?;
        let flash = match (self.slowness, throttle) {
            (Some(slowness), Some(t)) => format!(
                "flash made {slowness} times as slow as computing: {:.1} MB/s, {:.0} µs, {} lanes",
                t.bandwidth / 1e6,
                1e6 * t.latency,
                t.lanes
            ),
            _ => "the files as they are, which the system may have kept in memory".to_owned(),
        };
        let info = engine.backend_info();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let description = format!(
            "measured: {} on the {} ({}), {cores} cores, {}; {flash}",
            setup.model,
            info.kind.to_uppercase(),
            info.detail,
            std::env::consts::OS
        );
        let assumptions = reasons.into_iter().map(|(field, reason)| (field.to_owned(), reason)).collect();
        Ok(Profile { name: format!("{}-{}", setup.model, info.kind), description, machine, assumptions })
    }
}

/// Tokens of a sequence that says nothing, begun anew where the context ends.
fn tokens(count: usize, vocab: usize, context: usize) -> Vec<Token> {
    (0..count).map(|i| ((i * 97 + i * i * 31) as u32 % vocab as u32, i % context == 0)).collect()
}

impl Resident {
    /// Measured on an engine whose pool holds most of what tokens need.
    pub async fn measure(engine: &mut Engine, tokens: &[Token]) -> Result<Resident> {
        let depth = Settings::default().depth;
        engine.reset()?;
        compute::run(engine, tokens, 0).await?; // fills the pool and compiles what is compiled late
        engine.reset()?;
        let without = compute::run(engine, tokens, 0).await?;
        engine.reset()?;
        let mut costs = compute::run(engine, tokens, depth).await?;
        let mut trips = Vec::new();
        for _ in 0..TRIPS {
            trips.extend(engine.round_trip().await?);
        }
        let readback = median(trips);
        let plan = engine.plan();
        let (layers, top_k) = (plan.layers.len(), plan.top_k());
        if without.results > 0.0 {
            // A device's forecasts show only in that its results take longer.
            let foreseen = (0..layers).map(|layer| depth.min(layers - 1 - layer)).sum::<usize>();
            let more = layers as f64 * (costs.results - without.results) / foreseen.max(1) as f64;
            let foresee = costs.foresee + more.max(0.0);
            costs = Costs { foresee, ..without.divided(plan, layers, readback) };
        }
        let skipped = engine.ahead_costs().map_or(0.0, |costs| costs.skipped);
        let machine = Machine { readback, ..costs.machine() };
        Ok(Resident { costs, readback, skipped, wake: flash::wake(), compute: machine.compute(layers, top_k) })
    }

    /// Has another engine check every extent that tokens need, which is done once.
    pub async fn warm(&self, engine: &mut Engine, tokens: &[Token]) -> Result<()> {
        compute::run(engine, tokens, 0).await.map(|_| ())
    }

    /// Flash so slow that reading all experts of a token takes so many times as long as computing it.
    pub fn throttle(&self, engine: &Engine, slowness: f64) -> Throttle {
        let plan = engine.plan();
        let bytes = engine.pack().expert_bytes() as f64;
        lookahead::slow(bytes, slowness * self.compute / (plan.layers.len() * plan.top_k()) as f64)
    }

    /// The machine with an engine's flash, and by field how it was measured. The engine is left reading on demand.
    pub async fn machine(
        &self,
        engine: &mut Engine,
        tokens: &[Token],
    ) -> Result<(Machine, Vec<(&'static str, String)>)> {
        let [demand, ..] = lookahead::ladder(engine.scheduling());
        engine.set_scheduling(demand);
        engine.reset()?;
        let one = compute::run(engine, tokens, 0).await?;
        let resident = &self.costs;
        let request = (one.rest - resident.rest).max(0.0) / (one.reads - resident.reads).max(1.0);
        let begin = (resident.rest - resident.reads * request).max(0.0);
        let measured = flash::measure(engine.pack(), self.wake).await?;
        let upload = one.upload.or(resident.upload).unwrap_or(0.0);
        let machine = Machine {
            flash: measured.speed,
            upload,
            readback: self.readback,
            skipped: self.skipped,
            begin,
            request,
            alert: ALERT,
            wake: self.wake,
            ..resident.machine()
        };
        Ok((machine, self.reasons(engine, tokens.len(), &measured.samples)))
    }

    fn reasons(&self, engine: &Engine, tokens: usize, samples: &[flash::Sample]) -> Vec<(&'static str, String)> {
        let sample = |s: &flash::Sample| format!("{} KiB × {}: {:.1} MB/s", s.bytes >> 10, s.reads, s.bandwidth / 1e6);
        let by_size: Vec<String> = samples.iter().map(sample).collect();
        let typical = format!("the median over {tokens} tokens");
        let spans = |what: &str| format!("measured: {what}, {typical}, the mean over layers");
        let part = |what: &str| match engine.works_while_called() {
            true => spans(what),
            false => {
                format!("measured: waits for results less readbacks, {typical}, divided by bytes of weights: {what}")
            }
        };
        let bandwidth = format!(
            "measured: the most that any number of experts read at once reached. By request size × reads at once: {}",
            by_size.join(", ")
        );
        let latency =
            "measured: an expert read alone, the median, less its bytes at the bandwidth, and the wake if slept over";
        let readback =
            format!("measured: a result that takes next to no work, the median of {TRIPS}; 0 if it is just there");
        let request = format!("measured: what parts leave of a pass that reads all on demand, a read, {typical}");
        let reasons = [
            ("flash.bandwidth", bandwidth),
            ("flash.latency", latency.to_owned()),
            ("flash.lanes", "measured: experts read at once beyond which more gain less than 5 %".to_owned()),
            ("mix", part("a layer up to its router")),
            ("expert", part("an expert of the pool on one token")),
            ("finish", part("the shared expert and the combine")),
            ("head", part("logits; choosing a token is left out")),
            ("foresee", spans("a later layer's router and the forecast made of it")),
            ("upload", format!("measured: {typical}, every expert read on demand")),
            ("readback", readback),
            ("skipped", "measured when the model was loaded: a submission of all layers, none of which has tokens, less a readback; 0 where none is submitted ahead".to_owned()),
            ("begin", format!("measured: what parts leave of a pass, {typical}, less its reads")),
            ("request", request),
            ("alert", "as the engine was built".to_owned()),
            (
                "wake",
                "measured: from a thread's answer until the host that slept over it went on, the median".to_owned(),
            ),
        ];
        reasons.into()
    }
}

impl Costs {
    fn machine(&self) -> Machine {
        Machine {
            mix: self.mix,
            expert: self.expert,
            finish: self.finish,
            head: self.head,
            foresee: self.foresee,
            begin: self.rest,
            ..Machine::default()
        }
    }
}
