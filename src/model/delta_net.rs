//! Gated DeltaNet layers, and which layers of a hybrid model are of which kind.

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;

use super::decoder::{Decoder, multiple};
use super::plan::{Map, Op, StateSpec};
use super::{bad_config, check_dims};
use crate::error::Result;

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum LayerType {
    LinearAttention,
    FullAttention,
}

/// Which layers are full attention.
#[derive(Deserialize)]
pub(super) struct Hybrid {
    layer_types: Option<Vec<LayerType>>,
    /// Every how many layers one is full attention, where `layer_types` is absent.
    full_attention_interval: Option<usize>,
}

impl Hybrid {
    pub fn read(config: &Value, layers: usize) -> Result<Hybrid> {
        let hybrid = Hybrid::deserialize(config).map_err(bad_config)?;
        if hybrid.layer_types.as_ref().is_some_and(|types| types.len() != layers) {
            return Err(bad_config("`layer_types` does not name every layer"));
        }
        Ok(hybrid)
    }

    pub fn is_attention(&self, layer: usize) -> bool {
        match &self.layer_types {
            Some(types) => types[layer] == LayerType::FullAttention,
            None => (layer + 1).is_multiple_of(self.full_attention_interval.unwrap_or(4).max(1)),
        }
    }
}

/// The shape of DeltaNet layers.
#[derive(Deserialize)]
pub(super) struct DeltaNet {
    #[serde(rename = "linear_num_key_heads")]
    key_heads: usize,
    #[serde(rename = "linear_num_value_heads")]
    heads: usize,
    #[serde(rename = "linear_key_head_dim")]
    key_dim: usize,
    #[serde(rename = "linear_value_head_dim")]
    value_dim: usize,
    #[serde(rename = "linear_conv_kernel_dim")]
    kernel: usize,
}

/// How a checkpoint stores the projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Projections {
    /// Queries, keys and values in one matrix, the gates z, a and b each in its own.
    Separate,
    /// All but a and b in one matrix, and these in another, both key head by key head.
    Fused,
}

impl DeltaNet {
    pub fn read(config: &Value) -> Result<DeltaNet> {
        let c = DeltaNet::deserialize(config).map_err(bad_config)?;
        check_dims(&[
            ("linear_num_key_heads", c.key_heads),
            ("linear_num_value_heads", c.heads),
            ("linear_key_head_dim", c.key_dim),
            ("linear_value_head_dim", c.value_dim),
            ("linear_conv_kernel_dim", c.kernel),
        ])?;
        multiple(c.heads, c.key_heads, "DeltaNet value heads to key heads")?;
        Ok(c)
    }

    /// Rows of a fused projection in which each key head has `a_head`: those from `start` on, `len` of each.
    fn of_heads(&self, a_head: usize, start: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
        (0..self.key_heads).map(move |head| head * a_head + start..head * a_head + start + len)
    }

    /// `linear_attn` of the layer `at`, from the normalised residual.
    pub fn ops(&self, d: &mut Decoder<'_>, at: &str, projections: Projections) -> Result<Vec<Op>> {
        let at = format!("{at}.linear_attn");
        let DeltaNet { key_heads, heads, key_dim, value_dim, kernel } = *self;
        let (channels, width) = (2 * key_heads * key_dim + heads * value_dim, heads * value_dim);
        let (qkv, conv) = (d.buffer("deltanet qkv", channels), d.buffer("deltanet conv", channels));
        let (z, out) = (d.buffer("deltanet z", width), d.buffer("deltanet out", width));
        let (a, b) = (d.buffer("deltanet a", heads), d.buffer("deltanet b", heads));
        let gated = d.buffer("deltanet gated", width);
        let x = d.normed;
        let mut ops = match projections {
            Projections::Separate => vec![
                d.linear(&format!("{at}.in_proj_qkv"), false, x, qkv)?,
                d.linear(&format!("{at}.in_proj_z"), false, x, z)?,
                d.linear(&format!("{at}.in_proj_b"), false, x, b)?,
                d.linear(&format!("{at}.in_proj_a"), false, x, a)?,
            ],
            Projections::Fused => {
                let (qkvz, ba) = (format!("{at}.in_proj_qkvz"), format!("{at}.in_proj_ba"));
                // A key head has its query, its key, and the values and gates of its value heads; and their b and a.
                let own = heads / key_heads;
                let values = own * value_dim;
                let (a_head, z_at) = (2 * key_dim + 2 * values, 2 * key_dim + values);
                let qkv_rows = || {
                    let parts = [(0, key_dim), (key_dim, key_dim), (2 * key_dim, values)];
                    parts.into_iter().flat_map(|(start, len)| self.of_heads(a_head, start, len)).collect()
                };
                let whole = key_heads * a_head;
                vec![
                    d.linear_of(&qkvz, whole, qkv_rows, x, qkv)?,
                    d.linear_of(&qkvz, whole, || self.of_heads(a_head, z_at, values).collect(), x, z)?,
                    d.linear_of(&ba, 2 * heads, || self.of_heads(2 * own, 0, own).collect(), x, b)?,
                    d.linear_of(&ba, 2 * heads, || self.of_heads(2 * own, own, own).collect(), x, a)?,
                ]
            }
        };
        let taps = d.s.vector(format!("{at}.conv1d.weight"), channels * kernel, Map::Identity)?;
        let rate = d.s.vector(format!("{at}.A_log"), heads, Map::NegExp)?;
        let dt_bias = d.s.vector(format!("{at}.dt_bias"), heads, Map::Identity)?;
        let norm = d.s.vector(format!("{at}.norm.weight"), value_dim, Map::Identity)?;
        let conv_state = d.s.parts.state(StateSpec::Conv { channels, kernel });
        let state = d.s.parts.state(StateSpec::Delta { heads, key_dim, value_dim });
        ops.extend([
            Op::ConvSilu { x: qkv, w: taps, y: conv, state: conv_state },
            Op::DeltaNet { qkv: conv, a, b, rate, dt_bias, y: out, state, key_heads },
            Op::GatedRmsNorm { x: out, gate: z, w: norm, y: gated, groups: heads, eps: d.eps },
            d.add_to_residual(&format!("{at}.out_proj"), false, gated)?,
        ]);
        Ok(ops)
    }
}
