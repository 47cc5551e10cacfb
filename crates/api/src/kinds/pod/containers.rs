//! Validation of containers.

use super::env;
use super::resources::validate_resources;
use super::security;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{flag, int, list, present, text};
use crate::kinds::check::{PROTOCOLS, complaints, not_negative, one_of, port, port_number_or_name};
use crate::kinds::volume_source::no_steps_back;
use crate::meta_validation::{dns1123_label, port_name};
use serde_json::Value;
use std::collections::HashSet;

/// What the containers of one pod are checked against.
pub(super) struct Context<'a> {
    pub volumes: HashSet<&'a str>,
    pub claims: HashSet<&'a str>,
    /// Whether the pod's users are the host's.
    pub host_users: bool,
}

impl<'a> Context<'a> {
    /// What the containers of a specification are checked against.
    pub(super) fn of(spec: &'a Value) -> Self {
        let names =
            |key: &str| list(spec, key).iter().map(|v| text(v, "name")).filter(|n| !n.is_empty()).collect();
        Self {
            volumes: names("volumes"),
            claims: names("resourceClaims"),
            host_users: spec["hostUsers"].as_bool().unwrap_or(true),
        }
    }
}

/// Containers that join a running pod to debug it: less may be said about them.
pub(super) fn validate_ephemeral_containers(
    containers: &[Value],
    spec: &Value,
    context: &Context,
    path: &Path,
) -> FieldErrors {
    const WITHOUT: [&str; 6] =
        ["ports", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "resizePolicy"];
    let mut errors = Vec::new();
    let others: HashSet<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|k| list(spec, k))
        .map(|c| text(c, "name"))
        .collect();
    let mut names = others.clone();
    for (index, container) in containers.iter().enumerate() {
        let path = path.index(index);
        errors.extend(validate_common(container, context, &path));
        let name = text(container, "name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
        let target = text(container, "targetContainerName");
        if !target.is_empty() && !others.contains(target) {
            errors.push(FieldError::not_found(&path.child("targetContainerName"), target));
        }
        let mut without = |key: &str| {
            errors.push(FieldError::forbidden(&path.child(key), "cannot be set for an Ephemeral Container"));
        };
        for key in WITHOUT {
            if present(container, key) {
                without(key);
            }
        }
        if container["resources"].as_object().is_some_and(|r| !r.is_empty()) {
            without("resources");
        }
        for (index, mount) in list(container, "volumeMounts").iter().enumerate() {
            for key in ["subPath", "subPathExpr"] {
                if !text(mount, key).is_empty() {
                    errors.push(FieldError::forbidden(
                        &path.child("volumeMounts").index(index).child(key),
                        "cannot be set for an Ephemeral Container",
                    ));
                }
            }
        }
    }
    errors
}

pub(super) fn validate_containers(containers: &[Value], context: &Context, path: &Path) -> FieldErrors {
    if containers.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, container) in containers.iter().enumerate() {
        let path = path.index(index);
        errors.extend(validate_common(container, context, &path));
        let name = text(container, "name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
        errors.extend(validate_lifecycle(container, &path.child("lifecycle")));
        errors.extend(validate_probes(container, &path));
        errors.extend(validate_restart_policy(container, &path));
    }
    errors.extend(host_port_conflicts(containers, path));
    errors
}

pub(super) fn validate_init_containers(
    containers: &[Value],
    regular: &[Value],
    context: &Context,
    path: &Path,
) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names: HashSet<&str> = regular.iter().map(|c| text(c, "name")).collect();
    for (index, container) in containers.iter().enumerate() {
        let path = path.index(index);
        errors.extend(validate_common(container, context, &path));
        let name = text(container, "name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
        errors.extend(host_port_conflicts(std::slice::from_ref(container), &path));
        errors.extend(validate_restart_policy(container, &path));
        if text(container, "restartPolicy") == "Always" {
            errors.extend(validate_lifecycle(container, &path.child("lifecycle")));
            errors.extend(validate_probes(container, &path));
            continue;
        }
        for key in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
            if present(container, key) {
                errors.push(FieldError::forbidden(
                    &path.child(key),
                    "may not be set for init containers without restartPolicy=Always",
                ));
            }
        }
    }
    errors
}

fn validate_restart_policy(container: &Value, path: &Path) -> Option<FieldError> {
    let policy = container.get("restartPolicy")?.as_str()?;
    let allowed = ["Always", "Never", "OnFailure"];
    (!allowed.contains(&policy))
        .then(|| FieldError::not_supported(&path.child("restartPolicy"), policy, &allowed))
}

fn validate_common(container: &Value, context: &Context, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let name = text(container, "name");
    if name.is_empty() {
        errors.push(FieldError::required(&path.child("name"), ""));
    } else {
        errors.extend(complaints(&path.child("name"), name, dns1123_label(name)));
    }
    if text(container, "image").is_empty() {
        errors.push(FieldError::required(&path.child("image"), ""));
    }
    errors.extend(one_of(container, "terminationMessagePolicy", path, &["FallbackToLogsOnError", "File"]));
    errors.extend(validate_ports(list(container, "ports"), &path.child("ports")));
    errors.extend(env::validate_env(list(container, "env"), &path.child("env")));
    errors.extend(env::validate_env_from(list(container, "envFrom"), &path.child("envFrom")));
    errors.extend(validate_mounts(container, context, path));
    errors.extend(one_of(container, "imagePullPolicy", path, &["Always", "IfNotPresent", "Never"]));
    errors.extend(validate_resources(&container["resources"], &context.claims, &path.child("resources")));
    errors.extend(validate_resize_policy(container, &path.child("resizePolicy")));
    errors.extend(security::validate_container(
        &container["securityContext"],
        context.host_users,
        &path.child("securityContext"),
    ));
    errors
}

fn validate_ports(ports: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, entry) in ports.iter().enumerate() {
        let path = path.index(index);
        let name = text(entry, "name");
        if !name.is_empty() {
            let problems = port_name(name);
            if problems.is_empty() && !names.insert(name) {
                errors.push(FieldError::duplicate(&path.child("name"), name));
            }
            errors.extend(complaints(&path.child("name"), name, problems));
        }
        match int(entry, "containerPort") {
            0 => errors.push(FieldError::required(&path.child("containerPort"), "")),
            number => errors.extend(port(number, &path.child("containerPort"))),
        }
        match int(entry, "hostPort") {
            0 => {}
            number => errors.extend(port(number, &path.child("hostPort"))),
        }
        errors.extend(one_of(entry, "protocol", &path, PROTOCOLS));
    }
    errors
}

fn host_port_conflicts(containers: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut taken = HashSet::new();
    for (container_index, container) in containers.iter().enumerate() {
        // A single init container is given with its own path.
        let path = if containers.len() == 1 && path.as_str().ends_with(']') {
            path.clone()
        } else {
            path.index(container_index)
        };
        for (index, entry) in list(container, "ports").iter().enumerate() {
            let host = int(entry, "hostPort");
            if host == 0 {
                continue;
            }
            let key = format!("{}/{}/{host}", text(entry, "protocol"), text(entry, "hostIP"));
            if taken.contains(&key) {
                errors.push(FieldError::duplicate(
                    &path.child("ports").index(index).child("hostPort"),
                    key.as_str(),
                ));
            }
            taken.insert(key);
        }
    }
    errors
}

fn validate_mounts(container: &Value, context: &Context, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut places = HashSet::new();
    let devices: HashSet<&str> =
        list(container, "volumeDevices").iter().map(|d| text(d, "devicePath")).collect();
    for (index, mount) in list(container, "volumeMounts").iter().enumerate() {
        let path = path.child("volumeMounts").index(index);
        let name = text(mount, "name");
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        }
        if !context.volumes.contains(name) {
            errors.push(FieldError::not_found(&path.child("name"), name));
        }
        let place = text(mount, "mountPath");
        if place.is_empty() {
            errors.push(FieldError::required(&path.child("mountPath"), ""));
        }
        if !places.insert(place) {
            errors.push(FieldError::invalid(&path.child("mountPath"), place, "must be unique"));
        }
        if devices.contains(place) {
            errors.push(FieldError::invalid(
                &path.child("mountPath"),
                place,
                "must not already exist as a path in volumeDevices",
            ));
        }
        for key in ["subPath", "subPathExpr"] {
            let value = text(mount, key);
            if !value.is_empty() {
                errors.extend(local_path(value, &path.child(key)));
            }
        }
        let expression = text(mount, "subPathExpr");
        if !expression.is_empty() && !text(mount, "subPath").is_empty() {
            errors.push(FieldError::invalid(
                &path.child("subPathExpr"),
                expression,
                "subPathExpr and subPath are mutually exclusive",
            ));
        }
        if let Some(propagation) = mount.get("mountPropagation").and_then(Value::as_str) {
            let path = path.child("mountPropagation");
            let allowed = ["Bidirectional", "HostToContainer", "None"];
            if !allowed.contains(&propagation) {
                errors.push(FieldError::not_supported(&path, propagation, &allowed));
            }
            if propagation == "Bidirectional" && !flag(&container["securityContext"], "privileged") {
                errors.push(FieldError::forbidden(
                    &path,
                    "Bidirectional mount propagation is available only to privileged containers",
                ));
            }
        }
    }
    errors
}

/// A path below a volume's root: relative, without steps back.
pub(super) fn local_path(value: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if value.starts_with('/') {
        errors.push(FieldError::invalid(path, value, "must be a relative path"));
    }
    errors.extend(no_steps_back(value, path));
    errors
}

fn validate_resize_policy(container: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for policy in list(container, "resizePolicy") {
        let resource = text(policy, "resourceName");
        if !seen.insert(resource) {
            errors.push(FieldError::duplicate(path, resource));
        }
        match resource {
            "cpu" | "memory" => {}
            "" => errors.push(FieldError::required(path, "")),
            other => errors.push(FieldError::not_supported(path, other, &["cpu", "memory"])),
        }
        match text(policy, "restartPolicy") {
            "NotRequired" | "RestartContainer" => {}
            "" => errors.push(FieldError::required(path, "")),
            other => {
                errors.push(FieldError::not_supported(path, other, &["NotRequired", "RestartContainer"]));
            }
        }
    }
    errors
}

fn validate_lifecycle(container: &Value, path: &Path) -> FieldErrors {
    let lifecycle = &container["lifecycle"];
    ["postStart", "preStop"]
        .iter()
        .filter(|kind| present(lifecycle, kind))
        .flat_map(|kind| {
            validate_handler(&lifecycle[*kind], &["exec", "httpGet", "tcpSocket", "sleep"], &path.child(kind))
        })
        .collect()
}

fn validate_probes(container: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let Some(probe) = container.get(kind).filter(|p| p.is_object()) else { continue };
        let path = path.child(kind);
        errors.extend(validate_handler(probe, &["exec", "httpGet", "tcpSocket", "grpc"], &path));
        for key in
            ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"]
        {
            errors.extend(not_negative(probe, key, &path));
        }
        let grace = probe["terminationGracePeriodSeconds"].as_i64();
        let grace_path = path.child("terminationGracePeriodSeconds");
        match grace {
            Some(seconds) if seconds <= 0 => {
                errors.push(FieldError::invalid(&grace_path, seconds, "must be greater than 0"));
            }
            Some(seconds) if kind == "readinessProbe" => {
                errors.push(FieldError::invalid(&grace_path, seconds, "must not be set for readinessProbes"));
            }
            _ => {}
        }
        let successes = int(probe, "successThreshold");
        if kind != "readinessProbe" && successes != 1 {
            errors.push(FieldError::invalid(&path.child("successThreshold"), successes, "must be 1"));
        }
    }
    errors
}

fn validate_handler(handler: &Value, kinds: &[&str], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut given = 0;
    for kind in kinds.iter().filter(|kind| present(handler, kind)) {
        let (action, path) = (&handler[*kind], path.child(kind));
        if given > 0 {
            errors.push(FieldError::forbidden(&path, "may not specify more than 1 handler type"));
            continue;
        }
        given += 1;
        match *kind {
            "exec" if list(action, "command").is_empty() => {
                errors.push(FieldError::required(&path.child("command"), ""));
            }
            "httpGet" => errors.extend(validate_http_get(action, &path)),
            "tcpSocket" | "grpc" => errors.extend(port_number_or_name(&action["port"], &path.child("port"))),
            _ => {}
        }
    }
    if given == 0 {
        errors.push(FieldError::required(path, "must specify a handler type"));
    }
    errors
}

fn validate_http_get(action: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if text(action, "path").is_empty() {
        errors.push(FieldError::required(&path.child("path"), ""));
    }
    errors.extend(port_number_or_name(&action["port"], &path.child("port")));
    let scheme = text(action, "scheme");
    if !matches!(scheme, "HTTP" | "HTTPS") {
        errors.push(FieldError::not_supported(&path.child("scheme"), scheme, &["HTTP", "HTTPS"]));
    }
    for header in list(action, "httpHeaders") {
        let name = text(header, "name");
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            errors.push(FieldError::invalid(
                &path.child("httpHeaders"),
                name,
                "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')",
            ));
        }
    }
    errors
}
