//! The record of an installation: which pack it is, whether it is complete, and where its files lie.

use std::collections::BTreeMap;

use futures_util::future::LocalBoxFuture;
use serde::{Deserialize, Serialize};

use super::{File, MANIFEST, Store, put, read_whole, size_of};
use crate::error::Result;
use crate::flash::{Bytes, Flash};

/// Written in turn, so that while one is written the other is whole. The later one that can be read counts.
pub const MARKERS: [&str; 2] = ["installed.json", "installed-2.json"];

const VERSION: u32 = 1;

/// What [`ensure`](super::ensure) left behind.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Installation {
    version: u32,
    #[serde(default)]
    serial: u64,
    /// Whether the files may be used without being checked.
    #[serde(default = "yes")]
    pub(super) trusted: bool,
    /// BLAKE3 of the manifest.
    pub(super) manifest: String,
    files: Vec<(String, u64)>,
    /// Names in the store of those files, the manifest among them, that are kept under another name than their own.
    #[serde(default)]
    pub(super) stored: BTreeMap<String, String>,
}

fn yes() -> bool {
    true
}

impl Installation {
    /// One that follows `before`.
    pub(super) fn new(
        before: Option<&Installation>,
        manifest: &[u8],
        files: &[File],
        stored: BTreeMap<String, String>,
    ) -> Installation {
        Installation {
            version: VERSION,
            serial: before.map_or(0, |b| b.serial + 1),
            trusted: true,
            manifest: hash(manifest),
            files: files.iter().map(|f| (f.name.clone(), f.size)).collect(),
            stored,
        }
    }

    /// BLAKE3 of the manifest, as text.
    pub fn manifest(&self) -> &str {
        &self.manifest
    }

    /// The one that counts.
    pub(super) async fn latest(store: &dyn Store) -> Result<Option<Installation>> {
        let mut latest: Option<Installation> = None;
        for name in MARKERS {
            let Some(bytes) = read_whole(store, name).await? else { continue };
            // One cut short while it was written is none.
            let Ok(found) = serde_json::from_slice::<Installation>(&bytes) else { continue };
            if found.version == VERSION && latest.as_ref().is_none_or(|l| l.serial < found.serial) {
                latest = Some(found);
            }
        }
        Ok(latest)
    }

    pub(super) async fn write(&self, store: &dyn Store) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|e| crate::error::Error::format("installation marker", e))?;
        put(store, MARKERS[(self.serial % 2) as usize], &json).await
    }

    /// Writes that this installation is to be checked before it is used again, unless another one took its place.
    pub(super) async fn distrust(&self, store: &dyn Store) -> Result<()> {
        match Installation::latest(store).await? {
            Some(now) if now.trusted && now.manifest == self.manifest => {
                Installation { serial: now.serial + 1, trusted: false, ..now }.write(store).await
            }
            _ => Ok(()),
        }
    }

    /// The manifest, if everything is in place.
    pub(super) async fn complete(&self, store: &dyn Store) -> Result<Option<Vec<u8>>> {
        if !self.trusted {
            return Ok(None);
        }
        let Some(manifest) = read_whole(store, self.place(MANIFEST)).await? else { return Ok(None) };
        if hash(&manifest) != self.manifest {
            return Ok(None);
        }
        for (name, size) in &self.files {
            // Browsers evict files behind the marker's back.
            if size_of(store, self.place(name)).await? != Some(*size) {
                return Ok(None);
            }
        }
        Ok(Some(manifest))
    }

    /// The name in the store of a file of the pack.
    pub fn place<'a>(&'a self, name: &'a str) -> &'a str {
        self.stored.get(name).map_or(name, String::as_str)
    }

    /// Whether a file in the store belongs to it.
    pub(super) fn owns(&self, place: &str) -> bool {
        self.place(MANIFEST) == place || self.files.iter().any(|(name, _)| self.place(name) == place)
    }
}

/// As installations are told apart by.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// An installed pack, its files by the names that its manifest uses.
pub struct Installed<S> {
    store: S,
    installation: Installation,
}

impl<S: Store> Installed<S> {
    pub fn new(store: S, installation: Installation) -> Installed<S> {
        Installed { store, installation }
    }

    /// Lets the next [`ensure`](super::ensure) check every byte, and fetch what is wrong.
    pub async fn distrust(&self) -> Result<()> {
        self.installation.distrust(&self.store).await
    }
}

impl<S: Store> Flash for Installed<S> {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        self.store.read(self.installation.place(file), offset, len)
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        self.store.size(self.installation.place(file))
    }
}
