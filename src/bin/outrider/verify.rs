use std::io::Write;
use std::path::PathBuf;

use outrider::flash::FileFlash;
use outrider::pack::{read_manifest, verify};
use outrider::{Error, Result};

use crate::{print, progress};

/// Check every byte of a pack against its hashes
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the pack
    pack: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    pollster::block_on(async {
        let flash = FileFlash::open(&args.pack)?;
        let bar = progress::bytes("verifying");
        let bad = verify(&flash, |p| progress::show(&bar, p.done, p.total)).await?;
        bar.finish_and_clear();
        print::results(|out| bad.iter().try_for_each(|b| writeln!(out, "{}: {}: {}", b.file, b.what, b.error)))?;
        if bad.is_empty() {
            let manifest = read_manifest(&flash).await?;
            let extents = manifest.extents.len();
            return print::results(|out| writeln!(out, "{}: all {extents} extents are good", args.pack.display()));
        }
        let mut files: Vec<&str> = bad.iter().map(|b| b.file.as_str()).collect();
        files.dedup();
        Err(Error::BadPack { parts: bad.len(), files: files.join(", ") })
    })
}
