//! Keeps the volumes of each CSI driver on a node within the limit that the driver reports there.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};

use super::volumes::{check_owner, claim_class, claim_key, concerns_claim_of, volume_name};
use crate::framework::{
    Action, ClusterEvent, CycleState, Filter, Handle, Made, Plugin, PluginArgs, PluginError, PreFilter,
    PreFiltered, Rejection, Store,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

const NAME: &str = "NodeVolumeLimits";

struct NodeVolumeLimits {
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
    classes: Store<StorageClass>,
    nodes: Store<CSINode>,
    attachments: Store<VolumeAttachment>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    super::no_args(args)?;
    Ok(Arc::new(NodeVolumeLimits {
        claims: handle.store(),
        volumes: handle.store(),
        classes: handle.store(),
        nodes: handle.store(),
        attachments: handle.store(),
    }))
}

/// A volume by a name of its own, with its driver.
type Volumes = BTreeMap<String, String>;

/// The node's limit of volumes for each driver.
fn limits(node: &CSINode) -> BTreeMap<&str, i64> {
    let drivers = node.spec.drivers.iter();
    drivers
        .filter_map(|driver| {
            let count = driver.allocatable.as_ref()?.count?;
            Some((driver.name.as_str(), i64::from(count)))
        })
        .collect()
}

fn csi_of(volume: &PersistentVolume) -> Option<(String, String)> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    Some((format!("{}/{}", csi.driver, csi.volume_handle), csi.driver.clone()))
}

impl NodeVolumeLimits {
    /// The volume of a claim. One that is yet to be made has the claim for a name and its class's provisioner for a driver.
    fn volume_of(&self, key: &ObjectKey, claim: &PersistentVolumeClaim) -> Option<(String, String)> {
        let name = volume_name(claim);
        if !name.is_empty()
            && let Some(volume) = self.volumes.get(&ObjectKey::cluster(name))
        {
            return csi_of(&volume);
        }
        let class = self.classes.get(&ObjectKey::cluster(claim_class(claim)))?;
        Some((format!("{}/claim {key}", class.provisioner), class.provisioner.clone()))
    }

    /// The volumes of a new pod, whose claims must exist and belong to it.
    fn wanted(&self, pod: &PodInfo) -> Result<Volumes, Rejection> {
        let mut volumes = Volumes::new();
        for (name, is_own) in pod.claim_names() {
            let key = claim_key(pod, &name);
            let Some(claim) = self.claims.get(&key) else {
                let problem = format!("looking up PVC {key}: persistentvolumeclaim {name:?} not found");
                return Err(Rejection::unresolvable(problem));
            };
            if is_own && let Err(problem) = check_owner(pod, &claim) {
                return Err(PluginError::new("Filter", NAME, problem).into());
            }
            volumes.extend(self.volume_of(&key, &claim));
        }
        Ok(volumes)
    }

    /// Adds the volumes of a pod that is on the node. A claim that is gone does not count, nor does one that is not the
    /// pod's own: any user who may create pods could otherwise keep all others off the node.
    fn add_present(&self, pod: &PodInfo, volumes: &mut Volumes) {
        for (name, is_own) in pod.claim_names() {
            let key = claim_key(pod, &name);
            if let Some(claim) = self.claims.get(&key)
                && (!is_own || check_owner(pod, &claim).is_ok())
            {
                volumes.extend(self.volume_of(&key, &claim));
            }
        }
    }
}

impl Plugin for NodeVolumeLimits {
    fn name(&self) -> &'static str {
        NAME
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated => true,
            ClusterEvent::AssignedPodDeleted(gone) => gone.claim_names().next().is_some(),
            ClusterEvent::Object(changed) => match (changed.object::<CSINode>(), changed.old::<CSINode>()) {
                (Some(new), Some(old)) => {
                    let old = limits(old);
                    limits(new).iter().any(|(driver, limit)| *limit > old.get(driver).copied().unwrap_or(0))
                }
                (Some(_), None) => changed.action == Action::Added,
                _ if changed.object::<VolumeAttachment>().is_some() => changed.action == Action::Deleted,
                _ => concerns_claim_of(pod, event).unwrap_or(false),
            },
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

/// The volumes of the new pod, or the filter's verdict on every node.
#[derive(Clone)]
struct Wanted(Arc<Result<Volumes, Rejection>>);

impl PreFilter for NodeVolumeLimits {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        // As upstream: a claim that is missing is VolumeBinding's to report, and only then the filter's.
        let wanted = self.wanted(pod);
        if wanted.as_ref().is_ok_and(Volumes::is_empty) {
            return Ok(PreFiltered::Skip);
        }
        state.put(Wanted(Arc::new(wanted)));
        Ok(PreFiltered::Needed)
    }
}

impl Filter for NodeVolumeLimits {
    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(Wanted(wanted)) = state.get::<Wanted>() else { return Ok(()) };
        let wanted = (**wanted).as_ref().map_err(Clone::clone)?;
        let Some(csi_node) = self.nodes.get(&ObjectKey::cluster(node.name())) else { return Ok(()) };
        let limits = limits(&csi_node);
        if !wanted.values().any(|driver| limits.contains_key(driver.as_str())) {
            return Ok(());
        }
        let mut present = Volumes::new();
        for pod in &node.pods {
            self.add_present(pod, &mut present);
        }
        // A volume can still be attached although its pod is gone.
        for attachment in self.attachments.list() {
            if attachment.spec.node_name == node.name()
                && let Some(name) = attachment.spec.source.persistent_volume_name.as_deref()
                && let Some(volume) = self.volumes.get(&ObjectKey::cluster(name))
            {
                present.extend(csi_of(&volume));
            }
        }
        for (driver, limit) in limits {
            let of = |volumes: &Volumes| volumes.values().filter(|other| *other == driver).count();
            let new =
                wanted.iter().filter(|(name, of)| *of == driver && !present.contains_key(*name)).count();
            if new > 0 && i64::try_from(of(&present) + new).unwrap_or(i64::MAX) > limit {
                return Err(Rejection::unschedulable("node(s) exceed max volume count"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
