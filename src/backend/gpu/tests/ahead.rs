//! Running ahead: the GPU's own look-up against lists that the host makes, and layers that are submitted together against
//! the same one by one.

use proptest::prelude::*;

use super::experts::{MoeCase, Shape, moe_case, rules, run_layer};
use super::model::{EXPERTS, HIDDEN, Model, TOP_K, forward, model, run_all};
use super::*;
use crate::backend::gpu::program::Id;
use crate::backend::gpu::readback::Readback;
use crate::backend::gpu::work;
use crate::backend::{Place, RunAhead, WorkItem};
use crate::error::Error;
use crate::flash::Bytes;

/// Words of a buffer.
fn words(gpu: &mut Gpu, id: Id) -> Vec<u32> {
    let bytes = gpu.buffer(id).size();
    let target = gpu.device.device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
        mapped_at_creation: false,
    });
    let source = gpu.buffer(id).clone();
    gpu.encoder().copy_buffer_to_buffer(&source, 0, &target, 0, bytes);
    let submission = gpu.submit().unwrap();
    let read = Readback::start(&target, bytes);
    let read = block_on(read.finish(&gpu.device, &target, submission)).unwrap();
    bytemuck::pod_collect_to_vec(&read)
}

/// Tiles of a work list by arena: the slot's place, and the items.
fn tiles(words: &[u32], arenas: usize) -> Vec<Vec<(u32, Vec<u32>)>> {
    let tile = |at: u32| {
        let [slot, items, count] = [0, 1, 2].map(|i| words[4 * at as usize + i]);
        (slot, words[items as usize..][..count as usize].to_vec())
    };
    let arena = |arena: usize| {
        let [first, count] = [words[4 * arena], words[4 * arena + 1]];
        let mut tiles: Vec<_> = (first..first + count).map(tile).collect();
        tiles.sort();
        tiles
    };
    (0..arenas).map(arena).collect()
}

/// A layer's choice as work, with these slots.
fn items(ids: &[u32], top_k: usize, slot: impl Fn(u32) -> u32) -> Vec<WorkItem> {
    let item = |(i, id): (usize, &u32)| WorkItem { row: (i / top_k) as u32, rank: (i % top_k) as u32, slot: slot(*id) };
    ids.iter().enumerate().map(item).collect()
}

/// Which expert of which layer the host has put where.
struct Slots(Vec<Option<Place>>);

impl Slots {
    fn of(&self, layer: usize, expert: u32) -> Option<u32> {
        let place = Some(Place { layer, expert: expert as usize });
        self.0.iter().position(|held| *held == place).map(|slot| slot as u32)
    }

    /// Puts an expert into a slot at random that does not hold what is `needed` of its layer.
    fn put(&mut self, gpu: &mut Gpu, place: Place, needed: &[u32], extent: &Bytes, random: &mut Random) {
        let stays = |held: Place| held.layer == place.layer && needed.contains(&(held.expert as u32));
        let free: Vec<usize> = (0..self.0.len()).filter(|slot| !self.0[*slot].is_some_and(stays)).collect();
        let slot = free[random.below(free.len())];
        self.0[slot] = Some(place);
        block_on(gpu.settle()).unwrap();
        gpu.write_slot(slot, place, extent).unwrap();
    }

    fn lacks(&self, layer: usize, ids: &[u32]) -> bool {
        ids.iter().any(|id| self.of(layer, *id).is_none())
    }

    /// Does for a layer that lacks experts what the host has to.
    fn complete(&mut self, gpu: &mut Gpu, layer: usize, ids: &[u32], extents: &[Bytes], random: &mut Random) {
        for &id in ids {
            if self.of(layer, id).is_none() {
                let place = Place { layer, expert: id as usize };
                self.put(gpu, place, ids, &extents[place.expert], random);
            }
        }
        let top_k = gpu.plan.layers[layer].moe.unwrap().top_k;
        block_on(gpu.settle()).unwrap();
        gpu.run_experts(layer, &items(ids, top_k, |id| self.of(layer, id).unwrap())).unwrap();
        gpu.finish_layer(layer).unwrap();
    }
}

fn check_lookup(seed: u64, shape: Shape, tuning: Tuning) {
    let moe: MoeCase = moe_case(seed, shape);
    let Some(mut gpu) = gpu(tuning, &moe.case) else { return };
    let mut random = Random::new(seed ^ 2);
    let rows = random.values(shape.chunk * moe.case.plan.hidden);
    let (routing, expected) = run_layer(&mut gpu, &moe, &rows, &mut random);
    gpu.clear_slots().unwrap();
    let mut slots = Slots(vec![None; shape.slots]);
    for _ in 0..3 {
        for expert in 0..shape.experts {
            if slots.of(0, expert as u32).is_none() && random.below(3) > 0 {
                slots.put(&mut gpu, Place { layer: 0, expert }, &[], &moe.experts[expert], &mut random);
            }
        }
        gpu.begin(0, &rows).unwrap();
        let ahead = block_on(gpu.run(0..1, 0, 0..0)).unwrap();
        let [ids] = &ahead.ids[..] else { panic!("{} layers", ahead.ids.len()) };
        assert_eq!(ids, &routing.ids);
        assert_eq!(ahead.stopped, slots.lacks(0, ids));

        let work = if ahead.stopped { Vec::new() } else { items(ids, shape.top_k, |id| slots.of(0, id).unwrap()) };
        let listed = work::list(&gpu.program, shape.top_k, &work);
        let (arenas, work) = (gpu.program.pool.arenas.len(), gpu.program.routed.unwrap().work);
        assert_eq!(tiles(&words(&mut gpu, work), arenas), tiles(&listed.words, arenas));

        if ahead.stopped {
            slots.complete(&mut gpu, 0, ids, &moe.experts, &mut random);
        }
        assert!(same_bits(&expected, &block_on(gpu.residual()).unwrap()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn lookup(
        seed: u64, dtype in proptest::sample::select(&DType::ALL), experts in 1usize..30, top_k in 1usize..6,
        extra in 0usize..30, width in 1usize..40, rule in rules(), shared: bool, chunk in 1usize..9,
        more in 0usize..10, arena in 8usize..17, lanes: bool,
    ) {
        let top_k = top_k.min(experts);
        let (hidden, slots) = (experts + extra, experts.min(chunk * top_k) + more);
        let shape = Shape { dtype, experts, top_k, hidden, width, rule, shared, chunk, slots };
        check_lookup(seed, shape, Tuning { max_binding: (arena * 4096) as u64, ..Tuning::new(lanes) });
    }
}

/// Logits and choices of a model by layers submitted together, and the forecasts from where they stopped.
fn forward_ahead(gpu: &mut Gpu, model: &Model, embeddings: &[f32], chunk: usize, random: &mut Random) -> Forward {
    let mut slots = Slots(vec![None; model.case.limits.slots]);
    let mut out = Forward::default();
    gpu.reset().unwrap();
    gpu.clear_slots().unwrap();
    for rows in embeddings.chunks(chunk * HIDDEN) {
        let (m, layers) = (rows.len() / HIDDEN, model.experts.len());
        block_on(gpu.settle()).unwrap();
        gpu.begin(out.tokens, rows).unwrap();
        let (mut layer, mut logits) = (0, None);
        while layer < layers {
            let end = layer + 1 + random.below(layers - layer);
            let foresee = random.below(4);
            let ahead = block_on(gpu.run(layer..end, foresee, 0..m)).unwrap();
            for (i, ids) in ahead.ids.iter().enumerate() {
                let stopped = ahead.stopped && i + 1 == ahead.ids.len();
                assert_eq!(stopped, slots.lacks(layer, ids), "layer {layer}");
                if stopped {
                    slots.complete(gpu, layer, ids, &model.experts[layer], random);
                    out.stops += 1;
                }
                out.ids.extend(ids);
                layer += 1;
            }
            assert_eq!(ahead.foreseen.len(), foresee.min(layers - layer));
            let foreseen = ahead.foreseen.iter().enumerate();
            out.foreseen.extend(foreseen.map(|(i, scores)| (out.tokens, layer - 1, i, scores.clone())));
            logits = ahead.logits;
            assert_eq!(logits.is_some(), !ahead.stopped && layer == layers);
        }
        let logits = logits.unwrap_or_else(|| block_on(gpu.logits(0..m)).unwrap());
        out.logits.extend(logits);
        out.tokens += m;
    }
    out
}

#[derive(Default)]
struct Forward {
    tokens: usize,
    logits: Vec<f32>,
    ids: Vec<u32>,
    /// Layers that lacked an expert.
    stops: usize,
    /// Scores, by position, layer and distance.
    foreseen: Vec<(usize, usize, usize, Vec<f32>)>,
}

#[test]
fn layers_together() {
    const TOKENS: usize = 11;
    let embeddings = Random::new(4).values(TOKENS * HIDDEN);
    let mut random = Random::new(9);
    let (mut stops, mut wholes) = (0, 0);
    for (dtype, tuning, slots) in
        [(DType::F32, tunings()[0], [EXPERTS, 2 * EXPERTS + 3]), (DType::Q8, tunings()[1], [15, 4 * EXPERTS])]
    {
        for slots in slots {
            let limits = Limits { context: 32, chunk: TOKENS, head_rows: TOKENS, slots, checkpoints: 0 };
            let model = model(dtype, limits);
            let Some(mut gpu) = gpu(tuning, &model.case) else { return };
            for chunk in [1, 4, TOKENS] {
                let (expected, chosen) = forward(&mut gpu, &model, &embeddings, chunk);
                let got = forward_ahead(&mut gpu, &model, &embeddings, chunk, &mut random);
                assert_eq!(chosen.len(), got.ids.len());
                assert!(same_bits(&expected, &got.logits), "{dtype}, {slots} slots, in chunks of {chunk}");
                if chunk == TOKENS {
                    assert_eq!(chosen, got.ids);
                }
                stops += got.stops;
                wholes += model.experts.len() * TOKENS.div_ceil(chunk) - got.stops;
                check_foreseen(&mut gpu, &model, &embeddings, chunk, &got.foreseen);
            }
        }
    }
    assert!(stops > 20 && wholes > 5, "{stops} layers lacked an expert, {wholes} did not");
}

/// The forecasts are those that layers run one by one bring.
fn check_foreseen(
    gpu: &mut Gpu,
    model: &Model,
    embeddings: &[f32],
    chunk: usize,
    foreseen: &[(usize, usize, usize, Vec<f32>)],
) {
    let layers = model.experts.len();
    gpu.reset().unwrap();
    for (first, rows) in embeddings.chunks(chunk * HIDDEN).enumerate() {
        gpu.begin(first * chunk, rows).unwrap();
        for layer in 0..layers {
            let ahead = layer + 1..layers;
            let routing = block_on(gpu.mix(layer, ahead.clone())).unwrap();
            let scores = block_on(gpu.foresee(ahead)).unwrap();
            for (_, _, distance, got) in foreseen.iter().filter(|f| (f.0, f.1) == (first * chunk, layer)) {
                assert!(same_bits(&scores[*distance], got), "layer {layer}, {distance} further");
            }
            run_all(gpu, model, layer, &routing);
        }
    }
}

/// What has all its experts in slots comes back in one piece: choices, and logits.
#[test]
fn one_readback_where_nothing_is_missing() {
    let limits = Limits { context: 32, chunk: 4, head_rows: 1, slots: 4 * EXPERTS, checkpoints: 0 };
    let model = model(DType::Q8, limits);
    let Some(mut gpu) = gpu(tunings()[0], &model.case) else { return };
    let mut slots = Slots(vec![None; limits.slots]);
    for (layer, extents) in model.experts.iter().enumerate() {
        for (expert, extent) in extents.iter().enumerate() {
            let slot = layer * EXPERTS + expert;
            slots.0[slot] = Some(Place { layer, expert });
            block_on(gpu.settle()).unwrap();
            gpu.write_slot(slot, Place { layer, expert }, extent).unwrap();
        }
    }
    let before = gpu.traffic().readbacks;
    gpu.begin(0, &Random::new(4).values(HIDDEN)).unwrap();
    let ahead = block_on(gpu.run(0..4, 2, 0..1)).unwrap();
    assert!(ahead.logits.is_some() && ahead.foreseen.is_empty());
    assert!(!ahead.stopped && ahead.ids.iter().all(|ids| ids.len() == TOP_K));
    assert_eq!(gpu.traffic().readbacks - before, 1);
    let costs = block_on(gpu.costs()).unwrap();
    assert!(costs.round_trip > 0.0 && costs.skipped >= 0.0, "{costs:?}");
}

#[test]
fn more_rows_than_are_looked_up() {
    let limits = Limits { context: 512, chunk: 200, head_rows: 1, slots: EXPERTS, checkpoints: 0 };
    let model = model(DType::Q8, limits);
    let Some(mut gpu) = gpu(tunings()[0], &model.case) else { return };
    let most = gpu.most_rows();
    assert!((16..200).contains(&most), "{most}");
    gpu.begin(0, &Random::new(4).values((most + 1) * HIDDEN)).unwrap();
    assert!(matches!(block_on(gpu.run(0..4, 2, 0..1)), Err(Error::Gpu(_))));
}
