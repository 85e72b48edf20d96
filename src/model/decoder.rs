//! What the decoders of all architectures are made of. Buffers are shared by the layers, which use them one after the
//! other.

use serde::Deserialize;
use serde_json::Value;

use super::plan::{Buf, Builder, Heads, Layer, Map, Moe, Op, Plan, StateSpec};
use super::rope::{Defaults, Rope};
use super::{Shaped, Tensors, bad_config, check_dims};
use crate::error::Result;

/// What every configuration says.
#[derive(Deserialize)]
pub(super) struct Base {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(alias = "norm_eps")]
    pub rms_norm_eps: f32,
    hidden_act: Option<String>,
    #[serde(default)]
    pub attention_bias: bool,
}

impl Base {
    pub fn read(config: &Value) -> Result<Base> {
        let c = Base::deserialize(config).map_err(bad_config)?;
        check_dims(&[
            ("vocab_size", c.vocab_size),
            ("hidden_size", c.hidden_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("num_attention_heads", c.num_attention_heads),
            ("num_key_value_heads", c.kv_heads()),
            ("head_dim", c.head_dim()),
        ])?;
        multiple(c.num_attention_heads, c.kv_heads(), "query heads to key-value heads")?;
        match c.hidden_act.as_deref() {
            None | Some("silu") => Ok(c),
            Some(_) => Err(bad_config("`hidden_act` other than silu is not supported")),
        }
    }

    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Rotary embeddings of whole or partial heads.
    pub fn rope(&self, config: &Value, defaults: &Defaults) -> Result<Rope> {
        Rope::read(config, self.head_dim(), defaults)
    }
}

pub(super) fn multiple(a: usize, b: usize, what: &str) -> Result<()> {
    if a.is_multiple_of(b) { Ok(()) } else { Err(bad_config(format!("{what}: {a} is no multiple of {b}"))) }
}

/// How queries and keys are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QkNorm {
    None,
    /// Each head by itself, with the same weights.
    Head,
}

/// Attention over the keys and values of the sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attention {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub norm: QkNorm,
    /// The query projection interleaves, head by head, the query and the gate of the output.
    pub gated: bool,
    /// Whether the projections have biases.
    pub bias: bool,
    pub scale: f32,
}

impl Attention {
    pub fn new(base: &Base, norm: QkNorm) -> Attention {
        let dim = base.head_dim();
        Attention {
            heads: base.num_attention_heads,
            kv_heads: base.kv_heads(),
            dim,
            norm,
            gated: false,
            bias: base.attention_bias,
            scale: 1.0 / (dim as f32).sqrt(),
        }
    }
}

/// A gated feed-forward network: `down · (silu(gate · x) ⊙ (up · x))`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mlp {
    pub width: usize,
    pub bias: bool,
}

/// The experts of a layer and how it routes to them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Experts {
    pub count: usize,
    pub top_k: usize,
    pub width: usize,
    /// Whether the weights of the chosen are divided by their sum.
    pub renormalise: bool,
    /// Width of the shared expert, which a logit of its own scales.
    pub shared: Option<usize>,
}

impl Experts {
    pub fn check(&self) -> Result<()> {
        check_dims(&[
            ("num_experts", self.count),
            ("num_experts_per_tok", self.top_k),
            ("moe_intermediate_size", self.width),
            ("shared_expert_intermediate_size", self.shared.unwrap_or(1)),
        ])?;
        if self.top_k > self.count {
            return Err(bad_config("`num_experts_per_tok` is larger than `num_experts`"));
        }
        Ok(())
    }
}

/// Makes a plan, layer by layer.
pub(super) struct Decoder<'a> {
    pub s: Shaped<'a>,
    vocab: usize,
    pub hidden: usize,
    pub eps: f32,
    /// How weights of norms are stored.
    pub norms: Map,
    pub residual: Buf,
    /// The residual after a norm.
    pub normed: Buf,
    rope: Rope,
    rope_table: Option<Buf>,
    foreseen: Option<Buf>,
    expert_width: Option<usize>,
}

impl<'a> Decoder<'a> {
    pub fn new(base: &Base, norms: Map, rope: Rope, tensors: &'a dyn Tensors) -> Decoder<'a> {
        let mut parts = Builder::default();
        let residual = parts.buffer("residual", base.hidden_size);
        let normed = parts.buffer("normed", base.hidden_size);
        let rotary = 2 * rope.inv_freq.len();
        Decoder {
            rope_table: (rotary > 0).then(|| parts.buffer("rope", rotary)),
            s: Shaped { tensors, parts },
            vocab: base.vocab_size,
            hidden: base.hidden_size,
            eps: base.rms_norm_eps,
            norms,
            residual,
            normed,
            rope,
            foreseen: None,
            expert_width: None,
        }
    }

    /// An activation buffer.
    pub fn buffer(&mut self, name: &str, width: usize) -> Buf {
        self.s.parts.shared_buffer(name, width)
    }

    fn width(&self, buf: Buf) -> usize {
        self.s.parts.buffers[buf.0].width
    }

    /// The norm of the residual.
    pub fn norm(&mut self, name: &str) -> Result<Op> {
        let w = self.s.vector(format!("{name}.weight"), self.hidden, self.norms)?;
        Ok(Op::RmsNorm { x: self.residual, w, y: self.normed, groups: 1, eps: self.eps })
    }

    /// A linear layer from one buffer to another.
    pub fn linear(&mut self, name: &str, bias: bool, x: Buf, y: Buf) -> Result<Op> {
        let (rows, cols) = (self.width(y), self.width(x));
        let w = self.s.matrix(format!("{name}.weight"), rows, cols)?;
        let bias = bias.then(|| self.s.vector(format!("{name}.bias"), rows, Map::Identity)).transpose()?;
        Ok(Op::MatMul { x, w, bias, y, scale: 1.0, add: false })
    }

    /// A linear layer whose output is added to the residual.
    pub fn add_to_residual(&mut self, name: &str, bias: bool, from: Buf) -> Result<Op> {
        match self.linear(name, bias, from, self.residual)? {
            Op::MatMul { x, w, bias, y, scale, .. } => Ok(Op::MatMul { x, w, bias, y, scale, add: true }),
            other => Ok(other),
        }
    }

    /// `self_attn` of the layer `at`, from the normalised residual.
    pub fn attention(&mut self, at: &str, a: &Attention) -> Result<Vec<Op>> {
        let at = format!("{at}.self_attn");
        let Attention { heads, kv_heads, dim, gated, bias, scale, .. } = *a;
        let stride = if gated { 2 * dim } else { dim };
        let q = self.buffer(if gated { "query and gate" } else { "projected query" }, heads * stride);
        let k = self.buffer("projected key", kv_heads * dim);
        let v = self.buffer("value", kv_heads * dim);
        let (query, key) = (self.buffer("query", heads * dim), self.buffer("key", kv_heads * dim));
        let attended = self.buffer("attended", heads * dim);
        let mut ops = vec![
            self.linear(&format!("{at}.q_proj"), bias, self.normed, q)?,
            self.linear(&format!("{at}.k_proj"), bias, self.normed, k)?,
            self.linear(&format!("{at}.v_proj"), bias, self.normed, v)?,
        ];
        let norms = match a.norm {
            QkNorm::None => [None, None],
            QkNorm::Head => {
                let [q, k] = ["q_norm", "k_norm"].map(|n| format!("{at}.{n}.weight"));
                [Some(self.s.vector(q, dim, self.norms)?), Some(self.s.vector(k, dim, self.norms)?)]
            }
        };
        let (rotary, eps) = (2 * self.rope.inv_freq.len(), self.eps);
        let (q, k) = (Heads { buf: q, offset: 0, stride }, Heads { buf: k, offset: 0, stride: dim });
        let state = self.s.parts.state(StateSpec::Kv { heads: kv_heads, dim });
        let gate = gated.then_some(Heads { offset: dim, ..q });
        ops.extend([
            Op::HeadNormRope { x: q, w: norms[0], y: query, heads, dim, rotary, eps },
            Op::HeadNormRope { x: k, w: norms[1], y: key, heads: kv_heads, dim, rotary, eps },
            Op::KvAppend { k: key, v, state },
            Op::Attention { q: query, gate, y: attended, state, heads, scale },
            self.add_to_residual(&format!("{at}.o_proj"), bias, attended)?,
        ]);
        Ok(ops)
    }

    /// A feed-forward network up to its last matrix, from the normalised residual, and its inner activations. `names` are
    /// those of gate, up and down.
    fn inner(&mut self, names: &[String; 3], mlp: &Mlp) -> Result<(Vec<Op>, Buf)> {
        let [gate, up, act] = ["gate", "up", "activated"].map(|name| self.buffer(name, mlp.width));
        let ops = vec![
            self.linear(&names[0], mlp.bias, self.normed, gate)?,
            self.linear(&names[1], mlp.bias, self.normed, up)?,
            Op::SiluMul { gate, up, y: act },
        ];
        Ok((ops, act))
    }

    /// A feed-forward network from the normalised residual to the residual.
    pub fn mlp(&mut self, names: &[String; 3], mlp: &Mlp) -> Result<Vec<Op>> {
        let (mut ops, act) = self.inner(names, mlp)?;
        ops.push(self.add_to_residual(&names[2], mlp.bias, act)?);
        Ok(ops)
    }

    /// A layer without experts: `mix`, the norm, the network.
    pub fn dense_layer(&mut self, norm: &str, at: &str, mlp: &Mlp, mut mix: Vec<Op>) -> Result<Layer> {
        mix.push(self.norm(norm)?);
        mix.extend(self.mlp(&projections(at), mlp)?);
        Ok(Layer { mix, ..Layer::default() })
    }

    /// A layer with experts at `at`: `mix`, the norm and the router, the same for a look ahead, the shared expert and the
    /// routed ones.
    pub fn routed_layer(&mut self, index: usize, norm: &str, at: &str, e: &Experts, mut mix: Vec<Op>) -> Result<Layer> {
        self.expert_width = Some(e.width);
        let logits = self.buffer("router logits", e.count);
        let (ahead, foreseen) = (self.buffer("ahead normed", self.hidden), self.buffer("foreseen", e.count));
        self.foreseen = Some(foreseen);
        let norm = self.norm(norm)?;
        let router = self.linear(&format!("{at}.gate"), false, self.normed, logits)?;
        let Op::MatMul { w: router_matrix, .. } = router else { unreachable!("a linear layer") };
        let before = |matrix| match norm {
            Op::RmsNorm { x, w, groups, eps, .. } => {
                vec![Op::RmsNorm { x, w, y: ahead, groups, eps }, Op::matmul(ahead, matrix, foreseen)]
            }
            _ => unreachable!("a norm"),
        };
        mix.extend([norm, router]);
        let maps = self.s.maps(index, e.count, self.hidden)?;
        let fitted = maps.into_iter().map(|map| map.map(before)).collect();
        let mut shared = Vec::new();
        let shared_buffers = match e.shared {
            None => None,
            Some(width) => {
                let (out, logit) = (self.buffer("shared out", self.hidden), self.buffer("shared logit", 1));
                let names = projections(&format!("{at}.shared_expert"));
                let (ops, act) = self.inner(&names, &Mlp { width, bias: false })?;
                shared = ops;
                shared.push(self.linear(&names[2], false, act, out)?);
                shared.push(self.linear(&format!("{at}.shared_expert_gate"), false, self.normed, logit)?);
                Some((out, logit))
            }
        };
        let moe = Moe {
            logits,
            x: self.normed,
            y: self.residual,
            experts: e.count,
            top_k: e.top_k,
            renormalise: e.renormalise,
            shared: shared_buffers,
        };
        Ok(Layer { mix, foresee: before(router_matrix), fitted, shared, moe: Some(moe) })
    }

    /// The plan of all layers and the head.
    pub fn finish(mut self, layers: Vec<Layer>, norm: &str) -> Result<Plan> {
        let parts = &mut self.s.parts;
        let head_in = parts.head_buffer("head in", self.hidden);
        let head_normed = parts.head_buffer("head normed", self.hidden);
        let logits = parts.head_buffer("logits", self.vocab);
        let w = self.s.vector(format!("{norm}.weight"), self.hidden, self.norms)?;
        let head = vec![
            Op::RmsNorm { x: head_in, w, y: head_normed, groups: 1, eps: self.eps },
            self.linear("lm_head", false, head_normed, logits)?,
        ];
        let expert = self.expert_width.map(|width| self.s.experts(self.hidden, width)).transpose()?;
        let Builder { buffers, weights, states } = self.s.parts;
        Ok(Plan {
            hidden: self.hidden,
            vocab: self.vocab,
            buffers,
            weights,
            states,
            residual: self.residual,
            inv_freq: self.rope.inv_freq,
            rope_scale: self.rope.scale,
            rope: self.rope_table,
            layers,
            expert,
            foreseen: self.foreseen,
            head_in,
            head_normed,
            head,
            logits,
        })
    }
}

/// The usual names of a feed-forward network's matrices.
pub(super) fn projections(at: &str) -> [String; 3] {
    ["gate", "up", "down"].map(|name| format!("{at}.{name}_proj"))
}
