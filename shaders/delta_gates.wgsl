// What a token of Gated DeltaNet needs per value head, ahead of the recurrence: the factors that bring q and k to unit
// length (q's with 1/√key_dim), the decay exp(rate · softplus(a + dt_bias)), and σ(b).

//!import chunk
//!import math

struct Op {
    heads: u32,
    key_heads: u32,
    key_dim: u32,
    qkv_stride: u32,
    a_stride: u32,
    b_stride: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> qkv: array<f32>;
@group(0) @binding(3) var<storage, read> a: array<f32>;
@group(0) @binding(4) var<storage, read> b: array<f32>;
@group(0) @binding(5) var<storage, read> rate: array<f32>;
@group(0) @binding(6) var<storage, read> dt_bias: array<f32>;
// (q factor, k factor, decay, σ(b)) of each (token, head).
@group(0) @binding(7) var<storage, read_write> gates: array<vec4<f32>>;

fn inverse_length(start: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < op.key_dim; i++) {
        let v = qkv[start + i];
        sum = fma(v, v, sum);
    }
    return inverseSqrt(sum + 1e-6);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let head = id.x;
    let token = id.y;
    if (head >= op.heads) {
        return;
    }
    let key_head = head / (op.heads / op.key_heads);
    let q = token * op.qkv_stride + key_head * op.key_dim;
    let k = q + op.key_heads * op.key_dim;
    gates[token * op.heads + head] = vec4<f32>(
        inverse_length(q) * inverseSqrt(f32(op.key_dim)),
        inverse_length(k),
        exp(rate[head] * softplus(a[token * op.a_stride + head] + dt_bias[head])),
        sigmoid(b[token * op.b_stride + head]),
    );
}
