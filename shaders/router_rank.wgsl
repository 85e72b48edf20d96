// Ranks each token's experts by score, ties to the lower id, by counting those ahead of each, and keeps the first `top_k`.

//!import chunk

struct Op {
    experts: u32,
    top_k: u32,
    stride: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> scores: array<f32>;
// Ids of each (token, rank); the weights follow.
@group(0) @binding(3) var<storage, read_write> choice: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let expert = id.x;
    let token = id.y;
    if (expert >= op.experts) {
        return;
    }
    let at = token * op.stride;
    let own = scores[at + expert];
    var rank = 0u;
    for (var other = 0u; other < op.experts; other++) {
        let score = scores[at + other];
        if (score > own || (score == own && other < expert)) {
            rank += 1u;
        }
    }
    if (rank < op.top_k) {
        choice[token * op.top_k + rank] = expert;
    }
}
