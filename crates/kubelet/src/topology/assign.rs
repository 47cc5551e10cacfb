//! Which processors a container gets: whole NUMA nodes, sockets and cores first, so that the others stay whole.

use super::cpuset::CpuSet;
use super::machine::{Cpu, CpuTopology};
use super::mask::NumaMask;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AssignError {
    #[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
    TooFew { requested: usize, available: usize },
    #[error("failed to allocate cpus")]
    Failed,
}

/// The options of the static policy that say how processors are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Spread {
    /// Evenly over the NUMA nodes that are needed.
    pub across_numa: bool,
    /// No regard to whole cores.
    pub across_cores: bool,
    /// Processors that share the last cache, if possible.
    pub uncore: bool,
    /// Processors are taken in groups of this size.
    pub group: usize,
}

/// Chooses `count` of the `available` processors.
pub(crate) fn take(
    topology: &CpuTopology,
    available: &CpuSet,
    count: usize,
    spread: Spread,
) -> Result<CpuSet, AssignError> {
    match spread.across_numa && count.is_multiple_of(spread.group.max(1)) {
        true => distributed(topology, available, count, spread),
        false => packed(topology, available, count, spread),
    }
}

/// The processors still free while some are chosen.
struct Taking<'a> {
    topology: &'a CpuTopology,
    free: BTreeMap<u32, Cpu>,
    needed: usize,
    taken: CpuSet,
}

type Level = fn(&Cpu) -> u32;
const NUMA: Level = |cpu| cpu.numa;
const SOCKET: Level = |cpu| cpu.socket;
const CORE: Level = |cpu| cpu.core;
const UNCORE: Level = |cpu| cpu.uncore;

impl<'a> Taking<'a> {
    fn new(topology: &'a CpuTopology, available: &CpuSet, count: usize) -> Self {
        let free = topology.cpus.iter().filter(|(id, _)| available.contains(**id));
        Self {
            topology,
            free: free.map(|(id, cpu)| (*id, *cpu)).collect(),
            needed: count,
            taken: CpuSet::default(),
        }
    }

    fn size(&self, level: Level, id: u32) -> usize {
        self.free.values().filter(|cpu| level(cpu) == id).count()
    }

    /// The parts of one level within those of another, the fullest last.
    fn sorted(&self, level: Level, within: Option<(Level, u32)>) -> Vec<u32> {
        let members = self.free.values().filter(|cpu| within.is_none_or(|(outer, id)| outer(cpu) == id));
        let mut ids: Vec<u32> = members.map(level).collect::<BTreeSet<u32>>().into_iter().collect();
        ids.sort_by_key(|id| (self.size(level, *id), *id));
        ids
    }

    /// The outer level first: NUMA nodes, unless sockets have several of them.
    fn numa_first(&self) -> bool {
        self.topology.sockets().len() >= self.topology.numa_nodes().len()
    }

    fn nested(&self, outer: &[u32], outer_level: Level, level: Level) -> Vec<u32> {
        let mut ids = Vec::new();
        for id in outer {
            for inner in self.sorted(level, Some((outer_level, *id))) {
                if !ids.contains(&inner) {
                    ids.push(inner);
                }
            }
        }
        ids
    }

    fn numas(&self) -> Vec<u32> {
        match self.numa_first() {
            true => self.sorted(NUMA, None),
            false => self.nested(&self.sorted(SOCKET, None), SOCKET, NUMA),
        }
    }

    fn sockets(&self) -> Vec<u32> {
        match self.numa_first() {
            true => self.nested(&self.sorted(NUMA, None), NUMA, SOCKET),
            false => self.sorted(SOCKET, None),
        }
    }

    fn cores(&self) -> Vec<u32> {
        match self.numa_first() {
            true => self.nested(&self.sockets(), SOCKET, CORE),
            false => self.nested(&self.numas(), NUMA, CORE),
        }
    }

    fn uncores(&self) -> Vec<u32> {
        self.nested(&self.numas(), NUMA, UNCORE)
    }

    fn members(&self, level: Level, id: u32) -> CpuSet {
        self.free.iter().filter(|(_, cpu)| level(cpu) == id).map(|(id, _)| *id).collect()
    }

    fn take(&mut self, cpus: &CpuSet) {
        self.needed = self.needed.saturating_sub(cpus.len());
        self.free.retain(|id, _| !cpus.contains(*id));
        self.taken = self.taken.union(cpus);
    }

    /// Takes parts of which nothing is in use and all is needed.
    fn take_whole(&mut self, level: Level, ids: Vec<u32>, whole: Option<usize>) {
        for id in ids {
            let all = self.topology.select(|_, cpu| level(cpu) == id).len();
            if self.size(level, id) == whole.unwrap_or(all) && self.needed >= all {
                self.take(&self.members(level, id));
            }
        }
    }

    fn take_uncore(&mut self) {
        for uncore in self.uncores() {
            if self.needed >= self.topology.cpus_per_uncore() {
                self.take_whole(UNCORE, self.uncores(), None);
            }
            if self.needed == 0 {
                return;
            }
            self.take_part_of_uncore(uncore);
            if self.needed == 0 {
                return;
            }
        }
    }

    /// Takes all processors still needed from one cache, if its whole cores give exactly that number.
    fn take_part_of_uncore(&mut self, uncore: u32) {
        let per_core = self.topology.cpus_per_core();
        let wanted = self.needed.div_ceil(per_core);
        let cores = self.members(UNCORE, uncore);
        let cores: BTreeSet<u32> = cores.iter().map(|id| self.free[&id].core).collect();
        let mut cpus: Vec<u32> = Vec::new();
        for core in cores.into_iter().take(wanted) {
            cpus.extend(self.members(CORE, core).iter());
        }
        cpus.sort_unstable();
        if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > self.needed {
            cpus.pop();
        }
        if cpus.len() == self.needed {
            self.take(&cpus.into_iter().collect());
        }
    }

    fn take_rest(&mut self, across_cores: bool) {
        let order: Vec<u32> = match across_cores {
            true => self
                .sockets()
                .iter()
                .flat_map(|id| self.members(SOCKET, *id).iter().collect::<Vec<_>>())
                .collect(),
            false => self
                .cores()
                .iter()
                .flat_map(|id| self.members(CORE, *id).iter().collect::<Vec<_>>())
                .collect(),
        };
        let rest: CpuSet = order.into_iter().take(self.needed).collect();
        self.take(&rest);
    }
}

fn packed(
    topology: &CpuTopology,
    available: &CpuSet,
    count: usize,
    spread: Spread,
) -> Result<CpuSet, AssignError> {
    let mut taking = Taking::new(topology, available, count);
    if taking.needed > taking.free.len() {
        return Err(AssignError::TooFew { requested: count, available: available.len() });
    }
    let (per_socket, per_core) = (topology.cpus_per_socket(), topology.cpus_per_core());
    let numas = |taking: &mut Taking<'_>| taking.take_whole(NUMA, taking.numas(), None);
    let sockets = |taking: &mut Taking<'_>| taking.take_whole(SOCKET, taking.sockets(), Some(per_socket));
    match taking.numa_first() {
        true => {
            numas(&mut taking);
            sockets(&mut taking);
        }
        false => {
            sockets(&mut taking);
            numas(&mut taking);
        }
    }
    if taking.needed > 0 && spread.uncore {
        taking.take_uncore();
    }
    if taking.needed > 0 && !spread.across_cores {
        taking.take_whole(CORE, taking.cores(), Some(per_core));
    }
    if taking.needed > 0 {
        taking.take_rest(spread.across_cores);
    }
    match taking.needed {
        0 => Ok(taking.taken),
        _ => Err(AssignError::Failed),
    }
}

/// Takes as many from each of as few NUMA nodes as possible; the remainder goes where it leaves the nodes
/// most alike.
fn distributed(
    topology: &CpuTopology,
    available: &CpuSet,
    count: usize,
    spread: Spread,
) -> Result<CpuSet, AssignError> {
    let group = spread.group.max(1);
    let taking = Taking::new(topology, available, count);
    if count == 0 {
        return Ok(CpuSet::default());
    }
    if count > taking.free.len() {
        return Err(AssignError::TooFew { requested: count, available: available.len() });
    }
    let free: BTreeMap<u32, usize> =
        taking.numas().into_iter().map(|numa| (numa, taking.size(NUMA, numa))).collect();
    let groups_per_node =
        topology.cpus.len().div_ceil(group).div_ceil(topology.numa_nodes().len().max(1)).max(1);
    let groups = count.div_ceil(group);
    for nodes in groups.div_ceil(groups_per_node)..=groups.min(free.len()) {
        if let Some(shares) = best_shares(&taking.numas(), &free, nodes, count, group) {
            let mut taken = CpuSet::default();
            for (numa, share) in shares {
                taken = taken.union(&packed(topology, &taking.members(NUMA, numa), share, spread)?);
            }
            return Ok(taken);
        }
    }
    packed(topology, available, count, Spread { uncore: false, ..spread })
}

/// The number of processors from each of `nodes` nodes.
fn best_shares(
    numas: &[u32],
    free: &BTreeMap<u32, usize>,
    nodes: usize,
    count: usize,
    group: usize,
) -> Option<BTreeMap<u32, usize>> {
    let all: BTreeSet<u32> = numas.iter().copied().collect();
    let mut best: Option<(u64, BTreeMap<u32, usize>)> = None;
    for combination in NumaMask::combinations(&all).into_iter().filter(|mask| mask.count() == nodes) {
        let members: Vec<u32> = numas.iter().copied().filter(|numa| combination.has(*numa)).collect();
        let usable: usize = members.iter().map(|numa| free[numa] / group * group).sum();
        let share = count / nodes / group * group;
        if usable < count || members.iter().any(|numa| free[numa] < share) {
            continue;
        }
        let shares: BTreeMap<u32, usize> = members.iter().map(|numa| (*numa, share)).collect();
        let remainder = count - share * nodes;
        for shares in with_remainder(&shares, &members, free, remainder, group) {
            let left: Vec<usize> =
                free.iter().map(|(numa, free)| free - shares.get(numa).copied().unwrap_or(0)).collect();
            let balance = imbalance(&left);
            if best.as_ref().is_none_or(|(known, _)| balance < *known) {
                best = Some((balance, shares));
            }
        }
    }
    best.map(|(_, shares)| shares)
}

/// The ways to give out a remainder: in turns over some of the nodes that have a group left.
fn with_remainder(
    shares: &BTreeMap<u32, usize>,
    members: &[u32],
    free: &BTreeMap<u32, usize>,
    remainder: usize,
    group: usize,
) -> Vec<BTreeMap<u32, usize>> {
    if remainder == 0 {
        return vec![shares.clone()];
    }
    let left = |shares: &BTreeMap<u32, usize>, numa: &u32| free[numa] - shares[numa];
    let able: BTreeSet<u32> = members.iter().copied().filter(|numa| left(shares, numa) >= group).collect();
    let mut subsets = NumaMask::combinations(&able);
    subsets.sort_by_key(|mask| std::cmp::Reverse(mask.count()));
    let mut ways = Vec::new();
    for subset in subsets {
        let mut given = shares.clone();
        let mut rest = remainder;
        while rest > 0 {
            let before = rest;
            for numa in members.iter().filter(|numa| subset.has(**numa)) {
                if rest > 0 && left(&given, numa) >= group {
                    given.entry(*numa).and_modify(|share| *share += group);
                    rest = rest.saturating_sub(group);
                }
            }
            if rest == before {
                break;
            }
        }
        if rest == 0 {
            ways.push(given);
        }
    }
    ways
}

/// The standard deviation, in thousandths.
fn imbalance(values: &[usize]) -> u64 {
    let count = values.len().max(1) as f64;
    let mean = values.iter().map(|v| *v as f64).sum::<f64>() / count;
    let mean = (mean * 1000.0).round() / 1000.0;
    let variance = values.iter().map(|v| (*v as f64 - mean).powi(2)).sum::<f64>() / count;
    (variance.sqrt() * 1000.0).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::machine::tests::machine;
    use proptest::prelude::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn whole_parts_are_taken_first() {
        // Two sockets, one node each, four cores, two threads: core n has threads n and n+8.
        let two = machine(2, 1, 4, 2);
        // One socket of one node, and one whose nodes are two.
        let split = machine(1, 2, 2, 2);
        let plain = Spread { group: 1, ..Spread::default() };
        let across_cores = Spread { across_cores: true, ..plain };
        for (what, topology, free, count, spread, expected) in [
            ("nothing", &two, "0-15", 0, plain, Ok("")),
            ("a thread", &two, "0-15", 1, plain, Ok("0")),
            ("a core", &two, "0-15", 2, plain, Ok("0,8")),
            ("a core and a thread", &two, "0-15", 3, plain, Ok("0-1,8")),
            ("a socket", &two, "0-15", 8, plain, Ok("0-3,8-11")),
            ("a socket and a core", &two, "0-15", 10, plain, Ok("0-4,8-12")),
            ("the fuller socket stays whole", &two, "0-1,4-15", 2, plain, Ok("0,8")),
            ("whole cores before halves", &two, "0-15", 4, plain, Ok("0-1,8-9")),
            ("half a core is left for one", &two, "0,9,1,2,10", 1, plain, Ok("0")),
            ("over cores", &two, "0-15", 3, across_cores, Ok("0-2")),
            ("a node of a socket", &split, "0-7", 4, plain, Ok("0-1,4-5")),
            ("too many", &two, "0-1", 3, plain, Err(AssignError::TooFew { requested: 3, available: 2 })),
        ] {
            let got = take(topology, &set(free), count, spread).map(|cpus| cpus.to_string());
            assert_eq!(got, expected.map(str::to_owned), "{what}");
        }
    }

    #[test]
    fn processors_are_spread_over_nodes() {
        let four = machine(2, 2, 2, 2);
        let evenly = Spread { across_numa: true, group: 1, ..Spread::default() };
        let by_core = Spread { group: 2, ..evenly };
        for (what, free, count, spread, expected) in [
            ("fits into one", "0-15", 4, evenly, "0-1,8-9"),
            ("two nodes alike", "0-15", 6, evenly, "0-2,8-10"),
            ("one node is in use", "2-7,10-15", 8, evenly, "2-5,10-13"),
            ("cores stay whole", "0-15", 6, by_core, "0-2,8-10"),
        ] {
            let got = take(&four, &set(free), count, spread).unwrap();
            let per_node: Vec<usize> =
                (0..4).map(|node| got.iter().filter(|id| four.cpus[id].numa == node).count()).collect();
            assert_eq!(got.len(), count, "{what}");
            assert_eq!(got.len(), set(expected).len(), "{what}: {got} {per_node:?}");
            assert!(per_node.iter().filter(|n| **n > 0).count() <= 2, "{what}: {got}");
        }
        let thirds = take(&machine(1, 3, 2, 1), &set("0-5"), 3, evenly).unwrap();
        assert_eq!(thirds.len(), 3);
    }

    #[test]
    fn a_cache_is_not_shared_if_possible() {
        let mut topology = machine(1, 1, 8, 1);
        for (id, cpu) in &mut topology.cpus {
            cpu.uncore = id / 4;
        }
        let by_cache = Spread { uncore: true, group: 1, ..Spread::default() };
        assert_eq!(take(&topology, &set("1-7"), 2, by_cache).unwrap().to_string(), "1-2");
        assert_eq!(take(&topology, &set("2-7"), 4, by_cache).unwrap().to_string(), "4-7");
        assert_eq!(take(&topology, &set("2-7"), 3, by_cache).unwrap().to_string(), "4-6");
    }

    proptest! {
        /// Whatever the options: exactly as many as asked for, of those that are free.
        #[test]
        fn exactly_what_was_asked_for(
            sockets in 1u32..3, nodes in 1u32..3, cores in 1u32..5, threads in 1u32..3,
            free in any::<u64>(), count in 0usize..20,
            across_numa: bool, across_cores: bool, uncore: bool, whole: bool,
        ) {
            let topology = machine(sockets, nodes, cores, threads);
            let available: CpuSet = topology.all().iter().filter(|id| free & (1 << (id % 64)) != 0).collect();
            let group = if whole { topology.cpus_per_core() } else { 1 };
            let taken = take(&topology, &available, count, Spread { across_numa, across_cores, uncore, group });
            match taken {
                Ok(taken) => {
                    prop_assert_eq!(taken.len(), count);
                    prop_assert!(taken.is_subset(&available));
                }
                Err(_) => prop_assert!(count > available.len()),
            }
        }
    }
}
