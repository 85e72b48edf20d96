//! Quantised packs: every weight is within half a step of the checkpoint's, and what the runtime computes on the stored
//! blocks is what it computes on the same weights decoded to f32.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use common::{GOLDEN_CHECKPOINTS, Golden, engine, forward, greedy, max_difference, on, repository};
use half::f16;
use outrider::engine::{BackendChoice, Engine};
use outrider::flash::MemoryFlash;
use outrider::import::{Checkpoint, unpack};
use outrider::pack::{DirectorySink, Pack, Replace};
use outrider::tensor::{DType, GROUP, Layout};
use pollster::block_on;

/// Types of the experts and of the rest.
const PRECISIONS: [(DType, DType); 4] =
    [(DType::Q4, DType::Q4), (DType::Q4, DType::Q8), (DType::Q8, DType::Q8), (DType::F16, DType::F16)];

fn open(flash: &MemoryFlash) -> Pack {
    block_on(Pack::open(Rc::new(flash.clone()))).unwrap()
}

/// Unpacks into a directory of its own, which goes with the returned handle.
fn unpacked(pack: &Pack) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    block_on(unpack(pack, DirectorySink::new(dir.path(), Replace::Nothing).unwrap(), |_, _| ())).unwrap();
    dir
}

/// How far each value of a stored matrix may be from the original, from the format's definition: half the step of its
/// group, which is `d` for q8 and `d · s` for q4, or half a unit in the last place of an f16. What rounding the decoded
/// value to f32 adds is 16 steps and the value times half an epsilon at most.
fn bounds(layout: &Layout, stored: &[u8], original: &[f32]) -> Vec<f32> {
    let [_, scales, rows] = layout.planes();
    let f16_at = |at: usize| f16::from_le_bytes([stored[at], stored[at + 1]]).to_f32();
    let bound = |(at, v): (usize, &f32)| {
        let (row, group) = (at / layout.cols, at % layout.cols / GROUP);
        let scale = scales.start + 2 * (row * layout.groups() + group);
        let step = match layout.dtype {
            DType::F32 => return 0.0,
            DType::F16 => return 2f32.powi((v.abs().log2().floor() as i32).max(-14) - 11),
            DType::Q8 => f16_at(scale),
            DType::Q4 => f16_at(rows.start + 4 * row) * f32::from(stored[scale]),
        };
        step / 2.0 + (v.abs() + 16.0 * step) * f32::EPSILON
    };
    original.iter().enumerate().map(bound).collect()
}

/// Names and layouts of all matrices with their stored bytes.
fn stored_matrices(pack: &Pack) -> Vec<(String, Layout, Vec<u8>)> {
    let manifest = pack.manifest();
    let mut matrices = Vec::new();
    for (name, tensor) in &manifest.core {
        // A vector is a matrix of one row of f32.
        let layout = tensor.layout().unwrap_or(Layout::new(DType::F32, 1, tensor.len()));
        matrices.push((name.clone(), layout, block_on(pack.core(name)).unwrap()));
    }
    let experts = manifest.experts.as_ref().unwrap();
    let shape = experts.shape();
    for (layer, expert) in (0..experts.layers.len()).flat_map(|l| (0..experts.count).map(move |e| (l, e))) {
        let bytes = block_on(pack.expert(layer, expert)).unwrap().into_vec();
        let parts = [("gate", shape.gate), ("up", shape.up), ("down", shape.down)];
        for ((part, layout), at) in parts.into_iter().zip(shape.offsets()) {
            let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
            matrices.push((name, layout, bytes[at..at + layout.bytes()].to_vec()));
        }
    }
    matrices
}

fn assert_close(name: &str, dtype: DType, original: &[f32], unpacked: &[f32], bounds: &[f32]) {
    assert_eq!(original.len(), unpacked.len(), "{name}");
    for ((a, b), bound) in original.iter().zip(unpacked).zip(bounds) {
        assert!((a - b).abs() <= *bound, "{name}: {a} became {b} as {dtype}, further than {bound}");
    }
}

#[test]
fn unpacked_weights_are_within_half_a_step() {
    for name in GOLDEN_CHECKPOINTS {
        let original = Checkpoint::open(&repository(name)).unwrap();
        for (experts, core) in PRECISIONS {
            let pack = open(&common::pack(&repository(name), experts, core));
            let dir = unpacked(&pack);
            let back = Checkpoint::open(dir.path()).unwrap();
            let names = |c: &Checkpoint| c.tensors().map(|(name, _)| name.to_owned()).collect::<BTreeSet<_>>();
            assert_eq!(names(&back), names(&original), "{name} as {experts}");
            let all = |c: &Checkpoint, tensor: &str| c.values(tensor, 0, c.tensor(tensor).unwrap().len()).unwrap();

            let mut inexact = 0;
            for (tensor, layout, stored) in stored_matrices(&pack) {
                assert_eq!(back.tensor(&tensor).unwrap().shape, original.tensor(&tensor).unwrap().shape, "{tensor}");
                let (a, b) = (all(&original, &tensor), all(&back, &tensor));
                assert_close(&tensor, layout.dtype, &a, &b, &bounds(&layout, &stored, &a));
                inexact += usize::from(a != b);
            }
            assert!(inexact > 50, "only {inexact} tensors of {name} changed, so nothing was stored as {experts}");

            let embedding = &pack.manifest().embedding;
            assert_eq!(embedding.dtype, core);
            let tensor = "model.embed_tokens.weight";
            let (a, b) = (all(&original, tensor), all(&back, tensor));
            for row in 0..embedding.rows {
                let piece = embedding.pieces.iter().rfind(|p| p.first_row <= row).unwrap();
                let at = piece.offset + (row - piece.first_row) as u64 * embedding.stride;
                let file = &pack.manifest().shards[piece.shard].file;
                let stored = block_on(pack.flash().read(file, at, embedding.row().bytes())).unwrap().into_vec();
                let values = row * embedding.cols..(row + 1) * embedding.cols;
                let bounds = bounds(&embedding.row(), &stored, &a[values.clone()]);
                assert_close(tensor, core, &a[values.clone()], &b[values], &bounds);
            }
        }
    }
}

/// The router and its like are one step finer than the rest; norms and other vectors are always f32.
#[test]
fn what_decides_much_is_stored_finer() {
    let pack = open(&common::pack(&repository(GOLDEN_CHECKPOINTS[0]), DType::Q4, DType::Q4));
    let dtype = |name: &str| pack.manifest().core[name].dtype;
    for (name, expected) in [
        ("lm_head.weight", DType::Q4),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", DType::Q4),
        ("model.layers.0.mlp.gate.weight", DType::Q8),
        ("model.layers.0.mlp.shared_expert_gate.weight", DType::Q8),
        ("model.layers.0.linear_attn.in_proj_a.weight", DType::Q8),
        ("model.layers.0.linear_attn.in_proj_b.weight", DType::Q8),
        ("model.layers.0.linear_attn.conv1d.weight", DType::F32),
        ("model.norm.weight", DType::F32),
    ] {
        assert_eq!(dtype(name), expected, "{name}");
    }
}

/// Holds one engine against another on a golden file's prompts. Greedy tokens count where the two best logits are
/// further apart than `smallest_gap`; returns for how many prompts they did.
fn assert_same(
    what: &str,
    ours: &mut Engine,
    theirs: &mut Engine,
    golden: &Path,
    tolerance: f32,
    smallest_gap: f32,
) -> usize {
    let golden = Golden::open(&golden.join("golden.safetensors"));
    let mut compared = 0;
    for prompt in 0..golden.prompts() {
        let ids = golden.ids(prompt);
        let ((a, a_probe), (b, b_probe)) = (forward(ours, &ids), forward(theirs, &ids));
        let off = max_difference(&a, &b);
        assert!(off <= tolerance, "{what}: logits of prompt {prompt} are off by {off:e}");
        assert_eq!(a_probe.ids, b_probe.ids, "{what}: experts chosen for prompt {prompt}");
        for (a, b) in a_probe.weights.iter().zip(&b_probe.weights) {
            let off = max_difference(a, b);
            assert!(off <= tolerance, "{what}: weights of experts of prompt {prompt} are off by {off:e}");
        }
        let (expected, gap) = greedy(theirs, &ids, 16);
        if gap > smallest_gap {
            assert_eq!(greedy(ours, &ids, 16).0, expected, "{what}: greedy tokens of prompt {prompt}");
            compared += 1;
        }
    }
    compared
}

#[test]
fn cpu_computes_on_blocks_what_it_computes_on_decoded_weights() {
    for name in GOLDEN_CHECKPOINTS {
        let dir = repository(name);
        for (experts, core) in PRECISIONS {
            let flash = common::pack(&dir, experts, core);
            let decoded = unpacked(&open(&flash));
            let mut ours = common::load(flash, &on(BackendChoice::Cpu)).unwrap();
            let mut theirs = engine(decoded.path(), &on(BackendChoice::Cpu));
            let what = format!("{name}, experts {experts}, core {core}");
            assert_eq!(assert_same(&what, &mut ours, &mut theirs, &dir, 2e-4, 0.0), 3, "prompts compared");
        }
    }
}

fn gpu_matches_cpu(cases: impl IntoIterator<Item = (&'static str, (DType, DType))>) {
    let mut compared = 0;
    for (name, (experts, core)) in cases {
        let dir = repository(name);
        let flash = common::pack(&dir, experts, core);
        let mut cpu = common::load(flash.clone(), &on(BackendChoice::Cpu)).unwrap();
        let mut gpu = common::load(flash, &on(BackendChoice::Gpu)).unwrap();
        let what = format!("{name}, experts {experts}, core {core}");
        compared += assert_same(&what, &mut gpu, &mut cpu, &dir, 2e-3, 1e-2);
    }
    assert!(compared > 0, "no prompt's best tokens are far enough apart to be compared");
}

#[test]
fn gpu_computes_on_blocks_what_the_cpu_does() {
    gpu_matches_cpu([(GOLDEN_CHECKPOINTS[0], PRECISIONS[0]), (GOLDEN_CHECKPOINTS[0], PRECISIONS[2])]);
}

#[test]
#[ignore = "all precisions of both checkpoints take long on a software GPU"]
fn gpu_computes_on_blocks_what_the_cpu_does_in_full() {
    gpu_matches_cpu(GOLDEN_CHECKPOINTS.into_iter().flat_map(|name| PRECISIONS.map(|p| (name, p))));
}
