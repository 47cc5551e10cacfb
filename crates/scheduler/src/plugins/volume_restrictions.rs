//! Keeps apart pods that cannot share a disk or a claim.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::volumes::{claim_key, concerns_claim_of, not_found};
use crate::framework::{
    ClusterEvent, CycleState, Filter, Handle, Made, Plugin, PluginArgs, PreFilter, PreFiltered, Rejection,
    Store,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

struct VolumeRestrictions {
    claims: Store<PersistentVolumeClaim>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    super::no_args(args)?;
    Ok(Arc::new(VolumeRestrictions { claims: handle.store() }))
}

/// The pod's claims with access mode ReadWriteOncePod, and how often other pods use them.
#[derive(Clone)]
struct Exclusive {
    claims: Arc<BTreeSet<String>>,
    uses: i64,
}

impl Exclusive {
    fn uses_by(&self, pod: &PodInfo, other: &PodInfo) -> i64 {
        if other.key.namespace != pod.key.namespace {
            return 0;
        }
        let uses =
            other.claim_names().filter(|(name, is_own)| !is_own && self.claims.contains(name.as_ref()));
        i64::try_from(uses.count()).unwrap_or(i64::MAX)
    }
}

fn conflict(pod: &PodInfo, other: &PodInfo) -> bool {
    pod.disks().iter().any(|disk| other.disks().iter().any(|taken| disk.conflicts_with(taken)))
}

impl Plugin for VolumeRestrictions {
    fn name(&self) -> &'static str {
        "VolumeRestrictions"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated => true,
            ClusterEvent::AssignedPodDeleted(gone) => {
                let shares = |name: &str| gone.claim_names().any(|(other, _)| other == name);
                gone.key.namespace == pod.key.namespace
                    && (conflict(pod, gone) || pod.claim_names().any(|(name, _)| shares(&name)))
            }
            event => concerns_claim_of(pod, event).unwrap_or(false),
        }
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

fn recount(state: &mut CycleState, pod: &PodInfo, other: &PodInfo, by: i64) {
    let uses = state.get::<Exclusive>().map_or(0, |exclusive| exclusive.uses_by(pod, other));
    if uses != 0
        && let Some(exclusive) = state.get_mut::<Exclusive>()
    {
        exclusive.uses += uses * by;
    }
}

impl PreFilter for VolumeRestrictions {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        let mut exclusive = BTreeSet::new();
        for (name, _) in pod.claim_names().filter(|(_, is_own)| !is_own) {
            let claim = self.claims.get(&claim_key(pod, &name));
            let claim = claim.ok_or_else(|| not_found("persistentvolumeclaim", &name))?;
            let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
            if modes.iter().any(|mode| mode == "ReadWriteOncePod") {
                exclusive.insert(name.into_owned());
            }
        }
        let mut exclusive = Exclusive { claims: Arc::new(exclusive), uses: 0 };
        if !exclusive.claims.is_empty() {
            let present = snapshot.nodes().iter().flat_map(|node| &node.pods);
            exclusive.uses = present.map(|other| exclusive.uses_by(pod, other)).sum();
        }
        if pod.disks().is_empty() && exclusive.uses == 0 {
            return Ok(PreFiltered::Skip);
        }
        state.put(exclusive);
        Ok(PreFiltered::Needed)
    }

    fn add_pod(&self, state: &mut CycleState, pod: &PodInfo, added: &PodInfo, _node: &NodeInfo) {
        recount(state, pod, added, 1);
    }

    fn remove_pod(&self, state: &mut CycleState, pod: &PodInfo, removed: &PodInfo, _node: &NodeInfo) {
        recount(state, pod, removed, -1);
    }
}

impl Filter for VolumeRestrictions {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if node.pods.iter().any(|present| conflict(pod, present)) {
            return Err(Rejection::unschedulable("node(s) had no available disk"));
        }
        if state.get::<Exclusive>().is_some_and(|exclusive| exclusive.uses > 0) {
            return Err(Rejection::unschedulable(
                "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by \
                 another pod",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
