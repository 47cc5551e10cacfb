//! The scheduling cycle: one pod, one snapshot, one answer. Nothing here writes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use tracing::info;

use crate::extender::Extender;
use crate::framework::{
    CycleState, Diagnosis, EXTENDER, FailedSearch, Framework, Interest, MAX_SCORE, Nomination, PluginError,
    PodFilters, PostFiltered, Reason, RejectedBy, Rejection, Remedy, Victims,
};
use crate::measures;
use crate::memory::Memory;
use crate::profile::ExtensionPoint;
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
#[derive(Debug, Clone, Default)]
pub struct FitError {
    pub nodes: usize,
    /// A plugin refused the pod before any node was examined.
    pub refusal: Option<String>,
    /// The number of nodes rejected for each reason.
    pub reasons: BTreeMap<Reason, usize>,
    /// The outcome of the attempt to make room; empty if that succeeded.
    pub post_filter: String,
    /// Plugins that rejected something; only events they care about can help.
    pub rejected_by: Vec<&'static str>,
    pub nomination: Nomination,
    /// Pods to remove from the nominated node.
    pub victims: Victims,
    /// Work that may help the pod.
    pub remedy: Option<Remedy>,
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
        if self.post_filter.is_empty() { Ok(()) } else { write!(f, " {}", self.post_filter) }
    }
}

/// The cycle ended without a node.
#[derive(Debug)]
pub enum ScheduleError {
    /// The pod fits nowhere as things are.
    Unschedulable(Box<FitError>),
    /// A plugin failed: the pod is tried again.
    Plugin(PluginError),
}

impl From<PluginError> for ScheduleError {
    fn from(error: PluginError) -> Self {
        Self::Plugin(error)
    }
}

/// ` 1 reason, 2 other reason.`, sorted as text.
pub(crate) fn histogram(reasons: &BTreeMap<Reason, usize>) -> String {
    let mut counted: Vec<String> =
        reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    counted.sort();
    if counted.is_empty() { String::new() } else { format!(" {}.", counted.join(", ")) }
}

/// The number of feasible nodes that is enough, for a cluster of this size.
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

/// The state between cycles: the place where the last search stopped, the number of nodes to find, and verdicts that
/// hold for the next pod of the same shape.
#[derive(Debug, Default)]
pub struct Search {
    pub start: usize,
    pub percentage: Option<usize>,
    pub(crate) verdicts: Memory<Result<(), Arc<RejectedBy>>>,
}

/// The nodes that fit a pod.
#[derive(Default)]
struct Found {
    feasible: Vec<Arc<NodeInfo>>,
    evaluated: usize,
    diagnosis: Diagnosis,
    /// An extender took nodes away, with or without a reason.
    is_extended: bool,
}

impl Found {
    /// Records the verdict on a node. Fails if a plugin failed.
    fn judge(
        &mut self,
        position: usize,
        node: &Arc<NodeInfo>,
        verdict: Result<(), RejectedBy>,
    ) -> Result<(), PluginError> {
        match verdict {
            Ok(()) => self.feasible.push(node.clone()),
            Err(RejectedBy { rejection: Rejection::Error(error), .. }) => return Err(error),
            Err(by) => self.diagnosis.reject(position, by),
        }
        Ok(())
    }

    /// Records the verdict on a node of which the local filters' part is known. `others` is the verdict of those of the
    /// other filters that come before the one that rejected the node.
    fn judge_split(
        &mut self,
        position: usize,
        node: &Arc<NodeInfo>,
        local: &Result<(), Arc<RejectedBy>>,
        others: Result<(), RejectedBy>,
    ) -> Result<(), PluginError> {
        match (local, others) {
            (Err(by), Ok(())) => {
                self.diagnosis.reject_shared(position, by);
                Ok(())
            }
            (_, others) => self.judge(position, node, others),
        }
    }
}

/// Finds a node for `pod`. `pick` chooses among `n` equally good nodes.
pub async fn schedule(
    framework: &Framework,
    snapshot: &Snapshot,
    extenders: &[Extender],
    pod: &PodInfo,
    search: &mut Search,
    pick: impl FnOnce(usize) -> usize,
) -> Result<Placement, ScheduleError> {
    let mut error = FitError { nodes: snapshot.nodes().len(), ..FitError::default() };
    if snapshot.nodes().is_empty() {
        error.nomination = Nomination::Clear;
        return Err(ScheduleError::Unschedulable(Box::new(error)));
    }
    let mut state = CycleState::default();
    let profile = framework.scheduler_name.as_str();
    let started = Instant::now();
    let (filters, failure) = framework.pre_filter(&mut state, pod, snapshot);
    let status = failure.as_ref().map_or("Success", |failure| failure.by.rejection.status());
    measures::point("PreFilter", status, profile, started);
    let diagnosis = match failure {
        Some(failure) => {
            if let Rejection::Error(error) = failure.by.rejection {
                return Err(error.into());
            }
            error.refusal = Some(failure.by.rejection.to_string());
            error.rejected_by = failure.plugins;
            Diagnosis::all(failure.by)
        }
        None => {
            let mut found = nominated_first(snapshot, pod, &state, &filters);
            if let Some(nominated) = &mut found {
                extend_filter(extenders, snapshot, pod, nominated).await?;
            }
            let found = match found {
                Some(nominated) if !nominated.feasible.is_empty() => nominated,
                _ => {
                    let has_scores =
                        !framework.scores().is_empty() || extenders.iter().any(Extender::is_prioritizer);
                    let percentage = framework.percentage_of_nodes_to_score.or(search.percentage);
                    let wanted = |count: usize| {
                        if has_scores || extenders.iter().any(Extender::is_filter) {
                            enough(count, percentage)
                        } else {
                            1
                        }
                    };
                    let started = Instant::now();
                    let found = find(snapshot, pod, &state, &filters, search, wanted);
                    let status = match &found {
                        Ok(found) if found.feasible.is_empty() => "Unschedulable",
                        Ok(_) => "Success",
                        Err(_) => "Error",
                    };
                    measures::point("Filter", status, profile, started);
                    let mut found = found?;
                    extend_filter(extenders, snapshot, pod, &mut found).await?;
                    found
                }
            };
            if !found.feasible.is_empty() {
                let (feasible, count) = (found.feasible, found.evaluated);
                let node = match feasible.as_slice() {
                    // One node needs no scores.
                    [only] => only.name().to_owned(),
                    _ => {
                        let extra = extend_scores(extenders, pod, &feasible).await;
                        let started = Instant::now();
                        let best = best(framework, snapshot, pod, &mut state, &feasible, extra, pick);
                        measures::point("Score", "Success", profile, started);
                        best
                    }
                };
                return Ok(Placement { node, evaluated: count, feasible: feasible.len(), state });
            }
            error.reasons = count_reasons(&found.diagnosis, error.nodes);
            let by = found.diagnosis.counted().map(|(by, _)| by.plugin);
            let by = by.chain(filters.restricting.iter().copied());
            let by: BTreeSet<_> = by.chain(found.is_extended.then_some(EXTENDER)).collect();
            error.rejected_by = by.into_iter().collect();
            found.diagnosis
        }
    };
    let search =
        FailedSearch { pod, snapshot, state: &state, filters: &filters, diagnosis: &diagnosis, extenders };
    let started = Instant::now();
    let PostFilterOutcome { answer: remedy, has_failed } = post_filter(framework, search).await;
    let status = match &remedy.nomination {
        _ if has_failed => "Error",
        Nomination::Node(_) => "Success",
        _ => "Unschedulable",
    };
    measures::point("PostFilter", status, profile, started);
    error.post_filter = remedy.message;
    error.nomination = remedy.nomination;
    error.victims = remedy.victims;
    error.remedy = remedy.remedy;
    Err(ScheduleError::Unschedulable(Box::new(error)))
}

/// Checks that the node of a placement still suits the pod. Time may have passed since the search.
pub(crate) fn confirm(
    framework: &Framework,
    snapshot: &Snapshot,
    pod: &PodInfo,
    placement: &mut Placement,
) -> Result<(), RejectedBy> {
    let Placement { node, state, .. } = placement;
    // Plugins find their state of the search, and replace it.
    let (filters, failure) = framework.pre_filter(state, pod, snapshot);
    if let Some(failure) = failure {
        return Err(failure.by);
    }
    let gone = || RejectedBy { plugin: "", rejection: Rejection::unresolvable("the node is not available") };
    if filters.nodes.as_ref().is_some_and(|nodes| !nodes.contains(node)) {
        return Err(gone());
    }
    let node = snapshot.get(node).ok_or_else(gone)?;
    filters.filter_with_nominated(state, pod, node)
}

/// The number of `nodes` rejected for each reason.
fn count_reasons(diagnosis: &Diagnosis, nodes: usize) -> BTreeMap<Reason, usize> {
    let mut reasons = BTreeMap::new();
    for (by, count) in diagnosis.counted() {
        for reason in by.rejection.reasons() {
            *reasons.entry(reason.clone()).or_default() += count;
        }
    }
    let others = nodes - diagnosis.len();
    if let Some(by) = diagnosis.others.as_ref().filter(|_| others > 0) {
        for reason in by.rejection.reasons() {
            *reasons.entry(reason.clone()).or_default() += others;
        }
    }
    reasons
}

/// The node that the pod is nominated to, if it fits there: room was made for it, so no other node is examined.
fn nominated_first(
    snapshot: &Snapshot,
    pod: &PodInfo,
    state: &CycleState,
    filters: &PodFilters<'_>,
) -> Option<Found> {
    let node = &snapshot.nodes()[snapshot.nominated_position(pod)?];
    filters.filter_with_nominated(state, pod, node).ok()?;
    Some(Found { feasible: vec![node.clone()], evaluated: 1, ..Found::default() })
}

/// Filters nodes from where the last search stopped, until enough fit.
fn find(
    snapshot: &Snapshot,
    pod: &PodInfo,
    state: &CycleState,
    filters: &PodFilters<'_>,
    search: &mut Search,
    wanted: impl FnOnce(usize) -> usize,
) -> Result<Found, PluginError> {
    let all = snapshot.nodes();
    let restricted: Option<Vec<usize>> = filters.nodes.as_ref().map(|names| {
        let mut positions: Vec<_> = names.iter().filter_map(|name| snapshot.position(name)).collect();
        positions.sort_unstable();
        positions
    });
    let count = restricted.as_ref().map_or(all.len(), Vec::len);
    let wanted = wanted(count);
    let locality = filters.locality(pod);
    let mut remembered = (!locality.local.is_empty()).then(|| search.verdicts.of(pod));
    // There the pod does not count itself as one that room is kept for, as others of its shape do.
    let own = snapshot.nominated_position(pod);
    let mut found = Found { feasible: Vec::with_capacity(wanted), ..Found::default() };
    let mut next = if count == 0 { 0 } else { search.start % count };
    while found.evaluated < count && found.feasible.len() < wanted {
        let position = restricted.as_ref().map_or(next, |positions| positions[next]);
        next = if next + 1 == count { 0 } else { next + 1 };
        found.evaluated += 1;
        let node = &all[position];
        // Filters that are not local must see the pods that room is kept for, and only together with them is there a verdict.
        let is_split = || locality.others.is_empty() || !node.keeps_room_from(pod);
        let Some(remembered) = remembered.as_mut().filter(|_| own != Some(position) && is_split()) else {
            found.judge(position, node, filters.filter_with_nominated(state, pod, node))?;
            continue;
        };
        let others = |local: &Result<(), Arc<RejectedBy>>| {
            let before = local.as_ref().err().map(|by| by.plugin);
            filters.filter_some(&locality.others, before, state, pod, node)
        };
        let generation = snapshot.generation(position);
        match remembered.get(position, generation) {
            // The usual case where the cluster is full.
            Some(Err(by)) if locality.others.is_empty() => {
                found.diagnosis.reject_shared(position, by);
                continue;
            }
            Some(local) => {
                found.judge_split(position, node, local, others(local))?;
                continue;
            }
            None => {}
        }
        let local = if locality.others.is_empty() {
            filters.filter_with_nominated(state, pod, node)
        } else {
            filters.filter_some(&locality.local, None, state, pod, node)
        };
        let local = match local {
            Ok(()) => Ok(()),
            Err(RejectedBy { rejection: Rejection::Error(_), .. }) => {
                // A filter that comes before the one that failed may reject the node.
                found.judge(position, node, filters.filter_with_nominated(state, pod, node))?;
                continue;
            }
            Err(by) => Err(found.diagnosis.shared(by)),
        };
        found.judge_split(position, node, &local, others(&local))?;
        remembered.set(position, generation, local);
    }
    if restricted.is_some() {
        let plugin = filters.restricting.first().copied().unwrap_or_default();
        let reason = format!("node(s) didn't satisfy plugin(s) [{}]", filters.restricting.join(" "));
        found.diagnosis.others = Some(RejectedBy { plugin, rejection: Rejection::unresolvable(reason) });
    }
    search.start = (search.start + found.evaluated) % all.len();
    Ok(found)
}

/// Leaves only those nodes that the interested extenders let pass.
async fn extend_filter(
    extenders: &[Extender],
    snapshot: &Snapshot,
    pod: &PodInfo,
    found: &mut Found,
) -> Result<(), PluginError> {
    for extender in extenders.iter().filter(|extender| extender.is_interested(pod)) {
        if found.feasible.is_empty() {
            break;
        }
        let verdict = match extender.filter(pod, &found.feasible).await {
            Ok(verdict) => verdict,
            Err(error) if extender.is_ignorable() => {
                info!(extender = extender.name(), %error, "an extender that may be ignored failed");
                continue;
            }
            Err(error) => return Err(PluginError::new("Filter", EXTENDER, error)),
        };
        let unresolvable = verdict.unresolvable.iter().map(|(node, reason)| (node, reason, false));
        let failed = verdict.failed.iter().filter(|(node, _)| !verdict.unresolvable.contains_key(*node));
        for (node, reason, is_resolvable) in
            unresolvable.chain(failed.map(|(node, reason)| (node, reason, true)))
        {
            let Some(position) = snapshot.position(node) else { continue };
            let rejection = if is_resolvable {
                Rejection::unschedulable(reason.clone())
            } else {
                Rejection::unresolvable(reason.clone())
            };
            found.diagnosis.retract(position);
            found.diagnosis.reject(position, RejectedBy { plugin: EXTENDER, rejection });
        }
        if verdict.nodes.len() != found.feasible.len() {
            found.is_extended = true;
        }
        found.feasible = verdict.nodes;
    }
    Ok(())
}

/// The sums that extenders add to the scores of the nodes. One that fails adds nothing.
pub(crate) async fn extend_scores(
    extenders: &[Extender],
    pod: &PodInfo,
    feasible: &[Arc<NodeInfo>],
) -> Vec<i64> {
    let mut totals = vec![0; feasible.len()];
    for extender in extenders.iter().filter(|e| e.is_prioritizer() && e.is_interested(pod)) {
        match extender.prioritize(pod, feasible).await {
            Ok(scores) => {
                for (total, node) in totals.iter_mut().zip(feasible) {
                    *total = i64::saturating_add(*total, scores.get(node.name()).copied().unwrap_or(0));
                }
            }
            Err(error) => info!(extender = extender.name(), %error, "an extender did not score"),
        }
    }
    totals
}

/// The outcome of the PostFilter plugins.
pub(crate) struct PostFilterOutcome {
    pub(crate) answer: PostFiltered,
    /// A plugin failed; the message says so. As upstream: the pod stays unschedulable all the same.
    pub(crate) has_failed: bool,
}

/// Runs the PostFilter plugins until one nominates a node, or fails.
pub(crate) async fn post_filter(framework: &Framework, search: FailedSearch<'_>) -> PostFilterOutcome {
    let mut last = PostFiltered::default();
    let mut remedy = None;
    let mut messages: Vec<String> = Vec::new();
    for plugin in framework.at(ExtensionPoint::PostFilter) {
        let Some(point) = plugin.post_filter() else { continue };
        let mut result = match point.post_filter(search).await {
            Ok(result) => result,
            Err(error) => {
                let message = error.source.to_string();
                let answer = PostFiltered { message, remedy, ..PostFiltered::default() };
                return PostFilterOutcome { answer, has_failed: true };
            }
        };
        remedy = remedy.or(result.remedy.take());
        if matches!(result.nomination, Nomination::Node(_)) {
            return PostFilterOutcome { answer: PostFiltered { remedy, ..result }, has_failed: false };
        }
        if !result.message.is_empty() {
            messages.push(result.message.clone());
        }
        if result.nomination != Nomination::Keep {
            last = result;
        }
    }
    let answer = PostFiltered { message: messages.join(", "), remedy, ..last };
    PostFilterOutcome { answer, has_failed: false }
}

fn best(
    framework: &Framework,
    snapshot: &Snapshot,
    pod: &PodInfo,
    state: &mut CycleState,
    feasible: &[Arc<NodeInfo>],
    mut totals: Vec<i64>,
    pick: impl FnOnce(usize) -> usize,
) -> String {
    for (_, weight, scores) in score_all(framework, snapshot, pod, state, feasible) {
        for (total, value) in totals.iter_mut().zip(&scores) {
            *total += value * weight;
        }
    }
    let highest = totals.iter().max().copied().unwrap_or(0);
    let candidates: Vec<usize> = (0..totals.len()).filter(|index| totals[*index] == highest).collect();
    let chosen = pick(candidates.len()).min(candidates.len() - 1);
    feasible[candidates[chosen]].name().to_owned()
}

/// The scores that each plugin gives to the nodes, with the plugin's name and weight. A plugin that has nothing to say
/// about the pod is left out.
pub(crate) fn score_all(
    framework: &Framework,
    snapshot: &Snapshot,
    pod: &PodInfo,
    state: &mut CycleState,
    feasible: &[Arc<NodeInfo>],
) -> Vec<(&'static str, i64, Vec<i64>)> {
    let mut skipped = BTreeSet::new();
    for (plugin, evaluations) in framework.counted(ExtensionPoint::PreScore) {
        let Some(point) = plugin.pre_score() else { continue };
        evaluations.increment();
        if point.pre_score(state, pod, snapshot, feasible) == Interest::Skip {
            skipped.insert(plugin.name());
        }
    }
    let mut all = Vec::with_capacity(framework.scores().len());
    let counted = framework.counted(ExtensionPoint::Score);
    for ((plugin, weight), (_, evaluations)) in framework.scores().iter().zip(counted) {
        let Some(point) = plugin.score().filter(|_| !skipped.contains(plugin.name())) else { continue };
        evaluations.add(u64::try_from(feasible.len()).unwrap_or(u64::MAX));
        let mut scores: Vec<i64> = feasible.iter().map(|node| point.score(state, pod, node)).collect();
        point.normalize(state, pod, feasible, &mut scores);
        scores.iter_mut().for_each(|score| *score = (*score).clamp(0, MAX_SCORE));
        all.push((plugin.name(), *weight, scores));
    }
    all
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
