//! Installing a pack into browser storage.

use js_sys::Function;
use wasm_bindgen::prelude::*;

use super::errors::to_js;
use super::{WebOptions, report};
use crate::chat::TOKENIZER;
use crate::engine::{Options, smallest_budget};
use crate::error::{Error, Result};
use crate::flash::install::{self, Extent, File, Observer, Outcome, Phase, Policy, Progress};
use crate::flash::opfs::{Files, OpfsFlash, Server};
use crate::pack::Manifest;

/// Where an installed pack lies, and what is to be said about that.
#[wasm_bindgen]
pub struct WebInstallation {
    pub(super) outcome: Outcome,
}

#[wasm_bindgen]
impl WebInstallation {
    /// What the user should know.
    #[wasm_bindgen(getter)]
    pub fn notice(&self) -> Option<String> {
        self.outcome.notice.clone()
    }
}

/// Sees to it that `files` hold the whole pack. A budget too small for the model is refused when only the manifest has
/// been downloaded. With `update`, a pack that has changed on the server replaces the one that is there. Only where
/// `alone` says that no other tab uses the files are those deleted that are of no use any more.
#[wasm_bindgen]
pub async fn install(
    files: Files,
    server: Server,
    options: String,
    update: bool,
    alone: bool,
    on_progress: Function,
) -> Result<WebInstallation, JsValue> {
    let run = async {
        let options = WebOptions::parse(&options)?;
        let store = OpfsFlash::new(files);
        let describe = |manifest: &[u8]| describe(manifest, &options);
        install::ensure(&server, &store, &describe, &Report(on_progress), Policy { update, alone }).await
    };
    run.await.map(|outcome| WebInstallation { outcome }).map_err(to_js)
}

struct Report(Function);

impl Observer for Report {
    fn progress(&self, progress: Progress) {
        let phase = match progress.phase {
            Phase::Verify => "verify",
            Phase::Download => "download",
        };
        report(&self.0, phase, progress.done, progress.total);
    }

    /// The package ends the worker instead.
    fn aborted(&self) -> bool {
        false
    }
}

fn describe(manifest: &[u8], options: &Options) -> Result<Vec<File>> {
    let manifest = Manifest::parse(manifest)?;
    if !manifest.files.iter().any(|file| file.file == TOKENIZER) {
        return Err(Error::MissingFile { file: TOKENIZER.to_owned() });
    }
    let smallest = smallest_budget(&manifest, options)?;
    if let Some(budget) = options.budget
        && budget < smallest
    {
        return Err(Error::Budget { budget, smallest, context: options.context_for(&manifest.config) });
    }
    let mut files: Vec<File> = manifest
        .shards
        .iter()
        .map(|shard| File { name: shard.file.clone(), size: shard.bytes, extents: Vec::new() })
        .collect();
    for extent in &manifest.extents {
        let extents = &mut files[extent.shard].extents;
        extents.push(Extent { offset: extent.offset, len: extent.bytes, hash: extent.hash.0 });
    }
    for file in &mut files {
        file.extents.sort_unstable_by_key(|e| e.offset);
    }
    files.extend(manifest.files.iter().map(|file| {
        let whole = Extent { offset: 0, len: file.bytes, hash: file.hash.0 };
        // An empty file has nothing to check.
        let extents = if file.bytes == 0 { Vec::new() } else { vec![whole] };
        File { name: file.file.clone(), size: file.bytes, extents }
    }));
    Ok(files)
}
