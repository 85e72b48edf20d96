// h = glu(gate · x, up · x), each product plus its bias if BIAS, for the work items whose expert lies in one arena. Lanes and tiles as in matmul.wgsl.

//!import math
//!import matrix
//!import decode
//!import load_group
//!import reduce
//!import work
//!import glu

struct Op {
    gate: Matrix,
    up: Matrix,
    // Rows of both matrices.
    rows: u32,
    top_k: u32,
    // Row lengths of x in groups and of h in floats.
    x_groups: u32,
    h_stride: u32,
    arena: u32,
    // Places of the biases in a slot, in words.
    gate_bias: u32,
    up_bias: u32,
    alpha: f32,
    limit: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> weights4: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> weights1: array<u32>;
@group(0) @binding(7) var<storage, read_write> h: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let lane = local % LANES;
    let row = workgroup.x * (WORKGROUP / LANES) + local / LANES;
    let tile = tile_of(workgroup, workgroups);
    let item = vec4<u32>(items[tile.y], items[tile.y + 1u], items[tile.y + 2u], items[tile.y + 3u]);
    let at = item / op.top_k * op.x_groups;
    let count = tile.z;

    var gate_a = vec4<f32>();
    var gate_b = vec4<f32>();
    var gate_c = vec4<f32>();
    var gate_d = vec4<f32>();
    var up_a = vec4<f32>();
    var up_b = vec4<f32>();
    var up_c = vec4<f32>();
    var up_d = vec4<f32>();
    if (row < op.rows && count > 0u) {
        let gate = in_slot(op.gate, tile.x);
        let up = in_slot(op.up, tile.x);
        for (var group = lane; group < gate.groups; group += LANES) {
            let g = decode(gate, row, group);
            let u = decode(up, row, group);
            let x_a = load_group(at.x + group);
            gate_a = dot_group(g, x_a, gate_a);
            up_a = dot_group(u, x_a, up_a);
            if (count > 1u) {
                let x_b = load_group(at.y + group);
                gate_b = dot_group(g, x_b, gate_b);
                up_b = dot_group(u, x_b, up_b);
            }
            if (count > 2u) {
                let x_c = load_group(at.z + group);
                gate_c = dot_group(g, x_c, gate_c);
                up_c = dot_group(u, x_c, up_c);
            }
            if (count > 3u) {
                let x_d = load_group(at.w + group);
                gate_d = dot_group(g, x_d, gate_d);
                up_d = dot_group(u, x_d, up_d);
            }
        }
    }
    let g = lane_sum(local, vec4<f32>(sum4(gate_a), sum4(gate_b), sum4(gate_c), sum4(gate_d)));
    let u = lane_sum(local, vec4<f32>(sum4(up_a), sum4(up_b), sum4(up_c), sum4(up_d)));
    if (lane == 0u && row < op.rows && count > 0u) {
        var gate_bias = 0.0;
        var up_bias = 0.0;
        if (BIAS != 0u) {
            gate_bias = bitcast<f32>(weights1[tile.x * 4u + op.gate_bias + row]);
            up_bias = bitcast<f32>(weights1[tile.x * 4u + op.up_bias + row]);
        }
        for (var i = 0u; i < count; i++) {
            h[item[i] * op.h_stride + row] = glu(g[i] + gate_bias, u[i] + up_bias);
        }
    }
}
