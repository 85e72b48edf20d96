//! A checkpoint written as GGUF in several types, in one file and in parts.

use std::collections::BTreeSet;
use std::rc::Rc;

use outrider::engine::{BackendChoice, Engine, Options};
use outrider::flash::{Flash, MemoryFlash};
use outrider::import::{Checkpoint, Gguf, PackOptions, Precision, Weights, pack_checkpoint, unpack};
use outrider::pack::{DirectorySink, MemorySink, Pack, Replace};
use outrider::tensor::DType;
use pollster::block_on;

use crate::checkpoints::contents;
use crate::common::{GOLDEN_CHECKPOINTS, Golden, forward, max_difference, on, repository};
use crate::gguf::{F16, F32, File, Q8_0, flash, qwen35moe};

fn file(kind: u32) -> File {
    let (tensors, config) = contents();
    qwen35moe(&tensors, &config, kind)
}

fn open(flash: MemoryFlash, name: &str) -> Gguf {
    block_on(Gguf::open(Rc::new(flash), name)).unwrap()
}

fn pack(gguf: &Gguf, precision: Precision) -> Rc<dyn Flash> {
    let options = PackOptions::new(precision);
    let packing = pack_checkpoint(gguf, &options, MemorySink::default(), |_, _| ());
    Rc::new(block_on(packing).unwrap().pack)
}

fn engine(flash: Rc<dyn Flash>, options: &Options) -> Engine {
    block_on(async { Engine::load(Pack::open(flash).await?, options, |_, _| ()).await }).unwrap()
}

/// Every tensor of the checkpoint is in the file under its name, with its shape and its values.
#[test]
fn tensors_are_those_of_the_checkpoint() {
    let (tensors, _) = contents();
    let gguf = open(file(F32).flash(), "m.gguf");
    let of_experts = |name: &str| name.contains(".mlp.experts.");
    let mut names: BTreeSet<&str> = gguf.names().into_iter().filter(|name| !of_experts(name)).collect();
    for (name, (shape, expected)) in &tensors {
        assert!(of_experts(name) || names.remove(name.as_str()), "{name}");
        assert_eq!(gguf.find(name).unwrap().shape, *shape, "{name}");
        let values = block_on(gguf.values(name, 0, expected.len())).unwrap();
        // One added and taken away again, and a logarithm of an exponential, round.
        let computed = name.ends_with("norm.weight") || name.ends_with("A_log");
        let off = max_difference(&values, expected);
        assert!(off <= if computed { 3e-7 } else { 0.0 }, "{name} is off by {off:e}");
    }
    assert!(names.is_empty(), "{names:?}");
    for none in ["model.layers.0.mlp.experts.8.up_proj.weight", "model.layers.0.mlp.experts.0.norm.weight"] {
        assert!(gguf.find(none).is_none());
    }
}

#[test]
fn logits_are_those_of_the_checkpoint() {
    let golden = Golden::open(&repository(GOLDEN_CHECKPOINTS[0]).join("golden.safetensors"));
    let flash = pack(&open(file(F32).flash(), "m.gguf"), Precision::Lossless);
    let mut engine = engine(flash, &on(BackendChoice::Cpu));
    for prompt in 0..golden.prompts() {
        let (logits, _) = forward(&mut engine, &golden.ids(prompt));
        let off = max_difference(&logits, &golden.floats(&format!("logits.{prompt}")));
        assert!(off <= 2e-4, "prompt {prompt} is off by {off:e}");
    }
}

/// A pack without loss has the file's own types, and the weights that the file has.
#[test]
fn types_that_packs_have_stay_what_they_are() {
    for (kind, dtype) in [(F32, DType::F32), (F16, DType::F16), (Q8_0, DType::Q8)] {
        let gguf = open(file(kind).flash(), "m.gguf");
        assert_eq!(gguf.precision(), Precision::Lossless);
        let flash = pack(&gguf, Precision::Lossless);
        let pack = block_on(Pack::open(flash)).unwrap();
        let manifest = pack.manifest();
        assert_eq!((manifest.quantisation.core, manifest.quantisation.experts), (dtype, Some(dtype)));
        assert_eq!((manifest.name.as_str(), manifest.architecture.as_str()), ("Odd Shapes", "qwen3_5_moe_text"));
        let matrices = manifest.core.iter().filter(|(_, t)| t.shape.len() == 2);
        assert!(matrices.clone().count() > 30);
        for (name, tensor) in matrices {
            // A single row is a vector to GGUF and stays F32.
            let expected = if name.ends_with("shared_expert_gate.weight") { DType::F32 } else { dtype };
            assert_eq!(tensor.dtype, expected, "{name}");
        }
        let dir = tempfile::tempdir().unwrap();
        block_on(unpack(&pack, DirectorySink::new(dir.path(), Replace::Nothing).unwrap(), |_, _| ())).unwrap();
        let back = Checkpoint::open(dir.path()).unwrap();
        for (name, tensor) in back.tensors() {
            let values = back.values(name, 0, tensor.len()).unwrap();
            let expected = block_on(gguf.values(name, 0, values.len()));
            assert_eq!(values, expected.unwrap(), "{name}");
        }
    }
}

#[test]
fn a_split_model_is_one() {
    let whole = file(Q8_0);
    let parts = whole.split(3);
    let gguf = open(flash(parts.clone()), "m-00001-of-00003.gguf");
    let sizes: Vec<(String, u64)> = parts.iter().map(|(name, bytes)| (name.clone(), bytes.len() as u64)).collect();
    assert_eq!(gguf.files(), sizes);
    let logits = |gguf: &Gguf| {
        let mut engine = engine(pack(gguf, Precision::Lossless), &on(BackendChoice::Cpu));
        forward(&mut engine, &[1, 2, 3, 200]).0
    };
    assert_eq!(logits(&gguf), logits(&open(whole.flash(), "m.gguf")));
}

/// Version 2 differs from version 3 only in that the latter may be big-endian; other alignments are as good.
#[test]
fn other_versions_and_alignments_are_read() {
    let mut file = file(F16);
    let plain = block_on(open(file.flash(), "m.gguf").values("lm_head.weight", 0, 64)).unwrap();
    file.version = 2;
    for alignment in [1, 8, 4096] {
        file.alignment = alignment;
        file.set("general.alignment", crate::gguf::Value::U32(alignment as u32));
        assert_eq!(block_on(open(file.flash(), "m.gguf").values("lm_head.weight", 0, 64)).unwrap(), plain);
    }
}

/// Tensors of heads that draft are not part of the model, nor is the layer they are in.
#[test]
fn what_drafts_is_left_out() {
    let mut file = file(F32);
    file.set("qwen35moe.block_count", crate::gguf::Value::U32(5));
    file.set("qwen35moe.nextn_predict_layers", crate::gguf::Value::U32(1));
    let mut norm = file.tensor("blk.3.attn_norm.weight").clone();
    norm.name = "blk.4.attn_norm.weight".to_owned();
    file.tensors.push(norm);
    let gguf = open(file.flash(), "m.gguf");
    assert_eq!(gguf.config()["num_hidden_layers"], 4);
    assert!(gguf.names().iter().all(|name| !name.starts_with("model.layers.4.")));
    pack(&gguf, Precision::Lossless);
}
