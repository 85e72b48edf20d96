// What weights and activations are multiplied in: f32, in one rounding with the sum.
alias Four = vec4<f32>;

fn four_weights(v: vec4<f32>) -> Four {
    return v;
}

fn four_halves(low: u32, high: u32) -> Four {
    return vec4<f32>(unpack2x16float(low), unpack2x16float(high));
}

fn four_activations(v: vec4<f32>) -> Four {
    return v;
}

fn add_products(w: Four, x: Four, sum: vec4<f32>) -> vec4<f32> {
    return fma(w, x, sum);
}
