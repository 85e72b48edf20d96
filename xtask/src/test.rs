//! `cargo xtask test`: every check there is, in the order in which a mistake shows soonest.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use crate::exec::{self, cargo, find};
use crate::tally::Tally;
use crate::web::{self, Profile};
use crate::{lavapipe, say, setup};

#[derive(Args)]
pub struct Options {
    /// A few minutes' worth: what a change breaks most often
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// The heavy tests too (those marked `#[ignore]`)
    #[arg(long)]
    full: bool,
    /// Run these steps only, after what they need (repeatable)
    #[arg(long, value_enum)]
    only: Vec<Step>,
    /// Run tests only whose names contain this
    filter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    /// Formatting
    Fmt,
    /// Lints of the native build
    Clippy,
    /// Lints of the browser build
    ClippyWasm,
    /// Native tests, with those of the GPU backend
    Native,
    /// Documentation's examples
    Doc,
    /// The wasm module, the npm package and the page are built, and the package is tested in Node and as it is published
    Package,
    /// The package, the page and a built app in Chromium (the package with lavapipe too), Firefox and WebKitGTK
    Browser,
}

impl Step {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }
}

/// Tests of files that are too large to keep beside the sources, and the variables that name them.
const NEED_FILES: [(&str, &[&str]); 2] = [
    ("trained_model_matches_the_reference", &["OUTRIDER_CONCIERGE", "OUTRIDER_CONCIERGE_GOLDEN"]),
    ("eight_bits_lose_at_most_a_fifth_of_a_percent", &["OUTRIDER_CONCIERGE"]),
];

enum Outcome {
    Ran(Tally),
    Skipped(String),
}

struct Suite<'a> {
    root: &'a Path,
    options: &'a Options,
    /// On a CI machine what cannot run is a failure.
    ci: bool,
}

pub fn run(root: &Path, options: &Options) -> Result<()> {
    let ci = std::env::var("CI").is_ok_and(|value| value == "true" || value == "1");
    let suite = Suite { root, options, ci };
    let start = Instant::now();
    let mut total = Tally::default();
    let mut rows: Vec<(Step, Outcome, Duration)> = Vec::new();
    for &step in Step::value_variants() {
        if !options.only.is_empty() && !options.only.contains(&step) {
            continue;
        }
        say!("── {}", step.name());
        let begun = Instant::now();
        let outcome = suite.step(step).unwrap_or_else(|error| {
            say!("{} could not run: {error:#}", step.name());
            Outcome::Ran(Tally::one(false))
        });
        if let Outcome::Ran(tally) = &outcome {
            total += *tally;
        }
        rows.push((step, outcome, begun.elapsed()));
    }
    println!();
    for (step, outcome, time) in &rows {
        let result = match outcome {
            Outcome::Ran(tally) => tally.to_string(),
            Outcome::Skipped(why) => format!("SKIPPED: {why}"),
        };
        println!("{:<12} {:>7.1} s  {result}", step.name(), time.as_secs_f64());
    }
    println!("{:<12} {:>7.1} s", "all", start.elapsed().as_secs_f64());
    println!("{} passed, {} failed", total.passed, total.failed);
    if total.failed > 0 {
        std::process::exit(1);
    }
    Ok(())
}

impl Suite<'_> {
    fn step(&self, step: Step) -> Result<Outcome> {
        let quick = self.options.quick && self.options.only.is_empty();
        match step {
            Step::Fmt => self.component("fmt", "rustfmt", &["--all", "--check"]),
            Step::Clippy => self.component(
                "clippy",
                "clippy",
                &["--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"],
            ),
            Step::ClippyWasm if quick => Ok(Outcome::Skipped("--quick".into())),
            Step::ClippyWasm => {
                setup::wasm_target(self.root)?;
                let target = ["--package", "outrider", "--lib", "--target", "wasm32-unknown-unknown"];
                let lints = ["--", "--deny", "warnings"];
                self.component("clippy", "clippy", &[&["--quiet"][..], &target, &lints].concat())
            }
            Step::Native => self.native(),
            Step::Doc if quick => Ok(Outcome::Skipped("--quick".into())),
            Step::Doc => {
                let mut command = cargo(self.root);
                command.args(["test", "--quiet", "--workspace", "--doc", "--no-fail-fast"]);
                self.suite(&mut command).map(Outcome::Ran)
            }
            Step::Package if !web::has_sources(self.root) => {
                Ok(Outcome::Skipped("there are no pkg/ and www/ yet".into()))
            }
            Step::Package => {
                web::build(self.root, Profile::Dev, web::Step::Page)?;
                self.package()
            }
            Step::Browser => self.browser(),
        }
    }

    /// A cargo subcommand that comes as a rustup component, which a minimal installation lacks.
    fn component(&self, command: &str, component: &str, args: &[&str]) -> Result<Outcome> {
        let present = || exec::capture(cargo(self.root).args([command, "--version"])).is_ok();
        if !present() {
            if find("rustup").is_none() {
                return self.missing(format!("cargo {command} is not installed and there is no rustup to add it"));
            }
            say!("adding rustup's component {component}, which checks the sources");
            let added = exec::run(Command::new("rustup").args(["component", "add", component]).current_dir(self.root));
            if added.is_err() || !present() {
                return self.missing(format!("cargo {command} is missing and rustup could not add it"));
            }
        }
        Ok(Outcome::Ran(Tally::one(exec::run(cargo(self.root).arg(command).args(args)).is_ok())))
    }

    fn native(&self) -> Result<Outcome> {
        let mut command = cargo(self.root);
        if setup::has_nextest(self.root) {
            command.args(["nextest", "run", "--workspace", "--no-fail-fast", "--no-tests", "pass"]);
            if self.options.full {
                command.args(["--run-ignored", "all"]);
                let absent: Vec<String> = self.absent().map(|name| format!("test({name})")).collect();
                if !absent.is_empty() {
                    command.args(["-E", &format!("not ({})", absent.join(" + "))]);
                }
            }
            command.args(&self.options.filter);
        } else {
            command.args(["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast"]);
            command.args(&self.options.filter);
            if self.options.full {
                command.args(["--", "--include-ignored"]);
                command.args(self.absent().flat_map(|name| ["--skip", name]));
            }
        }
        match setup::vulkan() {
            Ok(driver) => {
                // The same driver everywhere, and no test that quietly passes without one.
                command.envs(driver.map(|path| ("VK_DRIVER_FILES", path))).env("OUTRIDER_REQUIRE_GPU", "1");
            }
            Err(why) if self.ci => bail!(why),
            Err(why) => say!("SKIPPED: the GPU backend's tests: {why:#}"),
        }
        self.suite(&mut command).map(Outcome::Ran)
    }

    /// The package's tests that need no browser. That it was built counts as one.
    fn package(&self) -> Result<Outcome> {
        let mut tests: Vec<_> = self.root.join("pkg/test").read_dir()?.flatten().map(|entry| entry.path()).collect();
        tests.retain(|path| path.to_string_lossy().ends_with(".test.mjs"));
        tests.sort();
        let mut command = Command::new("node");
        command
            .current_dir(self.root)
            .args(["--test-reporter", "spec"])
            .args(self.options.filter.iter().flat_map(|text| ["--test-name-pattern", text]))
            .arg("--test")
            .args(tests);
        let mut tally = self.suite(&mut command)?;
        tally += Tally::one(true);
        Ok(Outcome::Ran(tally))
    }

    /// Tests of the full run whose files are not there. Says so.
    fn absent(&self) -> impl Iterator<Item = &'static str> {
        NEED_FILES
            .into_iter()
            .filter(|(name, variables)| {
                let missing = variables.iter().find(|variable| std::env::var_os(variable).is_none());
                if let Some(variable) = missing {
                    say!("SKIPPED: {name}, because {variable} does not say where its files are");
                }
                missing.is_some()
            })
            .map(|(name, _)| name)
    }

    fn browser(&self) -> Result<Outcome> {
        let chromium = match setup::chromium() {
            Ok(path) => path,
            Err(why) => return self.missing(format!("{why:#}")),
        };
        setup::node_modules(self.root)?;
        if web::has_sources(self.root) {
            web::build(self.root, Profile::Dev, web::Step::Page)?;
        }
        let mut command = Command::new("node");
        command
            .current_dir(self.root)
            .args(["--test-reporter", "spec"])
            .args(self.options.filter.iter().flat_map(|text| ["--test-name-pattern", text]))
            .arg("tests/browser/main.mjs")
            .args(self.options.quick.then_some("--quick"))
            .args(self.options.full.then_some("--full"))
            .env("OUTRIDER_CHROMIUM", &chromium);
        if !self.options.quick {
            // Firefox's WebGPU is to find the same driver as the native tests do.
            command.envs(setup::vulkan().ok().flatten().map(|path| ("VK_DRIVER_FILES", path)));
            for (variable, found) in [
                ("OUTRIDER_CHROMIUM_LAVAPIPE", lavapipe::chromium(self.root, &chromium)),
                ("OUTRIDER_FIREFOX", setup::firefox()),
                ("OUTRIDER_WEBKIT", setup::webkit()),
            ] {
                match found {
                    Ok(path) => _ = command.env(variable, path),
                    Err(why) if self.ci => return Err(why),
                    Err(why) => say!("SKIPPED: {why:#}"),
                }
            }
        }
        self.suite(&mut command).map(Outcome::Ran)
    }

    /// Runs a suite and counts its tests. One that fails without a failed test (it does not compile) counts as one.
    fn suite(&self, command: &mut Command) -> Result<Tally> {
        let mut tally = Tally::default();
        let succeeded = exec::watch(command, |line| {
            if let Some(counts) = Tally::of_line(line) {
                tally += counts;
            }
        })?;
        if !succeeded && tally.failed == 0 {
            tally.failed = 1;
        }
        Ok(tally)
    }

    fn missing(&self, why: String) -> Result<Outcome> {
        if self.ci {
            bail!("{why}");
        }
        say!("SKIPPED: {why}");
        Ok(Outcome::Skipped(why))
    }
}
