//! `outrider trace`: where the time of a recording went.

mod account;
mod timeline;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use outrider::les::trace::{Pass, Reader, Setup};
use outrider::{Error, Result};
use serde::Serialize;

use crate::print;
use account::{Account, Layer, Parts};

/// See where the time of a recorded chat went
#[derive(clap::Args)]
pub struct Args {
    /// What `outrider chat --trace` wrote
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Of passes of one token, unless it says otherwise. Milliseconds and bytes are a token's.
#[derive(Serialize)]
struct Report {
    setup: Option<Setup>,
    tokens: usize,
    /// Of passes of several tokens.
    prompt_tokens: usize,
    prompt_seconds: f64,
    milliseconds: Parts,
    layers: Vec<Layer>,
    demand_bytes: f64,
    speculative_bytes: f64,
    /// Experts that were there when a layer's routing was known, of those it needed.
    hit: f64,
    /// Reading experts while the host does not wait for them, of reading experts.
    overlap: Option<f64>,
    recall: Vec<Recall>,
    slowest: Moment,
    median: Moment,
}

/// Of forecasts so many layers ahead, in all passes.
#[derive(Serialize)]
struct Recall {
    distance: usize,
    recall: f64,
}

/// A pass of one token.
#[derive(Clone, Serialize)]
struct Moment {
    /// Among the passes, from 0.
    pass: usize,
    milliseconds: f64,
}

pub fn run(args: Args) -> Result<()> {
    let mut account = None;
    each(&args.file, |reader, at, pass| {
        account.get_or_insert_with(|| Account::new(reader)).add(at, &pass);
    })?;
    let report = account.as_ref().and_then(Report::new).ok_or_else(|| {
        Error::Request(
            "the recording has no pass of one token with its times; `outrider chat --trace` records them".into(),
        )
    })?;
    if args.json {
        return print::results(|out| writeln!(out, "{}", serde_json::json!(report)));
    }
    let mut drawn = [(&report.slowest, "slowest", None), (&report.median, "median", None)];
    each(&args.file, |_, at, pass| {
        for (_, _, found) in drawn.iter_mut().filter(|(moment, ..)| moment.pass == at) {
            *found = pass.timing.as_ref().map(timeline::draw);
        }
    })?;
    print::results(|out| {
        report.write(out)?;
        for (moment, name, lines) in &drawn {
            writeln!(out, "\n{name} token, pass {}: {:.2} ms", moment.pass, moment.milliseconds)?;
            lines.iter().flatten().try_for_each(|line| writeln!(out, "{line}"))?;
        }
        Ok(())
    })
}

type Lines = std::io::Lines<BufReader<File>>;

/// Reads a recording pass by pass: it may be larger than memory.
fn each(path: &Path, mut visit: impl FnMut(&Reader<Lines>, usize, Pass)) -> Result<()> {
    let file = File::open(path).map_err(Error::io(path.display()))?;
    let mut reader = Reader::new(BufReader::new(file).lines())?;
    let mut at = 0;
    while let Some(pass) = reader.next() {
        visit(&reader, at, pass?);
        at += 1;
    }
    Ok(())
}

impl Report {
    fn new(account: &Account) -> Option<Report> {
        let (slowest, median) = account.slowest_and_median()?;
        let tokens = account.times.len() as f64;
        let layers = account.layers.iter().map(|layer| layer.per(tokens)).collect();
        let (needed, missed) = account.layers.iter().fold((0.0, 0.0), |(n, m), l| (n + l.needed, m + l.missed));
        Some(Report {
            setup: account.setup.clone(),
            tokens: account.times.len(),
            prompt_tokens: account.prompt_tokens,
            prompt_seconds: account.prompt_seconds,
            milliseconds: account.parts.times(1e3 / tokens),
            layers,
            demand_bytes: account.demand_bytes / tokens,
            speculative_bytes: account.speculative_bytes / tokens,
            hit: 1.0 - missed / needed.max(1.0),
            overlap: (account.reading > 0.0).then(|| 1.0 - account.waited / account.reading),
            recall: account.recall().map(|(distance, recall)| Recall { distance, recall }).collect(),
            slowest,
            median,
        })
    }

    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        if let Some(Setup { model, backend, slots, .. }) = &self.setup {
            writeln!(out, "{model} on the {}, {slots} slots", backend.to_uppercase())?;
        }
        if self.prompt_tokens > 0 {
            let (tokens, seconds) = (self.prompt_tokens, self.prompt_seconds);
            writeln!(out, "passes of several tokens: {tokens} tokens in {seconds:.3} s")?;
        }
        writeln!(out, "passes of one token: {}, each on average", self.tokens)?;
        let total = self.milliseconds.total();
        writeln!(out, "\n{:<28} {:>8}", "", "ms")?;
        for (name, value) in self.milliseconds.named().into_iter().chain([("together", total)]) {
            writeln!(out, "{name:<28} {value:>8.3} {:>5.1} %", 100.0 * value / total)?;
        }
        writeln!(out, "\nlayer      mix  experts   finish  uploads  stall: bytes  readback   hit %")?;
        for (at, layer) in self.layers.iter().enumerate() {
            writeln!(
                out,
                "{at:>5} {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>13.3} {:>9.3} {:>7.1}",
                layer.mix,
                layer.run,
                layer.finish,
                layer.upload,
                layer.stall_bytes,
                layer.stall_results,
                100.0 * (1.0 - layer.missed / layer.needed.max(f64::MIN_POSITIVE)),
            )?;
        }
        let (demand, guessed) = (self.demand_bytes / 1e3, self.speculative_bytes / 1e3);
        writeln!(out, "\nread a token  {demand:.0} kB on demand, {guessed:.0} kB speculative")?;
        writeln!(out, "hit           {:.1} %", 100.0 * self.hit)?;
        if let Some(overlap) = self.overlap {
            writeln!(out, "overlap       {:.1} % of the time of reads is not waited for", 100.0 * overlap)?;
        }
        for Recall { distance, recall } in &self.recall {
            writeln!(out, "recall        {:.1} % {distance} ahead", 100.0 * recall)?;
        }
        Ok(())
    }
}
