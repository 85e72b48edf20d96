use std::io::Write;
use std::path::PathBuf;

use outrider::engine::sampler::argmax;
use outrider::engine::{Engine, Want};
use outrider::{Error, Result};
use serde_json::json;

use crate::model::ModelArgs;
use crate::{print, progress, texts};

/// Measure how well a model predicts texts
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts, one JSON object a line: `text`, or its tokens as `ids`
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Only this many of the texts
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How well tokens were predicted from those before them.
#[derive(Default)]
struct Score {
    /// Tokens predicted: all but the first of each text.
    tokens: u64,
    /// Sum of their negative log likelihoods, in nats.
    nll: f64,
    /// How many had the greatest logit.
    top1: u64,
}

pub fn run(args: Args) -> Result<()> {
    let path = args.text.display();
    pollster::block_on(async {
        let mut engine = args.model.load().await?;
        let texts = texts::read(&args.text, args.limit, &engine).await?;
        let bar = progress::count("evaluating", "tokens");
        let total = texts.iter().map(|ids| ids.len() as u64).sum();
        let (mut score, mut done) = (Score::default(), 0);
        for ids in &texts {
            score.add(&mut engine, ids).await?;
            done += ids.len() as u64;
            progress::show(&bar, done, total);
        }
        bar.finish_and_clear();
        let Score { tokens, nll, top1 } = score;
        if tokens == 0 {
            return Err(Error::format("text", format!("{path} has no text of two tokens or more")));
        }
        let (per_token, right) = (nll / tokens as f64, top1 as f64 / tokens as f64);
        let count = texts.len();
        print::results(|out| {
            if args.json {
                let found = json!({"texts": count, "tokens": tokens, "nll": nll, "nll_per_token": per_token, "top1": top1, "top1_rate": right});
                return writeln!(out, "{found}");
            }
            writeln!(out, "tokens         {tokens} in {count} texts")?;
            writeln!(out, "nll per token  {per_token:.4} nats")?;
            writeln!(out, "top-1          {:.2} %", 100.0 * right)
        })
    })
}

impl Score {
    /// Predicts every token of a text from those before it.
    async fn add(&mut self, engine: &mut Engine, ids: &[u32]) -> Result<()> {
        let Some((_, known)) = ids.split_last() else { return Ok(()) };
        engine.reset()?;
        let mut next = ids.iter().skip(1);
        // One pass at a time: the logits of a long text would take more memory than the model.
        for tokens in known.chunks(engine.chunk()) {
            let logits = engine.forward(tokens, Want::All, None).await?;
            for (row, &next) in logits.chunks_exact(logits.len() / tokens.len()).zip(&mut next) {
                self.nll += nll(row, next)?;
                self.top1 += u64::from(argmax(row)? == next);
                self.tokens += 1;
            }
        }
        Ok(())
    }
}

/// Negative log likelihood of a token, in nats.
fn nll(logits: &[f32], token: u32) -> Result<f64> {
    let Some(&logit) = logits.get(token as usize) else {
        return Err(Error::format("text", format!("token {token} is outside the vocabulary")));
    };
    let max = f64::from(logits[argmax(logits)? as usize]);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
    Ok(max + sum.ln() - f64::from(logit))
}
