// y = silu(gate) · up, four elements at a time; rows are padded with zeros, and stay so.

//!import chunk
//!import math

struct Op {
    // Row lengths in vectors of four, and how many of them to compute.
    gate_stride: u32,
    up_stride: u32,
    y_stride: u32,
    len: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> gate: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> up: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let i = id.x;
    let token = id.y;
    if (i < op.len) {
        let g = gate[token * op.gate_stride + i];
        let s = vec4<f32>(silu(g.x), silu(g.y), silu(g.z), silu(g.w));
        y[token * op.y_stride + i] = s * up[token * op.up_stride + i];
    }
}
