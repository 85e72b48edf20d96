//! The pool from an earlier visit: which experts were hot, and reading them while there is nothing else to do.

use super::{Engine, Stop};
use crate::error::Result;
use crate::les::HotList;
use crate::pack::Manifest;

/// The name of the file beside a pack, which no file of a pack can have, that a hot list is kept in.
pub const HOT_LIST: &str = ".hot";

impl Engine {
    /// Which experts were used most, to be kept until the model is loaded again: at most [`HotList::BYTES`].
    pub fn hot_list(&self) -> Vec<u8> {
        self.experts.hot_list().encode(&identity(self.pack.manifest()))
    }

    /// Takes up what was kept; nothing of it where it is damaged or of another model, which is told.
    ///
    /// From then on the experts in it are read whenever nothing else is: by [`warm`](Self::warm), and in passes while
    /// nothing is waited for. No result depends on it.
    pub fn set_hot_list(&mut self, bytes: &[u8]) -> bool {
        let list = HotList::decode(bytes, &identity(self.pack.manifest()), self.experts.shape());
        list.as_ref().inspect(|list| self.experts.set_hot_list(list)).is_some()
    }

    /// Reads the experts of the hot list into the pool, until none is left that has a place or it is to stop. What has
    /// been begun then goes on.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted) when it was stopped; [`Error::Storage`](crate::Error::Storage) when flash
    /// does not answer. Either way the engine is as usable as before.
    pub async fn warm(&mut self, stop: &Stop) -> Result<()> {
        self.experts.warm(self.backend.as_mut(), stop).await
    }
}

/// What tells a pack's weights from others.
fn identity(manifest: &Manifest) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    for extent in &manifest.extents {
        hash.update(&extent.hash.0);
    }
    *hash.finalize().as_bytes()
}
