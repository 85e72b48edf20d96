//! From metadata to what a checkpoint's `config.json` says.

use serde_json::{Map, Value, json};

use super::header::Stored;
use super::metadata::{self, Metadata};
use super::names::{ARCHITECTURES, Architecture};
use crate::error::{Error, Result};

/// Which architecture a file has.
///
/// # Errors
/// [`Error::UnknownArchitecture`]
pub fn architecture(metadata: &Metadata) -> Result<&'static Architecture> {
    let name = metadata.needed("general.architecture", metadata.text("general.architecture")?)?;
    ARCHITECTURES.iter().find(|known| known.gguf == name).ok_or_else(|| {
        let supported = ARCHITECTURES.map(|known| known.gguf).join(", ");
        Error::UnknownArchitecture { name: name.escape_default().to_string(), supported }
    })
}

/// The configuration. `tensor` finds a tensor by its name in the file.
pub fn read<'a>(
    metadata: &Metadata,
    architecture: &Architecture,
    tensor: impl Fn(&str) -> Option<&'a Stored>,
) -> Result<Value> {
    let at = At { metadata, prefix: architecture.gguf };
    let embedding = tensor("token_embd.weight").ok_or(Error::MissingTensor { name: "token_embd.weight".to_owned() })?;
    let (hidden, heads) = (at.need("embedding_length")?, at.need_layers("attention.head_count")?);
    // Layers that draft tokens come after the model's own.
    let layers = at.need("block_count")?.saturating_sub(at.size("nextn_predict_layers")?.unwrap_or(0));
    let head_dim = match at.size("attention.key_length")? {
        Some(dim) => dim,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    if at.size("attention.value_length")?.is_some_and(|dim| dim != head_dim) {
        return Err(metadata.bad("values are not as long as keys, which is not supported"));
    }
    let kv_heads = metadata.size_of_layers(&at.key("attention.head_count_kv"))?.unwrap_or(heads);
    if tensor("rope_freqs.weight").is_some() {
        return Err(
            metadata.bad("it has a frequency of its own for each rotated pair (`rope_freqs`), which is not supported")
        );
    }
    let mut config = Map::new();
    let mut set = |key: &str, value: Value| drop(config.insert(key.to_owned(), value));
    set("model_type", architecture.model_type.into());
    set("vocab_size", embedding.rows().into());
    set("hidden_size", hidden.into());
    set("num_hidden_layers", layers.into());
    set("num_attention_heads", heads.into());
    set("num_key_value_heads", kv_heads.into());
    set("head_dim", head_dim.into());
    set("hidden_act", "silu".into());
    set("attention_bias", tensor("blk.0.attn_q.bias").is_some().into());
    let eps = metadata.float(&at.key("attention.layer_norm_rms_epsilon"))?;
    set("rms_norm_eps", metadata.needed(&at.key("attention.layer_norm_rms_epsilon"), eps)?.into());
    set("tie_word_embeddings", tensor("output.weight").is_none().into());
    set("rope_parameters", rope(&at, head_dim)?);
    let optional = [
        ("max_position_embeddings", at.size("context_length")?),
        ("intermediate_size", at.size("feed_forward_length")?),
        ("bos_token_id", metadata.size("tokenizer.ggml.bos_token_id")?),
        ("eos_token_id", metadata.size("tokenizer.ggml.eos_token_id")?),
    ];
    for (key, value) in optional.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        set(key, value.into());
    }
    let experts = at.size("expert_count")?.unwrap_or(0);
    if experts > 0 {
        let width = match at.size("expert_feed_forward_length")? {
            Some(width) => width,
            None => at.need("feed_forward_length")?,
        };
        set("num_experts", experts.into());
        // What newer versions of `transformers` call it.
        set("num_local_experts", experts.into());
        set("num_experts_per_tok", at.need("expert_used_count")?.into());
        set("moe_intermediate_size", width.into());
    }
    match architecture.gguf {
        "qwen35moe" => {
            let value_heads = at.need("ssm.time_step_rank")?;
            let value_dim = at.need("ssm.inner_size")?.checked_div(value_heads).unwrap_or(0);
            set("shared_expert_intermediate_size", at.need("expert_shared_feed_forward_length")?.into());
            set("linear_conv_kernel_dim", at.need("ssm.conv_kernel")?.into());
            set("linear_num_key_heads", at.need("ssm.group_count")?.into());
            set("linear_num_value_heads", value_heads.into());
            set("linear_key_head_dim", at.need("ssm.state_size")?.into());
            set("linear_value_head_dim", value_dim.into());
            match layer_types(&at, layers)? {
                Some(types) => set("layer_types", types),
                None => set("full_attention_interval", at.size("full_attention_interval")?.unwrap_or(4).into()),
            }
        }
        "qwen3moe" => {
            // Files of this architecture do not say so: it always divides by the sum.
            set("norm_topk_prob", true.into());
            set("decoder_sparse_step", 1.into());
            set("mlp_only_layers", json!([]));
        }
        // A mixture of this name is Mixtral, whose layers are called differently.
        "llama" if experts > 0 => return Err(metadata.bad("a `llama` with experts (Mixtral) is not supported")),
        _ => {}
    }
    Ok(Value::Object(config))
}

/// An architecture's own keys.
struct At<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl At<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        self.metadata.size(&self.key(key))
    }

    fn need(&self, key: &str) -> Result<usize> {
        self.metadata.needed(&self.key(key), self.size(key)?)
    }

    fn need_layers(&self, key: &str) -> Result<usize> {
        self.metadata.needed(&self.key(key), self.metadata.size_of_layers(&self.key(key))?)
    }
}

fn layer_types(at: &At<'_>, layers: usize) -> Result<Option<Value>> {
    let key = at.key("attention.recurrent_layers");
    let Some(recurrent) = at.metadata.numbers(&key)? else { return Ok(None) };
    let name = |value: &metadata::Value| match *value {
        metadata::Value::Bool(true) => Ok("linear_attention"),
        metadata::Value::Bool(false) => Ok("full_attention"),
        _ => Err(at.metadata.bad(format!("`{key}` is not a list of true and false"))),
    };
    if recurrent.len() < layers {
        return Err(at.metadata.bad(format!("`{key}` names {} of {layers} layers", recurrent.len())));
    }
    Ok(Some(recurrent[..layers].iter().map(name).collect::<Result<Vec<_>>>()?.into()))
}

fn rope(at: &At<'_>, head_dim: usize) -> Result<Value> {
    let metadata = at.metadata;
    let float = |key: &str| metadata.float(&at.key(key));
    let mut rope = Map::new();
    rope.insert("rope_theta".into(), float("rope.freq_base")?.unwrap_or(10_000.0).into());
    // Plans take this part of a head and round down.
    let rotary = at.size("rope.dimension_count")?.unwrap_or(head_dim);
    let part = rotary as f64 / head_dim as f64;
    let part = if (head_dim as f64 * part) as usize == rotary { part } else { part.next_up() };
    rope.insert("partial_rotary_factor".into(), part.into());
    let scaling = metadata.text(&at.key("rope.scaling.type"))?.unwrap_or("none");
    rope.insert("rope_type".into(), if scaling == "none" { "default" } else { scaling }.into());
    if scaling != "none" {
        let context = at.size("rope.scaling.original_context_length")?;
        let fields = [
            ("factor", float("rope.scaling.factor")?.map(Value::from)),
            ("original_max_position_embeddings", context.map(Value::from)),
            ("beta_fast", float("rope.scaling.yarn_beta_fast")?.map(Value::from)),
            ("beta_slow", float("rope.scaling.yarn_beta_slow")?.map(Value::from)),
        ];
        rope.extend(fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    }
    Ok(rope.into())
}
