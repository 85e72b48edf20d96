//! Puts on the machine what the project needs, and says what and why.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::exec::{self, cargo, find, npm};
use crate::stamp::Stamp;
use crate::{say, wasm_std};

/// The oldest Node that the package's tools and the browser suite run on.
const NODE: u32 = 20;

/// A standard library for wasm32-unknown-unknown.
pub fn wasm_target(root: &Path) -> Result<()> {
    wasm_std::ensure(root)
}

/// Node and the npm packages of the lock file.
pub fn node_modules(root: &Path) -> Result<()> {
    let how = format!("install Node {NODE} or newer with npm (your system's package manager, or nodejs.org)");
    if find("node").is_none() || find("npm").is_none() {
        bail!("the page and its tests need Node, which is not on PATH: {how}");
    }
    let version = exec::capture(Command::new("node").arg("--version"))?;
    let major = version.trim_start_matches('v').split('.').next().and_then(|n| n.parse::<u32>().ok());
    if major.is_none_or(|n| n < NODE) {
        bail!("Node {version} is too old: {how}");
    }
    let manifests =
        ["package.json", "package-lock.json", "pkg/package.json", "www/package.json", "tests/browser/package.json"]
            .map(|file| root.join(file));
    let stamp = Stamp::of(root, "npm", &manifests, &version)?;
    if !stamp.fresh(&root.join("node_modules/.package-lock.json")) {
        say!("installing the npm packages of package-lock.json (they build the page and drive the browser)");
        exec::run(npm(root).args(["ci", "--no-audit", "--no-fund"]))?;
        stamp.set()?;
    }
    Ok(())
}

/// A browser of the Chromium family: `OUTRIDER_CHROMIUM`, one that is installed, or Debian's package where this may
/// install it. The error says how to get one.
pub fn chromium() -> Result<PathBuf> {
    browser("Chromium, Chrome or Edge", "OUTRIDER_CHROMIUM", "chromium", &installed_chromium)
}

fn installed_chromium() -> Option<PathBuf> {
    const NAMES: [&str; 6] =
        ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge", "chrome"];
    const PLACES: [&str; 6] = [
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
        r"C:\Program Files\Google\Chrome\Application\chrome.exe",
        r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
        r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
    ];
    NAMES.iter().find_map(|name| find(name)).or_else(|| PLACES.iter().map(PathBuf::from).find(|p| p.is_file()))
}

/// Firefox, found or installed as [`chromium`] is; `OUTRIDER_FIREFOX` names another.
pub fn firefox() -> Result<PathBuf> {
    const NAMES: [&str; 2] = ["firefox", "firefox-esr"];
    let mac = PathBuf::from("/Applications/Firefox.app/Contents/MacOS/firefox");
    let look = || NAMES.iter().find_map(|name| find(name)).or_else(|| mac.is_file().then(|| mac.clone()));
    browser("Firefox", "OUTRIDER_FIREFOX", "firefox-esr", &look)
}

/// WebKitGTK's MiniBrowser, the nearest to Safari that runs on Linux, which needs a display: xvfb's.
pub fn webkit() -> Result<PathBuf> {
    const PLACES: [&str; 4] = [
        "/usr/lib/x86_64-linux-gnu/webkit2gtk-4.1/MiniBrowser",
        "/usr/lib/aarch64-linux-gnu/webkit2gtk-4.1/MiniBrowser",
        "/usr/libexec/webkit2gtk-4.1/MiniBrowser",
        "/usr/lib/webkit2gtk-4.1/MiniBrowser",
    ];
    let look = || PLACES.iter().map(PathBuf::from).find(|p| p.is_file());
    let found = browser("WebKitGTK", "OUTRIDER_WEBKIT", "webkit2gtk-driver", &look)?;
    if find("xvfb-run").is_none() && apt_install("xvfb", "WebKitGTK's browser needs a display") {
        apt_install("xauth", "xvfb-run needs it");
    }
    if find("xvfb-run").is_none() {
        bail!("WebKitGTK's browser needs a display: install xvfb");
    }
    Ok(found)
}

fn browser(name: &str, variable: &str, package: &str, look: &dyn Fn() -> Option<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(variable).map(PathBuf::from) {
        if path.is_file() {
            return Ok(path);
        }
        bail!("{variable} names {}, which is no file", path.display());
    }
    if let Some(path) = look() {
        return Ok(path);
    }
    if apt_install(package, &format!("no {name} was found, and the package is tested in it"))
        && let Some(path) = look()
    {
        return Ok(path);
    }
    bail!("no {name} was found: install it, or name its executable in {variable}")
}

/// The Vulkan drivers that tests are to use: `None` leaves the choice to the loader (a real GPU, another platform, or
/// what the user has set). On Linux without a GPU it is Mesa's software driver, installed where this may.
pub fn vulkan() -> Result<Option<PathBuf>> {
    let chosen = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].iter().any(|name| std::env::var_os(name).is_some());
    if !cfg!(target_os = "linux") || chosen || has_gpu() {
        return Ok(None);
    }
    if let Some(driver) = lavapipe() {
        return Ok(Some(driver));
    }
    if apt_install("mesa-vulkan-drivers", "there is no GPU, and its software driver lets the GPU tests run")
        && let Some(driver) = lavapipe()
    {
        return Ok(Some(driver));
    }
    bail!(
        "there is no GPU and no software Vulkan driver: install Mesa's (package mesa-vulkan-drivers or vulkan-swrast)"
    )
}

fn has_gpu() -> bool {
    let render_node = std::fs::read_dir("/dev/dri")
        .is_ok_and(|dir| dir.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("renderD")));
    render_node || Path::new("/dev/nvidia0").exists()
}

pub fn lavapipe() -> Option<PathBuf> {
    ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"]
        .iter()
        .filter_map(|dir| std::fs::read_dir(dir).ok())
        .flat_map(|dir| dir.flatten())
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("lvp_icd")))
}

/// Whether cargo-nextest, the faster test runner, is there. It is not installed for the user: `cargo test` does too.
pub fn has_nextest(root: &Path) -> bool {
    let mut command = cargo(root);
    command.args(["nextest", "--version"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Installs a package on Debian and its like when run as root. Says so; `false` when that is not possible.
pub fn apt_install(package: &str, why: &str) -> bool {
    if !can_apt() {
        return false;
    }
    say!("{why}: installing {package} with apt-get");
    let install = || exec::run(apt_get().args(["install", "-y", "--no-install-recommends", package])).is_ok();
    // Lists may be absent or stale; fetching them costs seconds, so only when they turn out to be needed.
    install() || (exec::run(apt_get().arg("update")).is_ok() && install())
}

pub fn can_apt() -> bool {
    let root = cfg!(unix) && Command::new("id").arg("-u").output().is_ok_and(|out| out.stdout.trim_ascii() == b"0");
    root && find("apt-get").is_some()
}

pub fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.arg("-qq").env("DEBIAN_FRONTEND", "noninteractive");
    command
}
