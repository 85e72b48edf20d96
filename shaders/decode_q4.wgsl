// The low nibbles of a word's four bytes.
fn four_nibbles(word: u32, step: f32, low: f32) -> Four {
    let q = (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(15u);
    return four_weights(fma(vec4<f32>(q), vec4<f32>(step), vec4<f32>(-low)));
}

fn decode(w: Matrix, row: u32, group: u32) -> Group {
    let index = row * w.groups + group;
    let q = weights4[w.values + index];
    let constants = half_at(w.scales + index);
    let row_constants = weights1[w.rows + row];
    let step = half_to_float(row_constants & 0xffffu) * f32(constants & 0xffu);
    let low = half_to_float(row_constants >> 16u) * f32(constants >> 8u);
    return Group(
        four_nibbles(q.x, step, low),
        four_nibbles(q.y, step, low),
        four_nibbles(q.z, step, low),
        four_nibbles(q.w, step, low),
        four_nibbles(q.x >> 4u, step, low),
        four_nibbles(q.y >> 4u, step, low),
        four_nibbles(q.z >> 4u, step, low),
        four_nibbles(q.w >> 4u, step, low),
    );
}
