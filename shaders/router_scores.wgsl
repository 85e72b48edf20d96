// What a router's choice goes by: σ(logit) if SIGMOID, else the logit, plus a bias. With GROUPS > 1 the experts of all groups
// but the `kept` with the highest best scores, ties to the lower group, get a score one below the row's lowest.

//!import chunk
//!import math
//!import bias

struct Op {
    experts: u32,
    stride: u32,
    y_stride: u32,
    // Experts of a group.
    size: u32,
    kept: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;

fn score(token: u32, expert: u32) -> f32 {
    let logit = logits[token * op.stride + expert];
    if (SIGMOID != 0u) {
        return biased(sigmoid(logit), expert);
    }
    return biased(logit, expert);
}

fn best_of(token: u32, group: u32) -> f32 {
    var best = score(token, group * op.size);
    for (var i = 1u; i < op.size; i++) {
        best = max(best, score(token, group * op.size + i));
    }
    return best;
}

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
    var result = score(token, expert);
    if (GROUPS > 1u) {
        let group = expert / op.size;
        let own = best_of(token, group);
        var ahead = 0u;
        for (var other = 0u; other < GROUPS; other++) {
            let best = best_of(token, other);
            if (best > own || (best == own && other < group)) {
                ahead += 1u;
            }
        }
        if (ahead >= op.kept) {
            var lowest = score(token, 0u);
            for (var other = 1u; other < op.experts; other++) {
                lowest = min(lowest, score(token, other));
            }
            result = lowest - 1.0;
        }
    }
    y[token * op.y_stride + expert] = result;
}
