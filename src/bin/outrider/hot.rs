//! Which experts a model used, kept beside its pack for the next time.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use outrider::engine::{Engine, HOT_LIST};
use outrider::les;
use outrider::pack::MANIFEST;

/// Between two times that it is written.
const RARELY: Duration = Duration::from_secs(60);

/// The list of a pack in a directory; elsewhere none. Nothing here fails: a list is a hint.
pub struct HotList {
    path: Option<PathBuf>,
    written: Option<Instant>,
}

impl HotList {
    pub fn of(model: &str) -> HotList {
        let dir = Path::new(model);
        let path = dir.join(MANIFEST).is_file().then(|| dir.join(HOT_LIST));
        HotList { path, written: None }
    }

    /// Neither read nor written.
    pub fn none() -> HotList {
        HotList { path: None, written: None }
    }

    /// Lets the engine begin with what was kept.
    pub fn read(&self, engine: &mut Engine) {
        let Some(file) = self.path.as_ref().and_then(|path| File::open(path).ok()) else { return };
        // One more than a list can have is enough to see that it is none.
        let mut kept = Vec::new();
        if file.take(les::HotList::BYTES as u64 + 1).read_to_end(&mut kept).is_ok() {
            engine.set_hot_list(&kept);
        }
    }

    /// Keeps what the engine used; not more often than it is worth, unless this is the `last` time.
    pub fn keep(&mut self, engine: &Engine, last: bool) {
        let Some(path) = &self.path else { return };
        if last || self.written.is_none_or(|written| written.elapsed() > RARELY) {
            self.written = Some(Instant::now());
            // Whoever reads it meanwhile has the old one or the new one.
            let partial = path.with_extension(format!("{}.partial", std::process::id()));
            let written = std::fs::write(&partial, engine.hot_list()).and_then(|()| std::fs::rename(&partial, path));
            if written.is_err() {
                let _ = std::fs::remove_file(&partial);
            }
        }
    }
}
