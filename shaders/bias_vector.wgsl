@group(0) @binding(6) var<storage, read> bias: array<f32>;

fn biased(value: f32, row: u32) -> f32 {
    return value + bias[row];
}
