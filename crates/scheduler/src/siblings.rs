//! The pods that default spreading keeps apart: those of the same Service or owner.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{ReplicationController, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt};

/// The owner that controls a pod, if it is of a kind that has a selector.
#[derive(Debug, Clone, Copy, Default)]
pub struct Owner<'a> {
    pub replica_set: Option<&'a ReplicaSet>,
    pub stateful_set: Option<&'a StatefulSet>,
    pub replication_controller: Option<&'a ReplicationController>,
}

/// Selects the pods of the Services and of the owner that the pod with these labels belongs to.
pub fn siblings<'a>(
    labels: &BTreeMap<String, String>,
    services: impl IntoIterator<Item = &'a Service>,
    owner: Owner<'_>,
) -> Option<Selector> {
    let mut all: Option<Selector> = None;
    for service in services {
        let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
        let selector: Selector = selector.into_iter().collect();
        if !selector.selects_all() && selector.matches(labels) {
            all.get_or_insert_default().extend(selector);
        }
    }
    let mut add = |selector: LabelSelector| {
        if let Ok(selector) = Selector::try_from(selector) {
            all.get_or_insert_default().extend(selector);
        }
    };
    if let Some(spec) = owner.replica_set.and_then(|set| set.spec.as_ref()) {
        add(spec.selector.clone());
    }
    if let Some(spec) = owner.stateful_set.and_then(|set| set.spec.as_ref()) {
        add(spec.selector.clone());
    }
    if let Some(spec) = owner.replication_controller.and_then(|controller| controller.spec.as_ref()) {
        add(LabelSelector { match_labels: spec.selector.clone(), match_expressions: None });
    }
    // As upstream: a selector that selects everything spreads nothing.
    all.filter(|selector| !selector.selects_all())
}
