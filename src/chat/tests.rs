use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::openai::{Content, FinishReason, Head, Message, Part, Role, ToolCall};
use super::*;

fn file(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/concierge").join(name)).unwrap()
}

fn concierge() -> &'static Chat {
    static CHAT: LazyLock<Chat> = LazyLock::new(|| {
        Chat::new(Files {
            tokenizer: &file("tokenizer.json"),
            tokenizer_config: Some(&file("tokenizer_config.json")),
            generation_config: Some(&file("generation_config.json")),
            chat_template: Some(&file("chat_template.jinja")),
        })
        .unwrap()
    });
    &CHAT
}

/// A concierge with another template or other settings.
fn variant(template: Option<&str>, config: Value, generation: Value) -> Result<Chat> {
    Chat::new(Files {
        tokenizer: &file("tokenizer.json"),
        tokenizer_config: Some(config.to_string().as_bytes()),
        generation_config: Some(generation.to_string().as_bytes()),
        chat_template: template.map(str::as_bytes),
    })
}

fn request(body: Value) -> Result<ChatRequest> {
    ChatRequest::from_json(&body.to_string())
}

fn ask(extra: Value) -> ChatRequest {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    request(body).unwrap()
}

#[test]
fn a_dialogue_becomes_the_prompt_the_model_was_trained_on() {
    let lines = String::from_utf8(file("dialogues.jsonl")).unwrap();
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let text = line["text"].as_str().unwrap();
        let mut messages = Vec::new();
        for turn in text.split("<|im_start|>").skip(1) {
            let (role, content) = turn.trim_end().strip_suffix("<|im_end|>").unwrap().split_once('\n').unwrap();
            let role = if role == "user" { Role::User } else { Role::Assistant };
            messages.push(Message::new(role, content));
        }
        let mut ids: Vec<u32> = serde_json::from_value(line["ids"].clone()).unwrap();
        ids.extend(encode("<|im_start|>assistant\n"));
        assert_eq!(concierge().prompt(&ChatRequest::new(messages)).unwrap(), ids);
    }
}

#[test]
fn settings_come_from_the_models_files() {
    let chat = concierge();
    assert_eq!(chat.stop_tokens(), [0, 2]);
    let sampling = chat.sampling(&ask(json!({})), 7);
    assert_eq!(sampling, Sampling { temperature: 0.7, top_k: 0, top_p: 0.9, seed: 7 });
    let asked = ask(json!({"temperature": 0, "top_k": 3, "top_p": 0.5, "seed": -1}));
    assert_eq!(chat.sampling(&asked, 7), Sampling { temperature: 0.0, top_k: 3, top_p: 0.5, seed: u64::MAX });

    let one = variant(None, json!({}), json!({"eos_token_id": 2, "do_sample": false, "temperature": 0.7})).unwrap();
    assert_eq!(one.stop_tokens(), [2]);
    assert_eq!(one.sampling(&ask(json!({})), 0).temperature, 0.0);
    assert_eq!(one.prompt(&ask(json!({}))).unwrap_err().code(), "missing_file");

    // Settings that forget the end of a turn: the token's own name, or the template, tells.
    let config = json!({"eos_token": {"content": "<|im_end|>"}});
    assert_eq!(variant(None, config, json!({"eos_token_id": null})).unwrap().stop_tokens(), [2]);
    assert_eq!(variant(Some("<|im_end|>"), json!({}), json!({"eos_token_id": 0})).unwrap().stop_tokens(), [0, 2]);
}

#[test]
fn templates_may_be_in_the_tokenizers_settings() {
    let config = json!({"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": "<|endoftext|>"});
    let text = |chat: &Chat, request| chat.tokenizer().decode(&chat.prompt(&request).unwrap(), false).unwrap();
    assert_eq!(text(&variant(None, config.clone(), json!({})).unwrap(), ask(json!({}))), "<|endoftext|>Hi");
    assert_eq!(text(&variant(Some("file"), config, json!({})).unwrap(), ask(json!({}))), "file");
    let named = json!({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]});
    let chat = variant(None, named, json!({})).unwrap();
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(text(&chat, ask(json!({}))), "a");
    assert_eq!(text(&chat, ask(json!({"tools": tools}))), "b");
    assert_eq!(text(&chat, ask(json!({"tools": tools, "tool_choice": "none"}))), "a");
}

#[test]
fn broken_files_are_typed_errors() {
    let code = |chat: Result<Chat>| chat.unwrap_err().code();
    assert_eq!(code(variant(Some("{% if %}"), json!({}), json!({}))), "template");
    assert_eq!(code(variant(None, json!({"chat_template": 3}), json!({}))), "format");
    assert_eq!(code(variant(None, json!([]), json!({}))), "format");
    assert_eq!(code(variant(None, json!({}), json!({"eos_token_id": "2"}))), "format");
    assert_eq!(code(variant(None, json!({}), json!({"temperature": -1}))), "format");
    assert_eq!(code(Chat::new(Files::default())), "tokenizer");
}

#[test]
fn messages_reach_the_template_in_its_own_shape() {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}});
    let request = request(json!({"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]}));
    let source = "{{ messages | tojson }}{{ extra_option }}";
    let chat = variant(Some(source), json!({}), json!({})).unwrap();
    let mut request = request.unwrap();
    request.chat_template_kwargs = json!({"extra_option": "!"}).as_object().cloned();
    let expected = r#"[{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]}, {"role": "tool", "content": "ok", "tool_call_id": "1"}]!"#;
    assert_eq!(chat.prompt_text(&request, 0).unwrap(), expected);
}

#[test]
fn invalid_requests_say_what_is_wrong() {
    let user = json!([{"role": "user", "content": "Hi"}]);
    let image =
        json!([{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {}}]}]);
    for (body, says) in [
        (json!({}), "messages"),
        (json!({"messages": []}), "`messages` is empty"),
        (json!({"messages": [{"role": "wizard", "content": "Hi"}]}), "wizard"),
        (json!({"messages": [{"content": "Hi"}]}), "role"),
        (json!({"messages": [{"role": "user"}]}), "`messages[0]` has no content"),
        (json!({"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}), "no content"),
        (json!({"messages": [{"role": "user", "content": 3}]}), "`content` must be"),
        (json!({"messages": image}), "`messages[0].content[1]` is of the type `image_url`"),
        (json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}), "has no text"),
        (json!({"messages": user, "temperature": 2.5}), "`temperature` is 2.5"),
        (json!({"messages": user, "temperature": -0.5}), "`temperature` is -0.5"),
        (json!({"messages": user, "top_p": 1.5}), "`top_p` is 1.5"),
        (json!({"messages": user, "top_k": -1}), "-1"),
        (json!({"messages": user, "max_tokens": 0}), "`max_tokens` is 0"),
        (json!({"messages": user, "max_completion_tokens": 0}), "`max_completion_tokens` is 0"),
        (json!({"messages": user, "n": 2}), "`n` is 2"),
        (json!({"messages": user, "stop": ["a", ""]}), "`stop`"),
        (json!({"messages": user, "stop": 3}), "`stop` must be"),
        (json!({"messages": user, "response_format": {"type": "json_object"}}), "`json_object`"),
        (json!({"messages": user, "tool_choice": "required"}), "`tool_choice` is \"required\""),
        (json!({"messages": user, "tools": [{"type": "function"}]}), "`tools[0]`"),
        (json!({"messages": user, "logprobs": true}), "`logprobs` is not supported"),
        (json!({"messages": user, "frequency_penalty": 0.5}), "`frequency_penalty` is not supported"),
    ] {
        let error = request(body.clone()).unwrap_err();
        assert_eq!(error.code(), "request", "{body}");
        assert!(error.to_string().contains(says), "{body}: {error}");
    }
    // What clients send by default is fine, and a request made by hand is checked before it is used.
    ask(json!({"n": 1, "stream": null, "user": "me", "logprobs": false, "presence_penalty": 0, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "stop": null}));
    assert_eq!(concierge().prompt(&ChatRequest::default()).unwrap_err().code(), "request");
}

/// Pushes tokens until the reply is over; then ends it, if it is not.
fn run(mut reply: Reply, tokens: &[u32]) -> (String, Reply) {
    let mut text = String::new();
    for &token in tokens {
        text += &reply.push(token).unwrap().content.unwrap_or_default();
    }
    text += &reply.end(FinishReason::Length).unwrap().content.unwrap_or_default();
    assert_eq!(reply.message().text(), text, "the deltas make the message");
    (text, reply)
}

fn encode(text: &str) -> Vec<u32> {
    concierge().tokenizer().encode(text).unwrap()
}

#[test]
fn a_reply_ends_with_its_stop_token() {
    let tokens = encode("Sure, for two?<|im_end|>\nmore");
    let (text, reply) = run(concierge().reply(&ask(json!({})), "x", 10, 100), &tokens);
    assert_eq!((text.as_str(), reply.finish_reason()), ("Sure, for two?", Some(FinishReason::Stop)));
    let generated = tokens.iter().position(|&t| t == 2).unwrap() + 1;
    assert_eq!(reply.usage(), openai::Usage::new(10, generated));
}

#[test]
fn a_reply_ends_at_its_longest() {
    let tokens = encode("one two three four five");
    for (asked, room, expected) in
        [(json!({"max_tokens": 3}), 100, 3), (json!({}), 2, 2), (json!({"max_tokens": 9}), 1, 1)]
    {
        let (text, reply) = run(concierge().reply(&ask(asked), "x", 0, room), &tokens);
        assert_eq!(text, concierge().tokenizer().decode(&tokens[..expected], true).unwrap());
        assert_eq!(reply.finish_reason(), Some(FinishReason::Length));
        assert_eq!(reply.usage().completion_tokens, expected);
    }
    // The model's own end as the last token allowed is an end, not a cut.
    let (_, reply) = run(concierge().reply(&ask(json!({"max_tokens": 2})), "x", 0, 9), &[500, 2]);
    assert_eq!(reply.finish_reason(), Some(FinishReason::Stop));
    // As long as the model's settings say.
    let (_, reply) = run(concierge().reply(&ask(json!({})), "x", 0, 1000), &vec![500; 300]);
    assert_eq!(reply.usage().completion_tokens, 256);
}

#[test]
fn a_reply_cut_by_the_caller_gives_out_what_was_held() {
    let request = ask(json!({"stop": "five five"}));
    let mut reply = concierge().reply(&request, "x", 0, 100);
    for token in encode("four five") {
        reply.push(token).unwrap();
    }
    assert_eq!(reply.message().text(), "four ");
    assert_eq!(reply.end(FinishReason::Stop).unwrap().content.unwrap(), "five");
    assert!(reply.end(FinishReason::Length).unwrap().is_empty());
    assert_eq!(reply.finish_reason(), Some(FinishReason::Stop));
}

#[test]
fn tool_calls_are_taken_out_only_if_tools_were_given() {
    let text = "Let me look.\n<tool_call>\n{\"name\": \"find\", \"arguments\": {\"city\": \"San José\"}}\n</tool_call>\n\
                <tool_call>{\"name\": \"find\", \"arguments\": {}}</tool_call>";
    let mut tokens = encode(text);
    let (plain, _) = run(concierge().reply(&ask(json!({})), "x", 0, 1000), &tokens);
    assert_eq!(plain, text);

    tokens.push(2);
    let request = ask(json!({"tools": [{"type": "function", "function": {"name": "find"}}]}));
    let mut reply = concierge().reply(&request, "r1", 0, 1000);
    let calls: Vec<ToolCall> =
        tokens.iter().flat_map(|&t| reply.push(t).unwrap().tool_calls.unwrap_or_default()).collect();
    assert_eq!(
        calls.iter().map(|c| (c.index, c.id.as_str())).collect::<Vec<_>>(),
        [(Some(0), "call_r1_0"), (Some(1), "call_r1_1")]
    );
    assert_eq!(reply.finish_reason(), Some(FinishReason::ToolCalls));
    let message = serde_json::to_value(reply.message()).unwrap();
    assert_eq!(message["content"], "Let me look.");
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"city\":\"San José\"}");
    // The reply goes back into a conversation as it is.
    let again: Message = serde_json::from_value(message).unwrap();
    assert_eq!(again, reply.message());
}

#[test]
fn replies_have_openais_shape() {
    let head = Head { id: "chatcmpl-1".into(), created: 1, model: "concierge".into() };
    let (_, reply) = run(concierge().reply(&ask(json!({})), "x", 4, 9), &[2]);
    let whole = head.completion(reply.message(), reply.finish_reason().unwrap(), reply.usage().with_cached(3));
    let whole = serde_json::to_value(whole).unwrap();
    assert_eq!(
        whole,
        json!({"id": "chatcmpl-1", "created": 1, "model": "concierge", "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "", "refusal": null},
                "finish_reason": "stop", "logprobs": null}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 3}}})
    );
    // It goes back into a conversation as it is.
    let again: Message = serde_json::from_value(whole["choices"][0]["message"].clone()).unwrap();
    assert_eq!(again, reply.message());
    let first = serde_json::to_value(head.chunk(openai::Delta::start(), None)).unwrap();
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(
        first["choices"],
        json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}])
    );
    let last = serde_json::to_value(head.chunk(openai::Delta::default(), Some(FinishReason::ToolCalls))).unwrap();
    assert_eq!(last["choices"], json!([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]));
    let usage = serde_json::to_value(head.usage_chunk(reply.usage())).unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["total_tokens"]), (&json!([]), &json!(5)));
    let part = Part { kind: "text".into(), text: Some("a".into()) };
    let message = Message { content: Some(Content::Parts(vec![part.clone(), part])), ..Message::new(Role::User, "") };
    assert_eq!(message.text(), "aa");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Text cut into random tokens (pieces encoded one by one), against the same text searched as a whole.
    #[test]
    fn a_reply_is_the_text_up_to_its_first_stop(
        pieces in prop::collection::vec("[a-c é漢🏝]{0,6}", 0..12),
        stops in prop::collection::vec("[a-c é漢🏝]{1,4}", 0..3),
    ) {
        let text = pieces.concat();
        let at_end = |end: usize| stops.iter().filter(|s| text[..end].ends_with(*s)).map(|s| end - s.len()).min();
        let expected = text.char_indices().map(|(i, c)| i + c.len_utf8()).find_map(at_end);
        let tokens: Vec<u32> = pieces.iter().flat_map(|piece| encode(piece)).collect();
        let (got, reply) = run(concierge().reply(&ask(json!({"stop": stops, "max_tokens": 10_000})), "x", 0, 10_000), &tokens);
        prop_assert_eq!(&got, &text[..expected.unwrap_or(text.len())]);
        let reason = if expected.is_some() { FinishReason::Stop } else { FinishReason::Length };
        prop_assert_eq!(reply.finish_reason(), Some(reason));
    }
}
