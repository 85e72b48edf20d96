//! Running other programs.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Tells the user, on standard error, what happens and why.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { eprintln!("xtask: {}", format_args!($($arg)*)) };
}

/// The cargo that runs this.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.current_dir(root);
    // What `cargo run` set for this program must not leak into the crates it builds.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_")) {
            command.env_remove(name);
        }
    }
    command
}

/// Where cargo puts what it builds.
pub fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), |dir| root.join(dir))
}

pub fn npm(root: &Path) -> Command {
    let mut command = Command::new(if cfg!(windows) { "npm.cmd" } else { "npm" });
    command.current_dir(root);
    command
}

/// Runs to the end, with everything the program prints on standard error; fails when the program does.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("could not start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Runs to the end and returns what the program printed on standard output; the rest goes to standard error.
pub fn capture(command: &mut Command) -> Result<String> {
    let shown = show(command);
    let out = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start `{shown}`"))?;
    if !out.status.success() {
        bail!("`{shown}` failed ({})", out.status);
    }
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_string())
}

/// Runs to the end, passing every line on, and hands each to `line` too. Returns whether the program succeeded.
pub fn watch(command: &mut Command, line: impl FnMut(&str) + Send) -> Result<bool> {
    let shown = show(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("could not start `{shown}`"))?;
    let line = std::sync::Mutex::new(line);
    let pump = |from: Box<dyn Read + Send>| {
        let mut reader = BufReader::new(from);
        let mut bytes = Vec::new();
        // By bytes, not by `lines()`: a test may print what is not UTF-8.
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
            let _ = std::io::stderr().write_all(&bytes);
            let text = String::from_utf8_lossy(&bytes);
            (line.lock().expect("no reader panics"))(text.trim_end());
            bytes.clear();
        }
    };
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        if let Some(out) = stdout {
            scope.spawn(|| pump(Box::new(out)));
        }
        if let Some(err) = stderr {
            scope.spawn(|| pump(Box::new(err)));
        }
    });
    Ok(child.wait()?.success())
}

/// Where a program lies on `PATH`.
pub fn find(name: &str) -> Option<PathBuf> {
    let names = if cfg!(windows) { vec![format!("{name}.exe"), format!("{name}.cmd")] } else { vec![name.to_string()] };
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).flat_map(|dir| names.iter().map(move |n| dir.join(n))).find(|file| file.is_file())
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
