use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use futures_util::future::{LocalBoxFuture, ready};

use super::{Bytes, Flash, end_of};
use crate::error::{Error, Result};

/// Files of a directory, read at given positions. Files stay open; nothing is mapped into memory, so that what is read
/// is what the budget counts.
#[derive(Debug)]
pub struct FileFlash {
    dir: PathBuf,
    open: RefCell<HashMap<String, Rc<OpenFile>>>,
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
            Ok(m) if m.is_dir() => Ok(FileFlash { dir, open: RefCell::default() }),
            Ok(_) => Err(Error::Request(format!("`{}` is not a directory", dir.display()))),
            Err(e) => Err(Error::io(dir.display())(e)),
        }
    }

    fn file(&self, name: &str) -> Result<Rc<OpenFile>> {
        if let Some(file) = self.open.borrow().get(name) {
            return Ok(file.clone());
        }
        let file = Rc::new(OpenFile::open(&self.dir.join(name))?);
        self.open.borrow_mut().insert(name.to_owned(), file.clone());
        Ok(file)
    }
}

impl Flash for FileFlash {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        Box::pin(ready(self.file(file).and_then(|f| f.read(offset, len)).map(Bytes::Owned)))
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        Box::pin(ready(self.file(file).map(|f| f.len)))
    }
}
