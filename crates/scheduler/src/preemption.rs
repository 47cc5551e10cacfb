//! Chooses pods to remove so that another fits. Nothing here waits or writes.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::{Selector, SelectorExt};

use crate::framework::{FailedSearch, Rejection, Victims};
use crate::memory::Memory;
use crate::snapshot::{NodeInfo, PodInfo};

/// A PodDisruptionBudget, as preemption needs it.
#[derive(Debug, Clone)]
pub struct Budget {
    namespace: String,
    selector: Selector,
    allowed: i32,
    /// Pods whose disruption the API server has processed: they are in `allowed` already.
    disrupted: BTreeSet<String>,
}

impl Budget {
    /// None if the budget selects no pod: its selector is absent, empty or invalid.
    pub fn new(pdb: &PodDisruptionBudget) -> Option<Self> {
        let selector: Selector = pdb.spec.as_ref()?.selector.clone()?.try_into().ok()?;
        if selector.selects_all() {
            return None;
        }
        let status = pdb.status.as_ref();
        let disrupted = status.and_then(|status| status.disrupted_pods.as_ref());
        Some(Self {
            namespace: pdb.metadata.namespace.clone().unwrap_or_default(),
            selector,
            allowed: status.and_then(|status| status.disruptions_allowed).unwrap_or(0),
            disrupted: disrupted.into_iter().flat_map(|pods| pods.keys().cloned()).collect(),
        })
    }

    fn covers(&self, pod: &PodInfo) -> bool {
        !pod.labels().is_empty()
            && self.namespace == *pod.key.namespace
            && self.selector.matches(pod.labels())
            && !self.disrupted.contains(pod.key.name.as_str())
    }
}

/// Orders pods by importance, most important first: higher priority, then longer running.
fn importance(pod: &PodInfo) -> (Reverse<i32>, i64) {
    (Reverse(pod.priority), pod.started())
}

/// Splits pods into those whose removal violates a budget and the others. Budgets are used up in the order of the pods.
pub fn split_by_budget(
    pods: Vec<Arc<PodInfo>>,
    budgets: &[Budget],
) -> (Vec<Arc<PodInfo>>, Vec<Arc<PodInfo>>) {
    let mut allowed: Vec<i32> = budgets.iter().map(|budget| budget.allowed).collect();
    pods.into_iter().partition(|pod| {
        let mut violates = false;
        for (budget, allowed) in budgets.iter().zip(&mut allowed) {
            if budget.covers(pod) {
                *allowed = allowed.saturating_sub(1);
                violates |= *allowed < 0;
            }
        }
        violates
    })
}

/// The least important pods of lower priority whose removal makes the pod fit on `node`.
///
/// All pods of lower priority are removed first. If the pod fits then, as many as possible are put back: first those whose
/// removal would violate a budget, then the others, each from the most important down.
pub fn select_victims(
    search: FailedSearch<'_>,
    node: &NodeInfo,
    budgets: &[Budget],
) -> Result<Victims, Rejection> {
    let FailedSearch { pod, filters, .. } = search;
    let mut potential: Vec<Arc<PodInfo>> =
        node.pods.iter().filter(|present| present.priority < pod.priority).cloned().collect();
    if potential.is_empty() {
        return Err(Rejection::unresolvable("No preemption victims found for incoming pod"));
    }
    let mut state = search.state.clone();
    let mut node = node.clone();
    for victim in &potential {
        filters.remove_pod(&mut state, pod, victim, &mut node);
    }
    filters.filter_with_nominated(&state, pod, &node).map_err(|by| by.rejection)?;
    potential.sort_by_key(|pod| importance(pod));
    let (violating, others) = split_by_budget(potential, budgets);
    let mut victims = Victims::default();
    for (candidates, violates) in [(violating, true), (others, false)] {
        for candidate in candidates {
            filters.add_pod(&mut state, pod, &candidate, &mut node);
            if filters.filter_with_nominated(&state, pod, &node).is_err() {
                filters.remove_pod(&mut state, pod, &candidate, &mut node);
                victims.pods.push(candidate);
                victims.pdb_violations += usize::from(violates);
            }
        }
    }
    victims.pods.sort_by_key(|pod| importance(pod));
    Ok(victims)
}

/// A node with the pods to remove from it.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub node: String,
    pub victims: Victims,
    cost: Cost,
}

impl Candidate {
    pub fn new(node: &str, victims: Victims) -> Self {
        Self { node: node.to_owned(), cost: cost(&victims), victims }
    }
}

/// The result of trying one node.
#[derive(Debug, Clone)]
pub enum Trial {
    Candidate(Arc<Candidate>),
    /// The pod fits without victims. It was rejected for something that changed since: nothing to do.
    Fits,
    Rejected(Arc<Rejection>),
}

impl Trial {
    fn new(search: FailedSearch<'_>, node: &NodeInfo, budgets: &[Budget]) -> Self {
        match select_victims(search, node, budgets) {
            Ok(victims) if victims.pods.is_empty() => Self::Fits,
            Ok(victims) => Self::Candidate(Arc::new(Candidate::new(node.name(), victims))),
            Err(rejection) => Self::Rejected(Arc::new(rejection)),
        }
    }
}

/// The candidates of a dry run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The one to choose.
    Best,
    /// All that were found, those without violated budgets first.
    All,
}

/// Tries the nodes at `positions`, from `offset` on and round, until there are `enough` candidates of which one violates
/// no budget. Returns candidates, and if there is none, the verdicts on the nodes.
///
/// A trial depends on the node alone if the filters do and no budget protects pods. Then its result is remembered for
/// other pods of the same shape.
pub fn dry_run(
    search: FailedSearch<'_>,
    positions: &[usize],
    budgets: &[Budget],
    offset: usize,
    enough: usize,
    wanted: Wanted,
    memory: &mut Memory<Trial>,
) -> (Vec<Arc<Candidate>>, Vec<Arc<Rejection>>) {
    let is_local = budgets.is_empty() && search.filters.are_local(search.pod);
    let mut remembered = is_local.then(|| memory.of(search.pod));
    // There the pod does not count itself as one that room is kept for, as others of its shape do.
    let own = search.snapshot.nominated_position(search.pod);
    let (mut good, mut violating, mut rejected) = (Vec::new(), Vec::new(), Vec::new());
    let (mut best, mut found, mut found_good): (Option<Arc<Candidate>>, usize, bool) = (None, 0, false);
    let (before, from) = positions.split_at(offset.min(positions.len()));
    for &position in from.iter().chain(before) {
        let node = &search.snapshot.nodes()[position];
        let fresh;
        let trial = match remembered.as_mut().filter(|_| own != Some(position)) {
            None => {
                fresh = Trial::new(search, node, budgets);
                &fresh
            }
            Some(remembered) => {
                let generation = search.snapshot.generation(position);
                remembered.get_or_insert_with(position, generation, || Trial::new(search, node, budgets))
            }
        };
        match trial {
            Trial::Fits => {}
            Trial::Candidate(candidate) => {
                let is_good = candidate.victims.pdb_violations == 0;
                found += 1;
                found_good |= is_good;
                match wanted {
                    Wanted::All if is_good => good.push(candidate.clone()),
                    Wanted::All => violating.push(candidate.clone()),
                    // Of equal ones the first.
                    Wanted::Best if best.as_ref().is_none_or(|best| candidate.cost < best.cost) => {
                        best = Some(candidate.clone());
                    }
                    Wanted::Best => {}
                }
                if found_good && found >= enough {
                    break;
                }
            }
            // With a candidate, nobody asks why others are none.
            Trial::Rejected(rejection) if found == 0 => rejected.push(rejection.clone()),
            Trial::Rejected(_) => {}
        }
    }
    good.append(&mut violating);
    good.extend(best);
    (good, rejected)
}

/// Violated budgets, highest priority, sum of priorities, number of victims, earliest start of the most important ones.
type Cost = (usize, i32, i64, usize, Reverse<i64>);

/// The cost of removing the victims; the smallest is chosen.
fn cost(victims: &Victims) -> Cost {
    let highest = victims.pods.iter().map(|pod| pod.priority).max().unwrap_or(i32::MIN);
    // Shifted so that no priority is negative: otherwise more victims of negative priority would cost less.
    let sum = victims.pods.iter().map(|pod| i64::from(pod.priority) + (i64::from(i32::MAX) + 1)).sum();
    let most_important = victims.pods.iter().filter(|pod| pod.priority == highest);
    let earliest = most_important.map(|pod| pod.started()).min().unwrap_or(i64::MAX);
    (victims.pdb_violations, highest, sum, victims.pods.len(), Reverse(earliest))
}

/// The candidate with fewest violated budgets; then with the lowest priority of its most important victim; then with the
/// lowest sum of priorities; then with fewest victims; then whose most important victims started last; then the first.
pub fn select_candidate(candidates: Vec<Arc<Candidate>>) -> Option<Arc<Candidate>> {
    candidates.into_iter().min_by_key(|candidate| candidate.cost)
}

/// The number of candidates that is enough among `nodes`.
pub fn candidates_wanted(nodes: usize, percentage: usize, absolute: usize) -> usize {
    (nodes.saturating_mul(percentage) / 100).max(absolute).min(nodes)
}

#[cfg(test)]
mod tests;
