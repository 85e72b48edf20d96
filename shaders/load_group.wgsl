// Group `index` of the activations in `x`, whose rows are padded to whole groups with zeros.
fn load_group(index: u32) -> Group {
    let at = index * 8u;
    return Group(
        four_activations(x[at]),
        four_activations(x[at + 1u]),
        four_activations(x[at + 2u]),
        four_activations(x[at + 3u]),
        four_activations(x[at + 4u]),
        four_activations(x[at + 5u]),
        four_activations(x[at + 6u]),
        four_activations(x[at + 7u]),
    );
}
