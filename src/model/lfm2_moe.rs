//! `lfm2_moe`: LFM2's mixtures. Short gated convolutions in most layers, attention in the rest; the first layers dense, the
//! others with experts that a sigmoid router chooses with a bias.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Attention, Base, Decoder, Experts, Mlp, QkNorm, Router};
use super::plan::{Glu, Map, Op, Plan, Scoring, StateSpec};
use super::rope::Defaults;
use super::{Tensors, bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    num_experts: Option<usize>,
    /// What some versions of the reference write for it.
    num_local_experts: Option<usize>,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    /// Width of the layers without experts, which are the first.
    intermediate_size: usize,
    #[serde(default)]
    num_dense_layers: usize,
    layer_types: Vec<LayerType>,
    #[serde(rename = "conv_L_cache")]
    kernel: usize,
    #[serde(default)]
    conv_bias: bool,
    #[serde(default)]
    norm_topk_prob: bool,
    #[serde(default)]
    use_expert_bias: bool,
    routed_scaling_factor: Option<f32>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum LayerType {
    Conv,
    FullAttention,
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::deserialize(config).map_err(bad_config)?;
    check_dims(&[("intermediate_size", c.intermediate_size), ("conv_L_cache", c.kernel)])?;
    if c.conv_bias {
        return Err(bad_config("`conv_bias` is not supported"));
    }
    if c.layer_types.len() != base.num_hidden_layers {
        return Err(bad_config("`layer_types` does not name every layer"));
    }
    let attention = Attention {
        bias: false,
        names: ["q_layernorm", "k_layernorm", "out_proj"],
        ..Attention::new(&base, QkNorm::Head)
    };
    let missing = || bad_config("missing field `num_experts`");
    let experts = Experts {
        count: c.num_experts.or(c.num_local_experts).ok_or_else(missing)?,
        top_k: c.num_experts_per_tok,
        width: c.moe_intermediate_size,
        bias: false,
        glu: Glu::Silu,
        router: Router {
            scoring: Scoring::Sigmoid,
            choice_bias: c.use_expert_bias.then_some("expert_bias"),
            renormalise: c.norm_topk_prob.then_some(1e-6),
            weight_scale: c.routed_scaling_factor.unwrap_or(1.0),
            ..Router::softmax(true)
        },
        shared: None,
    };
    experts.check()?;
    let rope = base.rope(config, &Defaults { theta: 1_000_000.0, part: 1.0 })?;
    let mut d = Decoder::new(&base, Map::Identity, rope, tensors);
    let mlp = Mlp { width: c.intermediate_size, bias: false };
    let mut layers = Vec::new();
    for (layer, kind) in c.layer_types.iter().enumerate() {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.operator_norm"))?];
        mix.extend(match kind {
            LayerType::Conv => convolution(&mut d, &at, c.kernel)?,
            LayerType::FullAttention => d.attention(&at, &attention)?,
        });
        let (norm, at) = (format!("{at}.ffn_norm"), format!("{at}.feed_forward"));
        layers.push(if layer < c.num_dense_layers {
            d.dense_layer(&norm, &["w1", "w3", "w2"].map(|name| format!("{at}.{name}")), &mlp, mix)?
        } else {
            d.routed_layer(layer, &norm, &at, &experts, mix)?
        });
    }
    d.finish(layers, "model.embedding_norm")
}

/// `conv` of the layer `at`, from the normalised residual.
fn convolution(d: &mut Decoder<'_>, at: &str, kernel: usize) -> Result<Vec<Op>> {
    let channels = d.hidden;
    let (x, y) = (d.buffer("convolution in", 3 * channels), d.buffer("convolution out", channels));
    let w = d.s.vector(format!("{at}.conv.conv.weight"), channels * kernel, Map::Identity)?;
    let state = d.s.parts.state(StateSpec::Conv { channels, kernel });
    Ok(vec![
        d.linear(&format!("{at}.conv.in_proj"), false, d.normed, x)?,
        Op::GatedConv { x, w, y, state },
        d.add_to_residual(&format!("{at}.conv.out_proj"), false, y)?,
    ])
}
