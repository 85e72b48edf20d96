fn decode(w: Matrix, row: u32, group: u32) -> Group {
    let at = w.values + (row * w.groups + group) * 8u;
    return Group(
        bitcast<vec4<f32>>(weights4[at]),
        bitcast<vec4<f32>>(weights4[at + 1u]),
        bitcast<vec4<f32>>(weights4[at + 2u]),
        bitcast<vec4<f32>>(weights4[at + 3u]),
        bitcast<vec4<f32>>(weights4[at + 4u]),
        bitcast<vec4<f32>>(weights4[at + 5u]),
        bitcast<vec4<f32>>(weights4[at + 6u]),
        bitcast<vec4<f32>>(weights4[at + 7u]),
    );
}
