//! What may change in a pod once it exists.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{int, keep, list, list_mut, map, text};
use crate::kinds::check::{IMMUTABLE, complaints, ip};
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

    let munged = with_changes_undone(new, old);
    if munged != *old {
        let changes = describe_changes(old, &munged);
        errors.push(FieldError::forbidden(
            &path,
            format!("pod updates may not change fields other than {UPDATABLE}\n{changes}"),
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
    // A pod that is held back may still be narrowed to fewer nodes.
    if !list(old, "schedulingGates").is_empty() {
        let before = map(old, "nodeSelector");
        let kept = |(key, value): (&String, &Value)| {
            map(new, "nodeSelector").is_some_and(|m| m.get(key) == Some(value))
        };
        if before.into_iter().flatten().all(kept) {
            keep(&mut munged, old, "nodeSelector");
        }
    }
    munged
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

/// The fields that differ, one line with what was and one with what should be.
fn describe_changes(old: &Value, new: &Value) -> String {
    fn walk(path: &Path, old: &Value, new: &Value, lines: &mut Vec<String>) {
        match (old, new) {
            _ if old == new => {}
            (Value::Object(a), Value::Object(b)) => {
                for key in a.keys().chain(b.keys().filter(|k| !a.contains_key(*k))) {
                    let (a, b) = (a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null));
                    walk(&path.child(key), a, b, lines);
                }
            }
            (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
                for (index, (a, b)) in a.iter().zip(b).enumerate() {
                    walk(&path.index(index), a, b, lines);
                }
            }
            _ => {
                lines.push(format!("- \"{}\": {old}", path.as_str()));
                lines.push(format!("+ \"{}\": {new}", path.as_str()));
            }
        }
    }
    let mut lines = Vec::new();
    walk(&Path::new("spec"), old, new, &mut lines);
    lines.join("\n") + "\n"
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
