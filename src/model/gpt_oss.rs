//! `gpt_oss`: gpt-oss-20b and gpt-oss-120b. Every other layer attends to a window; heads have sinks; projections, router
//! and experts have biases; experts clamp what they activate.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, QkNorm, Router};
use super::plan::{Glu, Map, Plan};
use super::rope::Defaults;
use super::{Tensors, bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    num_local_experts: usize,
    num_experts_per_tok: usize,
    intermediate_size: usize,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<LayerType>>,
    swiglu_alpha: Option<f32>,
    swiglu_limit: Option<f32>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum LayerType {
    SlidingAttention,
    FullAttention,
}

impl Config {
    fn slides(&self, layer: usize) -> bool {
        match &self.layer_types {
            Some(types) => types[layer] == LayerType::SlidingAttention,
            None => layer.is_multiple_of(2),
        }
    }
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    let window = c.sliding_window.unwrap_or(128);
    check_dims(&[("sliding_window", window)])?;
    if c.layer_types.as_ref().is_some_and(|types| types.len() != base.num_hidden_layers) {
        return Err(bad_config("`layer_types` does not name every layer"));
    }
    let (alpha, limit) = (c.swiglu_alpha.unwrap_or(1.702), c.swiglu_limit.unwrap_or(7.0));
    if !alpha.is_finite() || !limit.is_finite() || limit <= 0.0 {
        return Err(bad_config(format!("`swiglu_alpha` is {alpha} and `swiglu_limit` is {limit}")));
    }
    let attention = Attention { sinks: true, ..Attention::new(&base, QkNorm::None) };
    let experts = Experts {
        count: c.num_local_experts,
        top_k: c.num_experts_per_tok,
        width: c.intermediate_size,
        bias: true,
        glu: Glu::Clamped { alpha, limit },
        router: Router { name: "router", bias: true, ..Router::softmax(true) },
        shared: None,
    };
    experts.check()?;
    let rope = base.rope(config, &Defaults { theta: 150_000.0, part: 1.0 })?;
    let mut d = Decoder::new(&base, Map::Identity, rope, tensors);
    let mut layers = Vec::new();
    for layer in 0..base.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.input_layernorm"))?];
        mix.extend(d.attention(&at, &Attention { window: c.slides(layer).then_some(window), ..attention })?);
        let norm = format!("{at}.post_attention_layernorm");
        layers.push(d.routed_layer(layer, &norm, &format!("{at}.mlp"), &experts, mix)?);
    }
    d.finish(layers, "model.norm")
}
