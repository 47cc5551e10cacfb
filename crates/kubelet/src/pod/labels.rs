//! The labels and annotations that the kubelet writes on sandboxes and containers. After a restart the
//! runtime alone shows which pod each belongs to, which spec it was made from and how it must be stopped.

use super::model::{PodContainer, PodId};
use super::pod_level::PodLevel;
use k8s_openapi::api::core::v1::{LifecycleHandler, Pod};
use std::collections::BTreeMap;

pub(crate) const POD_NAME: &str = "io.kubernetes.pod.name";
pub(crate) const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub(crate) const POD_UID: &str = "io.kubernetes.pod.uid";
pub(crate) const CONTAINER_NAME: &str = "io.kubernetes.container.name";
pub(crate) const CONTAINER_HASH: &str = "io.kubernetes.container.hash";
const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";
pub(crate) const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
pub(crate) const TERMINATION_MESSAGE_POLICY: &str = "io.kubernetes.container.terminationMessagePolicy";
pub(crate) const TERMINATION_GRACE: &str = "io.kubernetes.pod.terminationGracePeriod";
const DELETION_GRACE: &str = "io.kubernetes.pod.deletionGracePeriod";
pub(crate) const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
/// The resources a container was started with, so that a later resize is not mistaken for them.
pub(crate) const RESOURCES: &str = "io.kubernetes.container.resources";
/// The resources that the pod as a whole had then: their limits are limits of containers that have none.
pub(crate) const POD_RESOURCES: &str = "io.kubernetes.pod.resources";
const SOURCE: &str = "kubernetes.io/config.source";
const PORTS: &str = "io.kubernetes.container.ports";

fn identity(pod: &PodId) -> BTreeMap<String, String> {
    BTreeMap::from([
        (POD_NAME.to_string(), pod.name.clone()),
        (POD_NAMESPACE.to_string(), pod.namespace.clone()),
        (POD_UID.to_string(), pod.uid.clone()),
    ])
}

pub(crate) fn sandbox_labels(pod: &Pod) -> BTreeMap<String, String> {
    let mut labels = pod.metadata.labels.clone().unwrap_or_default();
    labels.extend(identity(&PodId::of(pod)));
    labels
}

/// True for a pod of a file or a URL. An object of the API has a version, and its author cannot pass it off as such a pod.
pub(crate) fn is_static(pod: &Pod) -> bool {
    let source = pod.metadata.annotations.as_ref().and_then(|annotations| annotations.get(SOURCE));
    pod.metadata.resource_version.is_none() && source.is_some_and(|source| source != "api")
}

pub(crate) fn sandbox_annotations(pod: &Pod) -> BTreeMap<String, String> {
    let mut annotations = pod.metadata.annotations.clone().unwrap_or_default();
    if !is_static(pod) {
        annotations.insert(SOURCE.into(), "api".into());
    }
    annotations.insert(TERMINATION_GRACE.into(), termination_grace(pod).to_string());
    annotations
}

pub(crate) fn container_labels(pod: &PodId, container: &PodContainer) -> BTreeMap<String, String> {
    let mut labels = identity(pod);
    labels.insert(CONTAINER_NAME.into(), container.name().to_string());
    labels
}

pub(crate) fn container_annotations(
    pod: &Pod,
    container: &PodContainer,
    restarts: u32,
) -> BTreeMap<String, String> {
    let spec = &container.spec;
    let mut annotations = BTreeMap::from([
        (CONTAINER_HASH.to_string(), container_hash(container)),
        (RESTART_COUNT.to_string(), restarts.to_string()),
        (TERMINATION_MESSAGE_PATH.to_string(), spec.termination_message_path.clone().unwrap_or_default()),
        (TERMINATION_MESSAGE_POLICY.to_string(), spec.termination_message_policy.clone().unwrap_or_default()),
        (TERMINATION_GRACE.to_string(), termination_grace(pod).to_string()),
    ]);
    if let Some(grace) = pod.metadata.deletion_grace_period_seconds {
        annotations.insert(DELETION_GRACE.into(), grace.to_string());
    }
    let resources = spec.resources.clone().unwrap_or_default();
    if let Ok(json) = ferrite_json::to_string(&resources) {
        annotations.insert(RESOURCES.into(), json);
    }
    if let Ok(json) = ferrite_json::to_string(&PodLevel::of(pod)) {
        annotations.insert(POD_RESOURCES.into(), json);
    }
    let hook = spec.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref());
    if let Some(json) = hook.and_then(|h| ferrite_json::to_string(h).ok()) {
        annotations.insert(PRE_STOP.into(), json);
    }
    if let Some(json) = spec.ports.as_ref().and_then(|p| ferrite_json::to_string(p).ok()) {
        annotations.insert(PORTS.into(), json);
    }
    annotations
}

/// The preStop hook a container was created with, for pods the API no longer knows.
pub(crate) fn pre_stop_hook(annotations: &BTreeMap<String, String>) -> Option<LifecycleHandler> {
    ferrite_json::from_str(annotations.get(PRE_STOP)?).ok()
}

pub(crate) fn termination_grace(pod: &Pod) -> i64 {
    pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds).unwrap_or(30).max(0)
}

/// Changes exactly when the container must be replaced: as upstream, its name and image and nothing else
/// (every other mutable field is applied in place or not at all).
pub(crate) fn container_hash(container: &PodContainer) -> String {
    let mut hash: u32 = 0x811c_9dc5;
    let image = container.spec.image.as_deref().unwrap_or_default();
    for byte in container.name().bytes().chain([0]).chain(image.bytes()) {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    format!("{hash:x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pods_without_an_object_keep_their_source() {
        let source = |version: Option<&str>, source: Option<&str>| {
            let mut pod = Pod::default();
            pod.metadata.resource_version = version.map(str::to_owned);
            pod.metadata.annotations = source.map(|source| [(SOURCE.to_owned(), source.to_owned())].into());
            let source = sandbox_annotations(&pod).remove(SOURCE).unwrap();
            assert_eq!(is_static(&pod), source != "api");
            source
        };
        assert_eq!(source(None, Some("file")), "file");
        assert_eq!(source(Some("7"), Some("file")), "api", "the author of an object wrote it");
        assert_eq!(source(Some("7"), None), "api");
        assert_eq!(source(None, None), "api");
    }
}
