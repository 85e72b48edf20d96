use std::path::PathBuf;

use outrider::flash::FileFlash;
use outrider::pack::{read_manifest, verify};
use outrider::{Error, Result};

use crate::progress;

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
        for b in &bad {
            println!("{}: {}: {}", b.file, b.what, b.error);
        }
        if bad.is_empty() {
            let manifest = read_manifest(&flash).await?;
            println!("{}: all {} extents are good", args.pack.display(), manifest.extents.len());
            return Ok(());
        }
        let mut files: Vec<&str> = bad.iter().map(|b| b.file.as_str()).collect();
        files.dedup();
        Err(Error::BadPack { parts: bad.len(), files: files.join(", ") })
    })
}
