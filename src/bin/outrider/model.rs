//! Which model a command runs, and on what.

use std::fmt::{Display, Formatter};
use std::rc::Rc;
use std::str::FromStr;

use outrider::Result;
use outrider::engine::{BackendChoice, Engine, Options};
use outrider::error::Size;
use outrider::flash::Throttled;
use outrider::import::open_model;
use outrider::pack::Pack;

use crate::progress;

/// Tokens of a pass; none for as many as the budget has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk(pub Option<usize>);

impl FromStr for Chunk {
    type Err = String;
    fn from_str(s: &str) -> Result<Chunk, String> {
        match (s, s.parse()) {
            ("auto", _) => Ok(Chunk(None)),
            (_, Ok(tokens @ 1..)) => Ok(Chunk(Some(tokens))),
            _ => Err(format!("`{s}` is neither a number of tokens nor auto")),
        }
    }
}

impl Display for Chunk {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(tokens) => tokens.fmt(f),
            None => f.pad("auto"),
        }
    }
}

#[derive(clap::Args, Clone)]
pub struct ModelArgs {
    /// Directory of a pack or a checkpoint, a GGUF file, or the http(s) address of a pack or a GGUF file
    model: String,
    /// What computes: cpu, gpu, or auto for the GPU where there is one
    #[arg(long, default_value = "auto")]
    backend: BackendChoice,
    /// Memory that everything together may take, such as 64MiB [default: room for every expert]
    #[arg(long, value_name = "SIZE")]
    budget: Option<Size>,
    /// Tokens a conversation can have [default: what the model was made for, at most 4096]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Tokens of a prompt that a pass takes at most, or auto for what the budget has room for
    #[arg(long, value_name = "TOKENS|auto", default_value = "auto")]
    chunk: Chunk,
    /// Expert slots at most, whatever the budget would hold
    #[arg(long, value_name = "SLOTS")]
    max_slots: Option<usize>,
    /// Multiply in f16 where the GPU can, which is coarser and on some GPUs faster
    #[arg(long)]
    f16: bool,
    /// Foresee experts by the later layers' routers alone, even where the pack has maps made by `calibrate`
    #[arg(long)]
    untrained: bool,
}

impl ModelArgs {
    /// The same with a pool of at most `slots`.
    pub fn with_slots(&self, slots: usize) -> ModelArgs {
        ModelArgs { max_slots: Some(slots), ..self.clone() }
    }

    /// The same with passes of other sizes.
    pub fn with_chunk(&self, chunk: Chunk) -> ModelArgs {
        ModelArgs { chunk, ..self.clone() }
    }

    /// The same on the CPU.
    pub fn on_cpu(&self) -> ModelArgs {
        ModelArgs { backend: BackendChoice::Cpu, ..self.clone() }
    }

    /// Whether it foresees by maps: the pack of this engine has some, and they are wanted.
    pub fn trains(&self, engine: &Engine) -> bool {
        !self.untrained && engine.pack().manifest().has_maps()
    }

    /// The same without the maps of its pack.
    pub fn untrained(&self) -> ModelArgs {
        ModelArgs { untrained: true, ..self.clone() }
    }

    /// Another model, run in the same way.
    pub fn at(&self, model: &str) -> ModelArgs {
        ModelArgs { model: model.to_owned(), untrained: false, ..self.clone() }
    }

    /// What it was called.
    pub fn name(&self) -> &str {
        &self.model
    }

    /// Loads the model, with progress and notices on standard error.
    pub async fn load(&self) -> Result<Engine> {
        self.load_pack(open_model(&self.model).await?).await
    }

    /// The same from flash that can be made slower.
    pub async fn load_throttled(&self) -> Result<(Engine, Rc<Throttled>)> {
        let flash = Rc::new(Throttled::new(open_model(&self.model).await?.flash().clone()));
        Ok((self.load_pack(Pack::open(flash.clone()).await?).await?, flash))
    }

    async fn load_pack(&self, pack: Pack) -> Result<Engine> {
        let options = Options {
            backend: self.backend,
            budget: self.budget.map(|size| size.0),
            context: self.context,
            chunk: self.chunk.0,
            max_slots: self.max_slots,
            f16: self.f16,
            untrained: self.untrained,
            ..Options::default()
        };
        let bar = progress::bytes("loading");
        let engine = Engine::load(pack, &options, |done, total| progress::show(&bar, done, total)).await;
        bar.finish_and_clear();
        let engine = engine?;
        for notice in engine.notices() {
            eprintln!("note: {notice}");
        }
        Ok(engine)
    }
}
