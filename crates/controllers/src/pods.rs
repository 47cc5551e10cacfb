//! Facts about pods that several controllers need.

use std::sync::Arc;

use ferrite_client::{Informer, controller_of};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::Resource;

/// Index of objects by the UID of their controller.
pub(crate) const BY_CONTROLLER: &str = "controller";
/// Index of objects that nobody controls, by namespace.
pub(crate) const ORPHANS: &str = "orphans";
/// Index of pods by `spec.nodeName`.
pub(crate) const BY_NODE: &str = "node";
/// Index of pods by namespace and each of their labels.
pub(crate) const BY_LABEL: &str = "label";

pub(crate) fn controller_index<K: Resource>(object: &K) -> Vec<String> {
    controller_of(object.meta()).map(|owner| owner.uid.clone()).into_iter().collect()
}

pub(crate) fn orphan_index<K: Resource>(object: &K) -> Vec<String> {
    match controller_of(object.meta()) {
        Some(_) => Vec::new(),
        None => object.meta().namespace.clone().into_iter().collect(),
    }
}

pub(crate) fn label_index(pod: &Pod) -> Vec<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let labels = pod.metadata.labels.iter().flatten();
    labels.map(|(key, value)| label_value(namespace, key, value)).collect()
}

fn label_value(namespace: &str, key: &str, value: &str) -> String {
    format!("{namespace}/{key}={value}")
}

/// The pods of a namespace that have the rarest of `labels`; all of its pods if there is none to ask for. The index
/// [`BY_LABEL`] must have been added. The caller compares the rest of its selector.
pub(crate) fn candidates<'a>(
    pods: &Informer<Pod>,
    namespace: &str,
    labels: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Vec<Arc<Pod>> {
    let values = labels.into_iter().map(|(key, value)| label_value(namespace, key, value));
    match values.min_by_key(|value| pods.count_by_index(BY_LABEL, value)) {
        Some(rarest) => pods.by_index(BY_LABEL, &rarest),
        None => pods.list_in(namespace),
    }
}

pub(crate) fn node_index(pod: &Pod) -> Vec<String> {
    node_name(pod).map(str::to_owned).into_iter().collect()
}

pub(crate) fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Returns true if all containers have ended for good.
pub(crate) fn is_finished(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

pub(crate) fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Returns true if the pod counts towards its owner's replicas.
pub(crate) fn is_active(pod: &Pod) -> bool {
    !is_finished(pod) && !is_terminating(pod)
}

pub(crate) fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

/// Since when the pod is ready, if it is and says so.
pub(crate) fn ready_since(pod: &Pod) -> Option<Timestamp> {
    condition(pod, "Ready")
        .filter(|condition| condition.status == "True")
        .and_then(|condition| condition.last_transition_time.as_ref())
        .map(|time| time.0)
}

/// Returns true if the pod has been ready for `min_ready_seconds`.
pub(crate) fn is_available(pod: &Pod, min_ready_seconds: i32, now: Timestamp) -> bool {
    if !is_ready(pod) {
        return false;
    }
    min_ready_seconds == 0
        || ready_since(pod)
            .is_some_and(|since| now.duration_since(since).as_secs() >= i64::from(min_ready_seconds))
}
