//! What may change in a pod through its subresources: containers for debugging, and the size of the others.

use super::containers::{Context, validate_ephemeral_containers};
use super::resources::{amounts, qos_class};
use super::spec::validate_pod_common;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{ensure_object, keep, list, list_mut, object, remove, text};
use serde_json::Value;

/// The old pod with only what the subresource is about taken from the new one.
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

/// Containers for debugging come, but neither change nor go.
fn validate_ephemeral(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("spec").child("ephemeralContainers");
    let mut errors = validate_pod_common(new);
    let given = list(&new["spec"], "ephemeralContainers");
    errors.extend(validate_ephemeral_containers(given, &new["spec"], &Context::of(&new["spec"]), &path));
    let mut says = Vec::new();
    for before in list(&old["spec"], "ephemeralContainers") {
        let name = text(before, "name");
        match given.iter().find(|c| text(c, "name") == name) {
            None => says.push(format!("existing ephemeral containers {name:?} may not be removed\n")),
            Some(after) if after != before => {
                says.push(format!("existing ephemeral containers {name:?} may not be changed\n"));
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
    let mut errors = validate_pod_common(new);
    let (is, was) = (&new["spec"], &old["spec"]);
    for kind in ["containers", "initContainers"] {
        let names = |spec: &Value| -> Vec<String> {
            list(spec, kind).iter().map(|c| text(c, "name").to_owned()).collect()
        };
        let (after, before) = (names(is), names(was));
        if after.len() != before.len() {
            errors.push(FieldError::forbidden(
                &path.child(kind),
                format!("{kind} may not be added or removed on resize"),
            ));
            return errors;
        }
        for (index, (after, before)) in after.iter().zip(&before).enumerate() {
            if after != before {
                errors.push(FieldError::forbidden(
                    &path.child(kind).index(index).child("name"),
                    format!("{kind} may not be renamed or reordered on resize"),
                ));
            }
        }
    }
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
    for kind in ["containers", "initContainers"] {
        for (index, (after, before)) in list(is, kind).iter().zip(list(was, kind)).enumerate() {
            let path = path.child(kind).index(index).child("resources");
            for (amounts_kind, what) in [("limits", "resource limits"), ("requests", "resource requests")] {
                let (after, before) =
                    (amounts(&after["resources"], amounts_kind), amounts(&before["resources"], amounts_kind));
                if ["cpu", "memory"]
                    .iter()
                    .any(|name| before.contains_key(*name) && !after.contains_key(*name))
                {
                    errors.push(FieldError::forbidden(
                        &path.child(amounts_kind),
                        format!("{what} cannot be removed"),
                    ));
                }
            }
        }
    }
    if without_sizes(is) != without_sizes(was) {
        errors.push(FieldError::forbidden(&path, "only cpu and memory resources are mutable"));
    }
    errors
}

fn without_sizes(spec: &Value) -> Value {
    let mut spec = spec.clone();
    let strip = |resources: &mut Value| {
        for kind in ["limits", "requests"] {
            let Some(amounts) = resources.get_mut(kind) else { continue };
            for name in ["cpu", "memory"] {
                remove(amounts, name);
            }
            if amounts.as_object().is_some_and(serde_json::Map::is_empty) {
                remove(resources, kind);
            }
        }
    };
    for kind in ["containers", "initContainers"] {
        for container in list_mut(&mut spec, kind) {
            if object(container, "resources").is_some() {
                strip(&mut container["resources"]);
            }
            remove(container, "resizePolicy");
        }
    }
    if object(&spec, "resources").is_some() {
        strip(&mut spec["resources"]);
    }
    spec
}
