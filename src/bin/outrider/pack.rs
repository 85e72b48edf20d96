//! `outrider pack` and `outrider unpack`: between checkpoints and packs.

use std::path::PathBuf;
use std::rc::Rc;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use outrider::error::Result;
use outrider::flash::FileFlash;
use outrider::import;
use outrider::pack::Pack as OpenPack;
use outrider::tensor::DType;

use crate::common::{parse_size, shown};

#[derive(Args)]
pub struct Pack {
    /// Hugging Face checkpoint directory: config.json, safetensors, tokenizer
    checkpoint: PathBuf,
    /// Directory to write
    #[arg(short, long)]
    output: PathBuf,
    /// Type of the experts: q4, q8, f16 or f32
    #[arg(long, default_value = "q4")]
    quant: DType,
    /// Type of everything else [default: q8 where the experts are q4, else as the experts]
    #[arg(long)]
    core: Option<DType>,
    /// Largest file, such as 24MB for hosts that limit it
    #[arg(long, default_value = "1GiB", value_parser = parse_size)]
    max_shard: u64,
    /// Name of the model [default: the checkpoint directory's]
    #[arg(long)]
    name: Option<String>,
    /// Licence of the weights, as an SPDX expression
    #[arg(long)]
    licence: Option<String>,
    /// Replace what is there
    #[arg(long)]
    force: bool,
}

impl Pack {
    pub async fn run(self) -> Result<()> {
        let core = self.core.unwrap_or(if self.quant == DType::Q4 { DType::Q8 } else { self.quant });
        let options = import::Options {
            experts: Some(self.quant),
            core: Some(core),
            max_shard: self.max_shard,
            name: self.name,
            licence: self.licence,
        };
        let bar = progress_bar("packing");
        let manifest = import::pack(&self.checkpoint, &self.output, self.force, &options, &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })?;
        bar.finish_and_clear();
        if !manifest.files.iter().any(|f| f.file == "tokenizer.json") {
            eprintln!("note: the checkpoint has no tokenizer.json, so the pack cannot chat");
        }
        let bytes: u64 = manifest.shards.iter().map(|s| s.bytes).chain(manifest.files.iter().map(|f| f.bytes)).sum();
        eprintln!("{}: {} in {} shards", self.output.display(), shown(bytes), manifest.shards.len());
        Ok(())
    }
}

#[derive(Args)]
pub struct Unpack {
    /// Pack directory
    pack: PathBuf,
    /// Checkpoint directory to write
    #[arg(short, long)]
    output: PathBuf,
}

impl Unpack {
    pub async fn run(self) -> Result<()> {
        let pack = OpenPack::open(Rc::new(FileFlash::open(&self.pack)?)).await?;
        import::unpack(&pack, &self.output).await
    }
}

pub fn progress_bar(what: &'static str) -> ProgressBar {
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    ProgressBar::new(0).with_style(style).with_message(what)
}
