//! Reading ahead: the same bits however reads are scheduled, forecasts that hold, and flash that fails.

mod common;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::rc::Rc;

use common::repository;
use futures_util::future::LocalBoxFuture;
use outrider::engine::{BackendChoice, Engine, Options, Probe, Want};
use outrider::error::{Error, Result};
use outrider::flash::{Bytes, Flash, MemoryFlash, Throttle, Throttled};
use outrider::les::Settings;
use outrider::les::spans::What;
use outrider::les::trace::Trace;
use outrider::pack::Pack;
use outrider::tensor::DType;
use proptest::prelude::*;

const TOKENS: usize = 64;

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 2 + (i * 97 + i * i * 31) % 320).collect()
}

fn load(flash: MemoryFlash, options: &Options) -> (Engine, Rc<Throttled>) {
    let flash = Rc::new(Throttled::new(Rc::new(flash)));
    let engine = pollster::block_on(async {
        let pack = Pack::open(flash.clone()).await?;
        Engine::load(pack, options, |_, _| {}).await
    });
    (engine.unwrap_or_else(|e| panic!("{e}")), flash)
}

fn golden_pack() -> MemoryFlash {
    common::pack(&repository("tests/data/golden/qwen3_5_moe/b"), DType::F32, DType::F32)
}

/// Counts reads of experts, by file and offset.
struct Counted {
    files: MemoryFlash,
    reads: Rc<RefCell<HashMap<(String, u64), usize>>>,
}

impl Flash for Counted {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        if file.starts_with("experts") {
            *self.reads.borrow_mut().entry((file.to_owned(), offset)).or_default() += 1;
        }
        self.files.read(file, offset, len)
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        self.files.size(file)
    }
}

/// A pass over many tokens needs nearly every expert, and reads each once, however few have a place and in whatever order
/// they arrive.
#[test]
fn a_chunk_reads_an_expert_once() {
    for (slots, guesses) in [(3, 0), (3, 2), (7, 2), (20, 0), (20, 2), (40, 3)] {
        let reads = Rc::new(RefCell::default());
        let flash = Counted { files: golden_pack(), reads: reads.clone() };
        let throttled = Rc::new(Throttled::new(Rc::new(flash)));
        let options = Options { max_slots: Some(slots), chunk: Some(40), ..common::on(BackendChoice::Cpu) };
        let pack = pollster::block_on(Pack::open(throttled.clone())).unwrap();
        let mut engine = pollster::block_on(Engine::load(pack, &options, |_, _| {})).unwrap();
        engine.set_scheduling(Settings { guesses, least_chance: 0.0, ..engine.scheduling() });
        throttled.set(Some(Throttle { jitter: 2e-4, ..Throttle::default() }));
        for round in 0..3 {
            reads.borrow_mut().clear();
            let (before, mut probe) = (engine.counters(), Probe::default());
            pollster::block_on(engine.forward(&tokens(40), Want::Nothing, Some(&mut probe))).unwrap();
            let needed: usize = probe.ids.iter().map(|ids| ids.iter().collect::<HashSet<_>>().len()).sum();
            let (made, now) = (reads.borrow(), engine.counters());
            let twice = made.values().filter(|count| **count > 1).count();
            assert_eq!(twice, 0, "{slots} slots, {guesses} guesses, round {round}: of {} experts", made.len());
            assert!(round > 0 || made.len() >= needed && needed > 45, "{} reads for {needed}", made.len());
            let bytes = now.expert_bytes() - before.expert_bytes();
            assert_eq!(bytes, (made.len() * engine.pack().expert_bytes()) as u64);
        }
    }
}

/// Every logit of some tokens, taken in passes of the given widths.
fn logits(engine: &mut Engine, widths: &[usize]) -> Result<Vec<u32>> {
    engine.reset()?;
    let tokens = tokens(TOKENS);
    let mut rest = &tokens[..];
    let mut bits = Vec::new();
    for width in widths.iter().cycle() {
        if rest.is_empty() {
            return Ok(bits);
        }
        let (now, later) = rest.split_at((*width).min(rest.len()));
        let logits = pollster::block_on(engine.forward(now, Want::All, None))?;
        bits.extend(logits.iter().map(|l| l.to_bits()));
        rest = later;
    }
    Ok(bits)
}

#[derive(Debug, Clone)]
struct Schedule {
    settings: Settings,
    slots: usize,
    throttle: Throttle,
    widths: Vec<usize>,
    untrained: bool,
}

fn any_schedule() -> impl Strategy<Value = Schedule> {
    let settings = (1usize..5, 0usize..4, 1usize..4, 0usize..5, 0.0f64..0.9, any::<(bool, bool, bool)>(), 0usize..7);
    let throttle = (0.0f64..2e-4, 1usize..4, 0.0f64..4e-4, 0u32..60, any::<u64>());
    // 5 layers of 11 experts, of which 3 are chosen.
    let widths = prop::collection::vec(1usize..20, 1..4);
    (settings, throttle, 3usize..56, widths, any::<bool>()).prop_map(|(s, t, slots, widths, untrained)| {
        let (reads, guesses, lanes, depth, least_chance, (ready_first, keep, singly), run_ahead) = s;
        let (latency, flash_lanes, jitter, fail, seed) = t;
        let saturated = if seed % 2 == 0 { 0.0 } else { 1.0 };
        // Failing reads are tried twice, so that one in very few would fail a run now and then.
        let fail_one_in = if fail < 50 { 0 } else { 200 };
        Schedule {
            settings: Settings {
                reads,
                guesses,
                lanes,
                depth,
                least_chance,
                saturated,
                ready_first,
                keep,
                singly,
                run_ahead,
            },
            slots,
            throttle: Throttle { latency, lanes: flash_lanes, jitter, fail_one_in, seed, ..Throttle::default() },
            widths,
            untrained,
        }
    })
}

fn same_bits_under_random_schedules(backend: BackendChoice, cases: u32) {
    let options = Options { backend, ..Options::default() };
    let plain = Settings { guesses: 0, ..Settings::default() };
    let (mut engine, _) = load(golden_pack(), &options);
    engine.set_scheduling(plain);
    let expected = logits(&mut engine, &[TOKENS]).unwrap();
    drop(engine);
    let mapped = common::with_rotated_maps(golden_pack());
    let mut guesses = 0;
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let outcome = proptest::test_runner::TestRunner::new(config).run(&any_schedule(), |schedule| {
        let Schedule { slots, untrained, .. } = schedule;
        let (mut engine, flash) =
            load(mapped.clone(), &Options { max_slots: Some(slots), untrained, ..options.clone() });
        engine.set_scheduling(schedule.settings);
        flash.set(Some(schedule.throttle));
        match logits(&mut engine, &schedule.widths) {
            Ok(bits) => prop_assert!(bits == expected, "other bits"),
            Err(e) => prop_assert!(schedule.throttle.fail_one_in > 0, "{e}"),
        }
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
    // One run in which much is guessed, so that the comparison is about something.
    let (mut engine, flash) = load(golden_pack(), &Options { max_slots: Some(20), ..options });
    let eager = Settings { least_chance: 0.0, depth: 3, ..engine.scheduling() };
    engine.set_scheduling(eager);
    flash.set(Some(Throttle { jitter: 1e-4, ..Throttle::default() }));
    for _ in 0..2 {
        assert!(logits(&mut engine, &[1]).unwrap() == expected);
        guesses = engine.counters().experts.guesses_used;
    }
    assert!(guesses > 20, "{:?}", engine.counters());
}

#[test]
fn cpu_is_bit_identical_under_random_schedules() {
    same_bits_under_random_schedules(BackendChoice::Cpu, 60);
}

#[test]
fn gpu_is_bit_identical_under_random_schedules() {
    if std::env::var_os("OUTRIDER_REQUIRE_GPU").is_none() && load_gpu().is_none() {
        eprintln!("GPU test skipped: there is no GPU");
        return;
    }
    same_bits_under_random_schedules(BackendChoice::Gpu, 4);
}

/// With every expert in a slot, a token's choices and logits come back as one. What is missing costs one more for each
/// layer that lacks it.
#[test]
fn a_token_costs_one_readback_where_nothing_is_missing() {
    let Some(mut engine) = load_gpu() else {
        eprintln!("GPU test skipped: there is no GPU");
        return;
    };
    let passes = |engine: &mut Engine| {
        engine.reset().unwrap();
        let before = engine.counters();
        for token in tokens(16) {
            pollster::block_on(engine.forward(&[token], Want::Last, None)).unwrap();
        }
        let now = engine.counters();
        (now.traffic.readbacks - before.traffic.readbacks, now.experts.missed() - before.experts.missed())
    };
    let (readbacks, missed) = passes(&mut engine);
    assert!(missed > 0 && readbacks > 16, "{readbacks}, {missed} missed");
    logits(&mut engine, &[TOKENS]).unwrap();
    let counts = engine.counters().experts;
    assert_eq!(counts.missed(), 5 * 11, "every expert was read once: {counts:?}");
    assert_eq!(passes(&mut engine), (16, 0));
    // Going layer by layer it is one for each of five layers and one for the logits.
    engine.set_scheduling(Settings { run_ahead: 0, ..engine.scheduling() });
    assert_eq!(passes(&mut engine), (16 * 6, 0));
}

fn load_gpu() -> Option<Engine> {
    let options = Options { backend: BackendChoice::Gpu, ..Options::default() };
    common::load(golden_pack(), &options).ok()
}

/// On the bundled model forecasts name most of what the next layer needs, and the nearer the better.
#[test]
fn forecasts_of_the_bundled_model_hold() {
    let options = Options { max_slots: Some(128), ..common::on(BackendChoice::Cpu) };
    let mut engine = common::engine(Path::new("models/concierge"), &options);
    engine.set_scheduling(Settings { depth: 3, ..engine.scheduling() });
    let line = std::fs::read_to_string(repository("tests/data/concierge/dialogues.jsonl")).unwrap();
    let dialogue: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    let ids: Vec<u32> = serde_json::from_value(dialogue["ids"].clone()).unwrap();
    for id in &ids {
        pollster::block_on(engine.forward(&[*id], Want::Nothing, None)).unwrap();
    }
    let layers = engine.plan().layers.len();
    let recall = |distance: usize| {
        let all = (0..layers).filter_map(|layer| engine.forecast().recall(layer, distance));
        let (found, of) = all.fold((0, 0), |(found, of), r| (found + r.found, of + r.of));
        found as f64 / of as f64
    };
    let found: Vec<f64> = (1..=3).map(recall).collect();
    assert!(found[0] > 0.6 && found[0] > found[1] && found[1] > found[2], "{found:?}");
    // By chance it would be 4 of 64.
    assert!(found[2] > 0.25, "{found:?}");
    let counts = engine.counters().experts;
    assert!(counts.guesses_used as f64 > 0.4 * counts.guess_reads as f64, "{counts:?}");
}

/// A read that fails once is tried again; one that fails twice ends the call, and the same call again goes on as if
/// nothing had been.
#[test]
fn failing_reads_are_tried_twice() {
    let options = Options { max_slots: Some(10), ..common::on(BackendChoice::Cpu) };
    let (mut engine, flash) = load(golden_pack(), &options);
    let expected = logits(&mut engine, &[7]).unwrap();
    flash.set(Some(Throttle { fail_one_in: 150, seed: 3, ..Throttle::default() }));
    let missed = engine.counters().experts.missed();
    assert!(logits(&mut engine, &[7]).unwrap() == expected, "single failures are nobody's business");
    assert!(flash.failed() > 0);
    assert!(engine.counters().experts.missed() > missed + 100);

    flash.set(Some(Throttle { fail_one_in: 1, ..Throttle::default() }));
    let prompt = tokens(20);
    let error = pollster::block_on(engine.prefill(&prompt)).unwrap_err();
    assert!(matches!(error, Error::Storage { .. }), "{error}");
    flash.set(None);
    let (mut fresh, _) = load(golden_pack(), &options);
    let again = pollster::block_on(engine.prefill(&prompt)).unwrap();
    assert!(again == pollster::block_on(fresh.prefill(&prompt)).unwrap());
}

/// A flash that stops answering holds nobody who asks to stop, and nothing it left undone disturbs what follows.
#[test]
fn a_stalled_read_can_be_stopped() {
    let options = Options { max_slots: Some(10), ..common::on(BackendChoice::Cpu) };
    let (mut engine, flash) = load(golden_pack(), &options);
    let expected = logits(&mut engine, &[7]).unwrap();
    flash.set(Some(Throttle { hang_one_in: 3, ..Throttle::default() }));
    let stop = engine.stop_flag();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        stop.stop();
    });
    let error = logits(&mut engine, &[7]).unwrap_err();
    stopper.join().unwrap();
    assert!(matches!(error, Error::Aborted), "{error}");
    engine.stop_flag().clear();
    flash.set(None);
    assert!(logits(&mut engine, &[7]).unwrap() == expected);
}

/// A recording has every pass, its spans within it or, of reads, begun before, and the engine's own counts.
#[test]
fn a_recording_accounts_for_its_passes() {
    let options = Options { max_slots: Some(10), ..common::on(BackendChoice::Cpu) };
    let (mut engine, flash) = load(golden_pack(), &options);
    let expected = logits(&mut engine, &[7]).unwrap();
    engine.record(2);
    let before = engine.counters();
    assert!(logits(&mut engine, &[7]).unwrap() == expected);
    flash.set(Some(Throttle { fail_one_in: 1, ..Throttle::default() }));
    logits(&mut engine, &[7]).unwrap_err();
    flash.set(None);
    assert!(logits(&mut engine, &[7]).unwrap() == expected, "a pass that was given up is not recorded");
    let trace = engine.take_recording().unwrap();
    assert_eq!((trace.passes.len(), trace.tokens()), (2 * TOKENS.div_ceil(7), 2 * TOKENS));
    let setup = trace.setup.as_ref().unwrap();
    assert_eq!((setup.slots, setup.backend.as_str()), (10, "cpu"));
    let lines: Vec<String> = trace.passes.iter().map(|pass| serde_json::to_string(pass).unwrap()).collect();
    let text = format!("{}\n{}", serde_json::to_string(&engine.header()).unwrap(), lines.join("\n"));
    assert_eq!(Trace::parse(&text).unwrap(), trace);
    let (mut reads, mut pairs) = (0, 0);
    for pass in &trace.passes {
        let timing = pass.timing.as_ref().unwrap();
        for span in &timing.spans {
            assert!(span.end <= timing.end, "{span:?}");
            match span.what {
                What::Read { .. } => reads += u64::from(span.end > span.begin),
                _ => assert!(span.begin >= timing.begin, "{span:?}"),
            }
            pairs += if let What::Run { pairs, .. } = span.what { pairs as usize } else { 0 };
        }
        let layers = pass.ids.len();
        let count = |what: fn(&What) -> bool| timing.spans.iter().filter(|span| what(&span.what)).count();
        assert_eq!(count(|w| matches!(w, What::Mix { .. })), layers);
        assert_eq!(count(|w| matches!(w, What::Finish { .. })), layers);
        assert_eq!(count(|w| matches!(w, What::Logits)), 1);
    }
    assert_eq!(pairs, trace.tokens() * trace.shape.layers * trace.shape.top_k);
    let (now, was) = (engine.counters().experts, before.experts);
    let began = now.demand_reads + now.guess_reads - was.demand_reads - was.guess_reads;
    assert!(reads > 0 && reads <= began, "{reads} of {began}");
}
