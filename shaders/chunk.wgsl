// The tokens of a pass: `m` of them, the first at position `pos` of the sequence.
struct Chunk {
    m: u32,
    pos: u32,
}

@group(0) @binding(0) var<uniform> chunk: Chunk;
