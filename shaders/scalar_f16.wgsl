// What weights and activations are multiplied in: f16, with sums in f32.
//
// Weights beyond ±8 and activations beyond ±8188 are taken as those: the largest product is then 65504, the largest f16,
// and no infinity arises, neither in a conversion nor in a product. The range is the activations' because silu · up has
// no bound in practice where weights have. Products below 2⁻¹⁴ may be taken as zero.
enable f16;

alias Four = vec4<f16>;

fn four_weights(v: vec4<f32>) -> Four {
    return vec4<f16>(clamp(v, vec4<f32>(-8.0), vec4<f32>(8.0)));
}

// By way of f32, which is exact and which compilers fold away: naga has no `bitcast` from one component to two.
fn four_halves(low: u32, high: u32) -> Four {
    let v = vec4<f16>(vec4<f32>(unpack2x16float(low), unpack2x16float(high)));
    return clamp(v, vec4<f16>(-8.0h), vec4<f16>(8.0h));
}

fn four_activations(v: vec4<f32>) -> Four {
    return vec4<f16>(clamp(v, vec4<f32>(-8188.0), vec4<f32>(8188.0)));
}

fn add_products(w: Four, x: Four, sum: vec4<f32>) -> vec4<f32> {
    return sum + vec4<f32>(w * x);
}
