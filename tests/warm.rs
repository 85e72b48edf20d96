//! A pool that begins with what an earlier visit used: the first tokens hit, and nothing else changes.

mod common;

use std::path::Path;

use outrider::engine::{BackendChoice, Engine, Options, Stop, Want};
use outrider::error::Error;
use outrider::les::{HotList, Settings};

const MODEL: &str = "models/concierge";

fn ids(dialogue: usize) -> Vec<u32> {
    let text = std::fs::read_to_string(common::repository("tests/data/concierge/dialogues.jsonl")).unwrap();
    let line: serde_json::Value = serde_json::from_str(text.lines().nth(dialogue).unwrap()).unwrap();
    serde_json::from_value(line["ids"].clone()).unwrap()
}

fn few(backend: BackendChoice) -> Options {
    Options { max_slots: Some(128), ..common::on(backend) }
}

/// Logits of some tokens, one by one, as bits.
fn run(engine: &mut Engine, ids: &[u32]) -> Vec<u32> {
    engine.reset().unwrap();
    let mut bits = Vec::new();
    for id in ids {
        let logits = pollster::block_on(engine.forward(&[*id], Want::Last, None)).unwrap();
        bits.extend(logits.iter().map(|l| l.to_bits()));
    }
    bits
}

fn second_visit_hits_more(backend: BackendChoice) {
    let mut first = common::engine(Path::new(MODEL), &few(backend));
    [0, 2, 3].iter().for_each(|dialogue| drop(run(&mut first, &ids(*dialogue))));
    let kept = first.hot_list();
    assert!(kept.len() > 1000 && kept.len() <= HotList::BYTES, "{} bytes", kept.len());
    drop(first);

    // Another conversation, so that what it has in common with the first is what dialogues have in common.
    let asked = &ids(1)[..4];
    let mut cold = common::engine(Path::new(MODEL), &few(backend));
    // What is guessed at meanwhile depends on how fast this machine is.
    let alone = Settings { guesses: 0, ..cold.scheduling() };
    cold.set_scheduling(alone);
    let expected = run(&mut cold, asked);
    let mut warm = common::engine(Path::new(MODEL), &few(backend));
    assert!(warm.set_hot_list(&kept));
    pollster::block_on(warm.warm(&Stop::default())).unwrap();
    let before = warm.counters();
    // The pool is full; the last read may have found its place taken by the one before.
    let read = before.experts.warm_reads;
    assert!((128..132).contains(&read), "{read}");
    assert_eq!((before.tokens, before.waits.flash, before.demand_bytes), (0, 0.0, 0));
    assert_eq!(before.guess_bytes, read * warm.pack().expert_bytes() as u64);
    warm.set_scheduling(alone);
    assert!(run(&mut warm, asked) == expected, "other bits");
    let (cold, warm) = (cold.counters().experts, warm.counters().experts);
    assert!(warm.hits > cold.hits + 10 && warm.warm_used > 10, "{cold:?} {warm:?}");
    // Nothing else of an earlier visit is read once the pool is full.
    assert_eq!(warm.warm_reads, read);
}

#[test]
fn the_second_visit_hits_more_in_its_first_reply() {
    second_visit_hits_more(BackendChoice::Cpu);
}

#[test]
fn the_second_visit_hits_more_on_the_gpu() {
    if std::env::var_os("OUTRIDER_REQUIRE_GPU").is_none() {
        eprintln!("GPU test skipped: OUTRIDER_REQUIRE_GPU is not set");
        return;
    }
    second_visit_hits_more(BackendChoice::Gpu);
}

/// Without a moment to spare before the first token, the list is read between what is needed.
#[test]
fn nothing_waits_for_what_an_earlier_visit_used() {
    let mut first = common::engine(Path::new(MODEL), &few(BackendChoice::Cpu));
    let expected = run(&mut first, &ids(0)[..40]);
    let mut second = common::engine(Path::new(MODEL), &few(BackendChoice::Cpu));
    assert!(second.set_hot_list(&first.hot_list()));
    let stop = Stop::default();
    stop.stop();
    let stopped = pollster::block_on(second.warm(&stop));
    assert!(matches!(stopped, Err(Error::Aborted)), "{stopped:?}");
    assert!(run(&mut second, &ids(0)[..40]) == expected, "other bits");
    assert!(second.counters().experts.warm_reads > 2, "{:?}", second.counters());
}

#[test]
fn lists_of_other_models_and_damaged_ones_are_ignored() {
    let mut concierge = common::engine(Path::new(MODEL), &few(BackendChoice::Cpu));
    run(&mut concierge, &ids(0)[..8]);
    let list = concierge.hot_list();
    let other = common::repository("tests/data/golden/qwen3_5_moe/b");
    let mut other = common::engine(&other, &common::on(BackendChoice::Cpu));
    assert!(!other.set_hot_list(&list));
    assert!(!concierge.set_hot_list(&other.hot_list()));
    assert!(!concierge.set_hot_list(&list[..list.len() - 1]));
    assert!(!concierge.set_hot_list(&[]));
    assert!(concierge.set_hot_list(&list));
}
