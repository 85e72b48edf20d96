//! `granitemoe`: Granite 3's mixtures. Embeddings, what layers add to the residual, attention's scores and logits are each
//! multiplied with a number of the configuration.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, QkNorm, Router};
use super::plan::{Glu, Map, Plan};
use super::rope::WHOLE_HEAD;
use super::{Tensors, bad_config};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    num_local_experts: usize,
    num_experts_per_tok: usize,
    intermediate_size: usize,
    #[serde(default = "one")]
    embedding_multiplier: f32,
    #[serde(default = "one")]
    residual_multiplier: f32,
    #[serde(default = "one")]
    attention_multiplier: f32,
    #[serde(default = "one")]
    logits_scaling: f32,
}

fn one() -> f32 {
    1.0
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    for (name, factor) in [
        ("embedding_multiplier", c.embedding_multiplier),
        ("residual_multiplier", c.residual_multiplier),
        ("attention_multiplier", c.attention_multiplier),
        ("logits_scaling", c.logits_scaling),
    ] {
        if !factor.is_finite() || factor == 0.0 {
            return Err(bad_config(format!("`{name}` is {factor}")));
        }
    }
    let attention = Attention { scale: c.attention_multiplier, ..Attention::new(&base, QkNorm::None) };
    let experts = Experts {
        count: c.num_local_experts,
        top_k: c.num_experts_per_tok,
        width: c.intermediate_size,
        bias: false,
        glu: Glu::Silu,
        router: Router { name: "router.layer", ..Router::softmax(true) },
        shared: None,
    };
    experts.check()?;
    let mut d = Decoder::new(&base, Map::Identity, base.rope(config, &WHOLE_HEAD)?, tensors);
    d.embedding_scale = c.embedding_multiplier;
    d.residual_scale = c.residual_multiplier;
    d.logits_scale = 1.0 / c.logits_scaling;
    let mut layers = Vec::new();
    for layer in 0..base.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.input_layernorm"))?];
        mix.extend(d.attention(&at, &attention)?);
        let norm = format!("{at}.post_attention_layernorm");
        layers.push(d.routed_layer(layer, &norm, &format!("{at}.block_sparse_moe"), &experts, mix)?);
    }
    d.finish(layers, "model.norm")
}
