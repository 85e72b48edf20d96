//! GGUF files that are damaged, made up, or of kinds that are not supported.

use std::rc::Rc;

use futures_util::future::{LocalBoxFuture, ready};
use outrider::error::{Error, Result};
use outrider::flash::{Bytes, Flash, MemoryFlash};
use outrider::import::{Gguf, PackOptions, Precision, pack_checkpoint};
use outrider::pack::MemorySink;
use outrider::tensor::DType;
use pollster::block_on;
use proptest::prelude::*;

use crate::checkpoints::contents;
use crate::gguf_files::{F16, F32, File, Q8_0, Tensor, Value, flash, qwen35moe};
use crate::{MOST, alloc, assert_error};

const NAME: &str = "m.gguf";

fn sound() -> File {
    let (tensors, config) = contents();
    let mut file = qwen35moe(&tensors, &config, Q8_0);
    let tokens =
        (0..=255u32).map(|n| char::from_u32(if n < 0x7f && n > 0x20 { n } else { 0x100 + n }).unwrap().to_string());
    file.set("tokenizer.ggml.model", Value::text("gpt2"));
    file.set("tokenizer.ggml.pre", Value::text("qwen35"));
    file.set("tokenizer.ggml.tokens", Value::Texts(tokens.collect()));
    file.set("tokenizer.ggml.token_type", Value::I32s(vec![1; 256]));
    file.set("tokenizer.ggml.merges", Value::Texts(vec![]));
    file.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    file
}

fn changed(change: impl FnOnce(&mut File)) -> File {
    let mut file = sound();
    change(&mut file);
    file
}

/// Everything that is done with a file; nothing of it allocates what the file does not hold.
fn use_flash(flash: impl Flash + 'static, name: &str) -> Result<()> {
    let (most, result) = alloc::largest(|| {
        block_on(async {
            let gguf = Gguf::open(Rc::new(flash), name).await?;
            let precision = Precision::with_experts(DType::Q4);
            for precision in [precision, Precision::Lossless] {
                pack_checkpoint(&gguf, &PackOptions::new(precision), MemorySink::default(), |_, _| ()).await?;
            }
            Ok(())
        })
    });
    assert!(most < MOST, "{most} bytes were allocated");
    result
}

fn use_bytes(bytes: Vec<u8>) -> Result<()> {
    use_flash(flash([(NAME.to_owned(), bytes)]), NAME)
}

#[track_caller]
fn refused(change: impl FnOnce(&mut File), code: &str, parts: &[&str]) {
    assert_error(use_bytes(changed(change).write()), code, parts);
}

#[test]
fn the_file_itself_is_good() {
    use_bytes(sound().write()).unwrap();
}

#[test]
fn other_files_are_refused() {
    assert_error(use_bytes(b"GGML\x03\0\0\0".to_vec()), "format", &[NAME, "`GGML`"]);
    assert_error(use_bytes(b"<!doctype html>".to_vec()), "format", &["`<!do`"]);
    refused(|f| f.version = 1, "format", &[NAME, "version 1", "2 and 3"]);
    refused(|f| f.version = 4711, "format", &["version 4711"]);
    refused(|f| f.version = 3u32.swap_bytes(), "format", &["big-endian"]);
    assert_error(use_flash(MemoryFlash::default(), NAME), "not_found", &[NAME]);
}

/// Wherever a file ends, it is said to be too short.
#[test]
fn files_that_end_early_are_truncated() {
    let (whole, header) = (sound().write(), sound().header().len());
    let inside = (0..header).step_by(97).chain([1, 3, 4, 8, 16, 23, 24, header]);
    for length in inside.chain((header..whole.len()).step_by(100_003)).chain([whole.len() - 1]) {
        let error = use_bytes(whole[..length].to_vec()).unwrap_err();
        // In a file shorter than its counts need at least, those are what is wrong.
        assert!(matches!(error, Error::Truncated { .. } | Error::Format { .. }), "{error}");
        assert!(length < header / 2 || error.code() == "truncated", "{length}: {error}");
        assert!(error.to_string().contains(NAME), "{error}");
    }
}

#[test]
fn counts_must_fit_the_file() {
    for count in [1 << 20, 1 << 40, 1 << 60, 1 << 63, u64::MAX] {
        let shown = count.to_string();
        refused(|f| f.tensor_count = Some(count), "format", &[NAME, &shown, "tensors"]);
        refused(|f| f.pair_count = Some(count), "format", &[NAME, &shown, "metadata values"]);
        for kind in [0u32, 5, 7, 8, 9, 12] {
            let array = [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
            refused(|f| f.set("a.list", Value::Raw(9, array)), "format", &[NAME, &shown, "elements in `a.list`"]);
        }
    }
}

#[test]
fn texts_must_fit_the_file() {
    for length in [1u64 << 25, 1 << 32, 1 << 63, u64::MAX] {
        let bytes = length.to_le_bytes().to_vec();
        let shown = length.to_string();
        refused(|f| f.set("a.text", Value::Raw(8, bytes.clone())), "format", &["`a.text`", &shown]);
        let array = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &bytes].concat();
        refused(|f| f.set("a.list", Value::Raw(9, array)), "format", &["`a.list`", &shown]);
        // The length of the first key stands at byte 24.
        let mut file = sound().write();
        file[24..32].copy_from_slice(&bytes);
        assert_error(use_bytes(file), "format", &["a key", "byte 24", &shown]);
        let at = sound().header().windows(12).position(|w| w == b"blk.0.attn_q" || w == b"blk.0.ffn_ga").unwrap() - 8;
        let mut file = sound().write();
        file[at..at + 8].copy_from_slice(&bytes);
        assert_error(use_bytes(file), "format", &["the name of a tensor", &shown]);
    }
    let text = [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat();
    refused(|f| f.set("a.text", Value::Raw(8, text)), "format", &["`a.text`", "UTF-8"]);
}

#[test]
fn values_must_have_a_type_there_is() {
    refused(|f| f.set("a", Value::Raw(13, vec![])), "format", &["`a`", "type 13"]);
    refused(|f| f.set("a", Value::Raw(u32::MAX, vec![])), "format", &["`a`", "type 4294967295"]);
    let nested = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 12]].concat();
    refused(|f| f.set("a", Value::Raw(9, nested)), "format", &["`a`", "array of arrays"]);
    refused(|f| f.pairs.push(("general.name".to_owned(), Value::U32(1))), "format", &["`general.name`", "twice"]);
}

#[test]
fn alignments_are_powers_of_two() {
    for bad in [0, 3, 48, 1 << 21, u32::MAX] {
        refused(|f| f.set("general.alignment", Value::U32(bad)), "format", &["general.alignment", &bad.to_string()]);
    }
    refused(|f| f.set("general.alignment", Value::text("32")), "format", &["general.alignment"]);
}

#[test]
fn tensors_must_be_possible() {
    const HEAD: &str = "output.weight";
    let dims = |dims: &[u64]| {
        let dims = dims.to_vec();
        move |f: &mut File| f.tensor(HEAD).dims = dims
    };
    for bad in [&[0][..], &[64, 0], &[1 << 62, 64], &[u64::MAX, u64::MAX], &[1 << 32, 1 << 32], &[1 << 61, 1]] {
        refused(dims(bad), "format", &[HEAD, "no size"]);
    }
    refused(dims(&[]), "format", &[HEAD, "0 dimensions"]);
    refused(dims(&[32, 1, 1, 1, 1]), "format", &[HEAD, "5 dimensions"]);
    refused(dims(&[48, 257]), "format", &[HEAD, "48", "Q8_0"]);
    refused(dims(&[1 << 40, 257]), "truncated", &[NAME]);
    refused(|f| f.tensor(HEAD).kind = 16, "format", &[HEAD, "IQ2_XXS", "Q4_K"]);
    refused(|f| f.tensor(HEAD).kind = 26, "format", &[HEAD, "I32"]);
    refused(|f| f.tensor(HEAD).kind = 999, "format", &[HEAD, "type 999"]);
    refused(|f| f.tensor(HEAD).offset = Some(7), "format", &[HEAD, "7", "multiple of 32"]);
    refused(|f| f.tensor(HEAD).offset = Some(u64::MAX - 31), "format", &[HEAD, "overflows"]);
    refused(|f| f.tensor(HEAD).offset = Some(1 << 40), "truncated", &[NAME]);
    refused(|f| f.tensor(HEAD).offset = Some(0), "format", &[HEAD, "overlap"]);
    refused(|f| f.tensors.push(f.tensors[3].clone()), "format", &["appears twice"]);
    // A type with more bytes reaches into the next tensor.
    let error = use_bytes(changed(|f| f.tensor("blk.0.attn_qkv.weight").kind = F32).write()).unwrap_err();
    assert!(error.to_string().contains("overlap"), "{error}");
}

/// A file that claims to be larger than any, and has zeros wherever it is read.
struct Endless(Vec<u8>);

impl Flash for Endless {
    fn read<'a>(&'a self, _: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        let mut bytes = self.0[from..self.0.len().min(from + len)].to_vec();
        bytes.resize(len, 0);
        Box::pin(ready(Ok(Bytes::Owned(bytes))))
    }

    fn size<'a>(&'a self, _: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        Box::pin(ready(Ok(u64::MAX)))
    }
}

/// Where a file's size is no bound, a constant is.
#[test]
fn headers_have_a_longest_length() {
    for kind in [0u32, 12] {
        let array = [&kind.to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat();
        let header = changed(|f| f.set("a.list", Value::Raw(9, array))).header();
        assert_error(use_flash(Endless(header), NAME), "format", &["header", "longer than"]);
    }
    for (tensors, pairs) in [(Some(1 << 50), None), (None, Some(1 << 50))] {
        let header = changed(|f| (f.tensor_count, f.pair_count) = (tensors, pairs)).header();
        assert_error(use_flash(Endless(header), NAME), "format", &["header", "longer than"]);
    }
}

/// A model's files by their names.
type Parts = std::collections::BTreeMap<String, Vec<u8>>;

#[test]
fn parts_must_belong_together() {
    let parts = sound().split(3);
    let first = "m-00001-of-00003.gguf";
    let open = |change: &dyn Fn(&mut Parts), name: &str| {
        let mut parts = parts.clone();
        change(&mut parts);
        use_flash(flash(parts), name)
    };
    open(&|_| (), first).unwrap();
    let second = "m-00002-of-00003.gguf";
    assert_error(open(&|_| (), second), "format", &[second, "part 2 of 3", "-00001-of-00003.gguf"]);
    assert_error(open(&|p| drop(p.remove(second)), first), "not_found", &[second]);
    let renamed = open(&|p| drop(p.insert("m.gguf".into(), p[first].clone())), "m.gguf");
    assert_error(renamed, "format", &["m.gguf", "-00001-of-00003.gguf"]);
    let of_four = "m-00001-of-00004.gguf";
    assert_error(open(&|p| drop(p.insert(of_four.into(), p[first].clone())), of_four), "format", &["3 parts", "4"]);
    assert_error(open(&|p| drop(p.insert(second.into(), p[first].clone())), first), "format", &[second, "part 1 of 3"]);
    let other = |change: &dyn Fn(&mut File)| {
        let file = changed(|f| change(f)).split(3);
        open(&|p| drop(p.insert(second.into(), file[second].clone())), first)
    };
    assert_error(
        other(&|f| f.tensors.truncate((f.tensors.len() - 2) / 3 * 3 + 1)),
        "format",
        &["tensors where it says"],
    );
    assert_error(other(&|f| f.tensors.swap(4, 3)), "format", &["is in both", first, second]);
}

#[test]
fn metadata_must_be_there_and_fit() {
    refused(|f| f.remove("general.architecture"), "format", &["general.architecture", "missing"]);
    refused(|f| f.set("general.architecture", Value::text("mamba")), "unknown_architecture", &["mamba", "qwen35moe"]);
    for key in ["block_count", "embedding_length", "attention.head_count", "expert_used_count", "ssm.state_size"] {
        let key = format!("qwen35moe.{key}");
        refused(|f| f.remove(&key), "format", &[&key, "missing"]);
        refused(|f| f.set(&key, Value::text("4")), "format", &[&key, "is not"]);
        refused(|f| f.set(&key, Value::F32(4.0)), "format", &[&key, "is not"]);
        for size in [0, u32::MAX] {
            let error = use_bytes(changed(|f| f.set(&key, Value::U32(size))).write()).unwrap_err();
            assert!(matches!(error, Error::Format { .. } | Error::MissingTensor { .. }), "{key} = {size}: {error}");
        }
    }
    refused(|f| f.remove("qwen35moe.attention.layer_norm_rms_epsilon"), "format", &["epsilon", "missing"]);
    refused(|f| f.set("qwen35moe.attention.value_length", Value::U32(16)), "format", &["values are not as long"]);
    refused(|f| f.set("qwen35moe.rope.scaling.type", Value::text("yarn")), "format", &["no `factor`"]);
    refused(|f| f.set("qwen35moe.attention.recurrent_layers", Value::Bools(vec![true])), "format", &["1 of 4 layers"]);
    refused(|f| f.set("qwen35moe.attention.recurrent_layers", Value::I32s(vec![1; 4])), "format", &["true and false"]);
    refused(|f| f.set("qwen35moe.attention.head_count", Value::I32s(vec![4, 4, 2, 4])), "format", &["same size"]);
    // One size a layer is as good where it is the same one.
    let same = changed(|f| f.set("qwen35moe.attention.head_count_kv", Value::I32s(vec![0, 0, 0, 2])));
    use_bytes(same.write()).unwrap();
    let dims = vec![4];
    let freqs = Tensor { name: "rope_freqs.weight".into(), dims, kind: F32, bytes: vec![0; 16], offset: None };
    refused(|f| f.tensors.push(freqs), "format", &["rope_freqs"]);
}

#[test]
fn tensors_must_fit_the_metadata() {
    for name in ["token_embd.weight", "output_norm.weight", "blk.3.attn_q.weight", "blk.2.ffn_up_exps.weight"] {
        refused(|f| f.tensors.retain(|t| t.name != name), "missing_tensor", &[]);
    }
    // The last two dimensions in the wrong order; fewer heads than there are; one dimension more.
    refused(|f| f.tensor("blk.2.ffn_gate_exps.weight").dims = vec![32, 64, 8], "format", &["experts.0.gate_proj"]);
    refused(|f| f.tensor("blk.0.ssm_a").dims = vec![2], "format", &["blk.0.ssm_a"]);
    refused(|f| f.tensor("blk.0.ssm_conv1d.weight").dims = vec![4, 1, 256], "format", &["ssm_conv1d"]);
    refused(|f| f.tensor("blk.0.ffn_gate_inp_shexp.weight").dims = vec![32, 2], "format", &["ffn_gate_inp_shexp"]);
    refused(|f| f.set("qwen35moe.ssm.group_count", Value::U32(3)), "format", &["blk.0."]);
}

#[test]
fn weights_that_are_no_numbers_are_refused_by_name() {
    let at = |name: &'static str, at: usize, with: &'static [u8]| {
        move |f: &mut File| f.tensor(name).bytes[at..at + with.len()].copy_from_slice(with)
    };
    refused(at("blk.1.ffn_up_exps.weight", 34 * 130, &[0, 0x7c]), "encode", &["model.layers.1.mlp.experts.2.up_proj"]);
    refused(at("output.weight", 0, &[1, 0x7e]), "encode", &["lm_head.weight", "NaN"]);
    refused(at("blk.0.ssm_a", 0, &[0, 0, 0x80, 0x3f]), "encode", &["A_log", "NaN"]);
    refused(at("output_norm.weight", 4, &[0, 0, 0x80, 0x7f]), "encode", &["model.norm.weight", "inf"]);
}

#[test]
fn vocabularies_must_be_consistent() {
    refused(|f| f.set("tokenizer.ggml.model", Value::text("bert")), "tokenizer", &["`bert`", "gpt2"]);
    let by_scores = |scores: Option<usize>| {
        move |f: &mut File| {
            f.set("tokenizer.ggml.model", Value::text("llama"));
            let bytes = |n: usize| [&6u32.to_le_bytes()[..], &(n as u64).to_le_bytes(), &vec![0; 4 * n]].concat();
            scores.into_iter().for_each(|n| f.set("tokenizer.ggml.scores", Value::Raw(9, bytes(n))));
        }
    };
    use_bytes(changed(by_scores(Some(256))).write()).unwrap();
    refused(by_scores(None), "format", &["tokenizer.ggml.scores", "missing"]);
    refused(by_scores(Some(255)), "tokenizer", &["256 tokens", "scores of 255"]);
    let long = |f: &mut File| {
        by_scores(Some(1))(f);
        f.set("tokenizer.ggml.tokens", Value::Texts(vec!["a".repeat(2000)]));
        f.set("tokenizer.ggml.token_type", Value::I32s(vec![1]));
        f.remove("tokenizer.ggml.eos_token_id");
    };
    refused(long, "tokenizer", &["2000 bytes"]);
    refused(|f| f.set("tokenizer.ggml.pre", Value::text("viking")), "tokenizer", &["`viking`", "qwen35"]);
    refused(|f| f.remove("tokenizer.ggml.pre"), "tokenizer", &["`default`"]);
    refused(|f| f.remove("tokenizer.ggml.tokens"), "format", &["tokenizer.ggml.tokens", "missing"]);
    refused(|f| f.remove("tokenizer.ggml.merges"), "format", &["tokenizer.ggml.merges", "missing"]);
    refused(|f| f.set("tokenizer.ggml.tokens", Value::I32s(vec![1])), "format", &["array of texts"]);
    refused(|f| f.set("tokenizer.ggml.tokens", Value::Texts(vec!["a".into(); 258])), "tokenizer", &["258", "257"]);
    refused(
        |f| f.set("tokenizer.ggml.token_type", Value::I32s(vec![1; 3])),
        "tokenizer",
        &["256 tokens", "kinds of 3"],
    );
    refused(|f| f.set("tokenizer.ggml.eos_token_id", Value::U32(256)), "tokenizer", &["eos_token_id", "256"]);
    refused(|f| f.set("tokenizer.ggml.merges", Value::Texts(vec!["ab".into()])), "tokenizer", &["`ab`", "no pair"]);
    refused(|f| f.set("tokenizer.ggml.merges", Value::Texts(vec!["x yzzy".into()])), "tokenizer", &["yzzy"]);
}

/// The small file in two types, whole.
fn bytes(kind: u32) -> &'static [u8] {
    static FILES: [std::sync::OnceLock<Vec<u8>>; 2] = [const { std::sync::OnceLock::new() }; 2];
    FILES[usize::from(kind == F16)].get_or_init(|| {
        let (tensors, config) = contents();
        let mut file = sound();
        file.tensors = qwen35moe(&tensors, &config, kind).tensors;
        file.write()
    })
}

/// An error that names a file, a tensor or a key; or a pack.
fn ends(bytes: Vec<u8>) -> Result<(), TestCaseError> {
    if let Err(error) = use_bytes(bytes) {
        prop_assert!(!matches!(error, Error::Io { .. } | Error::Aborted), "{error}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn changed_bytes_end_in_an_error_or_a_pack(
        kind in prop::sample::select(vec![F16, Q8_0]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), prop::bool::weighted(0.9)), 1..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let (mut bytes, header) = (bytes(kind).to_vec(), sound().header().len());
        for (at, byte, in_header) in changes {
            let at = at.index(if in_header { header } else { bytes.len() });
            bytes[at] ^= byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        ends(bytes)?;
    }

    #[test]
    fn changed_numbers_end_in_an_error_or_a_pack(
        at: prop::sample::Index,
        number in prop_oneof![
            any::<u64>(),
            0u64..600,
            (0u32..64, -1i64..2).prop_map(|(shift, near)| (1u64 << shift).wrapping_add_signed(near)),
        ],
        width in prop::sample::select(vec![1usize, 4, 8]),
    ) {
        let (mut bytes, header) = (bytes(Q8_0).to_vec(), sound().header().len());
        let at = at.index(header - width);
        bytes[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
        ends(bytes)?;
    }
}
