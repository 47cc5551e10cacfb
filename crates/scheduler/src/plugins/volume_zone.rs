//! Holds pods to the zone and region of their volumes.

use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::volumes::{claim_class, claim_key, concerns_claim_of, not_found, volume_name};
use crate::framework::{
    Action, ClusterEvent, CycleState, Filter, Handle, Made, Plugin, PluginArgs, PreFilter, PreFiltered,
    Rejection, Store,
};
use crate::snapshot::{NodeInfo, PodInfo, REGION, Snapshot, ZONE};

const BETA_ZONE: &str = "failure-domain.beta.kubernetes.io/zone";
const BETA_REGION: &str = "failure-domain.beta.kubernetes.io/region";
const LABELS: [&str; 4] = [BETA_ZONE, BETA_REGION, ZONE, REGION];

struct VolumeZone {
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
    classes: Store<StorageClass>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    super::no_args(args)?;
    Ok(Arc::new(VolumeZone { claims: handle.store(), volumes: handle.store(), classes: handle.store() }))
}

/// Labels that a node must have, with the values that do.
#[derive(Clone)]
struct Topologies(Arc<Vec<(&'static str, BTreeSet<String>)>>);

impl Plugin for VolumeZone {
    fn name(&self) -> &'static str {
        "VolumeZone"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated => true,
            ClusterEvent::NodeUpdated { old, new } => old.metadata.labels != new.metadata.labels,
            ClusterEvent::Object(changed) => {
                let is_class = changed.object::<StorageClass>().is_some() && changed.action == Action::Added;
                let is_volume =
                    changed.object::<PersistentVolume>().is_some() && changed.action != Action::Deleted;
                is_class || is_volume || concerns_claim_of(pod, event).unwrap_or(false)
            }
            _ => false,
        }
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

impl PreFilter for VolumeZone {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        let mut topologies = Vec::new();
        for (name, _) in pod.claim_names().filter(|(_, is_own)| !is_own) {
            let claim = self.claims.get(&claim_key(pod, &name));
            let claim = claim.ok_or_else(|| not_found("persistentvolumeclaim", &name))?;
            let volume = volume_name(&claim);
            if volume.is_empty() {
                let class = claim_class(&claim);
                if class.is_empty() {
                    return Err(Rejection::unresolvable(
                        "PersistentVolumeClaim had no pv name and storageClass name",
                    ));
                }
                let found = self.classes.get(&ObjectKey::cluster(class));
                let found = found.ok_or_else(|| not_found("storageclass.storage.k8s.io", class))?;
                match found.volume_binding_mode.as_deref() {
                    // VolumeBinding finds a volume on the right node.
                    Some("WaitForFirstConsumer") => continue,
                    Some(_) => return Err(Rejection::unresolvable("PersistentVolume had no name")),
                    None => {
                        let problem = format!("VolumeBindingMode not set for StorageClass {class:?}");
                        return Err(Rejection::unresolvable(problem));
                    }
                }
            }
            let volume = self
                .volumes
                .get(&ObjectKey::cluster(volume))
                .ok_or_else(|| not_found("persistentvolume", volume))?;
            let labels = volume.metadata.labels.as_ref();
            for key in LABELS {
                if let Some(zones) = labels.and_then(|labels| labels.get(key)) {
                    // A volume in several zones names them all.
                    topologies.push((key, zones.split("__").map(|zone| zone.trim().to_owned()).collect()));
                }
            }
        }
        if topologies.is_empty() {
            return Ok(PreFiltered::Skip);
        }
        state.put(Topologies(Arc::new(topologies)));
        Ok(PreFiltered::Needed)
    }
}

impl Filter for VolumeZone {
    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(Topologies(topologies)) = state.get::<Topologies>() else { return Ok(()) };
        let labels = node.labels();
        // A cluster without zones has one.
        if !LABELS.iter().any(|key| labels.contains_key(*key)) {
            return Ok(());
        }
        for (key, values) in topologies.iter() {
            let current = match *key {
                BETA_ZONE => ZONE,
                BETA_REGION => REGION,
                key => key,
            };
            let value = labels.get(*key).or_else(|| labels.get(current));
            if !value.is_some_and(|value| values.contains(value)) {
                return Err(Rejection::unresolvable("node(s) had no available volume zone"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
