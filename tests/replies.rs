//! What the bundled model answers, greedily, on the CPU: the record that the browser suite holds the package to. Set
//! `OUTRIDER_BLESS=1` to write it anew.

mod common;

use std::path::Path;

use common::engine;
use outrider::chat::Chat;
use outrider::chat::openai::{ChatRequest, Message, Role};
use outrider::engine::{BackendChoice, Options, Want, sampler};
use serde::{Deserialize, Serialize};

const TOKENS: usize = 32;

/// On these the two best logits are never closer than [`MARGIN`], so that another backend's rounding changes nothing.
const PROMPTS: [&str; 12] = [
    "Can you find me a restaurant in San Jose?",
    "Book a table for two in San Jose",
    "I need a hotel in London for two nights.",
    "What will the weather be like in Seattle tomorrow?",
    "Play me some rock music, please.",
    "I want to rent a car in Paris on March 3rd.",
    "Find me a dentist in Oakland.",
    "I'd like to see a movie tonight.",
    "How much money is in my savings account?",
    "Please transfer 200 dollars to Mary.",
    "I am looking for a flight from New York to Chicago.",
    "Are there any jazz concerts in San Francisco this weekend?",
];
const MARGIN: f32 = 1e-2;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Answer {
    prompt: String,
    /// The one that ended the turn included.
    token_ids: Vec<u32>,
    text: String,
}

#[test]
fn the_bundled_model_answers_as_recorded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let options = Options { backend: BackendChoice::Cpu, ..Options::default() };
    let mut engine = engine(&root.join("models/concierge"), &options);
    let chat = pollster::block_on(Chat::of_pack(engine.pack())).unwrap();
    let mut answers = Vec::new();
    for prompt in PROMPTS {
        let request = ChatRequest {
            temperature: Some(0.0),
            max_tokens: Some(TOKENS),
            ..ChatRequest::new(vec![Message::new(Role::User, prompt)])
        };
        let mut input = chat.prompt(&request).unwrap();
        let mut reply = chat.reply(&request, "", input.len(), TOKENS);
        let (mut token_ids, mut margin) = (Vec::new(), f32::MAX);
        engine.reset().unwrap();
        while reply.finish_reason().is_none() {
            let logits = pollster::block_on(engine.forward(&input, Want::Last, None)).unwrap();
            let best = sampler::argmax(&logits).unwrap();
            let second = (0..).zip(&logits).filter(|(id, _)| *id != best).map(|(_, l)| *l).fold(f32::MIN, f32::max);
            margin = margin.min(logits[best as usize] - second);
            token_ids.push(best);
            reply.push(best).unwrap();
            input = vec![best];
        }
        assert!(margin >= MARGIN, "{prompt}: margin {margin}");
        answers.push(Answer { prompt: prompt.to_owned(), token_ids, text: reply.message().text() });
    }
    let record = root.join("tests/data/concierge/replies.json");
    if std::env::var_os("OUTRIDER_BLESS").is_some() {
        std::fs::write(&record, serde_json::to_string_pretty(&answers).unwrap() + "\n").unwrap();
    }
    let recorded: Vec<Answer> = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    assert_eq!(answers, recorded);
}
