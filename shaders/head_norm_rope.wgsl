// Per head: RMS norm over `dim` if NORM, then rotary embedding of the first `rotary` dimensions, the rest copied. It turns
// dimension i with i + rotary/2, or neighbours if NEIGHBOURS.

//!import chunk
//!import grid
//!import math
//!import reduce
//!import squares

struct Op {
    heads: u32,
    dim: u32,
    rotary: u32,
    // Row length, first element and distance between heads, of x and of y.
    x_row: u32,
    x_offset: u32,
    x_stride: u32,
    y_row: u32,
    y_offset: u32,
    y_stride: u32,
    table_row: u32,
    eps: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> w: array<f32>;
@group(0) @binding(4) var<storage, read> table: array<f32>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

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
    let live = item < chunk.m * op.heads;
    let token = item / op.heads;
    let head = item % op.heads;
    let source = token * op.x_row + op.x_offset + head * op.x_stride;
    let to = token * op.y_row + op.y_offset + head * op.y_stride;

    var scale = 1.0;
    if (NORM != 0u) {
        var squares = vec4<f32>();
        if (live) {
            squares = squares_of(source, op.dim, lane);
        }
        scale = inverseSqrt(sum4(lane_sum(local, squares)) / f32(op.dim) + op.eps);
    }
    if (!live) {
        return;
    }
    let half = op.rotary / 2u;
    let angles = token * op.table_row;
    for (var i = lane; i < half; i += LANES) {
        var first = i;
        var second = half + i;
        if (NEIGHBOURS != 0u) {
            first = 2u * i;
            second = first + 1u;
        }
        var a = x[source + first] * scale;
        var b = x[source + second] * scale;
        if (NORM != 0u) {
            a *= w[first];
            b *= w[second];
        }
        let c = table[angles + i];
        let s = table[angles + half + i];
        y[to + first] = a * c - b * s;
        y[to + second] = b * c + a * s;
    }
    for (var i = op.rotary + lane; i < op.dim; i += LANES) {
        var v = x[source + i] * scale;
        if (NORM != 0u) {
            v *= w[i];
        }
        y[to + i] = v;
    }
}
