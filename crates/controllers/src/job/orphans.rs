//! Removes the tracking finalizer from pods that no Job counts any more.

use std::fmt;

use ferrite_client::{ObjectKey, controller_of};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;

use super::{has_finalizer, is_finished, is_managed_elsewhere};

/// Pods that may have lost their Job.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum OrphanKey {
    Pod(ObjectKey),
    /// All pods that the Job with this UID controls.
    PodsOf(String),
}

impl fmt::Display for OrphanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(key) => key.fmt(f),
            Self::PodsOf(uid) => write!(f, "pods of job {uid}"),
        }
    }
}

/// Whether the pod has the finalizer for nothing. `owner` is the Job that controls it, if there is one.
pub(super) fn is_orphan(pod: &Pod, owner: Option<&Job>) -> bool {
    if !has_finalizer(pod) {
        return false;
    }
    match controller_of(&pod.metadata) {
        Some(reference) if reference.kind != "Job" || reference.api_version != "batch/v1" => false,
        Some(_) => owner.is_none_or(|job| !is_managed_elsewhere(job) && is_finished(job)),
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn only_pods_without_a_running_job_are_orphans() {
        let pod = |owner: Option<(&str, &str)>, finalizer: bool| -> Pod {
            let owner = owner.map(|(version, kind)| {
                json!([{"apiVersion": version, "kind": kind, "name": "j", "uid": "u", "controller": true}])
            });
            let finalizers = if finalizer { json!([super::super::FINALIZER]) } else { json!([]) };
            ferrite_json::from_value(
                json!({"metadata": {"ownerReferences": owner, "finalizers": finalizers}}),
            )
            .unwrap()
        };
        let job = |spec: Value, finished: bool| -> Job {
            let conditions = if finished { json!([{"type": "Failed", "status": "True"}]) } else { json!([]) };
            ferrite_json::from_value(json!({"spec": spec, "status": {"conditions": conditions}})).unwrap()
        };
        let (running, finished) = (job(json!({"template": {}}), false), job(json!({"template": {}}), true));
        let elsewhere = job(json!({"template": {}, "managedBy": "example.com/other"}), true);
        let of_job = Some(("batch/v1", "Job"));
        for (what, pod, owner, expected) in [
            ("without the finalizer", pod(None, false), None, false),
            ("without an owner", pod(None, true), None, true),
            ("of a job that is gone", pod(of_job, true), None, true),
            ("of a job that runs", pod(of_job, true), Some(&running), false),
            ("of a job that is finished", pod(of_job, true), Some(&finished), true),
            ("of a job that another controller manages", pod(of_job, true), Some(&elsewhere), false),
            ("of another kind", pod(Some(("apps/v1", "ReplicaSet")), true), None, false),
            ("of another Job", pod(Some(("example.com/v1", "Job")), true), None, false),
        ] {
            assert_eq!(is_orphan(&pod, owner), expected, "{what}");
        }
    }
}
