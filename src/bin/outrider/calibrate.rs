use std::io::Write;
use std::path::{Path, PathBuf};

use outrider::engine::Engine;
use outrider::engine::calibrate::{Calibration, WEIGHTS};
use outrider::error::Size;
use outrider::les::Settings;
use outrider::model::MAX_DISTANCE;
use outrider::pack::{DirectorySink, MANIFEST, Map, Replace, copy_with_maps, set_maps};
use outrider::tensor::DType;
use outrider::{Error, Result};

use crate::model::ModelArgs;
use crate::{print, progress, recall, texts};

/// Fit maps to texts, by which experts are foreseen better, put them into the pack and measure them on other texts
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts to run the model on, one JSON object a line: `text`, or its tokens as `ids`
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Directory to write a pack with maps to [default: the model's own]
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Tokens of the texts that are used
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    tokens: usize,
    /// Layers ahead that maps are made for [default: those that are read ahead]
    #[arg(long, default_value_t = Settings::default().depth, hide_default_value = true)]
    depth: usize,
    /// Type of the maps: q4, q8, f16 or f32
    #[arg(long, value_name = "TYPE", default_value = "q4")]
    quant: DType,
    /// Replace the pack that is at the output
    #[arg(long)]
    force: bool,
}

/// Every so many texts one chooses among maps, and one measures those chosen.
const PARTS: usize = 8;

pub fn run(args: Args) -> Result<()> {
    if !(1..=MAX_DISTANCE).contains(&args.depth) {
        return Err(Error::Request(format!("maps are made for 1 to {MAX_DISTANCE} layers ahead, not {}", args.depth)));
    }
    pollster::block_on(args.run())
}

impl Args {
    async fn run(self) -> Result<()> {
        let target = self.target()?;
        // Before the work, which would be in vain if there is no place for it.
        let replace = if self.force { Replace::Pack } else { Replace::Nothing };
        let sink = self.output.as_ref().map(|output| DirectorySink::new(output, replace)).transpose()?;
        let model = self.model.on_cpu();
        let mut engine = model.untrained().load().await?;
        let texts = shorten(texts::read(&self.text, None, &engine).await?, self.tokens, engine.context());
        if texts.len() < 3 {
            let reason = format!(
                "there are {} texts in {} tokens, and maps need three: to fit, to choose and to measure",
                texts.len(),
                self.tokens
            );
            return Err(Error::Request(reason));
        }
        let parts = PARTS.min(texts.len());
        // 0 measures, 1 chooses, the others are fitted to.
        let part = |part: usize| -> Vec<&[u32]> {
            let of = |(i, _): &(usize, _)| (parts - 1 - i % parts).min(2) == part;
            texts.iter().enumerate().filter(of).map(|(_, ids)| &ids[..]).collect()
        };
        let maps = self.fit(&mut engine, &part(2), &part(1)).await?;
        let manifest = match sink {
            Some(sink) => copy_with_maps(engine.pack(), &maps, sink).await?.0,
            None => set_maps(&target, &maps)?,
        };
        let measured = part(0);
        let untrained = engine.recall(&measured, self.depth).await?;
        drop(engine);
        let mut engine = model.at(&target.to_string_lossy()).load().await?;
        let trained = engine.recall(&measured, self.depth).await?;
        let bytes = maps.iter().map(|map| map.bytes.len() as u64).sum();
        print::results(|out| {
            recall::write(out, &untrained, Some(&trained))?;
            writeln!(
                out,
                "\n{}: {} maps, {} of {}; measured on {} tokens of other texts",
                target.display(),
                maps.len(),
                Size(bytes),
                Size(manifest.bytes()),
                untrained.tokens
            )
        })
    }

    /// Where the pack with maps is to be.
    fn target(&self) -> Result<PathBuf> {
        match &self.output {
            Some(output) => Ok(output.clone()),
            None if Path::new(self.model.name()).join(MANIFEST).is_file() => Ok(self.model.name().into()),
            None => Err(Error::Request(format!(
                "`{}` is no directory of a pack; name one to write with --output",
                self.model.name()
            ))),
        }
    }

    async fn fit(&self, engine: &mut Engine, learnt: &[&[u32]], chosen: &[&[u32]]) -> Result<Vec<Map>> {
        let mut calibration = Calibration::new(engine, self.depth).await?;
        let bar = progress::count("calibrating", "tokens");
        let total = learnt.iter().map(|ids| ids.len() as u64).sum();
        let mut done = 0;
        for ids in learnt {
            calibration.learn(engine, ids).await?;
            done += ids.len() as u64;
            progress::show(&bar, done, total);
        }
        let candidates: Vec<_> =
            WEIGHTS.iter().map(|weight| calibration.fit(*weight, self.quant)).collect::<Result<_>>()?;
        let maps = calibration.choose(engine, chosen, &candidates).await?;
        bar.finish_and_clear();
        Ok(maps)
    }
}

/// The first texts, of so many tokens together, none longer than the context.
fn shorten(mut texts: Vec<Vec<u32>>, tokens: usize, context: usize) -> Vec<Vec<u32>> {
    let mut left = tokens;
    for ids in &mut texts {
        ids.truncate(context.min(left));
        left -= ids.len();
    }
    texts.retain(|ids| !ids.is_empty());
    texts
}
