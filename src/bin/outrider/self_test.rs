use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use outrider::Result;
use outrider::engine::record_self_test;
use outrider::flash::FileFlash;
use outrider::pack::{Pack, SelfTest, set_self_test};

use crate::print;

/// Put a self-test into a pack, in the place of any it has: what its weights compute on the CPU
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the pack
    pack: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    let test = add(&args.pack)?;
    let (tokens, rows) = (test.tokens.len(), test.rows.len());
    print::results(|out| writeln!(out, "{}: {rows} rows of logits after {tokens} tokens", args.pack.display()))
}

pub fn add(dir: &Path) -> Result<SelfTest> {
    let test = pollster::block_on(async {
        let pack = Pack::open(Rc::new(FileFlash::open(dir)?)).await?;
        record_self_test(pack).await
    })?;
    set_self_test(dir, test.clone())?;
    Ok(test)
}
