// Adds to the residual `scale` times the experts' outputs times their weights, in rank order, and if SHARED the shared
// expert's output, times σ of its gate if SHARED_GATE.

//!import chunk
//!import math

struct Op {
    width: u32,
    top_k: u32,
    // Place of the first weight in `choice`.
    weights: u32,
    out_stride: u32,
    y_stride: u32,
    shared_stride: u32,
    gate_stride: u32,
    scale: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> choice: array<u32>;
// The experts' output, a row for each (token, rank).
@group(0) @binding(3) var<storage, read> expert_out: array<f32>;
@group(0) @binding(4) var<storage, read> shared_out: array<f32>;
@group(0) @binding(5) var<storage, read> shared_gate: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let i = id.x;
    let token = id.y;
    if (i >= op.width) {
        return;
    }
    var sum = 0.0;
    for (var rank = 0u; rank < op.top_k; rank++) {
        let pair = token * op.top_k + rank;
        let weight = bitcast<f32>(choice[op.weights + pair]);
        sum = fma(weight, expert_out[pair * op.out_stride + i], sum);
    }
    if (SHARED != 0u) {
        var share = 1.0;
        if (SHARED_GATE != 0u) {
            share = sigmoid(shared_gate[token * op.gate_stride]);
        }
        sum = fma(share, shared_out[token * op.shared_stride + i], sum);
    }
    let at = token * op.y_stride + i;
    y[at] = y[at] + op.scale * sum;
}
