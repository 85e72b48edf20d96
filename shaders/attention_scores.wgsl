// scale · q·k of each (token, head, key).

//!import chunk
//!import math
//!import attention

@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> keys: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let key = id.x;
    let head = id.y;
    let token = id.z;
    let position = chunk.pos + op.first + token;
    if (key > position || key < first_key(position)) {
        return;
    }
    let q_at = (op.first + token) * op.q_stride + head * op.dim;
    let k_at = (key * op.kv_heads + head / (op.heads / op.kv_heads)) * op.key_head;
    var sum = vec4<f32>();
    let whole = op.dim / 4u;
    for (var i = 0u; i < whole; i++) {
        let at = q_at + i * 4u;
        sum = fma(vec4<f32>(q[at], q[at + 1u], q[at + 2u], q[at + 3u]), keys[k_at + i], sum);
    }
    for (var i = whole * 4u; i < op.dim; i++) {
        sum.x = fma(q[q_at + i], keys[k_at + whole][i % 4u], sum.x);
    }
    scores[block_index(token, head, 0u) * BLOCK + key] = sum4(sum) * op.scale;
}
