//! Validation of where containers see the pod's volumes.

use super::containers::{Context, local_path};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, list, object, present, text};
use crate::kinds::common::volume_source::no_steps_back;
use ferrite_json::Value;
use std::collections::HashSet;

/// Volumes that are mounted as file systems.
pub(super) fn validate_mounts(container: &Value, context: &Context, list_path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut places = HashSet::new();
    let devices = list(container, "volumeDevices");
    for (index, mount) in list(container, "volumeMounts").iter().enumerate() {
        let path = list_path.index(index);
        let (name, place) = (text(mount, "name"), text(mount, "mountPath"));
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        }
        if !context.volumes.contains_key(name) {
            errors.push(FieldError::not_found(&path.child("name"), name));
        }
        if place.is_empty() {
            errors.push(FieldError::required(&path.child("mountPath"), ""));
        }
        let mut wrong = |key: &str, value: &str, why: &str| {
            errors.push(FieldError::invalid(&path.child(key), value, why));
        };
        if !places.insert(place) {
            wrong("mountPath", place, "must be unique");
        }
        if devices.iter().any(|d| text(d, "name") == name) {
            wrong("name", name, "must not already exist in volumeDevices");
        }
        if devices.iter().any(|d| text(d, "devicePath") == place) {
            wrong("mountPath", place, "must not already exist as a path in volumeDevices");
        }
        // As upstream: the following errors are reported at the list, not at its entry.
        let (below, expression) = (text(mount, "subPath"), text(mount, "subPathExpr"));
        if !below.is_empty() {
            errors.extend(local_path(below, &list_path.child("subPath")));
        }
        if !expression.is_empty() {
            if !below.is_empty() {
                errors.push(FieldError::invalid(
                    &path.child("subPathExpr"),
                    expression,
                    "subPathExpr and subPath are mutually exclusive",
                ));
            }
            errors.extend(local_path(expression, &list_path.child("subPathExpr")));
        }
        errors.extend(validate_propagation(mount, container, &list_path.child("mountPropagation")));
        errors.extend(validate_recursive(mount, &list_path.child("recursiveReadOnly")));
    }
    errors
}

fn validate_propagation(mount: &Value, container: &Value, path: &Path) -> FieldErrors {
    const KINDS: &[&str] = &["Bidirectional", "HostToContainer", "None"];
    let Some(propagation) = mount.get("mountPropagation").and_then(Value::as_str) else { return Vec::new() };
    let mut errors = Vec::new();
    if !KINDS.contains(&propagation) {
        errors.push(FieldError::not_supported(path, propagation, KINDS));
    }
    if propagation == "Bidirectional" && !flag(&container["securityContext"], "privileged") {
        errors.push(FieldError::forbidden(
            path,
            "Bidirectional mount propagation is available only to privileged containers",
        ));
    }
    errors
}

fn validate_recursive(mount: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    match mount.get("recursiveReadOnly").and_then(Value::as_str) {
        None | Some("Disabled") => {}
        Some("Enabled" | "IfPossible") => {
            if !flag(mount, "readOnly") {
                errors.push(FieldError::forbidden(path, "may only be specified when readOnly is true"));
            }
            if !matches!(text(mount, "mountPropagation"), "" | "None") {
                errors.push(FieldError::forbidden(
                    path,
                    "may only be specified when mountPropagation is None or not specified",
                ));
            }
        }
        Some(other) => {
            errors.push(FieldError::not_supported(path, other, &["Disabled", "Enabled", "IfPossible"]));
        }
    }
    errors
}

/// Volumes that are given to the container as block devices.
pub(super) fn validate_devices(container: &Value, context: &Context, list_path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (mut names, mut places) = (HashSet::new(), HashSet::new());
    let mounts = list(container, "volumeMounts");
    for (index, device) in list(container, "volumeDevices").iter().enumerate() {
        let path = list_path.index(index);
        let (name, place) = (text(device, "name"), text(device, "devicePath"));
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        }
        let mut wrong = |key: &str, value: &str, why: &str| {
            errors.push(FieldError::invalid(&path.child(key), value, why));
        };
        if names.contains(name) {
            wrong("name", name, "must be unique");
        }
        let volume = context.volumes.get(name);
        let is_claim = |volume: &Value| {
            present(volume, "persistentVolumeClaim") || object(volume, "ephemeral").is_some()
        };
        if volume.is_some_and(|volume| !is_claim(volume)) {
            wrong(
                "name",
                name,
                "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
            );
        }
        if volume.is_none() {
            errors.push(FieldError::not_found(&path.child("name"), name));
        }
        if place.is_empty() {
            errors.push(FieldError::required(&path.child("devicePath"), ""));
        }
        let mut wrong = |key: &str, value: &str, why: &str| {
            errors.push(FieldError::invalid(&path.child(key), value, why));
        };
        if places.contains(place) {
            wrong("devicePath", place, "must be unique");
        }
        if no_steps_back(place, &path).is_some() {
            wrong("devicePath", place, "can not contain backsteps ('..')");
        } else {
            places.insert(place);
        }
        if mounts.iter().any(|m| text(m, "name") == name) {
            wrong("name", name, "must not already exist in volumeMounts");
        }
        if mounts.iter().any(|m| text(m, "mountPath") == place) {
            wrong("devicePath", place, "must not already exist as a path in volumeMounts");
        }
        if !name.is_empty() {
            names.insert(name);
        }
    }
    errors
}
