//! What the backend promises beside results.

use super::*;
use crate::error::Error;

fn small_case() -> Case {
    let mut c = CaseBuilder::new(1);
    let (x, y) = (c.input(40), c.buffer(50));
    let w = c.matrix(DType::Q4, 50, 40);
    let (k, v) = (c.input(6), c.input(6));
    let state = c.state(StateSpec::Kv { heads: 1, dim: 6, value_dim: 6 });
    c.mix.push(Op::matmul(x, w, y));
    c.mix.push(Op::KvAppend { k, v, state });
    c.finish(y, limits(20, 4))
}

#[test]
fn every_byte_is_in_the_ledger() {
    let case = small_case();
    let Some(gpu) = gpu(Tuning::new(true), &case) else { return };
    let created: u64 = gpu.buffers.iter().map(wgpu::Buffer::size).sum();
    let (weights, states) = (case.plan.weight_bytes(), case.plan.state_bytes(case.limits.context));
    assert_eq!(created + gpu.program.upload_queue(), weights + states + gpu.workspace_bytes());
    assert_eq!(gpu.workspace_bytes(), Gpu::workspace_for(&case.plan, &case.limits).unwrap());
}

/// A state that knows nothing of positions, with two checkpoints.
fn convolution_case() -> Case {
    let mut c = CaseBuilder::new(5);
    let (x, y) = (c.input(6), c.buffer(6));
    let w = c.vector(6 * 4, 0.2);
    let state = c.state(StateSpec::Conv { channels: 6, kernel: 4 });
    c.mix.push(Op::ConvSilu { x, w, y, state });
    c.finish(y, Limits { checkpoints: 2, ..limits(20, 4) })
}

fn goes_back(backend: &mut impl Backend) {
    let hidden = backend.plan().hidden;
    let rows = Random::new(6).values(7 * hidden);
    let (first, rest) = rows.split_at(4 * hidden);
    run(backend, first, &[4]);
    backend.save(1).unwrap();
    let expected = run(backend, rest, &[3]);
    backend.save(0).unwrap();
    assert!(!same_bits(&expected, &run(backend, rest, &[3])), "the state does not matter");
    for _ in 0..2 {
        backend.restore(1).unwrap();
        assert!(same_bits(&expected, &run(backend, rest, &[1, 2])));
    }
}

#[test]
fn checkpoints_bring_states_back_and_are_in_the_ledger() {
    let case = convolution_case();
    goes_back(&mut cpu(&case));
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    goes_back(&mut gpu);
    let created: u64 = gpu.buffers.iter().map(wgpu::Buffer::size).sum();
    let states = case.plan.state_bytes(case.limits.context) + 2 * case.plan.checkpoint_bytes();
    let queue = gpu.program.upload_queue();
    assert_eq!(created + queue, case.plan.weight_bytes() + states + gpu.workspace_bytes());
}

#[test]
fn writes_do_not_pile_up() {
    let case = small_case();
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    let original = case.weights[0].clone();
    let queue = gpu.program.upload_queue();
    let expected = run(&mut gpu, &vec![0.5; case.plan.hidden], &[1]);
    for _ in 0..4 * queue / original.len() as u64 {
        block_on(gpu.write_weight(Weight(0), &vec![0; original.len()])).unwrap();
    }
    let most = gpu.stats().queued_bytes;
    assert!(most > queue / 2 && most <= queue, "{most} bytes were under way");
    block_on(gpu.write_weight(Weight(0), &original)).unwrap();
    gpu.reset().unwrap();
    assert!(same_bits(&expected, &run(&mut gpu, &vec![0.5; case.plan.hidden], &[1])));
}

/// A matrix larger than what may wait to be taken up is written in pieces, odd ends included.
#[test]
fn large_weights_keep_to_the_queue() {
    let mut c = CaseBuilder::new(7);
    let (x, y) = (c.input(96), c.buffer(9001));
    let w = c.matrix(DType::Q8, 9001, 96);
    c.mix.push(Op::matmul(x, w, y));
    let case = c.finish(y, limits(20, 4));
    let rows = Random::new(8).values(case.plan.hidden);
    let expected = run(&mut cpu(&case), &rows, &[1]);
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    let queue = gpu.program.upload_queue();
    assert!(case.weights[0].len() as u64 > 2 * queue, "{queue} bytes of {}", case.weights[0].len());
    let most = gpu.stats().queued_bytes;
    assert!(most <= queue, "{most} bytes were under way where {queue} are counted");
    assert!(distance(&run(&mut gpu, &rows, &[1]), &expected) < 1e-5);
}

/// Whatever the host does, the GPU has two submissions at most.
#[test]
fn two_submissions_are_outstanding() {
    let case = small_case();
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    let rows = vec![0.5; case.plan.hidden];
    for _ in 0..8 {
        block_on(gpu.settle()).unwrap();
        gpu.begin(0, &rows).unwrap();
        block_on(gpu.mix(0, 0..0)).unwrap();
        gpu.finish_layer(0).unwrap();
    }
    let super::super::Stats { submissions, in_flight, .. } = gpu.stats();
    assert!(submissions >= 8 && in_flight <= 2, "{submissions} submissions, {in_flight} at once");
}

#[test]
fn a_layer_takes_one_submission_until_it_is_read() {
    let case = small_case();
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    let rows = vec![0.5; case.plan.hidden];
    run(&mut gpu, &rows, &[1]);
    let before = gpu.stats();
    run(&mut gpu, &rows, &[1]);
    let after = gpu.stats();
    assert_eq!(after.submissions - before.submissions, 1);
    assert_eq!(after.readbacks - before.readbacks, 1);
    assert_eq!(after.readback_bytes - before.readback_bytes, 4 * 64);
}

/// A read-back whose future is dropped leaves the backend usable.
#[test]
fn dropped_reads_do_no_harm() {
    let case = small_case();
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    let rows: Vec<f32> = Random::new(2).values(3 * case.plan.hidden);
    let expected = run(&mut gpu, &rows, &[3]);
    let target = gpu.program.read_rows;
    let residual = gpu.program.activations[0].id;
    gpu.copy_back(residual, 0..64, target, 0);
    drop(block_on(gpu.start_read(target, 64)).unwrap());
    assert!(same_bits(&expected, &run(&mut gpu, &rows, &[3])));
}

#[test]
fn too_much_is_refused_without_a_device() {
    let case = small_case();
    let limits = Limits { context: 1 << 23, ..case.limits };
    match Gpu::workspace_for(&case.plan, &limits) {
        Err(e @ Error::NoGpu(_)) => assert!(e.to_string().contains("keys"), "{e}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn positions_beyond_the_context_are_refused() {
    let case = small_case();
    let Some(mut gpu) = gpu(Tuning::new(true), &case) else { return };
    assert!(matches!(gpu.begin(19, &vec![0.0; 2 * case.plan.hidden]), Err(Error::Context { .. })));
    assert!(matches!(gpu.begin(0, &vec![0.0; 5 * case.plan.hidden]), Err(Error::Context { .. })));
}

#[test]
fn a_lost_device_is_an_error() {
    if device().is_none() {
        return;
    }
    let case = small_case();
    let device = block_on(Device::request(false)).unwrap();
    let mut gpu = block_on(Gpu::on(device.clone(), case.plan.clone(), case.limits)).unwrap();
    case.load(&mut gpu);
    let rows = vec![0.5; 3 * case.plan.hidden];
    run(&mut gpu, &rows, &[3]);
    device.device.destroy();
    let lost = gpu
        .begin(0, &rows)
        .and_then(|()| block_on(gpu.mix(0, 0..0)).map(drop))
        .and_then(|()| block_on(gpu.residual()).map(drop));
    assert!(matches!(lost, Err(Error::DeviceLost(_))), "{lost:?}");
    assert!(matches!(gpu.begin(0, &rows), Err(Error::DeviceLost(_))));
}

#[test]
fn errors_of_the_gpu_are_reported() {
    if device().is_none() {
        return;
    }
    let case = small_case();
    let device = block_on(Device::request(false)).unwrap();
    let mut gpu = block_on(Gpu::on(device, case.plan.clone(), case.limits)).unwrap();
    let id = gpu.program.passes;
    gpu.upload(id, 1 << 20, &[0; 4]);
    assert!(matches!(gpu.reset(), Err(Error::Gpu(_))));
}
