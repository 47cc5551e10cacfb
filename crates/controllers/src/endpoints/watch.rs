//! Which Services a change of a pod or Service concerns.

use std::sync::Arc;

use ferrite_client::{Change, Informer, ObjectKey, WorkQueue};
use k8s_openapi::api::core::v1::{Pod, Service};

use super::addresses::is_managed;
use crate::pods::{is_ready, node_name, phase};

/// Wakes the Services that a change concerns.
pub(super) fn subscribe(
    services: &Informer<Service>,
    pods: &Informer<Pod>,
    queue: &Arc<WorkQueue<ObjectKey>>,
) {
    let watching = queue.clone();
    services.subscribe(move |change| watching.add(ObjectKey::of(&**change.object())));
    let (watching, known) = (queue.clone(), services.clone());
    pods.subscribe(move |change| match change {
        Change::Added(pod) | Change::Deleted(pod) => wake(&known, &watching, pod),
        Change::Updated { old, new } => {
            if shows_differently(old, new) {
                wake(&known, &watching, new);
                if old.metadata.labels != new.metadata.labels {
                    wake(&known, &watching, old);
                }
            }
        }
    });
}

fn wake(services: &Informer<Service>, queue: &WorkQueue<ObjectKey>, pod: &Pod) {
    for service in services.list_in(pod.metadata.namespace.as_deref().unwrap_or_default()) {
        if is_managed(&service) && selects(&service, pod) {
            queue.add(ObjectKey::of(&*service));
        }
    }
}

pub(super) fn selects(service: &Service, pod: &Pod) -> bool {
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let labels = pod.metadata.labels.as_ref();
    selector
        .into_iter()
        .flatten()
        .all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
}

fn shows_differently(old: &Pod, new: &Pod) -> bool {
    let ips = |pod: &Pod| pod.status.as_ref().map(|status| (status.pod_ip.clone(), status.pod_ips.clone()));
    old.metadata.labels != new.metadata.labels
        || old.metadata.deletion_timestamp.is_some() != new.metadata.deletion_timestamp.is_some()
        || is_ready(old) != is_ready(new)
        || phase(old) != phase(new)
        || node_name(old) != node_name(new)
        || ips(old) != ips(new)
}
