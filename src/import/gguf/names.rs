//! Which tensor of a checkpoint a tensor of a GGUF file is, and what was done to its values.

use serde_json::Value;

use crate::tensor::GROUP;

/// How a tensor differs from the checkpoint's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    pub map: Map,
    pub order: Option<Order>,
}

impl Change {
    const NONE: Change = Change { map: Map::None, order: None };

    /// The checkpoint's value of a stored one.
    pub fn value(&self, stored: f32) -> f32 {
        match self.map {
            Map::None => stored,
            Map::OneMore => stored - 1.0,
            Map::NegExp => libm::log(-f64::from(stored)) as f32,
        }
    }

    /// Where a row of the checkpoint's tensor is stored.
    pub fn source_row(&self, row: usize) -> usize {
        self.source(Axis::Rows, row)
    }

    pub fn source_col(&self, col: usize) -> usize {
        self.source(Axis::Cols, col)
    }

    fn source(&self, axis: Axis, at: usize) -> usize {
        match self.order {
            Some(order) if order.axis == axis => order.source(at),
            _ => at,
        }
    }

    pub fn keeps_values(&self) -> bool {
        self.map == Map::None
    }

    /// Whether groups of columns stay together.
    pub fn keeps_groups(&self) -> bool {
        let whole = |o: Order| o.axis == Axis::Rows || (o.unit.is_multiple_of(GROUP) && o.from.is_multiple_of(GROUP));
        self.keeps_values() && self.order.is_none_or(whole)
    }
}

/// What was computed from the checkpoint's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Map {
    None,
    /// `1 + w`
    OneMore,
    /// `−exp(w)`
    NegExp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    Rows,
    Cols,
}

/// From `from` on, each `outer · inner` units of the checkpoint are stored `inner` first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    pub axis: Axis,
    pub from: usize,
    pub outer: usize,
    pub inner: usize,
    /// Rows or columns that stay together.
    pub unit: usize,
}

impl Order {
    fn block(&self) -> usize {
        self.outer.saturating_mul(self.inner).saturating_mul(self.unit)
    }

    fn source(&self, at: usize) -> usize {
        let Some(at) = at.checked_sub(self.from) else { return at };
        let (block, rest) = (at / self.block(), at % self.block());
        let (unit, within) = (rest / self.unit, rest % self.unit);
        let (outer, inner) = (unit / self.inner, unit % self.inner);
        self.from + block * self.block() + (inner * self.outer + outer) * self.unit + within
    }

    /// Whether an axis of this length is ordered so.
    fn fits(&self, len: usize) -> bool {
        self.block() > 0 && len.checked_sub(self.from).is_some_and(|rest| rest > 0 && rest.is_multiple_of(self.block()))
    }
}

/// Dimensions that are written differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Same,
    /// `[channels, kernel]` for `[channels, 1, kernel]`.
    Conv,
    /// `[n]` for `[1, n]`.
    Row,
}

#[derive(Debug)]
pub struct Renamed {
    pub name: String,
    pub change: Change,
    form: Form,
}

impl Renamed {
    /// The checkpoint's shape, unless the stored one is not possible.
    pub fn shape(&self, stored: &[usize]) -> Option<Vec<usize>> {
        let (cols, rows) = (*stored.last()?, stored[..stored.len() - 1].iter().product());
        if let Some(order) = self.change.order
            && !order.fits(if order.axis == Axis::Rows { rows } else { cols })
        {
            return None;
        }
        match (self.form, stored) {
            (Form::Same, _) => Some(stored.to_vec()),
            (Form::Conv, [channels, kernel]) => Some(vec![*channels, 1, *kernel]),
            (Form::Row, [n]) => Some(vec![1, *n]),
            // Some converters write it as it is.
            (Form::Row, [1, n]) => Some(vec![1, *n]),
            _ => None,
        }
    }
}

/// What is special about a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Plain,
    /// A norm whose checkpoint's weights lie around zero.
    Norm,
    Row,
    /// Value heads of DeltaNet are stored tiled: the first of each key head, then the second of each, and so on. Their
    /// rows, after those of queries and keys or by themselves; as many as a head has dimensions, or one a head.
    ValueRowsAfterKeys,
    ValueRows,
    ValueColumns,
    ValueHeadRows,
    ValueHeads,
    ConvAfterKeys,
    Decay,
    /// The rotated pairs of a head are neighbours instead of halves apart.
    Pairs,
}

type Rules = &'static [(&'static str, &'static str, Rule)];

const MODEL: Rules = &[
    ("token_embd.weight", "model.embed_tokens.weight", Rule::Plain),
    ("output_norm.weight", "model.norm.weight", Rule::Plain),
    ("output.weight", "lm_head.weight", Rule::Plain),
];

const NORMS: Rules = &[
    ("attn_norm.weight", "input_layernorm.weight", Rule::Plain),
    ("ffn_norm.weight", "post_attention_layernorm.weight", Rule::Plain),
];

const ATTENTION: Rules = &[
    ("attn_q.weight", "self_attn.q_proj.weight", Rule::Plain),
    ("attn_k.weight", "self_attn.k_proj.weight", Rule::Plain),
    ("attn_v.weight", "self_attn.v_proj.weight", Rule::Plain),
    ("attn_output.weight", "self_attn.o_proj.weight", Rule::Plain),
];

const BIASES: Rules = &[
    ("attn_q.bias", "self_attn.q_proj.bias", Rule::Plain),
    ("attn_k.bias", "self_attn.k_proj.bias", Rule::Plain),
    ("attn_v.bias", "self_attn.v_proj.bias", Rule::Plain),
    ("attn_output.bias", "self_attn.o_proj.bias", Rule::Plain),
];

const HEAD_NORMS: Rules = &[
    ("attn_q_norm.weight", "self_attn.q_norm.weight", Rule::Plain),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", Rule::Plain),
];

const DENSE: Rules = &[
    ("ffn_gate.weight", "mlp.gate_proj.weight", Rule::Plain),
    ("ffn_up.weight", "mlp.up_proj.weight", Rule::Plain),
    ("ffn_down.weight", "mlp.down_proj.weight", Rule::Plain),
];

const EXPERTS: Rules = &[
    ("ffn_gate_inp.weight", "mlp.gate.weight", Rule::Plain),
    ("ffn_gate_exps.weight", "mlp.experts.gate_proj", Rule::Plain),
    ("ffn_up_exps.weight", "mlp.experts.up_proj", Rule::Plain),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", Rule::Plain),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", Rule::Plain),
];

/// What `llama` files have in place of [`ATTENTION`]: their attention rotates neighbours.
const PAIRED_ATTENTION: Rules = &[
    ("attn_q.weight", "self_attn.q_proj.weight", Rule::Pairs),
    ("attn_k.weight", "self_attn.k_proj.weight", Rule::Pairs),
    ("attn_v.weight", "self_attn.v_proj.weight", Rule::Plain),
    ("attn_output.weight", "self_attn.o_proj.weight", Rule::Plain),
];

const QWEN3_5_MOE: Rules = &[
    ("attn_norm.weight", "input_layernorm.weight", Rule::Norm),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", Rule::Norm),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", Rule::Norm),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", Rule::Norm),
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", Rule::ValueRowsAfterKeys),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight", Rule::ValueRows),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight", Rule::ValueHeadRows),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", Rule::ValueHeadRows),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", Rule::ConvAfterKeys),
    ("ssm_a", "linear_attn.A_log", Rule::Decay),
    ("ssm_dt.bias", "linear_attn.dt_bias", Rule::ValueHeads),
    ("ssm_norm.weight", "linear_attn.norm.weight", Rule::Plain),
    ("ssm_out.weight", "linear_attn.out_proj.weight", Rule::ValueColumns),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", Rule::Row),
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", Rule::Plain),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", Rule::Plain),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", Rule::Plain),
];

/// An architecture: what GGUF calls it, the checkpoint's `model_type`, and the rules of its layers.
#[derive(Debug)]
pub struct Architecture {
    pub gguf: &'static str,
    pub model_type: &'static str,
    layers: &'static [Rules],
}

pub const ARCHITECTURES: [Architecture; 4] = [
    Architecture { gguf: "qwen35moe", model_type: "qwen3_5_moe_text", layers: &[QWEN3_5_MOE, ATTENTION, EXPERTS] },
    Architecture {
        gguf: "qwen3moe",
        model_type: "qwen3_moe",
        layers: &[NORMS, ATTENTION, BIASES, HEAD_NORMS, EXPERTS],
    },
    Architecture { gguf: "qwen3", model_type: "qwen3", layers: &[NORMS, ATTENTION, BIASES, HEAD_NORMS, DENSE] },
    Architecture { gguf: "llama", model_type: "llama", layers: &[NORMS, PAIRED_ATTENTION, DENSE] },
];

/// How the tensors of a model with this configuration are called.
pub struct Names {
    architecture: &'static Architecture,
    layers: usize,
    key_heads: usize,
    /// Value heads of DeltaNet a key head.
    per_key: usize,
    key_dim: usize,
    value_dim: usize,
    head_dim: usize,
}

impl Names {
    /// For an architecture that is known, by a configuration that was made from metadata.
    pub fn of(architecture: &'static Architecture, config: &Value) -> Names {
        let size = |key: &str| config[key].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        let key_heads = size("linear_num_key_heads");
        Names {
            architecture,
            layers: size("num_hidden_layers"),
            key_heads,
            per_key: size("linear_num_value_heads").checked_div(key_heads).unwrap_or(0),
            key_dim: size("linear_key_head_dim"),
            value_dim: size("linear_value_head_dim"),
            head_dim: size("head_dim"),
        }
    }

    /// The checkpoint's name of a tensor, and what was done to it.
    pub fn rename(&self, stored: &str) -> Option<Renamed> {
        let find = |rules: Rules, name: &str| rules.iter().find(|(from, ..)| *from == name);
        let (name, rule) = match stored.strip_prefix("blk.") {
            None => {
                let (_, to, rule) = *find(MODEL, stored)?;
                // The last norm is one like the layers'.
                let around_zero = stored == "output_norm.weight" && self.architecture.gguf == "qwen35moe";
                (to.to_owned(), if around_zero { Rule::Norm } else { rule })
            }
            Some(rest) => {
                let (layer, name) = rest.split_once('.')?;
                let number: usize =
                    layer.parse().ok().filter(|n: &usize| *n < self.layers && n.to_string() == layer)?;
                let (_, to, rule) = *self.architecture.layers.iter().find_map(|rules| find(rules, name))?;
                (format!("model.layers.{number}.{to}"), rule)
            }
        };
        let (change, form) = self.apply(rule);
        Some(Renamed { name, change, form })
    }

    fn apply(&self, rule: Rule) -> (Change, Form) {
        let before = self.key_heads.saturating_mul(self.key_dim).saturating_mul(2);
        let values = |axis, from, unit| Change {
            order: Some(Order { axis, from, outer: self.key_heads, inner: self.per_key, unit }),
            ..Change::NONE
        };
        let pairs = || Change {
            order: Some(Order { axis: Axis::Rows, from: 0, outer: 2, inner: self.head_dim / 2, unit: 1 }),
            ..Change::NONE
        };
        match rule {
            Rule::Plain => (Change::NONE, Form::Same),
            Rule::Norm => (Change { map: Map::OneMore, ..Change::NONE }, Form::Same),
            Rule::Row => (Change::NONE, Form::Row),
            Rule::ValueRowsAfterKeys => (values(Axis::Rows, before, self.value_dim), Form::Same),
            Rule::ValueRows => (values(Axis::Rows, 0, self.value_dim), Form::Same),
            Rule::ValueColumns => (values(Axis::Cols, 0, self.value_dim), Form::Same),
            Rule::ValueHeadRows => (values(Axis::Rows, 0, 1), Form::Same),
            Rule::ValueHeads => (values(Axis::Cols, 0, 1), Form::Same),
            Rule::ConvAfterKeys => (values(Axis::Rows, before, self.value_dim), Form::Conv),
            Rule::Decay => (Change { map: Map::NegExp, ..values(Axis::Cols, 0, 1) }, Form::Same),
            Rule::Pairs => (pairs(), Form::Same),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiled_heads_are_found_where_they_are() {
        // Three key heads with two value heads each, of two rows, after one row of something else.
        let order = Order { axis: Axis::Rows, from: 1, outer: 3, inner: 2, unit: 2 };
        let sources: Vec<usize> = (0..13).map(|at| order.source(at)).collect();
        assert_eq!(sources, [0, 1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12]);
        assert!(order.fits(13) && !order.fits(12) && !order.fits(1) && !order.fits(0));
    }

    #[test]
    fn pairs_become_halves_in_every_head() {
        let order = Order { axis: Axis::Rows, from: 0, outer: 2, inner: 3, unit: 1 };
        let sources: Vec<usize> = (0..12).map(|at| order.source(at)).collect();
        assert_eq!(sources, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }

    #[test]
    fn only_layers_that_are_there_are_renamed() {
        let config = serde_json::json!({"num_hidden_layers": 12, "head_dim": 4});
        let names = Names::of(&ARCHITECTURES[1], &config);
        let name = |stored: &str| names.rename(stored).map(|r| r.name);
        assert_eq!(name("blk.11.attn_v.weight").as_deref(), Some("model.layers.11.self_attn.v_proj.weight"));
        assert_eq!(name("output.weight").as_deref(), Some("lm_head.weight"));
        for other in ["blk.12.attn_v.weight", "blk.011.attn_v.weight", "blk.attn_v.weight", "blk.1.attn_w.weight", ""] {
            assert_eq!(name(other), None, "{other}");
        }
    }
}
