//! A standard library for `wasm32-unknown-unknown`: rustup's, or, where rustup cannot fetch, one built from the sources
//! that Debian packages for this very compiler.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::exec::{self, cargo, find};
use crate::{say, setup};

const TARGET: &str = "wasm32-unknown-unknown";

/// How long rustup may take to fetch some 20 MB before the other way is tried.
const RUSTUP_PATIENCE: Duration = Duration::from_secs(180);

/// The suites that may carry the sources of a compiler newer than the system's.
const SUITES: [&str; 6] = ["trixie-backports", "sid", "forky", "trixie", "bookworm-backports", "bookworm"];

pub fn ensure(root: &Path) -> Result<()> {
    let rustc = Rustc::active(root)?;
    if rustc.has_std() {
        return Ok(());
    }
    say!("the compiler has no {TARGET} library, which the browser build needs: asking rustup for it");
    if find("rustup").is_some() && rustup_add(root) && rustc.has_std() {
        return Ok(());
    }
    if !setup::can_apt() {
        bail!("install it with `rustup target add {TARGET}`, or with your system's package of Rust for wasm");
    }
    say!("rustup could not fetch it: building it once from Debian's rust-src {}", rustc.version);
    let work = exec::target_dir(root).join("xtask/wasm-std");
    build(&rustc, &work, root).context("could not build the wasm library")?;
    ensure!(rustc.has_std(), "the library just built is not where the compiler looks for it");
    std::fs::remove_dir_all(&work)?;
    Ok(())
}

struct Rustc {
    sysroot: PathBuf,
    version: String,
}

impl Rustc {
    fn active(root: &Path) -> Result<Rustc> {
        let rustc = || {
            let mut command = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
            command.current_dir(root);
            command
        };
        let sysroot = exec::capture(rustc().args(["--print", "sysroot"]))?.into();
        let banner = exec::capture(rustc().arg("--version"))?;
        let version = banner.split_whitespace().nth(1).context("rustc printed no version")?.to_string();
        Ok(Rustc { sysroot, version })
    }

    fn libraries(&self) -> PathBuf {
        self.sysroot.join("lib/rustlib").join(TARGET).join("lib")
    }

    fn has_std(&self) -> bool {
        std::fs::read_dir(self.libraries())
            .is_ok_and(|dir| dir.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("libstd-")))
    }
}

fn rustup_add(root: &Path) -> bool {
    let mut command = Command::new("rustup");
    command.args(["target", "add", TARGET]).current_dir(root).stdin(Stdio::null()).stdout(std::io::stderr());
    let Ok(mut child) = command.spawn() else { return false };
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if start.elapsed() < RUSTUP_PATIENCE => std::thread::sleep(Duration::from_millis(100)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
        }
    }
}

fn build(rustc: &Rustc, work: &Path, root: &Path) -> Result<()> {
    std::fs::create_dir_all(work)?;
    let library = sources(rustc, work)?;
    // Cargo wants the sources inside the sysroot; they are only linked for the time of the build.
    let link = rustc.sysroot.join("lib/rustlib/src/rust/library");
    let linked = !link.join("std/Cargo.toml").exists();
    if linked {
        std::fs::create_dir_all(link.parent().context("the sysroot has no parent")?)?;
        symlink(&library, &link)?;
    }
    let built = compile(rustc, &work.join("build"), root);
    if linked {
        std::fs::remove_file(&link)?;
    }
    built
}

/// Fetches and unpacks `rust-src` of exactly this version, with apt state of its own so that the system's stays as is.
fn sources(rustc: &Rustc, work: &Path) -> Result<PathBuf> {
    let state = work.join("apt");
    for dir in ["lists/partial", "cache/archives/partial", "deb"] {
        std::fs::create_dir_all(state.join(dir))?;
    }
    let mut list = String::new();
    for suite in SUITES {
        list += &format!("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {} {suite} main\n", mirror()?);
    }
    std::fs::write(state.join("sources.list"), list)?;
    let options: Vec<String> = [
        ("Dir::Etc::SourceList", state.join("sources.list")),
        ("Dir::Etc::SourceParts", PathBuf::from("/dev/null")),
        ("Dir::State::Lists", state.join("lists")),
        ("Dir::Cache", state.join("cache")),
        ("APT::Sandbox::User", PathBuf::from("root")),
        ("Acquire::Languages", PathBuf::from("none")),
    ]
    .into_iter()
    .flat_map(|(key, value)| ["-o".to_string(), format!("{key}={}", value.display())])
    .collect();
    // A suite that this mirror lacks is no failure: the version is looked for in the others.
    let _ = exec::run(setup::apt_get().args(&options).arg("update"));
    let versions = exec::capture(Command::new("apt-cache").args(&options).args(["madison", "rust-src"]))?;
    let wanted = versions
        .lines()
        .filter_map(|line| line.split('|').nth(1))
        .map(str::trim)
        .find(|v| v.strip_prefix(&rustc.version).is_some_and(|rest| rest.starts_with(['+', '~', '-'])))
        .with_context(|| format!("Debian packages no rust-src {}", rustc.version))?;
    exec::run(
        setup::apt_get()
            .args(&options)
            .args(["download", &format!("rust-src={wanted}")])
            .current_dir(state.join("deb")),
    )?;
    let package = std::fs::read_dir(state.join("deb"))?.next().context("apt-get downloaded nothing")??.path();
    let unpacked = work.join("rust-src");
    exec::run(Command::new("dpkg-deb").arg("-x").arg(package).arg(&unpacked))?;
    let library = unpacked.join(format!("usr/src/rustc-{}/library", rustc.version));
    ensure!(library.join("std/Cargo.toml").is_file(), "the package has no {}", library.display());
    Ok(library)
}

/// The Debian archive the system itself is configured to use.
fn mirror() -> Result<String> {
    let targets = exec::capture(Command::new("apt-get").args(["indextargets", "--format", "$(REPO_URI)"]))?;
    let uri = targets.lines().find(|uri| !uri.contains("security")).context("apt has no package source configured")?;
    Ok(uri.to_string())
}

fn compile(rustc: &Rustc, dir: &Path, root: &Path) -> Result<()> {
    std::fs::create_dir_all(dir.join("src"))?;
    let manifest =
        "[package]\nname = \"empty\"\nedition = \"2021\"\n[profile.release]\npanic = \"unwind\"\n[workspace]\n";
    std::fs::write(dir.join("Cargo.toml"), manifest)?;
    std::fs::write(dir.join("src/lib.rs"), "")?;
    let mut command = cargo(root);
    command
        .current_dir(dir)
        .args(["build", "--release", "--target", TARGET, "-Zbuild-std=std,panic_abort,panic_unwind,proc_macro,test"])
        .env("CARGO_TARGET_DIR", dir.join("target"))
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        // A stable compiler, for this one build of its own library.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
        // With bitcode, as the official library has it, so that link-time optimisation can see into it. In RUSTFLAGS,
        // because it takes the place of what the workspace's configuration sets for the target.
        .env("RUSTFLAGS", "-Cembed-bitcode=yes");
    exec::run(&mut command)?;
    let staged = rustc.libraries().with_extension("new");
    std::fs::create_dir_all(&staged)?;
    for entry in std::fs::read_dir(dir.join("target").join(TARGET).join("release/deps"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".rlib") && !name.starts_with("libempty") {
            std::fs::copy(&path, staged.join(name))?;
        }
    }
    // In one step, so that an interrupted copy is never taken for a library.
    std::fs::rename(&staged, rustc.libraries())?;
    Ok(())
}

#[cfg(unix)]
fn symlink(from: &Path, to: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(from, to)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
