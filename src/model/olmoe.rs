//! `olmoe`: OLMoE. Queries and keys are normalised over all heads at once; the weights of the chosen experts are their share
//! among all.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, QkNorm, Router};
use super::plan::{Glu, Map, Plan};
use super::rope::WHOLE_HEAD;
use super::{Tensors, bad_config};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    num_experts: Option<usize>,
    /// What some versions of the reference write for it.
    num_local_experts: Option<usize>,
    num_experts_per_tok: usize,
    intermediate_size: usize,
    #[serde(default)]
    norm_topk_prob: bool,
    clip_qkv: Option<f32>,
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    if c.clip_qkv.is_some_and(|clip| !clip.is_finite() || clip <= 0.0) {
        return Err(bad_config("`clip_qkv` is no positive number"));
    }
    let attention = Attention { clip: c.clip_qkv, ..Attention::new(&base, QkNorm::Projection) };
    let missing = || bad_config("missing field `num_experts`");
    let experts = Experts {
        count: c.num_experts.or(c.num_local_experts).ok_or_else(missing)?,
        top_k: c.num_experts_per_tok,
        width: c.intermediate_size,
        bias: false,
        glu: Glu::Silu,
        router: Router::softmax(c.norm_topk_prob),
        shared: None,
    };
    experts.check()?;
    let mut d = Decoder::new(&base, Map::Identity, base.rope(config, &WHOLE_HEAD)?, tensors);
    let mut layers = Vec::new();
    for layer in 0..base.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.input_layernorm"))?];
        mix.extend(d.attention(&at, &attention)?);
        let norm = format!("{at}.post_attention_layernorm");
        layers.push(d.routed_layer(layer, &norm, &format!("{at}.mlp"), &experts, mix)?);
    }
    d.finish(layers, "model.norm")
}
