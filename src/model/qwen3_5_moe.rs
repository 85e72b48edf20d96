//! `qwen3_5_moe_text`: Qwen3.5's mixture and the language model of MiniCPM-V 4.7. Gated DeltaNet in most layers, gated
//! full attention in the rest, every layer followed by routed experts and one shared expert.
//!
//! RMS-norm weights are stored around zero (the norm multiplies by `1 + w`), except DeltaNet's gated norm.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, QkNorm, Router, Shared};
use super::delta_net::{DeltaNet, Hybrid, Projections};
use super::plan::{Glu, Map, Plan};
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

/// What models of this kind differ in.
pub(super) struct Variant {
    pub projections: Projections,
    pub rope: Defaults,
    pub renormalise: bool,
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let rope = Defaults { theta: 10_000_000.0, part: 0.25 };
    hybrid(config, &Variant { projections: Projections::Separate, rope, renormalise: true }, tensors)
}

pub(super) fn hybrid(config: &Value, variant: &Variant, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    if base.attention_bias {
        return Err(bad_config("`attention_bias` is not supported"));
    }
    let dense = config["mlp_only_layers"].as_array().is_some_and(|layers| !layers.is_empty());
    if dense || config["decoder_sparse_step"].as_u64().is_some_and(|step| step != 1) {
        return Err(bad_config("layers without experts are not supported"));
    }
    let hybrid = Hybrid::read(config, base.num_hidden_layers)?;
    let delta_net = DeltaNet::read(config)?;
    let rope = base.rope(config, &variant.rope)?;
    let attention = Attention { gated: true, bias: false, ..Attention::new(&base, QkNorm::Head) };
    let experts = Experts {
        count: c.num_experts,
        top_k: c.num_experts_per_tok,
        width: c.moe_intermediate_size,
        bias: false,
        glu: Glu::Silu,
        router: Router::softmax(variant.renormalise),
        shared: Some(Shared { name: "shared_expert", width: c.shared_expert_intermediate_size, gated: true }),
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
            false => delta_net.ops(&mut d, &at, variant.projections)?,
        });
        let norm = format!("{at}.post_attention_layernorm");
        layers.push(d.routed_layer(layer, &norm, &format!("{at}.mlp"), &experts, mix)?);
    }
    d.finish(layers, "model.norm")
}
