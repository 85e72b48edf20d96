fn glu(gate: f32, up: f32) -> f32 {
    return silu(gate) * up;
}
