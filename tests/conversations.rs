//! Turns, edits, retries and stops of one conversation: what is known is not run again, and every logit has the bits that
//! a fresh run of the same tokens gives.

#[path = "common/checkpoints.rs"]
mod checkpoints;
mod common;

use std::cell::Cell;
use std::rc::Rc;

use common::{GOLDEN_CHECKPOINTS, engine, on, repository};
use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, pending, ready};
use outrider::chat::Chat;
use outrider::chat::openai::{ChatRequest, Message, Role};
use outrider::engine::generate::Next;
use outrider::engine::ledger::Kind;
use outrider::engine::sampler::{Sampler, Sampling};
use outrider::engine::{BackendChoice, Engine, Options, Want};
use outrider::flash::{Bytes, Flash, MemoryFlash};
use outrider::tensor::DType;
use outrider::{Error, Result};
use pollster::block_on;
use proptest::prelude::*;

fn small(backend: BackendChoice, chunk: usize, max_checkpoints: usize) -> Engine {
    let options =
        Options { chunk: Some(chunk), max_checkpoints, context: Some(400), max_slots: Some(20), ..on(backend) };
    engine(&repository(GOLDEN_CHECKPOINTS[1]), &options)
}

/// Tokens that differ from those of any other seed soon, but not at once.
fn words(seed: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| if i < seed % 3 { 5 } else { (2 + (i * 97 + i * i * 31 + seed * 53) % 320) as u32 }).collect()
}

/// The logits after the prompt and after each token of a given reply.
fn reply(engine: &mut Engine, prompt: &[u32], reply: &[u32]) -> Result<Vec<Vec<f32>>> {
    block_on(async {
        let mut logits = vec![engine.prefill(prompt).await?];
        for token in reply {
            logits.push(engine.decode(*token).await?);
        }
        Ok(logits)
    })
}

fn from_the_beginning(engine: &mut Engine, prompt: &[u32], reply: &[u32]) -> Vec<Vec<f32>> {
    engine.reset().unwrap();
    let mut logits = vec![block_on(engine.forward(prompt, Want::Last, None)).unwrap()];
    logits.extend(reply.iter().map(|token| block_on(engine.forward(&[*token], Want::Last, None)).unwrap()));
    logits
}

fn bits(logits: &[Vec<f32>]) -> Vec<Vec<u32>> {
    logits.iter().map(|row| row.iter().map(|l| l.to_bits()).collect()).collect()
}

#[derive(Debug, Clone)]
enum Step {
    /// A message of so many tokens goes after all there is.
    Turn(usize),
    /// What is after this share of the conversation is replaced by so many tokens.
    Edit(f64, usize),
    /// The last prompt once more.
    Retry,
    /// A message of so many tokens, stopped after so many layers.
    Stop(usize, usize),
    Clear(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1usize..40).prop_map(Step::Turn),
        3 => (0.0..1.0, 1usize..40).prop_map(|(share, n)| Step::Edit(share, n)),
        2 => Just(Step::Retry),
        2 => (1usize..60, 1usize..250).prop_map(|(n, layers)| Step::Stop(n, layers)),
        1 => (1usize..40).prop_map(Step::Clear),
    ]
}

/// Stops the engine's call when this many more layers have begun.
fn stop_after(engine: &mut Engine) -> Rc<Cell<usize>> {
    let (left, stop) = (Rc::new(Cell::new(usize::MAX)), engine.stop_flag());
    let count = left.clone();
    engine.set_pause(Rc::new(move || {
        count.set(count.get() - 1);
        if count.get() == 0 {
            stop.stop();
        }
        ready(()).boxed_local()
    }));
    left
}

/// Plays a conversation on one engine and each of its prompts on a fresh one, which cuts it into other passes.
fn play(engine: &mut Engine, fresh: &mut Engine, steps: &[(Step, usize)]) {
    let left = stop_after(engine);
    let (mut prompt, mut held, mut torn): (Vec<u32>, Vec<u32>, bool) = (vec![], vec![], false);
    for (i, (step, length)) in steps.iter().enumerate() {
        let (kept, more) = match *step {
            Step::Turn(n) | Step::Stop(n, _) => (held.clone(), words(i, n)),
            Step::Edit(share, n) => (held[..(held.len() as f64 * share) as usize].to_vec(), words(i, n)),
            Step::Retry => (prompt.clone(), Vec::new()),
            Step::Clear(n) => (Vec::new(), words(i, n)),
        };
        prompt = [kept, more].concat();
        if prompt.is_empty() || prompt.len() + length > engine.context() {
            prompt = words(i, 30);
        }
        let answer = words(i + 1000, *length);
        let before = engine.counters().tokens;
        if let Step::Stop(_, layers) = step {
            left.set(*layers);
        }
        let result = reply(engine, &prompt, &answer);
        left.set(usize::MAX);
        engine.stop_flag().clear();
        let ran = (engine.counters().tokens - before) as usize;
        match result {
            Ok(logits) => {
                let expected = from_the_beginning(fresh, &prompt, &answer);
                assert!(bits(&logits) == bits(&expected), "step {i}, {step:?}: other bits than a fresh run");
                assert_eq!(ran, prompt.len() - engine.cached() + answer.len(), "step {i}, {step:?}");
                let known = prompt.iter().zip(&held).take_while(|(a, b)| a == b).count().min(prompt.len() - 1);
                assert!(engine.cached() <= known);
                assert!(torn || known < held.len() || engine.cached() == known, "step {i}, {step:?}: ran what it knew");
                held = [&prompt[..], &answer].concat();
                torn = false;
            }
            Err(Error::Aborted) => {
                // As far as anybody can see of it: the reply up to where it was stopped.
                let written = ran.saturating_sub(prompt.len() - engine.cached()).min(answer.len());
                held = [&prompt[..], &answer[..written]].concat();
                torn = true;
            }
            Err(e) => panic!("step {i}, {step:?}: {e}"),
        }
    }
}

fn steps(most: usize) -> impl Strategy<Value = Vec<(Step, usize)>> {
    prop::collection::vec((step(), 0usize..70), 2..most)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn cpu_replies_as_a_fresh_run_does(steps in steps(10), chunk in prop::sample::select(vec![1, 5, 32]), slots in 0usize..5) {
        let cpu = BackendChoice::Cpu;
        play(&mut small(cpu, chunk, slots), &mut small(cpu, 7, 0), &steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2, max_shrink_iters: 20, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn gpu_replies_as_a_fresh_run_does(steps in steps(8), slots in 0usize..4) {
        let gpu = BackendChoice::Gpu;
        play(&mut small(gpu, 16, slots), &mut small(gpu, 32, 0), &steps);
    }
}

/// Runs a prompt and a reply; how many tokens of the prompt were run.
fn run(engine: &mut Engine, prompt: &[u32], answer: usize) -> usize {
    let before = engine.counters().tokens as usize;
    reply(engine, prompt, &words(99, answer)).unwrap();
    let ran = engine.counters().tokens as usize - before - answer;
    assert_eq!(ran + engine.cached(), prompt.len());
    ran
}

#[test]
fn what_is_run_again_starts_at_the_nearest_checkpoint() {
    let mut engine = small(BackendChoice::Cpu, 8, 4);
    let first = words(1, 20);
    assert_eq!(run(&mut engine, &first, 10), 20);
    let second = [&first[..], &words(99, 10), &words(2, 30)].concat();
    assert_eq!(run(&mut engine, &second, 50), 30, "the second turn");
    // Checkpoints: before the last pass of the first prompt (12), the second turn (30), before the last pass of its prompt
    // (52), and in the reply (84).
    assert_eq!(run(&mut engine, &second, 10), 8, "the reply once more");
    assert_eq!(run(&mut engine, &[&second[..31], &words(3, 20)].concat(), 0), 21, "the second message edited");
    assert_eq!(run(&mut engine, &[&first[..18], &words(4, 20)].concat(), 0), 26, "the first message edited");
    assert_eq!(run(&mut engine, &[&first[..10], &words(5, 20)].concat(), 0), 30, "before any checkpoint");
    // Where they parted is a checkpoint from now on.
    assert_eq!(run(&mut engine, &[&first[..10], &words(6, 20)].concat(), 0), 20, "parted there before");
}

#[test]
fn a_stopped_reply_is_not_run_again_from_its_beginning() {
    let mut engine = small(BackendChoice::Cpu, 8, 4);
    let (prompt, answer) = (words(1, 20), words(2, 100));
    let left = stop_after(&mut engine);
    let layers = engine.plan().layers.len();
    // Three passes of the prompt, 75 of the reply and a part of one more.
    left.set((3 + 75) * layers + 2);
    assert!(matches!(reply(&mut engine, &prompt, &answer), Err(Error::Aborted)));
    left.set(usize::MAX);
    engine.stop_flag().clear();
    assert_eq!(engine.position(), 95);
    let next = [&prompt[..], &answer[..75], &words(3, 9)].concat();
    // From the checkpoint 64 tokens after the one before the last pass of the prompt.
    assert_eq!(run(&mut engine, &next, 0), 20 + 75 + 9 - (12 + 64));
}

/// Reads of experts from the given one on never end, until it is as good as infinite.
struct Stuck {
    files: MemoryFlash,
    left: Rc<Cell<usize>>,
}

impl Flash for Stuck {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        if file.starts_with("experts") {
            self.left.set(self.left.get().saturating_sub(1));
        }
        if self.left.get() == 0 { pending().boxed_local() } else { self.files.read(file, offset, len) }
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        self.files.size(file)
    }
}

/// A call that nobody waits for any more leaves experts unread and states between two tokens.
#[test]
fn a_dropped_call_does_no_harm() {
    let files = common::pack(&repository(GOLDEN_CHECKPOINTS[1]), DType::F32, DType::F32);
    let options = Options { chunk: Some(8), max_slots: Some(30), ..on(BackendChoice::Cpu) };
    let (prompt, answer) = (words(1, 60), words(2, 8));
    let expected = bits(&from_the_beginning(&mut common::load(files.clone(), &options).unwrap(), &prompt, &answer));
    for stuck_at in [1, 4, 20, 60, 100] {
        let left = Rc::new(Cell::new(stuck_at));
        let mut engine = common::load(Stuck { files: files.clone(), left: left.clone() }, &options).unwrap();
        assert!(engine.prefill(&prompt).now_or_never().is_none(), "{stuck_at} reads are too many");
        left.set(usize::MAX);
        assert!(bits(&reply(&mut engine, &prompt, &answer).unwrap()) == expected, "after read {stuck_at}");
    }
}

#[test]
fn without_checkpoints_a_sequence_starts_again() {
    let mut engine = small(BackendChoice::Cpu, 8, 0);
    assert_eq!(engine.ledger().bytes(Kind::Checkpoint), 0);
    let first = words(1, 20);
    run(&mut engine, &first, 10);
    assert_eq!(run(&mut engine, &[&first[..], &words(99, 10), &words(2, 5)].concat(), 3), 5, "what follows is new");
    assert_eq!(run(&mut engine, &first, 3), 20);
}

/// A model that has keys and values only goes back to anywhere.
#[test]
fn attention_alone_needs_no_checkpoints() {
    let model = checkpoints::with_tensors(|tensors, config| {
        let full = config["layer_types"].as_array().unwrap().iter().position(|t| t == "full_attention").unwrap();
        let (theirs, ours) = (format!("model.layers.{full}."), "model.layers.0.");
        tensors.retain(|name, _| !name.starts_with("model.layers.") || name.starts_with(&theirs));
        *tensors = std::mem::take(tensors).into_iter().map(|(name, t)| (name.replace(&theirs, ours), t)).collect();
        config["layer_types"] = serde_json::json!(["full_attention"]);
        config["num_hidden_layers"] = 1.into();
    });
    let options = Options { chunk: Some(8), ..on(BackendChoice::Cpu) };
    let mut engine = engine(model.path(), &options);
    let mut fresh = common::engine(model.path(), &options);
    assert_eq!(engine.ledger().bytes(Kind::Checkpoint), 0);
    let small = |seed, n| words(seed, n).into_iter().map(|t| t % 200).collect::<Vec<_>>();
    let prompt = small(1, 30);
    let answer = small(2, 10);
    reply(&mut engine, &prompt, &answer).unwrap();
    for (kept, new) in [(30, 0), (17, 9), (3, 20)] {
        let edited = [&prompt[..kept], &small(kept, new)].concat();
        let got = reply(&mut engine, &edited, &answer).unwrap();
        assert!(engine.cached() >= kept - 1, "{} of {kept}", engine.cached());
        assert!(bits(&got) == bits(&from_the_beginning(&mut fresh, &edited, &answer)));
    }
}

#[test]
fn a_prompt_beyond_the_context_is_refused_and_costs_nothing() {
    let mut engine = small(BackendChoice::Cpu, 8, 4);
    let first = words(1, 20);
    run(&mut engine, &first, 10);
    let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
    let long = [&first[..], &words(2, 400)].concat();
    let result = block_on(engine.generate(&long, &mut sampler, 4, |_, _| Next::Continue));
    assert!(matches!(result, Err(Error::Context { prompt: 420, context: 400 })), "{result:?}");
    assert!(matches!(block_on(engine.prefill(&long)), Err(Error::Context { prompt: 420, context: 400 })));
    assert_eq!(run(&mut engine, &[&first[..], &words(99, 10), &words(2, 5)].concat(), 0), 5);
}

#[test]
fn checkpoints_take_their_share_of_the_budget() {
    let model = repository("models/concierge");
    let checkpoint = |budget| {
        let options = Options { budget, ..on(BackendChoice::Cpu) };
        let engine = engine(&model, &options);
        let (ledger, one) = (engine.ledger().clone(), engine.plan().checkpoint_bytes());
        assert!(ledger.total() <= ledger.budget && ledger.bytes(Kind::Checkpoint) % one == 0);
        (ledger.bytes(Kind::Checkpoint) / one, ledger.bytes(Kind::Pool))
    };
    let counts: Vec<_> = [12 << 20, 16 << 20, 32 << 20].map(|budget| checkpoint(Some(budget))).into();
    assert!(counts.is_sorted() && checkpoint(None).0 == 4, "{counts:?}");
}

/// A conversation with the bundled model by its chat template, as `outrider chat` holds it.
#[test]
fn a_conversation_by_the_chat_template_runs_only_new_turns() {
    let mut engine = engine(&repository("models/concierge"), &on(BackendChoice::Cpu));
    let mut fresh = common::engine(&repository("models/concierge"), &on(BackendChoice::Cpu));
    let chat = block_on(Chat::of_pack(engine.pack())).unwrap();
    let answer = |engine: &mut Engine, messages: &[Message]| {
        let request = ChatRequest { temperature: Some(0.0), ..ChatRequest::new(messages.to_vec()) };
        let prompt = chat.prompt(&request).unwrap();
        let mut reply = chat.reply(&request, "", prompt.len(), 60);
        let mut sampler = Sampler::new(chat.sampling(&request, 0)).unwrap();
        let before = engine.counters().tokens;
        let push = |_: &Engine, token| {
            reply.push(token).unwrap();
            if reply.finish_reason().is_some() { Next::Stop } else { Next::Continue }
        };
        block_on(engine.generate(&prompt, &mut sampler, 60, push)).unwrap();
        let (ran, written) = (engine.counters().tokens - before, reply.usage().completion_tokens);
        // The token that ends the turn is not run.
        let new = ran as usize - (written - 1);
        println!("{} tokens, {} known, {new} run, {written} written", prompt.len(), engine.cached());
        assert_eq!(new, prompt.len() - engine.cached());
        (reply.message(), new, prompt.len())
    };
    let mut messages = Vec::new();
    let mut before = 0;
    for text in ["Can you find me a restaurant in San Jose?", "Something Italian, please.", "Yes, for two people."] {
        messages.push(Message::new(Role::User, text));
        let (message, new, prompt) = answer(&mut engine, &messages);
        assert_eq!(message, {
            fresh.reset().unwrap();
            answer(&mut fresh, &messages).0
        });
        // The end of the turn before, and the markers around the new one.
        let most = chat.tokenizer().encode(text).unwrap().len() + 12;
        assert!(new <= most, "{new} tokens of {prompt} were run for `{text}`, which takes {most}");
        assert!(before == 0 || engine.cached() > before);
        before = prompt;
        messages.push(message);
    }
    // The second message edited: its turn is run again, the first is not.
    messages.truncate(2);
    messages.push(Message::new(Role::User, "Something Mexican, please."));
    let (message, new, prompt) = answer(&mut engine, &messages);
    assert!(new < 40 && prompt > new);
    assert_eq!(message, {
        fresh.reset().unwrap();
        answer(&mut fresh, &messages).0
    });
}
