//! Packs whose every byte is what its hash says, but whose weights are no numbers.

use outrider::Result;
use outrider::engine::BackendChoice;
use outrider::engine::generate::Next;
use outrider::engine::sampler::{Sampler, Sampling};
use outrider::flash::MemoryFlash;
use outrider::pack::{Hash, Manifest, verify};
use pollster::block_on;

use crate::common;
use crate::{Files, assert_error, small};

/// As f16: no number, infinity, the largest number. As f32: no number, and two vast ones.
const PATTERNS: [[u8; 2]; 3] = [[0xff, 0xff], [0x00, 0x7c], [0xff, 0x7b]];

/// The pack with a shard filled with a pattern, and hashes to match.
fn filled(shard: &str, pattern: [u8; 2]) -> Files {
    let mut files = small();
    files.get_mut(shard).unwrap().chunks_mut(2).for_each(|b| b.copy_from_slice(&pattern[..b.len()]));
    let mut manifest = Manifest::parse(&files["manifest.json"]).unwrap();
    for e in &mut manifest.extents {
        let bytes = &files[&manifest.shards[e.shard].file];
        e.hash = Hash::of(&bytes[e.offset as usize..e.end() as usize]);
    }
    files.insert("manifest.json".into(), manifest.to_json());
    files
}

fn generate(files: Files, backend: BackendChoice) -> Result<()> {
    let mut engine = common::load(MemoryFlash::new(files), &common::on(backend))?;
    let mut sampler = Sampler::new(Sampling { temperature: 0.7, ..Sampling::default() })?;
    block_on(engine.generate(&[1, 2, 3], &mut sampler, 3, |_, _| Next::Continue)).map(|_| ())
}

fn ends_in_a_typed_error(backend: BackendChoice) {
    for shard in ["core-00000.bin", "embedding-00000.bin", "experts-00000.bin"] {
        for pattern in PATTERNS {
            let files = filled(shard, pattern);
            let flash = MemoryFlash::new(files.clone());
            assert!(block_on(verify(&flash, |_| ())).unwrap().is_empty(), "the hashes match");
            let result = generate(files, backend);
            // Vast numbers may vanish in a norm, and a GPU may take what is no number for a vast one.
            if result.is_err() || (pattern == PATTERNS[0] && backend == BackendChoice::Cpu) {
                assert_error(result, "logits", &["unusable", "outrider verify"]);
            }
        }
    }
}

#[test]
fn weights_that_are_no_numbers_end_in_a_typed_error_on_the_cpu() {
    ends_in_a_typed_error(BackendChoice::Cpu);
}

#[test]
fn weights_that_are_no_numbers_do_no_harm_on_the_gpu() {
    ends_in_a_typed_error(BackendChoice::Gpu);
}
