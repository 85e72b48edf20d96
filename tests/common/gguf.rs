//! GGUF files made from parts, sound ones and others.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;

use half::f16;
use outrider::flash::MemoryFlash;
use serde_json::Value as Json;

use crate::checkpoints::Tensors;

pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q8_0: u32 = 8;

/// Metadata in the file's encoding.
#[derive(Debug, Clone)]
pub enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Bools(Vec<bool>),
    I32s(Vec<i32>),
    /// Any type with any bytes.
    Raw(u32, Vec<u8>),
}

impl Value {
    pub fn text(text: &str) -> Value {
        Value::Text(text.to_owned())
    }

    fn write(&self, out: &mut Vec<u8>) {
        let array = |kind: u32, len: usize| {
            [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(len as u64).to_le_bytes()].concat()
        };
        match self {
            Value::U32(n) => [4u32.to_le_bytes(), n.to_le_bytes()].iter().for_each(|b| out.extend(b)),
            Value::F32(x) => [6u32.to_le_bytes(), x.to_le_bytes()].iter().for_each(|b| out.extend(b)),
            Value::Bool(b) => out.extend([7, 0, 0, 0, u8::from(*b)]),
            Value::Text(text) => {
                out.extend(8u32.to_le_bytes());
                write_text(text, out);
            }
            Value::Texts(texts) => {
                out.extend(array(8, texts.len()));
                texts.iter().for_each(|text| write_text(text, out));
            }
            Value::Bools(all) => {
                out.extend(array(7, all.len()));
                out.extend(all.iter().map(|b| u8::from(*b)));
            }
            Value::I32s(all) => {
                out.extend(array(5, all.len()));
                out.extend(all.iter().flat_map(|n| n.to_le_bytes()));
            }
            Value::Raw(kind, bytes) => {
                out.extend(kind.to_le_bytes());
                out.extend(bytes);
            }
        }
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    /// Innermost first.
    pub dims: Vec<u64>,
    pub kind: u32,
    pub bytes: Vec<u8>,
    /// Instead of the place where its bytes lie.
    pub offset: Option<u64>,
}

/// A file, as it is to be written.
#[derive(Debug, Clone)]
pub struct File {
    pub version: u32,
    /// Instead of how many there are.
    pub tensor_count: Option<u64>,
    pub pair_count: Option<u64>,
    pub pairs: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
    pub alignment: usize,
}

impl File {
    pub fn new() -> File {
        File { version: 3, tensor_count: None, pair_count: None, pairs: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    /// Sets a value, whether there was one or not.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.pairs.iter_mut().find(|(k, _)| k == key) {
            Some(pair) => pair.1 = value,
            None => self.pairs.push((key.to_owned(), value)),
        }
    }

    pub fn remove(&mut self, key: &str) {
        let before = self.pairs.len();
        self.pairs.retain(|(k, _)| k != key);
        assert_eq!(self.pairs.len() + 1, before, "{key}");
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.pair_count.unwrap_or(self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            write_text(key, &mut out);
            value.write(&mut out);
        }
        let mut at = 0;
        for tensor in &self.tensors {
            write_text(&tensor.name, &mut out);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(at).to_le_bytes());
            at += tensor.bytes.len().next_multiple_of(self.alignment) as u64;
        }
        out
    }

    pub fn write(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }

    /// The file by itself, as `m.gguf`.
    pub fn flash(&self) -> MemoryFlash {
        flash([("m.gguf".to_owned(), self.write())])
    }

    /// The file in parts, the metadata in the first one.
    pub fn split(&self, count: usize) -> BTreeMap<String, Vec<u8>> {
        let mut parts = vec![File { pairs: Vec::new(), tensors: Vec::new(), ..self.clone() }; count];
        parts[0].pairs = self.pairs.clone();
        for (i, tensor) in self.tensors.iter().enumerate() {
            parts[i % count].tensors.push(tensor.clone());
        }
        let name = |i: usize| format!("m-{:05}-of-{count:05}.gguf", i + 1);
        for (i, part) in parts.iter_mut().enumerate() {
            part.set("split.no", Value::Raw(2, (i as u16).to_le_bytes().to_vec()));
            part.set("split.count", Value::Raw(2, (count as u16).to_le_bytes().to_vec()));
            part.set("split.tensors.count", Value::Raw(5, (self.tensors.len() as i32).to_le_bytes().to_vec()));
        }
        parts.iter().enumerate().map(|(i, part)| (name(i), part.write())).collect()
    }
}

pub fn flash(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> MemoryFlash {
    MemoryFlash::new(files.into_iter().collect())
}

/// Values in a file's encoding.
pub fn encode(kind: u32, values: &[f32]) -> Vec<u8> {
    match kind {
        F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Q8_0 => values
            .chunks(32)
            .flat_map(|block| {
                let d = f16::from_f32(block.iter().fold(0.0, |m: f32, v| m.max(v.abs())) / 127.0);
                let q = block.iter().map(move |v| if d > f16::ZERO { (v / d.to_f32()).round() as i8 as u8 } else { 0 });
                d.to_le_bytes().into_iter().chain(q).collect::<Vec<_>>()
            })
            .collect(),
        _ => panic!("type {kind}"),
    }
}

/// `[outer, inner, unit]` as `[inner, outer, unit]`, from the element `from` on.
fn tile(values: &mut [f32], from: usize, [outer, inner, unit]: [usize; 3]) {
    let before = values[from..].to_vec();
    assert_eq!(before.len(), outer * inner * unit);
    for (at, part) in before.chunks(unit).enumerate() {
        let to = at % inner * outer + at / inner;
        values[from + to * unit..][..unit].copy_from_slice(part);
    }
}

const NAMES: [(&str, &str); 25] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("lm_head.weight", "output.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
    ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("linear_attn.out_proj.weight", "ssm_out.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
];

/// A `qwen3_5_moe` checkpoint as converters write it. Matrices have the type `kind`, all else F32.
pub fn qwen35moe(tensors: &Tensors, config: &Json, kind: u32) -> File {
    let n = |key: &str| config[key].as_u64().unwrap() as usize;
    let (keys, values) = (n("linear_num_key_heads"), n("linear_num_value_heads"));
    let (key_dim, value_dim, hidden) = (n("linear_key_head_dim"), n("linear_value_head_dim"), n("hidden_size"));
    let mut file = File::new();
    file.set("general.architecture", Value::text("qwen35moe"));
    file.set("general.name", Value::text("Odd Shapes"));
    let rotary = n("head_dim") as f64 * config["rope_parameters"]["partial_rotary_factor"].as_f64().unwrap();
    for (key, value) in [
        ("block_count", n("num_hidden_layers")),
        ("context_length", n("max_position_embeddings")),
        ("embedding_length", hidden),
        ("attention.head_count", n("num_attention_heads")),
        ("attention.head_count_kv", n("num_key_value_heads")),
        ("attention.key_length", n("head_dim")),
        ("attention.value_length", n("head_dim")),
        ("rope.dimension_count", rotary as usize),
        ("expert_count", n("num_experts")),
        ("expert_used_count", n("num_experts_per_tok")),
        ("expert_feed_forward_length", n("moe_intermediate_size")),
        ("expert_shared_feed_forward_length", n("shared_expert_intermediate_size")),
        ("ssm.conv_kernel", n("linear_conv_kernel_dim")),
        ("ssm.state_size", key_dim),
        ("ssm.group_count", keys),
        ("ssm.time_step_rank", values),
        ("ssm.inner_size", values * value_dim),
        ("full_attention_interval", 4),
    ] {
        file.set(&format!("qwen35moe.{key}"), Value::U32(value as u32));
    }
    let float = |value: &Json| Value::F32(value.as_f64().unwrap() as f32);
    file.set("qwen35moe.attention.layer_norm_rms_epsilon", float(&config["rms_norm_eps"]));
    file.set("qwen35moe.rope.freq_base", float(&config["rope_parameters"]["rope_theta"]));
    let recurrent = config["layer_types"].as_array().unwrap().iter().map(|t| t == "linear_attention");
    file.set("qwen35moe.attention.recurrent_layers", Value::Bools(recurrent.collect()));

    let mut add = |name: String, shape: &[usize], values: &[f32]| {
        let kind = if shape.len() > 1 && shape[shape.len() - 1].is_multiple_of(32) { kind } else { F32 };
        let dims = shape.iter().rev().map(|d| *d as u64).collect();
        file.tensors.push(Tensor { name, dims, kind, bytes: encode(kind, values), offset: None });
    };
    let (experts, layers) = (n("num_experts"), n("num_hidden_layers"));
    for layer in 0..layers {
        for part in ["gate", "up", "down"] {
            let of = |e: usize| &tensors[&format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight")];
            let all: Vec<f32> = (0..experts).flat_map(|e| of(e).1.clone()).collect();
            let shape = [&[experts][..], &of(0).0].concat();
            add(format!("blk.{layer}.ffn_{part}_exps.weight"), &shape, &all);
        }
    }
    let per_key = values / keys;
    for (name, (shape, weights)) in tensors.iter().filter(|(name, _)| !name.contains(".experts.")) {
        let (mut shape, mut weights) = (shape.clone(), weights.clone());
        let (at, rest) = match name.strip_prefix("model.layers.") {
            Some(rest) => {
                let (layer, rest) = rest.split_once('.').unwrap();
                (format!("blk.{layer}."), rest)
            }
            None => (String::new(), name.as_str()),
        };
        if rest.ends_with("norm.weight") && rest != "linear_attn.norm.weight" {
            weights.iter_mut().for_each(|w| *w += 1.0);
        }
        let (before, kernel) = (2 * keys * key_dim, n("linear_conv_kernel_dim"));
        match rest {
            "linear_attn.in_proj_qkv.weight" => {
                tile(&mut weights, before * hidden, [keys, per_key, value_dim * hidden])
            }
            "linear_attn.in_proj_z.weight" => tile(&mut weights, 0, [keys, per_key, value_dim * hidden]),
            "linear_attn.in_proj_b.weight" | "linear_attn.in_proj_a.weight" => {
                tile(&mut weights, 0, [keys, per_key, hidden]);
            }
            "linear_attn.conv1d.weight" => {
                tile(&mut weights, before * kernel, [keys, per_key, value_dim * kernel]);
                shape.remove(1);
            }
            "linear_attn.A_log" | "linear_attn.dt_bias" => tile(&mut weights, 0, [keys, per_key, 1]),
            "linear_attn.out_proj.weight" => {
                weights.chunks_mut(values * value_dim).for_each(|row| tile(row, 0, [keys, per_key, value_dim]));
            }
            "mlp.shared_expert_gate.weight" => drop(shape.remove(0)),
            _ => {}
        }
        if rest == "linear_attn.A_log" {
            weights.iter_mut().for_each(|w| *w = -w.exp());
        }
        let (_, to) = NAMES.iter().find(|(from, _)| *from == rest).unwrap_or_else(|| panic!("{rest}"));
        add(format!("{at}{to}"), &shape, &weights);
    }
    file
}
