// y = scale · (x · Wᵀ + bias), or y += … if `add`, for the rows of W that this window holds.
//
// LANES invocations share a row of W, each taking every LANES-th group; up to four rows of x are multiplied with each
// decoded group. A row's result does not depend on how many there are.

//!import chunk
//!import math
//!import matrix
//!import decode
//!import load_group
//!import reduce
//!import bias

struct Op {
    w: Matrix,
    rows: u32,
    // Column of y that the window's first row goes to.
    first: u32,
    // Row lengths of x in groups and of y in floats.
    x_groups: u32,
    y_stride: u32,
    add: u32,
    scale: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> weights4: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> weights1: array<u32>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

fn store(token: u32, row: u32, value: f32) {
    let at = token * op.y_stride + op.first + row;
    let scaled = op.scale * biased(value, op.first + row);
    if (op.add != 0u) {
        y[at] = y[at] + scaled;
    } else {
        y[at] = scaled;
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    if (chunk.m == 0u) {
        return;
    }
    let lane = local % LANES;
    let row = workgroup.x * (WORKGROUP / LANES) + local / LANES;
    let token = workgroup.y * 4u;
    let count = chunk.m - token;
    let at = token * op.x_groups;

    var a = vec4<f32>();
    var b = vec4<f32>();
    var c = vec4<f32>();
    var d = vec4<f32>();
    if (row < op.rows) {
        for (var group = lane; group < op.w.groups; group += LANES) {
            let w = decode(op.w, row, group);
            a = dot_group(w, load_group(at + group), a);
            if (count > 1u) {
                b = dot_group(w, load_group(at + op.x_groups + group), b);
            }
            if (count > 2u) {
                c = dot_group(w, load_group(at + 2u * op.x_groups + group), c);
            }
            if (count > 3u) {
                d = dot_group(w, load_group(at + 3u * op.x_groups + group), d);
            }
        }
    }
    let total = lane_sum(local, vec4<f32>(sum4(a), sum4(b), sum4(c), sum4(d)));
    if (lane == 0u && row < op.rows) {
        store(token, row, total.x);
        if (count > 1u) {
            store(token + 1u, row, total.y);
        }
        if (count > 2u) {
            store(token + 2u, row, total.z);
        }
        if (count > 3u) {
            store(token + 3u, row, total.w);
        }
    }
}
