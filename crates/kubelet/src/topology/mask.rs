//! Sets of NUMA nodes.

use std::collections::BTreeSet;

/// Nodes with numbers below 64, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct NumaMask(u64);

impl NumaMask {
    pub(crate) fn of(nodes: impl IntoIterator<Item = u32>) -> Self {
        Self(nodes.into_iter().filter(|node| *node < 64).fold(0, |mask, node| mask | 1 << node))
    }

    pub(crate) fn has(self, node: u32) -> bool {
        node < 64 && self.0 & (1 << node) != 0
    }

    pub(crate) fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn nodes(self) -> impl Iterator<Item = u32> {
        (0..64).filter(move |node| self.has(*node))
    }

    /// Fewer nodes; of as many, the lower ones.
    pub(crate) fn is_narrower_than(self, other: Self) -> bool {
        if self.count() == other.count() { self.is_less_than(other) } else { self.count() < other.count() }
    }

    pub(crate) fn is_less_than(self, other: Self) -> bool {
        self.0 < other.0
    }

    /// Every set of some of these nodes: single ones first, then pairs, and so on.
    pub(crate) fn combinations(nodes: &BTreeSet<u32>) -> Vec<Self> {
        let nodes: Vec<u32> = nodes.iter().copied().filter(|node| *node < 64).take(MOST_NODES).collect();
        let mut all: Vec<Self> = (1..1u64 << nodes.len())
            .map(|bits| Self::of((0..nodes.len()).filter(|n| bits & (1 << n) != 0).map(|n| nodes[n])))
            .collect();
        all.sort_by_key(|mask| mask.count());
        all
    }
}

/// Machines with more nodes are refused, unless the administrator allows them.
const MOST_NODES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combinations_and_order() {
        let of = |nodes: &[u32]| NumaMask::of(nodes.iter().copied());
        let all = NumaMask::combinations(&BTreeSet::from([0, 1, 3]));
        assert_eq!(all.len(), 7);
        assert_eq!(all[..3], [of(&[0]), of(&[1]), of(&[3])]);
        assert_eq!(all[6], of(&[0, 1, 3]));
        assert!(of(&[3]).is_narrower_than(of(&[0, 1])) && of(&[0]).is_narrower_than(of(&[1])));
        assert!(!of(&[1]).is_narrower_than(of(&[1])));
        assert_eq!(of(&[1, 3]).nodes().collect::<Vec<_>>(), [1, 3]);
        assert_eq!(of(&[0, 1]).and(of(&[1, 2])), of(&[1]));
    }
}
