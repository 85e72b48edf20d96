// Sums of values weighted by the blocks' exponentials, for each (token, head, block) and four dimensions.

//!import chunk
//!import attention

@group(0) @binding(2) var<storage, read> scores: array<f32>;
@group(0) @binding(3) var<storage, read> values: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> sums: array<vec4<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let block = id.x / op.head;
    let i = id.x % op.head;
    let head = id.y;
    let token = id.z;
    let last = chunk.pos + op.first + token;
    let before = keys_before(last, block);
    let count = keys_in_block(last, block);
    if (count <= before) {
        return;
    }
    let index = block_index(token, head, block);
    let position = op.kv_heads * op.head;
    var at = (block * BLOCK + before) * position + (head / (op.heads / op.kv_heads)) * op.head + i;
    var sum = vec4<f32>();
    for (var key = before; key < count; key++) {
        sum = fma(values[at], vec4<f32>(scores[index * BLOCK + key]), sum);
        at += position;
    }
    sums[index * op.head + i] = sum;
}
