//! Validation of a node's reports about a pod's containers and their allocated resources.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, list_mut, map, object, object_mut, present, text};
use crate::kinds::common::check::complaints;
use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use ferrite_json::Value;
use std::collections::HashSet;

const STATUSES: [(&str, Option<&str>); 3] = [
    ("containerStatuses", Some("containers")),
    ("initContainerStatuses", Some("initContainers")),
    ("ephemeralContainerStatuses", None),
];
const ID_RANGE: &str = "must be between 0 and 2147483647, inclusive";
/// The longest message about the health of a device.
const MESSAGE_MAX: usize = 1024;

/// The users under which containers run. Only Linux has numbers for them.
pub(super) fn validate_users(pod: &Value, path: &Path) -> FieldErrors {
    let os = pod["spec"]["os"]["name"].as_str().unwrap_or("linux");
    let mut errors = Vec::new();
    for (kind, _) in STATUSES {
        for (index, status) in list(&pod["status"], kind).iter().enumerate() {
            let Some(user) = object(&status["user"], "linux") else { continue };
            let path = path.child(kind).index(index).child("user").child("linux");
            if os == "windows" {
                errors.push(FieldError::forbidden(&path, "cannot be set for a windows pod"));
                continue;
            }
            let mut check = |id: i64, path: &Path| {
                if !(0..=i64::from(i32::MAX)).contains(&id) {
                    errors.push(FieldError::invalid(path, id, ID_RANGE));
                }
            };
            for key in ["uid", "gid"] {
                check(int(user, key), &path.child(key));
            }
            let groups = list(user, "supplementalGroups").iter().filter_map(Value::as_i64);
            for (index, group) in groups.enumerate() {
                check(group, &path.child("supplementalGroups").index(index));
            }
        }
    }
    errors
}

/// The health of containers' allocated resources: they must have asked for each, once.
pub(super) fn validate_allocated(pod: &Value, path: &Path) -> FieldErrors {
    const HEALTH: &[&str] = &["Healthy", "Unhealthy", "Unknown"];
    let mut errors = Vec::new();
    for (kind, containers) in STATUSES {
        for (index, status) in list(&pod["status"], kind).iter().enumerate() {
            let path = path.child(kind).index(index).child("allocatedResourcesStatus");
            let allocated = list(status, "allocatedResourcesStatus");
            let Some(containers) = containers else {
                if !allocated.is_empty() {
                    errors.push(FieldError::forbidden(&path, "must not be specified in container status"));
                }
                continue;
            };
            let name = text(status, "name");
            let container = list(&pod["spec"], containers).iter().find(|c| text(c, "name") == name);
            for (index, resource) in allocated.iter().enumerate() {
                let path = path.index(index);
                errors.extend(container.and_then(|container| not_asked_for(container, resource, &path)));
                let mut ids = HashSet::new();
                for (index, part) in list(resource, "resources").iter().enumerate() {
                    let path = path.child("resources").index(index);
                    let (id, health) = (text(part, "resourceID"), text(part, "health"));
                    if !HEALTH.contains(&health) {
                        errors.push(FieldError::not_supported(&path.child("health"), health, HEALTH));
                    }
                    match part["message"].as_str() {
                        Some("") => errors.push(FieldError::required(
                            &path.child("message"),
                            "must be non-empty if specified",
                        )),
                        Some(message) if message.len() > MESSAGE_MAX => {
                            errors.push(FieldError::too_long(&path.child("message"), MESSAGE_MAX));
                        }
                        _ => {}
                    }
                    if !ids.insert(id) {
                        errors.push(FieldError::duplicate(&path.child("resourceID"), id));
                    }
                }
            }
        }
    }
    errors
}

fn not_asked_for(container: &Value, resource: &Value, path: &Path) -> Option<FieldError> {
    let (name, resources) = (text(resource, "name"), &container["resources"]);
    let (found, why) = match name.strip_prefix("claim:") {
        Some(claimed) => (
            list(resources, "claims").iter().any(|claim| match text(claim, "request") {
                "" => text(claim, "name") == claimed,
                request => format!("{}/{request}", text(claim, "name")) == claimed,
            }),
            "must match one of the container's resource claims in a format 'claim:<claimName>/<request>' or \
             'claim:<claimName>' if request is empty",
        ),
        None => (
            map(resources, "requests").is_some_and(|requests| requests.contains_key(name)),
            "must match one of the container's resource requests",
        ),
    };
    (!found).then(|| FieldError::invalid(&path.child("name"), name, why))
}

/// The claim that was made for the extended resources of containers.
pub(super) fn validate_extended_claim(pod: &Value, path: &Path) -> FieldErrors {
    let Some(status) = object(&pod["status"], "extendedResourceClaimStatus") else { return Vec::new() };
    let path = path.child("extendedResourceClaimStatus");
    let mut errors = Vec::new();
    let mappings = list(status, "requestMappings");
    if mappings.is_empty() {
        errors.push(FieldError::required(
            &path.child("requestMappings"),
            "at least one request mapping is required",
        ));
    }
    let container = |name: &str| {
        // As upstream: of two with one name the regular container counts.
        let all = ["containers", "initContainers"].into_iter().flat_map(|k| list(&pod["spec"], k));
        all.into_iter().find(|c| text(c, "name") == name)
    };
    let mut seen = HashSet::new();
    for (index, mapping) in mappings.iter().enumerate() {
        let own = path.child("requestMappings").index(index);
        let keys = ["containerName", "resourceName", "requestName"];
        let [name, resource, request] = keys.map(|key| text(mapping, key));
        match container(name) {
            None => errors.push(FieldError::invalid(
                &own.child("containerName"),
                name,
                "must match the name of an entry in spec.initContainers.name or spec.containers.name",
            )),
            Some(container) if !present(&container["resources"]["requests"], resource) => {
                errors.push(FieldError::invalid(
                    &own.child("resourceName"),
                    resource,
                    "must match the extended resource name of an entry in spec.initContainers.resources.requests or \
                     spec.containers.resources.requests",
                ));
            }
            Some(_) => {}
        }
        errors.extend(complaints(&path.child("requestName"), request, dns1123_label(request)));
        if !seen.insert([name, resource, request]) {
            errors.extend(keys.map(|key| FieldError::duplicate(&own.child(key), text(mapping, key))));
        }
    }
    let claim_path = path.child("resourceClaimName");
    match text(status, "resourceClaimName") {
        "" => errors.push(FieldError::required(&claim_path, "")),
        name => errors.extend(complaints(&claim_path, name, dns1123_subdomain(name))),
    }
    errors
}

/// A report without the generation it was made of does not take back the one before it.
pub(super) fn keep_observed_generations(new: &mut Value, old: &Value) {
    let was = &old["status"];
    if int(&new["status"], "observedGeneration") == 0 && int(was, "observedGeneration") != 0 {
        new["status"]["observedGeneration"] = was["observedGeneration"].clone();
    }
    // Conditions may occur more than once: they are paired in their order.
    let mut earlier: Vec<(&str, i64)> =
        list(was, "conditions").iter().map(|c| (text(c, "type"), int(c, "observedGeneration"))).collect();
    let Some(status) = object_mut(new, "status") else { return };
    for condition in list_mut(status, "conditions") {
        let Some(at) = earlier.iter().position(|(kind, _)| *kind == text(condition, "type")) else {
            continue;
        };
        let (_, generation) = earlier.remove(at);
        if int(condition, "observedGeneration") == 0 && generation != 0 {
            condition["observedGeneration"] = generation.into();
        }
    }
}
