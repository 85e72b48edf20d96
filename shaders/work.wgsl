// The work list of an upload: for each arena (first tile, tiles, 0, 0); then tiles (slot's first byte / 16, place of its
// first item in words, items, 0), at most four items of one slot each; then items, as token · top_k + rank.
@group(0) @binding(2) var<storage, read> work: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> items: array<u32>;

// The tile a workgroup works on; no items if it has none.
fn tile_of(workgroup: vec3<u32>, workgroups: vec3<u32>) -> vec4<u32> {
    let arena = work[op.arena];
    let tile = workgroup.z * workgroups.y + workgroup.y;
    if (tile >= arena.y) {
        return vec4<u32>();
    }
    return work[arena.x + tile];
}

// The matrix as it lies in a slot.
fn in_slot(w: Matrix, slot: u32) -> Matrix {
    return Matrix(w.values + slot, w.scales + slot * 8u, w.rows + slot * 4u, w.groups);
}
