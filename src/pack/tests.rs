use std::rc::Rc;

use pollster::block_on;
use proptest::prelude::*;

use super::*;
use crate::flash::MemoryFlash;
use crate::model::plan::ExpertShape;
use crate::tensor::{DType, Layout, encode};

const SHARD: u64 = 3 << 16;

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
}

/// A pack of two layers, the first without experts, whose core does not fit into one shard.
fn small() -> (Manifest, MemoryFlash) {
    let shape = ExpertShape::new(DType::Q4, 48, 20, false);
    let identity = Identity {
        name: "small".into(),
        licence: None,
        architecture: "none".into(),
        config: serde_json::json!({"hidden_size": 48}),
        quantisation: Quantisation { core: DType::F32, experts: Some(DType::Q4) },
        provenance: vec![],
    };
    let embedding = Layout::new(DType::F16, 3000, 48);
    let mut w = PackWriter::new(MemorySink::default(), identity, embedding, Some((shape, 3)), SHARD).unwrap();
    let big = Layout::new(DType::F32, 1000, 150);
    w.vector("a", &[7], &values(7, 1)).unwrap();
    w.matrix("big", &big, &encode(&big, "big", &values(150_000, 2)).unwrap()).unwrap();
    w.vector("z", &[3, 1, 2], &values(6, 3)).unwrap();
    for row in 0..3000 {
        w.embedding_rows(&encode(&embedding.row(), "e", &values(48, row)).unwrap()).unwrap();
    }
    for expert in 0..3 {
        w.expert(1, &expert_bytes(&shape, expert)).unwrap();
    }
    w.file("tokenizer.json", b"{}").unwrap();
    w.finish().unwrap()
}

fn expert_bytes(shape: &ExpertShape, expert: usize) -> Vec<u8> {
    let part = |layout: &Layout, seed| encode(layout, "x", &values(layout.rows * layout.cols, seed)).unwrap();
    [part(&shape.gate, expert), part(&shape.up, expert + 10), part(&shape.down, expert + 20)].concat()
}

fn open(flash: MemoryFlash) -> Result<Pack> {
    block_on(Pack::open(Rc::new(flash)))
}

#[test]
fn what_is_written_is_read() {
    let (manifest, flash) = small();
    assert!(manifest.shards.iter().all(|s| s.bytes <= SHARD), "{:?}", manifest.shards);
    assert!(manifest.core["big"].pieces.len() > 3, "the large tensor is spread over shards");
    let pack = open(flash.clone()).unwrap();
    assert_eq!(pack.manifest(), &manifest);
    for verified in [false, true] {
        let f32s = |bytes: Vec<u8>| -> Vec<f32> { bytemuck::pod_collect_to_vec(&bytes) };
        assert_eq!(f32s(block_on(pack.core("a")).unwrap()), values(7, 1));
        assert_eq!(f32s(block_on(pack.core("z")).unwrap()), values(6, 3));
        let big = Layout::new(DType::F32, 1000, 150);
        assert_eq!(block_on(pack.core("big")).unwrap(), encode(&big, "big", &values(150_000, 2)).unwrap());
        let rows = block_on(pack.embedding_rows(&[2999, 0, 1500])).unwrap();
        let f16 = |v: &f32| half::f16::from_f32(*v).to_f32();
        let expected: Vec<f32> = [2999, 0, 1500].iter().flat_map(|r| values(48, *r)).map(|v| f16(&v)).collect();
        assert_eq!(rows, expected);
        let shape = ExpertShape::new(DType::Q4, 48, 20, false);
        assert_eq!(pack.expert_bytes(), shape.bytes());
        for expert in 0..3 {
            let read = block_on(pack.expert(1, expert)).unwrap().into_vec();
            assert_eq!(read, expert_bytes(&shape, expert), "verified: {verified}");
        }
        assert_eq!(block_on(pack.file("tokenizer.json")).unwrap().unwrap(), b"{}");
        assert_eq!(block_on(pack.file("other.json")).unwrap(), None);
    }
    assert_eq!(block_on(pack.core("none")).unwrap_err().code(), "missing_tensor");
    assert_eq!(block_on(pack.expert(0, 0)).unwrap_err().code(), "missing_tensor");
    assert_eq!(block_on(pack.expert(1, 3)).unwrap_err().code(), "missing_tensor");
    assert_eq!(block_on(pack.embedding_rows(&[3000])).unwrap_err().code(), "request");
    assert!(block_on(verify(&flash, |_| ())).unwrap().is_empty());
}

/// The pack with bytes changed in one of its files.
fn with(change: impl FnOnce(&mut std::collections::BTreeMap<String, Vec<u8>>)) -> MemoryFlash {
    let mut files = small().1.into_files();
    change(&mut files);
    MemoryFlash::new(files)
}

#[test]
fn a_flipped_byte_is_found_where_it_is_read() {
    let flip = |file: &str, at: usize| with(|f| f.get_mut(file).unwrap()[at] ^= 1);
    let pack = open(flip("experts-00000.bin", 4096 + 5)).unwrap();
    block_on(pack.expert(1, 0)).unwrap();
    let error = block_on(pack.expert(1, 1)).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { path, offset: 4096, .. } if path == "experts-00000.bin"), "{error}");
    let pack = open(flip("core-00001.bin", 100)).unwrap();
    block_on(pack.core("a")).unwrap();
    assert_eq!(block_on(pack.core("big")).unwrap_err().code(), "corrupt");
    let pack = open(flip("embedding-00000.bin", 0)).unwrap();
    assert_eq!(block_on(pack.embedding_rows(&[0])).unwrap_err().code(), "corrupt");
    let pack = open(flip("tokenizer.json", 0)).unwrap();
    assert_eq!(block_on(pack.file("tokenizer.json")).unwrap_err().code(), "corrupt");
}

#[test]
fn verify_names_everything_that_is_wrong() {
    let flash = with(|f| {
        f.get_mut("experts-00000.bin").unwrap()[5] ^= 1;
        f.get_mut("experts-00000.bin").unwrap()[2 * 4096] ^= 1;
        f.get_mut("core-00000.bin").unwrap().pop();
        f.remove("embedding-00001.bin");
        f.get_mut("tokenizer.json").unwrap()[0] = b'x';
    });
    let mut last = None;
    let bad = block_on(verify(&flash, |p| last = Some(p))).unwrap();
    let found: Vec<_> = bad.iter().map(|b| (b.file.as_str(), b.what.as_str(), b.error.code())).collect();
    let expected = [
        ("core-00000.bin", "the whole file", "truncated"),
        ("embedding-00001.bin", "the whole file", "not_found"),
        ("experts-00000.bin", "expert 0 of layer 1", "corrupt"),
        ("experts-00000.bin", "expert 2 of layer 1", "corrupt"),
        ("tokenizer.json", "the whole file", "corrupt"),
    ];
    let mut sorted = found.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, expected, "{found:?}");
    let last = last.unwrap();
    assert_eq!(last.done, last.total);
}

#[test]
fn a_short_or_missing_shard_is_found_on_opening() {
    let truncated = with(|f| {
        f.get_mut("experts-00000.bin").unwrap().pop();
    });
    let error = open(truncated).err().unwrap();
    assert!(matches!(error, Error::Truncated { expected: 12288, actual: 12287, .. }), "{error}");
    let missing = with(|f| {
        f.remove("core-00002.bin");
    });
    assert_eq!(open(missing).err().unwrap().code(), "not_found");
    assert_eq!(open(MemoryFlash::default()).err().unwrap().code(), "not_found");
}

fn with_manifest(change: impl FnOnce(&mut serde_json::Value)) -> Error {
    let flash = with(|f| {
        let manifest = f.get_mut(MANIFEST).unwrap();
        let mut value = serde_json::from_slice(manifest).unwrap();
        change(&mut value);
        *manifest = serde_json::to_vec(&value).unwrap();
    });
    open(flash).err().expect("a broken manifest must not open")
}

#[test]
fn a_newer_version_says_so_whatever_else_it_holds() {
    let error = with_manifest(|m| *m = serde_json::json!({"format": "outrider-pack", "version": 2, "new": []}));
    assert!(matches!(error, Error::Version { found: 2, supported: 1 }), "{error}");
}

#[test]
fn manifests_that_do_not_fit_together_are_refused() {
    use serde_json::json;
    type Change = fn(&mut serde_json::Value);
    let cases: [(&str, Change); 21] = [
        ("the format is", |m| m["format"] = json!("other")),
        ("unknown field", |m| m["surprise"] = json!(1)),
        ("missing field", |m| *m = json!({"format": "outrider-pack", "version": 1})),
        ("not a plain file name", |m| m["shards"][0]["file"] = json!("../core.bin")),
        ("not a plain file name", |m| m["files"][0]["file"] = json!("C:\\x")),
        ("listed twice", |m| m["files"][0]["file"] = json!("core-00000.bin")),
        ("listed twice", |m| m["files"][0]["file"] = json!("manifest.json")),
        ("overflow", |m| m["files"][0]["bytes"] = json!(u64::MAX)),
        ("cover", |m| m["shards"][0]["bytes"] = json!(1u64 << 60)),
        ("does not continue", |m| m["shards"][0]["bytes"] = json!(64)),
        ("does not continue", |m| m["extents"][1][1] = json!(u64::MAX)),
        ("lies in shard", |m| m["extents"].as_array_mut().unwrap().push(json!([99, 0, 1, "00".repeat(32)]))),
        ("overflows", |m| m["core"]["big"]["shape"] = json!([u64::MAX, 2])),
        ("overflows", |m| m["core"]["z"]["shape"] = json!([u32::MAX, u32::MAX, 2])),
        ("its shape needs", |m| m["core"]["big"]["shape"] = json!([1000, 1500])),
        ("outside", |m| m["core"]["a"]["pieces"][0][1] = json!(u64::MAX - 4)),
        ("outside", |m| m["embedding"]["rows"] = json!(3_000_000)),
        ("out of order", |m| m["embedding"]["pieces"][1]["first_row"] = json!(0)),
        ("stride", |m| m["experts"]["width"] = json!(u32::MAX)),
        ("does not exist", |m| m["experts"]["layers"][1][0] = json!(10_000)),
        ("layer 1", |m| m["experts"]["layers"][1][0] = json!(0)),
    ];
    for (reason, change) in cases {
        let error = with_manifest(change);
        assert_eq!(error.code(), "format", "{error}");
        assert!(error.to_string().contains(reason), "expected `{reason}`: {error}");
    }
}

/// Reads everything a manifest names.
async fn read_all(pack: &Pack) {
    for name in pack.manifest().core.keys() {
        let _ = pack.core(name).await;
    }
    let rows = pack.manifest().embedding.rows;
    for row in [0, rows / 2, rows - 1] {
        let _ = pack.embedding_rows(&[row as u32]).await;
    }
    for expert in 0..4 {
        let _ = pack.expert(1, expert).await;
    }
    let _ = pack.file("tokenizer.json").await;
}

/// Replaces the `at`-th number or string of a JSON value.
fn replace(value: &mut serde_json::Value, at: &mut usize, with: &serde_json::Value) {
    match value {
        serde_json::Value::Array(items) => items.iter_mut().for_each(|v| replace(v, at, with)),
        serde_json::Value::Object(map) => map.values_mut().for_each(|v| replace(v, at, with)),
        leaf => {
            if *at == 0 {
                *leaf = with.clone();
            }
            *at = at.wrapping_sub(1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn changed_manifests_never_panic(at in 0usize..300, number in prop_oneof![
        any::<u64>(), 0u64..5000, Just(0), Just(u64::MAX), Just(1u64 << 32), Just(1u64 << 63)
    ], as_string: bool) {
        let (manifest, flash) = small();
        let mut value = serde_json::to_value(&manifest).unwrap();
        let new = if as_string { serde_json::json!(number.to_string()) } else { serde_json::json!(number) };
        replace(&mut value, &mut { at }, &new);
        let mut files = flash.into_files();
        files.insert(MANIFEST.into(), serde_json::to_vec(&value).unwrap());
        if let Ok(pack) = open(MemoryFlash::new(files)) {
            block_on(read_all(&pack));
        }
    }

    #[test]
    fn broken_json_never_panics(at in 0usize..8000, byte: u8, cut: bool) {
        let mut json = small().0.to_json();
        let at = at % json.len();
        json[at] = byte;
        if cut {
            json.truncate(at);
        }
        let _ = Manifest::parse(&json);
    }
}

fn map(layer: usize, distance: usize, seed: usize) -> Map {
    let layout = Layout::new(DType::Q8, 3, 48);
    Map { layer, distance, layout, bytes: encode(&layout, "m", &values(144, seed)).unwrap() }
}

#[test]
fn maps_come_and_go_without_the_rest_being_touched() {
    let (bare, flash) = small();
    let mut files = flash.into_files();
    let copy = |flash: MemoryFlash, maps: &[Map]| {
        let pack = open(flash).unwrap();
        block_on(copy_with_maps(&pack, maps, MemorySink::default())).unwrap()
    };
    let first = [map(1, 1, 5), map(1, 2, 6)];
    let (manifest, flash) = copy(MemoryFlash::new(files.clone()), &first);
    assert!(manifest.has_maps() && !bare.has_maps());
    assert!(block_on(verify(&flash, |_| ())).unwrap().is_empty());
    let pack = open(flash.clone()).unwrap();
    assert_eq!(pack.manifest(), &manifest);
    for map in &first {
        let name = crate::model::map_name(map.layer, map.distance);
        assert_eq!(block_on(pack.core(&name)).unwrap(), map.bytes);
        assert_eq!(pack.core_layout(&name).unwrap().layout(), Some(map.layout));
    }
    block_on(read_all(&pack));
    for (file, bytes) in flash.clone().into_files() {
        assert!(file == MANIFEST || file.starts_with("maps-") || files[&file] == bytes, "{file}");
    }
    // Others take their place under another name; without any the pack is what it was.
    let (second, replaced) = copy(flash.clone(), &[map(1, 1, 7)]);
    let named = |m: &Manifest| m.shards.iter().find(|s| s.file.starts_with("maps-")).unwrap().file.clone();
    assert_ne!(named(&manifest), named(&second));
    assert_eq!(second.shards.len(), manifest.shards.len());
    assert!(block_on(verify(&replaced, |_| ())).unwrap().is_empty());
    assert_eq!(copy(replaced, &[]).1.into_files(), files);
    // The same maps again are the same pack.
    assert_eq!(copy(flash.clone(), &first).1.into_files(), flash.into_files());
    let twice = put_maps(&bare, &[map(1, 1, 5), map(1, 1, 5)], &mut MemorySink::default());
    assert_eq!(twice.unwrap_err().code(), "request");
    // A shard that lies before others goes, too.
    let mut moved = manifest.clone();
    let last = moved.shards.len() - 1;
    moved.shards.rotate_right(1);
    let next = |shard: &mut usize| *shard = if *shard == last { 0 } else { *shard + 1 };
    moved.extents.iter_mut().for_each(|e| next(&mut e.shard));
    moved.core.values_mut().flat_map(|t| &mut t.pieces).for_each(|p| next(&mut p.shard));
    moved.embedding.pieces.iter_mut().for_each(|p| next(&mut p.shard));
    moved.validate().unwrap();
    let without = put_maps(&moved, &[], &mut MemorySink::default()).unwrap();
    assert_eq!(without, bare);
    files.insert(MANIFEST.into(), without.to_json());
    block_on(read_all(&open(MemoryFlash::new(files)).unwrap()));
}

/// Cut before the manifest is there, the pack is the one before; after, the one with the new maps.
#[test]
fn maps_are_put_into_a_directory_whole_or_not_at_all() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let write = |files: &std::collections::BTreeMap<String, Vec<u8>>| {
        files.iter().for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes).unwrap());
    };
    let names = || -> std::collections::BTreeSet<String> {
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    };
    let good = || {
        let flash = crate::flash::FileFlash::open(dir).unwrap();
        block_on(verify(&flash, |_| ())).unwrap().is_empty()
    };
    write(&small().1.into_files());
    // Of calls that were killed.
    for left in ["maps-0123-00000.bin", ".maps-0123-00001.bin.partial"] {
        std::fs::write(dir.join(left), "x").unwrap();
    }
    set_maps(dir, &[map(1, 1, 5)]).unwrap();
    assert_eq!(names().iter().filter(|name| name.contains("maps-")).count(), 1);
    let read = |name: &String| (name.clone(), std::fs::read(dir.join(name)).unwrap());
    let before: std::collections::BTreeMap<_, _> = names().iter().map(read).collect();
    let manifest = set_maps(dir, &[map(1, 1, 6)]).unwrap();
    assert!(good());
    let files: std::collections::BTreeSet<String> = manifest.shards.iter().map(|s| s.file.clone()).collect();
    assert_eq!(names(), &files | &["tokenizer.json", MANIFEST].map(String::from).into());
    write(&before);
    assert!(good());
    // What cannot be written changes nothing.
    let now = names();
    assert!(set_maps(dir, &[map(1, 1, 5), map(1, 1, 7)]).is_err());
    assert!(good() && names() == now);
}
