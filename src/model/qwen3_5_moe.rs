//! `qwen3_5_moe_text`: Qwen3.5's mixture and the language model of MiniCPM-V 4.7. Gated DeltaNet in most layers, gated
//! full attention in the rest, every layer followed by routed experts and one shared expert.
//!
//! RMS-norm weights are stored around zero (the norm multiplies by `1 + w`), except DeltaNet's gated norm.

use serde::Deserialize;
use serde_json::Value;

use super::plan::{Buf, Builder, Heads, Layer, Map, Moe, Op, Plan, StateSpec};
use super::{Shaped, Tensors, bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    layer_types: Option<Vec<LayerType>>,
    /// Every how many layers one is full attention, where `layer_types` is absent.
    full_attention_interval: Option<usize>,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    linear_num_key_heads: usize,
    linear_num_value_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_conv_kernel_dim: usize,
    num_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: usize,
    rms_norm_eps: f32,
    #[serde(default)]
    attention_bias: bool,
    hidden_act: Option<String>,
    rope_parameters: Option<Rope>,
}

#[derive(Deserialize)]
struct Rope {
    #[serde(default)]
    rope_type: Option<String>,
    rope_theta: f64,
    partial_rotary_factor: Option<f64>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum LayerType {
    LinearAttention,
    FullAttention,
}

impl Config {
    fn read(config: &Value) -> Result<Config> {
        let c = Config::deserialize(config).map_err(bad_config)?;
        check_dims(&[
            ("vocab_size", c.vocab_size),
            ("hidden_size", c.hidden_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("num_attention_heads", c.num_attention_heads),
            ("num_key_value_heads", c.num_key_value_heads),
            ("head_dim", c.head_dim),
            ("linear_num_key_heads", c.linear_num_key_heads),
            ("linear_num_value_heads", c.linear_num_value_heads),
            ("linear_key_head_dim", c.linear_key_head_dim),
            ("linear_value_head_dim", c.linear_value_head_dim),
            ("linear_conv_kernel_dim", c.linear_conv_kernel_dim),
            ("num_experts", c.num_experts),
            ("num_experts_per_tok", c.num_experts_per_tok),
            ("moe_intermediate_size", c.moe_intermediate_size),
            ("shared_expert_intermediate_size", c.shared_expert_intermediate_size),
        ])?;
        let multiple = |a: usize, b: usize, what: &str| {
            if a.is_multiple_of(b) { Ok(()) } else { Err(bad_config(format!("{what}: {a} is no multiple of {b}"))) }
        };
        multiple(c.num_attention_heads, c.num_key_value_heads, "query heads to key-value heads")?;
        multiple(c.linear_num_value_heads, c.linear_num_key_heads, "DeltaNet value heads to key heads")?;
        if c.num_experts_per_tok > c.num_experts {
            return Err(bad_config("`num_experts_per_tok` is larger than `num_experts`"));
        }
        if c.attention_bias {
            return Err(bad_config("`attention_bias` is not supported"));
        }
        if c.hidden_act.as_deref().is_some_and(|a| a != "silu") {
            return Err(bad_config("`hidden_act` other than silu is not supported"));
        }
        if c.rope_parameters.as_ref().and_then(|r| r.rope_type.as_deref()).is_some_and(|t| t != "default") {
            return Err(bad_config("`rope_type` other than default is not supported"));
        }
        if c.layer_types.as_ref().is_some_and(|t| t.len() != c.num_hidden_layers) {
            return Err(bad_config("`layer_types` does not name every layer"));
        }
        Ok(c)
    }

    fn layer_type(&self, layer: usize) -> LayerType {
        match &self.layer_types {
            Some(types) => types[layer],
            None if (layer + 1).is_multiple_of(self.full_attention_interval.unwrap_or(4).max(1)) => {
                LayerType::FullAttention
            }
            None => LayerType::LinearAttention,
        }
    }

    /// `theta^(−2i / rotary)`, rounded as the reference does.
    fn inv_freq(&self) -> Result<Vec<f32>> {
        let (theta, part) = match &self.rope_parameters {
            Some(r) => (r.rope_theta, r.partial_rotary_factor.unwrap_or(0.25)),
            None => (10_000_000.0, 0.25),
        };
        let rotary = (self.head_dim as f64 * part) as usize;
        if rotary > self.head_dim || !rotary.is_multiple_of(2) {
            return Err(bad_config(format!("{rotary} rotary dimensions in a head of {}", self.head_dim)));
        }
        let exponent = |i: usize| (2 * i) as f32 / rotary as f32;
        Ok((0..rotary / 2).map(|i| 1.0 / libm::powf(theta as f32, exponent(i))).collect())
    }
}

/// The activation buffers that all layers share.
struct Buffers {
    residual: Buf,
    normed: Buf,
    /// DeltaNet.
    qkv: Buf,
    conv: Buf,
    z: Buf,
    a: Buf,
    b: Buf,
    delta: Buf,
    gated: Buf,
    /// Full attention.
    query_gate: Buf,
    key: Buf,
    value: Buf,
    query: Buf,
    rotated_key: Buf,
    attended: Buf,
    /// Experts.
    router: Buf,
    shared_gate: Buf,
    shared_up: Buf,
    shared_act: Buf,
    shared_out: Buf,
    shared_logit: Buf,
    ahead_normed: Buf,
    foreseen: Buf,
}

pub fn plan(config: &Value, tensors: &dyn Tensors) -> Result<Plan> {
    let c = Config::read(config)?;
    let mut s = Shaped { tensors, parts: Builder::default() };
    let inv_freq = c.inv_freq()?;

    let key_dim = c.linear_num_key_heads * c.linear_key_head_dim;
    let value_dim = c.linear_num_value_heads * c.linear_value_head_dim;
    let (q_dim, kv_dim) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let p = &mut s.parts;
    let bufs = Buffers {
        residual: p.buffer("residual", c.hidden_size),
        normed: p.buffer("normed", c.hidden_size),
        qkv: p.buffer("deltanet qkv", 2 * key_dim + value_dim),
        conv: p.buffer("deltanet conv", 2 * key_dim + value_dim),
        z: p.buffer("deltanet z", value_dim),
        a: p.buffer("deltanet a", c.linear_num_value_heads),
        b: p.buffer("deltanet b", c.linear_num_value_heads),
        delta: p.buffer("deltanet out", value_dim),
        gated: p.buffer("deltanet gated", value_dim),
        query_gate: p.buffer("query and gate", 2 * q_dim),
        key: p.buffer("key", kv_dim),
        value: p.buffer("value", kv_dim),
        query: p.buffer("query", q_dim),
        rotated_key: p.buffer("rotated key", kv_dim),
        attended: p.buffer("attended", q_dim),
        router: p.buffer("router logits", c.num_experts),
        shared_gate: p.buffer("shared gate", c.shared_expert_intermediate_size),
        shared_up: p.buffer("shared up", c.shared_expert_intermediate_size),
        shared_act: p.buffer("shared act", c.shared_expert_intermediate_size),
        shared_out: p.buffer("shared out", c.hidden_size),
        shared_logit: p.buffer("shared logit", 1),
        ahead_normed: p.buffer("ahead normed", c.hidden_size),
        foreseen: p.buffer("foreseen", c.num_experts),
    };
    let rope = (!inv_freq.is_empty()).then(|| p.buffer("rope", 2 * inv_freq.len()));
    let head_in = p.head_buffer("head in", c.hidden_size);
    let head_normed = p.head_buffer("head normed", c.hidden_size);
    let logits = p.head_buffer("logits", c.vocab_size);

    // Grows with the layers that are there, not with what the configuration says.
    let mut layers = Vec::new();
    for layer in 0..c.num_hidden_layers {
        let at = format!("model.layers.{layer}");
        let mix = match c.layer_type(layer) {
            LayerType::LinearAttention => delta_net(&mut s, &c, &bufs, &at)?,
            LayerType::FullAttention => attention(&mut s, &c, &bufs, &at, 2 * inv_freq.len())?,
        };
        layers.push(experts(&mut s, &c, &bufs, layer, mix)?);
    }

    let norm = s.vector("model.norm.weight", c.hidden_size, Map::PlusOne)?;
    let head_w = s.matrix("lm_head.weight", c.vocab_size, c.hidden_size)?;
    let head = vec![
        Op::RmsNorm { x: head_in, w: norm, y: head_normed, groups: 1, eps: c.rms_norm_eps },
        Op::MatMul { x: head_normed, w: head_w, y: logits, add: false },
    ];
    let expert = s.experts(c.hidden_size, c.moe_intermediate_size)?;
    Ok(Plan {
        hidden: c.hidden_size,
        vocab: c.vocab_size,
        buffers: s.parts.buffers,
        weights: s.parts.weights,
        states: s.parts.states,
        residual: bufs.residual,
        inv_freq,
        rope,
        layers,
        expert: Some(expert),
        foreseen: Some(bufs.foreseen),
        head_in,
        head_normed,
        head,
        logits,
    })
}

fn delta_net(s: &mut Shaped<'_>, c: &Config, bufs: &Buffers, at: &str) -> Result<Vec<Op>> {
    let (heads, key_heads) = (c.linear_num_value_heads, c.linear_num_key_heads);
    let (key_dim, value_dim) = (key_heads * c.linear_key_head_dim, heads * c.linear_value_head_dim);
    let channels = 2 * key_dim + value_dim;
    let h = c.hidden_size;
    let norm = s.vector(format!("{at}.input_layernorm.weight"), h, Map::PlusOne)?;
    let at = format!("{at}.linear_attn");
    let qkv = s.matrix(format!("{at}.in_proj_qkv.weight"), channels, h)?;
    let z = s.matrix(format!("{at}.in_proj_z.weight"), value_dim, h)?;
    let b = s.matrix(format!("{at}.in_proj_b.weight"), heads, h)?;
    let a = s.matrix(format!("{at}.in_proj_a.weight"), heads, h)?;
    let conv = s.vector(format!("{at}.conv1d.weight"), channels * c.linear_conv_kernel_dim, Map::Identity)?;
    let rate = s.vector(format!("{at}.A_log"), heads, Map::NegExp)?;
    let dt_bias = s.vector(format!("{at}.dt_bias"), heads, Map::Identity)?;
    let gated = s.vector(format!("{at}.norm.weight"), c.linear_value_head_dim, Map::Identity)?;
    let out = s.matrix(format!("{at}.out_proj.weight"), h, value_dim)?;
    let conv_state = s.parts.state(StateSpec::Conv { channels, kernel: c.linear_conv_kernel_dim });
    let state =
        s.parts.state(StateSpec::Delta { heads, key_dim: c.linear_key_head_dim, value_dim: c.linear_value_head_dim });
    let eps = c.rms_norm_eps;
    Ok(vec![
        Op::RmsNorm { x: bufs.residual, w: norm, y: bufs.normed, groups: 1, eps },
        Op::MatMul { x: bufs.normed, w: qkv, y: bufs.qkv, add: false },
        Op::MatMul { x: bufs.normed, w: z, y: bufs.z, add: false },
        Op::MatMul { x: bufs.normed, w: b, y: bufs.b, add: false },
        Op::MatMul { x: bufs.normed, w: a, y: bufs.a, add: false },
        Op::ConvSilu { x: bufs.qkv, w: conv, y: bufs.conv, state: conv_state },
        Op::DeltaNet { qkv: bufs.conv, a: bufs.a, b: bufs.b, rate, dt_bias, y: bufs.delta, state, key_heads },
        Op::GatedRmsNorm { x: bufs.delta, gate: bufs.z, w: gated, y: bufs.gated, groups: heads, eps },
        Op::MatMul { x: bufs.gated, w: out, y: bufs.residual, add: true },
    ])
}

/// `rotary` is the number of rotated dimensions of a head.
fn attention(s: &mut Shaped<'_>, c: &Config, bufs: &Buffers, at: &str, rotary: usize) -> Result<Vec<Op>> {
    let (heads, kv_heads, dim, h) = (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size);
    let norm = s.vector(format!("{at}.input_layernorm.weight"), h, Map::PlusOne)?;
    let at = format!("{at}.self_attn");
    let q = s.matrix(format!("{at}.q_proj.weight"), 2 * heads * dim, h)?;
    let k = s.matrix(format!("{at}.k_proj.weight"), kv_heads * dim, h)?;
    let v = s.matrix(format!("{at}.v_proj.weight"), kv_heads * dim, h)?;
    let q_norm = Some(s.vector(format!("{at}.q_norm.weight"), dim, Map::PlusOne)?);
    let k_norm = Some(s.vector(format!("{at}.k_norm.weight"), dim, Map::PlusOne)?);
    let out = s.matrix(format!("{at}.o_proj.weight"), h, heads * dim)?;
    let state = s.parts.state(StateSpec::Kv { heads: kv_heads, dim });
    let eps = c.rms_norm_eps;
    // q_proj interleaves, head by head, the query and the gate of the output.
    let query = Heads { buf: bufs.query_gate, offset: 0, stride: 2 * dim };
    let gate = Heads { offset: dim, ..query };
    let key = Heads { buf: bufs.key, offset: 0, stride: dim };
    let scale = 1.0 / (dim as f32).sqrt();
    Ok(vec![
        Op::RmsNorm { x: bufs.residual, w: norm, y: bufs.normed, groups: 1, eps },
        Op::MatMul { x: bufs.normed, w: q, y: bufs.query_gate, add: false },
        Op::MatMul { x: bufs.normed, w: k, y: bufs.key, add: false },
        Op::MatMul { x: bufs.normed, w: v, y: bufs.value, add: false },
        Op::HeadNormRope { x: query, w: q_norm, y: bufs.query, heads, dim, rotary, eps },
        Op::HeadNormRope { x: key, w: k_norm, y: bufs.rotated_key, heads: kv_heads, dim, rotary, eps },
        Op::KvAppend { k: bufs.rotated_key, v: bufs.value, state },
        Op::Attention { q: bufs.query, gate: Some(gate), y: bufs.attended, state, heads, scale },
        Op::MatMul { x: bufs.attended, w: out, y: bufs.residual, add: true },
    ])
}

/// The layer that begins with `mix`: adds the norm and the router to it, the same for a look ahead, the shared expert and
/// the routed ones.
fn experts(s: &mut Shaped<'_>, c: &Config, bufs: &Buffers, layer: usize, mut mix: Vec<Op>) -> Result<Layer> {
    let at = format!("model.layers.{layer}");
    let (h, width) = (c.hidden_size, c.shared_expert_intermediate_size);
    let norm = s.vector(format!("{at}.post_attention_layernorm.weight"), h, Map::PlusOne)?;
    let at = format!("{at}.mlp");
    let router = s.matrix(format!("{at}.gate.weight"), c.num_experts, h)?;
    let gate = s.matrix(format!("{at}.shared_expert.gate_proj.weight"), width, h)?;
    let up = s.matrix(format!("{at}.shared_expert.up_proj.weight"), width, h)?;
    let down = s.matrix(format!("{at}.shared_expert.down_proj.weight"), h, width)?;
    let shared_gate = s.matrix(format!("{at}.shared_expert_gate.weight"), 1, h)?;
    let route = |w, normed, logits| {
        vec![
            Op::RmsNorm { x: bufs.residual, w: norm, y: normed, groups: 1, eps: c.rms_norm_eps },
            Op::MatMul { x: normed, w, y: logits, add: false },
        ]
    };
    mix.extend(route(router, bufs.normed, bufs.router));
    let ahead = |w| route(w, bufs.ahead_normed, bufs.foreseen);
    let maps = s.maps(layer, c.num_experts, h)?;
    let fitted = maps.into_iter().map(|map| map.map(ahead)).collect();
    let shared = vec![
        Op::MatMul { x: bufs.normed, w: gate, y: bufs.shared_gate, add: false },
        Op::MatMul { x: bufs.normed, w: up, y: bufs.shared_up, add: false },
        Op::SiluMul { gate: bufs.shared_gate, up: bufs.shared_up, y: bufs.shared_act },
        Op::MatMul { x: bufs.shared_act, w: down, y: bufs.shared_out, add: false },
        Op::MatMul { x: bufs.normed, w: shared_gate, y: bufs.shared_logit, add: false },
    ];
    let moe = Moe {
        logits: bufs.router,
        x: bufs.normed,
        y: bufs.residual,
        experts: c.num_experts,
        top_k: c.num_experts_per_tok,
        renormalise: true,
        shared: Some((bufs.shared_out, bufs.shared_logit)),
    };
    Ok(Layer { mix, foresee: ahead(router), fitted, shared, moe: Some(moe) })
}
