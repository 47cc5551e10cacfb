//! Validation of security contexts.

use super::windows::validate_options;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, list, present, text};
use crate::kinds::common::check::one_of_if_set;
use crate::kinds::common::go;
use ferrite_json::Value;
use std::collections::HashSet;

/// The longest path there is.
pub(super) const APP_ARMOR_MAX: usize = 4095;
const ID_RANGE: &str = "must be between 0 and 2147483647, inclusive";

fn id(context: &Value, key: &str, path: &Path) -> Option<FieldError> {
    let id = context.get(key)?.as_i64()?;
    (!(0..=i64::from(i32::MAX)).contains(&id)).then(|| FieldError::invalid(&path.child(key), id, ID_RANGE))
}

/// The security context of the pod as a whole.
pub(super) fn validate_pod(spec: &Value, path: &Path) -> FieldErrors {
    let context = &spec["securityContext"];
    let mut errors = Vec::new();
    for key in ["fsGroup", "runAsUser", "runAsGroup"] {
        errors.extend(id(context, key, path));
    }
    for (index, group) in list(context, "supplementalGroups").iter().filter_map(Value::as_i64).enumerate() {
        if !(0..=i64::from(i32::MAX)).contains(&group) {
            errors.push(FieldError::invalid(&path.child("supplementalGroups").index(index), group, ID_RANGE));
        }
    }
    if flag(spec, "shareProcessNamespace") && flag(spec, "hostPID") {
        errors.push(FieldError::invalid(
            &path.child("shareProcessNamespace"),
            true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        ));
    }
    errors.extend(validate_sysctls(spec, &path.child("sysctls")));
    errors.extend(one_of_if_set(context, "fsGroupChangePolicy", path, &["Always", "OnRootMismatch"]));
    errors.extend(validate_seccomp(context, path));
    errors.extend(validate_options(context, path));
    errors.extend(validate_app_armor(context, path));
    errors.extend(one_of_if_set(context, "supplementalGroupsPolicy", path, &["Merge", "Strict"]));
    // As upstream without the gate SELinuxMount.
    errors.extend(one_of_if_set(context, "seLinuxChangePolicy", path, &["Recursive"]));
    errors
}

/// Kernel settings that belong to a namespace a pod may share with the host.
fn shared_namespace(sysctl: &str) -> Option<&'static str> {
    const OF_IPC: &[&str] = &["kernel.shm", "kernel.msg", "fs.mqueue."];
    let name = sysctl.replace('/', ".");
    if name.starts_with("net.") {
        Some("hostNetwork")
    } else if name == "kernel.sem" || OF_IPC.iter().any(|prefix| name.starts_with(prefix)) {
        Some("hostIPC")
    } else {
        None
    }
}

fn validate_sysctls(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, sysctl) in list(&spec["securityContext"], "sysctls").iter().enumerate() {
        let path = path.index(index).child("name");
        let name = text(sysctl, "name");
        if name.is_empty() {
            errors.push(FieldError::required(&path, ""));
        } else if !is_sysctl_name(name) {
            errors.push(FieldError::invalid(
                &path,
                name,
                "must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$",
            ));
        } else if !names.insert(name) {
            errors.push(FieldError::duplicate(&path, name));
        }
        if let Some(shared) = shared_namespace(name).filter(|key| flag(spec, key)) {
            let why = format!("may not be specified when '{shared}' is true");
            errors.push(FieldError::invalid(&path, name, why));
        }
    }
    errors
}

fn is_sysctl_name(name: &str) -> bool {
    let alnum = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.len() <= 253
        && name.split(['.', '/']).all(|part| {
            part.starts_with(alnum)
                && part.ends_with(alnum)
                && part.chars().all(|c| alnum(c) || matches!(c, '-' | '_'))
        })
}

/// The security context of one container.
pub(super) fn validate_container(context: &Value, host_users: bool, path: &Path) -> FieldErrors {
    if !context.is_object() {
        return Vec::new();
    }
    let mut errors = Vec::new();
    for key in ["runAsUser", "runAsGroup"] {
        errors.extend(id(context, key, path));
    }
    errors.extend(one_of_if_set(context, "procMount", path, &["Default", "Unmasked"]));
    if host_users && text(context, "procMount") == "Unmasked" {
        errors.push(FieldError::invalid(
            &path.child("procMount"),
            "Unmasked",
            "`hostUsers` must be false to use `Unmasked`",
        ));
    }
    errors.extend(validate_seccomp(context, path));
    if present(context, "allowPrivilegeEscalation") && !flag(context, "allowPrivilegeEscalation") {
        let mut conflict = |why: &str| {
            errors.push(
                FieldError::invalid(path, context.clone(), why)
                    .rendered_as(go::compact("SecurityContext", context)),
            );
        };
        if flag(context, "privileged") {
            conflict("cannot set `allowPrivilegeEscalation` to false and `privileged` to true");
        }
        for _ in list(&context["capabilities"], "add").iter().filter(|c| *c == "CAP_SYS_ADMIN") {
            conflict("cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN");
        }
    }
    errors.extend(validate_options(context, path));
    errors.extend(validate_app_armor(context, path));
    errors
}

fn validate_seccomp(context: &Value, path: &Path) -> FieldErrors {
    let Some(profile) = context.get("seccompProfile").filter(|p| p.is_object()) else { return Vec::new() };
    let path = path.child("seccompProfile");
    let mut errors = Vec::new();
    let kind = text(profile, "type");
    errors.extend(profile_type(kind, "seccompProfile", &path.child("type")));
    let path = path.child("localhostProfile");
    match (kind, profile.get("localhostProfile").and_then(Value::as_str)) {
        ("Localhost", None) => {
            errors.push(FieldError::required(&path, "must be set when seccomp type is Localhost"));
        }
        ("Localhost", Some(file)) => errors.extend(super::containers::local_path(file, &path)),
        (_, Some(file)) => errors.push(
            FieldError::invalid(&path, profile.clone(), "can only be set when seccomp type is Localhost")
                .rendered_as(format!("{{\"Type\":{kind:?},\"LocalhostProfile\":{file:?}}}")),
        ),
        (_, None) => {}
    }
    errors
}

fn profile_type(kind: &str, what: &str, path: &Path) -> Option<FieldError> {
    const KINDS: &[&str] = &["Localhost", "RuntimeDefault", "Unconfined"];
    match kind {
        "" => Some(FieldError::required(path, format!("type is required when {what} is set"))),
        kind if !KINDS.contains(&kind) => Some(FieldError::not_supported(path, kind, KINDS)),
        _ => None,
    }
}

fn validate_app_armor(context: &Value, path: &Path) -> FieldErrors {
    let Some(profile) = context.get("appArmorProfile").filter(|p| p.is_object()) else { return Vec::new() };
    let path = path.child("appArmorProfile");
    let mut errors = Vec::new();
    let kind = text(profile, "type");
    let local = profile.get("localhostProfile").and_then(Value::as_str);
    let local_path = path.child("localhostProfile");
    const MISSING: &str = "must be set when AppArmor type is Localhost";
    match (kind, local) {
        ("Localhost", None) => errors.push(FieldError::required(&local_path, MISSING)),
        ("Localhost", Some(name)) => {
            if name.trim() != name {
                errors.push(FieldError::invalid(&local_path, name, "must not be padded with whitespace"));
            } else if name.is_empty() {
                errors.push(FieldError::required(&local_path, MISSING));
            }
            if name.len() > APP_ARMOR_MAX {
                errors.push(FieldError::too_long(&local_path, APP_ARMOR_MAX));
            }
        }
        ("RuntimeDefault" | "Unconfined", Some(name)) => errors.push(FieldError::invalid(
            &local_path,
            name,
            "can only be set when AppArmor type is Localhost",
        )),
        _ => errors.extend(profile_type(kind, "appArmorProfile", &path.child("type"))),
    }
    errors
}
