//! The browser build: wasm module → npm package (`pkg/`) → page (`www/`). Steps that are up to date are skipped.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use wasm_bindgen_cli_support::Bindgen;

use crate::exec::{self, cargo, npm};
use crate::stamp::Stamp;
use crate::{say, setup};

#[derive(Args)]
pub struct Options {
    /// How to compile the wasm module
    #[arg(long, value_enum, default_value = "dev")]
    profile: Profile,
    /// Stop after this step
    #[arg(long, value_enum, default_value = "page")]
    until: Step,
}

/// `ship` is what is published (small, minutes to build); `dev` is what the tests use.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    Dev,
    Ship,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Step {
    Wasm,
    Package,
    Page,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    build(root, options.profile, options.until)
}

/// Whether this checkout has the package and the page.
pub fn has_sources(root: &Path) -> bool {
    ["pkg", "www"].iter().all(|dir| root.join(dir).join("package.json").is_file())
}

/// Sets up what is missing and runs all steps up to `until`.
pub fn build(root: &Path, profile: Profile, until: Step) -> Result<()> {
    setup::wasm_target(root)?;
    wasm(root, profile)?;
    if until >= Step::Package {
        setup::node_modules(root)?;
        package(root)?;
    }
    if until >= Step::Page {
        page(root)?;
    }
    Ok(())
}

/// Compiles the library and writes `pkg/wasm/outrider.js`, `outrider_bg.wasm` and `outrider.d.ts`.
pub fn wasm(root: &Path, profile: Profile) -> Result<()> {
    let (name, dir) = match profile {
        Profile::Dev => ("dev", "debug"),
        Profile::Ship => ("ship", "ship"),
    };
    let mut build = cargo(root);
    build.args(["build", "--package", "outrider", "--lib", "--target", "wasm32-unknown-unknown", "--profile", name]);
    if profile == Profile::Ship {
        say!("compiling the wasm module for release (minutes the first time)");
    }
    exec::run(&mut build)?;
    let module = exec::target_dir(root).join("wasm32-unknown-unknown").join(dir).join("outrider.wasm");
    let out = root.join("pkg/wasm");
    let stamp = Stamp::of(root, "wasm", std::slice::from_ref(&module), name)?;
    if stamp.fresh(&out.join("outrider_bg.wasm")) {
        return Ok(());
    }
    if out.exists() {
        std::fs::remove_dir_all(&out)?;
    }
    Bindgen::new()
        .input_path(&module)
        .out_name("outrider")
        .web(true)?
        .typescript(true)
        .remove_producers_section(true)
        .remove_name_section(profile == Profile::Ship)
        .generate(&out)
        .context("wasm-bindgen could not generate the module's JavaScript")?;
    stamp.set()
}

/// Builds the npm package into `pkg/dist`.
pub fn package(root: &Path) -> Result<()> {
    npm_build(root, "pkg", &[root.join("pkg")])
}

/// Builds the page into `www/dist`.
pub fn page(root: &Path) -> Result<()> {
    npm_build(root, "www", &[root.join("www"), root.join("pkg/dist")])
}

fn npm_build(root: &Path, dir: &str, inputs: &[PathBuf]) -> Result<()> {
    if !root.join(dir).join("package.json").is_file() {
        bail!("{dir}/package.json is not in this checkout, so there is nothing to build there");
    }
    let mut all = vec![root.join("package-lock.json")];
    all.extend_from_slice(inputs);
    let stamp = Stamp::of(root, dir, &all, "")?;
    if !stamp.fresh(&root.join(dir).join("dist")) {
        say!("building {dir}/dist");
        exec::run(npm(root).args(["run", "build", "--workspace", dir]))?;
        stamp.set()?;
    }
    Ok(())
}
