// Sums over the LANES invocations that share an output, in the order of the lanes. Outputs are neighbours, so that their
// loads are: invocation = lane · (WORKGROUP / LANES) + output. To be called in uniform control flow.
var<workgroup> partial: array<f32, WORKGROUP>;

fn plane_sum(local: u32, value: f32) -> f32 {
    const OUTPUTS = WORKGROUP / LANES;
    partial[local] = value;
    workgroupBarrier();
    var total = 0.0;
    for (var lane = 0u; lane < LANES; lane++) {
        total += partial[lane * OUTPUTS + local % OUTPUTS];
    }
    workgroupBarrier();
    return total;
}
