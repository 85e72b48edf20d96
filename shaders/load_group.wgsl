// Group `index` of the activations in `x`, whose rows are padded to whole groups with zeros.
fn load_group(index: u32) -> Group {
    let at = index * 8u;
    return Group(
        x[at],
        x[at + 1u],
        x[at + 2u],
        x[at + 3u],
        x[at + 4u],
        x[at + 5u],
        x[at + 6u],
        x[at + 7u],
    );
}
