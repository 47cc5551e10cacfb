//! Validation of the annotations that mean something to a pod.

use super::containers::local_path;
use super::scheduling::validate_tolerations;
use super::security::APP_ARMOR_MAX;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, list_mut, object, object_mut, text};
use ferrite_json::{Map, Value, json};

/// On the copy of a pod that a node's own files made.
pub(super) const MIRROR: &str = "kubernetes.io/config.mirror";
const TOLERATIONS: &str = "scheduler.alpha.kubernetes.io/tolerations";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The pod's own, and those of its containers behind a prefix.
pub(super) const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
pub(super) const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
pub(super) const APP_ARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";
const LOCALHOST: &str = "localhost/";
/// Lists of containers, in the order upstream visits them.
const KINDS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

fn of(metadata: &Value) -> Option<&Map> {
    metadata["annotations"].as_object()
}

/// The annotations of an object's metadata that are texts, as all are once they were read.
fn entries(metadata: &Value) -> impl Iterator<Item = (&str, &str)> {
    of(metadata).into_iter().flatten().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
}

/// Validates the annotations of a pod, or of the pods that a template makes, at every write. Errors that
/// were there `before` may stay if upstream added the check later.
pub fn validate_annotations(
    metadata: &Value,
    before: Option<&Value>,
    spec: &Value,
    path: &Path,
) -> FieldErrors {
    let mut errors = Vec::new();
    let annotation = |key: &str| of(metadata)?.get(key)?.as_str();
    if let Some(value) = annotation(MIRROR)
        && text(spec, "nodeName").is_empty()
    {
        errors.push(FieldError::invalid(
            &path.key(MIRROR),
            value,
            "must set spec.nodeName if mirror pod annotation is set",
        ));
    }
    if let Some(value) = annotation(TOLERATIONS).filter(|value| !value.is_empty()) {
        errors.extend(validate_written_tolerations(value, path));
    }
    let bad_cost = |metadata: &Value| {
        let cost = of(metadata).and_then(|m| m.get(DELETION_COST)).and_then(Value::as_str);
        cost.filter(|cost| !is_deletion_cost(cost)).map(str::to_owned)
    };
    if let Some(value) = bad_cost(metadata).filter(|_| before.and_then(bad_cost).is_none()) {
        errors.push(FieldError::invalid(&path.key(DELETION_COST), value, "must be a 32bit integer"));
    }
    // As upstream: the path to a seccomp annotation is written as if it were a field.
    if let Some(profile) = annotation(SECCOMP_POD) {
        errors.extend(validate_seccomp(profile, &path.child(SECCOMP_POD)));
    }
    for (key, profile) in entries(metadata).filter(|(key, _)| key.starts_with(SECCOMP_CONTAINER)) {
        errors.extend(validate_seccomp(profile, &path.child(key)));
    }
    for (key, profile) in entries(metadata) {
        let Some(container) = key.strip_prefix(APP_ARMOR) else { continue };
        if !containers(spec).any(|(c, _)| text(c, "name") == container) {
            errors.push(FieldError::invalid(&path.key(key), container, "container not found"));
        }
        if !matches!(profile, "" | "runtime/default" | "unconfined") && !profile.starts_with(LOCALHOST) {
            errors.push(FieldError::invalid(
                &path.key(key),
                profile,
                format!("invalid AppArmor profile name: {profile:?}"),
            ));
        }
    }
    errors
}

/// Annotations that decide how a pod runs stay as they were when it was made.
pub(super) fn validate_update(new: &Value, old: &Value, path: &Path) -> FieldErrors {
    let (is, was) = (&new["metadata"], &old["metadata"]);
    let value = |metadata: &Value, key: &str| of(metadata).and_then(|m| m.get(key)).cloned();
    let mut errors = Vec::new();
    for (key, before) in entries(was) {
        if value(is, key).as_ref().and_then(Value::as_str) == Some(before) {
            continue;
        }
        if key.starts_with(APP_ARMOR) {
            errors
                .push(FieldError::forbidden(&path.key(key), "may not remove or update AppArmor annotations"));
        }
        if key == MIRROR {
            errors.push(FieldError::forbidden(
                &path.key(key),
                "may not remove or update mirror pod annotation",
            ));
        }
    }
    for (key, _) in entries(is).filter(|(key, _)| value(was, key).is_none()) {
        if key.starts_with(APP_ARMOR) {
            errors.push(FieldError::forbidden(&path.key(key), "may not add AppArmor annotations"));
        }
        if key == MIRROR {
            errors.push(FieldError::forbidden(&path.key(key), "may not add mirror pod annotation"));
        }
    }
    errors.extend(validate_annotations(is, Some(was), &new["spec"], path));
    errors
}

/// A profile that is given both ways is the same both ways.
pub fn validate_profiles_match(metadata: &Value, spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let annotation = |key: &str| of(metadata)?.get(key)?.as_str();
    let of_pod = &spec["securityContext"];
    if let (Some(value), Some(profile)) = (annotation(SECCOMP_POD), object(of_pod, "seccompProfile")) {
        let path = path.child("securityContext").child("seccompProfile");
        errors.extend(mismatch(value, profile, "seccomp", &path));
    }
    for (container, place) in containers(spec) {
        let key = format!("{SECCOMP_CONTAINER}{}", text(container, "name"));
        let profile = object(&container["securityContext"], "seccompProfile");
        if let (Some(value), Some(profile)) = (annotation(&key), profile) {
            let path = place.under(path).child("securityContext").child("seccompProfile");
            errors.extend(mismatch(value, profile, "seccomp", &path));
        }
    }
    if spec["os"]["name"] == "windows" {
        return errors;
    }
    for (container, place) in containers(spec) {
        let key = format!("{APP_ARMOR}{}", text(container, "name"));
        let profile = object(&container["securityContext"], "appArmorProfile")
            .or_else(|| object(of_pod, "appArmorProfile"));
        if let (Some(value), Some(profile)) = (annotation(&key), profile) {
            let path = place.under(path).child("securityContext").child("appArmorProfile");
            errors.extend(mismatch(value, profile, "apparmor", &path));
        }
    }
    errors
}

fn mismatch(annotation: &str, profile: &Value, what: &str, path: &Path) -> Option<FieldError> {
    let is_type = match text(profile, "type") {
        "Unconfined" => annotation == "unconfined",
        "RuntimeDefault" => {
            annotation == "runtime/default" || (what == "seccomp" && annotation == "docker/default")
        }
        "Localhost" => match annotation.strip_prefix(LOCALHOST) {
            Some(file) if profile["localhostProfile"].as_str() == Some(file) => true,
            Some(_) => {
                return Some(FieldError::forbidden(
                    &path.child("localhostProfile"),
                    format!("{what} profile in annotation and field must match"),
                ));
            }
            None => false,
        },
        _ => true,
    };
    (!is_type).then(|| {
        FieldError::forbidden(&path.child("type"), format!("{what} type in annotation and field must match"))
    })
}

/// Converts an annotation to a field; none if it has no valid profile.
fn app_armor_profile(annotation: &str) -> Option<Value> {
    match annotation {
        "unconfined" => Some(json!({"type": "Unconfined"})),
        "runtime/default" => Some(json!({"type": "RuntimeDefault"})),
        other => {
            let name = other.strip_prefix(LOCALHOST)?;
            let sound = !name.is_empty() && name.trim() == name && name.len() <= APP_ARMOR_MAX;
            sound.then(|| json!({"type": "Localhost", "localhostProfile": name}))
        }
    }
}

/// Older clients say in annotations which AppArmor profile a container has: nodes read the field.
pub(super) fn fill_app_armor_fields(pod: &mut Value) {
    if pod["spec"]["os"]["name"] == "windows" {
        return;
    }
    let Some(annotations) = of(&pod["metadata"]).cloned() else { return };
    let of_pod = pod["spec"]["securityContext"]["appArmorProfile"].clone();
    let Some(spec) = object_mut(pod, "spec") else { return };
    for kind in KINDS {
        for container in list_mut(spec, kind) {
            let key = format!("{APP_ARMOR}{}", text(container, "name"));
            let Some(value) = annotations.get(&key).and_then(Value::as_str) else { continue };
            if object(&container["securityContext"], "appArmorProfile").is_some() {
                continue;
            }
            if let Some(profile) = app_armor_profile(value).filter(|profile| *profile != of_pod) {
                ensure_object(container, "securityContext")["appArmorProfile"] = profile;
            }
        }
    }
}

/// The AppArmor annotations of containers, with whether the pod's own field already says the same.
pub(super) fn app_armor_annotations<'a>(
    metadata: &'a Value,
    spec: &'a Value,
) -> impl Iterator<Item = (String, &'a Value, bool)> {
    containers(spec).filter_map(move |(container, _)| {
        let key = format!("{APP_ARMOR}{}", text(container, "name"));
        let value = of(metadata)?.get(&key)?.as_str()?;
        let of_pod = object(&spec["securityContext"], "appArmorProfile");
        let same = of_pod.is_some() && app_armor_profile(value).as_ref() == of_pod;
        Some((key, container, same))
    })
}

/// Where a container stands in a specification.
pub(super) struct Place {
    kind: &'static str,
    index: usize,
}

impl Place {
    pub(super) fn under(&self, path: &Path) -> Path {
        path.child(self.kind).index(self.index)
    }
}

/// All containers, each with where it stands.
pub(super) fn containers(spec: &Value) -> impl Iterator<Item = (&Value, Place)> {
    KINDS.into_iter().flat_map(|kind| {
        list(spec, kind).iter().enumerate().map(move |(index, container)| (container, Place { kind, index }))
    })
}

/// A number in 32 bits without a plus sign or leading zeros.
fn is_deletion_cost(value: &str) -> bool {
    value == "0" || (!value.starts_with(['+', '0']) && value.parse::<i32>().is_ok())
}

fn validate_seccomp(profile: &str, path: &Path) -> FieldErrors {
    if matches!(profile, "runtime/default" | "docker/default" | "unconfined") {
        return Vec::new();
    }
    match profile.strip_prefix(LOCALHOST) {
        Some(file) => local_path(file, path),
        None => vec![FieldError::invalid(path, profile, "must be a valid seccomp profile")],
    }
}

/// Tolerations as they were written before they were a field.
fn validate_written_tolerations(value: &str, path: &Path) -> FieldErrors {
    let wrong = |why: String| vec![FieldError::invalid(path, TOLERATIONS, why)];
    match crate::codec::json::decode_any(value.as_bytes()) {
        Err(error) => wrong(error.to_string()),
        Ok(decoded) => match decoded.value {
            Value::Array(tolerations) => validate_tolerations(&tolerations, &path.child(TOLERATIONS)),
            Value::Null => Vec::new(),
            other => {
                let found = match other {
                    Value::Object(_) => "object",
                    Value::String(_) => "string",
                    Value::Bool(_) => "bool",
                    _ => "number",
                };
                wrong(format!("json: cannot unmarshal {found} into Go value of type []core.Toleration"))
            }
        },
    }
}
