// The softmax probability of each chosen expert, among all experts or, if `renormalise`, among the chosen.

//!import chunk

struct Op {
    experts: u32,
    top_k: u32,
    stride: u32,
    // Place of the first weight in `choice`.
    weights: u32,
    renormalise: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> choice: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let token = id.x;
    if (token >= chunk.m) {
        return;
    }
    let at = token * op.stride;
    let chosen = token * op.top_k;
    let largest = logits[at + choice[chosen]];
    var total = 0.0;
    if (op.renormalise != 0u) {
        for (var rank = 0u; rank < op.top_k; rank++) {
            total += exp(logits[at + choice[chosen + rank]] - largest);
        }
    } else {
        for (var expert = 0u; expert < op.experts; expert++) {
            total += exp(logits[at + expert] - largest);
        }
    }
    for (var rank = 0u; rank < op.top_k; rank++) {
        let weight = exp(logits[at + choice[chosen + rank]] - largest) / total;
        choice[op.weights + chosen + rank] = bitcast<u32>(weight);
    }
}
