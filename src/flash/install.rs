//! Brings a pack from a server into a local store, extent by extent, so that an installation cut at any byte resumes
//! where it was and repairs only what is wrong.
//!
//! The marker [`MARKER`] is written last and names every file with its size; a store that holds it, and files of those
//! sizes, is complete and is used without any request. Without it, whatever lies in the store is checked against the
//! hashes of the manifest before it is kept.

mod check;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;

use futures_util::future::{LocalBoxFuture, join};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use self::check::{Check, check_file};
use super::{Bytes, Flash};
use crate::error::{Error, Result};

/// What [`ensure`] downloads first, and writes when everything else is in place.
pub const MANIFEST: &str = "manifest.json";
/// Says that an installation is complete.
pub const MARKER: &str = "installed.json";

/// Largest manifest accepted, so that a wrong address cannot fill the memory.
const MANIFEST_MAX: u64 = 256 << 20;
/// Longest range asked for at once: a failed one costs at most this much.
const RUN: u64 = 64 << 20;
/// Ranges downloaded at once.
const LANES: usize = 3;
/// Times in a row a connection may break without having delivered a byte.
const ATTEMPTS: u32 = 4;

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

    /// Waits before the `attempt`-th repetition of a request, counted from 1.
    fn pause(&self, attempt: u32) -> LocalBoxFuture<'_, ()>;
}

/// The bytes of an answer as they arrive. Dropping it cancels the request.
pub trait Body {
    /// The next bytes, never none of them; `None` at the end.
    fn next(&mut self) -> LocalBoxFuture<'_, Result<Option<Bytes>>>;
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

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct Marker {
    version: u32,
    /// BLAKE3 of the manifest.
    manifest: String,
    files: Vec<(String, u64)>,
}

const MARKER_VERSION: u32 = 1;

/// Sees to it that the store holds the whole pack. `describe` turns a manifest into the files it names and refuses one
/// that is not valid, not supported or not wanted; it is called before anything else is downloaded.
///
/// # Errors
/// Those of `describe` and the store; [`Error::Http`] and [`Error::Network`] for what the server did;
/// [`Error::Truncated`] if a file ends early there; [`Error::Corrupt`] if an extent is wrong twice in a row;
/// [`Error::Quota`] if the store is too small, before anything is written; [`Error::Aborted`].
pub async fn ensure(
    source: &dyn Source,
    store: &dyn Store,
    describe: &dyn Fn(&[u8]) -> Result<Vec<File>>,
    observer: &dyn Observer,
) -> Result<()> {
    if let Some(manifest) = complete(store).await? {
        match describe(&manifest) {
            Ok(_) => return Ok(()),
            // Installed by a build that read another version: only the server can help.
            Err(Error::Version { .. } | Error::Format { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    let manifest = get_manifest(source).await?;
    let files = describe(&manifest)?;
    files.iter().try_for_each(check_shape)?;
    let job = Install { source, store, observer, total: files.iter().map(|f| f.size).sum(), done: Cell::new(0) };
    store.remove(MARKER).await?;
    match job.run(&files).await {
        // Browsers do not tell how much is missing; at least what is not there yet is.
        Err(Error::Quota { needed }) => {
            let absent = job.total - job.held(&files).await.unwrap_or(0);
            // Files that have their length and not yet all of their bytes hide what is missing.
            let absent = if absent == 0 { job.total } else { absent };
            return Err(Error::Quota { needed: needed.max(absent) });
        }
        other => other?,
    }
    put(store, MANIFEST, &manifest).await?;
    let marker = Marker {
        version: MARKER_VERSION,
        manifest: blake3::hash(&manifest).to_hex().to_string(),
        files: files.iter().map(|f| (f.name.clone(), f.size)).collect(),
    };
    let marker = serde_json::to_vec(&marker).map_err(|e| Error::format("installation marker", e))?;
    put(store, MARKER, &marker).await
}

/// Refuses what the rest of this file could not work with.
fn check_shape(file: &File) -> Result<()> {
    let refuse = |why| Err(Error::format("manifest", format!("file `{}` {why}", file.name)));
    if file.name.is_empty() || file.name == MANIFEST || file.name == MARKER {
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

/// Forgets that the installation is complete, so that the next [`ensure`] checks every byte.
pub async fn distrust(store: &dyn Store) -> Result<()> {
    store.remove(MARKER).await
}

/// The manifest of a complete installation.
async fn complete(store: &dyn Store) -> Result<Option<Vec<u8>>> {
    let Some(marker) = read_whole(store, MARKER).await? else { return Ok(None) };
    // A marker cut short while it was written is no marker.
    let Ok(marker) = serde_json::from_slice::<Marker>(&marker) else { return Ok(None) };
    if marker.version != MARKER_VERSION {
        return Ok(None);
    }
    let Some(manifest) = read_whole(store, MANIFEST).await? else { return Ok(None) };
    if blake3::hash(&manifest).to_hex().as_str() != marker.manifest {
        return Ok(None);
    }
    for (name, size) in &marker.files {
        // Browsers evict files behind the marker's back.
        if size_of(store, name).await? != Some(*size) {
            return Ok(None);
        }
    }
    Ok(Some(manifest))
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
        match get_whole(source, MANIFEST).await {
            Err(error) if is_passing(&error) && attempt + 1 < ATTEMPTS => {
                attempt += 1;
                source.pause(attempt).await;
            }
            result => return result,
        }
    }
}

async fn get_whole(source: &dyn Source, file: &str) -> Result<Vec<u8>> {
    let mut body = source.get(file, None).await?;
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

/// A contiguous part of a file to download, and the extents that begin in it.
struct Run<'a> {
    file: &'a File,
    range: Range<u64>,
    extents: &'a [Extent],
}

struct Install<'a> {
    source: &'a dyn Source,
    store: &'a dyn Store,
    observer: &'a dyn Observer,
    total: u64,
    done: Cell<u64>,
}

impl Install<'_> {
    async fn run(&self, files: &[File]) -> Result<()> {
        let stale: Vec<String> = self.store.list().await?;
        for name in stale.iter().filter(|n| files.iter().all(|f| f.name != **n)) {
            self.store.remove(name).await?;
        }

        self.advance(Phase::Verify, 0)?;
        let missing: Vec<Vec<Range<usize>>> =
            stream::iter(files).map(|file| self.missing(file)).buffered(LANES).try_collect().await?;

        let runs: Vec<Run> = files.iter().zip(&missing).flat_map(|(file, gaps)| runs(file, gaps)).collect();
        let needed: u64 = runs.iter().map(|r| r.range.end - r.range.start).sum();
        self.check_room(files, needed).await?;

        self.done.set(self.total.saturating_sub(needed));
        self.advance(Phase::Download, 0)?;
        stream::iter(runs).map(|run| self.fetch(run)).buffer_unordered(LANES).try_collect::<Vec<()>>().await?;

        for file in files {
            self.store.resize(&file.name, file.size).await?;
            self.store.flush(&file.name).await?;
        }
        Ok(())
    }

    /// Reports `more` bytes, or stops.
    fn advance(&self, phase: Phase, more: u64) -> Result<()> {
        if self.observer.aborted() {
            return Err(Error::Aborted);
        }
        self.done.set(self.done.get() + more);
        self.observer.progress(Progress { phase, done: self.done.get().min(self.total), total: self.total });
        Ok(())
    }

    /// Which extents of a file the store does not hold, as ranges of indices.
    async fn missing(&self, file: &File) -> Result<Vec<Range<usize>>> {
        let size = size_of(self.store, &file.name).await?.unwrap_or(0);
        let good = check_file(self.store, file, size, &|bytes| self.advance(Phase::Verify, bytes)).await?;
        let mut gaps: Vec<Range<usize>> = Vec::new();
        for (i, _) in good.iter().enumerate().filter(|(_, good)| !**good) {
            match gaps.last_mut() {
                Some(last) if last.end == i => last.end += 1,
                _ => gaps.push(i..i + 1),
            }
        }
        Ok(gaps)
    }

    /// Bytes of the pack that the store has room for already.
    async fn held(&self, files: &[File]) -> Result<u64> {
        let mut held = 0;
        for file in files {
            held += size_of(self.store, &file.name).await?.unwrap_or(0).min(file.size);
        }
        Ok(held)
    }

    /// Refuses a download that cannot fit, before its first byte.
    async fn check_room(&self, files: &[File], needed: u64) -> Result<()> {
        let Some(free) = self.store.free().await? else { return Ok(()) };
        let held = self.held(files).await?;
        // Extents to be written over take no new room.
        let growth = needed.min(self.total.saturating_sub(held));
        if growth > free { Err(Error::Quota { needed: growth - free }) } else { Ok(()) }
    }

    /// Downloads a run; what turns out wrong is asked for once more.
    async fn fetch(&self, run: Run<'_>) -> Result<()> {
        let bad = self.transfer(&run).await?;
        for i in bad {
            let extents = &run.extents[i..i + 1];
            let extent = &extents[0];
            let again = Run { file: run.file, range: extent.offset..extent.offset + extent.len, extents };
            self.done.set(self.done.get().saturating_sub(extent.len));
            if !self.transfer(&again).await?.is_empty() {
                return Err(Error::Corrupt { path: run.file.name.clone(), offset: extent.offset, len: extent.len });
            }
        }
        // Before the next run is asked for, so that an end at any moment costs no more than what is under way.
        self.store.flush(&run.file.name).await
    }

    /// Brings a run into the store, resuming broken connections; returns which of its extents arrived wrong.
    async fn transfer(&self, run: &Run<'_>) -> Result<Vec<usize>> {
        let mut check = Check::new(run.extents, run.range.start);
        let mut at = run.range.start;
        let mut attempt = 0;
        while at < run.range.end {
            let before = at;
            let outcome = self.stream(run, &mut at, &mut check).await;
            if at > before {
                attempt = 0;
            }
            match outcome {
                Ok(()) if at == run.range.end => break,
                // The connection ended without an error and early; if asking for the rest yields none, it isn't there.
                Ok(()) if at == before => {
                    let (path, expected) = (run.file.name.clone(), run.file.size);
                    return Err(Error::Truncated { path, expected, actual: at });
                }
                Ok(()) => {}
                Err(error) if is_passing(&error) && attempt + 1 < ATTEMPTS => {
                    attempt += 1;
                    self.source.pause(attempt).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(check.finish().iter().enumerate().filter(|(_, good)| !**good).map(|(i, _)| i).collect())
    }

    /// One request for the rest of a run. `at` follows what has been handed to the store; while one piece is written
    /// the next is awaited.
    async fn stream(&self, run: &Run<'_>, at: &mut u64, check: &mut Check<'_>) -> Result<()> {
        let name = run.file.name.as_str();
        let whole = *at == 0 && run.range.end == run.file.size;
        let range = (!whole).then_some(*at..run.range.end);
        let mut body = self.source.get(name, range).await?;
        let mut writing: LocalBoxFuture<'_, Result<()>> = Box::pin(async { Ok(()) });
        loop {
            let (written, received) = join(writing, body.next()).await;
            written?;
            let Some(bytes) = received? else { return Ok(()) };
            let len = bytes.len() as u64;
            if len > run.range.end - *at {
                let reason =
                    format!("{name} on the server is longer than its manifest says: they do not belong together");
                return Err(Error::format("pack", reason));
            }
            check.feed(&bytes);
            writing = self.store.write(name, *at, bytes);
            *at += len;
            self.advance(Phase::Download, len)?;
        }
    }
}

/// Cuts the missing extents of a file into ranges to ask for. Small holes between them are downloaded along, and the
/// padding at the end, so that a file missing as a whole is one plain request that any server understands.
fn runs<'a>(file: &'a File, gaps: &[Range<usize>]) -> Vec<Run<'a>> {
    const WORTH_A_REQUEST: u64 = 256 << 10;
    let mut runs: Vec<(Range<u64>, Range<usize>)> = Vec::new();
    for i in gaps.iter().flat_map(|gap| gap.clone()) {
        let (start, end) = (file.extents[i].offset, file.extents[i].offset + file.extents[i].len);
        match runs.last_mut() {
            Some((range, extents))
                if start - range.end < WORTH_A_REQUEST && end - range.start <= RUN.max(file.extents[i].len) =>
            {
                range.end = end;
                extents.end = i + 1;
            }
            _ => runs.push((start..end, i..i + 1)),
        }
    }
    if let Some((range, extents)) = runs.last_mut()
        && extents.end == file.extents.len()
        && file.size - range.end < WORTH_A_REQUEST
    {
        range.end = file.size;
    }
    runs.into_iter().map(|(range, e)| Run { file, range, extents: &file.extents[e] }).collect()
}
