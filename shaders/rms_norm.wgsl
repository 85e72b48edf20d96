// For each of `groups` parts of a row: y = x · rsqrt(mean(x²) + eps) · w.

//!import chunk
//!import grid
//!import math
//!import reduce
//!import squares

struct Op {
    groups: u32,
    part: u32,
    x_stride: u32,
    y_stride: u32,
    eps: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> w: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    if (chunk.m == 0u) {
        return;
    }
    let lane = local % LANES;
    let item = linear_workgroup(workgroup, workgroups) * (WORKGROUP / LANES) + local / LANES;
    let live = item < chunk.m * op.groups;
    let token = item / op.groups;
    let within = (item % op.groups) * op.part;
    let source = token * op.x_stride + within;
    let to = token * op.y_stride + within;

    var squares = vec4<f32>();
    if (live) {
        squares = squares_of(source, op.part, lane);
    }
    let total = sum4(lane_sum(local, squares));
    if (live) {
        let scale = inverseSqrt(total / f32(op.part) + op.eps);
        for (var i = lane; i < op.part; i += LANES) {
            y[to + i] = x[source + i] * scale * w[i];
        }
    }
}
