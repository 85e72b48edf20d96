//! Maps, by which experts are foreseen: made by `calibrate`, used on every backend, never in the way.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{ROTATED_DEPTH, on, outrider, repository, with_rotated_maps};
use outrider::engine::ledger::Kind;
use outrider::engine::{BackendChoice, Engine, Options, Want, budgets};
use outrider::error::Error;
use outrider::flash::MemoryFlash;
use outrider::les::Settings;
use outrider::pack::{MANIFEST, Manifest};
use outrider::tensor::DType;
use serde_json::Value;

fn golden_pack() -> MemoryFlash {
    common::pack(&repository("tests/data/golden/qwen3_5_moe/b"), DType::F32, DType::F32)
}

/// Scores by pass, origin and layer.
type Scores = BTreeMap<(usize, usize, u32), Vec<f32>>;

/// Every forecast of some passes, by distance. The pool is so small that a pass stops at nearly every layer.
fn forecasts(flash: &MemoryFlash, options: &Options, run_ahead: usize) -> BTreeMap<usize, Scores> {
    let options = Options { max_slots: Some(3), ..options.clone() };
    let mut engine = common::load(flash.clone(), &options).unwrap();
    engine.set_scheduling(Settings { guesses: 0, run_ahead, ..engine.scheduling() });
    engine.record(ROTATED_DEPTH);
    for tokens in [&[3, 9, 27][..], &[81], &[5, 6]] {
        pollster::block_on(engine.forward(tokens, Want::Nothing, None)).unwrap();
    }
    let mut found: BTreeMap<usize, Scores> = BTreeMap::new();
    for (pass, of) in engine.take_recording().unwrap().passes.into_iter().enumerate() {
        for guess in of.foreseen {
            let distance = guess.origin.distance(guess.layer);
            let scores = found.entry(distance).or_default();
            scores.insert((pass, guess.layer as usize + 1 - distance, guess.layer), guess.scores);
        }
    }
    found
}

/// From each distance a layer is forecast by the map for it, bit by bit, and by its router where there is none.
fn maps_take_the_place_of_routers(backend: BackendChoice, run_ahead: usize) {
    let experts = 11;
    let flash = with_rotated_maps(golden_pack());
    let trained = forecasts(&flash, &on(backend), run_ahead);
    let untrained = forecasts(&flash, &Options { untrained: true, ..on(backend) }, run_ahead);
    for distance in 1..=ROTATED_DEPTH {
        let mut compared = 0;
        for (at, scores) in &trained[&distance] {
            // How many layers are submitted together depends on measured times.
            let Some(expected) = untrained[&distance].get(at) else { continue };
            let shift = if (at.2, distance) == (2, 1) { 0 } else { distance };
            let mut expected = expected.clone();
            expected.chunks_exact_mut(experts).for_each(|row| row.rotate_right(shift));
            assert_eq!(*scores, expected, "{distance} ahead, {at:?}");
            compared += 1;
        }
        let most = 3 * (5 - distance);
        assert!(compared * 2 > most && (run_ahead > 0 || compared >= most), "{compared} of {most}, {distance} ahead");
    }
}

#[test]
fn maps_take_the_place_of_routers_on_the_cpu() {
    maps_take_the_place_of_routers(BackendChoice::Cpu, 0);
}

#[test]
fn maps_take_the_place_of_routers_on_the_gpu() {
    maps_take_the_place_of_routers(BackendChoice::Gpu, 0);
    maps_take_the_place_of_routers(BackendChoice::Gpu, 5);
}

#[test]
fn maps_are_in_the_ledger_and_give_way_to_a_small_budget() {
    let flash = with_rotated_maps(golden_pack());
    let manifest = Manifest::parse(&flash.clone().into_files()[MANIFEST]).unwrap();
    for backend in [BackendChoice::Cpu, BackendChoice::Gpu] {
        let options = on(backend);
        let untrained = Options { untrained: true, ..options.clone() };
        let core = |options| common::load(flash.clone(), options).unwrap().ledger().bytes(Kind::Core);
        let maps: u64 =
            manifest.core.iter().filter(|(name, _)| name.contains("foresee")).map(|(_, t)| t.bytes() as u64).sum();
        assert!(maps > 0 && core(&options) == core(&untrained) + maps);
        let (all, bare) = (budgets(&manifest, &options).unwrap(), budgets(&manifest, &untrained).unwrap());
        assert_eq!(all.start, bare.start);
        assert!(all.end >= bare.end + maps);

        let within = |budget| common::load(flash.clone(), &Options { budget: Some(budget), ..options.clone() });
        let engine = within(all.start).unwrap();
        assert!(engine.notices().iter().any(|notice| notice.contains("maps")), "{:?}", engine.notices());
        assert_eq!(engine.ledger().bytes(Kind::Core), core(&untrained));
        let engine = within(all.end).unwrap();
        assert!(engine.notices().is_empty() && engine.ledger().bytes(Kind::Core) == core(&options));
        let error = within(all.start - 1).err().unwrap();
        assert!(matches!(error, Error::Budget { smallest, .. } if smallest == all.start), "{error}");
    }
}

fn maps_shard(files: &BTreeMap<String, Vec<u8>>) -> String {
    files.keys().find(|name| name.starts_with("maps-")).unwrap().clone()
}

/// What is wrong with maps is an error that says so; what a file of the right length holds is nobody's business who does
/// without them.
#[test]
fn damaged_maps_are_typed_errors() {
    let good = with_rotated_maps(golden_pack()).into_files();
    let shard = maps_shard(&good);
    let load = |files: &BTreeMap<String, Vec<u8>>, options: &Options| {
        common::load(MemoryFlash::new(files.clone()), options).map(|_| ())
    };
    let fails = |files: &BTreeMap<String, Vec<u8>>, code: &str, says: &str| {
        let error = load(files, &on(BackendChoice::Cpu)).unwrap_err();
        assert!(error.code() == code && error.to_string().contains(says), "{error}");
    };
    let untrained = Options { untrained: true, ..on(BackendChoice::Cpu) };
    load(&good, &on(BackendChoice::Cpu)).unwrap();

    let mut files = good.clone();
    files.get_mut(&shard).unwrap()[100] ^= 1;
    fails(&files, "corrupt", &shard);
    load(&files, &untrained).unwrap();
    let bad = pollster::block_on(outrider::pack::verify(&MemoryFlash::new(files), |_| ())).unwrap();
    assert!(bad.len() == 1 && bad[0].file == shard);

    let mut files = good.clone();
    files.get_mut(&shard).unwrap().truncate(100);
    fails(&files, "truncated", &shard);

    let mut files = good.clone();
    files.remove(&shard);
    fails(&files, "not_found", &shard);

    // A map of another shape than the router's: an 11 × 80 matrix that is said to be 11 × 88.
    let mut manifest: Value = serde_json::from_slice(&good[MANIFEST]).unwrap();
    manifest["core"]["outrider.foresee.3.1.weight"]["shape"] = serde_json::json!([11, 88]);
    let mut files = good.clone();
    files.insert(MANIFEST.into(), serde_json::to_vec(&manifest).unwrap());
    fails(&files, "format", "outrider.foresee.3.1.weight");
    load(&files, &untrained).unwrap();
}

/// Scores that are no numbers are forecasts like others: the output does not change.
#[test]
fn maps_of_no_numbers_change_nothing() {
    let mut files = with_rotated_maps(golden_pack()).into_files();
    let mut manifest: Value = serde_json::from_slice(&files[MANIFEST]).unwrap();
    let shard = maps_shard(&files);
    let bytes = files.get_mut(&shard).unwrap();
    bytes.fill(0xff);
    let hash = blake3::hash(bytes).to_hex().to_string();
    let index = manifest["shards"].as_array().unwrap().iter().position(|s| s["file"] == shard.as_str()).unwrap();
    let mut extents = manifest["extents"].as_array_mut().unwrap().iter_mut().filter(|e| e[0] == index);
    let extent = extents.next().unwrap();
    assert!(extents.next().is_none(), "one extent holds them all");
    extent[3] = hash.into();
    files.insert(MANIFEST.into(), serde_json::to_vec(&manifest).unwrap());
    let logits = |flash: MemoryFlash| {
        let options = Options { max_slots: Some(15), ..on(BackendChoice::Cpu) };
        let mut engine: Engine = common::load(flash, &options).unwrap();
        common::forward(&mut engine, &(2..60).collect::<Vec<u32>>()).0
    };
    assert_eq!(logits(MemoryFlash::new(files)), logits(golden_pack()));
}

/// Recall by layer, as the command prints it: the cells of each row but the first.
fn table(stdout: &str) -> Vec<Vec<String>> {
    let rows = stdout.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').skip(1).map(|cell| cell.trim().to_owned()).collect()).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Fits maps to a few dialogues: they go into the pack, foresee better than routers, and change no word of a reply.
#[test]
fn calibrate_fits_maps_and_puts_them_into_the_pack() {
    let place = tempfile::tempdir().unwrap();
    let (model, mapped) = (repository("models/concierge"), place.path().join("mapped"));
    let dialogues = repository("tests/data/concierge/dialogues.jsonl");
    let run = |model: &Path, more: &[&str]| {
        outrider(&[&["calibrate", text(model), "--text", text(&dialogues)], more].concat())
    };
    let out = run(&model, &["-o", text(&mapped), "--tokens", "2500"]);
    assert!(out.status.success(), "{}", out.stderr);
    let rows = table(&out.stdout);
    assert_eq!(rows.len(), 9, "{}", out.stdout);
    let share = |cell: &str| -> f64 { cell.trim_end_matches(" %").parse().unwrap() };
    for row in &rows {
        assert_eq!(row[0], "100.0 %", "a router names what it chooses: {}", out.stdout);
        assert_eq!(row.len(), 6);
    }
    let all: Vec<f64> = rows[8].iter().map(|cell| share(cell)).collect();
    let [_, before, one, one_by_map, two, two_by_map] = all[..] else { unreachable!("counted above") };
    assert!(before < two && two < one, "{}", out.stdout);
    assert!(one_by_map > one + 5.0 && two_by_map > two + 5.0, "{}", out.stdout);

    let inspected = outrider(&["inspect", text(&mapped)]).stdout;
    assert!(inspected.lines().any(|line| line.starts_with("maps          15, ")), "{inspected}");
    assert!(outrider(&["verify", text(&mapped)]).status.success());
    let reply = |model: &Path, more: &[&str]| {
        let chat = ["chat", text(model), "Can you find me a restaurant?", "--backend", "cpu", "--temperature", "0"];
        let out = outrider(&[&chat[..], &["--cold", "--max-tokens", "12", "--max-slots", "80"], more].concat());
        assert!(out.status.success(), "{}", out.stderr);
        out.stdout
    };
    let said = reply(&model, &["--untrained"]);
    assert!(said.len() > 8);
    assert_eq!(reply(&mapped, &[]), said);
    assert_eq!(reply(&mapped, &["--untrained"]), said);

    // In place, with other maps.
    let out = run(&mapped, &["--depth", "1", "--quant", "q8", "--tokens", "1200"]);
    assert!(out.status.success() && table(&out.stdout)[8].len() == 4, "{}", out.stderr);
    let tensors = outrider(&["inspect", text(&mapped), "--tensors"]).stdout;
    assert!(tensors.contains("outrider.foresee.0.1.weight  [64, 256] q8"), "{tensors}");
    assert!(!tensors.contains("outrider.foresee.1.2.weight"), "{tensors}");
    assert!(outrider(&["verify", text(&mapped)]).status.success());

    let fails = |args: &[&str], reason: &str| {
        let out = run(&model, args);
        assert!(!out.status.success() && out.stdout.is_empty() && out.stderr.contains(reason), "{}", out.stderr);
    };
    fails(&["-o", text(&mapped)], "--force");
    fails(&["-o", text(&mapped), "--depth", "0"], "1 to 4 layers ahead");
    fails(&["-o", text(&mapped), "--force", "--quant", "int3"], "int3");
    fails(&["-o", "never", "--tokens", "300"], "maps need three");
    let golden = repository("tests/data/golden/qwen3_5_moe/b");
    let out = outrider(&["calibrate", text(&golden), "--text", text(&dialogues)]);
    assert!(out.stderr.contains("--output"), "{}", out.stderr);
}
