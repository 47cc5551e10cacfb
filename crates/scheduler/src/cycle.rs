//! The scheduling cycle: one pod, one snapshot, one answer. Nothing here waits or writes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::framework::{CycleState, Framework, Interest, MAX_SCORE, Reason, Rejection};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// Clusters up to this size are searched completely.
const SEARCH_ALL: usize = 100;

/// A node was found.
#[derive(Debug)]
pub struct Placement {
    pub node: String,
    pub evaluated: usize,
    pub feasible: usize,
    pub state: CycleState,
}

/// No node was found; [`Display`](std::fmt::Display) is the message people see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FitError {
    pub nodes: usize,
    /// A plugin refused the pod before any node was looked at.
    pub refusal: Option<String>,
    /// How many nodes were rejected for each reason.
    pub reasons: BTreeMap<Reason, usize>,
    /// What was tried about it, e.g. preemption.
    pub remedy: Option<String>,
    /// Plugins that rejected something; only events they care about can help.
    pub rejected_by: Vec<&'static str>,
}

impl std::fmt::Display for FitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.nodes == 0 {
            return f.write_str("no nodes available to schedule pods");
        }
        write!(f, "0/{} nodes are available:", self.nodes)?;
        match &self.refusal {
            Some(refusal) => write!(f, " {refusal}.")?,
            None => f.write_str(&histogram(&self.reasons))?,
        }
        match &self.remedy {
            Some(remedy) => write!(f, " {remedy}"),
            None => Ok(()),
        }
    }
}

/// ` 1 reason, 2 other reason.`, sorted as text.
pub(crate) fn histogram(reasons: &BTreeMap<Reason, usize>) -> String {
    let mut counted: Vec<String> =
        reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    counted.sort();
    if counted.is_empty() { String::new() } else { format!(" {}.", counted.join(", ")) }
}

/// How many feasible nodes are enough, for a cluster of this size.
pub fn enough(nodes: usize, percentage: Option<usize>) -> usize {
    if nodes < SEARCH_ALL {
        return nodes;
    }
    let percentage =
        percentage.filter(|p| *p > 0).unwrap_or_else(|| 50usize.saturating_sub(nodes / 125).max(5));
    if percentage >= 100 {
        return nodes;
    }
    (nodes * percentage / 100).max(SEARCH_ALL)
}

/// What stays between cycles: where the last search stopped, and how ties are broken.
#[derive(Debug, Default)]
pub struct Search {
    pub start: usize,
    pub percentage: Option<usize>,
}

/// Finds a node for `pod`. `pick` chooses among `n` equally good nodes.
pub fn schedule(
    framework: &Framework,
    snapshot: &Snapshot,
    pod: &PodInfo,
    search: &mut Search,
    pick: impl FnOnce(usize) -> usize,
) -> Result<Placement, FitError> {
    let mut error = FitError {
        nodes: snapshot.nodes().len(),
        refusal: None,
        reasons: BTreeMap::new(),
        remedy: None,
        rejected_by: Vec::new(),
    };
    if snapshot.nodes().is_empty() {
        return Err(error);
    }
    let mut state = CycleState::default();
    let mut filters = Vec::with_capacity(framework.plugins.len());
    for (plugin, _) in &framework.plugins {
        let interest = match plugin.pre_filter().map(|p| p.pre_filter(&mut state, pod, snapshot)) {
            None => Interest::Needed,
            Some(Ok(interest)) => interest,
            Some(Err(rejection)) => {
                error.refusal = Some(rejection.reasons().join(", "));
                error.rejected_by.push(plugin.name());
                return Err(error);
            }
        };
        if let (Interest::Needed, Some(filter)) = (interest, plugin.filter()) {
            filters.push((plugin.name(), filter));
        }
    }

    let nodes = snapshot.nodes();
    let wanted = enough(nodes.len(), search.percentage);
    let mut feasible: Vec<Arc<NodeInfo>> = Vec::with_capacity(wanted);
    let mut rejections: Vec<(usize, Rejection)> = Vec::new();
    let mut rejected_by = BTreeSet::new();
    let mut evaluated = 0;
    while evaluated < nodes.len() && feasible.len() < wanted {
        let position = (search.start + evaluated) % nodes.len();
        evaluated += 1;
        let node = &nodes[position];
        let rejection = filters.iter().find_map(|(name, filter)| {
            filter.filter(&state, pod, node).err().map(|rejection| (*name, rejection))
        });
        match rejection {
            None => feasible.push(node.clone()),
            Some((name, rejection)) => {
                rejected_by.insert(name);
                rejections.push((position, rejection));
            }
        }
    }
    search.start = (search.start + evaluated) % nodes.len();

    if feasible.is_empty() {
        for (_, rejection) in &rejections {
            for reason in rejection.reasons() {
                *error.reasons.entry(reason.clone()).or_default() += 1;
            }
        }
        error.rejected_by = rejected_by.into_iter().collect();
        error.remedy = framework
            .plugins
            .iter()
            .filter_map(|(plugin, _)| plugin.post_filter())
            .find_map(|plugin| plugin.post_filter(pod, snapshot, &rejections));
        return Err(error);
    }
    let count = feasible.len();
    let node = match feasible.as_slice() {
        // One node needs no scores.
        [only] => only.name().to_owned(),
        _ => best(framework, snapshot, pod, &mut state, &feasible, pick),
    };
    Ok(Placement { node, evaluated, feasible: count, state })
}

fn best(
    framework: &Framework,
    snapshot: &Snapshot,
    pod: &PodInfo,
    state: &mut CycleState,
    feasible: &[Arc<NodeInfo>],
    pick: impl FnOnce(usize) -> usize,
) -> String {
    let mut totals = vec![0i64; feasible.len()];
    let mut scores = vec![0i64; feasible.len()];
    for (plugin, weight) in &framework.plugins {
        let interest =
            plugin.pre_score().map_or(Interest::Needed, |p| p.pre_score(state, pod, snapshot, feasible));
        let (Interest::Needed, Some(score)) = (interest, plugin.score()) else { continue };
        for (value, node) in scores.iter_mut().zip(feasible) {
            *value = score.score(state, pod, node);
        }
        score.normalize(state, pod, feasible, &mut scores);
        for (total, value) in totals.iter_mut().zip(&scores) {
            *total += value.clamp(&0, &MAX_SCORE) * weight;
        }
    }
    let highest = totals.iter().max().copied().unwrap_or(0);
    let candidates: Vec<usize> = (0..totals.len()).filter(|index| totals[*index] == highest).collect();
    let chosen = pick(candidates.len()).min(candidates.len() - 1);
    feasible[candidates[chosen]].name().to_owned()
}

/// Scales scores so that the highest becomes [`MAX_SCORE`]; `reverse` turns them round, for counts of faults.
pub(crate) fn normalize(scores: &mut [i64], reverse: bool) {
    let highest = scores.iter().max().copied().unwrap_or(0);
    for score in scores {
        let scaled = if highest == 0 { 0 } else { MAX_SCORE * *score / highest };
        *score = if reverse { MAX_SCORE - scaled } else { scaled };
    }
}

#[cfg(test)]
mod tests;
