use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;

use outrider::Result;
use outrider::flash::FileFlash;
use outrider::import;
use outrider::pack::{DirectorySink, Pack, Replace};

use crate::{print, progress};

/// Turn a pack back into a checkpoint, its weights decoded to f32
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the pack
    pack: PathBuf,
    /// Directory to write
    #[arg(short, long)]
    output: PathBuf,
    /// Replace the checkpoint that is at the output
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Result<()> {
    pollster::block_on(async {
        let pack = Pack::open(Rc::new(FileFlash::open(args.pack)?)).await?;
        let replace = if args.force { Replace::Checkpoint } else { Replace::Nothing };
        let sink = DirectorySink::new(&args.output, replace)?;
        let bar = progress::bytes("unpacking");
        import::unpack(&pack, sink, |done, total| progress::show(&bar, done, total)).await?;
        bar.finish_and_clear();
        print::results(|out| writeln!(out, "{}: `{}` in f32", args.output.display(), pack.manifest().name))
    })
}
