//! The extension points: a trait each. A plugin implements those it takes part in and returns itself from the method of
//! [`Plugin`] with the same name.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::{ClusterEvent, CycleState, PluginError, PodFilters, RejectedBy, Rejection};
use crate::extender::Extender;
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// Tells if later steps of a plugin are needed for this pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    Needed,
    Skip,
}

/// The answer of a PreFilter plugin that does not reject the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreFiltered {
    /// The plugin's filter must run, on every node.
    Needed,
    /// The plugin's filter accepts every node: it is not called.
    Skip,
    /// Only these nodes come into question. The plugin's filter runs on them.
    Nodes(BTreeSet<String>),
}

/// Decides whether a pod may enter the active queue at all.
pub trait PreEnqueue: Send + Sync {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection>;
}

/// Where a pod stands in the active queue: a smaller key comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SortKey {
    pub rank: i64,
    pub then: Instant,
}

/// Orders the active queue. All profiles share one such plugin.
pub trait QueueSort: Send + Sync {
    /// `queued` is the time at which the pod entered the queue, or came back from its last attempt.
    fn sort_key(&self, pod: &PodInfo, queued: Instant) -> SortKey;
}

/// Examines the pod once, before any node, and may reject it.
pub trait PreFilter: Send + Sync {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection>;

    /// Brings the state up to date as if `added` were on `node`, too. `node` has it already.
    fn add_pod(&self, _state: &mut CycleState, _pod: &PodInfo, _added: &PodInfo, _node: &NodeInfo) {}

    /// Brings the state up to date as if `removed` were not on `node`. `node` does not have it any more.
    fn remove_pod(&self, _state: &mut CycleState, _pod: &PodInfo, _removed: &PodInfo, _node: &NodeInfo) {}
}

/// Decides whether the pod may run on the node.
pub trait Filter: Send + Sync {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection>;

    /// True if the verdict depends on nothing but the [shape](PodInfo::shape) of the pod and the node with the pods on it:
    /// not on other nodes, other objects, the time, or chance. If all filters that a pod needs are so, the verdict on a node
    /// holds for all pods of that shape until the node changes, and the filters are not asked again.
    fn is_local(&self, pod: &PodInfo) -> bool {
        let _ = pod;
        false
    }
}

/// Verdicts that a new one is compared with.
const RECENT_VERDICTS: usize = 8;

/// The verdict on every node of a search that found none.
#[derive(Debug, Clone, Default)]
pub struct Diagnosis {
    /// Nodes that stand side by side in the snapshot and have one verdict. A search rejects most nodes in their order and
    /// for few reasons.
    runs: Vec<Run>,
    /// Verdicts that differ from each other, mostly: thousands of nodes are rejected for few reasons.
    verdicts: Vec<Arc<RejectedBy>>,
    /// The verdict on all other nodes: a PreFilter plugin rejected the pod, or left the nodes out.
    pub others: Option<RejectedBy>,
}

/// Nodes with one verdict.
#[derive(Debug, Clone)]
struct Run {
    positions: Range<usize>,
    /// The place of the verdict.
    verdict: usize,
}

impl Diagnosis {
    /// One verdict on all nodes.
    pub fn all(by: RejectedBy) -> Self {
        Self { others: Some(by), ..Self::default() }
    }

    /// Positions of the nodes that removing pods could make fit, of `count` nodes.
    pub fn resolvable(&self, count: usize) -> Vec<usize> {
        let is_resolvable = |verdict: usize| self.verdicts[verdict].rejection.is_resolvable();
        if self.others.as_ref().is_none_or(|others| !others.rejection.is_resolvable()) {
            let mut runs: Vec<&Run> = self.runs.iter().filter(|run| is_resolvable(run.verdict)).collect();
            runs.sort_unstable_by_key(|run| run.positions.start);
            return runs.into_iter().flat_map(|run| run.positions.clone()).collect();
        }
        let mut verdicts = vec![true; count];
        for Run { positions, verdict } in &self.runs {
            verdicts[positions.clone()].fill(is_resolvable(*verdict));
        }
        (0..count).filter(|position| verdicts[*position]).collect()
    }

    /// The verdict on the node at `position`.
    pub fn get(&self, position: usize) -> Option<&Rejection> {
        let explicit = self.runs.iter().find(|run| run.positions.contains(&position));
        let explicit = explicit.map(|run| &*self.verdicts[run.verdict]);
        explicit.or(self.others.as_ref()).map(|by| &by.rejection)
    }

    /// Records the verdict on a node that has none yet.
    pub fn reject(&mut self, position: usize, by: RejectedBy) {
        let verdict = self.place_of(by);
        self.note(position, verdict);
    }

    /// The verdict as it is shared with other nodes.
    pub(crate) fn shared(&mut self, by: RejectedBy) -> Arc<RejectedBy> {
        let place = self.place_of(by);
        self.verdicts[place].clone()
    }

    fn place_of(&mut self, by: RejectedBy) -> usize {
        let known = self.recent().find(|(_, known)| ***known == by).map(|(place, _)| place);
        known.unwrap_or_else(|| self.add(Arc::new(by)))
    }

    /// Records a verdict that another search came to.
    #[inline]
    pub(crate) fn reject_shared(&mut self, position: usize, by: &Arc<RejectedBy>) {
        if let Some(last) = self.runs.last_mut()
            && last.positions.end == position
            && Arc::ptr_eq(&self.verdicts[last.verdict], by)
        {
            last.positions.end += 1;
            return;
        }
        let known = self.recent().find(|(_, known)| Arc::ptr_eq(known, by)).map(|(place, _)| place);
        let verdict = known.unwrap_or_else(|| self.add(by.clone()));
        self.note(position, verdict);
    }

    fn note(&mut self, position: usize, verdict: usize) {
        match self.runs.last_mut() {
            Some(last) if last.positions.end == position && last.verdict == verdict => {
                last.positions.end += 1;
            }
            _ => self.runs.push(Run { positions: position..position + 1, verdict }),
        }
    }

    fn recent(&self) -> impl Iterator<Item = (usize, &Arc<RejectedBy>)> {
        self.verdicts.iter().enumerate().rev().take(RECENT_VERDICTS)
    }

    fn add(&mut self, by: Arc<RejectedBy>) -> usize {
        self.verdicts.push(by);
        self.verdicts.len() - 1
    }

    /// Forgets the verdict on the node at `position`.
    pub(crate) fn retract(&mut self, position: usize) {
        let Some(at) = self.runs.iter().position(|run| run.positions.contains(&position)) else { return };
        let Run { positions, verdict } = self.runs.remove(at);
        let parts = [positions.start..position, position + 1..positions.end];
        let parts = parts.into_iter().filter(|positions| !positions.is_empty());
        drop(self.runs.splice(at..at, parts.map(|positions| Run { positions, verdict })));
    }

    /// The verdicts, each with the number of nodes that it is for.
    pub fn counted(&self) -> impl Iterator<Item = (&RejectedBy, usize)> {
        let mut counts = vec![0; self.verdicts.len()];
        for Run { positions, verdict } in &self.runs {
            counts[*verdict] += positions.len();
        }
        self.verdicts.iter().map(|by| &**by).zip(counts).filter(|(_, count)| *count > 0)
    }

    /// The number of nodes with a verdict of their own.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.positions.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// A search that found no node, with all that a remedy may be worked out from.
#[derive(Debug, Clone, Copy)]
pub struct FailedSearch<'a> {
    pub pod: &'a PodInfo,
    pub snapshot: &'a Snapshot,
    pub state: &'a CycleState,
    pub filters: &'a PodFilters<'a>,
    pub diagnosis: &'a Diagnosis,
    pub extenders: &'a [Extender],
}

/// Pods to remove from a node so that another fits.
#[derive(Debug, Clone, Default)]
pub struct Victims {
    /// Most important first.
    pub pods: Vec<Arc<PodInfo>>,
    pub pdb_violations: usize,
}

/// The change to make to the pod's nomination.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Nomination {
    #[default]
    Keep,
    Clear,
    Node(String),
}

/// Work that may help the pod, written to the API after the cycle. The pod stays out of the active queue meanwhile.
#[derive(Clone)]
pub struct Remedy(Arc<dyn Fn() -> BoxFuture<'static, Result<(), PluginError>> + Send + Sync>);

impl Remedy {
    pub fn new(
        work: impl Fn() -> BoxFuture<'static, Result<(), PluginError>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(work))
    }

    pub(crate) async fn apply(&self) -> Result<(), PluginError> {
        (self.0)().await
    }
}

impl std::fmt::Debug for Remedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Remedy")
    }
}

/// The answer of a PostFilter plugin.
#[derive(Debug, Default)]
pub struct PostFiltered {
    pub nomination: Nomination,
    /// Removed in the background, from the nominated node. The pod stays out of the active queue meanwhile.
    pub victims: Victims,
    pub remedy: Option<Remedy>,
    /// Added to the message that people see; empty after a success.
    pub message: String,
}

/// Called when no node fits; may make room.
pub trait PostFilter: Send + Sync {
    /// The first plugin that nominates a node ends the search for a remedy.
    fn post_filter<'a>(
        &'a self,
        search: FailedSearch<'a>,
    ) -> BoxFuture<'a, Result<PostFiltered, PluginError>>;
}

/// Examines the nodes that fit, once, before they are scored.
pub trait PreScore: Send + Sync {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
        feasible: &[Arc<NodeInfo>],
    ) -> Interest;
}

/// Scores a node, from 0 to [`MAX_SCORE`](super::MAX_SCORE) after `normalize`.
pub trait Score: Send + Sync {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64;

    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], _scores: &mut [i64]) {}
}

/// Sets something aside for a pod that is about to go to a node.
pub trait Reserve: Send + Sync {
    fn reserve(&self, state: &mut CycleState, pod: &PodInfo, node: &str) -> Result<(), Rejection>;

    /// Undoes [`reserve`](Reserve::reserve), also when it failed or was never called.
    fn unreserve(&self, state: &mut CycleState, pod: &PodInfo, node: &str);
}

/// A verdict just before binding.
#[derive(Debug, Clone)]
pub enum Permission {
    Approved,
    Rejected(Rejection),
    /// The pod waits until [`WaitingPod::allow`](super::WaitingPod::allow) or
    /// [`WaitingPod::reject`](super::WaitingPod::reject) is called, at most this long; then it is rejected.
    Wait(Duration),
}

/// Approves, rejects or delays the binding.
pub trait Permit: Send + Sync {
    fn permit(&self, state: &mut CycleState, pod: &PodInfo, node: &str) -> Permission;
}

/// Does the work that must be done before the pod may be bound, such as provisioning a volume.
pub trait PreBind: Send + Sync {
    /// False if there is nothing to do for this pod: `pre_bind` is not called then.
    fn is_needed(&self, _state: &CycleState, _pod: &PodInfo, _node: &str) -> bool {
        true
    }

    fn pre_bind<'a>(
        &'a self,
        state: &'a CycleState,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Result<(), Rejection>>;
}

/// Writes to the API on which node the pod is. The first plugin that takes the pod does it.
pub trait Bind: Send + Sync {
    /// `None` leaves the pod to the next plugin.
    fn bind<'a>(
        &'a self,
        state: &'a CycleState,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Option<Result<(), PluginError>>>;
}

/// Called after the pod was bound.
pub trait PostBind: Send + Sync {
    fn post_bind(&self, state: &CycleState, pod: &PodInfo, node: &str);
}

/// One plugin: its name, and the extension points it takes part in.
pub trait Plugin: Send + Sync {
    fn name(&self) -> &'static str;

    /// True if `event` may make a pod fit that this plugin rejected. When in doubt it may.
    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let _ = (pod, event);
        true
    }

    /// True if the plugin may take long to find out whether nodes suit the pod. The pod's search runs on a thread of its
    /// own then, and PreFilter runs once more after it, with the state of the search: the plugin confirms its results.
    fn is_costly(&self, pod: &PodInfo) -> bool {
        let _ = pod;
        false
    }

    fn pre_enqueue(&self) -> Option<&dyn PreEnqueue> {
        None
    }
    fn queue_sort(&self) -> Option<&dyn QueueSort> {
        None
    }
    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        None
    }
    fn filter(&self) -> Option<&dyn Filter> {
        None
    }
    fn post_filter(&self) -> Option<&dyn PostFilter> {
        None
    }
    fn pre_score(&self) -> Option<&dyn PreScore> {
        None
    }
    fn score(&self) -> Option<&dyn Score> {
        None
    }
    fn reserve(&self) -> Option<&dyn Reserve> {
        None
    }
    fn permit(&self) -> Option<&dyn Permit> {
        None
    }
    fn pre_bind(&self) -> Option<&dyn PreBind> {
        None
    }
    fn bind(&self) -> Option<&dyn Bind> {
        None
    }
    fn post_bind(&self) -> Option<&dyn PostBind> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagnosis_has_the_verdict_on_each_node() {
        let by =
            |reason: &'static str| RejectedBy { plugin: "X", rejection: Rejection::unschedulable(reason) };
        let hopeless = || RejectedBy { plugin: "X", rejection: Rejection::unresolvable("hopeless") };
        let mut diagnosis = Diagnosis::default();
        // As a search goes round: from the middle to the end, then from the beginning.
        let shared = diagnosis.shared(by("full"));
        [6, 7, 8, 0, 1, 2, 4].into_iter().for_each(|position| diagnosis.reject_shared(position, &shared));
        diagnosis.reject(3, hopeless());
        diagnosis.reject(5, by("full"));
        assert_eq!(diagnosis.resolvable(9), [0, 1, 2, 4, 5, 6, 7, 8]);
        diagnosis.retract(7);
        diagnosis.reject(7, hopeless());
        diagnosis.retract(0);
        assert_eq!(diagnosis.resolvable(9), [1, 2, 4, 5, 6, 8]);
        assert_eq!((diagnosis.get(0), diagnosis.get(7)), (None, Some(&hopeless().rejection)));
        assert_eq!(diagnosis.counted().map(|(_, count)| count).collect::<Vec<_>>(), [6, 2]);
        assert_eq!(diagnosis.len(), 8);
        diagnosis.others = Some(by("not asked"));
        assert_eq!(diagnosis.resolvable(10), [0, 1, 2, 4, 5, 6, 8, 9]);
    }
}
