//! Packs that are damaged, from elsewhere, or do not fit together.

use std::fs::File;

use outrider::Error;
use outrider::engine::{Options, smallest_budget};
use outrider::error::Size;
use outrider::flash::MemoryFlash;
use outrider::import::open_model;
use outrider::pack::Manifest;
use pollster::block_on;
use serde_json::{Value, json};

use crate::common::{self, outrider, repository};
use crate::{Files, MOST, alloc, assert_error, cpu, forward, run, small, with_manifest, write};

#[test]
fn a_flipped_byte_is_named_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for file in ["core-00000.bin", "embedding-00000.bin", "experts-00000.bin"] {
        let mut files = small();
        // Tokens 1, 2 and 3 read the start of the embedding and, of two experts in eight, some in every layer.
        let bytes = files.get_mut(file).unwrap();
        let damaged: Vec<usize> =
            if file.starts_with("experts") { (0..bytes.len()).step_by(4096).collect() } else { vec![70] };
        damaged.iter().for_each(|at| bytes[*at] ^= 0x40);
        write(&files, dir.path());

        let error = assert_error(run(files), "corrupt", &[file, "outrider verify", "download"]);
        let Error::Corrupt { path: named, offset, len } = &error else { unreachable!("checked by its code") };
        assert_eq!(named, file);
        assert!(damaged.iter().any(|at| (*offset..offset + len).contains(&(*at as u64))), "{error}");
        assert!(error.to_string().contains(&format!("bytes {offset}..{}", offset + len)), "{error}");

        let out = outrider(&["verify", path]);
        assert!(!out.status.success());
        assert!(out.stdout.lines().all(|line| line.starts_with(file)), "{}", out.stdout);
        assert!(out.stdout.lines().count() > 0 && out.stderr.contains(file), "{}{}", out.stdout, out.stderr);
        let out_file = dir.path().join("out.safetensors");
        let out =
            outrider(&["logits", path, "--backend", "cpu", "--tokens", "1,2,3", "--out", out_file.to_str().unwrap()]);
        assert!(!out.status.success() && out.stderr.contains(file) && out.stdout.is_empty(), "{}", out.stderr);
        assert!(!out_file.exists(), "results of a pack that is corrupt");
        write(&small(), dir.path());
    }
    assert!(outrider(&["verify", path]).status.success());
}

/// A pass that fails half-way leaves the sequence between two tokens; nothing goes on from there.
#[test]
fn after_a_failed_pass_the_sequence_must_be_reset() {
    let mut files = small();
    files.get_mut("experts-00000.bin").unwrap().iter_mut().step_by(4096).for_each(|b| *b ^= 1);
    let mut engine = common::load(MemoryFlash::new(files), &cpu()).unwrap();
    assert_error(forward(&mut engine), "corrupt", &[]);
    assert_error(forward(&mut engine), "request", &["reset"]);
    engine.reset().unwrap();
    assert_error(forward(&mut engine), "corrupt", &[]);
}

#[test]
fn a_truncated_or_lengthened_shard_is_named() {
    for (change, code) in [(-1isize, "truncated"), (1, "truncated")] {
        let mut files = small();
        let shard = files.get_mut("experts-00000.bin").unwrap();
        let expected = shard.len();
        shard.resize(expected.strict_add_signed(change), 0);
        let error = assert_error(run(files), code, &["experts-00000.bin", &expected.to_string(), "again"]);
        assert!(
            matches!(error, Error::Truncated { actual, .. } if actual == expected.strict_add_signed(change) as u64)
        );
    }
    let mut files = small();
    files.remove("core-00000.bin");
    assert_error(run(files), "not_found", &["core-00000.bin", "check"]);
}

#[test]
fn a_newer_version_asks_for_an_update() {
    let error =
        assert_error(run(with_manifest(|m| m["version"] = json!(2))), "version", &["2", "1", "update Outrider"]);
    assert!(matches!(error, Error::Version { found: 2, supported: 1 }));
    assert_error(run(with_manifest(|m| m["version"] = json!(u64::MAX))), "version", &["18446744073709551615"]);
}

fn with_raw_manifest(manifest: &[u8]) -> Files {
    Files::from([("manifest.json".to_owned(), manifest.to_vec())])
}

#[test]
fn a_manifest_that_is_none_is_refused() {
    let deep = "[".repeat(100_000);
    let cases = ["", "{", "null", "[]", "\u{feff}{}", "<!doctype html>", "{\"format\":\"outrider-pack\"}", &deep];
    for text in cases {
        assert_error(run(with_raw_manifest(text.as_bytes())), "format", &["manifest.json"]);
    }
    assert_error(run(with_raw_manifest(&[0xff; 100])), "format", &["manifest.json"]);
    let other = br#"{"format": "gguf", "version": 1}"#;
    assert_error(run(with_raw_manifest(other)), "format", &["gguf", "outrider-pack"]);
}

/// A file of which nothing is read but its length.
#[test]
fn an_enormous_manifest_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    File::create(dir.path().join("manifest.json")).unwrap().set_len(1 << 40).unwrap();
    let (most, result) = alloc::largest(|| block_on(open_model(dir.path().to_str().unwrap())));
    assert_error(result.map(|_| ()), "format", &["manifest.json", "1099511627776"]);
    assert!(most < MOST, "{most} bytes were allocated");
}

#[test]
fn numbers_that_overflow_are_refused_without_allocating() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 20] = [
        ("manifest.json", |m| m["shards"][0]["bytes"] = json!(1e30)),
        ("manifest.json", |m| m["shards"][0]["bytes"] = json!(-1)),
        ("manifest.json", |m| m["shards"][0]["bytes"] = json!(1.5)),
        ("does not continue", |m| m["extents"][0][1] = json!(u64::MAX)),
        ("does not continue", |m| m["extents"][0][2] = json!(u64::MAX)),
        ("does not continue", |m| m["extents"][1] = m["extents"][0].clone()),
        ("cover", |m| drop(m["extents"].as_array_mut().unwrap().pop())),
        ("too long", |m| {
            m["shards"][0]["bytes"] = json!(1u64 << 40);
            let extents = m["extents"].as_array_mut().unwrap();
            extents.retain(|e| e[0] != 0 || e[1] == 0);
            extents.iter_mut().find(|e| e[0] == 0).unwrap()[2] = json!(1u64 << 40);
        }),
        ("shard 9", |m| m["core"]["lm_head.weight"]["pieces"][0][0] = json!(9)),
        ("outside", |m| m["core"]["lm_head.weight"]["pieces"][0][1] = json!(u64::MAX - 15)),
        ("outside", |m| m["core"]["lm_head.weight"]["pieces"][0][2] = json!(u64::MAX)),
        ("overflows", |m| m["core"]["lm_head.weight"]["shape"] = json!([1u64 << 62, 2])),
        ("its shape needs", |m| m["core"]["lm_head.weight"]["shape"] = json!([1u64 << 40, 64])),
        ("empty", |m| m["core"]["lm_head.weight"]["shape"] = json!([0, 64])),
        ("matrix", |m| m["core"]["lm_head.weight"]["shape"] = json!([64])),
        ("embedding", |m| m["embedding"]["cols"] = json!(u64::MAX)),
        ("embedding", |m| m["embedding"]["rows"] = json!(1u64 << 60)),
        ("embedding", |m| m["embedding"]["pieces"][0]["offset"] = json!(u64::MAX)),
        ("experts", |m| m["experts"]["width"] = json!(u64::MAX)),
        ("experts", |m| m["experts"]["count"] = json!(u64::MAX)),
    ];
    for (reason, change) in cases {
        let (most, result) = alloc::largest(|| run(with_manifest(change)));
        assert_error(result, "format", &[reason]);
        assert!(most < MOST, "{reason}: {most} bytes were allocated");
    }
}

#[test]
fn no_name_leaves_the_directory() {
    for name in ["..", "../core.bin", "a/b", "/etc/passwd", "a\\b", "C:a", ".hidden", "", "a\0b", "ä"] {
        let shard = run(with_manifest(|m| m["shards"][0]["file"] = json!(name)));
        assert_error(shard, "format", &["is not a plain file name"]);
        let entry = json!({"file": name, "bytes": 1, "hash": "00".repeat(32)});
        let copied = run(with_manifest(|m| m["files"] = json!([entry])));
        assert_error(copied, "format", &["is not a plain file name"]);
    }
}

/// The configuration sizes what the backends compute with, the manifest what is read: they must agree.
#[test]
fn a_configuration_that_does_not_fit_the_tensors_is_refused() {
    type Change = fn(&mut Value);
    let cases: [(&str, &str, Change); 15] = [
        ("format", "lm_head.weight", |m| m["config"]["vocab_size"] = json!(256)),
        ("format", "embedding", |m| m["embedding"]["rows"] = json!(256)),
        ("format", "hidden_size", |m| m["config"]["hidden_size"] = json!(0)),
        ("format", "num_attention_heads", |m| m["config"]["num_attention_heads"] = json!(u64::MAX)),
        ("format", "mlp.gate.weight", |m| m["config"]["num_experts"] = json!(7)),
        ("format", "num_experts_per_tok", |m| m["config"]["num_experts_per_tok"] = json!(9)),
        ("format", "expert", |m| m["config"]["moe_intermediate_size"] = json!(31)),
        ("format", "expert", |m| m["config"]["moe_intermediate_size"] = json!(1 << 20)),
        ("format", "expert", |m| drop(m["experts"]["layers"].as_array_mut().unwrap().pop())),
        ("format", "expert", |m| m["experts"]["layers"][2] = Value::Null),
        ("missing_tensor", "model.layers.4", |m| {
            m["config"]["num_hidden_layers"] = json!(1 << 20);
            m["config"].as_object_mut().unwrap().remove("layer_types");
        }),
        ("format", "layer_types", |m| m["config"]["num_hidden_layers"] = json!(1 << 20)),
        ("format", "linear_conv_kernel_dim", |m| m["config"]["linear_conv_kernel_dim"] = json!(1 << 30)),
        ("format", "rotary", |m| m["config"]["rope_parameters"]["partial_rotary_factor"] = json!(1e9)),
        ("missing_tensor", "model.norm.weight", |m| {
            m["core"].as_object_mut().unwrap().remove("model.norm.weight");
        }),
    ];
    for (code, reason, change) in cases {
        let (most, result) = alloc::largest(|| run(with_manifest(change)));
        assert_error(result, code, &[reason]);
        assert!(most < MOST, "{reason}: {most} bytes were allocated");
    }
}

#[test]
fn an_unknown_architecture_names_the_known_ones() {
    let files = with_manifest(|m| m["config"]["model_type"] = json!("mamba"));
    assert_error(run(files), "unknown_architecture", &["mamba", "qwen3_5_moe_text"]);
}

#[test]
fn chatting_without_a_tokenizer_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    write(&small(), dir.path());
    let out = outrider(&["chat", dir.path().to_str().unwrap(), "hello", "--backend", "cpu"]);
    assert!(!out.status.success() && out.stdout.is_empty(), "{}", out.stdout);
    assert!(out.stderr.contains("tokenizer.json") && out.stderr.contains("pack again"), "{}", out.stderr);
}

#[test]
fn what_is_no_model_says_what_a_model_is() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &str| block_on(open_model(path)).map(|_| ());
    assert_error(open(dir.path().to_str().unwrap()), "request", &["manifest.json", "config.json"]);
    assert_error(open(dir.path().join("none").to_str().unwrap()), "not_found", &["none"]);
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert_error(open(file.to_str().unwrap()), "request", &["not a directory"]);
}

/// What the message says works when it is given as the budget.
#[test]
fn the_smallest_budget_is_named_and_works() {
    let manifest = Manifest::parse(&small()["manifest.json"]).unwrap();
    for context in [1, 64, 512] {
        let options = |budget| Options { budget, context: Some(context), ..cpu() };
        let smallest = smallest_budget(&manifest, &options(None)).unwrap();
        let load = |budget| common::load(MemoryFlash::new(small()), &options(Some(budget)));
        for budget in [0, 1, smallest - 1] {
            let error = assert_error(load(budget).map(|_| ()), "budget", &[&format!("context of {context} tokens")]);
            let Error::Budget { smallest: named, .. } = error else { unreachable!("checked by its code") };
            assert_eq!(named, smallest);
            // As a person would read it and type it in again.
            let text = error.to_string();
            let (_, rest) = text.split_once("at least ").unwrap();
            let shown: Size = rest.split_once(" at a context").unwrap().0.parse().unwrap();
            assert!(shown.0 >= smallest, "{text}: in truth {smallest} bytes");
            assert!(load(shown.0).is_ok(), "{text}");
        }
        let mut engine = load(smallest).unwrap();
        assert_eq!(engine.context(), context);
        assert!(engine.ledger().total() <= smallest);
        let result = pollster::block_on(engine.forward(&[5], outrider::engine::Want::Last, None));
        assert_eq!(result.unwrap().len(), 257);
    }
}

#[test]
fn the_bundled_model_says_its_smallest_budget_on_the_command_line() {
    let model = repository("models/concierge");
    let chat = |budget: &str| {
        let (model, backend) = (model.to_str().unwrap(), ["--backend", "cpu"]);
        let greedy = ["--max-tokens", "4", "--temperature", "0"];
        outrider(&[&["chat", model, "hi", "--cold", "--budget", budget], &backend[..], &greedy[..]].concat())
    };
    let out = chat("1MiB");
    assert!(!out.status.success() && out.stdout.is_empty());
    let (_, rest) = out.stderr.split_once("at least ").unwrap_or_else(|| panic!("{}", out.stderr));
    let out = chat(rest.split_once(" at a context").unwrap().0);
    assert!(out.status.success() && !out.stdout.trim().is_empty(), "{}", out.stderr);
}
