//! `qwen3_moe`: Qwen3's mixture, such as Qwen3-30B-A3B. Full attention with norms of queries and keys, routed experts in
//! all layers but those that the configuration makes dense.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, Mlp, QkNorm, Router, projections};
use super::plan::{Glu, Map, Plan};
use super::rope::WHOLE_HEAD;
use super::{Tensors, bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    num_experts: Option<usize>,
    /// What some versions of the reference write for it.
    num_local_experts: Option<usize>,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    #[serde(default)]
    norm_topk_prob: bool,
    /// Width of the layers without experts.
    intermediate_size: Option<usize>,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    /// Every how many layers one has experts.
    decoder_sparse_step: Option<usize>,
    #[serde(default)]
    use_sliding_window: bool,
}

impl Config {
    fn has_experts(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.decoder_sparse_step.unwrap_or(1).max(1))
            && !self.mlp_only_layers.contains(&layer)
    }
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    if c.use_sliding_window {
        return Err(bad_config("`use_sliding_window` is not supported"));
    }
    let attention = Attention::new(&base, QkNorm::Head);
    let missing = || bad_config("missing field `num_experts`");
    let experts = Experts {
        count: c.num_experts.or(c.num_local_experts).ok_or_else(missing)?,
        top_k: c.num_experts_per_tok,
        width: c.moe_intermediate_size,
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
        let (norm, mlp) = (format!("{at}.post_attention_layernorm"), format!("{at}.mlp"));
        layers.push(if c.has_experts(layer) {
            d.routed_layer(layer, &norm, &mlp, &experts, mix)?
        } else {
            let width = c.intermediate_size.ok_or_else(|| bad_config("missing field `intermediate_size`"))?;
            check_dims(&[("intermediate_size", width)])?;
            d.dense_layer(&norm, &projections(&mlp), &Mlp { width, bias: false }, mix)?
        });
    }
    d.finish(layers, "model.norm")
}
