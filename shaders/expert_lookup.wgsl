// Looks a layer's choice up in the slot table and lists its work, tiled as in work.wgsl. Where an expert has no slot the
// pass stops here, before any has run, so that the host can soon begin to read: the list is empty, and the pass has no
// tokens left, so that what was submitted after it does nothing. Forecasts have the pass's tokens there, or in the
// last layer that was submitted, and none anywhere else. One workgroup.

struct Op {
    // The layer's first entry in the table.
    entries: u32,
    top_k: u32,
    arenas: u32,
    slots_an_arena: u32,
    // Vectors of four that a slot takes.
    slot: u32,
    // (token, rank) pairs that the buffers have room for.
    places: u32,
    // Place of the layer's record: what became of it, and the ids.
    record: u32,
    layer: u32,
}

// Places of `m`, each followed by `pos`, in `passes`.
const CHUNK = 0u;
const HEAD = 64u;
const FORECAST = 128u;
// Place of the last layer that was submitted.
const LAST = 2u;

const SKIPPED = 0u;
const COMPLETE = 1u;
const STOPPED = 2u;

@group(0) @binding(1) var<uniform> op: Op;
@group(0) @binding(2) var<storage, read_write> passes: array<u32>;
@group(0) @binding(3) var<storage, read> choice: array<u32>;
// Slot + 1 of each expert, or 0.
@group(0) @binding(4) var<storage, read> slots: array<u32>;
@group(0) @binding(5) var<storage, read_write> work: array<u32>;
@group(0) @binding(6) var<storage, read_write> records: array<u32>;

var<workgroup> tokens: u32;
var<workgroup> missing: atomic<u32>;
// Arena + 1 of the pairs that begin a tile; 0 for others.
var<workgroup> begins: array<u32, PAIRS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) local: u32) {
    if (local == 0u) {
        tokens = passes[CHUNK];
        atomicStore(&missing, 0u);
    }
    let pairs = workgroupUniformLoad(&tokens) * op.top_k;
    for (var pair = local; pair < pairs; pair += WORKGROUP) {
        let expert = choice[pair];
        let slot = slots[op.entries + expert];
        records[op.record + 1u + pair] = expert;
        if (slot == 0u) {
            atomicStore(&missing, 1u);
        }
        var earlier = 0u;
        for (var other = 0u; other < pair; other++) {
            earlier += u32(choice[other] == expert);
        }
        begins[pair] = select(0u, (slot - 1u) / op.slots_an_arena + 1u, slot != 0u && earlier % 4u == 0u);
    }
    workgroupBarrier();
    let stopped = atomicLoad(&missing) != 0u;
    let items = 4u * (op.arenas + op.places);
    for (var pair = local; pair < pairs; pair += WORKGROUP) {
        let arena = begins[pair];
        if (arena != 0u) {
            var tile = 0u;
            for (var other = 0u; other < pairs; other++) {
                let begun = begins[other];
                tile += u32(begun != 0u && (begun < arena || (begun == arena && other < pair)));
            }
            let expert = choice[pair];
            var count = 0u;
            for (var other = pair; other < pairs && count < 4u; other++) {
                if (choice[other] == expert) {
                    work[items + 4u * tile + count] = other;
                    count += 1u;
                }
            }
            let at = 4u * (op.arenas + tile);
            work[at] = (slots[op.entries + expert] - 1u) % op.slots_an_arena * op.slot;
            work[at + 1u] = items + 4u * tile;
            work[at + 2u] = count;
        }
    }
    for (var arena = local; arena < op.arenas; arena += WORKGROUP) {
        var before = 0u;
        var count = 0u;
        for (var pair = 0u; pair < pairs; pair++) {
            let begun = begins[pair];
            before += u32(begun != 0u && begun <= arena);
            count += u32(begun == arena + 1u);
        }
        work[4u * arena] = op.arenas + before;
        work[4u * arena + 1u] = select(count, 0u, stopped);
    }
    if (local == 0u) {
        records[op.record] = select(select(COMPLETE, STOPPED, stopped), SKIPPED, pairs == 0u);
        passes[FORECAST] = select(0u, tokens, stopped || op.layer == passes[LAST]);
        passes[FORECAST + 1u] = passes[CHUNK + 1u];
        if (stopped) {
            passes[CHUNK] = 0u;
            passes[HEAD] = 0u;
        }
    }
}
