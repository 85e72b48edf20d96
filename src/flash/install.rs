//! Brings a pack from a server into a local store, extent by extent, so that an installation cut at any byte resumes
//! where it was and repairs only what is wrong.
//!
//! A marker is written last and names every file with its size; a store that holds it, and files of those sizes, is
//! complete and is used as it is. Without it, whatever lies in the store is checked against the hashes of the manifest
//! before it is kept.
//!
//! When the pack on the server has changed, files that differ are put together beside the ones in use, from what is there
//! already and from what is fetched; the next marker makes them the ones in use. Until then nothing of the pack that is
//! complete is touched.

mod check;
mod marker;
#[cfg(test)]
mod tests;
mod transfer;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use futures_util::future::LocalBoxFuture;

pub use self::marker::{Installation, Installed, MARKERS, hash};
use self::transfer::{Install, copies};
use super::{Bytes, Flash};
use crate::error::{Error, Result};

/// What [`ensure`] downloads first, and writes when everything else is in place.
pub const MANIFEST: &str = "manifest.json";

/// Largest manifest accepted, so that a wrong address cannot fill the memory.
const MANIFEST_MAX: u64 = 256 << 20;
/// Times in a row a connection may break without having delivered a byte.
const ATTEMPTS: u32 = 4;
/// Times a pack may change on the server while it is installed.
const ROUNDS: u32 = 3;

/// A stretch of a file and its BLAKE3 hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    pub offset: u64,
    pub len: u64,
    pub hash: [u8; 32],
}

/// A file of a pack. Bytes that lie in no extent are padding and are not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    pub name: String,
    pub size: u64,
    /// By offset, none overlapping another, all within `size`.
    pub extents: Vec<Extent>,
}

/// Where a pack is downloaded from.
pub trait Source {
    /// Asks for `range` of a file, or the whole file, past the caches on the way: what is fetched again because it was
    /// wrong must not be wrong again.
    fn get<'a>(&'a self, file: &'a str, range: Option<Range<u64>>) -> LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>>;

    /// Asks for a whole file without waiting long. Caches on the way may answer if the server says that what they hold is
    /// what it has; `anew`, they may not.
    fn peek<'a>(&'a self, file: &'a str, anew: bool) -> LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>>;

    /// Waits before the `attempt`-th repetition of a request, counted from 1.
    fn pause(&self, attempt: u32) -> LocalBoxFuture<'_, ()>;
}

/// The bytes of an answer as they arrive. Dropping it cancels the request.
pub trait Body {
    /// The next bytes, never none of them; `None` at the end.
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Option<Bytes>>>;

    /// What the server calls this version of the file, where that is known: another tag is another content.
    fn tag(&self) -> Option<String>;
}

/// Where a pack is kept. [`Flash::size`] of a file that is not there is [`Error::NotFound`].
pub trait Store: Flash {
    /// Writes at an offset; a file that does not exist is made, one that is shorter is extended.
    fn write<'a>(&'a self, file: &'a str, offset: u64, bytes: Bytes) -> LocalBoxFuture<'a, Result<()>>;

    /// Cuts or extends a file to a length.
    fn resize<'a>(&'a self, file: &'a str, len: u64) -> LocalBoxFuture<'a, Result<()>>;

    /// Returns once what was written to a file will outlive a crash of the process.
    fn flush<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<()>>;

    /// Deletes a file; one that does not exist is none of the errors.
    fn remove<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<()>>;

    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<String>>>;

    /// Bytes that may still be written, where that can be known.
    fn free(&self) -> LocalBoxFuture<'_, Result<Option<u64>>>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Checking what is there already.
    Verify,
    Download,
}

/// `done` of `total` bytes of the pack: checked so far, or in place so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub phase: Phase,
    pub done: u64,
    pub total: u64,
}

pub trait Observer {
    fn progress(&self, progress: Progress);

    /// Whether to give up with [`Error::Aborted`]; asked every MiB or so.
    fn aborted(&self) -> bool;
}

/// What [`ensure`] may do about a complete installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Ask the server whether the pack has changed, and if so bring the new one.
    pub update: bool,
    /// Nobody else uses the store, so that what is no longer of use may be deleted.
    pub alone: bool,
}

#[derive(Debug)]
pub struct Outcome {
    pub installation: Installation,
    /// What the user should know: why a pack that has changed is not the one that is used.
    pub notice: Option<String>,
}

/// Turns a manifest into the files it names.
type Describe<'a> = dyn Fn(&[u8]) -> Result<Vec<File>> + 'a;

/// Sees to it that the store holds the whole pack. `describe` turns a manifest into the files it names and refuses one
/// that is not valid, not supported or not wanted; it is called before anything else is downloaded.
///
/// A complete installation stays usable whatever happens to its update.
///
/// # Errors
/// Those of `describe` and the store; [`Error::Http`] and [`Error::Network`] for what the server did;
/// [`Error::Truncated`] if a file ends early there; [`Error::Corrupt`] if an extent is wrong twice in a row;
/// [`Error::Quota`] if the store is too small, before anything is written; [`Error::Aborted`].
pub async fn ensure(
    source: &dyn Source,
    store: &dyn Store,
    describe: &Describe<'_>,
    observer: &dyn Observer,
    policy: Policy,
) -> Result<Outcome> {
    let job = Job { source, store, describe, observer, policy };
    let held = Installation::latest(store).await?;
    if let Some(held) = &held
        && let Some(manifest) = held.complete(store).await?
    {
        match describe(&manifest) {
            Ok(files) if policy.update => return job.renew(held, &files).await,
            Ok(_) => return Ok(Outcome { installation: held.clone(), notice: None }),
            // Installed by a build that read another version: only the server can help.
            Err(Error::Version { .. } | Error::Format { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    // Files that are written in place have their length before they have their bytes.
    if let Some(held) = &held {
        held.distrust(store).await?;
    }
    let held = Installation::latest(store).await?;
    let mut manifest = match get_whole(source.peek(MANIFEST, false)).await {
        Err(_) => get_manifest(source).await?,
        Ok(manifest) => manifest,
    };
    if let Err(Error::Format { .. }) = describe(&manifest) {
        // A cache on the way may have gone bad.
        manifest = get_manifest(source).await?;
    }
    let installation = job.bring(manifest, held.as_ref(), None).await?;
    Ok(Outcome { installation, notice: None })
}

#[derive(Clone, Copy)]
struct Job<'a> {
    source: &'a dyn Source,
    store: &'a dyn Store,
    describe: &'a Describe<'a>,
    observer: &'a dyn Observer,
    policy: Policy,
}

impl Job<'_> {
    /// Brings the pack that the server has now, if it is another than the one held.
    async fn renew(&self, held: &Installation, files: &[File]) -> Result<Outcome> {
        let stay = |notice| Ok(Outcome { installation: held.clone(), notice });
        // Without a network, or with a server that is gone or slow, there is nothing to be told.
        let Ok(manifest) = get_whole(self.source.peek(MANIFEST, false)).await else { return stay(None) };
        if marker::hash(&manifest) == held.manifest {
            self.sweep(|name| held.owns(name)).await;
            return stay(None);
        }
        let Ok(manifest) = get_whole(self.source.peek(MANIFEST, true)).await else { return stay(None) };
        if marker::hash(&manifest) == held.manifest {
            return stay(None);
        }
        match self.bring(manifest, Some(held), Some(files)).await {
            Ok(installation) => Ok(Outcome { installation, notice: None }),
            Err(Error::Aborted) => Err(Error::Aborted),
            Err(error) => stay(Some(format!(
                "the model has changed on the server, and the new one could not be installed: {error}. \
                 The one from before is used"
            ))),
        }
    }

    /// Installs the pack of a manifest, and if that changes on the way, the one that it has become. With the files of a
    /// complete installation, `base`, beside that; else in place.
    async fn bring(
        &self,
        mut manifest: Vec<u8>,
        held: Option<&Installation>,
        base: Option<&[File]>,
    ) -> Result<Installation> {
        let mut heed_tags = true;
        let mut round = 0;
        loop {
            let files = (self.describe)(&manifest)?;
            files.iter().try_for_each(check_shape)?;
            let stored = places(&manifest, &files, held, base);
            let next = Installation::new(held, &manifest, &files, stored);
            let install = Install {
                source: self.source,
                store: self.store,
                observer: self.observer,
                next: &next,
                total: files.iter().map(|f| f.size).sum(),
                done: Cell::new(0),
                tags: heed_tags.then(RefCell::default),
                moved: Cell::new(false),
            };
            let outcome = match (base, held) {
                (Some(base), Some(held)) => {
                    self.sweep(|name| held.owns(name) || next.owns(name)).await;
                    // What is kept under the same name is the same.
                    let changed: Vec<&File> = files.iter().filter(|f| !held.owns(next.place(&f.name))).collect();
                    install.run(&changed, &copies(base, held)).await
                }
                _ => {
                    for name in self.store.list().await? {
                        if !MARKERS.contains(&name.as_str()) && !next.owns(&name) {
                            self.store.remove(&name).await?;
                        }
                    }
                    install.run(&files.iter().collect::<Vec<_>>(), &HashMap::new()).await
                }
            };
            let Err(error) = outcome else {
                put(self.store, next.place(MANIFEST), &manifest).await?;
                next.write(self.store).await?;
                if base.is_some() {
                    self.sweep(|name| next.owns(name)).await;
                }
                return Ok(next);
            };
            round += 1;
            if round > ROUNDS || !(install.moved.get() || is_mismatch(&error)) {
                return Err(error);
            }
            // What does not fit this manifest may fit the one that the server has now.
            match get_whole(self.source.peek(MANIFEST, true)).await {
                Ok(now) if now != manifest => manifest = now,
                // Some servers have several tags for the same content.
                Ok(_) if install.moved.get() => heed_tags = false,
                _ => return Err(error),
            }
        }
    }

    /// Deletes what `keep` does not name, but for names that begin with a dot, which no file of a pack has. What cannot be
    /// deleted now will be another time.
    async fn sweep(&self, keep: impl Fn(&str) -> bool) {
        if !self.policy.alone {
            return;
        }
        for name in self.store.list().await.unwrap_or_default() {
            if !MARKERS.contains(&name.as_str()) && !name.starts_with('.') && !keep(&name) {
                let _ = self.store.remove(&name).await;
            }
        }
    }
}

/// Where the files of a pack are put. Beside a complete installation, those that are in it stay where they are, and the
/// others get a name that says what will be in them, so that an update that was cut short is gone on with.
fn places(
    manifest: &[u8],
    files: &[File],
    held: Option<&Installation>,
    base: Option<&[File]>,
) -> BTreeMap<String, String> {
    let same = |name: &str| held.map_or(name, |h| h.place(name)).to_owned();
    let other = |name: &str, hash: &str| format!("{name}.{}", &hash[..16]);
    let mut stored: BTreeMap<String, String> = files
        .iter()
        .map(|file| {
            let place = match base {
                Some(base) if !base.contains(file) => other(&file.name, &describe_hash(file)),
                _ => same(&file.name),
            };
            (file.name.clone(), place)
        })
        .collect();
    let manifest = if base.is_some() { other(MANIFEST, &marker::hash(manifest)) } else { same(MANIFEST) };
    stored.insert(MANIFEST.to_owned(), manifest);
    stored.retain(|name, place| name != place);
    stored
}

/// A hash of everything that a manifest says about a file.
fn describe_hash(file: &File) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&file.size.to_le_bytes());
    for extent in &file.extents {
        hasher.update(&extent.offset.to_le_bytes()).update(&extent.len.to_le_bytes()).update(&extent.hash);
    }
    hasher.finalize().to_hex().to_string()
}

/// Refuses what the rest of this file could not work with.
fn check_shape(file: &File) -> Result<()> {
    let refuse = |why| Err(Error::format("manifest", format!("file `{}` {why}", file.name)));
    if file.name.is_empty() || file.name == MANIFEST || MARKERS.contains(&file.name.as_str()) {
        return refuse("has a name that is not allowed");
    }
    let mut at = 0;
    for extent in &file.extents {
        let end = extent.offset.checked_add(extent.len).filter(|end| *end <= file.size);
        match end {
            Some(end) if extent.offset >= at && extent.len > 0 => at = end,
            _ => return refuse("has extents that are empty, overlap, or lie outside it"),
        }
    }
    Ok(())
}

async fn size_of(store: &dyn Store, file: &str) -> Result<Option<u64>> {
    match store.size(file).await {
        Ok(size) => Ok(Some(size)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

async fn read_whole(store: &dyn Store, file: &str) -> Result<Option<Vec<u8>>> {
    match size_of(store, file).await? {
        Some(size @ 1..=MANIFEST_MAX) => Ok(Some(store.read(file, 0, size as usize).await?.into_vec())),
        _ => Ok(None),
    }
}

async fn put(store: &dyn Store, file: &str, bytes: &[u8]) -> Result<()> {
    store.resize(file, 0).await?;
    store.write(file, 0, Bytes::Owned(bytes.to_vec())).await?;
    store.flush(file).await
}

async fn get_manifest(source: &dyn Source) -> Result<Vec<u8>> {
    let mut attempt = 0;
    loop {
        match get_whole(source.get(MANIFEST, None)).await {
            Err(error) if is_passing(&error) && attempt + 1 < ATTEMPTS => {
                attempt += 1;
                source.pause(attempt).await;
            }
            result => return result,
        }
    }
}

async fn get_whole<'a>(body: LocalBoxFuture<'a, Result<Box<dyn Body + 'a>>>) -> Result<Vec<u8>> {
    let mut body = body.await?;
    let mut whole = Vec::new();
    while let Some(bytes) = body.next().await? {
        let at = whole.len();
        if (at + bytes.len()) as u64 > MANIFEST_MAX {
            return Err(Error::format("manifest", format!("it is larger than {} MiB", MANIFEST_MAX >> 20)));
        }
        whole.resize(at + bytes.len(), 0);
        bytes.copy_to(&mut whole[at..]);
    }
    Ok(whole)
}

/// Whether asking again may help.
fn is_passing(error: &Error) -> bool {
    match error {
        Error::Network { .. } => true,
        Error::Http { status, .. } => matches!(status, 408 | 429 | 502..=504),
        _ => false,
    }
}

/// Whether it says that the files on the server are not those of the manifest.
fn is_mismatch(error: &Error) -> bool {
    match error {
        Error::Corrupt { .. } | Error::Truncated { .. } | Error::Format { what: "pack", .. } => true,
        Error::Http { status, .. } => matches!(status, 404 | 410),
        _ => false,
    }
}
