//! Validation of a pod's specification.

use super::annotations::{validate_annotations, validate_profiles_match};
use super::containers::{
    Context, validate_containers, validate_ephemeral_containers, validate_init_containers,
};
use super::defaults::is_pod_level_resource;
use super::resources::{
    amounts, requests_of_containers, validate_named_resources, validate_resource_name, validate_resources,
};
use super::{scheduling, security, volumes, windows};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, int, list, object, present, text};
use crate::kinds::common::check::{complaints, ip, one_of};
use crate::meta_validation::{
    dns1123_label, dns1123_subdomain, qualified_name, subdomain_with_underscores, validate_labels,
};
use ferrite_json::{Value, json};
use std::collections::HashSet;

/// Validates a pod that is to be created.
pub fn validate_pod(pod: &Value) -> FieldErrors {
    let mut errors = validate_pod_common(pod, None);
    let (spec, path) = (&pod["spec"], Path::new("spec"));
    if !list(spec, "ephemeralContainers").is_empty() {
        errors.push(FieldError::forbidden(&path.child("ephemeralContainers"), "cannot be set on create"));
    }
    if !list(spec, "schedulingGates").is_empty() && !text(spec, "nodeName").is_empty() {
        errors.push(FieldError::forbidden(
            &path.child("nodeName"),
            "cannot be set until all schedulingGates have been cleared",
        ));
    }
    errors.extend(validate_profiles_match(&pod["metadata"], spec, &path));
    errors
}

/// The checks for every write of a pod: for the first time, or over an `old` one.
pub(super) fn validate_pod_common(pod: &Value, old: Option<&Value>) -> FieldErrors {
    let (metadata, spec, path) = (&pod["metadata"], &pod["spec"], Path::new("spec"));
    let annotations = Path::new("metadata").child("annotations");
    let mut errors = validate_annotations(metadata, old.map(|old| &old["metadata"]), spec, &annotations);
    errors.extend(validate_spec(spec, Some(text(metadata, "name")).filter(|n| !n.is_empty()), &path));
    if text(spec, "serviceAccountName").is_empty() {
        errors.extend(tokens_of_nobody(spec, &path.child("volumes")));
    }
    for kind in ["containers", "initContainers"] {
        for (index, container) in list(spec, kind).iter().enumerate() {
            let path = path.child(kind).index(index).child("image");
            errors.extend(validate_image_edges(text(container, "image"), &path));
        }
    }
    errors
}

/// A pod's image has no space around it. Templates may use one to say that it is not known yet.
pub(super) fn validate_image_edges(image: &str, path: &Path) -> Option<FieldError> {
    (image.trim() != image)
        .then(|| FieldError::invalid(path, image, "must not have leading or trailing whitespace"))
}

/// A token is somebody's.
fn tokens_of_nobody(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, volume) in list(spec, "volumes").iter().enumerate() {
        let path = path.index(index).child("projected").child("sources");
        for (index, source) in list(&volume["projected"], "sources").iter().enumerate() {
            if present(source, "serviceAccountToken") {
                errors.push(FieldError::forbidden(
                    &path.index(index).child("serviceAccountToken"),
                    "must not be specified when serviceAccountName is not set",
                ));
            }
        }
    }
    errors
}

/// Validates a `PodSpec` wherever it occurs; `pod` is the name of the pod it is of, if it is of one that has a name.
pub fn validate_spec(spec: &Value, pod: Option<&str>, path: &Path) -> FieldErrors {
    let (sound, mut errors) = volumes::validate_volumes(list(spec, "volumes"), pod, &path.child("volumes"));
    errors.extend(validate_resource_claims(list(spec, "resourceClaims"), &path.child("resourceClaims")));
    let context = Context { volumes: sound, ..Context::of(spec) };
    let containers = list(spec, "containers");
    errors.extend(validate_containers(containers, &context, &path.child("containers")));
    errors.extend(validate_init_containers(
        list(spec, "initContainers"),
        containers,
        &context,
        &path.child("initContainers"),
    ));
    errors.extend(validate_ephemeral_containers(
        list(spec, "ephemeralContainers"),
        spec,
        &context,
        &path.child("ephemeralContainers"),
    ));
    errors.extend(validate_pod_resources(spec, path));
    if flag(spec, "hostNetwork") {
        errors.extend(validate_host_ports(spec, path));
    }
    errors.extend(one_of(spec, "restartPolicy", path, &["Always", "OnFailure", "Never"]));
    errors.extend(one_of(
        spec,
        "dnsPolicy",
        path,
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
    ));
    errors.extend(validate_labels(&spec["nodeSelector"], &path.child("nodeSelector")));
    errors.extend(security::validate_pod(spec, &path.child("securityContext")));
    for (index, secret) in list(spec, "imagePullSecrets").iter().enumerate() {
        if text(secret, "name").is_empty() && secret.as_object().is_some_and(|s| !s.is_empty()) {
            errors.push(FieldError::required(&path.child("imagePullSecrets").index(index).child("name"), ""));
        }
    }
    errors.extend(scheduling::validate_affinity(&spec["affinity"], &path.child("affinity")));
    errors.extend(validate_dns_config(spec, &path.child("dnsConfig")));
    for (index, gate) in list(spec, "readinessGates").iter().enumerate() {
        let kind = text(gate, "conditionType");
        let path = path.child("readinessGates").index(index).child("conditionType");
        errors.extend(complaints(&path, kind, qualified_name(kind)));
    }
    errors.extend(scheduling::validate_gates(list(spec, "schedulingGates"), &path.child("schedulingGates")));
    errors.extend(scheduling::validate_spread(
        list(spec, "topologySpreadConstraints"),
        &path.child("topologySpreadConstraints"),
    ));
    errors.extend(windows::validate_host_process(spec, path));
    errors.extend(validate_host_users(spec, path));
    errors.extend(validate_hostname_override(spec, &path.child("hostnameOverride")));
    errors.extend(validate_names(spec, path));
    errors.extend(scheduling::validate_tolerations(list(spec, "tolerations"), &path.child("tolerations")));
    for (index, alias) in list(spec, "hostAliases").iter().enumerate() {
        let path = path.child("hostAliases").index(index);
        errors.extend(ip(text(alias, "ip"), &path.child("ip")).err().unwrap_or_default());
        for (index, name) in list(alias, "hostnames").iter().filter_map(Value::as_str).enumerate() {
            errors.extend(complaints(&path.child("hostnames").index(index), name, dns1123_subdomain(name)));
        }
    }
    let priority_class = text(spec, "priorityClassName");
    if !priority_class.is_empty() {
        errors.extend(complaints(
            &path.child("priorityClassName"),
            priority_class,
            dns1123_subdomain(priority_class),
        ));
    }
    if let Some(class) = spec["runtimeClassName"].as_str() {
        errors.extend(complaints(&path.child("runtimeClassName"), class, dns1123_subdomain(class)));
    }
    if present(spec, "preemptionPolicy") {
        errors.extend(one_of(spec, "preemptionPolicy", path, &["PreemptLowerPriority", "Never"]));
    }
    // As upstream: the overhead of the pod is validated like limits of a container.
    let overhead = json!({"limits": spec["overhead"]});
    errors.extend(validate_resources(&overhead, &HashSet::new(), &path.child("overhead")));
    if let Some(os) = spec.get("os").filter(|o| o.is_object()) {
        let path_of = path.child("os");
        match text(os, "name") {
            "" => errors.push(FieldError::required(&path_of.child("name"), "")),
            "linux" | "windows" => errors.extend(super::os::validate_os(spec, path)),
            name => errors.push(FieldError::not_supported(&path_of, name, &["linux", "windows"])),
        }
    }
    errors.extend(validate_file_keys(spec, path));
    errors
}

/// A name the pod's host is to have whatever it is called otherwise.
fn validate_hostname_override(spec: &Value, path: &Path) -> FieldErrors {
    const MAX: usize = 64;
    let Some(name) = spec["hostnameOverride"].as_str() else { return Vec::new() };
    let mut errors: FieldErrors = ["setHostnameAsFQDN", "hostNetwork"]
        .iter()
        .filter(|key| flag(spec, key))
        .map(|key| FieldError::forbidden(path, format!("may not be specified when {key} is true")))
        .collect();
    if name.len() > MAX {
        errors.push(FieldError::too_long(path, MAX));
    }
    errors.extend(complaints(path, name, dns1123_subdomain(name)));
    errors
}

/// Files with variables lie in volumes that live as long as the pod.
fn validate_file_keys(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for kind in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in list(spec, kind).iter().enumerate() {
            let path = path.child(kind).index(index).child("env");
            for (index, variable) in list(container, "env").iter().enumerate() {
                let Some(file) = object(&variable["valueFrom"], "fileKeyRef") else { continue };
                let path = path.index(index).child("valueFrom").child("fileKeyRef").child("volumeName");
                let name = text(file, "volumeName");
                match list(spec, "volumes").iter().find(|v| text(v, "name") == name) {
                    None => errors.push(FieldError::not_found(&path, name)),
                    Some(volume) if !present(volume, "emptyDir") => errors.push(FieldError::invalid(
                        &path,
                        name,
                        "referenced volume must be of type emptyDir",
                    )),
                    Some(_) => {}
                }
            }
        }
    }
    errors
}

/// Claims a pod's containers may use, by the name the pod gives them.
fn validate_resource_claims(claims: &[Value], path: &Path) -> FieldErrors {
    const ONE: &str = "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`";
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, claim) in claims.iter().enumerate() {
        let path = path.index(index);
        let name = text(claim, "name");
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        } else {
            match names.insert(name) {
                false => errors.push(FieldError::duplicate(&path.child("name"), name)),
                true => errors.extend(complaints(&path.child("name"), name, dns1123_label(name))),
            }
        }
        let sources = ["resourceClaimName", "resourceClaimTemplateName"];
        let given: Vec<&str> = sources.into_iter().filter(|key| present(claim, key)).collect();
        match given.len() {
            1 => {}
            0 => errors.push(
                FieldError::invalid(&path, claim.clone(), ONE)
                    .rendered_as(crate::kinds::common::go::compact("PodResourceClaim", claim)),
            ),
            _ => errors.push(
                FieldError::invalid(
                    &path,
                    claim.clone(),
                    "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified",
                )
                .rendered_as(crate::kinds::common::go::compact("PodResourceClaim", claim)),
            ),
        }
        for key in given {
            let name = text(claim, key);
            errors.extend(complaints(&path.child(key), name, dns1123_subdomain(name)));
        }
    }
    errors
}

/// Pod-level resources must not be less than those of its containers together.
fn validate_pod_resources(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let Some(whole) = spec.get("resources").filter(|r| r.is_object()) else { return errors };
    let path = path.child("resources");
    if spec["os"]["name"] == "windows" {
        return vec![FieldError::forbidden(&path, "may not be set for a windows pod")];
    }
    if !list(whole, "claims").is_empty() {
        errors.push(FieldError::forbidden(
            &path.child("claims"),
            "claims may not be set for Resources at pod-level",
        ));
    }
    errors.extend(validate_named_resources(whole, &HashSet::new(), &path, |name, path| {
        let mut errors = validate_resource_name(name, path);
        if errors.is_empty() && !is_pod_level_resource(name) {
            errors.push(FieldError::not_supported(path, name, &["cpu", "hugepages-", "memory"]));
        }
        errors
    }));
    let requested = amounts(whole, "requests");
    for (name, total) in requests_of_containers(spec) {
        if let Some(amount) = requested.get(&name).filter(|a| **a < total) {
            errors.push(FieldError::invalid(
                &path.child("requests").key(&name),
                amount.to_string(),
                format!("must be greater than or equal to aggregate container requests of {total}"),
            ));
        }
    }
    let limited = amounts(whole, "limits");
    for (index, container) in list(spec, "containers").iter().enumerate() {
        for (name, amount) in amounts(&container["resources"], "limits") {
            if let Some(limit) = limited.get(&name).filter(|l| amount > **l) {
                errors.push(FieldError::invalid(
                    // As upstream names it.
                    &path.child("containers").index(index).key(&name).child("limits"),
                    amount.to_string(),
                    format!("must be less than or equal to pod limits of {limit}"),
                ));
            }
        }
    }
    errors
}

/// On the host's network a container's ports are the host's.
fn validate_host_ports(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, container) in list(spec, "containers").iter().enumerate() {
        for (port_index, port) in list(container, "ports").iter().enumerate() {
            let host = int(port, "hostPort");
            // A template may leave it open: pods have it filled in.
            if host != 0 && host != int(port, "containerPort") {
                let path =
                    path.child("containers").index(index).child("ports").index(port_index).child("hostPort");
                errors.push(FieldError::invalid(
                    &path,
                    host,
                    "must match `containerPort` when `hostNetwork` is true",
                ));
            }
        }
    }
    errors
}

/// With users of its own a pod cannot share the host's namespaces.
fn validate_host_users(spec: &Value, path: &Path) -> FieldErrors {
    if spec["hostUsers"].as_bool() != Some(false) {
        return Vec::new();
    }
    const WHY: &str = "when `hostUsers` is false";
    // The names are upstream's.
    let mut errors: FieldErrors =
        [("hostNetwork", "hostNetwork"), ("hostPID", "HostPID"), ("hostIPC", "HostIPC")]
            .iter()
            .filter(|(key, _)| flag(spec, key))
            .map(|(_, shown)| FieldError::forbidden(&path.child(shown), WHY))
            .collect();
    for kind in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in list(spec, kind).iter().enumerate() {
            if !list(container, "volumeDevices").is_empty() {
                let path = path.child(kind).index(index).child("volumeDevices");
                errors.push(FieldError::forbidden(&path, WHY));
            }
        }
    }
    errors
}

fn validate_names(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["serviceAccountName", "nodeName"] {
        let name = text(spec, key);
        if !name.is_empty() {
            errors.extend(complaints(&path.child(key), name, dns1123_subdomain(name)));
        }
    }
    if let Some(seconds) = spec["activeDeadlineSeconds"].as_i64()
        && !(1..=i64::from(i32::MAX)).contains(&seconds)
    {
        errors.push(FieldError::invalid(
            &path.child("activeDeadlineSeconds"),
            seconds,
            "must be between 1 and 2147483647, inclusive",
        ));
    }
    for key in ["hostname", "subdomain"] {
        let name = text(spec, key);
        if !name.is_empty() {
            errors.extend(complaints(&path.child(key), name, dns1123_label(name)));
        }
    }
    errors
}

/// Most characters of a search list that a resolver reads.
const SEARCH_CHARACTERS: usize = 2048;

fn validate_dns_config(spec: &Value, path: &Path) -> FieldErrors {
    let config = spec.get("dnsConfig").filter(|c| c.is_object());
    let mut errors = Vec::new();
    if text(spec, "dnsPolicy") == "None" {
        let Some(config) = config else {
            return vec![FieldError::required(path, "must provide `dnsConfig` when `dnsPolicy` is None")];
        };
        if list(config, "nameservers").is_empty() {
            return vec![FieldError::required(
                &path.child("nameservers"),
                "must provide at least one DNS nameserver when `dnsPolicy` is None",
            )];
        }
    }
    let Some(config) = config else { return errors };
    let servers = list(config, "nameservers");
    if servers.len() > 3 {
        errors.push(FieldError::invalid(
            &path.child("nameservers"),
            servers.to_vec(),
            "must not have more than 3 nameservers",
        ));
    }
    for (index, server) in servers.iter().filter_map(Value::as_str).enumerate() {
        errors.extend(ip(server, &path.child("nameservers").index(index)).err().unwrap_or_default());
    }
    let searches = list(config, "searches");
    if searches.len() > 32 {
        errors.push(FieldError::invalid(
            &path.child("searches"),
            searches.to_vec(),
            "must not have more than 32 search paths",
        ));
    }
    let length: usize = searches.iter().filter_map(Value::as_str).map(|s| s.len() + 1).sum();
    if length > SEARCH_CHARACTERS + 1 {
        errors.push(FieldError::invalid(
            &path.child("searches"),
            searches.to_vec(),
            format!(
                "must not have more than {SEARCH_CHARACTERS} characters (including spaces) in the search list"
            ),
        ));
    }
    for (index, search) in searches.iter().filter_map(Value::as_str).enumerate() {
        // A trailing dot makes a name absolute; a single dot is the root; underscores occur in service names.
        if search != "." {
            let relative = search.strip_suffix('.').unwrap_or(search);
            let path = path.child("searches").index(index);
            errors.extend(complaints(&path, relative, subdomain_with_underscores(relative)));
        }
    }
    for (index, option) in list(config, "options").iter().enumerate() {
        if text(option, "name").is_empty() {
            errors.push(FieldError::required(&path.child("options").index(index), "must not be empty"));
        }
    }
    errors
}
