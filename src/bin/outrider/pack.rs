use std::io::Write;
use std::path::PathBuf;

use outrider::Result;
use outrider::error::{Error, Size};
use outrider::import::{PackOptions, Precision, Weights, is_gguf, open_checkpoint, open_gguf, pack_checkpoint};
use outrider::pack::{DirectorySink, Quantisation, Replace};
use outrider::tensor::DType;

use crate::{print, progress, self_test};

/// Turn a checkpoint (config.json and safetensors, or GGUF) into a pack
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the checkpoint, or path or http(s) address of a GGUF file, the first one of a split model
    checkpoint: String,
    /// Directory to write
    #[arg(short, long)]
    output: PathBuf,
    /// Type of the experts' weights: q4, q8, f16 or f32 [default, GGUF only: as they are from F32, F16, BF16 and Q8_0;
    /// of other types, q4 for those of up to 4.5 bits a weight, else q8]
    #[arg(long, value_name = "TYPE")]
    quant: Option<DType>,
    /// Type of all other matrices [default: as they are where the experts are, q8 beside q4 and q8, else that of the
    /// experts]
    #[arg(long, value_name = "TYPE", requires = "quant")]
    core: Option<DType>,
    /// Largest size of a file, such as 24MB
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    max_shard: Size,
    /// Name of the model [default: that of the checkpoint's directory, or what GGUF says]
    #[arg(long)]
    name: Option<String>,
    /// Licence of the weights, as an SPDX identifier [default: what GGUF says]
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
    let (output, force) = (args.output.clone(), args.force);
    let (checkpoint, options) = pollster::block_on(args.open())?;
    let sink = DirectorySink::new(&output, if force { Replace::Pack } else { Replace::Nothing })?;
    let bar = progress::bytes("packing");
    let packing = pack_checkpoint(&*checkpoint, &options, sink, |done, total| progress::show(&bar, done, total));
    let packed = pollster::block_on(packing)?;
    bar.finish_and_clear();
    // Without one the pack is whole, too.
    if let Err(e) = self_test::add(&output) {
        eprintln!("note: the pack has no self-test: {e}");
    }
    for note in &packed.notes {
        eprintln!("note: {note}");
    }
    let (to, manifest) = (output.display(), &packed.manifest);
    let types = match manifest.quantisation {
        Quantisation { core, experts: Some(experts) } => format!("experts in {experts}, the rest in {core}"),
        Quantisation { core, experts: None } => format!("in {core}"),
    };
    print::results(|out| writeln!(out, "{to}: {} in {} files, {types}", Size(manifest.bytes()), manifest.file_count()))
}

impl Args {
    async fn open(self) -> Result<(Box<dyn Weights>, PackOptions)> {
        let (checkpoint, precision): (Box<dyn Weights>, _) = match self.quant {
            Some(experts) => {
                let mut precision = Precision::with_experts(experts);
                if let (Precision::Given { core, .. }, Some(wanted)) = (&mut precision, self.core) {
                    *core = wanted;
                }
                (open_checkpoint(&self.checkpoint).await?, precision)
            }
            None if is_gguf(&self.checkpoint) => {
                let gguf = open_gguf(&self.checkpoint).await?;
                let precision = gguf.precision();
                (Box::new(gguf), precision)
            }
            None => {
                let reason = "safetensors say no type for the experts; choose one, such as --quant q4";
                return Err(Error::Request(reason.to_owned()));
            }
        };
        let options = PackOptions {
            max_shard: self.max_shard.0,
            name: self.name,
            licence: self.licence,
            include: self.include,
            ..PackOptions::new(precision)
        };
        Ok((checkpoint, options))
    }
}
