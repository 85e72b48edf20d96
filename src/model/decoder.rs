//! What the decoders of all architectures are made of. Buffers are shared by the layers, which use them one after the
//! other.

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;

use super::plan::{
    Buf, Builder, Glu, Heads, Layer, Map, Moe, Op, Pairs, Plan, Scoring, SharedExpert, StateSpec, Weight,
};
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
    rms_norm_eps: Option<f32>,
    /// What some architectures call it.
    norm_eps: Option<f32>,
    /// The one that is given.
    #[serde(skip)]
    eps: f32,
    hidden_act: Option<String>,
    #[serde(default)]
    pub attention_bias: bool,
}

impl Base {
    pub fn read(config: &Value) -> Result<Base> {
        let mut c = Base::deserialize(config).map_err(bad_config)?;
        let missing = || bad_config("missing field `rms_norm_eps`");
        c.eps = c.rms_norm_eps.or(c.norm_eps).ok_or_else(missing)?;
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
    /// All heads as one vector.
    Projection,
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
    /// Queries, keys and values are kept between −clip and clip.
    pub clip: Option<f32>,
    pub scale: f32,
    /// Positions that a token attends to at most.
    pub window: Option<usize>,
    /// Whether each head has a sink.
    pub sinks: bool,
    /// Names of the norms of queries and keys, and of the output projection.
    pub names: [&'static str; 3],
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
            clip: None,
            scale: 1.0 / (dim as f32).sqrt(),
            window: None,
            sinks: false,
            names: ["q_norm", "k_norm", "o_proj"],
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
    /// Whether their matrices have biases.
    pub bias: bool,
    pub glu: Glu,
    pub router: Router,
    pub shared: Option<Shared>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Router {
    /// Name of its matrix.
    pub name: &'static str,
    /// Whether its logits have a bias.
    pub bias: bool,
    pub scoring: Scoring,
    /// Name of a vector that is added to the scores for the choice alone.
    pub choice_bias: Option<&'static str>,
    /// Experts are chosen from the best of so many groups.
    pub groups: Option<(usize, usize)>,
    /// See [`Moe`].
    pub renormalise: Option<f32>,
    pub weight_scale: f32,
}

impl Router {
    /// The softmax of the logits, of all experts or of those chosen.
    pub fn softmax(renormalise: bool) -> Router {
        Router {
            name: "gate",
            bias: false,
            scoring: Scoring::Softmax,
            choice_bias: None,
            groups: None,
            renormalise: renormalise.then_some(0.0),
            weight_scale: 1.0,
        }
    }
}

/// The shared expert of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    pub name: &'static str,
    pub width: usize,
    /// Whether a logit of its own, `NAME_gate`, scales it.
    pub gated: bool,
}

impl Experts {
    pub fn check(&self) -> Result<()> {
        check_dims(&[
            ("num_experts", self.count),
            ("num_experts_per_tok", self.top_k),
            ("moe_intermediate_size", self.width),
            ("shared_expert_intermediate_size", self.shared.map_or(1, |shared| shared.width)),
        ])?;
        if self.top_k > self.count {
            return Err(bad_config("`num_experts_per_tok` is larger than `num_experts`"));
        }
        if let Some((groups, kept)) = self.router.groups {
            check_dims(&[("n_group", groups), ("topk_group", kept)])?;
            multiple(self.count, groups, "experts to groups")?;
            if kept > groups || self.top_k > kept.saturating_mul(self.count / groups) {
                return Err(bad_config("`topk_group` groups hold fewer than `num_experts_per_tok` experts"));
            }
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
    /// Width of the experts and whether they have biases.
    expert: Option<(usize, bool)>,
    /// What is added to the residual is multiplied with this, and embeddings and logits with the others.
    pub residual_scale: f32,
    pub embedding_scale: f32,
    pub logits_scale: f32,
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
            eps: base.eps,
            norms,
            residual,
            normed,
            rope,
            foreseen: None,
            expert: None,
            residual_scale: 1.0,
            embedding_scale: 1.0,
            logits_scale: 1.0,
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
        let w = self.norm_weight(name, self.hidden)?;
        Ok(Op::RmsNorm { x: self.residual, w, y: self.normed, groups: 1, eps: self.eps })
    }

    /// A linear layer from one buffer to another.
    pub fn linear(&mut self, name: &str, bias: bool, x: Buf, y: Buf) -> Result<Op> {
        let (rows, cols) = (self.width(y), self.width(x));
        let w = self.s.matrix(format!("{name}.weight"), rows, cols)?;
        let bias = bias.then(|| self.s.vector(format!("{name}.bias"), rows, Map::Identity)).transpose()?;
        Ok(Op::MatMul { x, w, bias, y, scale: 1.0, add: false })
    }

    /// A linear layer whose weights are some rows of a tensor that has `whole`.
    pub fn linear_of(
        &mut self,
        name: &str,
        whole: usize,
        rows: impl FnOnce() -> Vec<Range<usize>>,
        x: Buf,
        y: Buf,
    ) -> Result<Op> {
        let cols = self.width(x);
        Ok(Op::matmul(x, self.s.matrix_of(format!("{name}.weight"), whole, cols, rows)?, y))
    }

    /// A linear layer whose output is added to the residual.
    pub fn add_to_residual(&mut self, name: &str, bias: bool, from: Buf) -> Result<Op> {
        match self.linear(name, bias, from, self.residual)? {
            Op::MatMul { x, w, bias, y, .. } => Ok(Op::MatMul { x, w, bias, y, scale: self.residual_scale, add: true }),
            other => Ok(other),
        }
    }

    /// `self_attn` of the layer `at`, from the normalised residual.
    pub fn attention(&mut self, at: &str, a: &Attention) -> Result<Vec<Op>> {
        let at = format!("{at}.self_attn");
        let Attention { heads, kv_heads, dim, gated, bias, scale, window, .. } = *a;
        let [q_norm, k_norm, out] = a.names.map(|name| format!("{at}.{name}"));
        let stride = if gated { 2 * dim } else { dim };
        let projected = self.buffer(if gated { "query and gate" } else { "projected query" }, heads * stride);
        let (k, v) = (self.buffer("projected key", kv_heads * dim), self.buffer("value", kv_heads * dim));
        let (query, key) = (self.buffer("query", heads * dim), self.buffer("key", kv_heads * dim));
        let attended = self.buffer("attended", heads * dim);
        let mut ops = vec![
            self.linear(&format!("{at}.q_proj"), bias, self.normed, projected)?,
            self.linear(&format!("{at}.k_proj"), bias, self.normed, k)?,
            self.linear(&format!("{at}.v_proj"), bias, self.normed, v)?,
        ];
        let (rotary, eps) = (self.rotary(), self.eps);
        // What becomes queries and keys, and the norms of their heads.
        let (mut from, mut norms) = ([projected, k], [None; 2]);
        match a.norm {
            QkNorm::None => {}
            QkNorm::Head => {
                norms = [Some(self.norm_weight(&q_norm, dim)?), Some(self.norm_weight(&k_norm, dim)?)];
            }
            QkNorm::Projection => {
                for (buf, name) in from.iter_mut().zip([&q_norm, &k_norm]) {
                    let (x, width) = (*buf, self.width(*buf));
                    *buf = self.buffer(if x == k { "normed key" } else { "normed query" }, width);
                    ops.push(Op::RmsNorm { x, w: self.norm_weight(name, width)?, y: *buf, groups: 1, eps });
                }
            }
        }
        if let Some(limit) = a.clip {
            ops.extend([from[0], from[1], v].map(|x| Op::Clamp { x, limit }));
        }
        let sinks = a.sinks.then(|| self.s.vector(format!("{at}.sinks"), heads, Map::Identity)).transpose()?;
        let state = self.s.parts.state(StateSpec::Kv { heads: kv_heads, dim, value_dim: dim });
        let q = Heads { buf: from[0], offset: 0, stride };
        let gate = gated.then_some(Heads { offset: dim, ..q });
        let turn = |x, w, y, heads| {
            let y = Heads::side_by_side(y, dim);
            Op::HeadNormRope { x, w, y, heads, dim, rotary, pairs: Pairs::Halves, eps }
        };
        ops.extend([
            turn(q, norms[0], query, heads),
            turn(Heads::side_by_side(from[1], dim), norms[1], key, kv_heads),
            Op::KvAppend { k: key, v, state },
            Op::Attention { q: query, gate, sinks, y: attended, state, heads, scale, window },
            self.add_to_residual(&out, bias, attended)?,
        ]);
        Ok(ops)
    }

    /// Rotated dimensions of a head.
    pub fn rotary(&self) -> usize {
        2 * self.rope.inv_freq.len()
    }

    pub fn norm_weight(&mut self, name: &str, len: usize) -> Result<Weight> {
        self.s.vector(format!("{name}.weight"), len, self.norms)
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
    pub fn dense_layer(&mut self, norm: &str, names: &[String; 3], mlp: &Mlp, mut mix: Vec<Op>) -> Result<Layer> {
        mix.push(self.norm(norm)?);
        mix.extend(self.mlp(names, mlp)?);
        Ok(Layer { mix, ..Layer::default() })
    }

    /// A layer with experts at `at`: `mix`, the norm and the router, the same for a look ahead, the shared expert and the
    /// routed ones.
    pub fn routed_layer(&mut self, index: usize, norm: &str, at: &str, e: &Experts, mut mix: Vec<Op>) -> Result<Layer> {
        self.expert = Some((e.width, e.bias));
        let r = &e.router;
        let logits = self.buffer("router logits", e.count);
        let (ahead, foreseen) = (self.buffer("ahead normed", self.hidden), self.buffer("foreseen", e.count));
        self.foreseen = Some(foreseen);
        let norm = self.norm(norm)?;
        let router = self.linear(&format!("{at}.{}", r.name), r.bias, self.normed, logits)?;
        let (Op::RmsNorm { w: norm_weight, eps, .. }, Op::MatMul { w, bias, .. }) = (norm, router) else {
            unreachable!("a norm and a linear layer")
        };
        let choice_bias = r.choice_bias.map(|name| self.s.vector(format!("{at}.{name}"), e.count, Map::Identity));
        let choice_bias = choice_bias.transpose()?;
        // What the choice goes by is the logits, or made of them.
        let plain = choice_bias.is_none() && r.groups.is_none();
        let scored =
            |logits, y| Op::RouterScores { logits, y, scoring: r.scoring, bias: choice_bias, groups: r.groups };
        let scores = if plain { logits } else { self.buffer("router scores", e.count) };
        let foreseen_logits = if plain { foreseen } else { self.buffer("foreseen logits", e.count) };
        let before = |w| {
            let mut ops = vec![
                Op::RmsNorm { x: self.residual, w: norm_weight, y: ahead, groups: 1, eps },
                Op::MatMul { x: ahead, w, bias, y: foreseen_logits, scale: 1.0, add: false },
            ];
            ops.extend((!plain).then(|| scored(foreseen_logits, foreseen)));
            ops
        };
        mix.extend([norm, router]);
        mix.extend((!plain).then(|| scored(logits, scores)));
        let foresee = before(w);
        let maps = self.s.maps(index, e.count, self.hidden)?;
        let fitted = maps.into_iter().map(|map| map.map(before)).collect();
        let (mut shared_ops, mut shared) = (Vec::new(), None);
        if let Some(Shared { name, width, gated }) = e.shared {
            let out = self.buffer("shared out", self.hidden);
            let names = projections(&format!("{at}.{name}"));
            let (ops, act) = self.inner(&names, &Mlp { width, bias: false })?;
            shared_ops.extend(ops);
            shared_ops.push(self.linear(&names[2], false, act, out)?);
            let gate = gated.then(|| self.buffer("shared logit", 1));
            if let Some(gate) = gate {
                shared_ops.push(self.linear(&format!("{at}.{name}_gate"), false, self.normed, gate)?);
            }
            shared = Some(SharedExpert { out, gate });
        }
        let moe = Moe {
            logits,
            scores,
            x: self.normed,
            y: self.residual,
            experts: e.count,
            top_k: e.top_k,
            scoring: r.scoring,
            renormalise: r.renormalise,
            weight_scale: r.weight_scale,
            glu: e.glu,
            shared,
            scale: self.residual_scale,
        };
        Ok(Layer { mix, foresee, fitted, shared: shared_ops, moe: Some(moe) })
    }

    /// The plan of all layers and the head.
    pub fn finish(mut self, layers: Vec<Layer>, norm: &str) -> Result<Plan> {
        let parts = &mut self.s.parts;
        let head_in = parts.head_buffer("head in", self.hidden);
        let head_normed = parts.head_buffer("head normed", self.hidden);
        let logits = parts.head_buffer("logits", self.vocab);
        let norm = self.norm_weight(norm, self.hidden)?;
        let w = self.s.matrix("lm_head.weight", self.vocab, self.hidden)?;
        let head = vec![
            Op::RmsNorm { x: head_in, w: norm, y: head_normed, groups: 1, eps: self.eps },
            Op::MatMul { x: head_normed, w, bias: None, y: logits, scale: self.logits_scale, add: false },
        ];
        let expert = self.expert.map(|(width, bias)| self.s.experts(self.hidden, width, bias)).transpose()?;
        let Builder { buffers, weights, states } = self.s.parts;
        Ok(Plan {
            hidden: self.hidden,
            vocab: self.vocab,
            buffers,
            weights,
            states,
            embedding_scale: self.embedding_scale,
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
