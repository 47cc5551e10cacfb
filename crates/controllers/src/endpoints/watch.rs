//! Which Services a change of a pod or Service concerns.

use std::sync::Arc;

use ferrite_client::{Change, Controller, Informer, ObjectKey, WorkQueue};
use k8s_openapi::api::core::v1::{Pod, Service};

use super::addresses::is_managed;
use crate::pods::{BY_LABEL, candidates, is_ready, label_index, node_name, phase};

/// Wakes the Services that a change concerns.
pub(super) fn services_and_pods(
    kit: Controller,
    services: &Informer<Service>,
    pods: &Informer<Pod>,
) -> Controller {
    pods.add_index(BY_LABEL, label_index);
    let known = services.clone();
    kit.reconciles(services).watches(pods, move |change, queue| match change {
        Change::Added(pod) | Change::Deleted(pod) => wake(&known, queue, pod),
        Change::Updated { old, new } => {
            if shows_differently(old, new) {
                wake(&known, queue, new);
                if old.metadata.labels != new.metadata.labels {
                    wake(&known, queue, old);
                }
            }
        }
    })
}

fn wake(services: &Informer<Service>, queue: &WorkQueue<ObjectKey>, pod: &Pod) {
    for service in services.list_in(pod.metadata.namespace.as_deref().unwrap_or_default()) {
        if is_managed(&service) && selects(&service, pod) {
            queue.add(ObjectKey::of(&*service));
        }
    }
}

/// The pods that a Service selects.
pub(super) fn selected(service: &Service, pods: &Informer<Pod>) -> Vec<Arc<Pod>> {
    let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let mut found = candidates(pods, namespace, selector.into_iter().flatten());
    found.retain(|pod| selects(service, pod));
    found
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
