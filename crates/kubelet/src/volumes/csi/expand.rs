//! Grows the file system of a volume whose claim grew.

use super::ledger::VolumeId;
use super::mount::{Place, text};
use super::wanted::Wanted;
use super::{Csi, CsiError, policy};
use crate::pod::model;
use crate::volumes::plugins::{PersistentSetUp, SetUp};
use ferrite_client::{Api, EventType, message_of};
use ferrite_csi::CallError;
use ferrite_csi::v1::{CapacityRange, NodeExpandVolumeRequest};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
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
        if !may_grow(persistent.claim) {
            return;
        }
        let (csi, now) = (self.clone(), request.now);
        let (wanted, id, place) = (wanted.clone(), id.clone(), place.clone());
        let (claim, pod) = (persistent.claim.clone(), model::reference(request.pod, None));
        self.shared.scope.spawn(async move {
            let volume = &wanted.spec_name;
            match csi.expand(&wanted, &id, &place, size, &claim, now).await {
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
        now: Timestamp,
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
        let claim = match resize_status(claim) {
            Some(IN_PROGRESS) => claim.clone(),
            _ => self.change_claim(claim, in_progress(claim)).await?,
        };
        if let Err(source) = service.node_expand_volume(request).await {
            if let Some(change) = failure(&claim, size, &source, now) {
                self.change_claim(&claim, change).await?;
            }
            return Err(failed("NodeExpandVolume")(source));
        }
        self.change_claim(&claim, grown(&claim, size)).await.map(|_| true)
    }

    async fn change_claim(
        &self,
        claim: &PersistentVolumeClaim,
        change: Value,
    ) -> Result<PersistentVolumeClaim, CsiError> {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.shared.client.clone(), namespace);
        let written = claims.patch_status(name, &PatchParams::default(), &Patch::Merge(change)).await;
        written.map_err(|e| CsiError::Api {
            what: format!("the claim {namespace}/{name}"),
            problem: message_of(&e),
        })
    }
}

const IN_PROGRESS: &str = "NodeResizeInProgress";
const INFEASIBLE: &str = "NodeResizeInfeasible";
const ERROR: &str = "NodeResizeError";

/// The state of the growth of the claim's volume.
fn resize_status(claim: &PersistentVolumeClaim) -> Option<&str> {
    let all = claim.status.as_ref()?.allocated_resource_statuses.as_ref()?;
    all.get("storage").map(String::as_str)
}

/// True if it is the node's turn to grow the volume. One that cannot grow waits until the claim asks for another size
/// and the controller has taken that up.
pub(super) fn may_grow(claim: &PersistentVolumeClaim) -> bool {
    matches!(resize_status(claim), None | Some("" | "NodeResizePending" | IN_PROGRESS))
}

fn version(claim: &PersistentVolumeClaim) -> Value {
    json!({"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version})
}

fn in_progress(claim: &PersistentVolumeClaim) -> Value {
    json!({"metadata": version(claim), "status": {"allocatedResourceStatuses": {"storage": IN_PROGRESS}}})
}

/// The change of a claim's status when the driver has refused; none when it may still be at work, or when the claim says
/// so already.
fn failure(claim: &PersistentVolumeClaim, size: i64, error: &CallError, now: Timestamp) -> Option<Value> {
    if !error.is_final() {
        return None;
    }
    let conditions: Vec<_> =
        claim.status.iter().flat_map(|status| status.conditions.iter().flatten()).collect();
    let known = conditions.iter().find(|condition| condition.type_ == ERROR);
    let message = format!("failed to expand pvc with {error}");
    // As upstream: a claim that has asked for another size since a refusal is the controller's to look at.
    let infeasible = error.is_infeasible() || (known.is_some() && asked(claim) != Some(size));
    if !infeasible && known.is_some_and(|condition| condition.message.as_ref() == Some(&message)) {
        return None;
    }
    let error = PersistentVolumeClaimCondition {
        type_: ERROR.into(),
        status: "True".into(),
        last_transition_time: Some(Time(now)),
        message: Some(message),
        ..PersistentVolumeClaimCondition::default()
    };
    let others = conditions.into_iter().filter(|condition| condition.type_ != ERROR);
    let conditions: Vec<_> = others.chain([&error]).collect();
    let mut status = json!({"conditions": conditions});
    if infeasible {
        status["allocatedResourceStatuses"] = json!({"storage": INFEASIBLE});
    }
    Some(json!({"metadata": version(claim), "status": status}))
}

/// The size that the claim asks for.
fn asked(claim: &PersistentVolumeClaim) -> Option<i64> {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref())?;
    crate::quantity::value_of(resources.requests.as_ref(), "storage")
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
        "metadata": version(claim),
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
    use tonic::Code;

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

    #[test]
    fn a_refusal_is_written_down_and_an_impossible_size_is_left_alone() {
        let claim = |request: &str, status: Value| -> PersistentVolumeClaim {
            ferrite_json::from_value(json!({
                "metadata": {"uid": "u", "resourceVersion": "7"},
                "spec": {"resources": {"requests": {"storage": request}}}, "status": status,
            }))
            .unwrap()
        };
        let refused = |code: Code| CallError::Refused { code, text: "no".into() };
        let now = Timestamp::from_second(1_000_000).unwrap();
        let told = format!("failed to expand pvc with {}", refused(Code::Internal));
        let known = json!({"conditions": [{"type": ERROR, "status": "True", "message": told}]});
        for (claim, code, expected) in [
            (claim("2Gi", json!({})), Code::OutOfRange, Some(true)),
            (claim("2Gi", json!({})), Code::Internal, Some(false)),
            (claim("2Gi", json!({})), Code::Unavailable, None),
            (claim("2Gi", known.clone()), Code::Internal, None),
            (claim("2Gi", known.clone()), Code::FailedPrecondition, Some(false)),
            (claim("3Gi", known), Code::Internal, Some(true)),
        ] {
            let change = failure(&claim, 2 << 30, &refused(code), now);
            assert_eq!(change.is_some(), expected.is_some(), "{code:?}");
            let Some(change) = change else { continue };
            let status = &change["status"];
            assert_eq!(status["conditions"].as_array().unwrap().len(), 1);
            assert_eq!(status["conditions"][0]["type"], ERROR);
            let infeasible = status["allocatedResourceStatuses"]["storage"] == INFEASIBLE;
            assert_eq!(Some(infeasible), expected, "{code:?}");
        }
        for (status, grows) in [
            (json!({}), true),
            (json!({"allocatedResourceStatuses": {"storage": "NodeResizePending"}}), true),
            (json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}}), true),
            (json!({"allocatedResourceStatuses": {"storage": INFEASIBLE}}), false),
            (json!({"allocatedResourceStatuses": {"storage": "ControllerResizeInProgress"}}), false),
        ] {
            assert_eq!(may_grow(&claim("2Gi", status.clone())), grows, "{status}");
        }
    }
}
