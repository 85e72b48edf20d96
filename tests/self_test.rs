//! The self-test of packs: what is recorded, what it finds, and that nothing is left of it.

mod common;

use std::rc::Rc;

use common::{GOLDEN_CHECKPOINTS, engine, f16_engine, max_difference, on, outrider, repository};
use outrider::engine::{BackendChoice, Counters, Engine, Options, Want, record_self_test};
use outrider::flash::MemoryFlash;
use outrider::import::open_model;
use outrider::pack::{Pack, SelfTest};
use outrider::tensor::DType;
use outrider::{Error, Result};
use pollster::block_on;
use serde_json::{Value, json};

const MODEL: &str = "models/concierge";

fn stored() -> SelfTest {
    let pack = block_on(open_model(repository(MODEL).to_str().unwrap())).unwrap();
    pack.manifest().self_test.clone().expect("the bundled pack has one")
}

/// A small pack with a self-test, and that changed.
fn small(change: impl FnOnce(&mut Value)) -> MemoryFlash {
    let flash = common::pack(&repository(GOLDEN_CHECKPOINTS[0]), DType::Q8, DType::Q8);
    let test = block_on(record_self_test(block_on(Pack::open(Rc::new(flash.clone()))).unwrap())).unwrap();
    with_self_test(flash, &test, change)
}

fn with_self_test(flash: MemoryFlash, test: &SelfTest, change: impl FnOnce(&mut Value)) -> MemoryFlash {
    let mut files = flash.into_files();
    let manifest = files.get_mut("manifest.json").unwrap();
    let mut value: Value = serde_json::from_slice(manifest).unwrap();
    value["self_test"] = serde_json::to_value(test).unwrap();
    change(&mut value["self_test"]);
    *manifest = serde_json::to_vec(&value).unwrap();
    MemoryFlash::new(files)
}

fn failed(result: Result<Engine>, on: &str) -> String {
    let error = result.err().expect("the self-test fails");
    let Error::SelfTest { backend, .. } = &error else { panic!("{error}") };
    assert_eq!(*backend, on, "{error}");
    error.to_string()
}

/// How far an engine is off what was recorded, relative to the largest logit of the row.
fn deviation(engine: &mut Engine, test: &SelfTest) -> (f32, f32) {
    engine.reset().unwrap();
    let (mut absolute, mut relative, mut first) = (0.0f32, 0.0f32, 0);
    for row in &test.rows {
        let logits = block_on(engine.forward(&test.tokens[first..=row.position], Want::Last, None)).unwrap();
        first = row.position + 1;
        let (ids, expected): (Vec<u32>, Vec<f32>) = row.top.iter().copied().unzip();
        let got: Vec<f32> = ids.iter().map(|id| logits[*id as usize]).collect();
        let d = max_difference(&expected, &got);
        (absolute, relative) = (absolute.max(d), relative.max(d / expected.iter().fold(0.0f32, |m, l| m.max(l.abs()))));
    }
    (absolute, relative)
}

#[test]
fn the_bundled_pack_has_what_its_weights_compute() {
    let pack = block_on(open_model(repository(MODEL).to_str().unwrap())).unwrap();
    assert_eq!(block_on(record_self_test(pack)).unwrap(), stored());
}

/// The bounds that loading holds backends to are several times what they are off.
#[test]
fn backends_are_well_within_their_bounds() {
    let test = stored();
    let mut cpu = engine(&repository(MODEL), &on(BackendChoice::Cpu));
    assert_eq!(deviation(&mut cpu, &test).0, 0.0);
    let mut gpu = engine(&repository(MODEL), &on(BackendChoice::Gpu));
    let (absolute, _) = deviation(&mut gpu, &test);
    println!("f32: {absolute} off");
    assert!(absolute <= 2e-4, "{absolute}");
    let Some(mut halves) = f16_engine(&repository(MODEL), &on(BackendChoice::Gpu)) else { return };
    let (absolute, relative) = deviation(&mut halves, &test);
    println!("f16: {absolute} off, {relative} of the largest");
    assert!(absolute > 0.0 && relative <= 2.0 / 2048.0, "{relative}");
}

#[test]
fn nothing_is_left_of_it() {
    for backend in [BackendChoice::Cpu, BackendChoice::Gpu] {
        let mut tested = engine(&repository(MODEL), &on(backend));
        assert_eq!((tested.counters(), tested.position()), (Counters::default(), 0));
        assert!(tested.notices().is_empty(), "{:?}", tested.notices());
        let mut other = engine(&repository(MODEL), &Options { self_test: false, ..on(backend) });
        let prompt = [1, 2, 3, 200, 5];
        let run = |engine: &mut Engine| block_on(engine.forward(&prompt, Want::All, None)).unwrap();
        assert_eq!(run(&mut tested), run(&mut other));
        assert_eq!(tested.counters().tokens, other.counters().tokens);
    }
}

#[test]
fn logits_that_are_not_what_the_pack_computes_are_found() {
    let load = |flash, backend| common::load(flash, &on(backend));
    assert!(load(small(|_| ()), BackendChoice::Cpu).is_ok());
    for row in 0..2 {
        let wrong = || {
            small(|test| {
                test["rows"][row]["top"][0][1] = json!(test["rows"][row]["top"][0][1].as_f64().unwrap() + 0.01)
            })
        };
        let text = failed(load(wrong(), BackendChoice::Cpu), "cpu");
        assert!(text.contains("was recorded") && text.contains("pack the model again"), "{text}");
        let text = failed(load(wrong(), BackendChoice::Gpu), "gpu");
        assert!(text.contains("use the CPU backend"), "{text}");
        // The GPU gives way to the CPU, on which it is the same.
        failed(load(wrong(), BackendChoice::Auto), "cpu");
        let unasked = Options { self_test: false, ..on(BackendChoice::Cpu) };
        assert!(common::load(wrong(), &unasked).is_ok());
    }
}

/// Weights whose hashes are right and whose values are not.
#[test]
fn weights_that_are_not_those_it_was_made_with_are_found() {
    let test = block_on(record_self_test(block_on(Pack::open(Rc::new(small(|_| ())))).unwrap())).unwrap();
    let other = common::pack(&repository(GOLDEN_CHECKPOINTS[0]), DType::Q4, DType::Q8);
    failed(common::load(with_self_test(other, &test, |_| ()), &on(BackendChoice::Cpu)), "cpu");
}

/// As much of it as the context holds is run.
#[test]
fn a_context_may_be_shorter() {
    let wrong = |row: usize| small(|test| test["rows"][row]["top"][0][1] = json!(1e6));
    for (context, row, found) in [(1, 0, false), (11, 0, false), (12, 0, true), (12, 1, false), (16, 1, true)] {
        let options = Options { context: Some(context), ..on(BackendChoice::Cpu) };
        assert_eq!(common::load(wrong(row), &options).is_err(), found, "row {row} in a context of {context}");
        assert!(common::load(small(|_| ()), &options).is_ok());
    }
}

#[test]
fn one_that_makes_no_sense_is_refused() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 16] = [
        ("missing field", |t| *t = json!({})),
        ("unknown field", |t| t["surprise"] = json!(1)),
        ("16 tokens", |t| t["rows"] = json!([])),
        ("0 tokens", |t| t["tokens"] = json!([])),
        ("100000 tokens", |t| t["tokens"] = json!(vec![1; 100_000])),
        ("token 257 of 257", |t| t["tokens"][3] = json!(257)),
        ("token 4294967295 of", |t| t["rows"][1]["top"][2][0] = json!(u32::MAX)),
        ("manifest.json", |t| t["tokens"][0] = json!(-1)),
        ("out of order", |t| t["rows"][0]["position"] = json!(15)),
        ("out of order", |t| t["rows"] = json!(vec![t["rows"][0].clone(); 100_000])),
        ("position 18446744073709551615 of 16", |t| t["rows"][1]["position"] = json!(u64::MAX)),
        ("0 logits", |t| t["rows"][0]["top"] = json!([])),
        ("100000 logits", |t| t["rows"][0]["top"] = json!(vec![(1, 0.5); 100_000])),
        ("do not descend", |t| t["rows"][0]["top"][0][1] = json!(-1e6)),
        ("do not descend", |t| t["rows"][0]["top"][0][1] = json!(1e300)),
        ("appears twice", |t| t["rows"][0]["top"][1][0] = t["rows"][0]["top"][0][0].clone()),
    ];
    for (reason, change) in cases {
        let error = common::load(small(change), &on(BackendChoice::Cpu)).err().expect(reason);
        assert_eq!(error.code(), "format", "{error}");
        assert!(error.to_string().contains(reason), "expected `{reason}`: {error}");
    }
}

#[test]
fn the_command_line_puts_it_into_new_packs_and_old_ones() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("pack");
    let golden = repository(GOLDEN_CHECKPOINTS[0]);
    let run = |args: &[&str]| {
        let out = outrider(args);
        assert!(out.status.success(), "{}", out.stderr);
        out
    };
    run(&["pack", golden.to_str().unwrap(), "-o", target.to_str().unwrap(), "--quant", "q4"]);
    let read = || -> Value { serde_json::from_slice(&std::fs::read(target.join("manifest.json")).unwrap()).unwrap() };
    let made = read();
    assert_eq!(made["self_test"]["tokens"].as_array().map(Vec::len), Some(16));
    let mut old = made.clone();
    old.as_object_mut().unwrap().remove("self_test");
    std::fs::write(target.join("manifest.json"), old.to_string()).unwrap();
    let logits = ["logits", target.to_str().unwrap(), "--backend", "cpu", "--tokens", "1", "--out"];
    let out = dir.path().join("out.safetensors");
    assert_eq!(run(&[&logits[..], &[out.to_str().unwrap()]].concat()).stderr, "");
    let files = std::fs::read_dir(&target).unwrap().count();
    run(&["self-test", target.to_str().unwrap()]);
    assert_eq!(read(), made);
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), files);
    run(&["verify", target.to_str().unwrap()]);
}
