// A gated causal depthwise convolution over the tokens of the chunk: a row of x is [b | c | v], and
// y = c · convolution(b · v). One invocation a channel, the last TAPS inputs in registers; `state` as in conv_silu.wgsl.

//!import chunk

struct Op {
    channels: u32,
    x_stride: u32,
    y_stride: u32,
}

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> w: array<f32>;
@group(0) @binding(4) var<storage, read_write> state: array<f32>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (chunk.m == 0u) {
        return;
    }
    let channel = id.x;
    if (channel >= op.channels) {
        return;
    }
    var taps: array<f32, TAPS>;
    var window: array<f32, TAPS>;
    for (var j = 0u; j < TAPS; j++) {
        taps[j] = w[channel * TAPS + j];
    }
    for (var j = 0u; j + 1u < TAPS; j++) {
        window[j] = state[j * op.channels + channel];
    }
    for (var token = 0u; token < chunk.m; token++) {
        let at = token * op.x_stride + channel;
        window[TAPS - 1u] = x[at] * x[at + 2u * op.channels];
        var sum = 0.0;
        for (var j = 0u; j < TAPS; j++) {
            sum = fma(taps[j], window[j], sum);
        }
        y[token * op.y_stride + channel] = x[at + op.channels] * sum;
        for (var j = 0u; j + 1u < TAPS; j++) {
            window[j] = window[j + 1u];
        }
    }
    for (var j = 0u; j + 1u < TAPS; j++) {
        state[j * op.channels + channel] = window[j];
    }
}
