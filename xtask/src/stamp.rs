//! Which steps are up to date: a stamp holds a digest of what a step's outputs were made from.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::exec::target_dir;

pub struct Stamp {
    file: PathBuf,
    digest: String,
}

impl Stamp {
    /// The stamp of step `name`, made from the files in `inputs` (files or directories; those that do not exist count as
    /// absent) and from `extra`.
    pub fn of(root: &Path, name: &str, inputs: &[PathBuf], extra: &str) -> Result<Stamp> {
        let mut hasher = DefaultHasher::new();
        extra.hash(&mut hasher);
        for input in inputs {
            input.hash(&mut hasher);
            hash_tree(input, &mut hasher)?;
        }
        let file = target_dir(root).join("xtask").join(format!("{name}.stamp"));
        Ok(Stamp { file, digest: format!("{:016x}", hasher.finish()) })
    }

    /// Whether `output` was last written from inputs like these.
    pub fn fresh(&self, output: &Path) -> bool {
        output.exists() && std::fs::read_to_string(&self.file).is_ok_and(|text| text == self.digest)
    }

    /// Records that the step has succeeded.
    pub fn set(&self) -> Result<()> {
        if let Some(dir) = self.file.parent() {
            std::fs::create_dir_all(dir)?;
        }
        std::fs::write(&self.file, &self.digest).with_context(|| format!("could not write {}", self.file.display()))
    }
}

/// Contents rather than times: switching branches back and forth costs nothing.
fn hash_tree(path: &Path, hasher: &mut DefaultHasher) -> Result<()> {
    if path.is_dir() {
        let mut entries: Vec<_> = std::fs::read_dir(path)?.collect::<Result<_, _>>()?;
        entries.sort_by_key(|entry| entry.file_name());
        for entry in entries {
            let name = entry.file_name();
            let built = name == "dist" || name == "node_modules" || name.to_string_lossy().ends_with(".tsbuildinfo");
            if !built {
                name.hash(hasher);
                hash_tree(&entry.path(), hasher)?;
            }
        }
    } else if path.is_file() {
        std::fs::read(path).with_context(|| format!("could not read {}", path.display()))?.hash(hasher);
    }
    Ok(())
}
