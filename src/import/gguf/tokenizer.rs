//! From a file's metadata to the files that chatting needs.
//!
//! GGUF has vocabulary and merges, but of how text is split before merging only a name, which llama.cpp knows the meaning
//! of; so does [`SPLITS`].

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use super::metadata::{Metadata, Texts};
use crate::chat::TOKENIZER;
use crate::error::{Error, Result};
use crate::model::tokenizer::Tokenizer;

const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// How SentencePiece writes a space.
const SPACE: &str = "\u{2581}";
/// Bytes of a token that merges lead to at most.
const MAX_MERGED: usize = 1024;

/// GPT-2's own split; the rest of this family begins with it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How text becomes the pieces that merges work in.
struct Split {
    names: &'static [&'static str],
    /// Each splits further what the one before it left.
    patterns: &'static [&'static str],
    /// Whether text is put into Unicode's form C first.
    nfc: bool,
    /// Whether a piece that is a token by itself is not merged.
    ignore_merges: bool,
}

const SPLITS: [Split; 7] = [
    Split { names: &["qwen2"], patterns: &[QWEN2], nfc: true, ignore_merges: false },
    Split { names: &["qwen35"], patterns: &[QWEN35], nfc: true, ignore_merges: false },
    Split { names: &["gpt-2"], patterns: &[GPT2], nfc: false, ignore_merges: false },
    Split { names: &["olmo"], patterns: &[GPT2], nfc: true, ignore_merges: false },
    Split { names: &["llama-bpe", "llama3", "llama-v3", "lfm2"], patterns: &[LLAMA3], nfc: false, ignore_merges: true },
    Split {
        names: &["smollm", "starcoder", "refact", "codeshell"],
        patterns: &[DIGIT, GPT2],
        nfc: false,
        ignore_merges: false,
    },
    Split { names: &["gpt-4o"], patterns: &[GPT4O], nfc: false, ignore_merges: false },
];

/// The files of a model with `vocab` embeddings, by name; none if it has no vocabulary.
///
/// # Errors
/// [`Error::Tokenizer`] for kinds of vocabularies that are not supported and ones that are not consistent.
pub fn files(metadata: &Metadata, vocab: usize) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    match metadata.text("tokenizer.ggml.model")? {
        None | Some("none" | "no_vocab") => {}
        Some(kind @ ("gpt2" | "llama")) => {
            let vocabulary = Vocabulary::read(metadata, vocab)?;
            let tokenizer = match kind {
                "gpt2" => vocabulary.byte_level(metadata)?,
                _ => vocabulary.sentence_piece(metadata)?,
            };
            let tokenizer = json_bytes(&tokenizer);
            Tokenizer::from_json(&tokenizer)?;
            files.insert(TOKENIZER.to_owned(), tokenizer);
            files.insert("tokenizer_config.json".to_owned(), json_bytes(&vocabulary.settings(metadata)?));
            files.insert("generation_config.json".to_owned(), json_bytes(&vocabulary.generation(metadata)?));
        }
        Some(other) => {
            let (shown, supported) = (other.escape_default(), "gpt2 (byte-level BPE) and llama (SentencePiece BPE)");
            return Err(Error::Tokenizer(format!("its kind `{shown}` is not supported; supported are {supported}")));
        }
    }
    if let Some(template) = metadata.text("tokenizer.chat_template")? {
        files.insert("chat_template.jinja".to_owned(), template.as_bytes().to_vec());
    }
    Ok(files)
}

fn json_bytes(value: &Value) -> Vec<u8> {
    serde_json::to_vec(value).expect("a JSON value")
}

struct Vocabulary<'a> {
    tokens: &'a Texts,
    /// Of each token, if there are any.
    kinds: Vec<i64>,
    special: BTreeMap<&'static str, usize>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata, vocab: usize) -> Result<Vocabulary<'a>> {
        let tokens = metadata.needed("tokenizer.ggml.tokens", metadata.texts("tokenizer.ggml.tokens")?)?;
        if tokens.len() > vocab {
            let reason = format!("it has {} tokens, and the model embeddings of {vocab}", tokens.len());
            return Err(Error::Tokenizer(reason));
        }
        let kinds = metadata.numbers("tokenizer.ggml.token_type")?.unwrap_or_default();
        let kinds: Vec<i64> = kinds.iter().map(|kind| kind.signed().unwrap_or(NORMAL)).collect();
        if !kinds.is_empty() && kinds.len() != tokens.len() {
            let reason = format!("it has {} tokens, and kinds of {}", tokens.len(), kinds.len());
            return Err(Error::Tokenizer(reason));
        }
        let mut special = BTreeMap::new();
        for name in ["bos", "eos", "eot", "eom", "padding", "unknown"] {
            let key = format!("tokenizer.ggml.{name}_token_id");
            if let Some(id) = metadata.size(&key)? {
                if id >= tokens.len() {
                    return Err(Error::Tokenizer(format!("`{key}` is {id}, and it has {} tokens", tokens.len())));
                }
                special.insert(name, id);
            }
        }
        Ok(Vocabulary { tokens, kinds, special })
    }

    /// BPE over bytes, by merges.
    fn byte_level(&self, metadata: &Metadata) -> Result<Value> {
        let pre = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
        let Some(split) = SPLITS.iter().find(|split| split.names.contains(&pre)) else {
            let supported = SPLITS.iter().flat_map(|split| split.names).copied().collect::<Vec<_>>().join(", ");
            let shown = pre.escape_default();
            return Err(Error::Tokenizer(format!(
                "its way to split text, `{shown}`, is not known; known are {supported}"
            )));
        };
        let merges = metadata.needed("tokenizer.ggml.merges", metadata.texts("tokenizer.ggml.merges")?)?;
        let pair = |merge: &str| {
            // The first of the two is a token and may itself begin with a space.
            let second = merge.char_indices().nth(1).map_or(merge.len(), |(at, _)| at);
            let space = merge[second..].find(' ').map(|at| second + at);
            match space {
                Some(at) => Ok(json!([merge[..at], merge[at + 1..]])),
                None => Err(Error::Tokenizer(format!("its merge `{}` is no pair", merge.escape_default()))),
            }
        };
        let merges = merges.iter().map(pair).collect::<Result<Vec<_>>>()?;
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
        });
        let splits = split.patterns.iter().map(
            |pattern| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}),
        );
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.all_added(),
            "normalizer": if split.nfc { json!({"type": "NFC"}) } else { Value::Null },
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": splits.chain([byte_level.clone()]).collect::<Vec<_>>(),
            },
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": split.ignore_merges,
                "vocab": self.vocab(),
                "merges": merges,
            },
        }))
    }

    /// BPE over characters, by scores: of all neighbours that make a token, those merge whose token has the highest. Spaces
    /// are written as U+2581, and characters that are no tokens as bytes.
    fn sentence_piece(&self, metadata: &Metadata) -> Result<Value> {
        let scores = metadata.needed("tokenizer.ggml.scores", metadata.numbers("tokenizer.ggml.scores")?)?;
        let scores: Vec<f64> = scores.iter().map(|score| score.float().unwrap_or(0.0)).collect();
        if scores.len() != self.tokens.len() {
            let reason = format!("it has {} tokens, and scores of {}", self.tokens.len(), scores.len());
            return Err(Error::Tokenizer(reason));
        }
        let mergeable = |id: usize| matches!(self.kinds.get(id).copied().unwrap_or(NORMAL), NORMAL | USER_DEFINED);
        let tokens = || self.tokens.iter().enumerate().filter(|(id, _)| mergeable(*id));
        let known: HashSet<&str> = tokens().map(|(_, token)| token).collect();
        let mut merges = Vec::new();
        for (id, token) in tokens() {
            if token.len() > MAX_MERGED {
                let reason = format!("its token {id} has {} bytes, more than {MAX_MERGED}", token.len());
                return Err(Error::Tokenizer(reason));
            }
            let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let splits = splits.filter(|(a, b)| known.contains(a) && known.contains(b));
            merges.extend(splits.map(|(a, b)| (scores[id], id, [a, b])));
        }
        // The higher score first; of the same score, the token that comes first in the vocabulary.
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let merges: Vec<[&str; 2]> = merges.into_iter().map(|(.., pair)| pair).collect();
        let unknown = self.special.get("unknown").map(|id| self.tokens.get(*id));
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let before = if prefix { vec![json!({"type": "Prepend", "prepend": SPACE}), spaces] } else { vec![spaces] };
        let mut after = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            after.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.all_added(),
            "normalizer": {"type": "Sequence", "normalizers": before},
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": after},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": true,
                "ignore_merges": false,
                "vocab": self.vocab(),
                "merges": merges,
            },
        }))
    }

    fn vocab(&self) -> Map<String, Value> {
        self.tokens.iter().zip(0u32..).map(|(token, id)| (token.to_owned(), id.into())).collect()
    }

    fn all_added(&self) -> Vec<Value> {
        (0..self.tokens.len()).filter_map(|id| self.added(id)).collect()
    }

    /// A token that is found in text before anything is split.
    fn added(&self, id: usize) -> Option<Value> {
        let kind = self.kinds.get(id).copied().unwrap_or(NORMAL);
        let ends = ["bos", "eos", "eot", "eom"].iter().any(|name| self.special.get(name) == Some(&id));
        let special = ends || matches!(kind, CONTROL | UNKNOWN);
        (special || kind == USER_DEFINED).then(|| {
            json!({
                "id": id, "content": self.tokens.get(id), "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            })
        })
    }

    fn settings(&self, metadata: &Metadata) -> Result<Value> {
        let mut settings = Map::new();
        for (name, key) in
            [("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")]
        {
            if let Some(id) = self.special.get(name) {
                settings.insert(key.to_owned(), self.tokens.get(*id).into());
            }
        }
        if let Some(add) = metadata.bool("tokenizer.ggml.add_bos_token")? {
            settings.insert("add_bos_token".to_owned(), add.into());
        }
        Ok(settings.into())
    }

    fn generation(&self, metadata: &Metadata) -> Result<Value> {
        let mut settings = Map::new();
        let ends: Vec<usize> =
            ["eos", "eot", "eom"].iter().filter_map(|name| self.special.get(name).copied()).collect();
        settings.insert("eos_token_id".to_owned(), ends.into());
        if let Some(temperature) = metadata.float("general.sampling.temp")? {
            settings.insert("temperature".to_owned(), temperature.into());
        }
        if let Some(top_k) = metadata.size("general.sampling.top_k")? {
            settings.insert("top_k".to_owned(), top_k.into());
        }
        if let Some(top_p) = metadata.float("general.sampling.top_p")? {
            settings.insert("top_p".to_owned(), top_p.into());
        }
        Ok(settings.into())
    }
}
