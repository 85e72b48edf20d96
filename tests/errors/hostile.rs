//! Files changed at random: whatever they say, loading and running ends in an error or in a result, without a panic and
//! without an allocation that the file's own size does not explain.

use std::path::Path;
use std::sync::OnceLock;

use outrider::Error;
use outrider::flash::MemoryFlash;
use outrider::import::{Checkpoint, PackOptions, Precision, open_model, pack_checkpoint};
use outrider::pack::{MemorySink, verify};
use outrider::tensor::DType;
use pollster::block_on;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::{GOLDEN_CHECKPOINTS, repository};
use crate::{Files, MOST, alloc, run, small, with_manifest};

/// Values that files are known to be attacked with, and ones that may fit by chance.
fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        3 => any::<u64>().prop_map(|n| json!(n)),
        6 => (0u64..600).prop_map(|n| json!(n)),
        3 => (0u32..64, -1i64..2).prop_map(|(shift, near)| json!((1u64 << shift).wrapping_add_signed(near))),
        1 => any::<i64>().prop_map(|n| json!(n)),
        1 => any::<f64>().prop_map(|n| json!(n)),
        1 => "[a-z./-]{0,12}".prop_map(|text| json!(text)),
        1 => prop_oneof![Just(json!(null)), Just(json!(true)), Just(json!([])), Just(json!({}))],
    ]
}

fn leaves(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.iter().map(leaves).sum(),
        Value::Object(fields) => fields.values().map(leaves).sum(),
        _ => 1,
    }
}

/// The `at`-th number, text or the like of a JSON value.
fn leaf<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    match value {
        Value::Array(items) => items.iter_mut().find_map(|v| leaf(v, at)),
        Value::Object(fields) => fields.values_mut().find_map(|v| leaf(v, at)),
        found if *at == 0 => Some(found),
        _ => {
            *at -= 1;
            None
        }
    }
}

fn change(value: &mut Value, at: prop::sample::Index, with: Value) {
    let mut at = at.index(leaves(value));
    *leaf(value, &mut at).expect("counted") = with;
}

/// Everything that is done with a pack.
fn exercise(files: &Files) {
    let (most, _) = alloc::largest(|| {
        let _ = block_on(verify(&MemoryFlash::new(files.clone()), |_| ()));
        // A NaN or the like that a changed weight leads to is an error, too; the test is that there is an end.
        let _ = run(files.clone());
    });
    assert!(most < MOST, "{most} bytes were allocated");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn changed_manifests_end_in_an_error_or_a_result(
        // The configuration and the descriptions of tensors are a small part of a manifest that consists of hashes.
        part in prop::sample::select(vec!["config", "embedding", "experts", "core", "shards", "extents", ""]),
        at: prop::sample::Index,
        with in value(),
    ) {
        exercise(&with_manifest(|m| {
            let part = if part.is_empty() { m } else { &mut m[part] };
            change(part, at, with);
        }));
    }

    #[test]
    fn manifests_without_a_field_end_in_an_error_or_a_result(
        part in prop::sample::select(vec!["config", "embedding", "experts", "core", ""]),
        at: prop::sample::Index,
    ) {
        exercise(&with_manifest(|m| {
            let part = if part.is_empty() { m } else { &mut m[part] };
            let fields = part.as_object_mut().unwrap();
            let name = fields.keys().nth(at.index(fields.len())).unwrap().clone();
            fields.remove(&name);
        }));
    }

    #[test]
    fn manifests_with_a_changed_byte_end_in_an_error_or_a_result(at: prop::sample::Index, byte: u8, cut: bool) {
        let mut files = small();
        let manifest = files.get_mut("manifest.json").unwrap();
        let at = at.index(manifest.len());
        manifest[at] = byte;
        if cut {
            manifest.truncate(at);
        }
        exercise(&files);
    }
}

/// Header and data of a checkpoint, and its configuration.
fn parts() -> &'static (Value, Vec<u8>, Value) {
    static PARTS: OnceLock<(Value, Vec<u8>, Value)> = OnceLock::new();
    PARTS.get_or_init(|| {
        let dir = repository(GOLDEN_CHECKPOINTS[0]);
        let mut header = std::fs::read(dir.join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(header[..8].try_into().unwrap()) as usize;
        let data = header.split_off(8 + length);
        let config = std::fs::read(dir.join("config.json")).unwrap();
        (serde_json::from_slice(&header[8..]).unwrap(), data, serde_json::from_slice(&config).unwrap())
    })
}

/// Everything that is done with a checkpoint. What is packed must be a pack.
fn exercise_checkpoint(length: Option<u64>, header: &[u8], config: &Value) {
    let dir = tempfile::tempdir().unwrap();
    let length = length.unwrap_or(header.len() as u64);
    let weights = [&length.to_le_bytes()[..], header, &parts().1].concat();
    std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let (most, packed) = alloc::largest(|| pack(dir.path()));
    assert!(most < MOST, "{most} bytes were allocated");
    if let Ok(flash) = packed {
        exercise(&flash.into_files());
        assert!(block_on(open_model(dir.path().to_str().unwrap())).is_ok());
    }
}

fn pack(dir: &Path) -> Result<MemoryFlash, Error> {
    let checkpoint = Checkpoint::open(dir)?;
    let precision = Precision::with_experts(DType::Q4);
    let options = PackOptions { provenance: false, ..PackOptions::new(precision) };
    block_on(pack_checkpoint(&checkpoint, &options, MemorySink::default(), |_, _| ())).map(|packed| packed.pack)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn changed_safetensors_headers_end_in_an_error_or_a_pack(at: prop::sample::Index, with in value()) {
        let mut header = parts().0.clone();
        change(&mut header, at, with);
        exercise_checkpoint(None, &serde_json::to_vec(&header).unwrap(), &parts().2);
    }

    #[test]
    fn changed_configurations_end_in_an_error_or_a_pack(at: prop::sample::Index, with in value()) {
        let mut config = parts().2.clone();
        change(&mut config, at, with);
        exercise_checkpoint(None, &serde_json::to_vec(&parts().0).unwrap(), &config);
    }

    #[test]
    fn changed_header_bytes_end_in_an_error_or_a_pack(
        at: prop::sample::Index,
        byte: u8,
        length in prop::option::weighted(0.3, prop_oneof![any::<u64>(), 0u64..30_000, (1u64 << 20)..(1 << 22)]),
    ) {
        let mut header = serde_json::to_vec(&parts().0).unwrap();
        let at = at.index(header.len());
        header[at] = byte;
        exercise_checkpoint(length, &header, &parts().2);
    }
}
