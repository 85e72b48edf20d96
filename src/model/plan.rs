//! What a forward pass does, as data. An architecture file turns a configuration into a [`Plan`]; a backend allocates
//! what the plan names and executes its operations. Both backends execute the same plan, so a new architecture is one
//! file, and each operation has one kernel a backend and one meaning, given here.
//!
//! Shapes: every buffer holds one row of `width` f32 for each of the `m` tokens of the current chunk, which sit at
//! positions `pos .. pos + m` of the sequence. Operations treat rows independently unless they name a [`State`].

use std::ops::Range;

use crate::tensor::{Layout, align16};

/// An activation buffer, an index into [`Plan::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buf(pub usize);

/// A weight, an index into [`Plan::weights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Weight(pub usize);

/// What a sequence carries from token to token, an index into [`Plan::states`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State(pub usize);

/// How many rows a buffer has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// One a token of the chunk.
    Chunk,
    /// One a token that gets logits, see [`Limits::head_rows`].
    Head,
}

#[derive(Debug, Clone)]
pub struct BufSpec {
    pub name: String,
    pub width: usize,
    pub rows: Rows,
}

/// How a stored vector becomes the one the kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Map {
    Identity,
    /// `1 + w`: RMS norms whose weights are stored around zero.
    PlusOne,
    /// `-exp(w)`: the decay rates of Gated DeltaNet, stored as logarithms.
    NegExp,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightKind {
    Matrix(Layout),
    /// `len` f32.
    Vector {
        len: usize,
        map: Map,
    },
}

#[derive(Debug, Clone)]
pub struct WeightSpec {
    /// Name of the tensor in the pack.
    pub tensor: String,
    pub kind: WeightKind,
    /// The rows of the tensor that a matrix is made of, where it is not all of them in order.
    pub rows: Option<RowsOf>,
}

/// Some rows of a matrix, in an order of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowsOf {
    /// Rows of the whole matrix.
    pub whole: usize,
    pub ranges: Vec<Range<usize>>,
}

impl WeightSpec {
    /// The layout of the tensor that a matrix is made of.
    pub fn stored(&self) -> Option<Layout> {
        match self.kind {
            WeightKind::Matrix(layout) => {
                Some(Layout { rows: self.rows.as_ref().map_or(layout.rows, |rows| rows.whole), ..layout })
            }
            WeightKind::Vector { .. } => None,
        }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        match self.kind {
            WeightKind::Matrix(layout) => layout.bytes(),
            WeightKind::Vector { len, .. } => len.next_multiple_of(4) * 4,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateSpec {
    /// Keys and values of every position so far: `[context, heads · dim]` and `[context, heads · value_dim]`.
    Kv { heads: usize, dim: usize, value_dim: usize },
    /// The last `kernel − 1` inputs of a causal convolution, oldest first: `[kernel − 1, channels]`.
    Conv { channels: usize, kernel: usize },
    /// The recurrent state of Gated DeltaNet: `[heads, key_dim, value_dim]`.
    Delta { heads: usize, key_dim: usize, value_dim: usize },
}

impl StateSpec {
    /// Number of f32 it holds in a context of `context` tokens.
    pub fn len(&self, context: usize) -> usize {
        match *self {
            StateSpec::Kv { heads, dim, value_dim } => context * heads * (dim + value_dim),
            StateSpec::Conv { channels, kernel } => (kernel - 1) * channels,
            StateSpec::Delta { heads, key_dim, value_dim } => heads * key_dim * value_dim,
        }
    }

    /// Whether every position has a place of its own, so that a sequence goes back by forgetting the later ones. Other
    /// states go back only to a copy.
    pub fn by_position(&self) -> bool {
        matches!(self, StateSpec::Kv { .. })
    }
}

/// `heads` vectors in each row of a buffer: head `h` starts at `offset + h · stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub buf: Buf,
    pub offset: usize,
    pub stride: usize,
}

impl Heads {
    /// Heads of `dim` side by side in the whole of a buffer.
    pub fn side_by_side(buf: Buf, dim: usize) -> Heads {
        Heads { buf, offset: 0, stride: dim }
    }
}

/// Which dimensions a rotary embedding turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// `i` and `i + rotary/2` (`rotate_half`).
    Halves,
    /// `2i` and `2i + 1`.
    Neighbours,
}

/// How a router's logits become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// `exp(logit) / Σ exp` over all experts of the layer.
    Softmax,
    /// `σ(logit)`.
    Sigmoid,
}

/// What a gated feed-forward network makes of its gate and its up projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Glu {
    /// `silu(gate) · up`.
    Silu,
    /// `g · σ(alpha · g) · (u + 1)` of `g = min(gate, limit)` and `u = max(−limit, min(limit, up))`, as in gpt-oss.
    Clamped { alpha: f32, limit: f32 },
}

/// The shared expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    pub out: Buf,
    /// A logit (width 1) whose σ scales it.
    pub gate: Option<Buf>,
}

/// One operation. `σ` is the logistic function, `silu(x) = x · σ(x)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// For each of `groups` equal parts of a row: `y = x · rsqrt(mean(x²) + eps) · w`, `w` as long as a part.
    RmsNorm { x: Buf, w: Weight, y: Buf, groups: usize, eps: f32 },
    /// As `RmsNorm`, then times `silu(gate)`.
    GatedRmsNorm { x: Buf, gate: Buf, w: Weight, y: Buf, groups: usize, eps: f32 },
    /// `y = scale · (x · Wᵀ + bias)`, or `y += …` if `add`. W is `[rows, cols]`; x has width `cols`, y and the bias `rows`.
    MatMul { x: Buf, w: Weight, bias: Option<Weight>, y: Buf, scale: f32, add: bool },
    /// Causal depthwise convolution over tokens, then silu: `y[t, c] = silu(Σ_j w[c, j] · x[t − kernel + 1 + j, c])`,
    /// inputs before the chunk from `state`, which is left holding the chunk's last inputs. `w` is `[channels, kernel]`.
    ConvSilu { x: Buf, w: Weight, y: Buf, state: State },
    /// The short convolution of LFM2 (a gated causal depthwise one): a row of `x` is `[b | c | v]`, each as wide as y;
    /// `y[t, i] = c[t, i] · Σ_j w[i, j] · (b · v)[t − kernel + 1 + j, i]`, with `w` and `state` as for `ConvSilu`.
    GatedConv { x: Buf, w: Weight, y: Buf, state: State },
    /// The gated delta rule (Yang et al., 2024), recurrent form, token after token. A row of `qkv` is
    /// `[q: key_heads · key_dim | k: the same | v: heads · value_dim]`; value head `h` uses key head
    /// `h / (heads / key_heads)`. With q and k scaled to unit length (eps 1e-6 under the root) and q by `1/√key_dim`:
    /// `S ← S · exp(rate · softplus(a + dt_bias))`, `S ← S + k ⊗ (σ(b) · (v − kᵀS))`, `y = qᵀS`.
    DeltaNet { qkv: Buf, a: Buf, b: Buf, rate: Weight, dt_bias: Weight, y: Buf, state: State, key_heads: usize },
    /// Per head: RMS norm over `dim` if `w` is given, then rotary embedding of the first `rotary` dimensions, paired as
    /// `pairs` says, by the angles in [`Plan::rope`], the rest copied. Heads of `x` may lie in one place, which repeats it.
    HeadNormRope {
        x: Heads,
        w: Option<Weight>,
        y: Heads,
        heads: usize,
        dim: usize,
        rotary: usize,
        pairs: Pairs,
        eps: f32,
    },
    /// `x = max(−limit, min(limit, x))`.
    Clamp { x: Buf, limit: f32 },
    /// Writes the chunk's rows of `k` and `v` (`heads · dim` and `heads · value_dim` wide) at positions `pos ..` of `state`.
    KvAppend { k: Buf, v: Buf, state: State },
    /// Causal attention of `heads` query heads over the `Kv` state (query head `h` reads KV head
    /// `h / (heads / kv_heads)`), softmax of `scale · q·k` over the last `window` positions, the token's own among them,
    /// or over all. A sink is a score a head that takes its part of the softmax and has no value (Xiao et al., 2023). Each
    /// output times `σ(gate)` where a gate is given.
    Attention {
        q: Buf,
        gate: Option<Heads>,
        sinks: Option<Weight>,
        y: Buf,
        state: State,
        heads: usize,
        scale: f32,
        window: Option<usize>,
    },
    /// What a router's choice goes by, where it is not the logits themselves: `σ(logit) + bias` or the logit, as `scoring`
    /// says. With `groups = (n, k)` experts stand in `n` groups of equal size, and those outside the `k` groups with the
    /// highest best scores (ties to the lower group) get a score one below the row's lowest.
    RouterScores { logits: Buf, y: Buf, scoring: Scoring, bias: Option<Weight>, groups: Option<(usize, usize)> },
    /// `y = silu(gate) · up`.
    SiluMul { gate: Buf, up: Buf, y: Buf },
}

impl Op {
    /// `y = x · Wᵀ`.
    pub fn matmul(x: Buf, w: Weight, y: Buf) -> Op {
        Op::MatMul { x, w, bias: None, y, scale: 1.0, add: false }
    }
}

/// The routed experts of a layer. Between the layer's `mix` and these lies the one point where a pass may have to wait
/// for flash.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moe {
    /// Router logits, width `experts`. Written by `mix`.
    pub logits: Buf,
    /// What the choice goes by, see [`Op::RouterScores`]: the logits themselves for most. Written by `mix`.
    pub scores: Buf,
    /// What the experts read: the normalised residual. Written by `mix`.
    pub x: Buf,
    /// The residual that their output is added to.
    pub y: Buf,
    pub experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    /// The chosen weights are divided by their sum plus this.
    pub renormalise: Option<f32>,
    /// What weights are multiplied with after that.
    pub weight_scale: f32,
    pub glu: Glu,
    pub shared: Option<SharedExpert>,
    /// What all that the experts add to the residual is multiplied with.
    pub scale: f32,
}

/// One decoder layer: `mix`, then the router's choice, then `shared` (which needs no expert), then the experts:
/// `y[r] += scale · (Σ_rank weight[r, rank] · expert(x[r]), in rank order, plus σ(shared gate) · shared)`.
#[derive(Debug, Clone, Default)]
pub struct Layer {
    pub mix: Vec<Op>,
    /// This layer's router on the residual as it is, whatever layer it has come to: writes [`Plan::foreseen`] and touches
    /// nothing that `mix`, `shared` or the experts use.
    pub foresee: Vec<Op>,
    /// The same with a matrix in the router's place that was fitted to what this layer chooses so many layers later: by
    /// distance − 1, which is 0 for the router of the layer before.
    pub fitted: Vec<Option<Vec<Op>>>,
    pub shared: Vec<Op>,
    pub moe: Option<Moe>,
}

impl Layer {
    /// What scores this layer's experts from a residual that has come to the router `distance` layers before it, the
    /// embedding lying before layer 0. At 0 that is its own router, and the scores those it chooses by.
    pub fn foresee_from(&self, distance: usize) -> &[Op] {
        let fitted = distance.checked_sub(1).and_then(|i| self.fitted.get(i)?.as_ref());
        fitted.unwrap_or(&self.foresee)
    }
}

/// Shape of one routed expert: `down · glu(gate · x, up · x)`, each product plus a bias if they have biases. Its extent
/// holds the three matrices one after the other in this order, then the three biases as f32, each from a multiple of 16
/// bytes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertShape {
    pub gate: Layout,
    pub up: Layout,
    pub down: Layout,
    pub bias: bool,
}

impl ExpertShape {
    pub fn new(dtype: crate::tensor::DType, hidden: usize, width: usize, bias: bool) -> ExpertShape {
        let gate = Layout::new(dtype, width, hidden);
        ExpertShape { gate, up: gate, down: Layout::new(dtype, hidden, width), bias }
    }

    /// Byte offsets of gate, up and down within the extent.
    pub fn offsets(&self) -> [usize; 3] {
        [0, self.gate.bytes(), self.gate.bytes() + self.up.bytes()]
    }

    /// Byte offsets of their biases.
    pub fn bias_offsets(&self) -> Option<[usize; 3]> {
        let [_, _, down] = self.offsets();
        let (first, width) = (down + self.down.bytes(), align16(4 * self.gate.rows));
        self.bias.then_some([first, first + width, first + 2 * width])
    }

    /// Bytes of the whole, before the extent's own alignment.
    pub fn bytes(&self) -> usize {
        let [_, _, down] = self.offsets();
        let matrices = down + self.down.bytes();
        self.bias_offsets().map_or(matrices, |[_, _, last]| last + align16(4 * self.down.rows))
    }
}

#[derive(Debug, Clone)]
pub struct Plan {
    pub hidden: usize,
    pub vocab: usize,
    pub buffers: Vec<BufSpec>,
    pub weights: Vec<WeightSpec>,
    pub states: Vec<StateSpec>,
    /// What embeddings are multiplied with before they are the residual.
    pub embedding_scale: f32,
    /// The residual stream: filled with embeddings at the start of a chunk, a layer's output at its end.
    pub residual: Buf,
    /// Rotary frequencies, radians a position, one a rotated pair. Row of the table buffer: `[cos…, sin…]`.
    pub inv_freq: Vec<f32>,
    /// What cosines and sines are multiplied with, 1 but for rotary embeddings that were stretched.
    pub rope_scale: f32,
    /// The buffer the backend fills with the table for the chunk's positions, width `2 · inv_freq.len()`.
    pub rope: Option<Buf>,
    pub layers: Vec<Layer>,
    pub expert: Option<ExpertShape>,
    /// What `foresee` writes: scores of a layer's experts.
    pub foreseen: Option<Buf>,
    /// Copy of the residual rows that get logits, width `hidden`, [`Rows::Head`].
    pub head_in: Buf,
    /// The same rows after the final norm.
    pub head_normed: Buf,
    pub head: Vec<Op>,
    /// Logits, width `vocab`, [`Rows::Head`].
    pub logits: Buf,
}

/// How much of everything there is room for. Fixed when an engine is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Positions a sequence can have.
    pub context: usize,
    /// Tokens a pass can take at once.
    pub chunk: usize,
    /// Rows of logits computed at once.
    pub head_rows: usize,
    /// Expert slots in the pool.
    pub slots: usize,
    /// Copies of the states that are not [by position](StateSpec::by_position).
    pub checkpoints: usize,
}

impl Plan {
    pub fn top_k(&self) -> usize {
        self.layers.iter().filter_map(|l| l.moe).map(|m| m.top_k).max().unwrap_or(0)
    }

    /// Operations of all parts.
    pub fn operations(&self) -> usize {
        let of = |l: &Layer| {
            let fitted = l.fitted.iter().flatten().map(Vec::len).sum::<usize>();
            l.mix.len() + l.foresee.len() + fitted + l.shared.len()
        };
        self.layers.iter().map(of).sum::<usize>() + self.head.len()
    }

    /// Experts of the layer that has most.
    pub fn most_experts(&self) -> usize {
        self.layers.iter().filter_map(|l| l.moe).map(|m| m.experts).max().unwrap_or(0)
    }

    /// Widest row of routed expert outputs a chunk needs: `top_k · hidden`, plus `top_k · width` of inner activations.
    pub fn expert_row_len(&self) -> usize {
        self.expert.map_or(0, |e| self.top_k() * (e.down.rows + e.gate.rows))
    }

    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(|w| w.bytes() as u64).sum()
    }

    pub fn state_bytes(&self, context: usize) -> u64 {
        self.states.iter().map(|s| 4 * s.len(context) as u64).sum()
    }

    /// States of which a checkpoint holds a copy.
    pub fn checkpointed(&self) -> impl Iterator<Item = State> {
        self.states.iter().enumerate().filter(|(_, s)| !s.by_position()).map(|(i, _)| State(i))
    }

    /// Bytes of one checkpoint, 0 if the model needs none.
    pub fn checkpoint_bytes(&self) -> u64 {
        self.checkpointed().map(|s| 4 * self.states[s.0].len(0) as u64).sum()
    }

    pub fn rows(&self, buf: Buf, limits: &Limits) -> usize {
        match self.buffers[buf.0].rows {
            Rows::Chunk => limits.chunk,
            Rows::Head => limits.head_rows,
        }
    }
}

/// Collects a plan's parts; architecture files use it so that a buffer, weight or state is named where it is made.
#[derive(Debug, Default)]
pub struct Builder {
    pub buffers: Vec<BufSpec>,
    pub weights: Vec<WeightSpec>,
    pub states: Vec<StateSpec>,
}

impl Builder {
    pub fn buffer(&mut self, name: &str, width: usize) -> Buf {
        self.push_buffer(name, width, Rows::Chunk)
    }

    pub fn head_buffer(&mut self, name: &str, width: usize) -> Buf {
        self.push_buffer(name, width, Rows::Head)
    }

    fn push_buffer(&mut self, name: &str, width: usize, rows: Rows) -> Buf {
        self.buffers.push(BufSpec { name: name.to_owned(), width, rows });
        Buf(self.buffers.len() - 1)
    }

    /// The buffer of that name and width, which layers use one after the other.
    pub fn shared_buffer(&mut self, name: &str, width: usize) -> Buf {
        let same = |b: &BufSpec| b.name == name && b.width == width && b.rows == Rows::Chunk;
        self.buffers.iter().position(same).map_or_else(|| self.buffer(name, width), Buf)
    }

    pub fn matrix(&mut self, tensor: impl Into<String>, layout: Layout) -> Weight {
        self.push_weight(tensor.into(), WeightKind::Matrix(layout))
    }

    pub fn vector(&mut self, tensor: impl Into<String>, len: usize, map: Map) -> Weight {
        self.push_weight(tensor.into(), WeightKind::Vector { len, map })
    }

    /// A matrix of some rows of a tensor.
    pub fn matrix_of(&mut self, tensor: impl Into<String>, layout: Layout, rows: RowsOf) -> Weight {
        let weight = self.push_weight(tensor.into(), WeightKind::Matrix(layout));
        self.weights[weight.0].rows = Some(rows);
        weight
    }

    fn push_weight(&mut self, tensor: String, kind: WeightKind) -> Weight {
        self.weights.push(WeightSpec { tensor, kind, rows: None });
        Weight(self.weights.len() - 1)
    }

    pub fn state(&mut self, spec: StateSpec) -> State {
        self.states.push(spec);
        State(self.states.len() - 1)
    }
}
