use std::path::Path;

use proptest::prelude::*;

use super::*;

fn concierge() -> &'static Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/concierge/tokenizer.json");
        Tokenizer::from_json(&std::fs::read(file).unwrap()).unwrap()
    });
    &TOKENIZER
}

/// Words begin with `▁`, and bytes outside the vocabulary are spelt `<0x..>`, as in SentencePiece models.
fn byte_fallback() -> &'static Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let words = ["<unk>", "▁", "▁hi", "hi", "é", "▁é", "a", "b"].map(str::to_owned);
        let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
        let vocab: serde_json::Map<_, _> =
            words.into_iter().chain(bytes).enumerate().map(|(id, token)| (token, id.into())).collect();
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [{"id": 0, "content": "<unk>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocab,
                "merges": []},
        });
        Tokenizer::from_json(json.to_string().as_bytes()).unwrap()
    });
    &TOKENIZER
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut stream = tokenizer.stream(skip_special);
    let mut pieces: Vec<_> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    assert_eq!(stream.finish().unwrap(), "", "a stream is empty once finished");
    pieces
}

#[test]
fn dialogues_encode_as_they_were_trained() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/concierge/dialogues.jsonl");
    for line in std::fs::read_to_string(file).unwrap().lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = line["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(line["ids"].clone()).unwrap();
        assert_eq!(concierge().encode(text).unwrap(), ids);
        assert_eq!(concierge().decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn special_tokens_are_recognised_and_none_added() {
    let t = concierge();
    assert!(t.encode("").unwrap().is_empty());
    assert_eq!(t.encode("<|im_end|><|endoftext|>").unwrap(), [2, 0]);
    assert_eq!(t.decode(&[2, 0], false).unwrap(), "<|im_end|><|endoftext|>");
    assert_eq!(t.decode(&[2, 0], true).unwrap(), "");
    assert_eq!((t.token_id("<|im_end|>"), t.token_id("no such token")), (Some(2), None));
    assert_eq!(t.vocab_size(), 4096);
}

#[test]
fn truncation_and_padding_in_the_file_are_ignored() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/concierge/tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    json["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let text = "A table for two in San Jose, please";
    let t = Tokenizer::from_json(json.to_string().as_bytes()).unwrap();
    assert_eq!(t.encode(text).unwrap(), concierge().encode(text).unwrap());
}

#[test]
fn a_broken_file_is_a_typed_error() {
    for json in ["", "{}", "[1, 2]", "not json"] {
        assert_eq!(Tokenizer::from_json(json.as_bytes()).unwrap_err().code(), "tokenizer");
    }
}

#[test]
fn characters_come_out_whole_with_their_last_byte() {
    for t in [concierge(), byte_fallback()] {
        let ids = t.encode("é漢🏝").unwrap();
        let pieces = streamed(t, &ids, true);
        assert!(ids.len() > 3, "the vocabulary has these characters only as bytes");
        assert_eq!(pieces.concat(), "é漢🏝");
        let whole = ["", "é", "漢", "🏝"];
        assert!(pieces.iter().all(|p| whole.contains(&p.as_str())), "{pieces:?}");
        assert_eq!(pieces.last().unwrap(), "");
    }
}

#[test]
fn a_character_cut_off_is_replaced_only_at_the_end() {
    for t in [concierge(), byte_fallback()] {
        let ids = t.encode("a🏝").unwrap();
        let pieces = streamed(t, &ids[..ids.len() - 1], true);
        let (last, before) = pieces.split_last().unwrap();
        assert_eq!(before.concat(), "a");
        assert!(!last.is_empty() && last.chars().all(|c| c == char::REPLACEMENT_CHARACTER), "{last:?}");
    }
}

#[test]
fn bytes_that_can_never_be_valid_do_not_hold_text_back() {
    let t = byte_fallback();
    let byte = |b: u8| t.token_id(&format!("<0x{b:02X}>")).unwrap();
    let mut stream = t.stream(true);
    let out: String = std::iter::repeat_n(byte(0xFF), 1000).map(|id| stream.push(id).unwrap()).collect();
    assert!(out.chars().count() > 990);
    assert_eq!(stream.push(t.token_id("▁hi").unwrap()).unwrap().trim_start_matches('\u{FFFD}'), " hi");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn text_survives_a_stream(text in "\\PC{0,40}|[ \\n\u{301}é漢🏝👩‍🚀a-z\u{FFFD}]{0,40}") {
        let ids = concierge().encode(&text).unwrap();
        let pieces = streamed(concierge(), &ids, false);
        prop_assert_eq!(pieces.concat(), &text[..]);
        prop_assert_eq!(pieces.last().unwrap(), "");
    }

    #[test]
    fn any_tokens_stream_as_they_decode(ids in prop::collection::vec(0u32..4100, 0..60), skip in any::<bool>()) {
        let pieces = streamed(concierge(), &ids, skip);
        prop_assert_eq!(pieces.concat(), concierge().decode(&ids, skip).unwrap());
    }

    #[test]
    fn text_survives_a_stream_of_fallback_bytes(text in "[ hié漢🏝ab]{0,40}") {
        let ids = byte_fallback().encode(&text).unwrap();
        let pieces = streamed(byte_fallback(), &ids, true);
        prop_assert_eq!(pieces.concat(), &text[..]);
    }
}
