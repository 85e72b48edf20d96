// As gpt-oss has it.
fn glu(gate: f32, up: f32) -> f32 {
    let g = min(gate, op.limit);
    let u = clamp(up, -op.limit, op.limit);
    return g * sigmoid(op.alpha * g) * (u + 1.0);
}
