use std::collections::BTreeMap;

use futures_util::future::{LocalBoxFuture, ready};

use super::{Bytes, Flash, end_of};
use crate::error::{Error, Result};

/// Files held in memory.
#[derive(Debug, Default, Clone)]
pub struct MemoryFlash {
    files: BTreeMap<String, Vec<u8>>,
}

impl MemoryFlash {
    pub fn new(files: BTreeMap<String, Vec<u8>>) -> MemoryFlash {
        MemoryFlash { files }
    }

    pub fn into_files(self) -> BTreeMap<String, Vec<u8>> {
        self.files
    }

    fn file(&self, file: &str) -> Result<&Vec<u8>> {
        self.files.get(file).ok_or_else(|| Error::NotFound { path: file.to_owned() })
    }
}

impl Flash for MemoryFlash {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        let bytes = self.file(file).and_then(|all| {
            let end = end_of(file, all.len() as u64, offset, len)?;
            Ok(Bytes::Owned(all[offset as usize..end as usize].to_vec()))
        });
        Box::pin(ready(bytes))
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        Box::pin(ready(self.file(file).map(|f| f.len() as u64)))
    }
}
