// The weights of the chosen experts: their softmax probability among all experts, or σ of their logits if SIGMOID. If
// RENORMALISE they are divided by their sum plus `epsilon`. Softmax probabilities among the chosen alone come to the same.

//!import chunk
//!import math

struct Op {
    experts: u32,
    top_k: u32,
    stride: u32,
    // Place of the first weight in `choice`.
    weights: u32,
    epsilon: f32,
    scale: f32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> choice: array<u32>;

fn unscaled(logit: f32, largest: f32) -> f32 {
    if (SIGMOID != 0u) {
        return sigmoid(logit);
    }
    return exp(logit - largest);
}

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
    if (REORDER != 0u) {
        // What was chosen by other scores comes in the order of its logits.
        for (var i = 1u; i < op.top_k; i++) {
            let expert = choice[chosen + i];
            var to = i;
            for (; to > 0u; to--) {
                let other = choice[chosen + to - 1u];
                if (logits[at + other] > logits[at + expert] || (logits[at + other] == logits[at + expert] && other < expert)) {
                    break;
                }
                choice[chosen + to] = other;
            }
            choice[chosen + to] = expert;
        }
    }
    // Of all, or of those that are added up.
    var largest = logits[at + choice[chosen]];
    if (RENORMALISE == 0u) {
        for (var expert = 0u; expert < op.experts; expert++) {
            largest = max(largest, logits[at + expert]);
        }
    }
    var total = 0.0;
    if (RENORMALISE != 0u) {
        for (var rank = 0u; rank < op.top_k; rank++) {
            total += unscaled(logits[at + choice[chosen + rank]], largest);
        }
        total += op.epsilon;
    } else if (SIGMOID != 0u) {
        total = 1.0;
    } else {
        for (var expert = 0u; expert < op.experts; expert++) {
            total += unscaled(logits[at + expert], largest);
        }
    }
    for (var rank = 0u; rank < op.top_k; rank++) {
        let weight = unscaled(logits[at + choice[chosen + rank]], largest) / total * op.scale;
        choice[op.weights + chosen + rank] = bitcast<u32>(weight);
    }
}
