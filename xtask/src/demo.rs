//! `cargo xtask demo`: the page, built and served, or asked one question.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::web::{self, Profile};
use crate::{say, setup};

#[derive(Args)]
pub struct Options {
    /// Ask the page this in headless Chromium and print only its reply
    #[arg(long, value_name = "PROMPT")]
    headless: Option<String>,
    /// The port to serve on (default: 8080, or any that is free with --headless)
    #[arg(long)]
    port: Option<u16>,
    /// What computes
    #[arg(long, value_enum, default_value = "auto")]
    backend: Backend,
    /// The memory the model may take, as in 64MiB (default: the page's own choice)
    #[arg(long)]
    budget: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    Auto,
    Cpu,
    Gpu,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    if !root.join("models/concierge/manifest.json").is_file() {
        bail!("models/concierge, the bundled model, is not in this checkout: restore it with `git checkout -- models`");
    }
    let chromium = options.headless.as_ref().map(|_| setup::chromium()).transpose()?;
    web::build(root, Profile::Ship, web::Step::Page)?;

    let backend = options.backend.to_possible_value().context("every backend has a name")?;
    let mut query = format!("backend={}", backend.get_name());
    if let Some(budget) = &options.budget {
        query += &format!("&budget={budget}");
    }
    let mut node = Command::new("node");
    node.current_dir(root);
    match (&options.headless, chromium) {
        (Some(prompt), Some(chromium)) => {
            node.arg("tests/browser/ask.mjs").args(["--prompt", prompt]).env("OUTRIDER_CHROMIUM", chromium);
            node.args(["--port", &options.port.unwrap_or(0).to_string()]);
        }
        _ => {
            say!("serving the page; stop with Ctrl-C");
            node.arg("tests/browser/server.mjs").args(["--port", &options.port.unwrap_or(8080).to_string()]);
        }
    }
    node.args(["--query", &query, "--isolated", "/=www/dist", "/models=models"]);
    let status = node.stdin(Stdio::null()).status().context("could not start node")?;
    if !status.success() {
        bail!("the page's server ended with {status}");
    }
    Ok(())
}
