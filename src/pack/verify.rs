//! Checking a whole pack.

use super::{Hash, read_manifest};
use crate::error::{Error, Result};
use crate::flash::Flash;

/// How far [`verify`] has come, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// Something in a pack that is not as the manifest says.
#[derive(Debug)]
pub struct Bad {
    pub file: String,
    /// What lies at these bytes, for people: `expert 5 of layer 2`.
    pub what: String,
    pub error: Error,
}

/// Reads every byte of a pack and reports all that is wrong with it, not just the first.
///
/// # Errors
/// Only if the manifest cannot be read: what is wrong with the rest is in the list.
pub async fn verify(flash: &dyn Flash, mut on_progress: impl FnMut(Progress)) -> Result<Vec<Bad>> {
    let manifest = read_manifest(flash).await?;
    let total = manifest.bytes();
    let mut done = 0;
    let mut bad = Vec::new();
    let mut report = |file: &str, what: String, error| bad.push(Bad { file: file.to_owned(), what, error });

    let mut what = vec![String::new(); manifest.extents.len()];
    for (layer, extents) in manifest.experts.iter().flat_map(|e| e.layers.iter().enumerate()) {
        for (expert, &index) in extents.iter().flatten().enumerate() {
            what[index] = format!("expert {expert} of layer {layer}");
        }
    }
    for (index, shard) in manifest.shards.iter().enumerate() {
        let missing = match flash.size(&shard.file).await {
            Ok(actual) if actual == shard.bytes => None,
            Ok(actual) => Some(Error::Truncated { path: shard.file.clone(), expected: shard.bytes, actual }),
            Err(error) => Some(error),
        };
        if let Some(error) = missing {
            report(&shard.file, "the whole file".into(), error);
            done += shard.bytes;
            on_progress(Progress { done, total });
            continue;
        }
        for (extent, what) in manifest.extents.iter().zip(&what).filter(|(e, _)| e.shard == index) {
            let (offset, len) = (extent.offset, extent.bytes);
            let checked = flash.read(&shard.file, offset, len as usize).await.and_then(|b| {
                let good = Hash::of(&b.into_vec()) == extent.hash;
                if good { Ok(()) } else { Err(Error::Corrupt { path: shard.file.clone(), offset, len }) }
            });
            if let Err(error) = checked {
                let what = if what.is_empty() { format!("bytes {offset}..{}", extent.end()) } else { what.clone() };
                report(&shard.file, what, error);
            }
            done += len;
            on_progress(Progress { done, total });
        }
    }
    for entry in &manifest.files {
        let path = entry.file.clone();
        let checked = match flash.size(&entry.file).await {
            Ok(size) if size != entry.bytes => Err(Error::Truncated { path, expected: entry.bytes, actual: size }),
            Ok(_) => flash.read(&entry.file, 0, super::length(entry.bytes)?).await.and_then(|b| {
                let good = Hash::of(&b.into_vec()) == entry.hash;
                if good { Ok(()) } else { Err(Error::Corrupt { path, offset: 0, len: entry.bytes }) }
            }),
            Err(error) => Err(error),
        };
        if let Err(error) = checked {
            report(&entry.file, "the whole file".into(), error);
        }
        done += entry.bytes;
        on_progress(Progress { done, total });
    }
    Ok(bad)
}
