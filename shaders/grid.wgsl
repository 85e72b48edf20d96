// Workgroups of a one-dimensional job, which is laid out over x and y because each may count 65,535 at most.
fn linear_workgroup(id: vec3<u32>, count: vec3<u32>) -> u32 {
    return id.y * count.x + id.x;
}
