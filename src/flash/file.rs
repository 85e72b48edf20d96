use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use futures_channel::oneshot;
use futures_util::future::{LocalBoxFuture, ready};

use super::{Bytes, Flash, end_of};
use crate::error::{Error, Result};

/// Threads that read, so that reads go on while the caller computes. A flash drive answers two at once nearly as fast as
/// any number.
const LANES: usize = 2;
/// Reads up to this many bytes are done at once: handing them to a thread would take longer.
const SMALL: usize = 8 << 10;

/// Files of a directory, read at given positions. Files stay open; nothing is mapped into memory, so that what is read
/// is what the budget counts.
#[derive(Debug)]
pub struct FileFlash {
    dir: PathBuf,
    open: RefCell<HashMap<String, Arc<OpenFile>>>,
    /// Where the threads take their jobs from; `None` inside if there could be no threads.
    lanes: OnceCell<Option<Sender<Job>>>,
}

#[derive(Debug)]
struct Job {
    file: Arc<OpenFile>,
    offset: u64,
    len: usize,
    answer: oneshot::Sender<Result<Vec<u8>>>,
}

/// Ends when the sender is gone.
fn lane(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().ok().and_then(|jobs| jobs.recv().ok());
        let Some(Job { file, offset, len, answer }) = job else { return };
        // Whoever has dropped a read before its turn does not want it any more.
        if !answer.is_canceled() {
            let _ = answer.send(file.read(offset, len));
        }
    }
}

fn start_lanes() -> Option<Sender<Job>> {
    let (sender, jobs) = channel();
    let jobs = Arc::new(Mutex::new(jobs));
    let start = |_| {
        let jobs = jobs.clone();
        std::thread::Builder::new().name("flash".to_owned()).spawn(move || lane(&jobs)).is_ok()
    };
    (0..LANES).map(start).fold(false, |any, started| any | started).then_some(sender)
}

/// A file with the length it had when it was opened.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: File,
    path: PathBuf,
    pub len: u64,
}

impl OpenFile {
    pub fn open(path: &Path) -> Result<OpenFile> {
        let file = File::open(path).map_err(Error::io(path.display()))?;
        let len = file.metadata().map_err(Error::io(path.display()))?.len();
        Ok(OpenFile { file, path: path.to_owned(), len })
    }

    /// Reads exactly `len` bytes.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let path = self.path.display();
        end_of(&path.to_string(), self.len, offset, len)?;
        let mut bytes = vec![0; len];
        read_exact_at(&self.file, &mut bytes, offset).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                let actual = self.file.metadata().map_or(0, |m| m.len());
                Error::Truncated { path: path.to_string(), expected: self.len, actual }
            }
            _ => Error::io(&path)(e),
        })?;
        Ok(bytes)
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> std::io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                out = &mut out[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl FileFlash {
    /// The files of `dir`.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such directory.
    pub fn open(dir: impl Into<PathBuf>) -> Result<FileFlash> {
        let dir = dir.into();
        match dir.metadata() {
            Ok(m) if m.is_dir() => Ok(FileFlash { dir, open: RefCell::default(), lanes: OnceCell::new() }),
            Ok(_) => Err(Error::Request(format!("`{}` is not a directory", dir.display()))),
            Err(e) => Err(Error::io(dir.display())(e)),
        }
    }

    fn file(&self, name: &str) -> Result<Arc<OpenFile>> {
        if let Some(file) = self.open.borrow().get(name) {
            return Ok(file.clone());
        }
        let file = Arc::new(OpenFile::open(&self.dir.join(name))?);
        self.open.borrow_mut().insert(name.to_owned(), file.clone());
        Ok(file)
    }
}

impl Flash for FileFlash {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        let file = match self.file(file) {
            Ok(file) => file,
            Err(error) => return Box::pin(ready(Err(error))),
        };
        let lanes = if len > SMALL { self.lanes.get_or_init(start_lanes).as_ref() } else { None };
        let (answer, answered) = oneshot::channel();
        let job = Job { file, offset, len, answer };
        let sent = match lanes {
            Some(lanes) => lanes.send(job).map_err(|refused| refused.0),
            None => Err(job),
        };
        match sent {
            Ok(()) => Box::pin(async move {
                let gone = |_| Error::Storage { path: "flash".to_owned(), reason: "a reading thread ended".to_owned() };
                answered.await.map_err(gone)?.map(Bytes::Owned)
            }),
            Err(job) => Box::pin(ready(job.file.read(offset, len).map(Bytes::Owned))),
        }
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        Box::pin(ready(self.file(file).map(|f| f.len)))
    }
}
