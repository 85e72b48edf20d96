//! Checkpoints that are incomplete, damaged, or hold what cannot be packed.

use std::path::{Path, PathBuf};

use outrider::import::{Checkpoint, PackOptions, Precision, pack_checkpoint};
use outrider::pack::{DirectorySink, MemorySink, Replace};
use outrider::tensor::DType;
use outrider::{Error, Result};
use pollster::block_on;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::checkpoints::{WEIGHTS, checkpoint, with_tensors};
use crate::common::outrider;
use crate::{MOST, alloc, assert_error};

/// Packs into a directory beside the checkpoint. Asserts that a failure leaves nothing there.
fn pack_as(dir: &Path, precision: Precision) -> Result<()> {
    let place = tempfile::tempdir().unwrap();
    let pack = || {
        let checkpoint = Checkpoint::open(dir)?;
        let sink = DirectorySink::new(&place.path().join("pack"), Replace::Nothing)?;
        block_on(pack_checkpoint(&checkpoint, &PackOptions::new(precision), sink, |_, _| ())).map(|_| ())
    };
    let (most, result) = alloc::largest(pack);
    assert!(most < MOST, "{most} bytes were allocated");
    let left: Vec<PathBuf> = std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().path()).collect();
    match result {
        Ok(()) => assert_eq!(left, [place.path().join("pack")]),
        Err(_) => assert!(left.is_empty(), "{left:?} was left behind"),
    }
    result
}

fn pack(dir: &Path) -> Result<()> {
    pack_as(dir, Precision::with_experts(DType::Q4))
}

/// A checkpoint whose header is changed, and whose data stays.
fn with_header(change: impl FnOnce(&mut Value)) -> TempDir {
    let dir = checkpoint();
    let path = dir.path().join(WEIGHTS);
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = serde_json::to_vec(&header).unwrap();
    std::fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + length..]].concat()).unwrap();
    dir
}

#[test]
fn the_checkpoint_itself_is_good() {
    assert!(pack(checkpoint().path()).is_ok());
    assert!(pack(with_header(|_| ()).path()).is_ok());
    assert!(pack(with_tensors(|_, _| ()).path()).is_ok());
}

#[test]
fn missing_files_are_named() {
    for file in ["config.json", WEIGHTS] {
        let dir = checkpoint();
        std::fs::remove_file(dir.path().join(file)).unwrap();
        assert_error(pack(dir.path()), "missing_file", &[file]);
    }
}

#[test]
fn a_file_that_ends_early_is_truncated() {
    let dir = checkpoint();
    let path = dir.path().join(WEIGHTS);
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 7, 8, 9, 1000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = assert_error(pack(dir.path()), "truncated", &[WEIGHTS, &length.to_string(), "again"]);
        assert!(matches!(error, Error::Truncated { actual, .. } if actual == length as u64));
    }
    std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    assert_error(pack(dir.path()), "format", &[WEIGHTS, "1 bytes follow"]);
}

#[test]
fn a_header_that_is_none_is_refused() {
    let dir = checkpoint();
    let path = dir.path().join(WEIGHTS);
    let whole = std::fs::read(&path).unwrap();
    for length in [whole.len() as u64, 99_000_000] {
        std::fs::write(&path, [&length.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
        assert_error(pack(dir.path()), "truncated", &[WEIGHTS]);
    }
    for length in [1 << 40, u64::MAX, u64::MAX - 7] {
        std::fs::write(&path, [&length.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
        assert_error(pack(dir.path()), "format", &[WEIGHTS, &length.to_string()]);
    }
    let cases: [&[u8]; 6] = [b"", b"{", b"[]", b"null", b"{\"a\": 1}", &[0xff; 64]];
    for header in cases {
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header].concat()).unwrap();
        assert_error(pack(dir.path()), "format", &[WEIGHTS]);
    }
}

#[test]
fn offsets_and_shapes_must_fit_the_bytes() {
    const NORM: &str = "model.norm.weight";
    const HEAD: &str = "lm_head.weight";
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 10] = [
        ("overlapping", |h| h[NORM]["data_offsets"] = h[HEAD]["data_offsets"].clone()),
        ("a gap", |h| drop(h.as_object_mut().unwrap().remove(NORM))),
        ("overflowing", |h| h[NORM]["data_offsets"] = json!([u64::MAX - 255, u64::MAX])),
        ("backwards", |h| {
            let (from, to) = (h[NORM]["data_offsets"][0].clone(), h[NORM]["data_offsets"][1].clone());
            h[NORM]["data_offsets"] = json!([to, from]);
        }),
        ("outside", |h| h[NORM]["data_offsets"][1] = json!(1u64 << 50)),
        ("another shape", |h| h[NORM]["shape"] = json!([65])),
        ("a shape that overflows", |h| h[NORM]["shape"] = json!([u64::MAX, u64::MAX])),
        ("a shape that overflows to the same size", |h| h[NORM]["shape"] = json!([(1u64 << 62) + 64])),
        ("another type", |h| h[NORM]["dtype"] = json!("F16")),
        ("an unknown type", |h| h[NORM]["dtype"] = json!("Q3_K")),
    ];
    for (what, change) in cases {
        let error = assert_error(pack(with_header(change).path()), "format", &[WEIGHTS]);
        println!("{what}: {error}");
    }
}

#[test]
fn types_that_are_no_weights_are_refused_by_name() {
    let change = |h: &mut Value| h["lm_head.weight"]["dtype"] = json!("I32");
    assert_error(pack(with_header(change).path()), "format", &["lm_head.weight", "F32, F16 and BF16"]);
}

#[test]
fn missing_tensors_are_named() {
    let names =
        ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight"];
    let expert = "model.layers.2.mlp.experts.7.down_proj.weight";
    for name in names.into_iter().chain([expert]) {
        let dir = with_tensors(|t, _| drop(t.remove(name)));
        assert_error(pack(dir.path()), "missing_tensor", &[name, "download it again"]);
    }
}

#[test]
fn tensors_of_another_shape_are_named_with_both() {
    for (name, shape) in [
        ("lm_head.weight", vec![64, 257]),
        ("model.embed_tokens.weight", vec![64, 257]),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", vec![64, 32]),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", vec![2048]),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", vec![]),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", vec![1, 1, 32, 64]),
        ("model.norm.weight", vec![8, 8]),
    ] {
        let dir = with_tensors(|t, _| {
            let tensor = t.get_mut(name).unwrap();
            tensor.0 = shape.clone();
            tensor.1.truncate(shape.iter().product());
        });
        assert_error(pack(dir.path()), "format", &[name]);
    }
}

/// A weight that is no number is a broken checkpoint, whatever type it would be stored as.
#[test]
fn weights_that_are_no_numbers_are_refused_by_name() {
    let lossless = Precision::Lossless;
    let precisions = [DType::Q4, DType::Q8, DType::F16, DType::F32].map(Precision::with_experts);
    for name in [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.1.mlp.experts.5.up_proj.weight",
    ] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let dir = with_tensors(|t, _| t.get_mut(name).unwrap().1[1] = bad);
            for precision in precisions.into_iter().chain([lossless]) {
                assert_error(pack_as(dir.path(), precision), "encode", &[name, &bad.to_string()]);
            }
        }
    }
    let dir = with_tensors(|t, _| t.get_mut("lm_head.weight").unwrap().1[1] = 1e9);
    assert!(pack_as(dir.path(), lossless).is_ok());
    assert_error(pack(dir.path()), "encode", &["lm_head.weight", "q8", "range"]);
}

#[test]
fn an_index_must_name_what_is_there() {
    let dir = checkpoint();
    let index = |map: Value| {
        std::fs::write(dir.path().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
            .unwrap();
        pack(dir.path())
    };
    assert!(index(json!({"model.norm.weight": WEIGHTS})).is_ok());
    assert_error(index(json!({"model.norm.weight": "part-2.safetensors"})), "not_found", &["part-2.safetensors"]);
    assert_error(index(json!({"no.such.tensor": WEIGHTS})), "missing_tensor", &["no.such.tensor"]);
    for name in ["../model.safetensors", "/etc/passwd", "a/b", ""] {
        assert_error(index(json!({"model.norm.weight": name})), "format", &["is not a plain file name"]);
    }
    assert_error(index(json!([1, 2])), "format", &["index.json"]);
    std::fs::copy(dir.path().join(WEIGHTS), dir.path().join("copy.safetensors")).unwrap();
    let twice = json!({"model.norm.weight": WEIGHTS, "lm_head.weight": "copy.safetensors"});
    assert_error(index(twice), "format", &["appears twice"]);
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let with_config = |change: fn(&mut Value)| with_tensors(|_, config| change(config));
    let unknown = with_config(|c| c["model_type"] = json!("mamba"));
    assert_error(pack(unknown.path()), "unknown_architecture", &["mamba", "qwen3_5_moe_text"]);
    let none = with_config(|c| *c = json!([]));
    assert_error(pack(none.path()), "unknown_architecture", &["qwen3_5_moe_text"]);
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 6] = [
        ("hidden_size", |c| c["hidden_size"] = json!(1u64 << 40)),
        ("hidden_size", |c| drop(c.as_object_mut().unwrap().remove("hidden_size"))),
        ("`-1`", |c| c["num_experts"] = json!(-1)),
        ("mlp.gate.weight", |c| c["num_experts"] = json!(1 << 20)),
        ("experts", |c| c["moe_intermediate_size"] = json!(1 << 20)),
        ("rope_type", |c| c["rope_parameters"]["rope_type"] = json!("longrope")),
    ];
    for (reason, change) in cases {
        assert_error(pack(with_config(change).path()), "format", &[reason]);
    }
    let dir = checkpoint();
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    assert_error(pack(dir.path()), "format", &["config.json"]);
}

#[test]
fn the_command_leaves_nothing_of_a_pack_that_failed() {
    let dir = with_tensors(|t, _| t.get_mut("model.layers.3.mlp.experts.7.up_proj.weight").unwrap().1[0] = f32::NAN);
    let place = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().to_str().unwrap(), place.path().join("pack"));
    let out = outrider(&["pack", from, "-o", to.to_str().unwrap(), "--quant", "q4"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(out.stdout.is_empty() && out.stderr.contains("experts.7.up_proj"), "{}", out.stderr);
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
}

/// Shards too small for an expert are refused before anything is written.
#[test]
fn shards_must_hold_an_expert() {
    let dir = checkpoint();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let with_shards = |max_shard| {
        let options = PackOptions { max_shard, ..PackOptions::new(Precision::with_experts(DType::Q4)) };
        block_on(pack_checkpoint(&checkpoint, &options, MemorySink::default(), |_, _| ())).map(|packed| packed.manifest)
    };
    assert_error(with_shards(0), "request", &["0 bytes"]);
    assert_error(with_shards(4095), "request", &["4095 bytes"]);
    let manifest = with_shards(4096).unwrap();
    assert!(manifest.shards.iter().all(|s| s.bytes <= 4096));
}
