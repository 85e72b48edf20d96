//! From OpenAI-shaped requests to tokens, and from generated tokens to replies. Nothing here touches tensors.
//!
//! ```text
//! ChatRequest → Chat::prompt → tokens → (engine) → tokens → Reply → Delta, Usage
//! ```

pub mod openai;
pub mod reply;
mod stop;
pub mod template;
mod tools;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::engine::sampler::Sampling;
use crate::error::{Error, Result};
use crate::model::tokenizer::Tokenizer;
use crate::pack::Pack;
use openai::ChatRequest;
use reply::{Reply, Rules};
use template::{ChatTemplate, Inputs};

/// The file without which there is no chatting.
pub const TOKENIZER: &str = "tokenizer.json";

/// Tokens that end a turn in the common chat formats. Some models' settings name only the token that ends a document.
const TURN_ENDS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>"];

/// The contents of a model's files that chatting needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Files<'a> {
    /// `tokenizer.json`
    pub tokenizer: &'a [u8],
    /// `tokenizer_config.json`
    pub tokenizer_config: Option<&'a [u8]>,
    /// `generation_config.json`
    pub generation_config: Option<&'a [u8]>,
    /// `chat_template.jinja`; older models have it in `tokenizer_config.json`.
    pub chat_template: Option<&'a [u8]>,
}

/// How to chat with a model: its tokenizer, chat template, end tokens and defaults.
#[derive(Debug, Clone)]
pub struct Chat {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop_tokens: Vec<u32>,
    /// `bos_token` and its like, by name.
    special_tokens: Map<String, Value>,
    defaults: Sampling,
    max_tokens: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<Ids>,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    max_new_tokens: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected an id or an array of ids")]
enum Ids {
    One(u32),
    Any(Vec<u32>),
}

/// Sources of the chat templates in a `tokenizer_config.json`: one, or several by name.
fn configured_template(config: &Map<String, Value>) -> Result<Option<ChatTemplate>> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => ChatTemplate::new(source).map(Some),
        Some(list) => {
            let named = list.as_array().and_then(|list| {
                list.iter().map(|t| Some((t.get("name")?.as_str()?, t.get("template")?.as_str()?))).collect()
            });
            let named: Vec<_> = named.ok_or_else(|| {
                Error::format("tokenizer_config.json", "`chat_template` is neither a text nor a list of named ones")
            })?;
            ChatTemplate::named(named).map(Some)
        }
    }
}

impl Chat {
    /// [`Error::Tokenizer`], [`Error::Template`] or [`Error::Format`] if a file cannot be used.
    pub fn new(files: Files<'_>) -> Result<Chat> {
        let tokenizer = Tokenizer::from_json(files.tokenizer)?;
        let config: Map<String, Value> = match files.tokenizer_config {
            Some(json) => serde_json::from_slice(json).map_err(|e| Error::format("tokenizer_config.json", e))?,
            None => Map::new(),
        };
        let generation: GenerationConfig = match files.generation_config {
            Some(json) => serde_json::from_slice(json).map_err(|e| Error::format("generation_config.json", e))?,
            None => GenerationConfig::default(),
        };
        let source = match files.chat_template {
            Some(bytes) => Some(std::str::from_utf8(bytes).map_err(|e| Error::format("chat_template.jinja", e))?),
            None => None,
        };
        let template = match source {
            Some(source) => Some(ChatTemplate::new(source)?),
            None => configured_template(&config)?,
        };

        // A token is given as its text or as an object with its text.
        let text_of = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
        let special_tokens: Map<String, Value> = config
            .iter()
            .filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| Some((key.clone(), text_of(value)?.into())))
            .collect();

        let mut stop_tokens = match generation.eos_token_id {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Any(ids)) => ids,
        };
        let eos = special_tokens.get("eos_token").and_then(Value::as_str);
        let turn_ends = TURN_ENDS.into_iter().filter(|end| template.as_ref().is_some_and(|t| t.mentions(end)));
        stop_tokens.extend(eos.into_iter().chain(turn_ends).filter_map(|token| tokenizer.token_id(token)));
        stop_tokens.sort_unstable();
        stop_tokens.dedup();

        let neutral = Sampling::default();
        let defaults = match generation.do_sample {
            Some(false) => Sampling::greedy(),
            _ => Sampling {
                temperature: generation.temperature.unwrap_or(neutral.temperature),
                top_k: generation.top_k.unwrap_or(neutral.top_k),
                top_p: generation.top_p.unwrap_or(neutral.top_p),
                seed: neutral.seed,
            },
        };
        defaults.check().map_err(|e| Error::format("generation_config.json", e))?;
        Ok(Chat { tokenizer, template, stop_tokens, special_tokens, defaults, max_tokens: generation.max_new_tokens })
    }

    /// From the files in a pack. [`Error::MissingFile`] if it has no tokenizer.
    pub async fn of_pack(pack: &Pack) -> Result<Chat> {
        let missing = || Error::MissingFile { file: TOKENIZER.to_owned() };
        Chat::new(Files {
            tokenizer: &pack.file(TOKENIZER).await?.ok_or_else(missing)?,
            tokenizer_config: pack.file("tokenizer_config.json").await?.as_deref(),
            generation_config: pack.file("generation_config.json").await?.as_deref(),
            chat_template: pack.file("chat_template.jinja").await?.as_deref(),
        })
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Tokens that end the model's turn, ascending.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// The tokens that open the model's reply to a request. [`Error::Request`] if the request is not valid,
    /// [`Error::Template`] if the model's template refuses it, [`Error::MissingFile`] if there is none.
    pub fn prompt(&self, request: &ChatRequest) -> Result<Vec<u32>> {
        self.tokenizer.encode(&self.prompt_text(request, now())?)
    }

    fn prompt_text(&self, request: &ChatRequest, now: i64) -> Result<String> {
        request.check()?;
        let template =
            self.template.as_ref().ok_or_else(|| Error::MissingFile { file: "chat_template.jinja".to_owned() })?;
        let knows_developer = template.mentions("developer");
        let messages: Vec<Value> = request.messages.iter().map(|m| m.for_template(knows_developer)).collect();
        let mut extra = self.special_tokens.clone();
        extra.extend(request.chat_template_kwargs.clone().unwrap_or_default());
        template.render(Inputs {
            messages: &messages,
            tools: request.usable_tools(),
            add_generation_prompt: true,
            extra: &extra,
            now,
        })
    }

    /// How to sample the reply: as the request says, else as the model's settings do. `entropy` seeds requests that do
    /// not bring a seed.
    pub fn sampling(&self, request: &ChatRequest, entropy: u64) -> Sampling {
        Sampling {
            temperature: request.temperature.unwrap_or(self.defaults.temperature),
            top_k: request.top_k.unwrap_or(self.defaults.top_k),
            top_p: request.top_p.unwrap_or(self.defaults.top_p),
            seed: request.seed.map_or(entropy, |seed| seed as u64),
        }
    }

    /// Reads the reply to a request whose prompt has `prompt_tokens` tokens, in a context with `room` for as many more.
    /// `id` is the reply's.
    pub fn reply(&self, request: &ChatRequest, id: &str, prompt_tokens: usize, room: usize) -> Reply {
        let asked = request.max_completion_tokens.or(request.max_tokens).or(self.max_tokens);
        let rules = Rules {
            stop_tokens: self.stop_tokens.clone(),
            stop_strings: request.stop_strings().to_vec(),
            max_tokens: asked.unwrap_or(usize::MAX).min(room),
            tools: request.usable_tools().unwrap_or_default().to_vec(),
            id: id.to_owned(),
        };
        Reply::new(&self.tokenizer, rules, prompt_tokens)
    }
}

/// Seconds since 1970.
fn now() -> i64 {
    #[cfg(target_arch = "wasm32")]
    return (js_sys::Date::now() / 1000.0) as i64;
    #[cfg(not(target_arch = "wasm32"))]
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_secs() as i64)
}

#[cfg(test)]
mod tests;
