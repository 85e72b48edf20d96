//! Outrider on the command line.

mod bench;
mod common;
mod inspect;
mod logits;
mod pack;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs Mixture-of-Experts language models that are larger than memory.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Store a checkpoint as a pack
    Pack(pack::Pack),
    /// Turn a pack back into a checkpoint, dequantised
    Unpack(pack::Unpack),
    /// Show what a pack holds and the smallest budget it runs in
    Inspect(inspect::Inspect),
    /// Check every byte of a pack against its hash
    Verify(inspect::Verify),
    /// Write what the runtime computes for some tokens, to hold it against a reference
    Logits(logits::Logits),
    /// Measure decode speed with all and with some experts in the pool
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = pollster::block_on(async {
        match cli.command {
            Command::Pack(command) => command.run().await,
            Command::Unpack(command) => command.run().await,
            Command::Inspect(command) => command.run().await,
            Command::Verify(command) => command.run().await,
            Command::Logits(command) => command.run().await,
            Command::Bench(command) => command.run().await,
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
