//! Ends a pod for the sake of its node: it is marked with the reason, then deleted.

use ferrite_client::{Api, ObjectKey, is_conflict, is_not_found};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};

use crate::error::{During, SyncError};

/// The condition `DisruptionTarget` that a pod gets before its end.
pub(crate) struct Disruption {
    pub reason: &'static str,
    pub message: &'static str,
}

/// Marks and deletes this very pod. False if it is gone, or another pod has its name.
pub(crate) async fn mark_and_delete(
    api: &Api<Pod>,
    key: &ObjectKey,
    pod: &Pod,
    disruption: &Disruption,
) -> Result<bool, SyncError> {
    let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [{
        "type": "DisruptionTarget", "status": "True",
        "reason": disruption.reason, "message": disruption.message,
        "lastTransitionTime": Time(Timestamp::now())}]}});
    match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Ok(_) => {}
        Err(error) if is_not_found(&error) || is_conflict(&error) => return Ok(false),
        Err(error) => return Err(error).during(|| format!("mark pod {key} for eviction")),
    }
    let same = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
    match api.delete(&key.name, &DeleteParams::default().preconditions(same)).await {
        Ok(_) => Ok(true),
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(false),
        Err(error) => Err(error).during(|| format!("evict pod {key}")),
    }
}
