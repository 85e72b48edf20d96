// The gated delta rule, token after token: S ← S · decay, S ← S + k ⊗ (σ(b) · (v − kᵀS)), y = qᵀS. A column of S (one
// value dimension of one head) depends on no other; LANES invocations hold one in registers, every LANES-th key each.

//!import chunk
//!import reduce

struct Op {
    heads: u32,
    key_heads: u32,
    value_dim: u32,
    qkv_stride: u32,
    y_stride: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> gates: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

const OUTPUTS_A_GROUP = WORKGROUP / LANES;
const KEYS_A_LANE = (KEY_DIM + LANES - 1u) / LANES;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    if (chunk.m == 0u) {
        return;
    }
    let lane = local / OUTPUTS_A_GROUP;
    let column = workgroup.x * OUTPUTS_A_GROUP + local % OUTPUTS_A_GROUP;
    let live = column < op.heads * op.value_dim;
    let head = column / op.value_dim;
    let keys = op.key_heads * KEY_DIM;
    let first_key = (head / (op.heads / op.key_heads)) * KEY_DIM;
    let state_at = head * KEY_DIM * op.value_dim + column % op.value_dim;

    var s: array<f32, KEYS_A_LANE>;
    for (var i = 0u; i < KEYS_A_LANE; i++) {
        let key = lane + i * LANES;
        s[i] = 0.0;
        if (live && key < KEY_DIM) {
            s[i] = state[state_at + key * op.value_dim];
        }
    }
    for (var token = 0u; token < chunk.m; token++) {
        let row = token * op.qkv_stride;
        let q = row + first_key;
        let k = row + keys + first_key;
        var gate = vec4<f32>();
        var recalled = 0.0;
        if (live) {
            gate = gates[token * op.heads + head];
            for (var i = 0u; i < KEYS_A_LANE; i++) {
                let key = lane + i * LANES;
                if (key < KEY_DIM) {
                    s[i] = s[i] * gate.z;
                    recalled = fma(s[i], qkv[k + key] * gate.y, recalled);
                }
            }
        }
        recalled = plane_sum(local, recalled);
        var answer = 0.0;
        if (live) {
            let correction = (qkv[row + 2u * keys + column] - recalled) * gate.w;
            for (var i = 0u; i < KEYS_A_LANE; i++) {
                let key = lane + i * LANES;
                if (key < KEY_DIM) {
                    s[i] = fma(qkv[k + key] * gate.y, correction, s[i]);
                    answer = fma(s[i], qkv[q + key] * gate.x, answer);
                }
            }
        }
        answer = plane_sum(local, answer);
        if (live && lane == 0u) {
            y[token * op.y_stride + column] = answer;
        }
    }
    for (var i = 0u; i < KEYS_A_LANE; i++) {
        let key = lane + i * LANES;
        if (live && key < KEY_DIM) {
            state[state_at + key * op.value_dim] = s[i];
        }
    }
}
