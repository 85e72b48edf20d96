//! What several commands share: engine options, sizes.

use clap::Args;
use outrider::engine::{BackendChoice, Engine, Options};
use outrider::error::Result;

/// `64MiB`, `3GiB`, `500MB`, `4096`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 7] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
    ];
    let text = text.trim();
    let unit = UNITS.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)));
    let (number, bytes) = unit.unwrap_or((text, 1));
    let number: f64 = number.trim().parse().map_err(|_| format!("`{text}` is not a size such as 64MiB or 3GiB"))?;
    let size = number * bytes as f64;
    if size.is_finite() && (1.0..=(1u64 << 52) as f64).contains(&size) {
        Ok(size as u64)
    } else {
        Err(format!("`{text}` is not a size from 1 byte to 4 PiB"))
    }
}

/// A size for people: `1.5 MiB`.
pub fn shown(bytes: u64) -> String {
    outrider::error::Size(bytes).to_string()
}

/// How to load a model.
#[derive(Args, Clone)]
pub struct EngineArgs {
    /// Memory that everything together may take, such as 64MiB [default: room for every expert]
    #[arg(long, value_parser = parse_size)]
    pub budget: Option<u64>,
    /// Where to compute: cpu, gpu, or auto for the GPU where there is one
    #[arg(long, default_value = "auto")]
    pub backend: BackendChoice,
    /// Tokens a conversation can have [default: what the model was made for, at most 4096]
    #[arg(long)]
    pub context: Option<usize>,
    /// Tokens a pass takes at most
    #[arg(long, default_value_t = Options::default().chunk)]
    pub chunk: usize,
    /// Expert slots at most, whatever the budget would hold
    #[arg(long)]
    pub max_slots: Option<usize>,
}

impl EngineArgs {
    pub fn options(&self) -> Options {
        Options {
            backend: self.backend,
            budget: self.budget,
            context: self.context,
            chunk: self.chunk,
            max_slots: self.max_slots,
        }
    }

    /// Loads a pack directory, a checkpoint directory or the http(s) address of a pack. Notices go to standard error.
    pub async fn load(&self, model: &str) -> Result<Engine> {
        let pack = outrider::import::open_model(model).await?;
        let engine = Engine::load(pack, &self.options(), |_, _| {}).await?;
        engine.notices().iter().for_each(|n| eprintln!("note: {n}"));
        Ok(engine)
    }
}
