//! Hints: the NUMA nodes that could provide a resource, and the merge of the hints of all resources.

use super::machine::CpuTopology;
use super::mask::NumaMask;
use std::collections::BTreeMap;

/// One way to have a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hint {
    /// None: any nodes.
    pub affinity: Option<NumaMask>,
    /// No fewer nodes could do.
    pub preferred: bool,
}

/// The ways to allocate one resource; none if the nodes do not matter. An empty list: it cannot be
/// allocated.
pub(crate) type Hints = Option<Vec<Hint>>;

/// The hints of one manager, by resource. Empty: it has no preference.
pub(crate) type ProviderHints = BTreeMap<String, Hints>;

/// The topology manager policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TopologyPolicy {
    #[default]
    None,
    BestEffort,
    Restricted,
    SingleNumaNode,
}

impl TopologyPolicy {
    const NAMES: [(&'static str, Self); 4] = [
        ("none", Self::None),
        ("best-effort", Self::BestEffort),
        ("restricted", Self::Restricted),
        ("single-numa-node", Self::SingleNumaNode),
    ];

    /// The policy of that name in a configuration.
    pub fn parse(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, policy)| *policy)
    }

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, policy)| *policy == self).map_or("none", |(name, _)| *name)
    }
}

impl TopologyScope {
    /// The scope of that name in a configuration.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "container" => Some(Self::Container),
            "pod" => Some(Self::Pod),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
        }
    }
}

/// The unit for which nodes are chosen at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TopologyScope {
    #[default]
    Container,
    Pod,
}

/// The machine as the merge sees it.
#[derive(Debug, Clone)]
pub(crate) struct NumaInfo<'a> {
    pub topology: &'a CpuTopology,
    /// Of as many nodes, those that are nearer to one another.
    pub prefer_closest: bool,
}

impl NumaInfo<'_> {
    fn all(&self) -> NumaMask {
        // Nodes without processors have memory.
        NumaMask::of(self.topology.numa_nodes().into_iter().chain(self.topology.distances.keys().copied()))
    }

    /// The mean distance of the nodes, as hundredths of pairs; exact enough to compare.
    fn distance(&self, mask: NumaMask) -> u64 {
        let nodes: Vec<u32> = mask.nodes().collect();
        let far = |from: &u32, to: &u32| {
            let row = self.topology.distances.get(from);
            row.and_then(|row| row.get(*to as usize)).copied().map_or(0, u64::from)
        };
        let sum: u64 = nodes.iter().flat_map(|from| nodes.iter().map(move |to| far(from, to))).sum();
        let pairs = (nodes.len() * nodes.len()).max(1) as u64;
        sum * 1_000_000 / pairs
    }

    /// True if `candidate` is fitter than `current`.
    fn is_fitter(&self, candidate: NumaMask, current: NumaMask) -> bool {
        if self.prefer_closest && candidate.count() == current.count() {
            let (new, old) = (self.distance(candidate), self.distance(current));
            return if new == old { candidate.is_less_than(current) } else { new < old };
        }
        candidate.is_narrower_than(current)
    }
}

/// Chooses nodes for all resources together. Returns the choice, and true if the policy admits it.
pub(crate) fn merge(
    policy: TopologyPolicy,
    numa: &NumaInfo<'_>,
    providers: &[ProviderHints],
) -> (Hint, bool) {
    let mut lists = flatten(providers);
    if policy == TopologyPolicy::None {
        return (Hint { affinity: None, preferred: true }, true);
    }
    if policy == TopologyPolicy::SingleNumaNode {
        for list in &mut lists {
            list.retain(|hint| hint.preferred && hint.affinity.is_none_or(|mask| mask.count() == 1));
        }
    }
    let numa = NumaInfo {
        prefer_closest: numa.prefer_closest && policy != TopologyPolicy::SingleNumaNode,
        ..numa.clone()
    };
    let mut best = merge_lists(&numa, &lists);
    if policy == TopologyPolicy::SingleNumaNode && best.affinity == Some(numa.all()) {
        best.affinity = None;
    }
    let admitted = policy == TopologyPolicy::BestEffort || best.preferred;
    (best, admitted)
}

/// One list for each resource; a manager without a preference is one that takes any nodes.
fn flatten(providers: &[ProviderHints]) -> Vec<Vec<Hint>> {
    let any = |preferred| vec![Hint { affinity: None, preferred }];
    let mut lists = Vec::new();
    for hints in providers {
        if hints.is_empty() {
            lists.push(any(true));
        }
        for list in hints.values() {
            lists.push(match list {
                None => any(true),
                Some(list) if list.is_empty() => any(false),
                Some(list) => list.clone(),
            });
        }
    }
    lists
}

fn merge_lists(numa: &NumaInfo<'_>, lists: &[Vec<Hint>]) -> Hint {
    let all = numa.all();
    // Of hints that nobody prefers, the best have as many nodes as the most demanding resource needs at least.
    let narrowest = |list: &Vec<Hint>| list.iter().filter_map(|hint| Some(hint.affinity?.count())).min();
    let enough = lists.iter().filter_map(narrowest).max().unwrap_or(0);
    let mut best: Option<(NumaMask, bool)> = None;
    each_choice(lists, &mut Vec::new(), &mut |choice| {
        let masks: Vec<NumaMask> = choice.iter().filter_map(|hint| hint.affinity).collect();
        let same = masks.windows(2).all(|pair| pair[0] == pair[1]);
        let preferred = same && choice.iter().all(|hint| hint.preferred);
        let merged = masks.iter().fold(all, |merged, mask| merged.and(*mask));
        if merged.count() > 0
            && best.is_none_or(|current| is_better((merged, preferred), current, enough, numa))
        {
            best = Some((merged, preferred));
        }
    });
    match best {
        Some((mask, preferred)) => Hint { affinity: Some(mask), preferred },
        None => Hint { affinity: Some(all), preferred: false },
    }
}

fn is_better(new: (NumaMask, bool), current: (NumaMask, bool), enough: usize, numa: &NumaInfo<'_>) -> bool {
    let (has, would_have) = (current.0.count(), new.0.count());
    let fitter = || numa.is_fitter(new.0, current.0);
    match (current.1, new.1) {
        (false, true) => true,
        (true, false) => false,
        (true, true) => fitter(),
        (false, false) if has > enough => fitter(),
        (false, false) if has == enough => would_have == enough && fitter(),
        (false, false) if would_have > enough => false,
        (false, false) if would_have == has => fitter(),
        (false, false) => would_have > has,
    }
}

/// Calls `visit` with one hint of each list, in every combination.
fn each_choice(lists: &[Vec<Hint>], chosen: &mut Vec<Hint>, visit: &mut impl FnMut(&[Hint])) {
    let Some((first, others)) = lists.split_first() else { return visit(chosen) };
    for hint in first {
        chosen.push(*hint);
        each_choice(others, chosen, visit);
        chosen.pop();
    }
}

#[cfg(test)]
#[path = "hint_tests.rs"]
mod tests;
