//! Hashing extents as their bytes go by.

use futures_util::future::join;

use super::{Extent, File, Store};
use crate::error::{Error, Result};
use crate::flash::Bytes;

/// Bytes read at once while checking what is in the store.
const PIECE: u64 = 2 << 20;

/// Bytes brought into wasm memory at once to be hashed: that memory never shrinks again.
#[cfg(target_arch = "wasm32")]
const WINDOW: usize = 64 << 10;

/// Checks consecutive extents of a file against a contiguous stream of its bytes.
pub(super) struct Check<'a> {
    extents: &'a [Extent],
    good: Vec<bool>,
    at: u64,
    hasher: blake3::Hasher,
    /// Where bytes that lie in a JavaScript buffer are brought to be hashed.
    #[cfg(target_arch = "wasm32")]
    scratch: Vec<u8>,
}

impl<'a> Check<'a> {
    /// `start` is where the stream begins, at or before the first extent.
    pub(super) fn new(extents: &'a [Extent], start: u64) -> Check<'a> {
        let good = Vec::with_capacity(extents.len());
        Check {
            extents,
            good,
            at: start,
            hasher: blake3::Hasher::new(),
            #[cfg(target_arch = "wasm32")]
            scratch: Vec::new(),
        }
    }

    /// The next bytes of the stream.
    pub(super) fn feed(&mut self, bytes: &Bytes) {
        match bytes {
            Bytes::Owned(owned) => self.feed_slice(owned),
            #[cfg(target_arch = "wasm32")]
            Bytes::Js(array) => {
                let mut scratch = std::mem::take(&mut self.scratch);
                let len = array.length();
                for start in (0..len).step_by(WINDOW) {
                    let part = array.subarray(start, (start + WINDOW as u32).min(len));
                    scratch.resize(part.length() as usize, 0);
                    part.copy_to(&mut scratch);
                    self.feed_slice(&scratch);
                }
                self.scratch = scratch;
            }
        }
    }

    fn feed_slice(&mut self, mut bytes: &[u8]) {
        while let Some(extent) = self.extents.get(self.good.len()) {
            let end = extent.offset + extent.len;
            let gap = extent.offset.saturating_sub(self.at).min(bytes.len() as u64);
            let take = (end - (self.at + gap).min(end)).min(bytes.len() as u64 - gap);
            self.hasher.update(&bytes[gap as usize..(gap + take) as usize]);
            self.at += gap + take;
            bytes = &bytes[(gap + take) as usize..];
            if self.at < end {
                break;
            }
            self.good.push(self.hasher.finalize() == extent.hash);
            self.hasher.reset();
        }
        self.at += bytes.len() as u64;
    }

    /// Whether each extent was right; one the stream did not reach the end of was not.
    pub(super) fn finish(mut self) -> Vec<bool> {
        self.good.resize(self.extents.len(), false);
        self.good
    }
}

/// Which extents of a file the store holds at `place`, `size` being how long that is. Reads nothing that cannot be good.
pub(super) async fn check_file(
    store: &dyn Store,
    place: &str,
    file: &File,
    size: u64,
    advance: &dyn Fn(u64) -> Result<()>,
) -> Result<Vec<bool>> {
    let within = file.extents.partition_point(|e| e.offset + e.len <= size);
    let (extents, absent) = file.extents.split_at(within);
    let (Some(first), Some(last)) = (extents.first(), extents.last()) else {
        return Ok(vec![false; absent.len()]);
    };
    let (mut at, end) = (first.offset, last.offset + last.len);
    let mut check = Check::new(extents, at);
    let piece = |at: u64| async move {
        let len = PIECE.min(end - at);
        if len == 0 { Ok(Bytes::Owned(Vec::new())) } else { store.read(place, at, len as usize).await }
    };
    let mut bytes = piece(at).await?;
    while at < end {
        at += bytes.len() as u64;
        let hashing = async {
            check.feed(&bytes);
            advance(bytes.len() as u64)
        };
        let (next, hashed) = join(piece(at), hashing).await;
        hashed?;
        bytes = match next {
            Ok(bytes) => bytes,
            // It shrank meanwhile: what was not seen is not there.
            Err(Error::Truncated { .. }) => break,
            Err(error) => return Err(error),
        };
    }
    let mut good = check.finish();
    good.resize(file.extents.len(), false);
    Ok(good)
}
