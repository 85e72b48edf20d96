fn four_bytes(word: u32, scale: f32) -> Four {
    let signed = (vec4<i32>(bitcast<i32>(word)) << vec4<u32>(24u, 16u, 8u, 0u)) >> vec4<u32>(24u);
    return four_weights(vec4<f32>(signed) * scale);
}

fn decode(w: Matrix, row: u32, group: u32) -> Group {
    let index = row * w.groups + group;
    let a = weights4[w.values + index * 2u];
    let b = weights4[w.values + index * 2u + 1u];
    let scale = half_to_float(half_at(w.scales + index));
    return Group(
        four_bytes(a.x, scale),
        four_bytes(a.y, scale),
        four_bytes(a.z, scale),
        four_bytes(a.w, scale),
        four_bytes(b.x, scale),
        four_bytes(b.y, scale),
        four_bytes(b.z, scale),
        four_bytes(b.w, scale),
    );
}
