//! Where a field is looked for: a table of slots that the build fills and a lookup reads.

/// The slot at which the search for a name begins. The number of slots is a power of two.
pub fn first(name: &[u8], slots: usize) -> usize {
    let [Some(head), Some(middle), Some(tail)] = [name.first(), name.get(name.len() / 2), name.last()] else {
        return 0;
    };
    let mix = |hash: usize, byte: usize| hash.wrapping_mul(31).wrapping_add(byte);
    mix(mix(mix(name.len(), usize::from(*head)), usize::from(*middle)), usize::from(*tail)) & (slots - 1)
}
