//! Validation of environment variables and of references to fields of the pod.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, present, text};
use crate::kinds::common::check::{complaints, named};
use crate::kinds::common::volume_source::no_steps_back;
use crate::meta_validation::{config_map_key, dns1123_label, dns1123_subdomain, qualified_name};
use crate::quantity::Quantity;
use ferrite_json::Value;

const ENV_FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
/// Fields a volume can show.
pub(super) const VOLUME_FIELDS: &[&str] =
    &["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];
/// Fields that exist, whether or not they can be used in a place.
const KNOWN_FIELDS: &[&str] = &[
    "metadata.annotations",
    "metadata.labels",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.serviceAccountName",
    "spec.schedulerName",
    "status.phase",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
const RESOURCES: &[&str] = &[
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

fn env_name(name: &str) -> Vec<String> {
    if !name.is_empty() && name.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'=') {
        Vec::new()
    } else {
        vec![
            "a valid environment variable name must consist only of printable ASCII characters other than '='"
                .to_owned(),
        ]
    }
}

pub(super) fn validate_env(variables: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, variable) in variables.iter().enumerate() {
        let path = path.index(index);
        let name = text(variable, "name");
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        } else {
            errors.extend(complaints(&path.child("name"), name, env_name(name)));
        }
        if present(variable, "valueFrom") {
            errors.extend(validate_value_from(variable, &path.child("valueFrom")));
        }
    }
    errors
}

fn validate_value_from(variable: &Value, path: &Path) -> FieldErrors {
    let source = &variable["valueFrom"];
    let mut errors = Vec::new();
    let mut given = 0;
    for kind in ["fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"] {
        let Some(reference) = source.get(kind).filter(|r| r.is_object()) else { continue };
        given += 1;
        let path = path.child(kind);
        match kind {
            "fieldRef" => errors.extend(validate_field_ref(reference, ENV_FIELDS, &path)),
            "resourceFieldRef" => errors.extend(validate_resource_ref(reference, false, &path)),
            "configMapKeyRef" | "secretKeyRef" => errors.extend(validate_key_ref(reference, &path)),
            _ => {
                errors.extend(named(reference, "key", &path, env_name));
                errors.extend(named(reference, "volumeName", &path, dns1123_label));
                match text(reference, "path") {
                    "" => errors.push(FieldError::required(&path.child("path"), "")),
                    place => errors.extend(no_steps_back(place, &path.child("path"))),
                }
            }
        }
    }
    if given == 0 {
        errors.push(FieldError::invalid(
            path,
            "",
            "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
        ));
    } else if !text(variable, "value").is_empty() {
        errors.push(FieldError::invalid(path, "", "may not be specified when `value` is not empty"));
    } else if given > 1 {
        errors.push(FieldError::invalid(path, "", "may not have more than one field specified at a time"));
    }
    errors
}

fn validate_key_ref(reference: &Value, path: &Path) -> FieldErrors {
    let name = text(reference, "name");
    let mut errors = complaints(&path.child("name"), name, dns1123_subdomain(name));
    match text(reference, "key") {
        "" => errors.push(FieldError::required(&path.child("key"), "")),
        key => errors.extend(complaints(&path.child("key"), key, config_map_key(key))),
    }
    errors
}

/// A reference to a field of the pod, `metadata.labels['key']` included.
pub(super) fn validate_field_ref(reference: &Value, allowed: &[&str], path: &Path) -> FieldErrors {
    let version = text(reference, "apiVersion");
    if version.is_empty() {
        return vec![FieldError::required(&path.child("apiVersion"), "")];
    }
    let field = text(reference, "fieldPath");
    let field_path = path.child("fieldPath");
    if field.is_empty() {
        return vec![FieldError::required(&field_path, "")];
    }
    let cannot = |why: String| {
        vec![FieldError::invalid(&field_path, field, format!("error converting fieldPath: {why}"))]
    };
    if version != "v1" {
        return cannot(format!("unsupported pod version: {version}"));
    }
    if let Some((parent, key)) = subscript(field) {
        return match parent {
            "metadata.annotations" => complaints(path, key, qualified_name(&key.to_lowercase())),
            "metadata.labels" => complaints(path, key, qualified_name(key)),
            _ => cannot(format!("field label does not support subscript: {field}")),
        };
    }
    let field = if field == "spec.host" { "spec.nodeName" } else { field };
    if !KNOWN_FIELDS.contains(&field) {
        return cannot(format!("field label not supported: {field}"));
    }
    if !allowed.contains(&field) {
        return vec![FieldError::not_supported(&field_path, field, allowed)];
    }
    Vec::new()
}

/// `metadata.labels['key']` is the field and the key.
fn subscript(field: &str) -> Option<(&str, &str)> {
    let (parent, rest) = field.strip_suffix("']")?.split_once("['")?;
    (!parent.is_empty()).then_some((parent, rest))
}

/// A reference to an amount of a container. In volumes the container must be named.
pub(super) fn validate_resource_ref(reference: &Value, volume: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let resource = text(reference, "resource");
    let pages = ["limits.hugepages-", "requests.hugepages-"].iter().any(|p| resource.starts_with(p));
    if volume && text(reference, "containerName").is_empty() {
        errors.push(FieldError::required(&path.child("containerName"), ""));
    } else if resource.is_empty() {
        errors.push(FieldError::required(&path.child("resource"), ""));
    } else if !RESOURCES.contains(&resource) && !pages {
        errors.push(FieldError::not_supported(&path.child("resource"), resource, RESOURCES));
    }
    let Some(divisor) = reference.get("divisor").and_then(Value::as_str) else { return errors };
    if Quantity::parse(divisor).is_ok_and(|d| d.is_zero()) {
        return errors;
    }
    let path = path.child("divisor");
    if resource.ends_with(".cpu") && !matches!(divisor, "1" | "1m") {
        errors.push(FieldError::invalid(
            &path,
            resource,
            "only divisor's values 1m and 1 are supported with the cpu resource",
        ));
    }
    let what = match resource.split_once('.').map(|(_, r)| r) {
        Some("memory") => "memory resource",
        Some("ephemeral-storage") => "local ephemeral storage resource",
        Some(other) if other.starts_with("hugepages-") => "hugepages resource",
        _ => return errors,
    };
    let suffix = divisor.strip_prefix('1').unwrap_or("-");
    if !["", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].contains(&suffix) {
        errors.push(FieldError::invalid(
            &path,
            resource,
            format!("only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the {what}"),
        ));
    }
    errors
}

pub(super) fn validate_env_from(sources: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let item = path.index(index);
        let prefix = text(source, "prefix");
        if !prefix.is_empty() {
            errors.extend(complaints(&item.child("prefix"), prefix, env_name(prefix)));
        }
        let mut given = 0;
        for kind in ["configMapRef", "secretRef"] {
            let Some(reference) = source.get(kind).filter(|r| r.is_object()) else { continue };
            given += 1;
            let path = item.child(kind).child("name");
            match text(reference, "name") {
                "" => errors.push(FieldError::required(&path, "")),
                name => errors.extend(complaints(&path, name, dns1123_subdomain(name))),
            }
        }
        if given == 0 {
            errors.push(FieldError::invalid(path, "", "must specify one of: `configMapRef` or `secretRef`"));
        } else if given > 1 {
            errors.push(FieldError::invalid(
                path,
                "",
                "may not have more than one field specified at a time",
            ));
        }
    }
    errors
}

/// Items of a downward API volume, or of a part of a projected one.
pub(super) fn validate_downward_items(source: &Value, path: &Path) -> FieldErrors {
    list(source, "items").iter().flat_map(|item| validate_downward_item(item, path)).collect()
}

/// As upstream: an error in an item is reported at its volume.
pub(super) fn validate_downward_item(item: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let place = text(item, "path");
    if place.is_empty() {
        errors.push(FieldError::required(&path.child("path"), ""));
    }
    errors.extend(super::volumes::local_path_of_key(place, &path.child("path")));
    match (
        item.get("fieldRef").filter(|r| r.is_object()),
        item.get("resourceFieldRef").filter(|r| r.is_object()),
    ) {
        (Some(field), None) => {
            errors.extend(validate_field_ref(field, VOLUME_FIELDS, &path.child("fieldRef")));
        }
        (None, Some(resource)) => {
            errors.extend(validate_resource_ref(resource, true, &path.child("resourceFieldRef")));
        }
        (Some(field), Some(_)) => {
            errors.extend(validate_field_ref(field, VOLUME_FIELDS, &path.child("fieldRef")));
            errors.push(FieldError::invalid(
                path,
                "resource",
                "fieldRef and resourceFieldRef can not be specified simultaneously",
            ));
        }
        (None, None) => {
            errors.push(FieldError::required(path, "one of fieldRef and resourceFieldRef is required"));
        }
    }
    errors.extend(super::volumes::validate_mode(item, "mode", path));
    errors
}
