use std::io::Write;
use std::path::PathBuf;

use outrider::Result;
use outrider::error::Size;
use outrider::import::{Checkpoint, PackOptions, Precision, pack_checkpoint};
use outrider::pack::{DirectorySink, Replace};
use outrider::tensor::DType;

use crate::{print, progress, self_test};

/// Turn a checkpoint (config.json and safetensors) into a pack
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the checkpoint
    checkpoint: PathBuf,
    /// Directory to write
    #[arg(short, long)]
    output: PathBuf,
    /// Type of the experts' weights: q4, q8, f16 or f32
    #[arg(long, value_name = "TYPE")]
    quant: DType,
    /// Type of all other matrices [default: q8 beside q4 and q8, else that of the experts]
    #[arg(long, value_name = "TYPE")]
    core: Option<DType>,
    /// Largest size of a file, such as 24MB
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    max_shard: Size,
    /// Name of the model [default: that of the checkpoint's directory]
    #[arg(long)]
    name: Option<String>,
    /// Licence of the weights, as an SPDX identifier
    #[arg(long)]
    licence: Option<String>,
    /// A file to copy into the pack, such as a model card; may be repeated
    #[arg(long, value_name = "FILE")]
    include: Vec<PathBuf>,
    /// Replace the pack that is at the output
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Result<()> {
    let mut precision = Precision::with_experts(args.quant);
    if let (Precision::Given { core, .. }, Some(wanted)) = (&mut precision, args.core) {
        *core = wanted;
    }
    let options = PackOptions {
        max_shard: args.max_shard.0,
        name: args.name,
        licence: args.licence,
        include: args.include,
        ..PackOptions::new(precision)
    };
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let replace = if args.force { Replace::Pack } else { Replace::Nothing };
    let sink = DirectorySink::new(&args.output, replace)?;
    let bar = progress::bytes("packing");
    let packed = pack_checkpoint(&checkpoint, &options, sink, |done, total| progress::show(&bar, done, total))?;
    bar.finish_and_clear();
    // Without one the pack is whole, too.
    if let Err(e) = self_test::add(&args.output) {
        eprintln!("note: the pack has no self-test: {e}");
    }
    for note in &packed.notes {
        eprintln!("note: {note}");
    }
    let (to, manifest) = (args.output.display(), &packed.manifest);
    print::results(|out| writeln!(out, "{to}: {} in {} files", Size(manifest.bytes()), manifest.file_count()))
}
