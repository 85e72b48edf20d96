//! What a contributor runs: `cargo xtask demo`, `cargo xtask test`, `cargo xtask bench`, `cargo xtask build`.
//!
//! Each command first sets up what is missing on the machine and says so. Everything it has to say goes to standard
//! error; standard output carries results only.

mod bench;
mod demo;
mod exec;
mod lavapipe;
mod setup;
mod stamp;
mod tally;
mod test;
mod wasm_std;
mod web;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, demonstrates and tests Outrider; sets up what is missing first")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the demo page and serve it on localhost, or ask it one question with --headless
    Demo(demo::Options),
    /// Run every check there is: formatting, lints, native tests, the package and the browser suite
    Test(test::Options),
    /// Measure speed and size: native and Chromium, CPU and GPU, all and a quarter of the experts resident
    Bench(bench::Options),
    /// Build the wasm module, the npm package and the page
    Build(web::Options),
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not by returning it, which would print a stack trace under RUST_BACKTRACE.
            say!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    // Set by `cargo run`, and right even where the target directory was copied from another checkout.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map_or(PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = here.parent().context("xtask lies in no workspace")?.to_path_buf();
    match cli.command {
        Command::Demo(options) => demo::run(&root, &options),
        Command::Test(options) => test::run(&root, &options),
        Command::Bench(options) => bench::run(&root, &options),
        Command::Build(options) => web::run(&root, &options),
    }
}
