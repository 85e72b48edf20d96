//!import scalar

// A stored matrix, see `src/tensor/mod.rs`: where its planes start in `weights4` (values), in halves of `weights1`
// (scales) and in `weights1` (rows), and how many groups of 32 columns a row has. The two names are one buffer.
struct Matrix {
    values: u32,
    scales: u32,
    rows: u32,
    groups: u32,
}

// 32 consecutive elements of a row.
alias Group = array<Four, 8>;

// Exact for subnormals, which block scales often are and `unpack2x16float` may flush to zero.
fn half_to_float(bits: u32) -> f32 {
    let normal = bitcast<f32>(((bits & 0x7fffu) << 13u) + (112u << 23u));
    let magnitude = select(normal, f32(bits & 0x3ffu) * 5.9604644775390625e-8, (bits & 0x7c00u) == 0u);
    return select(magnitude, -magnitude, (bits & 0x8000u) != 0u);
}

fn half_at(index: u32) -> u32 {
    return (weights1[index >> 1u] >> ((index & 1u) * 16u)) & 0xffffu;
}

// Adds the products of a group with 32 activations; every addend goes to the same place of `acc` whatever the caller.
fn dot_group(w: Group, x: Group, acc: vec4<f32>) -> vec4<f32> {
    var sum = add_products(w[0], x[0], acc);
    sum = add_products(w[1], x[1], sum);
    sum = add_products(w[2], x[2], sum);
    sum = add_products(w[3], x[3], sum);
    sum = add_products(w[4], x[4], sum);
    sum = add_products(w[5], x[5], sum);
    sum = add_products(w[6], x[6], sum);
    return add_products(w[7], x[7], sum);
}
