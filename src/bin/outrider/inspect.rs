use std::io::Write;

use outrider::Result;
use outrider::engine::{BackendChoice, Options, smallest_budget};
use outrider::error::{Needed, Size};
use outrider::flash::FileFlash;
use outrider::import::{Gguf, Weights, is_gguf, open_gguf};
use outrider::model::{self, MAPS};
use outrider::pack::{CoreTensor, Manifest, read_manifest};
use serde_json::Value;

use crate::print;

/// Show what a pack or a GGUF file holds
#[derive(clap::Args)]
pub struct Args {
    /// Directory of the pack, or path or http(s) address of a GGUF file, the first one of a split model
    pack: String,
    /// List every core tensor, and all of a GGUF file's
    #[arg(long)]
    tensors: bool,
}

pub fn run(args: Args) -> Result<()> {
    if is_gguf(&args.pack) {
        let gguf = pollster::block_on(open_gguf(&args.pack))?;
        return print::results(|out| write_gguf(out, &gguf, args.tensors));
    }
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
    writeln!(out, "architecture  {}{}", m.architecture, supported(&m.config))?;
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

fn write_gguf(out: &mut impl Write, gguf: &Gguf, tensors: bool) -> std::io::Result<()> {
    let config = gguf.config();
    writeln!(out, "name          {}", gguf.name())?;
    writeln!(out, "licence       {}", gguf.licence().as_deref().unwrap_or("not stated"))?;
    let architecture = config["model_type"].as_str().unwrap_or_default();
    writeln!(out, "architecture  {architecture}{}", supported(config))?;
    let weights: Vec<String> = gguf.types().iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    writeln!(out, "weights       {}", weights.join(", "))?;
    if let Some(experts) = config["num_experts"].as_u64() {
        writeln!(out, "experts       {experts} a layer, {} a token", config["num_experts_per_tok"])?;
    }
    match gguf.carried() {
        Ok(files) => {
            for (name, bytes) in files {
                writeln!(out, "makes         {name} {}", Size(bytes.len() as u64))?;
            }
        }
        Err(error) => writeln!(out, "makes         no tokenizer: {error}")?,
    }
    let files = gguf.files();
    for (file, bytes) in &files {
        writeln!(out, "file          {file} {}", Size(*bytes))?;
    }
    let total = files.iter().map(|(_, bytes)| bytes).sum();
    writeln!(out, "total         {} ({total} bytes)", Size(total))?;
    if tensors {
        let mut names = gguf.names();
        names.sort_unstable();
        for name in names {
            if let (Some(tensor), Some(kind)) = (gguf.find(name), gguf.type_of(name)) {
                writeln!(out, "{name}  {:?} {kind} {}", tensor.shape, Size(tensor.bytes))?;
            }
        }
    }
    Ok(())
}

fn supported(config: &Value) -> &'static str {
    if model::architecture(config).is_ok() { "" } else { " (this build does not run it)" }
}
