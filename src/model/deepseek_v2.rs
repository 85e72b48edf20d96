//! `deepseek_v2`: DeepSeek-V2 and V2-Lite. Multi-head latent attention: keys and values are projected from a latent vector a
//! token, and all heads share one rotated part of the key. The first layers are dense, the others have shared experts and
//! routed ones, which may be chosen from the best of groups.
//!
//! Keys and values are cached as attention reads them, head by head, not as latent vectors.

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Base, Decoder, Experts, Mlp, Router, Shared, projections};
use super::plan::{Glu, Heads, Map, Op, Pairs, Plan, StateSpec};
use super::rope::{Rope, WHOLE_HEAD};
use super::{Tensors, bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    intermediate_size: usize,
    moe_intermediate_size: usize,
    n_routed_experts: usize,
    num_experts_per_tok: usize,
    n_shared_experts: Option<usize>,
    #[serde(default)]
    first_k_dense_replace: usize,
    /// Every how many layers one has experts.
    moe_layer_freq: Option<usize>,
    topk_method: Option<String>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    scoring_func: Option<String>,
    #[serde(default)]
    norm_topk_prob: bool,
    routed_scaling_factor: Option<f32>,
    q_lora_rank: Option<usize>,
    kv_lora_rank: usize,
    qk_rope_head_dim: usize,
    qk_nope_head_dim: usize,
    v_head_dim: usize,
}

impl Config {
    fn read(config: &Value) -> Result<Config> {
        let c = Config::deserialize(config).map_err(bad_config)?;
        check_dims(&[
            ("intermediate_size", c.intermediate_size),
            ("n_shared_experts", c.n_shared_experts.unwrap_or(1)),
            ("q_lora_rank", c.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", c.kv_lora_rank),
            ("qk_rope_head_dim", c.qk_rope_head_dim),
            ("qk_nope_head_dim", c.qk_nope_head_dim),
            ("v_head_dim", c.v_head_dim),
        ])?;
        if c.scoring_func.as_deref().is_some_and(|f| f != "softmax") {
            return Err(bad_config("`scoring_func` other than softmax is not supported"));
        }
        Ok(c)
    }

    fn groups(&self) -> Result<Option<(usize, usize)>> {
        match self.topk_method.as_deref().unwrap_or("greedy") {
            "greedy" => Ok(None),
            "group_limited_greedy" => {
                let groups = self.n_group.zip(self.topk_group);
                Ok(Some(groups.ok_or_else(|| bad_config("`n_group` or `topk_group` is missing"))?))
            }
            other => Err(bad_config(format!("`topk_method` {other:?} is not supported"))),
        }
    }

    fn has_experts(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace && layer.is_multiple_of(self.moe_layer_freq.unwrap_or(1).max(1))
    }
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let base = Base::read(config)?;
    let c = Config::read(config)?;
    if base.attention_bias {
        return Err(bad_config("`attention_bias` is not supported"));
    }
    let shared = |n: usize| Shared { name: "shared_experts", width: n * c.moe_intermediate_size, gated: false };
    // As the model's own code has it, weights are scaled only where they are not divided by their sum.
    let scale = c.routed_scaling_factor.filter(|_| !c.norm_topk_prob).unwrap_or(1.0);
    let experts = Experts {
        count: c.n_routed_experts,
        top_k: c.num_experts_per_tok,
        width: c.moe_intermediate_size,
        bias: false,
        glu: Glu::Silu,
        router: Router {
            groups: c.groups()?,
            renormalise: c.norm_topk_prob.then_some(1e-20),
            weight_scale: scale,
            ..Router::softmax(false)
        },
        shared: c.n_shared_experts.map(shared),
    };
    experts.check()?;
    let rope = Rope::read(config, c.qk_rope_head_dim, &WHOLE_HEAD)?;
    let scale = rope.softmax_scale / ((c.qk_nope_head_dim + c.qk_rope_head_dim) as f32).sqrt();
    let mut d = Decoder::new(&base, Map::Identity, rope, tensors);
    let mlp = Mlp { width: c.intermediate_size, bias: false };
    let mut layers = Vec::new();
    for layer in 0..base.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mut mix = vec![d.norm(&format!("{at}.input_layernorm"))?];
        mix.extend(latent_attention(&mut d, &c, &at, base.num_attention_heads, scale)?);
        let (norm, at) = (format!("{at}.post_attention_layernorm"), format!("{at}.mlp"));
        layers.push(match c.has_experts(layer) {
            true => d.routed_layer(layer, &norm, &at, &experts, mix)?,
            false => d.dense_layer(&norm, &projections(&at), &mlp, mix)?,
        });
    }
    d.finish(layers, "model.norm")
}

/// `self_attn` of the layer `at`, from the normalised residual.
fn latent_attention(d: &mut Decoder<'_>, c: &Config, at: &str, heads: usize, scale: f32) -> Result<Vec<Op>> {
    let at = format!("{at}.self_attn");
    let (plain, turned, value_dim) = (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim);
    let (dim, latent) = (plain + turned, c.kv_lora_rank);
    // That of latent vectors' norms, whatever the configuration gives for the others.
    let eps = 1e-6;
    let mut ops = Vec::new();

    let projected = d.buffer("projected query", heads * dim);
    match c.q_lora_rank {
        None => ops.push(d.linear(&format!("{at}.q_proj"), false, d.normed, projected)?),
        Some(rank) => {
            let (a, normed) = (d.buffer("query latent", rank), d.buffer("normed query latent", rank));
            ops.push(d.linear(&format!("{at}.q_a_proj"), false, d.normed, a)?);
            let w = d.norm_weight(&format!("{at}.q_a_layernorm"), rank)?;
            ops.push(Op::RmsNorm { x: a, w, y: normed, groups: 1, eps });
            ops.push(d.linear(&format!("{at}.q_b_proj"), false, normed, projected)?);
        }
    }
    // The latent vector and the part of the key that all heads share.
    let a = d.buffer("latent and key", latent + turned);
    let normed = d.buffer("normed latent", latent);
    let expanded = d.buffer("keys and values", heads * (plain + value_dim));
    ops.push(d.linear(&format!("{at}.kv_a_proj_with_mqa"), false, d.normed, a)?);
    let w = d.norm_weight(&format!("{at}.kv_a_layernorm"), latent)?;
    let (query, key) = (d.buffer("query", heads * dim), d.buffer("key", heads * dim));
    let (value, attended) = (d.buffer("value", heads * value_dim), d.buffer("attended", heads * value_dim));
    let copy = |x, y, dim| Op::HeadNormRope { x, w: None, y, heads, dim, rotary: 0, pairs: Pairs::Neighbours, eps };
    let turn = |x, y| {
        let (dim, pairs) = (turned, Pairs::Neighbours);
        Op::HeadNormRope { x, w: None, y, heads, dim, rotary: turned, pairs, eps }
    };
    let part = |buf, offset, stride| Heads { buf, offset, stride };
    let of_latent = part(a, 0, 0);
    let y = part(normed, 0, latent);
    ops.push(Op::HeadNormRope {
        x: of_latent,
        w: Some(w),
        y,
        heads: 1,
        dim: latent,
        rotary: 0,
        pairs: Pairs::Neighbours,
        eps,
    });
    ops.push(d.linear(&format!("{at}.kv_b_proj"), false, normed, expanded)?);
    let state = d.s.parts.state(StateSpec::Kv { heads, dim, value_dim });
    ops.extend([
        copy(part(projected, 0, dim), part(query, 0, dim), plain),
        turn(part(projected, plain, dim), part(query, plain, dim)),
        copy(part(expanded, 0, plain + value_dim), part(key, 0, dim), plain),
        turn(part(a, latent, 0), part(key, plain, dim)),
        copy(part(expanded, plain, plain + value_dim), part(value, 0, value_dim), value_dim),
        Op::KvAppend { k: key, v: value, state },
        Op::Attention { q: query, gate: None, sinks: None, y: attended, state, heads, scale, window: None },
        d.add_to_residual(&format!("{at}.o_proj"), false, attended)?,
    ]);
    Ok(ops)
}
