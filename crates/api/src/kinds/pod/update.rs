//! What may change in a pod once it exists.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{ensure_object, int, keep, list, list_mut, map, object, present, remove, text};
use crate::kinds::check::{IMMUTABLE, complaints, ip};
use crate::kinds::go;
use crate::meta_validation::qualified_name;
use serde_json::{Map, Value};

const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,\
    `spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be \
    set to 1 if it was previously negative)";

pub(super) fn validate_update(new: &Value, old: &Value) -> FieldErrors {
    let mut errors = super::spec::validate_pod_common(new);
    let path = Path::new("spec");
    let (new, old) = (&new["spec"], &old["spec"]);
    for (kind, what) in [("containers", "containers"), ("initContainers", "containers")] {
        if list(new, kind).len() != list(old, kind).len() {
            errors.push(FieldError::forbidden(
                &path.child(kind),
                format!("pod updates may not add or remove {what}"),
            ));
            return errors;
        }
    }
    if let Some(error) = validate_deadline(new, old, &path.child("activeDeadlineSeconds")) {
        errors.push(error);
        return errors;
    }
    errors.extend(validate_tolerations(new, old, &path.child("tolerations")));
    errors.extend(validate_gates(new, old, &path.child("schedulingGates")));

    errors.extend(validate_gated(new, old, &path));

    let (was, is) = (go::pod_spec(old), go::pod_spec(&with_changes_undone(new, old)));
    if was != is {
        errors.push(FieldError::forbidden(
            &path,
            format!("pod updates may not change fields other than {UPDATABLE}\n{}", go::diff(&was, &is)),
        ));
    }
    errors
}

/// The new specification with everything that may change set back.
fn with_changes_undone(new: &Value, old: &Value) -> Value {
    let mut munged = new.clone();
    for kind in ["containers", "initContainers"] {
        for (container, old) in list_mut(&mut munged, kind).zip(list(old, kind)) {
            keep(container, old, "image");
        }
    }
    for key in ["activeDeadlineSeconds", "schedulingGates", "tolerations"] {
        keep(&mut munged, old, key);
    }
    if int(old, "terminationGracePeriodSeconds") < 0 && int(new, "terminationGracePeriodSeconds") == 1 {
        keep(&mut munged, old, "terminationGracePeriodSeconds");
    }
    if is_gated(old) {
        keep(&mut munged, old, "nodeSelector");
        undo_node_affinity(&mut munged, old);
    }
    munged
}

fn is_gated(spec: &Value) -> bool {
    !list(spec, "schedulingGates").is_empty()
}

fn undo_node_affinity(munged: &mut Value, old: &Value) {
    let before = object(&old["affinity"], "nodeAffinity");
    if object(&munged["affinity"], "nodeAffinity") == before {
        return;
    }
    match before {
        Some(before) => ensure_object(munged, "affinity")["nodeAffinity"] = before.clone(),
        None => {
            let affinity = ensure_object(munged, "affinity");
            remove(affinity, "nodeAffinity");
            if affinity.as_object().is_some_and(Map::is_empty) && !present(old, "affinity") {
                remove(munged, "affinity");
            }
        }
    }
}

/// A pod that is held back may still be narrowed to fewer nodes.
fn validate_gated(new: &Value, old: &Value, path: &Path) -> FieldErrors {
    const TERMS: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    let mut errors = Vec::new();
    if !is_gated(old) {
        return errors;
    }
    let kept =
        |(key, value): (&String, &Value)| map(new, "nodeSelector").is_some_and(|m| m.get(key) == Some(value));
    if !map(old, "nodeSelector").into_iter().flatten().all(kept) {
        errors.push(FieldError::invalid(
            &path.child("nodeSelector"),
            new["nodeSelector"].clone(),
            "additions only to spec.nodeSelector are allowed (no mutations or deletions)",
        ));
    }
    let terms = |spec: &Value| list(&spec["affinity"]["nodeAffinity"][TERMS], "nodeSelectorTerms").to_vec();
    let (is, was) = (terms(new), terms(old));
    let path = path.child("affinity").child("nodeAffinity").child(TERMS).child("nodeSelectorTerms");
    if !was.is_empty() && was.len() != is.len() {
        errors.push(FieldError::invalid(
            &path,
            is,
            "no additions/deletions to non-empty NodeSelectorTerms list are allowed",
        ));
        return errors;
    }
    for (index, (is, was)) in is.iter().zip(&was).enumerate() {
        let extends = |key: &str| {
            let (is, was) = (list(is, key), list(was, key));
            is.len() >= was.len() && is[..was.len()] == *was
        };
        let empty = list(was, "matchExpressions").is_empty() && list(was, "matchFields").is_empty();
        let grown = is != was;
        if !(extends("matchExpressions") && extends("matchFields")) || (empty && grown) {
            errors.push(FieldError::invalid(
                &path.index(index),
                is.clone(),
                "only additions are allowed (no mutations or deletions)",
            ));
        }
    }
    errors
}

/// A deadline may be set, or brought forward.
fn validate_deadline(new: &Value, old: &Value, path: &Path) -> Option<FieldError> {
    match (new["activeDeadlineSeconds"].as_i64(), old["activeDeadlineSeconds"].as_i64()) {
        (Some(new), _) if !(0..=i64::from(i32::MAX)).contains(&new) => {
            Some(FieldError::invalid(path, new, "must be between 0 and 2147483647, inclusive"))
        }
        (Some(new), Some(old)) if old < new => {
            Some(FieldError::invalid(path, new, "must be less than or equal to previous value"))
        }
        (None, Some(_)) => Some(FieldError::invalid(
            path,
            Value::Null,
            "must not update from a positive integer to nil value",
        )),
        _ => None,
    }
}

fn validate_tolerations(new: &Value, old: &Value, path: &Path) -> Option<FieldError> {
    let without_seconds = |toleration: &Value| -> Map<String, Value> {
        let mut fields = toleration.as_object().cloned().unwrap_or_default();
        fields.remove("tolerationSeconds");
        fields
    };
    let kept =
        |old: &Value| list(new, "tolerations").iter().any(|n| without_seconds(n) == without_seconds(old));
    (!list(old, "tolerations").iter().all(kept)).then(|| {
        FieldError::forbidden(path, "existing toleration can not be modified except its tolerationSeconds")
    })
}

fn validate_gates(new: &Value, old: &Value, path: &Path) -> FieldErrors {
    let known: Vec<&str> = list(old, "schedulingGates").iter().map(|g| text(g, "name")).collect();
    list(new, "schedulingGates")
        .iter()
        .map(|gate| text(gate, "name"))
        .enumerate()
        .filter(|(_, name)| !known.contains(name))
        .map(|(index, name)| {
            FieldError::forbidden(
                &path.index(index).child("name"),
                format!("only deletion is allowed, but found new scheduling gate '{name}'"),
            )
        })
        .collect()
}

pub(super) fn validate_status_update(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("status");
    let mut errors = Vec::new();
    let policy = text(&new["spec"], "restartPolicy");
    for kind in ["containerStatuses", "initContainerStatuses"] {
        errors.extend(validate_transitions(&new["status"], &old["status"], kind, policy, &path));
    }
    for (index, condition) in list(&new["status"], "conditions").iter().enumerate() {
        let kind = text(condition, "type");
        let path = path.child("conditions").index(index).child("Type");
        errors.extend(complaints(&path, kind, qualified_name(kind)));
    }
    let (class, was) = (text(&new["status"], "qosClass"), text(&old["status"], "qosClass"));
    if class != was {
        errors.push(FieldError::invalid(&path.child("qosClass"), class, IMMUTABLE));
    }
    for (index, address) in list(&new["status"], "podIPs").iter().enumerate() {
        errors.extend(ip(text(address, "ip"), &path.child("podIPs").index(index)).err().unwrap_or_default());
    }
    errors
}

/// A container that has ended for good does not come back.
fn validate_transitions(new: &Value, old: &Value, kind: &str, policy: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if policy == "Always" {
        return errors;
    }
    let ended = |status: &Value| status["state"]["terminated"].is_object();
    for (index, before) in list(old, kind).iter().enumerate().filter(|(_, s)| ended(s)) {
        if policy == "OnFailure" && int(&before["state"]["terminated"], "exitCode") != 0 {
            continue;
        }
        let after = list(new, kind).iter().find(|s| text(s, "name") == text(before, "name"));
        if after.is_some_and(|s| !ended(s)) {
            errors.push(FieldError::forbidden(
                &path.child(kind).index(index).child("state"),
                "may not be transitioned to non-terminated state",
            ));
        }
    }
    errors
}
