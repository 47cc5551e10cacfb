//! persistentVolumeClaim volumes, and generic ephemeral ones, whose claim a controller makes for the pod.

use super::plugins::{PERSISTENT, PersistentSetUp, SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError};
use crate::pod::model::{self, PodId};
use ferrite_client::{Api, ObjectKey, controller_of, is_not_found, matches_node, message_of};
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};

/// Why a claim cannot be mounted, in upstream's words.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("error processing PVC {claim}: failed to fetch PVC from API server: {problem}")]
    FetchClaim { claim: ObjectKey, problem: String },
    #[error("error processing PVC {claim}: {problem}")]
    Claim { claim: ObjectKey, problem: ClaimProblem },
    #[error("failed to fetch PV {volume:?} from API server: {problem}")]
    FetchVolume { volume: String, problem: String },
    #[error("found PV object {volume:?} but {problem}")]
    Volume { volume: String, problem: VolumeProblem },
    #[error("volume {0} has volumeMode Block, but is specified in volumeMounts")]
    BlockMounted(String),
    #[error("volume {0} has volumeMode Filesystem, but is specified in volumeDevices")]
    FilesystemDevice(String),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClaimProblem {
    #[error("PVC is being deleted")]
    Deleting,
    #[error("PVC is not bound")]
    NotBound,
    #[error("PVC was not created for pod {0} (pod is not owner)")]
    NotForPod(String),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VolumeProblem {
    #[error("it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim")]
    NotBound,
    #[error("its pv.Spec.ClaimRef.UID {found:?} does not point to claim.UID {wanted:?}")]
    AnotherClaim { found: String, wanted: String },
    #[error("this node does not satisfy its node affinity")]
    NodeAffinity,
}

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.persistent_volume_claim.is_some(),
    set_up: |request: SetUp<'_>| {
        async move {
            let source = request.volume.persistent_volume_claim.as_ref().ok_or(SourceError::Unsupported)?;
            let read_only = source.read_only == Some(true);
            set_up(request, &source.claim_name, read_only, false).await
        }
        .boxed()
    },
};

pub(super) const EPHEMERAL: VolumePlugin = VolumePlugin {
    matches: |volume| volume.ephemeral.is_some(),
    set_up: |request: SetUp<'_>| {
        async move {
            let claim = format!("{}-{}", request.id.name, request.volume.name);
            set_up(request, &claim, false, true).await
        }
        .boxed()
    },
};

async fn set_up(
    request: SetUp<'_>,
    claim_name: &str,
    read_only: bool,
    owned: bool,
) -> Result<ReadyVolume, SourceError> {
    let key = ObjectKey::new(request.id.namespace.as_str(), claim_name);
    // As upstream: asked for anew. A node may read a claim of its pods, and may not watch claims.
    let claims = Api::<PersistentVolumeClaim>::namespaced(request.volumes.client.clone(), &key.namespace);
    let claim = claims.get(&key.name).await.map_err(|e| ClaimError::FetchClaim {
        claim: key.clone(),
        problem: problem(&e, "persistentvolumeclaim", &key.name),
    })?;
    let owner = owned.then_some(request.id);
    let volume_name =
        bound_volume(&claim, owner).map_err(|problem| ClaimError::Claim { claim: key.clone(), problem })?;
    let volumes = Api::<PersistentVolume>::all(request.volumes.client.clone());
    let volume = volumes.get(&volume_name).await.map_err(|e| ClaimError::FetchVolume {
        volume: volume_name.clone(),
        problem: problem(&e, "persistentvolume", &volume_name),
    })?;
    let node = request
        .volumes
        .node
        .get(&ObjectKey::cluster(model::spec(request.pod).node_name.as_deref().unwrap_or_default()));
    check_volume(&volume, &claim, node.as_deref())
        .map_err(|problem| ClaimError::Volume { volume: volume_name.clone(), problem })?;
    let spec = volume.spec.as_ref().ok_or(SourceError::Unsupported)?;
    let block = spec.volume_mode.as_deref() == Some("Block");
    check_use(request.pod, &request.volume.name, block)?;
    let plugin = PERSISTENT.iter().find(|plugin| (plugin.matches)(spec)).ok_or(SourceError::Unsupported)?;
    let wanted =
        PersistentSetUp { pod: request, name: &volume_name, volume: &volume, spec, claim: &claim, read_only };
    let ready = (plugin.set_up)(wanted).await?;
    let settled = ready.refresh_at.is_none();
    let claim = Some(claim_name.to_owned());
    Ok(ReadyVolume { read_only: ready.read_only || read_only, block, settled, claim, ..ready })
}

fn problem(error: &kube::Error, kind: &str, name: &str) -> String {
    match is_not_found(error) {
        true => format!("{kind} \"{name}\" not found"),
        false => message_of(error),
    }
}

/// The volume of a claim that is ready to be used. `owner` is the pod for which the claim must have been made.
fn bound_volume(claim: &PersistentVolumeClaim, owner: Option<&PodId>) -> Result<String, ClaimProblem> {
    if let Some(pod) = owner
        && controller_of(&claim.metadata).is_none_or(|owner| owner.uid != pod.uid)
    {
        return Err(ClaimProblem::NotForPod(pod.to_string()));
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return Err(ClaimProblem::Deleting);
    }
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
    match phase == Some("Bound") && !volume.is_empty() {
        true => Ok(volume),
        false => Err(ClaimProblem::NotBound),
    }
}

/// Fails when the volume is not the claim's, or not for this node.
fn check_volume(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
    node: Option<&Node>,
) -> Result<(), VolumeProblem> {
    let spec = volume.spec.as_ref();
    let reference = spec.and_then(|spec| spec.claim_ref.as_ref()).ok_or(VolumeProblem::NotBound)?;
    let found = reference.uid.clone().unwrap_or_default();
    let wanted = claim.metadata.uid.clone().unwrap_or_default();
    if found != wanted {
        return Err(VolumeProblem::AnotherClaim { found, wanted });
    }
    let required =
        spec.and_then(|spec| spec.node_affinity.as_ref()).and_then(|affinity| affinity.required.as_ref());
    let suits = required.is_none() || node.is_some_and(|node| matches_node(None, required, node));
    if suits { Ok(()) } else { Err(VolumeProblem::NodeAffinity) }
}

/// Fails when a container wants a device of a file system, or files of a device.
fn check_use(pod: &Pod, volume: &str, block: bool) -> Result<(), ClaimError> {
    for container in model::containers(pod) {
        let mounted = container.spec.volume_mounts.iter().flatten().any(|mount| mount.name == volume);
        let device = container.spec.volume_devices.iter().flatten().any(|device| device.name == volume);
        match block {
            true if mounted => return Err(ClaimError::BlockMounted(volume.to_owned())),
            false if device => return Err(ClaimError::FilesystemDevice(volume.to_owned())),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn claim(changes: Value) -> PersistentVolumeClaim {
        let mut whole = json!({
            "metadata": {"name": "c", "namespace": "ns", "uid": "u"},
            "spec": {"volumeName": "v"},
            "status": {"phase": "Bound"},
        });
        for (key, value) in changes.as_object().unwrap() {
            whole[&**key] = value.clone();
        }
        ferrite_json::from_value(whole).unwrap()
    }

    #[test]
    fn claims_must_be_bound_and_the_pods_own() {
        let pod: Pod =
            ferrite_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "pod"}}))
                .unwrap();
        let id = PodId::of(&pod);
        let owner = |uid: &str| {
            json!({"uid": "u", "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}]})
        };
        for (what, changes, owned, expected) in [
            ("bound", json!({}), false, Ok("v".to_owned())),
            ("pending", json!({"status": {"phase": "Pending"}}), false, Err(ClaimProblem::NotBound)),
            ("lost", json!({"status": {"phase": "Lost"}}), false, Err(ClaimProblem::NotBound)),
            ("no volume", json!({"spec": {}}), false, Err(ClaimProblem::NotBound)),
            (
                "being deleted",
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
                false,
                Err(ClaimProblem::Deleting),
            ),
            ("made for the pod", json!({"metadata": owner("pod")}), true, Ok("v".to_owned())),
            (
                "made for another pod",
                json!({"metadata": owner("other")}),
                true,
                Err(ClaimProblem::NotForPod(id.to_string())),
            ),
            ("made by a user", json!({}), true, Err(ClaimProblem::NotForPod(id.to_string()))),
        ] {
            assert_eq!(bound_volume(&claim(changes), owned.then_some(&id)), expected, "{what}");
        }
    }

    #[test]
    fn volumes_must_be_the_claims_and_the_nodes() {
        let node: Node =
            ferrite_json::from_value(json!({"metadata": {"name": "n", "labels": {"zone": "a"}}})).unwrap();
        let affinity = |zone: &str| {
            json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "zone", "operator": "In", "values": [zone]}]}]}})
        };
        let reference = |uid: &str| json!({"uid": uid});
        for (what, spec, node, expected) in [
            ("the claim's", json!({"claimRef": reference("u")}), None, Ok(())),
            ("nobody's", json!({}), None, Err(VolumeProblem::NotBound)),
            (
                "another's",
                json!({"claimRef": reference("x")}),
                None,
                Err(VolumeProblem::AnotherClaim { found: "x".into(), wanted: "u".into() }),
            ),
            ("here", json!({"claimRef": reference("u"), "nodeAffinity": affinity("a")}), Some(&node), Ok(())),
            (
                "elsewhere",
                json!({"claimRef": reference("u"), "nodeAffinity": affinity("b")}),
                Some(&node),
                Err(VolumeProblem::NodeAffinity),
            ),
            (
                "nobody knows where",
                json!({"claimRef": reference("u"), "nodeAffinity": affinity("a")}),
                None,
                Err(VolumeProblem::NodeAffinity),
            ),
        ] {
            let volume: PersistentVolume =
                ferrite_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            assert_eq!(check_volume(&volume, &claim(json!({})), node), expected, "{what}");
        }
    }

    #[test]
    fn devices_are_no_file_systems() {
        let pod = |container: Value| -> Pod {
            let mut container = container;
            container["name"] = json!("c");
            ferrite_json::from_value(json!({"metadata": {}, "spec": {"containers": [container]}})).unwrap()
        };
        let mounts = pod(json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}));
        let devices = pod(json!({"volumeDevices": [{"name": "v", "devicePath": "/dev/v"}]}));
        assert!(check_use(&mounts, "v", false).is_ok() && check_use(&devices, "v", true).is_ok());
        assert!(check_use(&mounts, "v", true).is_err() && check_use(&devices, "v", false).is_err());
        assert!(check_use(&mounts, "other", true).is_ok());
    }
}
