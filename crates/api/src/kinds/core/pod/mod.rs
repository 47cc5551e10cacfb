//! Pods.

mod annotations;
mod containers;
pub mod defaults;
mod env;
pub mod gated;
mod handlers;
mod mounts;
mod os;
mod overlaps;
mod print;
pub mod resources;
mod scheduling;
mod security;
mod spec;
mod status;
mod subresource;
mod update;
pub mod volumes;
mod warnings;
mod windows;

pub use annotations::{validate_annotations, validate_profiles_match};
pub use scheduling::{validate_node_selector, validate_taint_effect, validate_tolerations};
pub use spec::validate_spec;
pub use warnings::{old_label, warnings};

use crate::field::FieldErrors;
use crate::kinds::common::access::{
    default_text, ensure_object, flag, int, keep, keep_metadata, list, list_mut, object_mut, present, text,
};
use crate::kinds::common::row::{NAME, shown, wide};
use crate::resource::{Column, Deletion, MetadataUse, Strategy};
use ferrite_json::{Value, json};
use jiff::Timestamp;

pub(in crate::kinds) struct Pods;

impl Strategy for Pods {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec")
    }

    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        (subresource == Some("status")).then_some(&[
            "spec",
            "metadata.deletionTimestamp",
            "metadata.ownerReferences",
        ])
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        defaults::default_spec(spec);
        defaults::default_pod(spec);
        default_pod_ips(ensure_object(object, "status"));
    }

    fn prepare_create(&self, object: &mut Value) {
        // As upstream: a class that a client sets stays.
        let class = match text(&object["status"], "qosClass") {
            "" => resources::qos_class(&object["spec"]).to_owned(),
            class => class.to_owned(),
        };
        let mut status = json!({"phase": "Pending", "qosClass": class});
        if !list(&object["spec"], "schedulingGates").is_empty() {
            status["conditions"] = json!([{
                "type": "PodScheduled",
                "status": "False",
                "lastProbeTime": null,
                "lastTransitionTime": object["metadata"]["creationTimestamp"],
                "reason": "SchedulingGated",
                "message": "Scheduling is blocked due to non-empty scheduling gates",
            }]);
        }
        object["status"] = status;
        merge_label_keys(object);
        annotations::fill_app_armor_fields(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        // The decision of priority admission stays unless the update sets another value.
        for key in ["priority", "preemptionPolicy"] {
            if !present(&new["spec"], key) {
                keep(ensure_object(new, "spec"), &old["spec"], key);
            }
        }
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        // Agents report status with the metadata that they last saw: ownership and deletion are not theirs. As upstream:
        // another grace period is refused.
        for key in ["ownerReferences", "deletionTimestamp"] {
            keep_metadata(new, old, key);
        }
        let class = text(&old["status"], "qosClass");
        if !class.is_empty() {
            default_text(ensure_object(new, "status"), "qosClass", class);
        }
        status::keep_observed_generations(new, old);
    }

    /// As upstream: pods are updated often, and seldom by people.
    fn warnings_on_update(&self, _new: &Value, _old: &Value) -> Vec<String> {
        Vec::new()
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        spec::validate_pod(object)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        update::validate_update(new, old)
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        update::validate_status_update(new, old)
    }

    fn prepare_subresource_update(&self, subresource: &str, new: &mut Value, old: &Value) {
        subresource::prepare(subresource, new, old);
    }

    fn validate_subresource_update(&self, subresource: &str, new: &Value, old: &Value) -> FieldErrors {
        subresource::validate(subresource, new, old)
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        warnings::pod_warnings(object)
    }

    fn trigger_fields(&self) -> &'static [&'static str] {
        &["spec.nodeName"]
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &[
            "spec.hostNetwork",
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.nominatedNodeName",
            "status.phase",
            "status.podIP",
            "status.podIPs",
        ]
    }

    fn text_fields(&self) -> &'static [&'static str] {
        &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.nominatedNodeName",
            "status.phase",
        ]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        let (spec, status) = (&object["spec"], &object["status"]);
        match field {
            "spec.hostNetwork" => flag(spec, "hostNetwork").to_string(),
            "status.podIP" => list(status, "podIPs").first().map_or("", |ip| text(ip, "ip")).to_owned(),
            // Upstream accepts this field but gives it no value.
            "status.podIPs" => String::new(),
            _ => match field.split_once('.') {
                Some(("spec", key)) => text(spec, key).to_owned(),
                Some(("status", key)) => text(status, key).to_owned(),
                _ => String::new(),
            },
        }
    }

    fn returns_deleted(&self) -> bool {
        true
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Ready"),
                shown("Status"),
                shown("Restarts"),
                shown("Age"),
                wide("IP"),
                wide("Node"),
                wide("Nominated Node"),
                wide("Readiness Gates"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        print::cells(object, now)
    }

    fn row_conditions(&self, object: &Value) -> Option<Value> {
        print::row_conditions(object)
    }

    fn deletion(&self, object: &Value, requested: Option<i64>) -> Deletion {
        grace_period(object, requested)
    }
}

/// The grace period of a deletion. A pod that is not on a node, or has ended, goes at once. Once deletion
/// has begun, a later request may only shorten the time.
fn grace_period(pod: &Value, requested: Option<i64>) -> Deletion {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let seconds = if crate::meta::is_deleting(pod) {
        let granted =
            pod.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(0);
        requested.map(at_least_one_if_negative).map_or(granted, |r| r.min(granted))
    } else if text(spec, "nodeName").is_empty() || matches!(text(status, "phase"), "Succeeded" | "Failed") {
        0
    } else {
        at_least_one_if_negative(requested.unwrap_or_else(|| int(spec, "terminationGracePeriodSeconds")))
    };
    Deletion::Graceful { seconds }
}

fn at_least_one_if_negative(seconds: i64) -> i64 {
    if seconds < 0 { 1 } else { seconds }
}

/// `podIP` is the first of `podIPs`; where an old agent sets only `podIP`, that one counts.
fn default_pod_ips(status: &mut Value) {
    let single = text(status, "podIP").to_owned();
    let first = list(status, "podIPs").first().map_or("", |ip| text(ip, "ip")).to_owned();
    if !single.is_empty() && single != first {
        status["podIPs"] = json!([{ "ip": single }]);
    } else if single.is_empty() && !first.is_empty() {
        status["podIP"] = first.into();
    }
}

/// `matchLabelKeys` and `mismatchLabelKeys` are shorthand: the pod's own values are written into the selector.
fn merge_label_keys(pod: &mut Value) {
    let Some(labels) = crate::meta::labels(pod).cloned() else { return };
    let value = |key: &Value| labels.get(key.as_str()?)?.as_str().map(str::to_owned);
    let merge = |term: &mut Value| {
        if object_mut(term, "labelSelector").is_none() {
            return;
        }
        for (keys, operator) in [("matchLabelKeys", "In"), ("mismatchLabelKeys", "NotIn")] {
            let requirements: Vec<Value> = list(term, keys)
                .iter()
                .filter_map(|key| Some(json!({"key": key, "operator": operator, "values": [value(key)?]})))
                .collect();
            if requirements.is_empty() {
                continue;
            }
            let expressions = &mut term["labelSelector"]["matchExpressions"];
            match expressions.as_array_mut() {
                Some(existing) => existing.extend(requirements),
                None => *expressions = requirements.into(),
            }
        }
    };
    let Some(spec) = object_mut(pod, "spec") else { return };
    for constraint in list_mut(spec, "topologySpreadConstraints") {
        merge(constraint);
    }
    let Some(affinity) = object_mut(spec, "affinity") else { return };
    for kind in ["podAffinity", "podAntiAffinity"] {
        let Some(affinity) = object_mut(affinity, kind) else { continue };
        for term in list_mut(affinity, "requiredDuringSchedulingIgnoredDuringExecution") {
            merge(term);
        }
        for preferred in list_mut(affinity, "preferredDuringSchedulingIgnoredDuringExecution") {
            if let Some(term) = object_mut(preferred, "podAffinityTerm") {
                merge(term);
            }
        }
    }
}

#[cfg(test)]
mod tests;
