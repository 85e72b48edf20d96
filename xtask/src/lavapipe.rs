//! A Chromium whose software WebGPU is Mesa's lavapipe instead of SwiftShader, with what SwiftShader lacks: `shader-f16`,
//! and subgroups of another size. It is the installed Chromium with one library exchanged.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::exec::{self, find, target_dir};
use crate::stamp::Stamp;
use crate::{say, setup};

/// Dawn, Chromium's WebGPU, refuses older ones. As in the driver's manifest: the last part of the version of Vulkan's
/// headers, which only ever grows.
const HEADERS_OF_MESA_25: u32 = 300;
const MESA: &str = "mesa-vulkan-drivers";
const SWIFTSHADER: &str = "libvk_swiftshader.so";

/// The executable, made under `target/` from `chromium`. The error says what is missing.
pub fn chromium(root: &Path, chromium: &Path) -> Result<PathBuf> {
    if !cfg!(target_os = "linux") {
        bail!("Chromium with lavapipe is tested on Linux only");
    }
    let (home, executable) = home(chromium)?;
    let dir = target_dir(root).join("lavapipe");
    let driver = driver(&dir)?;
    let shim = root.join("xtask/lavapipe_shim.rs");
    let installed = std::fs::metadata(&executable)?;
    let made_of =
        format!("{} {} {:?} {}", executable.display(), installed.len(), installed.modified()?, driver.display());
    let stamp = Stamp::of(root, "lavapipe", std::slice::from_ref(&shim), &made_of)?;
    let copy = dir.join("chromium");
    let made = copy.join("chromium");
    if !stamp.fresh(&made) {
        say!("making a Chromium with {} in {}, for WebGPU's optional features", driver.display(), copy.display());
        if copy.exists() {
            std::fs::remove_dir_all(&copy)?;
        }
        std::fs::create_dir_all(&copy)?;
        exchange(&home, &executable, &copy, &made)?;
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc
            .args(["--edition", "2024", "--crate-type", "cdylib", "--deny", "warnings", "-C", "opt-level=1", "-o"])
            .arg(copy.join(SWIFTSHADER))
            .arg(&shim)
            .env("OUTRIDER_LAVAPIPE", &driver);
        exec::run(&mut rustc)?;
        stamp.set()?;
    }
    Ok(made)
}

/// The directory of Chromium's files, and its executable, which what is on `PATH` only starts.
fn home(chromium: &Path) -> Result<(PathBuf, PathBuf)> {
    let started = chromium.canonicalize()?;
    let homes = ["/usr/lib/chromium", "/usr/lib/chromium-browser"].map(PathBuf::from);
    for home in started.parent().into_iter().chain(homes.iter().map(PathBuf::as_path)) {
        let executable =
            ["chromium", "chrome", "msedge"].iter().map(|name| home.join(name)).find(|path| path.is_file());
        if let (Some(executable), true) = (executable, home.join(SWIFTSHADER).is_file()) {
            return Ok((home.to_path_buf(), executable));
        }
    }
    bail!("{} does not lie beside {SWIFTSHADER}: install Debian's chromium or Google's Chrome", chromium.display())
}

/// Fills `copy` with links to Chromium's files. The executable looks for them where it lies itself, so it is no link.
fn exchange(home: &Path, executable: &Path, copy: &Path, made: &Path) -> Result<()> {
    const DRIVERS: &str = "vk_swiftshader_icd.json";
    for entry in home.read_dir()? {
        let entry = entry?;
        if entry.path() != executable && ![SWIFTSHADER, DRIVERS].map(Into::into).contains(&entry.file_name()) {
            link(&entry.path(), &copy.join(entry.file_name()))?;
        }
    }
    if std::fs::hard_link(executable, made).is_err() {
        std::fs::copy(executable, made).with_context(|| format!("could not copy {}", executable.display()))?;
    }
    // OpenGL, which is not under test, keeps the real one.
    let real = home.join(SWIFTSHADER);
    let manifest =
        format!(r#"{{"file_format_version": "1.0.0", "ICD": {{"library_path": {real:?}, "api_version": "1.0.5"}}}}"#);
    Ok(std::fs::write(copy.join(DRIVERS), manifest)?)
}

#[cfg(unix)]
fn link(to: &Path, at: &Path) -> Result<()> {
    Ok(std::os::unix::fs::symlink(to, at)?)
}

#[cfg(not(unix))]
fn link(_to: &Path, _at: &Path) -> Result<()> {
    bail!("files cannot be linked here")
}

/// The installed lavapipe where it is new enough, or one of Debian's backports, unpacked into `dir`.
fn driver(dir: &Path) -> Result<PathBuf> {
    if let Some(manifest) = setup::lavapipe() {
        let text = std::fs::read_to_string(&manifest)?;
        let headers = field(&text, "api_version").and_then(|version| version.rsplit('.').next()?.parse::<u32>().ok());
        if let (Some(path), true) = (field(&text, "library_path"), headers >= Some(HEADERS_OF_MESA_25)) {
            return Ok(path.into());
        }
    }
    let unpacked = || {
        let libraries = dir.join("mesa/usr/lib").read_dir().ok()?.flatten();
        libraries.map(|entry| entry.path().join("libvulkan_lvp.so")).find(|path| path.is_file())
    };
    let driver = match unpacked() {
        Some(driver) => driver,
        None => {
            backport(dir).context("Chromium with lavapipe needs Mesa 25 or newer: install mesa-vulkan-drivers")?;
            unpacked().context("the backported package has no lavapipe")?
        }
    };
    if !absent_libraries(&driver)?.is_empty() {
        // The older driver needs much the same.
        setup::apt_install(MESA, "lavapipe needs the libraries that it needs");
    }
    let absent = absent_libraries(&driver)?;
    if !absent.is_empty() {
        bail!("{} needs libraries that are not installed: {absent}", driver.display());
    }
    Ok(driver)
}

/// A text field of a driver's manifest.
fn field<'a>(manifest: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = manifest.split_once(&format!("\"{name}\""))?;
    rest.split('"').nth(1)
}

fn absent_libraries(driver: &Path) -> Result<String> {
    let needed = exec::capture(Command::new("ldd").arg(driver))?;
    let absent = needed.lines().filter(|line| line.ends_with("not found"));
    Ok(absent.map(str::trim).collect::<Vec<_>>().join(", "))
}

/// Fetches Mesa's drivers from Debian's backports, with apt's own checks and beside what is installed.
fn backport(dir: &Path) -> Result<()> {
    if find("apt-get").is_none() || find("dpkg-deb").is_none() {
        bail!("there is no apt-get to fetch it with");
    }
    let release = std::fs::read_to_string("/etc/os-release")?;
    let value = |name: &str| release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let (Some("debian"), Some(codename)) = (value("ID"), value("VERSION_CODENAME")) else {
        bail!("this is no Debian release that has a newer one among its backports");
    };
    let (mirror, key) = mirror(codename).with_context(|| format!("apt's sources name no mirror of {codename}"))?;
    say!("fetching {MESA} of {codename}-backports, because the installed one is too old for Chromium");
    let (packages, mesa) = (dir.join("apt"), dir.join("mesa"));
    for part in ["lists/partial", "cache/archives/partial", "download"] {
        std::fs::create_dir_all(packages.join(part))?;
    }
    let list = packages.join("backports.list");
    std::fs::write(&list, format!("deb [signed-by={key}] {mirror} {codename}-backports main\n"))?;
    let apt = |args: &[&str]| {
        let mut command = setup::apt_get();
        let set = |name: &str, value: &Path| format!("{name}={}", value.display());
        command
            .current_dir(packages.join("download"))
            .args(["-o", &set("Dir::Etc::sourcelist", &list), "-o", "Dir::Etc::sourceparts=/dev/null"])
            .args(["-o", &set("Dir::State::lists", &packages.join("lists"))])
            .args(["-o", &set("Dir::Cache", &packages.join("cache")), "-o", "APT::Sandbox::User="])
            .args(args);
        exec::run(&mut command)
    };
    apt(&["update"])?;
    apt(&["download", &format!("{MESA}/{codename}-backports")])?;
    let mut files = packages.join("download").read_dir()?.flatten();
    let package = files.next().context("apt-get left no package")?.path();
    // Complete or not there, so that what an interrupted run left is never taken for it.
    let partial = dir.join("mesa.partial");
    exec::run(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&partial))?;
    if mesa.exists() {
        std::fs::remove_dir_all(&mesa)?;
    }
    std::fs::rename(partial, mesa)?;
    Ok(std::fs::remove_dir_all(packages)?)
}

/// Where apt gets this release from, and the key that vouches for it.
fn mirror(codename: &str) -> Option<(String, String)> {
    let mut sources = std::fs::read_to_string("/etc/apt/sources.list").unwrap_or_default();
    for entry in std::fs::read_dir("/etc/apt/sources.list.d").ok()?.flatten() {
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        _ = write!(sources, "\n\n{text}");
    }
    find_mirror(&sources, codename)
}

/// Looks in sources of both formats: stanzas of fields, and lines.
fn find_mirror(sources: &str, codename: &str) -> Option<(String, String)> {
    const KEY: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
    for stanza in sources.split("\n\n") {
        let value = |name: &str| stanza.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if let (Some(suites), Some(uris)) = (value("Suites:"), value("URIs:"))
            && suites.split(' ').any(|suite| suite == codename)
        {
            let key = value("Signed-By:").filter(|key| key.starts_with('/')).unwrap_or(KEY);
            return Some((uris.split(' ').next()?.to_string(), key.to_string()));
        }
    }
    sources.lines().find_map(|line| {
        let rest = line.strip_prefix("deb ")?.trim_start();
        let rest = if rest.starts_with('[') { rest.split_once(']')?.1 } else { rest };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        (suite == codename).then(|| (uri.to_string(), KEY.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::{field, find_mirror};

    #[test]
    fn the_mirror_is_that_of_the_release() {
        let security = "Types: deb\nURIs: http://one.example/security\nSuites: bookworm-security\nComponents: main";
        let main = "Types: deb\n# a remark\nURIs: http://two.example/debian\nSuites: bookworm bookworm-updates\nSigned-By: /key.gpg";
        let found = find_mirror(&format!("{security}\n\n{main}\n"), "bookworm");
        assert_eq!(found, Some(("http://two.example/debian".into(), "/key.gpg".into())));
        let lines = "# deb http://off.example bookworm main\ndeb http://three.example other main\ndeb [arch=amd64 signed-by=/k] http://four.example/debian bookworm main";
        assert_eq!(find_mirror(lines, "bookworm").unwrap().0, "http://four.example/debian");
        assert_eq!(find_mirror(security, "bookworm"), None);
    }

    #[test]
    fn a_drivers_manifest_is_read() {
        let manifest = r#"{ "ICD": { "api_version": "1.4.305", "library_path": "/usr/lib/libvulkan_lvp.so" } }"#;
        assert_eq!(field(manifest, "api_version"), Some("1.4.305"));
        assert_eq!(field(manifest, "library_path"), Some("/usr/lib/libvulkan_lvp.so"));
        assert_eq!(field(manifest, "none"), None);
    }
}
