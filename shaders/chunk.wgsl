// The tokens of a pass: `m` of them, the first at position `pos` of the sequence. A pass that an expert is missing from
// has no tokens left, see expert_lookup.wgsl, so that whatever was submitted after it does nothing.
struct Chunk {
    m: u32,
    pos: u32,
}

@group(0) @binding(0) var<uniform> chunk: Chunk;
