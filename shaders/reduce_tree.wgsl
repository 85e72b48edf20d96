// Sums over the LANES invocations that share an output, always in the same tree. To be called in uniform control flow.
var<workgroup> partial: array<vec4<f32>, WORKGROUP>;

// Lanes of an output are neighbours: invocation = output · LANES + lane.
fn lane_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    let lane = local % LANES;
    partial[local] = value;
    for (var reach = LANES / 2u; reach > 0u; reach = reach / 2u) {
        workgroupBarrier();
        if (lane < reach) {
            partial[local] = partial[local] + partial[local + reach];
        }
    }
    workgroupBarrier();
    let total = partial[local - lane];
    workgroupBarrier();
    return total;
}
