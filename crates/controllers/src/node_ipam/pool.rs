//! Which node holds which pod CIDR: no clock, no client.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_api::{Cidr, address_number};

/// As upstream: more ranges than this in one cluster range would cost more memory than a cluster has use for.
const MOST_EXTRA_BITS: u8 = 16;

/// Why pod CIDRs cannot be cut from the given ranges.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeCidrsError {
    #[error("there is no range for pods: give --cluster-cidr")]
    NoRange,
    #[error("there may be one range for pods of each family, not more than two")]
    Families,
    #[error("nodes cannot have a /{mask} of {range}: the mask must be between /{} and /{widest}", range.bits)]
    Mask { range: Cidr, mask: u8, widest: u8 },
}

/// The ranges that pod CIDRs are cut from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCidrs {
    ranges: Vec<(Cidr, u8)>,
    /// Ranges that no node gets: those of Services.
    reserved: Vec<Cidr>,
    /// The node that has the first pod CIDR, always.
    first: Option<String>,
}

impl NodeCidrs {
    /// One range, or one of each family, each with the mask of the pod CIDRs cut from it.
    pub fn new(ranges: Vec<(Cidr, u8)>) -> Result<Self, NodeCidrsError> {
        match ranges.as_slice() {
            [] => return Err(NodeCidrsError::NoRange),
            [_] => {}
            [(a, _), (b, _)] if a.address.is_ipv4() != b.address.is_ipv4() => {}
            _ => return Err(NodeCidrsError::Families),
        }
        for (range, mask) in &ranges {
            let all = address_number(range.address).1;
            let widest = all.min(range.bits.saturating_add(MOST_EXTRA_BITS));
            if !(range.bits..=widest).contains(mask) {
                return Err(NodeCidrsError::Mask { range: *range, mask: *mask, widest });
            }
        }
        let ranges = ranges.into_iter().map(|(range, mask)| (range.masked(), mask)).collect();
        Ok(Self { ranges, reserved: Vec::new(), first: None })
    }

    /// Gives no node a range that overlaps with these.
    #[must_use]
    pub fn without(mut self, reserved: Vec<Cidr>) -> Self {
        self.reserved = reserved;
        self
    }

    /// Keeps the first pod CIDR of each range for this node, which may use it before it is registered.
    #[must_use]
    pub fn first_for(mut self, node: impl Into<String>) -> Self {
        self.first = Some(node.into());
        self
    }
}

/// One range and its users.
#[derive(Debug)]
struct Range {
    cidr: Cidr,
    mask: u8,
    reserved: BTreeSet<u32>,
    /// The nodes at each place. Two nodes can have the same CIDR only if somebody else gave it to them.
    users: BTreeMap<u32, BTreeSet<String>>,
    /// Where the search begins: freed CIDRs rest for as long as possible.
    next: u32,
}

impl Range {
    fn places(&self) -> u32 {
        1 << (self.mask - self.cidr.bits)
    }

    fn cidr_at(&self, place: u32) -> Cidr {
        let size = address_number(self.cidr.address).1 - self.mask;
        let base = address_number(self.cidr.address).0;
        Cidr { address: self.cidr.address_of(base + (u128::from(place) << size)), bits: self.mask }
    }

    /// The places that a range overlaps with; none when it is outside.
    fn places_of(&self, cidr: Cidr) -> Option<std::ops::RangeInclusive<u32>> {
        if cidr.contains(self.cidr) {
            return Some(0..=self.places() - 1);
        }
        if !self.cidr.contains(cidr) {
            return None;
        }
        let size = address_number(self.cidr.address).1 - self.mask;
        let base = address_number(self.cidr.address).0;
        let place = |address| u32::try_from((address_number(address).0 - base) >> size).ok();
        let (first, last) = cidr.ends();
        Some(place(first)?..=place(last)?)
    }

    fn is_free(&self, place: u32) -> bool {
        !self.reserved.contains(&place) && self.users.get(&place).is_none_or(BTreeSet::is_empty)
    }

    fn free(&self) -> Option<u32> {
        let places = self.places();
        (0..places).map(|step| (self.next + step) % places).find(|place| self.is_free(*place))
    }

    fn take(&mut self, place: u32, node: &str) {
        self.users.entry(place).or_default().insert(node.to_owned());
    }

    fn release(&mut self, node: &str) {
        self.users.retain(|_, users| {
            users.remove(node);
            !users.is_empty()
        });
    }
}

/// All pod CIDRs.
#[derive(Debug)]
pub(super) struct Pool {
    ranges: Vec<Range>,
    first: Option<String>,
    /// The ranges that a node has, or is about to get: a retry gives it the same.
    held: BTreeMap<String, Vec<Cidr>>,
    /// The ranges of deleted nodes. If only the Node object was deleted while the node lives, its pods
    /// still have addresses from them; the node gets them back when it returns.
    last: BTreeMap<String, Vec<Cidr>>,
    /// Nodes that found no CIDR left.
    waiting: BTreeSet<String>,
}

/// Names of nodes that are gone are kept up to this many.
const MOST_REMEMBERED: usize = 10_000;

/// There is no CIDR left in this range.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Exhausted(pub(super) Cidr);

impl Pool {
    pub(super) fn new(cidrs: &NodeCidrs) -> Self {
        let range = |(cidr, mask): &(Cidr, u8)| {
            let mut range = Range {
                cidr: *cidr,
                mask: *mask,
                reserved: BTreeSet::new(),
                users: BTreeMap::new(),
                next: 0,
            };
            range.reserved = cidrs.reserved.iter().filter_map(|r| range.places_of(*r)).flatten().collect();
            if cidrs.first.is_some() {
                range.reserved.insert(0);
                range.next = 1 % range.places();
            }
            range
        };
        Self {
            ranges: cidrs.ranges.iter().map(range).collect(),
            first: cidrs.first.clone(),
            held: BTreeMap::new(),
            last: BTreeMap::new(),
            waiting: BTreeSet::new(),
        }
    }

    /// The places that a node had before it went, if nobody has them now.
    fn earlier_places(&self, node: &str) -> Option<Vec<u32>> {
        let cidrs = self.last.get(node).filter(|cidrs| cidrs.len() == self.ranges.len())?;
        let place = |(range, cidr): (&Range, &Cidr)| {
            let place = range.places_of(*cidr).map(|places| *places.start())?;
            (range.cidr_at(place) == *cidr && range.is_free(place)).then_some(place)
        };
        self.ranges.iter().zip(cidrs).map(place).collect()
    }

    fn free_places(&self) -> Result<Vec<u32>, Exhausted> {
        self.ranges.iter().map(|range| range.free().ok_or(Exhausted(range.cidr))).collect()
    }

    /// Records that the node has these CIDRs, whatever their origin. CIDRs outside of the ranges are
    /// ignored.
    pub(super) fn occupy(&mut self, node: &str, cidrs: &[Cidr]) {
        if self.held.get(node).is_some_and(|held| held == cidrs) {
            return;
        }
        self.forget(node);
        for cidr in cidrs {
            for range in &mut self.ranges {
                for place in range.places_of(*cidr).into_iter().flatten() {
                    range.take(place, node);
                }
            }
        }
        self.held.insert(node.to_owned(), cidrs.to_vec());
    }

    /// The CIDRs of a node that has none yet, one of each range.
    pub(super) fn assign(&mut self, node: &str) -> Result<Vec<Cidr>, Exhausted> {
        if let Some(held) = self.held.get(node) {
            return Ok(held.clone());
        }
        let mut cidrs = Vec::with_capacity(self.ranges.len());
        if self.first.as_deref() == Some(node) {
            cidrs.extend(self.ranges.iter().map(|range| range.cidr_at(0)));
        } else {
            let earlier = self.earlier_places(node);
            let is_new = earlier.is_none();
            let places = match earlier.map_or_else(|| self.free_places(), Ok) {
                Ok(places) => places,
                Err(exhausted) => {
                    self.waiting.insert(node.to_owned());
                    return Err(exhausted);
                }
            };
            for (range, place) in self.ranges.iter_mut().zip(places) {
                cidrs.push(range.cidr_at(place));
                range.take(place, node);
                if is_new {
                    range.next = (place + 1) % range.places();
                }
            }
        }
        self.waiting.remove(node);
        self.held.insert(node.to_owned(), cidrs.clone());
        Ok(cidrs)
    }

    /// The node is gone. Returns the nodes that wait for a CIDR.
    pub(super) fn release(&mut self, node: &str) -> Vec<String> {
        self.waiting.remove(node);
        let Some(cidrs) = self.forget(node) else { return Vec::new() };
        if self.last.len() >= MOST_REMEMBERED {
            self.last.clear();
        }
        self.last.insert(node.to_owned(), cidrs);
        self.waiting.iter().cloned().collect()
    }

    fn forget(&mut self, node: &str) -> Option<Vec<Cidr>> {
        for range in &mut self.ranges {
            range.release(node);
        }
        self.held.remove(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cidr(text: &str) -> Cidr {
        Cidr::parse(text).unwrap()
    }

    fn pool(ranges: &[(&str, u8)]) -> Pool {
        Pool::new(&NodeCidrs::new(ranges.iter().map(|(r, m)| (cidr(r), *m)).collect()).unwrap())
    }

    fn texts(cidrs: Result<Vec<Cidr>, Exhausted>) -> Vec<String> {
        cidrs.unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn ranges_and_masks_are_checked() {
        let check =
            |ranges: &[(&str, u8)]| NodeCidrs::new(ranges.iter().map(|(r, m)| (cidr(r), *m)).collect());
        for (ranges, good) in [
            (&[("10.244.0.0/16", 24)][..], true),
            (&[("10.244.0.0/24", 24)], true),
            (&[("10.244.0.0/16", 24), ("fd00::/56", 64)], true),
            (&[("fd00::/48", 64)], true),
            (&[], false),
            (&[("10.244.0.0/16", 15)], false),
            (&[("10.0.0.0/8", 25)], false),
            (&[("10.244.0.0/30", 33)], false),
            (&[("fd00::/40", 64)], false),
            (&[("10.244.0.0/16", 24), ("10.245.0.0/16", 24)], false),
        ] {
            assert_eq!(check(ranges).is_ok(), good, "{ranges:?}");
        }
    }

    #[test]
    fn nodes_get_ranges_of_both_families_and_keep_them() {
        let mut pool = pool(&[("10.244.0.0/16", 24), ("fd00:10::/56", 64)]);
        assert_eq!(texts(pool.assign("a")), ["10.244.0.0/24", "fd00:10::/64"]);
        assert_eq!(texts(pool.assign("b")), ["10.244.1.0/24", "fd00:10:0:1::/64"]);
        assert_eq!(texts(pool.assign("a")), ["10.244.0.0/24", "fd00:10::/64"], "a retry changes nothing");
    }

    #[test]
    fn what_nodes_have_is_never_given_away() {
        let mut pool = pool(&[("10.244.0.0/16", 24)]);
        pool.occupy("old", &[cidr("10.244.0.0/23")]);
        pool.occupy("small", &[cidr("10.244.2.128/25")]);
        pool.occupy("foreign", &[cidr("192.0.2.0/24")]);
        assert_eq!(texts(pool.assign("new")), ["10.244.3.0/24"]);
        // Two nodes with the same range: it is free when both are gone.
        pool.occupy("twin", &[cidr("10.244.0.0/24")]);
        pool.release("old");
        pool.ranges[0].next = 0;
        assert_eq!(texts(pool.assign("next")), ["10.244.1.0/24"]);
        pool.release("twin");
        pool.ranges[0].next = 0;
        assert_eq!(texts(pool.assign("last")), ["10.244.0.0/24"]);
    }

    #[test]
    fn services_have_their_own() {
        let cidrs = NodeCidrs::new(vec![(cidr("10.0.0.0/14"), 16)]).unwrap();
        let mut pool = Pool::new(&cidrs.without(vec![cidr("10.1.128.0/20"), cidr("fd00::/108")]));
        assert_eq!(texts(pool.assign("a")), ["10.0.0.0/16"]);
        assert_eq!(texts(pool.assign("b")), ["10.2.0.0/16"]);
        let mut full = Pool::new(
            &NodeCidrs::new(vec![(cidr("10.96.0.0/16"), 24)]).unwrap().without(vec![cidr("10.96.0.0/12")]),
        );
        assert!(full.assign("a").is_err());
    }

    #[test]
    fn the_first_is_kept_for_its_node() {
        let cidrs = NodeCidrs::new(vec![(cidr("10.244.0.0/16"), 24)]).unwrap().first_for("here");
        let mut pool = Pool::new(&cidrs);
        assert_eq!(texts(pool.assign("other")), ["10.244.1.0/24"]);
        assert_eq!(texts(pool.assign("here")), ["10.244.0.0/24"]);
        pool.release("here");
        for n in 0..254 {
            pool.assign(&format!("n{n}")).unwrap();
        }
        assert_eq!(pool.assign("late"), Err(Exhausted(cidr("10.244.0.0/16"))));
        assert_eq!(texts(pool.assign("here")), ["10.244.0.0/24"]);
    }

    #[test]
    fn a_node_that_comes_back_has_what_it_had() {
        let mut pool = pool(&[("10.244.0.0/22", 24)]);
        for node in ["a", "b"] {
            pool.assign(node).unwrap();
        }
        pool.release("a");
        assert_eq!(texts(pool.assign("a")), ["10.244.0.0/24"]);
        assert_eq!(texts(pool.assign("c")), ["10.244.2.0/24"]);
        pool.release("a");
        for node in ["d", "e"] {
            pool.assign(node).unwrap();
        }
        assert_eq!(pool.assign("a"), Err(Exhausted(cidr("10.244.0.0/22"))), "others need it more");
    }

    #[test]
    fn a_node_that_goes_makes_room_for_those_that_wait() {
        let mut pool = pool(&[("10.244.0.0/23", 24)]);
        for node in ["a", "b"] {
            pool.assign(node).unwrap();
        }
        assert_eq!(pool.assign("c"), Err(Exhausted(cidr("10.244.0.0/23"))));
        assert_eq!(pool.release("unknown"), Vec::<String>::new());
        assert_eq!(pool.release("a"), ["c"]);
        assert_eq!(texts(pool.assign("c")), ["10.244.0.0/24"]);
        assert_eq!(pool.release("b"), Vec::<String>::new(), "nobody waits any more");
    }

    proptest! {
        /// However nodes come and go, no two of them have the same range.
        #[test]
        fn ranges_are_disjoint(steps in proptest::collection::vec((0u8..12, any::<bool>()), 0..200)) {
            let mut pool = pool(&[("10.244.0.0/21", 24), ("fd00::/61", 64)]);
            let mut given: BTreeMap<u8, Vec<Cidr>> = BTreeMap::new();
            for (node, comes) in steps {
                let name = node.to_string();
                if !comes {
                    pool.release(&name);
                    given.remove(&node);
                } else if let Ok(cidrs) = pool.assign(&name) {
                    given.insert(node, cidrs);
                } else {
                    prop_assert_eq!(given.len(), 8);
                }
                let mut all: Vec<Cidr> = given.values().flatten().copied().collect();
                all.sort_by_key(ToString::to_string);
                all.dedup();
                prop_assert_eq!(all.len(), given.len() * 2);
            }
        }
    }
}
