// out = down · h, plus its bias if BIAS, for the work items whose expert lies in one arena. Lanes and tiles as in matmul.wgsl.

//!import math
//!import matrix
//!import decode
//!import load_group
//!import reduce
//!import work

struct Op {
    down: Matrix,
    rows: u32,
    // Row lengths of h in groups and of the output in floats.
    h_groups: u32,
    out_stride: u32,
    arena: u32,
    // Place of the bias in a slot, in words.
    bias: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
// The inner activations h.
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> weights4: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> weights1: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;

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
    let at = item * op.h_groups;
    let count = tile.z;

    var a = vec4<f32>();
    var b = vec4<f32>();
    var c = vec4<f32>();
    var d = vec4<f32>();
    if (row < op.rows && count > 0u) {
        let down = in_slot(op.down, tile.x);
        for (var group = lane; group < down.groups; group += LANES) {
            let w = decode(down, row, group);
            a = dot_group(w, load_group(at.x + group), a);
            if (count > 1u) {
                b = dot_group(w, load_group(at.y + group), b);
            }
            if (count > 2u) {
                c = dot_group(w, load_group(at.z + group), c);
            }
            if (count > 3u) {
                d = dot_group(w, load_group(at.w + group), d);
            }
        }
    }
    let total = lane_sum(local, vec4<f32>(sum4(a), sum4(b), sum4(c), sum4(d)));
    if (lane == 0u && row < op.rows && count > 0u) {
        var bias = 0.0;
        if (BIAS != 0u) {
            bias = bitcast<f32>(weights1[tile.x * 4u + op.bias + row]);
        }
        for (var i = 0u; i < count; i++) {
            out[item[i] * op.out_stride + row] = total[i] + bias;
        }
    }
}
