//! `outrider inspect` and `outrider verify`: what a pack holds, and whether it holds it still.

use std::path::PathBuf;
use std::rc::Rc;

use clap::Args;
use outrider::engine::{BackendChoice, Options, smallest_budget};
use outrider::error::{Error, Result};
use outrider::flash::FileFlash;
use outrider::pack::{self, Pack};

use crate::common::shown;
use crate::pack::progress_bar;

#[derive(Args)]
pub struct Inspect {
    /// Pack directory
    pack: PathBuf,
    /// Tokens a conversation can have, for the smallest budget [default: what the model was made for, at most 4096]
    #[arg(long)]
    context: Option<usize>,
    /// List every core tensor
    #[arg(long)]
    tensors: bool,
}

impl Inspect {
    pub async fn run(self) -> Result<()> {
        let pack = Pack::open(Rc::new(FileFlash::open(&self.pack)?)).await?;
        let m = pack.manifest();
        println!("name          {}", m.name);
        println!("licence       {}", m.licence.as_deref().unwrap_or("not stated"));
        println!("architecture  {}", m.architecture);
        println!("format        {} version {}", m.format, m.version);
        let core: u64 = m.core.values().map(|t| t.bytes() as u64).sum();
        println!("core          {} in {} tensors ({})", shown(core), m.core.len(), m.quantisation.core);
        let e = &m.embedding;
        println!("embedding     {} in {} rows of {} ({})", shown(e.rows as u64 * e.stride), e.rows, e.cols, e.dtype);
        if let Some(x) = &m.experts {
            let layers = x.layers.iter().flatten().count();
            let all = (layers * x.count) as u64 * x.stride;
            let each = shown(x.stride);
            println!(
                "experts       {} in {layers} layers of {} experts, {each} each ({})",
                shown(all),
                x.count,
                x.dtype
            );
        }
        println!("files         {}", m.files.iter().map(|f| f.file.as_str()).collect::<Vec<_>>().join(", "));
        println!("shards        {}", m.shards.iter().map(|s| s.file.as_str()).collect::<Vec<_>>().join(", "));
        for (backend, name) in [(BackendChoice::Cpu, "CPU"), (BackendChoice::Gpu, "GPU")] {
            let options = Options { backend, context: self.context, ..Options::default() };
            match smallest_budget(m, &options) {
                Ok(bytes) => println!("smallest budget on the {name}: {} ({bytes} bytes)", shown(bytes)),
                Err(e) => println!("smallest budget on the {name}: {e}"),
            }
        }
        if self.tensors {
            for (name, t) in &m.core {
                println!("{name} {:?} {} {}", t.shape, t.dtype, shown(t.bytes() as u64));
            }
        }
        Ok(())
    }
}

#[derive(Args)]
pub struct Verify {
    /// Pack directory
    pack: PathBuf,
}

impl Verify {
    pub async fn run(self) -> Result<()> {
        let flash = FileFlash::open(&self.pack)?;
        let bar = progress_bar("verifying");
        let bad = pack::verify(&flash, |p: pack::Progress| {
            bar.set_length(p.total);
            bar.set_position(p.done);
        })
        .await?;
        bar.finish_and_clear();
        for b in &bad {
            eprintln!("{}: {}", b.what, b.error);
        }
        match bad.len() {
            0 => {
                println!("{}: every byte is what the manifest says", self.pack.display());
                Ok(())
            }
            n => Err(Error::format("pack", format!("{n} places are bad; download or copy those files again"))),
        }
    }
}
