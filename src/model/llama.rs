//! `llama` and what is shaped like it: full attention and a feed-forward network in every layer, no experts, so that all
//! of it stays resident.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Mlp, QkNorm, projections};
use super::plan::{Map, Plan};
use super::rope::WHOLE_HEAD;
use super::{Tensors, bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    intermediate_size: usize,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    dense(config, QkNorm::None, tensors)
}

pub(super) fn dense(config: &Value, norm: QkNorm, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    check_dims(&[("intermediate_size", c.intermediate_size)])?;
    if c.use_sliding_window {
        return Err(bad_config("`use_sliding_window` is not supported"));
    }
    let attention = Attention::new(&base, norm);
    let mlp = Mlp { width: c.intermediate_size, bias: c.mlp_bias };
    let mut d = Decoder::new(&base, Map::Identity, base.rope(config, &WHOLE_HEAD)?, tensors);
    let mut layers = Vec::new();
    for layer in 0..base.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.input_layernorm"))?];
        mix.extend(d.attention(&at, &attention)?);
        layers.push(d.dense_layer(
            &format!("{at}.post_attention_layernorm"),
            &projections(&format!("{at}.mlp")),
            &mlp,
            mix,
        )?);
    }
    d.finish(layers, "model.norm")
}
