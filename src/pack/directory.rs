//! Writing a pack or a checkpoint to a directory, all of it or nothing.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::manifest::{MANIFEST, is_manifest};
use super::maps::is_map_file;
use super::{Manifest, Map, SelfTest, Sink, put_maps};
use crate::error::{Error, Result};

/// What at the target gives way to what is written. Names of files alone would not do: websites have a
/// `manifest.json` and many programs a `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    Nothing,
    /// A pack, of any version.
    Pack,
    /// A checkpoint of one file, as [`unpack`](crate::import::unpack) writes it.
    Checkpoint,
}

impl Replace {
    fn includes(self, dir: &Path) -> bool {
        match self {
            Replace::Nothing => false,
            Replace::Pack => fs::read(dir.join(MANIFEST)).is_ok_and(|json| is_manifest(&json)),
            Replace::Checkpoint => ["config.json", "model.safetensors"].iter().all(|f| dir.join(f).is_file()),
        }
    }
}

/// Writes to a directory beside the target and renames it at the end, so that a crash leaves nothing that looks
/// like a pack.
pub struct DirectorySink {
    target: PathBuf,
    partial: PathBuf,
    files: HashMap<String, File>,
    done: bool,
}

impl DirectorySink {
    /// Prepares to write `target`. What `replace` names gives way at the end.
    ///
    /// # Errors
    /// [`Error::Request`] if `target` exists and may not be replaced; [`Error::Io`].
    pub fn new(target: &Path, replace: Replace) -> Result<DirectorySink> {
        let shown = target.display();
        let name = target.file_name().ok_or_else(|| Error::Request(format!("`{shown}` names no directory")))?;
        if occupied(target)? {
            let kind = match replace {
                Replace::Nothing => {
                    let reason = format!("`{shown}` exists; choose another, or --force to replace it");
                    return Err(Error::Request(reason));
                }
                Replace::Pack => "pack",
                Replace::Checkpoint => "checkpoint",
            };
            if !replace.includes(target) {
                let reason = format!("`{shown}` holds no {kind} but something else, which is not replaced");
                return Err(Error::Request(reason));
            }
        }
        let partial = target.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        remove(&partial)?;
        fs::create_dir_all(&partial).map_err(Error::io(partial.display()))?;
        Ok(DirectorySink { target: target.to_owned(), partial, files: HashMap::new(), done: false })
    }
}

fn occupied(dir: &Path) -> Result<bool> {
    match fs::read_dir(dir) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(dir.display())(e)),
    }
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(dir.display())(e)),
        _ => Ok(()),
    }
}

impl Sink for DirectorySink {
    type Pack = ();

    fn append(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.partial.join(file);
        let mut open = match self.files.get(file) {
            Some(open) => open,
            None => {
                let made = File::create_new(&path).map_err(Error::io(path.display()))?;
                self.files.entry(file.to_owned()).or_insert(made)
            }
        };
        open.write_all(bytes).map_err(Error::io(path.display()))
    }

    fn finish(mut self) -> Result<()> {
        for (name, file) in self.files.drain() {
            file.sync_all().map_err(Error::io(self.partial.join(name).display()))?;
        }
        // Renaming replaces an empty directory only, so what is there steps aside first.
        let old = self.partial.with_extension("old");
        remove(&old)?;
        let replaced = match fs::rename(&self.target, &old) {
            Ok(()) => true,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
            Err(e) => return Err(Error::io(self.target.display())(e)),
        };
        if let Err(e) = fs::rename(&self.partial, &self.target) {
            if replaced {
                let _ = fs::rename(&old, &self.target);
            }
            return Err(Error::io(self.target.display())(e));
        }
        self.done = true;
        remove(&old)
    }
}

impl Drop for DirectorySink {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// Puts a self-test into the pack at `dir`, in the place of any it has. Nothing but the manifest changes.
///
/// # Errors
/// [`Error::Format`] if the manifest or the self-test is not valid, [`Error::Io`].
pub fn set_self_test(dir: &Path, test: SelfTest) -> Result<()> {
    let mut manifest = read(dir)?;
    manifest.self_test = Some(test);
    manifest.validate()?;
    let mut sink = InPlace::new(dir);
    sink.append(MANIFEST, &manifest.to_json())?;
    sink.finish()
}

/// Puts maps into the pack at `dir`, in the place of any it has. Cut at any moment it is what it was, or has them all.
///
/// # Errors
/// Those of [`put_maps`], [`Error::Format`] if the manifest is not valid, [`Error::Io`].
pub fn set_maps(dir: &Path, maps: &[Map]) -> Result<Manifest> {
    let before = read(dir)?;
    let mut sink = InPlace::new(dir);
    let manifest = put_maps(&before, maps, &mut sink)?;
    sink.append(MANIFEST, &manifest.to_json())?;
    sink.finish()?;
    // What was replaced, and what calls that were cut have left.
    let stale = |name: &str| is_map_file(name) && manifest.shards.iter().all(|shard| shard.file != name);
    for entry in fs::read_dir(dir).map_err(Error::io(dir.display()))? {
        let entry = entry.map_err(Error::io(dir.display()))?;
        if entry.file_name().to_str().is_some_and(stale) {
            fs::remove_file(entry.path()).map_err(Error::io(entry.path().display()))?;
        }
    }
    Ok(manifest)
}

fn read(dir: &Path) -> Result<Manifest> {
    let path = dir.join(MANIFEST);
    Manifest::parse(&fs::read(&path).map_err(Error::io(path.display()))?)
}

/// Adds files to a directory, each under another name until all are written; then they take the place of what is there in
/// the order in which they were begun, the manifest last.
struct InPlace {
    dir: PathBuf,
    files: Vec<(String, File)>,
}

impl InPlace {
    fn new(dir: &Path) -> InPlace {
        InPlace { dir: dir.to_owned(), files: Vec::new() }
    }

    fn partial(&self, file: &str) -> PathBuf {
        self.dir.join(format!(".{file}.partial"))
    }
}

impl Sink for InPlace {
    type Pack = ();

    fn append(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.partial(file);
        if self.files.last().is_none_or(|(last, _)| last != file) {
            let made = File::create(&path).map_err(Error::io(path.display()))?;
            self.files.push((file.to_owned(), made));
        }
        let (_, open) = self.files.last_mut().expect("one was pushed");
        open.write_all(bytes).map_err(Error::io(path.display()))
    }

    fn finish(mut self) -> Result<()> {
        for (name, file) in &self.files {
            file.sync_all().map_err(Error::io(self.partial(name).display()))?;
        }
        for (name, _) in std::mem::take(&mut self.files) {
            let path = self.dir.join(&name);
            fs::rename(self.partial(&name), &path).map_err(Error::io(path.display()))?;
        }
        Ok(())
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        for (name, _) in &self.files {
            let _ = fs::remove_file(self.partial(name));
        }
    }
}
