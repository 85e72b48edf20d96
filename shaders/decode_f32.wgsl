fn decode(w: Matrix, row: u32, group: u32) -> Group {
    let at = w.values + (row * w.groups + group) * 8u;
    return Group(
        four_weights(bitcast<vec4<f32>>(weights4[at])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 1u])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 2u])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 3u])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 4u])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 5u])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 6u])),
        four_weights(bitcast<vec4<f32>>(weights4[at + 7u])),
    );
}
