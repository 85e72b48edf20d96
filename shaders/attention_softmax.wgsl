// Turns the scores of each (token, head, block) into exp(score − the block's largest); keeps that and their sum.

//!import chunk
//!import attention

@group(0) @binding(2) var<storage, read_write> scores: array<f32>;
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let blocks = block_count();
    let head = id.x / blocks;
    let block = id.x % blocks;
    let token = id.y;
    let position = chunk.pos + op.first + token;
    let before = keys_before(position, block);
    let count = keys_in_block(position, block);
    if (head >= op.heads || count <= before) {
        return;
    }
    let index = block_index(token, head, block);
    let first = index * BLOCK;
    var largest = scores[first + before];
    for (var i = before + 1u; i < count; i++) {
        largest = max(largest, scores[first + i]);
    }
    var sum = 0.0;
    for (var i = before; i < count; i++) {
        let e = exp(scores[first + i] - largest);
        scores[first + i] = e;
        sum += e;
    }
    stats[index] = vec2<f32>(largest, sum);
}
