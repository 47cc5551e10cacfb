//! Validation of containers.

use super::resources::validate_resources;
use super::security;
use super::spec::validate_image_edges;
use super::{env, handlers, mounts};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, present, text};
use crate::kinds::common::check::{PROTOCOLS, complaints, one_of, port};
use crate::kinds::common::volume_source::no_steps_back;
use crate::meta_validation::{dns1123_label, port_name};
use ferrite_json::Value;
use std::collections::{HashMap, HashSet};

/// The pod's settings for validating its containers.
pub(super) struct Context<'a> {
    pub volumes: HashMap<&'a str, &'a Value>,
    /// The pod's own restart policy.
    pub restart_policy: &'a str,
    /// The grace period of the pod.
    pub grace: Option<i64>,
    pub claims: HashSet<&'a str>,
    /// True if the pod uses the host's user namespace.
    pub host_users: bool,
}

impl<'a> Context<'a> {
    /// The inputs from a specification for validating its containers.
    pub(super) fn of(spec: &'a Value) -> Self {
        let names =
            |key: &str| list(spec, key).iter().map(|v| text(v, "name")).filter(|n| !n.is_empty()).collect();
        Self {
            volumes: list(spec, "volumes").iter().map(|v| (text(v, "name"), v)).collect(),
            restart_policy: text(spec, "restartPolicy"),
            grace: spec["terminationGracePeriodSeconds"].as_i64(),
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
    const WITHOUT: [&str; 9] = [
        "ports",
        "resources",
        "resizePolicy",
        "restartPolicy",
        "restartPolicyRules",
        "livenessProbe",
        "readinessProbe",
        "startupProbe",
        "lifecycle",
    ];
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
        errors.extend(validate_image_edges(text(container, "image"), &path.child("image")));
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
            let empty = match &container[key] {
                Value::Object(fields) => key == "resources" && fields.is_empty(),
                Value::Array(entries) => entries.is_empty(),
                other => other.is_null(),
            };
            if !empty {
                without(key);
            }
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
        errors.extend(handlers::validate_lifecycle(container, context.grace, &path.child("lifecycle")));
        errors.extend(handlers::validate_probes(container, &path));
        errors.extend(validate_restart_policy(container, &path));
    }
    errors.extend(host_port_conflicts(containers, path));
    errors
}

pub(super) fn validate_init_containers(
    containers: &[Value],
    regular: &[Value],
    context: &Context,
    list_path: &Path,
) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names: HashSet<&str> = regular.iter().map(|c| text(c, "name")).collect();
    for (index, container) in containers.iter().enumerate() {
        let path = list_path.index(index);
        errors.extend(validate_common(container, context, &path));
        errors.extend(validate_restart_policy(container, &path));
        let name = text(container, "name");
        if !names.insert(name) && !name.is_empty() {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
        errors.extend(host_port_conflicts(std::slice::from_ref(container), list_path));
        if text(container, "restartPolicy") == "Always" {
            errors.extend(handlers::validate_lifecycle(container, context.grace, &path.child("lifecycle")));
            errors.extend(handlers::validate_probes(container, &path));
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
        for (index, policy) in list(container, "resizePolicy").iter().enumerate() {
            if text(policy, "restartPolicy") == "RestartContainer" {
                errors.push(FieldError::invalid(
                    &path.child("resizePolicy").index(index).child("restartPolicy"),
                    "RestartContainer",
                    "must not be set to 'RestartContainer' for non-sidecar initContainers",
                ));
            }
        }
    }
    errors
}

/// When a container is restarted, and the exit codes that decide otherwise.
fn validate_restart_policy(container: &Value, path: &Path) -> FieldErrors {
    const POLICIES: &[&str] = &["Always", "Never", "OnFailure"];
    const ACTIONS: &[&str] = &["Restart", "RestartAllContainers"];
    const OPERATORS: &[&str] = &["In", "NotIn"];
    const RULES_MAX: usize = 20;
    const CODES_MAX: usize = 255;
    let mut errors = Vec::new();
    let rules = list(container, "restartPolicyRules");
    match container.get("restartPolicy").and_then(Value::as_str) {
        None if rules.is_empty() => {}
        None => errors.push(FieldError::required(
            &path.child("restartPolicy"),
            "must specify restartPolicy when restart rules are used",
        )),
        Some(policy) if !POLICIES.contains(&policy) => {
            errors.push(FieldError::not_supported(&path.child("restartPolicy"), policy, POLICIES));
        }
        Some(_) => {}
    }
    let path = path.child("restartPolicyRules");
    if rules.len() > RULES_MAX {
        errors.push(FieldError::too_many(&path, rules.len(), RULES_MAX));
    }
    for (index, rule) in rules.iter().enumerate() {
        let path = path.index(index);
        let action = text(rule, "action");
        if !ACTIONS.contains(&action) {
            errors.push(FieldError::not_supported(&path.child("action"), action, ACTIONS));
        }
        let path = path.child("exitCodes");
        let Some(codes) = rule.get("exitCodes").filter(|c| c.is_object()) else {
            errors.push(FieldError::required(&path, "must be specified"));
            continue;
        };
        let operator = text(codes, "operator");
        if !OPERATORS.contains(&operator) {
            errors.push(FieldError::not_supported(&path.child("operator"), operator, OPERATORS));
        }
        let values = list(codes, "values").len();
        if values > CODES_MAX {
            errors.push(FieldError::too_many(&path.child("values"), values, CODES_MAX));
        }
    }
    errors
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
    errors.extend(one_of(container, "terminationMessagePolicy", path, &["File", "FallbackToLogsOnError"]));
    errors.extend(validate_ports(list(container, "ports"), &path.child("ports")));
    errors.extend(env::validate_env(list(container, "env"), &path.child("env")));
    errors.extend(env::validate_env_from(list(container, "envFrom"), &path.child("envFrom")));
    errors.extend(mounts::validate_mounts(container, context, &path.child("volumeMounts")));
    errors.extend(mounts::validate_devices(container, context, &path.child("volumeDevices")));
    errors.extend(one_of(container, "imagePullPolicy", path, &["Always", "IfNotPresent", "Never"]));
    errors.extend(validate_resources(&container["resources"], &context.claims, &path.child("resources")));
    errors.extend(validate_resize_policy(container, context.restart_policy, &path.child("resizePolicy")));
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
        // As upstream: each init container is checked alone, and so reported as the first.
        let path = path.index(container_index);
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

/// A path below a volume's root: relative, without steps back.
pub(super) fn local_path(value: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if value.starts_with('/') {
        errors.push(FieldError::invalid(path, value, "must be a relative path"));
    }
    errors.extend(no_steps_back(value, path));
    errors
}

fn validate_resize_policy(container: &Value, pod_policy: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for (index, policy) in list(container, "resizePolicy").iter().enumerate() {
        let resource = text(policy, "resourceName");
        if !seen.insert(resource) {
            errors.push(FieldError::duplicate(&path.index(index), resource));
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
        let restart = text(policy, "restartPolicy");
        if pod_policy == "Never" && restart != "NotRequired" {
            errors.push(FieldError::invalid(
                path,
                restart,
                "must be 'NotRequired' when pod `restartPolicy` is 'Never'",
            ));
        }
    }
    errors
}
