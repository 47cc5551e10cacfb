//! The changes allowed in an existing pod.

use super::{annotations, scheduling, status};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    ensure_object, int, keep, list, list_mut, map, object, present, remove, text,
};
use crate::kinds::common::check::{IMMUTABLE, complaints, ip};
use crate::kinds::common::go;
use crate::meta_validation::{dns1123_subdomain, qualified_name};
use ferrite_json::{Map, Text, Value};

const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,\
    `spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be \
    set to 1 if it was previously negative)";

pub(super) fn validate_update(new: &Value, old: &Value) -> FieldErrors {
    let mut errors = super::spec::validate_pod_common(new, Some(old));
    errors.extend(annotations::validate_update(new, old, &Path::new("metadata").child("annotations")));
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
        // As upstream: images are validated again.
        for (index, container) in list(new, kind).iter().enumerate() {
            let (image, path) = (text(container, "image"), path.child(kind).index(index).child("image"));
            if image.is_empty() {
                errors.push(FieldError::required(&path, ""));
            }
            errors.extend(super::spec::validate_image_edges(image, &path));
        }
    }
    if let Some(error) = validate_deadline(new, old, &path.child("activeDeadlineSeconds")) {
        let removed = !present(new, "activeDeadlineSeconds");
        errors.push(error);
        if !removed {
            return errors;
        }
    }
    match validate_tolerations(new, old, &path.child("tolerations")) {
        Some(error) => errors.push(error),
        None => errors
            .extend(scheduling::validate_tolerations(list(new, "tolerations"), &path.child("tolerations"))),
    }
    errors.extend(validate_gates(new, old, &path.child("schedulingGates")));

    errors.extend(validate_gated(new, old, &path));

    let undone = with_changes_undone(new, old);
    if undone == *old {
        return errors;
    }
    let (was, is) = (go::pod_spec(old), go::pod_spec(&undone));
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
        |(key, value): (&Text, &Value)| map(new, "nodeSelector").is_some_and(|m| m.get(key) == Some(value));
    if !map(old, "nodeSelector").into_iter().flatten().all(kept) {
        errors.push(FieldError::invalid(
            &path.child("nodeSelector"),
            new["nodeSelector"].clone(),
            "only additions to spec.nodeSelector are allowed (no mutations or deletions)",
        ));
    }
    let terms = |spec: &Value| list(&spec["affinity"]["nodeAffinity"][TERMS], "nodeSelectorTerms").to_vec();
    let (is, was) = (terms(new), terms(old));
    let path = path.child("affinity").child("nodeAffinity").child(TERMS).child("nodeSelectorTerms");
    if !was.is_empty() && was.len() != is.len() {
        let given = new["affinity"]["nodeAffinity"][TERMS]["nodeSelectorTerms"].is_array();
        let shown = if given { go::compact_list("NodeSelectorTerm", &is) } else { "null".to_owned() };
        errors.push(
            FieldError::invalid(
                &path,
                is,
                "no additions/deletions to non-empty NodeSelectorTerms list are allowed",
            )
            .rendered_as(shown),
        );
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
            errors.push(
                FieldError::invalid(
                    &path.index(index),
                    is.clone(),
                    "only additions are allowed (no mutations or deletions)",
                )
                .rendered_as(go::compact("NodeSelectorTerm", is)),
            );
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
    let without_seconds = |toleration: &Value| -> Map {
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
    const WHOLE: &str = "must be a non-negative integer";
    let path = Path::new("status");
    let (is, was) = (&new["status"], &old["status"]);
    let mut errors = annotations::validate_update(new, old, &Path::new("metadata").child("annotations"));
    for (index, condition) in list(is, "conditions").iter().enumerate() {
        let path = path.child("conditions").index(index);
        let generation = int(condition, "observedGeneration");
        if generation < 0 {
            errors.push(FieldError::invalid(&path.child("observedGeneration"), generation, WHOLE));
        }
        let kind = text(condition, "type");
        errors.extend(complaints(&path.child("Type"), kind, qualified_name(kind)));
    }
    let nominated = text(is, "nominatedNodeName");
    if !nominated.is_empty() && nominated != text(was, "nominatedNodeName") {
        let path = path.child("nominatedNodeName");
        errors.extend(complaints(&path, nominated, dns1123_subdomain(nominated)));
        if !text(&old["spec"], "nodeName").is_empty() {
            errors.push(FieldError::forbidden(
                &path,
                "may not be set on pods that are already bound to a node",
            ));
        }
    }
    let generation = int(is, "observedGeneration");
    if generation < 0 {
        errors.push(FieldError::invalid(&path.child("observedGeneration"), generation, WHOLE));
    }
    let (class, before) = (text(is, "qosClass"), text(was, "qosClass"));
    if class != before {
        errors.push(FieldError::invalid(&path.child("qosClass"), class, IMMUTABLE));
    }
    for (statuses, containers) in [
        ("containerStatuses", Some("containers")),
        ("initContainerStatuses", Some("initContainers")),
        ("ephemeralContainerStatuses", None),
    ] {
        errors.extend(validate_transitions(is, was, &old["spec"], statuses, containers, &path));
    }
    errors.extend(validate_claim_statuses(new, &path.child("resourceClaimStatuses")));
    errors.extend(status::validate_extended_claim(new, &path));
    errors.extend(validate_addresses(is, "podIPs", &path));
    if let Some(first) = list(is, "hostIPs").first() {
        let address = text(first, "ip");
        if address != text(is, "hostIP") {
            let path = path.child("hostIPs").index(0).child("ip");
            errors.push(FieldError::invalid(&path, address, "must be equal to `hostIP`"));
        }
        errors.extend(validate_addresses(is, "hostIPs", &path));
    }
    errors.extend(status::validate_users(new, &path));
    errors.extend(status::validate_allocated(new, &path));
    errors
}

/// One address of each family at most.
fn validate_addresses(status: &Value, key: &str, path: &Path) -> FieldErrors {
    let (path, addresses) = (path.child(key), list(status, key));
    let mut errors = Vec::new();
    for (index, address) in addresses.iter().enumerate() {
        errors.extend(ip(text(address, "ip"), &path.index(index)).err().unwrap_or_default());
    }
    let of_v6 = addresses.iter().filter(|a| text(a, "ip").contains(':')).count();
    if addresses.len() > 1 && (addresses.len() > 2 || of_v6 != 1) {
        let shown: Vec<String> = addresses.iter().map(|a| format!("{{\"IP\":{}}}", a["ip"])).collect();
        errors.push(
            FieldError::invalid(
                &path,
                addresses.to_vec(),
                "may specify no more than one IP for each IP family",
            )
            .rendered_as(format!("[{}]", shown.join(","))),
        );
    }
    errors
}

fn validate_claim_statuses(pod: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = Vec::new();
    for (index, status) in list(&pod["status"], "resourceClaimStatuses").iter().enumerate() {
        let path = path.index(index);
        let name = text(status, "name");
        if !list(&pod["spec"], "resourceClaims").iter().any(|c| text(c, "name") == name) {
            errors.push(FieldError::invalid(
                &path.child("name"),
                name,
                "must match the name of an entry in `spec.resourceClaims`",
            ));
        }
        if names.contains(&name) {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
        names.push(name);
        if let Some(claim) = status["resourceClaimName"].as_str() {
            errors.extend(complaints(&path.child("resourceClaimName"), claim, dns1123_subdomain(claim)));
        }
    }
    errors
}

/// A container that has ended for good does not come back. Those that debug a pod never do.
fn validate_transitions(
    new: &Value,
    old: &Value,
    spec: &Value,
    statuses: &str,
    containers: Option<&str>,
    path: &Path,
) -> FieldErrors {
    let mut errors = Vec::new();
    if containers.is_some() && all_may_restart(spec) {
        return errors;
    }
    let ended = |status: &Value| status["state"]["terminated"].is_object();
    for (index, before) in list(old, statuses).iter().enumerate().filter(|(_, s)| ended(s)) {
        let name = text(before, "name");
        if !list(new, statuses).iter().any(|s| text(s, "name") == name && !ended(s)) {
            continue;
        }
        let code = int(&before["state"]["terminated"], "exitCode");
        let container = containers.and_then(|kind| list(spec, kind).iter().find(|c| text(c, "name") == name));
        if !container.is_some_and(|container| restarts(container, spec, code)) {
            errors.push(FieldError::forbidden(
                &path.child(statuses).index(index).child("state"),
                "may not be transitioned to non-terminated state",
            ));
        }
    }
    errors
}

/// Returns true if some rule restarts every container of the pod.
fn all_may_restart(spec: &Value) -> bool {
    ["containers", "initContainers"]
        .iter()
        .flat_map(|kind| list(spec, kind))
        .flat_map(|container| list(container, "restartPolicyRules"))
        .any(|rule| text(rule, "action") == "RestartAllContainers")
}

/// Returns true if a container that ended with `code` is started again: by its rules, its own policy, or
/// the pod's.
fn restarts(container: &Value, spec: &Value, code: i64) -> bool {
    let by_policy = |policy: &str| match policy {
        "Always" => true,
        "OnFailure" => code != 0,
        _ => false,
    };
    let Some(own) = container["restartPolicy"].as_str() else {
        return by_policy(text(spec, "restartPolicy"));
    };
    let matches = |rule: &&Value| {
        let codes = &rule["exitCodes"];
        let listed = list(codes, "values").iter().any(|v| v.as_i64() == Some(code));
        listed == (text(codes, "operator") == "In")
    };
    list(container, "restartPolicyRules").iter().any(|rule| matches(&rule)) || by_policy(own)
}

#[cfg(test)]
mod tests {
    use super::restarts;
    use ferrite_json::json;

    #[test]
    fn rules_come_before_policies() {
        let rule = |operator: &str| json!([{"action": "Restart", "exitCodes": {"operator": operator, "values": [3]}}]);
        for (container, pod, code, again) in [
            (json!({}), "Always", 0, true),
            (json!({}), "OnFailure", 0, false),
            (json!({}), "OnFailure", 1, true),
            (json!({}), "Never", 1, false),
            (json!({"restartPolicy": "Always"}), "Never", 0, true),
            (json!({"restartPolicy": "Never"}), "Always", 1, false),
            (json!({"restartPolicy": "Never", "restartPolicyRules": rule("In")}), "Never", 3, true),
            (json!({"restartPolicy": "Never", "restartPolicyRules": rule("In")}), "Never", 4, false),
            (json!({"restartPolicy": "Never", "restartPolicyRules": rule("NotIn")}), "Never", 4, true),
        ] {
            assert_eq!(
                restarts(&container, &json!({"restartPolicy": pod}), code),
                again,
                "{container} {pod} {code}"
            );
        }
    }
}
