// Combines the blocks of each (token, head) in order and, if GATED, multiplies with σ(gate).

//!import chunk
//!import math
//!import attention

@group(0) @binding(2) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> sums: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> gate: array<f32>;
// A score a head that takes its part of the softmax, if SINKS.
@group(0) @binding(5) var<storage, read> sinks: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let head = id.x / op.head;
    let i = id.x % op.head;
    let token = id.y;
    if (head >= op.heads) {
        return;
    }
    let position = chunk.pos + op.first + token;
    let blocks = position / BLOCK + 1u;
    let start = first_key(position) / BLOCK;
    let index = block_index(token, head, 0u);
    var largest = stats[index + start].x;
    if (SINKS != 0u) {
        largest = max(largest, sinks[head]);
    }
    for (var block = start + 1u; block < blocks; block++) {
        largest = max(largest, stats[index + block].x);
    }
    var sum = vec4<f32>();
    var total = 0.0;
    if (SINKS != 0u) {
        total = exp(sinks[head] - largest);
    }
    for (var block = start; block < blocks; block++) {
        let stat = stats[index + block];
        let share = exp(stat.x - largest);
        sum = fma(sums[(index + block) * op.head + i], vec4<f32>(share), sum);
        total = fma(stat.y, share, total);
    }
    let row = op.first + token;
    for (var j = 0u; j < 4u; j++) {
        let d = i * 4u + j;
        if (d < op.value_dim) {
            var value = sum[j] / total;
            if (GATED != 0u) {
                value *= sigmoid(gate[row * op.gate_row + op.gate_offset + head * op.gate_stride + d]);
            }
            y[row * op.y_stride + head * op.value_dim + d] = value;
        }
    }
}
