@group(0) @binding(BIAS_BINDING) var<storage, read> bias: array<f32>;

fn biased(value: f32, row: u32) -> f32 {
    return value + bias[row];
}
