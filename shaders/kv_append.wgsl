// Copies the chunk's keys and values to their positions in the cache, whose heads are padded to whole vectors of four.

//!import chunk

struct Plane {
    width: u32,
    dim: u32,
    // Floats a head and a position take in the cache.
    head: u32,
    position: u32,
}

struct Op {
    keys: Plane,
    values: Plane,
    k_stride: u32,
    v_stride: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> k: array<f32>;
@group(0) @binding(3) var<storage, read> v: array<f32>;
@group(0) @binding(4) var<storage, read_write> keys: array<f32>;
@group(0) @binding(5) var<storage, read_write> values: array<f32>;

fn place(plane: Plane, token: u32, i: u32) -> u32 {
    return (chunk.pos + token) * plane.position + (i / plane.dim) * plane.head + i % plane.dim;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let i = id.x;
    let token = id.y;
    if (i < op.keys.width) {
        keys[place(op.keys, token, i)] = k[token * op.k_stride + i];
    }
    if (i < op.values.width) {
        values[place(op.values, token, i)] = v[token * op.v_stride + i];
    }
}
