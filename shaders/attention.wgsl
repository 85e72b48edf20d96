// Attention runs in four kernels over a batch of the chunk's tokens: scores, softmax within blocks of BLOCK keys, sums of
// values within the same blocks, and the combination of the blocks in order. Blocks start at multiples of BLOCK positions,
// so a token's result depends on its own keys alone.
struct Op {
    heads: u32,
    kv_heads: u32,
    // Dimensions of keys, vectors of four a head's key takes in the cache, and the same of values.
    dim: u32,
    key_head: u32,
    value_dim: u32,
    head: u32,
    // Blocks that the scratch buffers have room for, a token and head.
    blocks: u32,
    // First token of the batch.
    first: u32,
    q_stride: u32,
    y_stride: u32,
    gate_row: u32,
    gate_offset: u32,
    gate_stride: u32,
    scale: f32,
    // Positions that a token attends to at most, its own among them.
    window: u32,
}

@group(0) @binding(1) var<uniform> op: Op;

// Blocks with keys for the last token of the chunk.
fn block_count() -> u32 {
    return (chunk.pos + chunk.m + BLOCK - 1u) / BLOCK;
}

// The first key that the token at `position` attends to.
fn first_key(position: u32) -> u32 {
    return position + 1u - min(op.window, position + 1u);
}

// How many keys of block `block` come before the first that the token at `position` attends to.
fn keys_before(position: u32, block: u32) -> u32 {
    return clamp(first_key(position), block * BLOCK, block * BLOCK + BLOCK) - block * BLOCK;
}

// Keys of block `block` up to the token at `position`.
fn keys_in_block(position: u32, block: u32) -> u32 {
    let first = block * BLOCK;
    if (first > position) {
        return 0u;
    }
    return min(BLOCK, position + 1u - first);
}

// Place of a (token of the batch, head, block) in the scratch buffers.
fn block_index(token: u32, head: u32, block: u32) -> u32 {
    return (token * op.heads + head) * op.blocks + block;
}
