//! Requests that cannot be answered.

use outrider::chat::Chat;
use outrider::chat::openai::{ChatRequest, Message, Role};
use outrider::engine::generate::Next;
use outrider::engine::sampler::{Sampler, Sampling};
use outrider::engine::{Engine, Options, Want};
use outrider::import::open_model;
use outrider::{Error, Result};
use pollster::block_on;

use crate::common::{engine, outrider, repository};
use crate::{assert_error, cpu};

fn concierge(context: usize) -> Engine {
    engine(&repository("models/concierge"), &Options { context: Some(context), ..cpu() })
}

fn generate(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Result<usize> {
    let mut sampler = Sampler::new(Sampling::greedy())?;
    let mut tokens = 0;
    let on_token = |_: &Engine, _| {
        tokens += 1;
        Next::Continue
    };
    block_on(engine.generate(prompt, &mut sampler, max_tokens, on_token))?;
    Ok(tokens)
}

#[test]
fn an_empty_conversation_is_refused() {
    let pack = block_on(open_model(repository("models/concierge").to_str().unwrap())).unwrap();
    let chat = block_on(Chat::of_pack(&pack)).unwrap();
    assert_error(chat.prompt(&ChatRequest::new(vec![])), "request", &["`messages` is empty", "at least one"]);
    let mut request = ChatRequest::new(vec![Message::new(Role::User, "hi")]);
    assert!(chat.prompt(&request).is_ok());
    request.max_tokens = Some(0);
    assert_error(chat.prompt(&request), "request", &["`max_tokens` is 0"]);
}

#[test]
fn a_prompt_must_leave_room_in_the_context() {
    let mut engine = concierge(16);
    assert_error(generate(&mut engine, &[], 4), "request", &["empty"]);
    for length in [16, 17, 500] {
        let numbers = [length.to_string(), "16".to_owned()];
        let error = assert_error(
            generate(&mut engine, &vec![5; length], 4),
            "context",
            &[&numbers[0], &numbers[1], "shorten it or raise the context"],
        );
        assert!(matches!(error, Error::Context { context: 16, .. }));
    }
    // One that leaves room for a single token gives one, and a token beyond the context is never asked for.
    assert_eq!(generate(&mut engine, &[5; 15], 100).unwrap(), 2);
    assert_eq!(generate(&mut engine, &[5; 3], 4).unwrap(), 4);
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let mut engine = concierge(16);
    let result = block_on(engine.forward(&[4096], Want::Last, None));
    assert_error(result, "request", &["4096"]);
    engine.reset().unwrap();
    assert!(block_on(engine.forward(&[4095], Want::Last, None)).is_ok());
}

#[test]
fn the_command_line_says_what_a_request_lacks() {
    let model = repository("models/concierge");
    let model = model.to_str().unwrap();
    let long = "cheap ".repeat(3000);
    let cases: [(&[&str], &[&str]); 6] = [
        (&["hi", "--max-tokens", "0"], &["`max_tokens` is 0"]),
        (&["hi", "--temperature", "3"], &["`temperature` is 3", "between 0 and 2"]),
        (&["hi", "--top-p", "1.5"], &["`top_p` is 1.5"]),
        (&["hi", "--stop", ""], &["`stop`", "empty"]),
        (&["hi", "--context", "4"], &["tokens", "context holds 4"]),
        (&[&long], &["context holds 2048", "shorten it"]),
    ];
    for (args, parts) in cases {
        let out = outrider(&[&["chat", model, "--backend", "cpu", "--cold"], args].concat());
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}", out.stderr);
        assert!(out.stdout.is_empty(), "{}", out.stdout);
        for part in parts {
            assert!(out.stderr.contains(part), "expected `{part}`: {}", out.stderr);
        }
    }
}
