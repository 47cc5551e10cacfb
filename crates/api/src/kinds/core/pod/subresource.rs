//! The changes allowed through a pod's subresources: containers for debugging, and the size of the others.

use super::annotations;
use super::resources::{amounts, qos_class};
use super::spec::validate_pod_common;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    ensure_object, keep, list, list_mut, object, object_mut, present, remove, text,
};
use crate::kinds::common::go;
use ferrite_json::Value;

/// The old pod with only the subresource's fields taken from the new one.
pub(super) fn prepare(subresource: &str, new: &mut Value, old: &Value) {
    let mut pod = old.clone();
    for key in ["managedFields", "resourceVersion"] {
        keep(ensure_object(&mut pod, "metadata"), &new["metadata"], key);
    }
    match subresource {
        "ephemeralcontainers" => {
            keep(ensure_object(&mut pod, "spec"), &new["spec"], "ephemeralContainers");
        }
        "resize" => {
            let spec = ensure_object(&mut pod, "spec");
            for kind in ["containers", "initContainers"] {
                let given = list(&new["spec"], kind);
                if list(&old["spec"], kind).len() != given.len() {
                    keep(spec, &new["spec"], kind);
                    continue;
                }
                for (container, new) in list_mut(spec, kind).zip(given) {
                    if text(container, "name") == text(new, "name") {
                        keep(container, new, "resources");
                        keep(container, new, "resizePolicy");
                    } else {
                        *container = new.clone();
                    }
                }
            }
            keep(spec, &new["spec"], "resources");
        }
        _ => return,
    }
    *new = pod;
}

pub(super) fn validate(subresource: &str, new: &Value, old: &Value) -> FieldErrors {
    match subresource {
        "ephemeralcontainers" => validate_ephemeral(new, old),
        "resize" => validate_resize(new, old),
        _ => Vec::new(),
    }
}

/// Returns true if a pod is a mirror of a static pod.
fn is_static(pod: &Value) -> bool {
    present(&pod["metadata"]["annotations"], annotations::MIRROR)
}

/// The whole change is refused, whatever it is.
fn refused(why: &str) -> FieldError {
    // Upstream prints a path without a name as an index without a number.
    FieldError::forbidden(&Path::new("[]"), why)
}

/// Containers for debugging come, but neither change nor go.
fn validate_ephemeral(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("spec").child("ephemeralContainers");
    if is_static(old) {
        return vec![refused("static pods do not support ephemeral containers")];
    }
    let mut errors = validate_pod_common(new, Some(old));
    errors.extend(annotations::validate_update(new, old, &Path::new("metadata").child("annotations")));
    let given = list(&new["spec"], "ephemeralContainers");
    let mut says = Vec::new();
    for before in list(&old["spec"], "ephemeralContainers") {
        let name = text(before, "name");
        match given.iter().find(|c| text(c, "name") == name) {
            None => says.push(format!("existing ephemeral containers {name:?} may not be removed\n")),
            Some(after) if after != before => {
                let diff = go::diff(&go::ephemeral_container(before), &go::ephemeral_container(after));
                says.push(format!("existing ephemeral containers {name:?} may not be changed\n{diff}"));
            }
            Some(_) => {}
        }
    }
    errors.extend(says.into_iter().map(|why| FieldError::forbidden(&path, why)));
    errors
}

/// Cpu and memory of containers may change while the pod runs, within its class of service.
fn validate_resize(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("spec");
    if is_static(old) {
        return vec![refused("static pods cannot be resized")];
    }
    if old["spec"]["os"]["name"] == "windows" {
        return vec![refused("windows pods cannot be resized")];
    }
    let mut errors = validate_pod_common(new, Some(old));
    let (is, was) = (&new["spec"], &old["spec"]);
    let class = match text(&old["status"], "qosClass") {
        "" => qos_class(was),
        class => class,
    };
    if qos_class(is) != class {
        errors.push(FieldError::invalid(
            &path,
            class,
            "Pod QOS Class may not change as a result of resizing",
        ));
    }
    if !is_resizable(&old["status"]) {
        errors.push(FieldError::forbidden(&path, "Pod running on node without support for resize"));
    }
    errors.extend(validate_resize_of_pod(is, was, &path));
    if !list(&old["status"], "nodeAllocatableResourceClaimStatuses").is_empty() {
        errors.push(FieldError::forbidden(
            &path,
            "pods with node allocatable resource claims cannot be resized",
        ));
    }
    let moved = validate_order(is, was, &path);
    if !moved.is_empty() {
        errors.extend(moved);
        return errors;
    }
    for kind in ["initContainers", "containers"] {
        for (index, (after, before)) in list(is, kind).iter().zip(list(was, kind)).enumerate() {
            let path = path.child(kind).index(index).child("resources");
            errors.extend(removed(&after["resources"], &before["resources"], "resource", &path));
        }
    }
    for (after, before) in list(is, "containers").iter().zip(list(was, "containers")) {
        if resized(after) != without_sizes(before) {
            errors.push(FieldError::forbidden(&path, "only cpu and memory resources are mutable"));
        }
    }
    for (index, (after, before)) in
        list(is, "initContainers").iter().zip(list(was, "initContainers")).enumerate()
    {
        let path = path.child("initContainers").index(index);
        if resized(after) != without_sizes(before) {
            errors.push(FieldError::forbidden(
                &path,
                "only cpu and memory resources for init or sidecar containers are mutable",
            ));
        }
        if after != before && text(after, "restartPolicy") != "Always" {
            let restarts = |policy: &&Value| text(policy, "restartPolicy") == "RestartContainer";
            errors.extend(list(after, "resizePolicy").iter().filter(restarts).map(|_| {
                FieldError::forbidden(
                    &path,
                    "non-sidecar init containers with a resize policy of RestartContainer cannot be resized",
                )
            }));
        }
    }
    errors
}

/// A kubelet that can resize reports the resources of containers that run.
fn is_resizable(status: &Value) -> bool {
    let runs = |status: &&Value| object(&status["state"], "running").is_some();
    let running = list(status, "containerStatuses").iter().find(runs);
    running.is_none_or(|status| object(status, "resources").is_some())
}

/// Pod-level resources may grow and shrink, too.
fn validate_resize_of_pod(new: &Value, old: &Value, path: &Path) -> FieldErrors {
    let sized = |spec: &Value| {
        ["requests", "limits"].iter().any(|kind| !amounts(&spec["resources"], kind).is_empty())
    };
    if !sized(new) && !sized(old) {
        return Vec::new();
    }
    let own = path.child("resources");
    let (after, before) = (object(new, "resources"), object(old, "resources"));
    if before.is_some() && after.is_none() {
        return vec![FieldError::forbidden(&own, "pod-level resources cannot be removed")];
    }
    let mut errors = Vec::new();
    if before.is_some() {
        errors.extend(removed(&new["resources"], &old["resources"], "pod-level resource", &own));
    }
    let rest = |spec: &Value| without_sizes(spec)["resources"].clone();
    let nothing = |rest: &Value| rest.as_object().is_none_or(ferrite_json::Map::is_empty);
    if rest(new) != rest(old) && !(nothing(&rest(new)) && nothing(&rest(old))) {
        errors.push(FieldError::forbidden(path, "only cpu and memory resources are mutable at pod-level"));
    }
    errors
}

/// Containers neither come nor go nor change places.
fn validate_order(new: &Value, old: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for kind in ["containers", "initContainers"] {
        let (after, before) = (list(new, kind), list(old, kind));
        if after.len() != before.len() {
            errors.push(FieldError::forbidden(
                &path.child(kind),
                format!("{kind} may not be added or removed on resize"),
            ));
            continue;
        }
        for (index, (after, before)) in after.iter().zip(before).enumerate() {
            if text(after, "name") != text(before, "name") {
                errors.push(FieldError::forbidden(
                    &path.child(kind).index(index).child("name"),
                    format!("{kind} may not be renamed or reordered on resize"),
                ));
            }
        }
    }
    errors
}

/// Amounts change, but do not go.
fn removed(new: &Value, old: &Value, what: &str, path: &Path) -> FieldErrors {
    ["requests", "limits"]
        .into_iter()
        .filter(|kind| {
            let after = amounts(new, kind);
            amounts(old, kind).keys().any(|name| !after.contains_key(name))
        })
        .map(|kind| FieldError::forbidden(&path.child(kind), format!("{what} {kind} cannot be removed")))
        .collect()
}

/// As [`without_sizes`], for the container of a resized pod. As upstream: its claims are not compared, so that a container
/// that had some cannot be resized.
fn resized(container: &Value) -> Value {
    let mut container = without_sizes(container);
    if let Some(resources) = object_mut(&mut container, "resources") {
        remove(resources, "claims");
    }
    container
}

/// A container, or a specification, without the fields that resizing may change.
fn without_sizes(sized: &Value) -> Value {
    let mut sized = sized.clone();
    let Some(resources) = object_mut(&mut sized, "resources") else { return sized };
    for kind in ["limits", "requests"] {
        let Some(amounts) = resources.get_mut(kind) else { continue };
        for name in ["cpu", "memory"] {
            remove(amounts, name);
        }
        if amounts.as_object().is_some_and(ferrite_json::Map::is_empty) {
            remove(resources, kind);
        }
    }
    sized
}
