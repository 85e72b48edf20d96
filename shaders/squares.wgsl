// One lane's share of the squares of `len` elements of `x`: every LANES-th four, in four sums.
fn squares_of(start: u32, len: u32, lane: u32) -> vec4<f32> {
    var sum = vec4<f32>();
    let whole = len / 4u;
    for (var i = lane; i < whole; i += LANES) {
        let at = start + i * 4u;
        let v = vec4<f32>(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
        sum = fma(v, v, sum);
    }
    for (var i = whole * 4u + lane; i < len; i += LANES) {
        let v = x[start + i];
        sum.x = fma(v, v, sum.x);
    }
    return sum;
}
