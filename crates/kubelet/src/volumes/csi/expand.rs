//! Grows the file system of a volume whose claim grew.

use super::ledger::VolumeId;
use super::mount::{Place, text};
use super::wanted::Wanted;
use super::{Csi, CsiError, policy};
use crate::pod::model;
use crate::volumes::plugins::{PersistentSetUp, SetUp};
use ferrite_client::{Api, EventType, message_of};
use ferrite_csi::v1::{CapacityRange, NodeExpandVolumeRequest};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Patch, PatchParams};

impl Csi {
    /// Has the driver grow the volume in the background: a pod does not wait for it. A failure is tried
    /// again at the next sync.
    pub(super) fn grow(
        &self,
        request: SetUp<'_>,
        wanted: &Wanted,
        id: &VolumeId,
        place: &Place,
        persistent: PersistentSetUp<'_>,
    ) {
        let Some(size) = wanted.grow_to else { return };
        let csi = self.clone();
        let (wanted, id, place) = (wanted.clone(), id.clone(), place.clone());
        let (claim, pod) = (persistent.claim.clone(), model::reference(request.pod, None));
        self.shared.scope.spawn(async move {
            let volume = &wanted.spec_name;
            match csi.expand(&wanted, &id, &place, size, &claim).await {
                Ok(false) => {}
                Ok(true) => {
                    let message = format!("MountVolume.NodeExpandVolume succeeded for volume {volume:?}");
                    let reason = "FileSystemResizeSuccessful";
                    csi.shared.recorder.event(&pod, EventType::Normal, reason, message.clone());
                    csi.shared.recorder.event_for(&claim, EventType::Normal, reason, message);
                }
                Err(error) => {
                    let message =
                        format!("MountVolume.NodeExpandVolume failed for volume {volume:?} : {error}");
                    csi.shared.recorder.event(&pod, EventType::Warning, "VolumeResizeFailed", message);
                }
            }
        });
    }

    /// Returns true if the node had anything to grow.
    async fn expand(
        &self,
        wanted: &Wanted,
        id: &VolumeId,
        place: &Place,
        size: i64,
        claim: &PersistentVolumeClaim,
    ) -> Result<bool, CsiError> {
        let failed = |step| move |source| CsiError::Call { step, source };
        let service = self.shared.drivers.wait(&wanted.driver).await?;
        let _alone = self.exclusive(id).await;
        let able = service.capabilities().await.map_err(failed("NodeGetCapabilities"))?;
        if !able.expand() {
            return Ok(false);
        }
        let stage = self.with_ledger(|ledger| ledger.stage_of(id)).filter(|_| able.stage());
        let request = NodeExpandVolumeRequest {
            volume_id: wanted.handle.clone(),
            volume_path: text(&place.target),
            capacity_range: Some(CapacityRange { required_bytes: size, limit_bytes: 0 }),
            staging_target_path: stage.map(|stage| text(&stage.path)).unwrap_or_default(),
            volume_capability: Some(policy::capability(wanted, &able, None)),
            secrets: self.secret(wanted.expand_secret.as_ref()).await?,
        };
        service.node_expand_volume(request).await.map_err(failed("NodeExpandVolume"))?;
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.shared.client.clone(), namespace);
        let patch = Patch::Merge(grown(claim, size));
        let written = claims.patch_status(name, &PatchParams::default(), &patch).await;
        written.map(|_| true).map_err(|e| CsiError::Api {
            what: format!("the claim {namespace}/{name}"),
            problem: message_of(&e),
        })
    }
}

/// The change of a claim's status once its volume has grown: the new size, and no word of growing.
fn grown(claim: &PersistentVolumeClaim, size: i64) -> Value {
    let conditions = claim.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let others: Vec<_> = conditions
        .filter(|condition| {
            !matches!(
                condition.type_.as_str(),
                "FileSystemResizePending" | "Resizing" | "NodeResizeError" | "ControllerResizeError"
            )
        })
        .collect();
    json!({
        "metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version},
        "status": {
            "capacity": {"storage": written(claim, size)},
            "conditions": others,
            "allocatedResourceStatuses": {"storage": null},
        },
    })
}

/// The size in the words of the claim where they mean the same.
fn written(claim: &PersistentVolumeClaim, size: i64) -> String {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let asked = resources.and_then(|resources| resources.requests.as_ref()?.get("storage"));
    match asked.filter(|asked| crate::quantity::value(asked) == Some(size)) {
        Some(asked) => asked.0.clone(),
        None => size.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_has_grown_says_nothing_of_it() {
        let claim: PersistentVolumeClaim = ferrite_json::from_value(json!({
            "metadata": {"uid": "u", "resourceVersion": "7"},
            "spec": {"resources": {"requests": {"storage": "2Gi"}}},
            "status": {"conditions": [
                {"type": "FileSystemResizePending", "status": "True"},
                {"type": "Other", "status": "True"},
            ]},
        }))
        .unwrap();
        let change = grown(&claim, 2 << 30);
        assert_eq!(change["status"]["capacity"]["storage"], "2Gi");
        assert_eq!(change["status"]["conditions"].as_array().unwrap().len(), 1);
        assert_eq!(change["metadata"]["resourceVersion"], "7");
        assert_eq!(grown(&claim, 5)["status"]["capacity"]["storage"], "5");
    }
}
