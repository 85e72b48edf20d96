//! What several test binaries share.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::rc::Rc;

use outrider::Result;
use outrider::engine::{BackendChoice, Engine, Options, Probe, Want};
use outrider::flash::{Flash, MemoryFlash};
use outrider::import::{Checkpoint, PackOptions, Precision, pack_checkpoint};
use outrider::pack::{Map, MemorySink, Pack, copy_with_maps};
use outrider::tensor::{DType, decode_row, encode};
use safetensors::SafeTensors;

/// A reference's results: one safetensors file.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn open(path: &Path) -> Golden {
        Golden(std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
    }

    pub fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }

    pub fn prompts(&self) -> usize {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.names().iter().filter(|n| n.starts_with("ids.")).count()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&self.bytes(name))
    }

    pub fn ints(&self, name: &str) -> Vec<u32> {
        bytemuck::pod_collect_to_vec(&self.bytes(name))
    }

    pub fn ids(&self, prompt: usize) -> Vec<u32> {
        self.ints(&format!("ids.{prompt}"))
    }
}

/// Loads a pack or checkpoint directory.
pub fn engine(model: &Path, options: &Options) -> Engine {
    let load = async {
        let pack = outrider::import::open_model(model.to_str().unwrap()).await?;
        Engine::load(pack, options, |_, _| {}).await
    };
    pollster::block_on(load).unwrap_or_else(|e| panic!("{}: {e}", model.display()))
}

/// The same on the GPU in f16; none, loudly, on an adapter without it.
pub fn f16_engine(model: &Path, options: &Options) -> Option<Engine> {
    let engine = engine(model, &Options { backend: BackendChoice::Gpu, f16: true, ..options.clone() });
    let detail = engine.backend_info().detail;
    if detail.ends_with("f16") {
        assert!(engine.notices().is_empty());
        return Some(engine);
    }
    assert!(std::env::var_os("OUTRIDER_REQUIRE_GPU").is_none(), "{detail} has no f16");
    eprintln!("f16 test skipped: {detail} has none, {:?}", engine.notices());
    None
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // A NaN must not pass for a small difference.
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Greedy continuation of a prompt, and the smallest distance between the two best logits on the way.
pub fn greedy(engine: &mut Engine, prompt: &[u32], n: usize) -> (Vec<u32>, f32) {
    engine.reset().unwrap();
    let (mut tokens, mut gap) = (Vec::new(), f32::MAX);
    let mut input = prompt.to_vec();
    while tokens.len() < n {
        let logits = pollster::block_on(engine.forward(&input, Want::Last, None)).unwrap();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        gap = gap.min(logits[order[0]] - logits[order[1]]);
        tokens.push(order[0] as u32);
        input = vec![order[0] as u32];
    }
    (tokens, gap)
}

/// A file or directory of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub const GOLDEN_CHECKPOINTS: [&str; 2] = ["tests/data/golden/qwen3_5_moe/a", "tests/data/golden/qwen3_5_moe/b"];

/// Packs a checkpoint in memory.
pub fn pack(checkpoint: &Path, experts: DType, core: DType) -> MemoryFlash {
    let options = PackOptions::new(Precision::Given { experts, core });
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    let packing = pack_checkpoint(&checkpoint, &options, MemorySink::default(), |_, _| ());
    pollster::block_on(packing).unwrap().pack
}

/// Layers ahead that [`with_rotated_maps`] makes maps for at most.
pub const ROTATED_DEPTH: usize = 3;

/// The pack with maps that foretell every expert in the place of another: what a layer's router says of expert `e`, its map
/// for a distance `d` says of expert `e + d`. There is none for layer 2 from the layer before it.
pub fn with_rotated_maps(flash: MemoryFlash) -> MemoryFlash {
    pollster::block_on(async {
        let pack = Pack::open(Rc::new(flash)).await.unwrap();
        let mut maps = Vec::new();
        for layer in 0..pack.manifest().experts.as_ref().unwrap().layers.len() {
            let name = format!("model.layers.{layer}.mlp.gate.weight");
            let router = pack.core(&name).await.unwrap();
            let layout = pack.core_layout(&name).unwrap().layout().unwrap();
            let mut values = vec![0.0; layout.rows * layout.cols];
            for (row, out) in values.chunks_exact_mut(layout.cols).enumerate() {
                decode_row(&layout, &router, row, out);
            }
            for distance in (1..=ROTATED_DEPTH.min(layer + 1)).filter(|distance| (layer, *distance) != (2, 1)) {
                let mut rotated = values.clone();
                rotated.rotate_right(distance * layout.cols);
                maps.push(Map { layer, distance, layout, bytes: encode(&layout, &name, &rotated).unwrap() });
            }
        }
        copy_with_maps(&pack, &maps, MemorySink::default()).await.unwrap().1
    })
}

/// Loads a pack from wherever it is.
pub fn load(flash: impl Flash + 'static, options: &Options) -> Result<Engine> {
    pollster::block_on(async {
        let pack = Pack::open(Rc::new(flash)).await?;
        Engine::load(pack, options, |_, _| {}).await
    })
}

/// Options for one backend.
pub fn on(backend: BackendChoice) -> Options {
    Options { backend, ..Options::default() }
}

/// Logits of every token of a prompt, with what the pass went through.
pub fn forward(engine: &mut Engine, prompt: &[u32]) -> (Vec<f32>, Probe) {
    engine.reset().unwrap();
    let mut probe = Probe::default();
    let logits = pollster::block_on(engine.forward(prompt, Want::All, Some(&mut probe))).unwrap();
    (logits, probe)
}

/// What a run of the command line gave.
pub struct Output {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Runs the command line to its end.
pub fn outrider(args: &[&str]) -> Output {
    let out = Command::new(env!("CARGO_BIN_EXE_outrider")).args(args).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Output { status: out.status, stdout: text(out.stdout), stderr: text(out.stderr) }
}
