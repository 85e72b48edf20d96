use std::io::Write;
use std::path::PathBuf;

use outrider::Result;
use outrider::engine::{BackendChoice, Options, smallest_budget};
use outrider::error::{Needed, Size};
use outrider::flash::FileFlash;
use outrider::model::{self, MAPS};
use outrider::pack::{CoreTensor, Manifest, read_manifest};

use crate::print;

/// Show what a pack holds
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the pack
    pack: PathBuf,
    /// List every core tensor
    #[arg(long)]
    tensors: bool,
}

pub fn run(args: Args) -> Result<()> {
    let flash = FileFlash::open(args.pack)?;
    let manifest = pollster::block_on(read_manifest(&flash))?;
    print::results(|out| write(out, &manifest, args.tensors))
}

fn write(out: &mut impl Write, m: &Manifest, tensors: bool) -> std::io::Result<()> {
    let licence = m.licence.as_deref().unwrap_or("not stated");
    let (maps, core): (Vec<_>, Vec<_>) = m.core.iter().partition(|(name, _)| name.starts_with(MAPS));
    let bytes = |tensors: &[(&String, &CoreTensor)]| Size(tensors.iter().map(|(_, t)| t.bytes() as u64).sum());
    let parameters: u64 = core.iter().map(|(_, t)| t.len() as u64).sum();
    let e = &m.embedding;
    writeln!(out, "name          {}", m.name)?;
    writeln!(out, "licence       {licence}")?;
    writeln!(out, "architecture  {}{}", m.architecture, supported(m))?;
    writeln!(out, "core          {} tensors, {}, {parameters} values", core.len(), bytes(&core))?;
    let rows = e.stride * e.rows as u64;
    writeln!(out, "embedding     {} × {} {}, {}", e.rows, e.cols, e.dtype, Size(rows))?;
    match &m.experts {
        Some(x) => {
            let layers = x.layers.iter().flatten().count();
            let all = x.stride * (layers * x.count) as u64;
            let (count, dtype) = (x.count, x.dtype);
            writeln!(
                out,
                "experts       {layers} layers of {count} × {} {dtype}, {} in all",
                Size(x.stride),
                Size(all)
            )?;
        }
        None => writeln!(out, "experts       none")?,
    }
    if !maps.is_empty() {
        writeln!(out, "maps          {}, {}, by which experts are foreseen", maps.len(), bytes(&maps))?;
    }
    writeln!(out, "shards        {}, {} extents", m.shards.len(), m.extents.len())?;
    for f in &m.files {
        writeln!(out, "file          {} {}", f.file, Size(f.bytes))?;
    }
    for source in &m.provenance {
        writeln!(out, "made from     {} {}, blake3 {:?}", source.file, Size(source.bytes), source.hash)?;
    }
    writeln!(out, "total         {} ({} bytes)", Size(m.bytes()), m.bytes())?;
    let smallest = |backend| smallest_budget(m, &Options { backend, ..Options::default() });
    if let (Ok(cpu), Ok(gpu)) = (smallest(BackendChoice::Cpu), smallest(BackendChoice::Gpu)) {
        writeln!(out, "budget        at least {} on the CPU, {} on the GPU", Needed(cpu), Needed(gpu))?;
    }
    if tensors {
        for (name, t) in &m.core {
            writeln!(out, "{name}  {:?} {} {}", t.shape, t.dtype, Size(t.bytes() as u64))?;
        }
    }
    Ok(())
}

fn supported(m: &Manifest) -> &'static str {
    if model::architecture(&m.config).is_ok() { "" } else { " (this build does not run it)" }
}
