//! Installing a pack into browser storage.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use js_sys::Function;
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

use super::errors::to_js;
use super::{WebOptions, report};
use crate::chat::TOKENIZER;
use crate::engine::{Options, budgets};
use crate::error::{Error, Result};
use crate::flash::install::{self, Extent, File, Observer, Outcome, Phase, Policy, Progress};
use crate::flash::opfs::{Files, OpfsFlash, Server};
use crate::pack::{CORE_EXTENT, Manifest};

/// Where an installed pack lies, and what is to be said about that.
#[wasm_bindgen]
pub struct WebInstallation {
    pub(super) outcome: Outcome,
    contents: Contents,
}

/// What the package has to know of a manifest.
#[derive(Clone, Default)]
struct Contents {
    budgets: Range<u64>,
    /// The shards with experts, or all of them where there are none.
    shards: Vec<(String, u64)>,
    /// Bytes read at a time.
    piece: u64,
}

#[wasm_bindgen]
impl WebInstallation {
    /// What the user should know.
    #[wasm_bindgen(getter)]
    pub fn notice(&self) -> Option<String> {
        self.outcome.notice.clone()
    }

    /// The smallest budget with which the model works.
    #[wasm_bindgen(getter)]
    pub fn smallest(&self) -> f64 {
        self.contents.budgets.start as f64
    }

    /// The budget that holds the whole model.
    #[wasm_bindgen(getter)]
    pub fn whole(&self) -> f64 {
        self.contents.budgets.end as f64
    }

    /// The files that experts are read from while the model runs, as JSON: `[{file, bytes}]`.
    #[wasm_bindgen(getter)]
    pub fn shards(&self) -> String {
        let place = |file| self.outcome.installation.place(file);
        let shards = self.contents.shards.iter().map(|(file, bytes)| json!({ "file": place(file), "bytes": bytes }));
        shards.collect::<Value>().to_string()
    }

    /// Bytes that are read of them at a time.
    #[wasm_bindgen(getter)]
    pub fn piece(&self) -> f64 {
        self.contents.piece as f64
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
        let options = WebOptions::parse(&options)?.engine()?;
        let store = OpfsFlash::new(files);
        // Of each manifest that was looked at: an update that failed leaves another than the last of them.
        let seen = RefCell::new(HashMap::new());
        let describe = |manifest: &[u8]| {
            let (files, contents) = describe(manifest, &options)?;
            seen.borrow_mut().insert(install::hash(manifest), contents);
            Ok(files)
        };
        let outcome =
            install::ensure(&server, &store, &describe, &Report(on_progress), Policy { update, alone }).await?;
        let contents = seen.borrow().get(outcome.installation.manifest()).cloned().unwrap_or_default();
        Ok(WebInstallation { outcome, contents })
    };
    run.await.map_err(to_js)
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

/// The files that a manifest names, and what else is to be known of it.
fn describe(manifest: &[u8], options: &Options) -> Result<(Vec<File>, Contents)> {
    let manifest = Manifest::parse(manifest)?;
    if !manifest.files.iter().any(|file| file.file == TOKENIZER) {
        return Err(Error::MissingFile { file: TOKENIZER.to_owned() });
    }
    let budgets = budgets(&manifest, options)?;
    if let Some(budget) = options.budget
        && budget < budgets.start
    {
        return Err(Error::Budget { budget, smallest: budgets.start, context: options.context_for(&manifest.config) });
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
    Ok((files, Contents { budgets, ..read_while_running(&manifest) }))
}

/// The shards that experts are read from, and how much at a time; of a model without any, all shards.
fn read_while_running(manifest: &Manifest) -> Contents {
    let experts = manifest.experts.as_ref();
    let extents = experts.iter().flat_map(|experts| experts.layers.iter().flatten().flatten());
    let mut used: Vec<usize> = extents.map(|&extent| manifest.extents[extent].shard).collect();
    if used.is_empty() {
        used.extend(0..manifest.shards.len());
    }
    used.sort_unstable();
    used.dedup();
    let shards = used.into_iter().map(|i| (manifest.shards[i].file.clone(), manifest.shards[i].bytes)).collect();
    Contents { shards, piece: experts.map_or(CORE_EXTENT, |experts| experts.stride), ..Contents::default() }
}
