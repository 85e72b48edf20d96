//! Where a pack's bytes live. Nothing here interprets them.

#[cfg(not(target_arch = "wasm32"))]
mod file;
#[cfg(not(target_arch = "wasm32"))]
mod http;
pub mod install;
mod memory;
#[cfg(target_arch = "wasm32")]
pub mod opfs;
mod throttled;

#[cfg(not(target_arch = "wasm32"))]
pub use file::FileFlash;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use file::OpenFile;
#[cfg(not(target_arch = "wasm32"))]
pub use http::HttpFlash;
pub use memory::MemoryFlash;
pub use throttled::{Throttle, Throttled};

use futures_util::future::LocalBoxFuture;

use crate::error::{Error, Result};

/// Bytes read from flash. In a browser they may still lie in a JavaScript buffer, from which they can go to the GPU
/// without passing through wasm memory.
#[derive(Debug, Clone)]
pub enum Bytes {
    Owned(Vec<u8>),
    #[cfg(target_arch = "wasm32")]
    Js(js_sys::Uint8Array),
}

impl Bytes {
    pub fn len(&self) -> usize {
        match self {
            Bytes::Owned(v) => v.len(),
            #[cfg(target_arch = "wasm32")]
            Bytes::Js(a) => a.length() as usize,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies all bytes into `out`, which must be as long.
    pub fn copy_to(&self, out: &mut [u8]) {
        match self {
            Bytes::Owned(v) => out.copy_from_slice(v),
            #[cfg(target_arch = "wasm32")]
            Bytes::Js(a) => a.copy_to(out),
        }
    }

    pub fn into_vec(self) -> Vec<u8> {
        match self {
            Bytes::Owned(v) => v,
            #[cfg(target_arch = "wasm32")]
            Bytes::Js(a) => a.to_vec(),
        }
    }
}

/// A flat set of named files that can be read at any offset. Names are relative and never contain `..`.
pub trait Flash {
    /// Reads exactly `len` bytes. A file that ends earlier is [`Error::Truncated`].
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>>;

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>>;
}

/// Where a read ends, if it lies within a file of `size` bytes.
fn end_of(path: &str, size: u64, offset: u64, len: usize) -> Result<u64> {
    let end = offset.saturating_add(len as u64);
    if end > size {
        return Err(Error::Truncated { path: path.to_owned(), expected: end, actual: size });
    }
    Ok(end)
}
