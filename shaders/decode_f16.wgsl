fn decode(w: Matrix, row: u32, group: u32) -> Group {
    let at = w.values + (row * w.groups + group) * 4u;
    let a = weights4[at];
    let b = weights4[at + 1u];
    let c = weights4[at + 2u];
    let d = weights4[at + 3u];
    return Group(
        four_halves(a.x, a.y),
        four_halves(a.z, a.w),
        four_halves(b.x, b.y),
        four_halves(b.z, b.w),
        four_halves(c.x, c.y),
        four_halves(c.z, c.w),
        four_halves(d.x, d.y),
        four_halves(d.z, d.w),
    );
}
