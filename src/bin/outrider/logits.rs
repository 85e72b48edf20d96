//! `outrider logits`: what the runtime computes, as tensors, so that it can be held against a reference.

use std::collections::BTreeMap;
use std::path::PathBuf;

use outrider::engine::{Engine, Probe, Want};
use outrider::error::{Error, Result};
use safetensors::tensor::{Dtype, TensorView};

use crate::model::ModelArgs;

/// Write what the runtime computes for some tokens, to hold it against a reference
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// Safetensors file to write: logits [T,V], hidden [L+1,T,H], topk.LAYER [T,k], weights.LAYER [T,k], greedy [N]
    #[arg(long)]
    out: PathBuf,
    /// Tokens to continue with, the most likely each time
    #[arg(long, default_value_t = 0)]
    greedy: usize,
}

struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    fn f32(shape: Vec<usize>, values: &[f32]) -> Tensor {
        Tensor { dtype: Dtype::F32, shape, bytes: bytemuck::cast_slice(values).to_vec() }
    }

    fn i32(shape: Vec<usize>, values: &[u32]) -> Tensor {
        Tensor { dtype: Dtype::I32, shape, bytes: bytemuck::cast_slice(values).to_vec() }
    }
}

pub fn run(args: Args) -> Result<()> {
    pollster::block_on(args.run())
}

impl Args {
    async fn run(self) -> Result<()> {
        let mut engine = self.model.load().await?;
        let vocab = engine.plan().vocab;
        if let Some(bad) = self.tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(Error::Request(format!("token {bad} is outside the vocabulary of {vocab}")));
        }
        let mut probe = Probe::default();
        let logits = engine.forward(&self.tokens, Want::All, Some(&mut probe)).await?;
        let greedy = continue_greedily(&mut engine, &logits[logits.len() - vocab..], self.greedy).await?;

        let (t, hidden) = (self.tokens.len(), engine.plan().hidden);
        let mut tensors = BTreeMap::new();
        tensors.insert("logits".to_owned(), Tensor::f32(vec![t, vocab], &logits));
        let layers = probe.hidden.len();
        tensors.insert("hidden".to_owned(), Tensor::f32(vec![layers, t, hidden], &probe.hidden.concat()));
        for (layer, (ids, weights)) in probe.ids.iter().zip(&probe.weights).enumerate() {
            let shape = vec![t, ids.len() / t];
            tensors.insert(format!("topk.{layer}"), Tensor::i32(shape.clone(), ids));
            tensors.insert(format!("weights.{layer}"), Tensor::f32(shape, weights));
        }
        tensors.insert("greedy".to_owned(), Tensor::i32(vec![greedy.len()], &greedy));
        let views = tensors.iter().map(|(name, t)| {
            let view = TensorView::new(t.dtype, t.shape.clone(), &t.bytes).map_err(|e| Error::format("tensor", e))?;
            Ok((name, view))
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let file = safetensors::serialize(views, None).map_err(|e| Error::format("safetensors file", e))?;
        std::fs::write(&self.out, file).map_err(Error::io(self.out.display()))
    }
}

async fn continue_greedily(engine: &mut Engine, logits: &[f32], n: usize) -> Result<Vec<u32>> {
    let mut tokens = Vec::with_capacity(n);
    let mut logits = logits.to_vec();
    while tokens.len() < n {
        let token = outrider::engine::sampler::argmax(&logits)?;
        tokens.push(token);
        if tokens.len() < n {
            logits = engine.forward(&[token], Want::Last, None).await?;
        }
    }
    Ok(tokens)
}
