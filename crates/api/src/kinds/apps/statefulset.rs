//! StatefulSets.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, default_field, default_text, ensure_object, int, keep, list, list_mut, map, object,
    object_mut, present, remove, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{at_most_whole, int_or_percent, is_zero_share, named_if_set, not_negative};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::kinds::common::workload;
use crate::kinds::core::persistentvolumeclaim::{default_claim_spec, validate_claim_spec};
use crate::meta_validation::dns1123_label;
use crate::resource::{Column, StatusUse, Strategy};
use crate::selector::{LabelSelector, validate_label_selector};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::BTreeSet;

/// The fields of a specification that may change.
const MUTABLE: &[&str] = &[
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
];

pub(in crate::kinds) struct StatefulSets;

impl Strategy for StatefulSets {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/template/spec")
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_text(spec, "podManagementPolicy", "OrderedReady");
        let strategy = ensure_object(spec, "updateStrategy");
        if text(strategy, "type").is_empty() {
            strategy["type"] = "RollingUpdate".into();
            ensure_object(strategy, "rollingUpdate");
        }
        if text(strategy, "type") == "RollingUpdate"
            && let Some(rolling) = object_mut(strategy, "rollingUpdate")
        {
            default_field(rolling, "partition", 0);
        }
        let retention = ensure_object(spec, "persistentVolumeClaimRetentionPolicy");
        default_text(retention, "whenDeleted", "Retain");
        default_text(retention, "whenScaled", "Retain");
        default_field(spec, "replicas", 1);
        default_field(spec, "revisionHistoryLimit", 10);
        workload::default_template(spec);
        for claim in list_mut(spec, "volumeClaimTemplates").filter(|c| c.is_object()) {
            claim["apiVersion"] = "v1".into();
            claim["kind"] = "PersistentVolumeClaim".into();
            default_claim_spec(ensure_object(claim, "spec"));
            default_text(ensure_object(claim, "status"), "phase", "Pending");
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
        drop_disabled_fields(object, None);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        drop_disabled_fields(new, Some(old));
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_spec(&object["spec"], true, &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = validate_spec(&new["spec"], false, &Path::new("spec"));
        let mut kept = new["spec"].clone();
        for key in MUTABLE {
            keep(&mut kept, &old["spec"], key);
        }
        // Of a claim's status only its phase is ever written here.
        let claims = |spec: &Value| -> Vec<Value> {
            list(spec, "volumeClaimTemplates").iter().map(|c| json!([c["metadata"], c["spec"]])).collect()
        };
        let same = claims(&kept) == claims(&old["spec"]);
        keep(&mut kept, &old["spec"], "volumeClaimTemplates");
        if !same || kept != old["spec"] {
            errors.push(FieldError::forbidden(
                &Path::new("spec"),
                "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', \
                 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and \
                 'minReadySeconds' are forbidden",
            ));
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        const COUNTS: &[&str] = &[
            "replicas",
            "readyReplicas",
            "currentReplicas",
            "updatedReplicas",
            "availableReplicas",
            "observedGeneration",
            "collisionCount",
        ];
        let status = &new["status"];
        let mut errors = workload::validate_counts(status, COUNTS, &COUNTS[1..5], "status.readyReplicas");
        errors.extend(workload::validate_collisions(status, &old["status"]));
        errors
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        dns1123_label(name)
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        let spec = &object["spec"];
        let mut warnings = workload::template_warnings(&spec["template"], "spec.template");
        if spec["revisionHistoryLimit"].as_i64().is_some_and(|limit| limit < 0) {
            warnings.push(
                "spec.revisionHistoryLimit: a negative value retains all historical revisions; a value >= 0 is \
                 recommended"
                    .to_owned(),
            );
        }
        warnings
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Ready"), shown("Age"), wide("Containers"), wide("Images")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let [names, images] = cell::containers(&spec["template"]);
        vec![
            cell::name(object),
            format!("{}/{}", int(status, "readyReplicas"), int(spec, "replicas")).into(),
            cell::age(object, now),
            names,
            images,
        ]
    }
}

/// Drops `maxUnavailable`, which upstream ignores unless its feature gate is on, from objects that did not have it.
fn drop_disabled_fields(new: &mut Value, old: Option<&Value>) {
    let in_use =
        old.is_some_and(|old| present(&old["spec"]["updateStrategy"]["rollingUpdate"], "maxUnavailable"));
    if !in_use && let Some(rolling) = new.pointer_mut("/spec/updateStrategy/rollingUpdate") {
        remove(rolling, "maxUnavailable");
    }
}

/// The template as its pods will be: with the claims made for each of them, and named by the controller.
fn as_made(spec: &Value) -> Value {
    let mut template = spec["template"].clone();
    // Of claims of one name the pods have one.
    let claims: BTreeSet<&str> =
        list(spec, "volumeClaimTemplates").iter().map(|claim| text(&claim["metadata"], "name")).collect();
    let Some(pod) = object_mut(&mut template, "spec") else { return template };
    remove(pod, "hostname");
    remove(pod, "subdomain");
    if !claims.is_empty() {
        let others = list(pod, "volumes").iter().filter(|volume| !claims.contains(&text(volume, "name")));
        let made =
            claims.iter().map(|name| json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
        let volumes: Vec<Value> = made.chain(others.cloned()).collect();
        pod["volumes"] = volumes.into();
    }
    template
}

/// Immutable fields are validated only if the object is `new`.
fn validate_spec(spec: &Value, new: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    match text(spec, "podManagementPolicy") {
        "OrderedReady" | "Parallel" => {}
        "" => errors.push(FieldError::required(&path.child("podManagementPolicy"), "")),
        other => errors.push(FieldError::invalid(
            &path.child("podManagementPolicy"),
            other,
            "must be 'OrderedReady' or 'Parallel'",
        )),
    }
    errors.extend(validate_strategy(&spec["updateStrategy"], &path.child("updateStrategy")));
    if let Some(policy) = object(spec, "persistentVolumeClaimRetentionPolicy") {
        for key in ["whenDeleted", "whenScaled"] {
            let when = text(policy, key);
            if !matches!(when, "Retain" | "Delete") {
                let path = path.child("persistentVolumeClaimRetentionPolicy").child(key);
                errors.push(FieldError::not_supported(&path, when, &["Retain", "Delete"]));
            }
        }
    }
    for (index, claim) in list(spec, "volumeClaimTemplates").iter().enumerate().filter(|_| new) {
        let path = path.child("volumeClaimTemplates").index(index).child("spec");
        errors.extend(validate_claim_spec(&claim["spec"], &path));
    }
    errors.extend(not_negative(spec, "replicas", path));
    errors.extend(not_negative(spec, "minReadySeconds", path));
    errors.extend(not_negative(&spec["ordinals"], "start", &path.child("ordinals")));
    if new {
        errors.extend(named_if_set(spec, "serviceName", path, dns1123_label));
    }

    let (selector, selector_path) = (&spec["selector"], path.child("selector"));
    let invalid = |why: &str| {
        FieldError::invalid(&selector_path, selector.clone(), why)
            .rendered_as(workload::render_selector(selector))
    };
    if selector.is_null() {
        errors.push(FieldError::required(&selector_path, ""));
    } else {
        errors.extend(validate_label_selector(selector, &selector_path));
        let empty = map(selector, "matchLabels").is_none_or(ferrite_json::Map::is_empty)
            && list(selector, "matchExpressions").is_empty();
        if empty {
            errors.push(invalid("empty selector is invalid for statefulset"));
        }
    }
    let (template, template_path) = (&as_made(spec), path.child("template"));
    match LabelSelector::from_value(selector) {
        Err(_) => errors.push(invalid("")),
        Ok(selector) => {
            let labels = &template["metadata"]["labels"];
            if !selector.is_empty() && !selector.matches(&labels.as_object()) {
                errors.push(workload::labels_do_not_match(labels, &template_path));
            }
            errors.extend(workload::validate_pod_template(template, &template_path));
            // As upstream: the labels and annotations of pods are validated again.
            errors.extend(workload::validate_template_marks(template, &template_path));
        }
    }
    errors.extend(workload::validate_runs_for_ever(template, "StatefulSet", &template_path));
    errors
}

fn validate_strategy(strategy: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let rolling = object(strategy, "rollingUpdate");
    match (text(strategy, "type"), rolling) {
        ("", _) => errors.push(FieldError::required(path, "")),
        ("OnDelete", Some(rolling)) => errors.push(
            FieldError::invalid(
                &path.child("rollingUpdate"),
                rolling.clone(),
                "only allowed for updateStrategy 'RollingUpdate'",
            )
            .rendered_as(go::compact("RollingUpdateStatefulSetStrategy", rolling)),
        ),
        ("RollingUpdate", Some(rolling)) => {
            let path = path.child("rollingUpdate");
            errors.extend(not_negative(rolling, "partition", &path));
            if present(rolling, "maxUnavailable") {
                let (value, path) = (&rolling["maxUnavailable"], path.child("maxUnavailable"));
                errors.extend(int_or_percent(value, &path));
                if is_zero_share(value) {
                    errors.push(FieldError::invalid(&path, value.clone(), "cannot be 0"));
                }
                errors.extend(at_most_whole(value, &path));
            }
        }
        ("OnDelete" | "RollingUpdate", None) => {}
        _ => errors.push(
            FieldError::invalid(path, strategy.clone(), "must be 'RollingUpdate' or 'OnDelete'")
                .rendered_as(go::compact("StatefulSetUpdateStrategy", strategy)),
        ),
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_unavailable_is_dropped_where_it_was_not_in_use() {
        let set = |max: Value| json!({"spec": {"updateStrategy": {"rollingUpdate": {"partition": 1, "maxUnavailable": max}}}});
        let rolling = |object: &Value| object["spec"]["updateStrategy"]["rollingUpdate"].clone();
        let mut created = set(json!(2));
        StatefulSets.prepare_create(&mut created);
        assert_eq!(rolling(&created), json!({"partition": 1}));
        let mut updated = set(json!(2));
        StatefulSets.prepare_update(&mut updated, &created);
        assert_eq!(rolling(&updated), json!({"partition": 1}));
        let mut kept = set(json!(3));
        StatefulSets.prepare_update(&mut kept, &set(json!(2)));
        assert_eq!(rolling(&kept)["maxUnavailable"], 3);
    }
}
