//! The command line: packs, checks and runs models.

mod bench;
mod calibrate;
mod chat;
mod eval;
mod hot;
mod inspect;
mod logits;
mod lookahead;
mod model;
mod pack;
mod prefill;
mod print;
mod profile;
mod progress;
mod recall;
mod self_test;
mod simulate;
mod statistics;
mod texts;
mod trace;
mod unpack;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Runs Mixture-of-Experts language models that are larger than memory.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Chat(chat::Args),
    Pack(pack::Args),
    Unpack(unpack::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    SelfTest(self_test::Args),
    Eval(eval::Args),
    Logits(logits::Args),
    Bench(bench::Args),
    Calibrate(calibrate::Args),
    Lookahead(lookahead::Args),
    Prefill(prefill::Args),
    Simulate(simulate::Args),
    Profile(profile::Args),
    Trace(trace::Args),
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let done = match Cli::parse().command {
        Command::Chat(args) => chat::run(args),
        Command::Pack(args) => pack::run(args),
        Command::Unpack(args) => unpack::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Verify(args) => verify::run(args),
        Command::SelfTest(args) => self_test::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Lookahead(args) => lookahead::run(args),
        Command::Prefill(args) => prefill::run(args),
        Command::Simulate(args) => simulate::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Trace(args) => trace::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
