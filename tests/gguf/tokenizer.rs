//! Tokenizers made from metadata, against the model's own.

use std::collections::BTreeMap;
use std::rc::Rc;

use outrider::chat::{Chat, Files};
use outrider::import::{Gguf, Weights};
use outrider::model::tokenizer::Tokenizer;
use pollster::block_on;
use serde_json::{Value as Json, json};

use crate::checkpoints::contents;
use crate::common::repository;
use crate::gguf::{F32, File, Tensor, Value, qwen35moe};

/// Latin, Greek, Cyrillic, Arabic, Devanagari, Thai, Chinese, Japanese and Korean, digits, emoji, spaces and code.
const TEXTS: [&str; 6] = [
    "Can't you'll WE'VE book 12345 tables?  Yes,\n\n\tat 7:30pm — naïve café Ångström.",
    "Γειά σου Κόσμε, привет мир, مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया, สวัสดีชาวโลก",
    "你好，世界！今天是2026年12月3日。こんにちは世界 안녕하세요 세계",
    "👩‍👩‍👧 🇺🇳 ½ ² Ⅷ \u{a0}\u{2003}x\r\n\r\ny   ",
    "fn main() { println!(\"{:?}\", vec![0u8; 1_000]); } // <|im_end|> <|im_start|>user",
];

fn data(name: &str) -> Vec<u8> {
    std::fs::read(repository("tests/data/concierge").join(name)).unwrap()
}

/// A file with a vocabulary, and embeddings for it.
fn file(pre: &str, tokens: Vec<String>, kinds: Vec<i32>, merges: Vec<String>) -> File {
    let (tensors, config) = contents();
    let mut file = qwen35moe(&tensors, &config, F32);
    let dims = vec![1, tokens.len() as u64];
    let bytes = vec![0; 4 * tokens.len()];
    file.tensors = vec![Tensor { name: "token_embd.weight".into(), dims, kind: F32, bytes, offset: None }];
    file.set("tokenizer.ggml.model", Value::text("gpt2"));
    file.set("tokenizer.ggml.pre", Value::text(pre));
    file.set("tokenizer.ggml.tokens", Value::Texts(tokens));
    file.set("tokenizer.ggml.token_type", Value::I32s(kinds));
    file.set("tokenizer.ggml.merges", Value::Texts(merges));
    file
}

fn carried(file: &File) -> BTreeMap<String, Vec<u8>> {
    block_on(Gguf::open(Rc::new(file.flash()), "m.gguf")).unwrap().carried().unwrap()
}

/// The trained model's tokenizer as metadata.
fn concierge() -> File {
    let json: Json = serde_json::from_slice(&data("tokenizer.json")).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    vocab.iter().for_each(|(token, id)| tokens[id.as_u64().unwrap() as usize] = token.clone());
    let kinds = tokens.iter().map(|token| if token.starts_with("<|") { 3 } else { 1 }).collect();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    let merges = merges.map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())).collect();
    let mut file = file("qwen2", tokens, kinds, merges);
    file.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    file.set("tokenizer.ggml.padding_token_id", Value::U32(0));
    let template = String::from_utf8(data("chat_template.jinja")).unwrap();
    file.set("tokenizer.chat_template", Value::Text(template));
    file
}

#[test]
fn ids_are_those_of_the_models_own_tokenizer() {
    let reference = Tokenizer::from_json(&data("tokenizer.json")).unwrap();
    let made = Tokenizer::from_json(&carried(&concierge())["tokenizer.json"]).unwrap();
    assert_eq!(made.vocab_size(), reference.vocab_size());
    let mut tokens = 0;
    for line in String::from_utf8(data("dialogues.jsonl")).unwrap().lines() {
        let line: Json = serde_json::from_str(line).unwrap();
        let ids: Vec<u32> = line["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let text = line["text"].as_str().unwrap();
        assert_eq!(made.encode(text).unwrap(), ids, "{text}");
        tokens += ids.len();
    }
    assert!(tokens > 10_000);
    for text in TEXTS {
        let ids = made.encode(text).unwrap();
        assert_eq!(ids, reference.encode(text).unwrap(), "{text}");
        assert_eq!(made.decode(&ids, false).unwrap(), text);
        assert_eq!(made.decode(&ids, true).unwrap(), reference.decode(&ids, true).unwrap());
    }
}

/// What is carried is enough to chat: the template renders, and the reply ends where the model ends it.
#[test]
fn chats_are_those_of_the_models_own_files() {
    let files = carried(&concierge());
    let chat = |of: &dyn Fn(&str) -> Vec<u8>| {
        Chat::new(Files {
            tokenizer: &of("tokenizer.json"),
            tokenizer_config: Some(&of("tokenizer_config.json")),
            generation_config: Some(&of("generation_config.json")),
            chat_template: Some(&of("chat_template.jinja")),
        })
        .unwrap()
    };
    let (made, own) = (chat(&|name| files[name].clone()), chat(&data));
    let request = json!({"messages": [{"role": "user", "content": "Can you find me a table?"}]});
    let request = serde_json::from_value(request).unwrap();
    assert_eq!(made.prompt(&request).unwrap(), own.prompt(&request).unwrap());
    assert_eq!(made.stop_tokens(), [2]);
}

/// The printable character that a byte-level vocabulary writes a byte as, for bytes that are none themselves.
fn pieces(bytes: &[u8]) -> Vec<String> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others: Vec<u8> = (0..=255u8).filter(|b| !printable(b)).collect();
    let of = |b: &u8| match others.iter().position(|o| o == b) {
        Some(at) => char::from_u32(0x100 + at as u32).unwrap(),
        None => char::from(*b),
    };
    bytes.iter().map(|b| of(b).to_string()).collect()
}

/// How a text is split shows where a merge that would cross a split is not made.
#[test]
fn names_of_splits_mean_what_they_mean() {
    let mut tokens = pieces(&(0..=255).collect::<Vec<u8>>());
    let mut merges = Vec::new();
    let mut merge = |parts: &[String]| {
        for end in 1..parts.len() {
            merges.push(format!("{} {}", parts[..end].concat(), parts[end]));
            tokens.push(parts[..=end].concat());
        }
    };
    merge(&pieces(b"1234"));
    // A Thai letter and the mark on it, which no composed character stands for.
    merge(&pieces("ก็".as_bytes()));
    // e and an accent, which form C composes.
    merge(&pieces("\u{e9}".as_bytes()));
    // A token that no merge leads to.
    tokens.push("abc".to_owned());
    let kinds = vec![1; tokens.len()];
    let count = |pre: &str, text: &str| {
        let files = carried(&file(pre, tokens.clone(), kinds.clone(), merges.clone()));
        Tokenizer::from_json(&files["tokenizer.json"]).unwrap().encode(text).unwrap().len()
    };
    for (pre, digits, marked, decomposed, whole) in [
        ("gpt-2", 1, 4, 3, 3),
        ("olmo", 1, 4, 1, 3),
        ("llama-bpe", 2, 4, 3, 1),
        ("llama3", 2, 4, 3, 1),
        ("smollm", 4, 4, 3, 3),
        ("qwen2", 4, 4, 1, 3),
        ("qwen35", 4, 1, 1, 3),
        ("gpt-4o", 2, 1, 3, 3),
    ] {
        let counts = [count(pre, "1234"), count(pre, "ก็"), count(pre, "e\u{301}"), count(pre, "abc")];
        assert_eq!(counts, [digits, marked, decomposed, whole], "{pre}");
    }
}

/// User-defined tokens are found in text and shown; control tokens are found and are not; others are text.
#[test]
fn kinds_of_tokens_are_kept() {
    let mut tokens = pieces(&(0..=255).collect::<Vec<u8>>());
    tokens.extend(["<think>", "<end>", "<odd>"].map(str::to_owned));
    let mut kinds = vec![1; 256];
    kinds.extend([4, 3, 5]);
    let tokenizer = Tokenizer::from_json(&carried(&file("qwen35", tokens, kinds, vec![]))["tokenizer.json"]).unwrap();
    let ids = tokenizer.encode("a<think><end><odd>").unwrap();
    assert_eq!(ids[..3], [97, 256, 257]);
    assert_eq!(ids.len(), 3 + "<odd>".len());
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "a<think><odd>");
    assert_eq!(tokenizer.vocab_size(), 259);
}

/// What SentencePiece does: of all neighbours that make a token, the ones with the highest score merge, the leftmost first.
fn merged(text: &str, vocab: &BTreeMap<String, (u32, f32)>) -> Vec<u32> {
    let spaced = format!("\u{2581}{}", text.replace(' ', "\u{2581}"));
    let mut parts: Vec<String> = spaced.chars().map(String::from).collect();
    loop {
        let score = |i: usize| vocab.get(&format!("{}{}", parts[i], parts[i + 1])).map(|(_, score)| *score);
        let mut best: Option<(usize, f32)> = None;
        for (at, score) in (0..parts.len() - 1).filter_map(|i| Some((i, score(i)?))) {
            if best.is_none_or(|(_, highest)| score > highest) {
                best = Some((at, score));
            }
        }
        let Some((at, _)) = best else { break };
        let second = parts.remove(at + 1);
        parts[at] += &second;
    }
    let bytes = |part: &String| part.bytes().map(|b| vocab[&format!("<0x{b:02X}>")].0).collect::<Vec<_>>();
    parts.iter().flat_map(|part| vocab.get(part).map_or_else(|| bytes(part), |(id, _)| vec![*id])).collect()
}

#[test]
fn scores_merge_as_sentencepiece_does() {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    let mut kinds = vec![2, 3, 3];
    tokens.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
    kinds.extend([6; 256]);
    let first = tokens.len();
    // The frequent ones first, which have the higher scores.
    let pieces = "▁the ▁then ▁there heather ▁t he er ther en ▁▁ th re her eat at hea ▁th the ere ▁ t h e n r a é";
    tokens.extend(pieces.split(' ').map(str::to_owned));
    kinds.extend(vec![1; tokens.len() - first]);
    let scores: Vec<f32> = (0..tokens.len()).map(|id| if id < first { 0.0 } else { -((id - first) as f32) }).collect();
    let entry = |id: usize| (tokens[id].clone(), (id as u32, scores[id]));
    let vocab: BTreeMap<_, _> = (3..tokens.len()).map(entry).collect();

    let mut file = file("default", tokens.clone(), kinds, vec![]);
    file.set("tokenizer.ggml.model", Value::text("llama"));
    let bytes: Vec<u8> = scores.iter().flat_map(|s| s.to_le_bytes()).collect();
    let head = [&6u32.to_le_bytes()[..], &(scores.len() as u64).to_le_bytes()].concat();
    file.set("tokenizer.ggml.scores", Value::Raw(9, [head, bytes].concat()));
    for (name, id) in [("unknown", 0), ("bos", 1), ("eos", 2)] {
        file.set(&format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
    }
    let tokenizer = Tokenizer::from_json(&carried(&file)["tokenizer.json"]).unwrap();
    for text in ["the heather there", "then  there the", "ether, neé 你 eat", "rarer hen", "thethethe"] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, merged(text, &vocab), "{text}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
    assert_eq!(tokenizer.encode("</s>").unwrap(), [2]);
}
