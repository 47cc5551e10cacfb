//! Validation of security contexts.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{flag, list, present, text};
use crate::kinds::check::one_of_if_set;
use serde_json::Value;
use std::collections::HashSet;

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
    errors.extend(validate_sysctls(list(context, "sysctls"), &path.child("sysctls")));
    errors.extend(one_of_if_set(context, "fsGroupChangePolicy", path, &["Always", "OnRootMismatch"]));
    errors.extend(validate_seccomp(context, path));
    errors.extend(one_of_if_set(context, "supplementalGroupsPolicy", path, &["Merge", "Strict"]));
    errors.extend(validate_app_armor(context, path));
    errors
}

fn validate_sysctls(sysctls: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, sysctl) in sysctls.iter().enumerate() {
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
    if present(context, "allowPrivilegeEscalation") && !flag(context, "allowPrivilegeEscalation") {
        let mut conflict = |why: &str| {
            errors.push(FieldError::invalid(path, context.clone(), why).rendered_as(render(context)));
        };
        if flag(context, "privileged") {
            conflict("cannot set `allowPrivilegeEscalation` to false and `privileged` to true");
        }
        if list(&context["capabilities"], "add").iter().any(|c| c == "CAP_SYS_ADMIN") {
            conflict("cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN");
        }
    }
    errors.extend(validate_seccomp(context, path));
    errors.extend(validate_app_armor(context, path));
    errors
}

/// Upstream prints its internal form: every field, under its Go name.
fn render(context: &Value) -> String {
    const FIELDS: [(&str, &str); 12] = [
        ("Capabilities", "capabilities"),
        ("Privileged", "privileged"),
        ("SELinuxOptions", "seLinuxOptions"),
        ("WindowsOptions", "windowsOptions"),
        ("RunAsUser", "runAsUser"),
        ("RunAsGroup", "runAsGroup"),
        ("RunAsNonRoot", "runAsNonRoot"),
        ("ReadOnlyRootFilesystem", "readOnlyRootFilesystem"),
        ("AllowPrivilegeEscalation", "allowPrivilegeEscalation"),
        ("ProcMount", "procMount"),
        ("SeccompProfile", "seccompProfile"),
        ("AppArmorProfile", "appArmorProfile"),
    ];
    let value = |key: &str| match (key, context.get(key).unwrap_or(&Value::Null)) {
        ("capabilities", c) if c.is_object() => format!("{{\"Add\":{},\"Drop\":{}}}", c["add"], c["drop"]),
        (_, v) => v.to_string(),
    };
    let fields: Vec<String> = FIELDS.iter().map(|(go, key)| format!("\"{go}\":{}", value(key))).collect();
    format!("{{{}}}", fields.join(","))
}

fn validate_seccomp(context: &Value, path: &Path) -> FieldErrors {
    let Some(profile) = context.get("seccompProfile").filter(|p| p.is_object()) else { return Vec::new() };
    let path = path.child("seccompProfile");
    let mut errors = Vec::new();
    let local = profile.get("localhostProfile").and_then(Value::as_str);
    let local_path = path.child("localhostProfile");
    match text(profile, "type") {
        "Localhost" => match local {
            None | Some("") => {
                errors.push(FieldError::required(&local_path, "must be set when seccomp type is Localhost"))
            }
            Some(file) => errors.extend(super::containers::local_path(file, &local_path)),
        },
        kind => {
            if let Some(file) = local {
                let printed = format!("{{\"Type\":{kind:?},\"LocalhostProfile\":{file:?}}}");
                errors.push(
                    FieldError::invalid(
                        &local_path,
                        profile.clone(),
                        "can only be set when seccomp type is Localhost",
                    )
                    .rendered_as(printed),
                );
            }
            if kind.is_empty() {
                errors.push(FieldError::required(
                    &path.child("type"),
                    "type is required when seccompProfile is set",
                ));
            } else if !matches!(kind, "RuntimeDefault" | "Unconfined") {
                errors.push(FieldError::not_supported(
                    &path.child("type"),
                    kind,
                    &["Localhost", "RuntimeDefault", "Unconfined"],
                ));
            }
        }
    }
    errors
}

fn validate_app_armor(context: &Value, path: &Path) -> FieldErrors {
    let Some(profile) = context.get("appArmorProfile").filter(|p| p.is_object()) else { return Vec::new() };
    let path = path.child("appArmorProfile");
    let mut errors = Vec::new();
    let local = profile.get("localhostProfile").and_then(Value::as_str);
    let local_path = path.child("localhostProfile");
    match text(profile, "type") {
        "Localhost" => {
            match local {
                None => errors
                    .push(FieldError::required(&local_path, "must be set when AppArmor type is Localhost")),
                Some(name) if name.trim().is_empty() => errors
                    .push(FieldError::required(&local_path, "must be set when AppArmor type is Localhost")),
                Some(_) => {}
            }
        }
        kind => {
            if let Some(name) = local {
                errors.push(FieldError::invalid(
                    &local_path,
                    name,
                    "can only be set when AppArmor type is Localhost",
                ));
            }
            if kind.is_empty() {
                errors.push(FieldError::required(
                    &path.child("type"),
                    "type is required when appArmorProfile is set",
                ));
            } else if !matches!(kind, "RuntimeDefault" | "Unconfined") {
                errors.push(FieldError::not_supported(
                    &path.child("type"),
                    kind,
                    &["Localhost", "RuntimeDefault", "Unconfined"],
                ));
            }
        }
    }
    errors
}
