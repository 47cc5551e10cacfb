//! Which pods of a StatefulSet to create, repair and delete, in which order.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodTemplateSpec};

use super::claims::{is_stale, wanted_owners};
use super::identity::{claim_names, identity_matches, new_pod, ordinal, revision, storage_matches};
use super::{
    in_range, is_parallel, is_rolling_update, min_ready_seconds, partition, replicas, start_ordinal,
};
use crate::pods::{is_available, is_finished, is_ready, is_terminating, phase};

/// One change.
#[derive(Debug, Clone)]
pub(super) enum Action {
    /// Creates the claims that are missing, then the pod.
    Create(Box<Pod>),
    /// Creates the claims that are missing and gives claims their owners.
    EnsureClaims(Arc<Pod>),
    /// Gives the pod its labels and volumes, and its claims their owners.
    Repair(Arc<Pod>),
    /// Gives claims their owners before the pod goes.
    RetainClaims(Arc<Pod>),
    Delete(Arc<Pod>),
}

/// The changes for one pod, in order.
pub(super) type Work = Vec<Action>;

/// The actions. Stages run one after another; the actions of one stage may run in parallel if the set is
/// parallel.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) stages: Vec<Vec<Work>>,
    /// A pod waits until the claim of its predecessor is deleted. No change of a pod reports that.
    pub(super) waits_for_claim: bool,
    /// The last stage deletes a pod so that one of the update revision takes its place.
    pub(super) replaces_pod: bool,
}

/// A revision of the set: its name and its template.
#[derive(Debug, Clone)]
pub(super) struct Revision {
    pub(super) name: String,
    pub(super) template: PodTemplateSpec,
}

/// The claims of the set's namespace.
pub(super) type Claims<'a> = &'a (dyn Fn(&str) -> Option<Arc<PersistentVolumeClaim>> + Sync);

/// A StatefulSet with its pods of one moment.
pub(super) struct View<'a> {
    pub(super) set: &'a StatefulSet,
    pub(super) current: &'a Revision,
    pub(super) update: &'a Revision,
    pub(super) claims: Claims<'a>,
    pub(super) now: Timestamp,
    /// The pod of each ordinal that the set should have, in order.
    replicas: Vec<Replica>,
    /// Pods of other ordinals, the highest first.
    condemned: Vec<Arc<Pod>>,
}

/// A pod that the set should have.
enum Replica {
    Present { ordinal: i32, pod: Arc<Pod> },
    Missing { ordinal: i32 },
}

/// True if later pods must wait for this one.
type Blocks = bool;

impl<'a> View<'a> {
    pub(super) fn new(
        set: &'a StatefulSet,
        (current, update): (&'a Revision, &'a Revision),
        pods: &[Arc<Pod>],
        claims: Claims<'a>,
        now: Timestamp,
    ) -> Self {
        let start = start_ordinal(set);
        let mut places: Vec<_> = (0..replicas(set))
            .map(|index| Replica::Missing { ordinal: start.saturating_add(index) })
            .collect();
        let mut condemned = Vec::new();
        for pod in pods {
            let Some(ordinal) = ordinal(set, pod) else { continue };
            let index = usize::try_from(i64::from(ordinal) - i64::from(start)).ok();
            match index.filter(|_| in_range(set, ordinal)).and_then(|index| places.get_mut(index)) {
                Some(place) => *place = Replica::Present { ordinal, pod: pod.clone() },
                None => condemned.push((ordinal, pod.clone())),
            }
        }
        condemned.sort_by_key(|(ordinal, _)| std::cmp::Reverse(*ordinal));
        let condemned = condemned.into_iter().map(|(_, pod)| pod).collect();
        Self { set, current, update, claims, now, replicas: places, condemned }
    }

    /// The pods that count, those that are to go included.
    pub(super) fn members(&self) -> impl Iterator<Item = &Arc<Pod>> {
        let present = self.replicas.iter().filter_map(|replica| match replica {
            Replica::Present { pod, .. } => Some(pod),
            Replica::Missing { .. } => None,
        });
        present.chain(&self.condemned)
    }

    pub(super) fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, min_ready_seconds(self.set), self.now)
    }

    fn is_unavailable(&self, pod: &Pod) -> bool {
        !self.is_available(pod) || is_terminating(pod)
    }

    pub(super) fn plan(&self) -> Plan {
        let mut plan = Plan::default();
        if self.set.metadata.deletion_timestamp.is_some() {
            return plan;
        }
        let ordered = !is_parallel(self.set);
        if self.plan_replicas(ordered, &mut plan) && ordered {
            return plan;
        }
        // The owners of claims are set while their pods exist: a claim that goes with its pod must know it.
        let retained = self.condemned.iter().filter(|pod| !self.claims_match(pod));
        plan.stages.push(retained.map(|pod| vec![Action::RetainClaims(pod.clone())]).collect());
        if self.plan_condemned(ordered, &mut plan) && ordered {
            return plan;
        }
        if is_rolling_update(self.set)
            && let Some(pod) = self.next_update()
        {
            plan.replaces_pod = true;
            plan.stages.push(vec![vec![Action::Delete(pod)]]);
        }
        plan
    }

    /// Creates and repairs the pods that the set should have, in order of their ordinals.
    fn plan_replicas(&self, ordered: bool, plan: &mut Plan) -> Blocks {
        let mut stage = Vec::new();
        let mut blocked = false;
        for replica in &self.replicas {
            let (work, blocks) = match replica {
                Replica::Missing { ordinal } => match self.create(*ordinal) {
                    Some(create) => (vec![create], true),
                    None => {
                        plan.waits_for_claim = true;
                        (Vec::new(), true)
                    }
                },
                Replica::Present { ordinal, pod } => self.tend(pod, *ordinal),
            };
            if !work.is_empty() {
                stage.push(work);
            }
            blocked |= blocks;
            if blocks && ordered {
                break;
            }
        }
        plan.stages.push(stage);
        blocked
    }

    /// The creation of a pod, unless the claim of an earlier pod is still to be deleted.
    fn create(&self, ordinal: i32) -> Option<Action> {
        let made = self.versioned(ordinal);
        let pod = new_pod(self.set, &made.template, &made.name, ordinal);
        let mut claims = claim_names(self.set, ordinal).filter_map(|(_, name)| (self.claims)(&name));
        let stale = claims.any(|claim| is_stale(self.set, &pod, &claim));
        (!stale).then(|| Action::Create(Box::new(pod)))
    }

    /// The revision of a new pod: pods below the partition keep the current one.
    fn versioned(&self, ordinal: i32) -> &'a Revision {
        let index = i64::from(ordinal) - i64::from(start_ordinal(self.set));
        let keeps_current = match partition(self.set) {
            Some(partition) => index < i64::from(partition),
            None if is_rolling_update(self.set) => {
                let current = self.set.status.as_ref().and_then(|status| status.current_replicas);
                index < i64::from(current.unwrap_or(0))
            }
            None => false,
        };
        if keeps_current { self.current } else { self.update }
    }

    /// The work on a pod that exists.
    fn tend(&self, pod: &Arc<Pod>, ordinal: i32) -> (Work, Blocks) {
        if is_finished(pod) {
            // However it ended, it is made again under its name, which it gives back when it is gone.
            let delete = (!is_terminating(pod)).then(|| Action::Delete(pod.clone()));
            return (delete.into_iter().collect(), true);
        }
        let mut work = Vec::new();
        if phase(pod) == "Pending" && !self.claims_complete(pod) {
            work.push(Action::EnsureClaims(pod.clone()));
        }
        let ready = phase(pod) == "Running" && is_ready(pod) && self.is_available(pod);
        let blocks = is_terminating(pod) || !ready;
        if blocks && !is_parallel(self.set) {
            return (work, true);
        }
        let fits = identity_matches(self.set, pod)
            && storage_matches(self.set, pod, ordinal)
            && self.claims_match(pod);
        if !fits && !is_terminating(pod) {
            work.push(Action::Repair(pod.clone()));
        }
        (work, blocks)
    }

    fn claims_of(&self, pod: &Pod) -> impl Iterator<Item = Option<Arc<PersistentVolumeClaim>>> {
        let names = ordinal(self.set, pod).into_iter().flat_map(|ordinal| claim_names(self.set, ordinal));
        names.map(|(_, name)| (self.claims)(&name))
    }

    /// Returns true if the existing claims have the owners that the retention policy asks for.
    fn claims_match(&self, pod: &Pod) -> bool {
        self.claims_of(pod).flatten().all(|claim| wanted_owners(self.set, pod, &claim).is_none())
    }

    /// Returns true if all claims exist, are not being deleted and have the right owners.
    fn claims_complete(&self, pod: &Pod) -> bool {
        let live = |claim: &PersistentVolumeClaim| claim.metadata.deletion_timestamp.is_none();
        self.claims_of(pod).all(|claim| claim.is_some_and(|claim| live(&claim))) && self.claims_match(pod)
    }

    /// Deletes the pods that the set should not have, the highest ordinal first. An ordered set deletes one, when the
    /// others are well; only the first pod that is not well may go itself.
    fn plan_condemned(&self, ordered: bool, plan: &mut Plan) -> Blocks {
        let mut stage = Vec::new();
        let mut blocked = false;
        let first_unavailable = self.first_unavailable();
        for pod in &self.condemned {
            let is_first = first_unavailable.is_some_and(|first| Arc::ptr_eq(first, pod));
            let well = phase(pod) == "Running" && is_ready(pod) && self.is_available(pod);
            blocked = true;
            // A pod that ended never gets well: with two of them nobody would ever be the first to go.
            let may_go = !ordered || well || is_first || is_finished(pod);
            if !is_terminating(pod) && may_go {
                stage.push(vec![Action::Delete(pod.clone())]);
            }
            if ordered {
                break;
            }
        }
        plan.stages.push(stage);
        blocked
    }

    /// The unavailable pod of the lowest ordinal; pods that the set should have come before the others.
    fn first_unavailable(&self) -> Option<&Arc<Pod>> {
        let mut wanted = self.replicas.iter().filter_map(|replica| match replica {
            Replica::Present { pod, .. } => self.is_unavailable(pod).then_some(Some(pod)),
            Replica::Missing { .. } => Some(None),
        });
        match wanted.next() {
            Some(first) => first,
            None => self.condemned.iter().rev().find(|pod| self.is_unavailable(pod)),
        }
    }

    /// The next pod to replace by one of the update revision: the highest that is not, if those above it are available.
    fn next_update(&self) -> Option<Arc<Pod>> {
        let lowest = usize::try_from(partition(self.set).unwrap_or(0)).unwrap_or(0);
        for replica in self.replicas.iter().skip(lowest).rev() {
            let Replica::Present { pod, .. } = replica else { return None };
            // A pod that ended goes without the update.
            let goes = is_terminating(pod) || is_finished(pod);
            if revision(pod) != self.update.name && !goes {
                return Some(pod.clone());
            }
            if goes || self.is_unavailable(pod) {
                return None;
            }
        }
        None
    }
}
