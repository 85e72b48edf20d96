//! `qwen3_5_moe_text`: Qwen3.5's mixture and the language model of MiniCPM-V 4.7. Gated DeltaNet in most layers, gated
//! full attention in the rest, every layer followed by routed experts and one shared expert.
//!
//! RMS-norm weights are stored around zero (the norm multiplies by `1 + w`), except DeltaNet's gated norm.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, QkNorm};
use super::delta_net::{DeltaNet, Hybrid};
use super::plan::{Map, Plan};
use super::rope::Defaults;
use super::{Tensors, bad_config};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    num_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: usize,
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    if base.attention_bias {
        return Err(bad_config("`attention_bias` is not supported"));
    }
    let hybrid = Hybrid::read(config, base.num_hidden_layers)?;
    let delta_net = DeltaNet::read(config)?;
    let rope = base.rope(config, &Defaults { theta: 10_000_000.0, part: 0.25 })?;
    let attention = Attention { gated: true, bias: false, ..Attention::new(&base, QkNorm::Head) };
    let experts = Experts {
        count: c.num_experts,
        top_k: c.num_experts_per_tok,
        width: c.moe_intermediate_size,
        renormalise: true,
        shared: Some(c.shared_expert_intermediate_size),
    };
    experts.check()?;
    let mut d = Decoder::new(&base, Map::PlusOne, rope, tensors);
    // Grows with the layers that are there, not with what the configuration says.
    let mut layers = Vec::new();
    for layer in 0..base.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.input_layernorm"))?];
        mix.extend(match hybrid.is_attention(layer) {
            true => d.attention(&at, &attention)?,
            false => delta_net.ops(&mut d, &at)?,
        });
        let norm = format!("{at}.post_attention_layernorm");
        layers.push(d.routed_layer(layer, &norm, &format!("{at}.mlp"), &experts, mix)?);
    }
    d.finish(layers, "model.norm")
}
