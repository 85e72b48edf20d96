// x = max(−limit, min(limit, x)).

//!import chunk

struct Op {
    stride: u32,
    width: u32,
    limit: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    if (id.x < op.width) {
        let at = id.y * op.stride + id.x;
        x[at] = clamp(x[at], -op.limit, op.limit);
    }
}
