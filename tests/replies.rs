//! What the bundled model answers, greedily, on the CPU: the record that the browser suite holds the package to, and the
//! GPU in f16. Set `OUTRIDER_BLESS=1` to write it anew.

mod common;

use std::path::{Path, PathBuf};

use common::{engine, f16_engine, max_difference};
use outrider::chat::Chat;
use outrider::chat::openai::{ChatRequest, Message, Role};
use outrider::engine::{BackendChoice, Engine, Options, Probe, Want, sampler};
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

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/concierge")
}

fn record() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/concierge/replies.json")
}

fn recorded() -> Vec<Answer> {
    serde_json::from_slice(&std::fs::read(record()).unwrap()).unwrap()
}

fn request(prompt: &str) -> ChatRequest {
    ChatRequest {
        temperature: Some(0.0),
        max_tokens: Some(TOKENS),
        ..ChatRequest::new(vec![Message::new(Role::User, prompt)])
    }
}

#[test]
fn the_bundled_model_answers_as_recorded() {
    let mut engine = engine(&model(), &Options { backend: BackendChoice::Cpu, ..Options::default() });
    let chat = pollster::block_on(Chat::of_pack(engine.pack())).unwrap();
    let mut answers = Vec::new();
    for prompt in PROMPTS {
        let request = request(prompt);
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
    if std::env::var_os("OUTRIDER_BLESS").is_some() {
        std::fs::write(record(), serde_json::to_string_pretty(&answers).unwrap() + "\n").unwrap();
    }
    assert_eq!(answers, recorded());
}

/// A unit in the last place of f16, relative to the value at most.
const HALF: f32 = 1.0 / 1024.0;

/// Along the recorded replies, the best logit in f16 is the recorded token's every time.
///
/// As long as routing is what it is in f32, logits are off by about one rounding of the largest, because the errors of the
/// many products partly cancel: measured 0.5 [`HALF`] of it, and held to four times that. Where the last expert chosen and
/// the next best are closer than rounding they swap, which the weights tell (measured 2e-4 apart). From there on logits
/// differ by what the experts do (measured: up to 0.3).
#[test]
fn f16_answers_as_recorded() {
    let options = Options { backend: BackendChoice::Gpu, ..Options::default() };
    let Some(mut halves) = f16_engine(&model(), &options) else { return };
    let mut floats = engine(&model(), &options);
    let chat = pollster::block_on(Chat::of_pack(floats.pack())).unwrap();
    let top_k = floats.plan().top_k();
    let (mut compared, mut rows) = (0, 0);
    for answer in recorded() {
        let prompt = chat.prompt(&request(&answer.prompt)).unwrap();
        let replied = &answer.token_ids;
        let tokens = [&prompt[..], &replied[..replied.len() - 1]].concat();
        let forward = |engine: &mut Engine| {
            let mut probe = Probe::default();
            engine.reset().unwrap();
            let logits = pollster::block_on(engine.forward(&tokens, Want::All, Some(&mut probe))).unwrap();
            (logits, probe)
        };
        let ((expected, exact), (got, coarse)) = (forward(&mut floats), forward(&mut halves));
        let vocab = got.len() / tokens.len();
        let best = |row: &[f32]| sampler::argmax(row).unwrap();
        let replies: Vec<u32> = got.chunks(vocab).skip(prompt.len() - 1).map(best).collect();
        assert_eq!(replies, *replied, "{}", answer.prompt);

        let differing = |t| differing(&exact, &coarse, top_k, t).map(|layer| (t, layer));
        let swap = (0..tokens.len()).find_map(differing);
        if let Some((t, layer)) = swap {
            let at = t * top_k..(t + 1) * top_k;
            let d = max_difference(&exact.weights[layer][at.clone()], &coarse.weights[layer][at]);
            assert!(d <= HALF, "{}: experts differ whose weights do by {d}", answer.prompt);
        }
        let same = swap.map_or(tokens.len(), |(t, _)| t);
        let (expected, got) = (&expected[..same * vocab], &got[..same * vocab]);
        let largest = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let d = max_difference(expected, got);
        assert!(d <= 2.0 * HALF * largest, "{}: {d} off f32, of {largest}", answer.prompt);
        (compared, rows) = (compared + same, rows + tokens.len());
    }
    assert!(2 * compared > rows, "routing differs from f32's after {compared} of {rows} tokens");
}

/// The first layer in which a token has other experts.
fn differing(a: &Probe, b: &Probe, top_k: usize, token: usize) -> Option<usize> {
    let chosen = |ids: &[u32]| {
        let mut ids = ids[token * top_k..(token + 1) * top_k].to_vec();
        ids.sort_unstable();
        ids
    };
    a.ids.iter().zip(&b.ids).position(|(a, b)| chosen(a) != chosen(b))
}
