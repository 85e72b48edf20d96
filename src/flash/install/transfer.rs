//! Brings files of a pack into the store.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Range;

use futures_util::future::{LocalBoxFuture, join};
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::check::{Check, check_file};
use super::{ATTEMPTS, Extent, File, Installation, Observer, Phase, Progress, Source, Store, is_passing, size_of};
use crate::error::{Error, Result};

/// Longest range asked for at once: a failed one costs at most this much.
const RUN: u64 = 64 << 20;
/// Ranges downloaded at once.
const LANES: usize = 3;

/// Where in the store the content of an extent is, by its hash and length.
pub(super) type Copies = HashMap<([u8; 32], u64), (String, u64)>;

pub(super) fn copies(base: &[File], held: &Installation) -> Copies {
    let extents = base.iter().flat_map(|file| file.extents.iter().map(move |extent| (file, extent)));
    extents.map(|(f, e)| ((e.hash, e.len), (held.place(&f.name).to_owned(), e.offset))).collect()
}

/// A contiguous part of a file to download, and the extents that begin in it.
struct Run<'a> {
    file: &'a File,
    range: Range<u64>,
    extents: &'a [Extent],
}

pub(super) struct Install<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) store: &'a dyn Store,
    pub(super) observer: &'a dyn Observer,
    pub(super) next: &'a Installation,
    pub(super) total: u64,
    pub(super) done: Cell<u64>,
    /// What the server called each file when it first sent a part of it; `None` where that tells nothing.
    pub(super) tags: Option<RefCell<HashMap<String, String>>>,
    /// A file was seen to change on the server.
    pub(super) moved: Cell<bool>,
}

impl Install<'_> {
    pub(super) async fn run(&self, files: &[&File], copies: &Copies) -> Result<()> {
        self.advance(Phase::Verify, 0)?;
        let missing: Vec<Vec<Range<usize>>> =
            stream::iter(files).map(|file| self.missing(file)).buffered(LANES).try_collect().await?;
        self.check_room(files, needed(files, &missing)).await?;
        match self.fill(files, missing, copies).await {
            // Browsers do not tell how much is missing; at least what is not there yet is.
            Err(Error::Quota { needed }) => {
                let total: u64 = files.iter().map(|f| f.size).sum();
                let absent = total - self.held(files).await.unwrap_or(0);
                // Files that have their length and not yet all of their bytes hide what is missing.
                let absent = if absent == 0 { total } else { absent };
                Err(Error::Quota { needed: needed.max(absent) })
            }
            other => other,
        }
    }

    async fn fill(&self, files: &[&File], mut missing: Vec<Vec<Range<usize>>>, copies: &Copies) -> Result<()> {
        if !copies.is_empty() {
            for (file, gaps) in files.iter().zip(&mut missing) {
                *gaps = self.copy(file, gaps, copies).await?;
            }
        }

        self.done.set(self.total.saturating_sub(needed(files, &missing)));
        self.advance(Phase::Download, 0)?;
        let runs: Vec<Run> = files.iter().zip(&missing).flat_map(|(file, gaps)| runs(file, gaps)).collect();
        stream::iter(runs).map(|run| self.fetch(run)).buffer_unordered(LANES).try_collect::<Vec<()>>().await?;

        for file in files {
            self.store.resize(self.next.place(&file.name), file.size).await?;
            self.store.flush(self.next.place(&file.name)).await?;
        }
        Ok(())
    }

    /// Fills gaps of a file from files that are there; returns the gaps that are left.
    async fn copy(&self, file: &File, gaps: &[Range<usize>], copies: &Copies) -> Result<Vec<Range<usize>>> {
        let mut left = Vec::new();
        for i in gaps.iter().flat_map(|gap| gap.clone()) {
            let extent = &file.extents[i];
            if !self.copy_extent(file, extent, copies).await? {
                push(&mut left, i);
            }
        }
        Ok(left)
    }

    /// Whether an extent was found and was what it should be.
    async fn copy_extent(&self, file: &File, extent: &Extent, copies: &Copies) -> Result<bool> {
        let Some((from, offset)) = copies.get(&(extent.hash, extent.len)) else { return Ok(false) };
        let Ok(len) = usize::try_from(extent.len) else { return Ok(false) };
        // What cannot be read can be fetched.
        let Ok(bytes) = self.store.read(from, *offset, len).await else { return Ok(false) };
        let mut check = Check::new(std::slice::from_ref(extent), extent.offset);
        check.feed(&bytes);
        if check.finish() != [true] {
            return Ok(false);
        }
        self.store.write(self.next.place(&file.name), extent.offset, bytes).await?;
        self.advance(Phase::Verify, extent.len)?;
        Ok(true)
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
        let place = self.next.place(&file.name);
        let size = size_of(self.store, place).await?.unwrap_or(0);
        let good = check_file(self.store, place, file, size, &|bytes| self.advance(Phase::Verify, bytes)).await?;
        let mut gaps: Vec<Range<usize>> = Vec::new();
        for (i, _) in good.iter().enumerate().filter(|(_, good)| !**good) {
            push(&mut gaps, i);
        }
        Ok(gaps)
    }

    /// Bytes of the pack that the store has room for already.
    async fn held(&self, files: &[&File]) -> Result<u64> {
        let mut held = 0;
        for file in files {
            held += size_of(self.store, self.next.place(&file.name)).await?.unwrap_or(0).min(file.size);
        }
        Ok(held)
    }

    /// Refuses a download that cannot fit, before its first byte.
    async fn check_room(&self, files: &[&File], needed: u64) -> Result<()> {
        let Some(free) = self.store.free().await? else { return Ok(()) };
        let held = self.held(files).await?;
        // Extents to be written over take no new room.
        let total: u64 = files.iter().map(|f| f.size).sum();
        let growth = needed.min(total.saturating_sub(held));
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
        self.store.flush(self.next.place(&run.file.name)).await
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
        self.check_tag(name, body.tag())?;
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
            writing = self.store.write(self.next.place(name), *at, bytes);
            *at += len;
            self.advance(Phase::Download, len)?;
        }
    }

    /// Stops when a file is another than when its first part came: the rest would not fit.
    fn check_tag(&self, name: &str, tag: Option<String>) -> Result<()> {
        let (Some(tags), Some(tag)) = (&self.tags, tag) else { return Ok(()) };
        if *tags.borrow_mut().entry(name.to_owned()).or_insert_with(|| tag.clone()) == tag {
            return Ok(());
        }
        self.moved.set(true);
        Err(Error::format("pack", format!("{name} changed on the server while it was downloaded; try again")))
    }
}

/// Bytes to be asked for.
fn needed(files: &[&File], missing: &[Vec<Range<usize>>]) -> u64 {
    let runs = files.iter().zip(missing).flat_map(|(file, gaps)| runs(file, gaps));
    runs.map(|r| r.range.end - r.range.start).sum()
}

/// Adds an index to ranges of them.
fn push(ranges: &mut Vec<Range<usize>>, i: usize) {
    match ranges.last_mut() {
        Some(last) if last.end == i => last.end += 1,
        _ => ranges.push(i..i + 1),
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
