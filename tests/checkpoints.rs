//! One model in every form that checkpoints come in: whatever the form, the same results, to the bit.

#[path = "common/checkpoints.rs"]
mod checkpoints;
mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use checkpoints::{Tensors, WEIGHTS, checkpoint, contents, save, with_tensors};
use common::{engine, forward, on, pack};
use outrider::engine::BackendChoice;
use outrider::import::{Checkpoint, unpack};
use outrider::pack::{DirectorySink, Pack, Replace};
use outrider::tensor::DType;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

const PROMPT: [u32; 5] = [1, 2, 3, 200, 5];

fn logits(checkpoint: &Path) -> Vec<f32> {
    forward(&mut engine(checkpoint, &on(BackendChoice::Cpu)), &PROMPT).0
}

/// Replaces the experts' matrices of every layer by one tensor for gates and ups and one for downs.
fn fuse(tensors: &mut Tensors) {
    for layer in 0..4 {
        let at = format!("model.layers.{layer}.mlp.experts");
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in 0..8 {
            let mut take = |part: &str| tensors.remove(&format!("{at}.{expert}.{part}_proj.weight")).unwrap().1;
            gate_up.extend(take("gate"));
            gate_up.extend(take("up"));
            down.extend(take("down"));
        }
        tensors.insert(format!("{at}.gate_up_proj"), (vec![8, 64, 64], gate_up));
        tensors.insert(format!("{at}.down_proj"), (vec![8, 64, 32], down));
    }
}

/// Names and configuration of a model that sees: the language model is a part of it.
fn nest(tensors: &mut Tensors, config: &mut Value) {
    let rename = |name: String| match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name,
    };
    *tensors = std::mem::take(tensors).into_iter().map(|(name, t)| (rename(name), t)).collect();
    tensors.insert("model.visual.patch_embed.proj.weight".into(), (vec![2, 2], vec![0.5; 4]));
    tensors.insert("mtp.norm.weight".into(), (vec![2], vec![0.5; 2]));
    *config = json!({"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {"depth": 1}});
}

#[test]
fn every_form_gives_the_same_bits() {
    let expected = logits(checkpoint().path());
    let forms: [(&str, TempDir); 3] = [
        ("fused experts", with_tensors(|t, _| fuse(t))),
        ("a part of a larger model", with_tensors(nest)),
        (
            "both",
            with_tensors(|t, config| {
                fuse(t);
                nest(t, config);
            }),
        ),
    ];
    for (form, dir) in &forms {
        assert_eq!(logits(dir.path()), expected, "{form}");
        for dtype in [DType::Q4, DType::F16] {
            let (ours, theirs) = (pack(dir.path(), dtype, dtype), pack(checkpoint().path(), dtype, dtype));
            let shards = |flash: outrider::flash::MemoryFlash| {
                let mut files = flash.into_files();
                files.retain(|name, _| name.ends_with(".bin"));
                files
            };
            assert!(shards(ours) == shards(theirs), "{form} as {dtype}");
        }
    }
}

#[test]
fn several_files_are_one_checkpoint() {
    let (tensors, config) = contents();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut parts = [(); 3].map(|()| Tensors::new());
    let mut map = serde_json::Map::new();
    for (i, (name, tensor)) in tensors.into_iter().enumerate() {
        map.insert(name.clone(), json!(format!("model-{}.safetensors", i % 3)));
        parts[i % 3].insert(name, tensor);
    }
    for (i, part) in parts.iter().enumerate() {
        save(&dir.path().join(format!("model-{i}.safetensors")), part, Dtype::F32);
    }
    std::fs::write(dir.path().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    assert_eq!(logits(dir.path()), logits(checkpoint().path()));
}

#[test]
fn a_tied_head_is_the_embedding() {
    let embedding = contents().0["model.embed_tokens.weight"].clone();
    let untied = with_tensors(|t, _| drop(t.insert("lm_head.weight".into(), embedding)));
    let tied = with_tensors(|t, config| {
        t.remove("lm_head.weight");
        config["tie_word_embeddings"] = json!(true);
    });
    let expected = logits(untied.path());
    assert_ne!(expected, logits(checkpoint().path()));
    assert_eq!(logits(tied.path()), expected);
    // Back from a pack, the head is still not there by itself.
    let back = round_trip(tied.path());
    assert!(Checkpoint::open(back.path()).unwrap().find("lm_head.weight").is_none());
    assert_eq!(logits(back.path()), expected);
}

/// Half-precision checkpoints are those of the rounded values.
#[test]
fn half_precision_is_read_exactly() {
    for (dtype, rounded) in [
        (Dtype::F16, (|v| half::f16::from_f32(v).to_f32()) as fn(f32) -> f32),
        (Dtype::BF16, |v| half::bf16::from_f32(v).to_f32()),
    ] {
        let (tensors, _) = contents();
        let dir = checkpoint();
        save(&dir.path().join(WEIGHTS), &tensors, dtype);
        let full = with_tensors(|t, _| t.values_mut().flat_map(|(_, v)| v).for_each(|v| *v = rounded(*v)));
        let off = common::max_difference(&logits(dir.path()), &logits(full.path()));
        assert!(off <= 2e-4, "{dtype:?}: off by {off:e}");
    }
}

/// Packs without loss and unpacks.
fn round_trip(checkpoint: &Path) -> TempDir {
    let pack: Pack = pollster::block_on(outrider::import::open_model(checkpoint.to_str().unwrap())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let sink = DirectorySink::new(dir.path(), Replace::Nothing).unwrap();
    pollster::block_on(unpack(&pack, sink, |_, _| ())).unwrap();
    dir
}

/// Whatever form it had, what comes back has an expert's matrices each by itself and only the language model.
#[test]
fn unpacking_gives_the_plain_form() {
    let forms = [checkpoint(), with_tensors(|t, _| fuse(t)), with_tensors(nest)];
    let names = |dir: &Path| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        checkpoint.tensors().map(|(name, _)| name.to_owned()).collect::<BTreeSet<_>>()
    };
    let plain = names(forms[0].path());
    let expected = logits(forms[0].path());
    for form in forms {
        let back = round_trip(form.path());
        assert_eq!(names(back.path()), plain);
        assert_eq!(logits(back.path()), expected);
    }
}

/// Whatever names an architecture has and however it stores its experts, a pack in f32 gives back what it was made of.
#[test]
fn every_architecture_is_unpacked_as_it_was() {
    let names = [
        "deepseek_v2/a",
        "gpt_oss/a",
        "granitemoe/a",
        "lfm2_moe/a",
        "llama/a",
        "olmoe/a",
        "qwen3/a",
        "qwen3_moe/b",
        "qwen3_next/a",
    ];
    for name in names {
        let from = common::repository("tests/data/golden").join(name);
        let pack = pollster::block_on(Pack::open(Rc::new(pack(&from, DType::F32, DType::F32)))).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let sink = DirectorySink::new(dir.path(), Replace::Nothing).unwrap();
        pollster::block_on(unpack(&pack, sink, |_, _| ())).unwrap();
        let (before, after) = (Checkpoint::open(&from).unwrap(), Checkpoint::open(dir.path()).unwrap());
        let tensors = |c: &Checkpoint| c.tensors().map(|(name, _)| name.to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(tensors(&before), tensors(&after), "{name}");
        for (tensor, about) in before.tensors() {
            assert_eq!(after.tensor(tensor).unwrap().shape, about.shape, "{name}: {tensor}");
            let values = |c: &Checkpoint| c.values(tensor, 0, about.len()).unwrap();
            assert!(values(&before) == values(&after), "{name}: {tensor}");
        }
    }
}
