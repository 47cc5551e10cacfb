//! The fields that are forbidden for pods of one operating system.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, present};
use ferrite_json::Value;

const NOT_ON_WINDOWS: &str = "cannot be set for a windows pod";

/// Checks fields that the system named in `spec.os` excludes.
pub(super) fn validate_os(spec: &Value, path: &Path) -> FieldErrors {
    match spec["os"]["name"].as_str() {
        Some("linux") => validate_linux(spec, path),
        Some("windows") => validate_windows(spec, path),
        _ => Vec::new(),
    }
}

/// Every security context of a container, with its path.
fn contexts<'a>(spec: &'a Value, path: &Path) -> Vec<(&'a Value, Path)> {
    ["initContainers", "containers", "ephemeralContainers"]
        .iter()
        .flat_map(|kind| {
            let path = path.child(kind);
            list(spec, kind)
                .iter()
                .enumerate()
                .map(move |(index, container)| {
                    (&container["securityContext"], path.index(index).child("securityContext"))
                })
                .collect::<Vec<_>>()
        })
        .collect()
}

fn validate_linux(spec: &Value, path: &Path) -> FieldErrors {
    let pod = (&spec["securityContext"], path.child("securityContext"));
    std::iter::once(pod)
        .chain(contexts(spec, path))
        .filter(|(context, _)| present(context, "windowsOptions"))
        .map(|(_, path)| {
            FieldError::forbidden(
                &path.child("windowsOptions"),
                "windows options cannot be set for a linux pod",
            )
        })
        .collect()
}

fn validate_windows(spec: &Value, path: &Path) -> FieldErrors {
    // In upstream's order; a name without a dot belongs to the pod itself.
    const POD: &[(&str, bool)] = &[
        ("appArmorProfile", true),
        ("seLinuxOptions", true),
        ("hostUsers", false),
        ("hostPID", false),
        ("hostIPC", false),
        ("seccompProfile", true),
        ("fsGroup", true),
        ("fsGroupChangePolicy", true),
        ("sysctls", true),
        ("shareProcessNamespace", false),
        ("runAsUser", true),
        ("runAsGroup", true),
        ("supplementalGroups", true),
        ("supplementalGroupsPolicy", true),
        ("seLinuxChangePolicy", true),
    ];
    const CONTAINER: &[&str] = &[
        "appArmorProfile",
        "seLinuxOptions",
        "seccompProfile",
        "capabilities",
        "readOnlyRootFilesystem",
        "privileged",
        "allowPrivilegeEscalation",
        "procMount",
        "runAsUser",
        "runAsGroup",
    ];
    // Truth values that are not pointers upstream count when they are true, the others when they are set.
    let set = |value: &Value, key: &str| {
        present(value, key) && !(matches!(key, "hostPID" | "hostIPC") && value[key] == false)
    };
    let mut errors = Vec::new();
    for (key, in_context) in POD {
        let (value, at) = match in_context {
            true => (&spec["securityContext"], path.child("securityContext")),
            false => (spec, path.clone()),
        };
        if set(value, key) {
            errors.push(FieldError::forbidden(&at.child(key), NOT_ON_WINDOWS));
        }
    }
    for (context, path) in contexts(spec, path) {
        for key in CONTAINER.iter().filter(|key| present(context, key)) {
            errors.push(FieldError::forbidden(&path.child(key), NOT_ON_WINDOWS));
        }
    }
    errors
}
