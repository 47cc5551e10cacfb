//! Validation of a pod's settings for nodes that run Windows.

use super::annotations::containers;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, object};
use crate::meta_validation::dns1123_subdomain;
use ferrite_json::Value;

const CREDENTIALS_MAX_KIB: usize = 64;
const DOMAIN_MAX: usize = 256;
const USER_MAX: usize = 104;

/// The options of a pod's or a container's security context.
pub(super) fn validate_options(context: &Value, path: &Path) -> FieldErrors {
    let Some(options) = object(context, "windowsOptions") else { return Vec::new() };
    let path = path.child("windowsOptions");
    let mut errors = Vec::new();
    let mut complain = |key: &str, value: &str, why: &str| {
        errors.push(FieldError::invalid(&path.child(key), value, why));
    };
    if let Some(name) = options["gmsaCredentialSpecName"].as_str() {
        for why in dns1123_subdomain(name) {
            complain("gmsaCredentialSpecName", name, &why);
        }
    }
    if let Some(spec) = options["gmsaCredentialSpec"].as_str() {
        if spec.is_empty() {
            complain("gmsaCredentialSpec", spec, "gmsaCredentialSpec cannot be an empty string");
        } else if spec.len() > CREDENTIALS_MAX_KIB * 1024 {
            let why = format!("gmsaCredentialSpec size must be under {CREDENTIALS_MAX_KIB} KiB");
            complain("gmsaCredentialSpec", spec, &why);
        }
    }
    if let Some(name) = options["runAsUserName"].as_str() {
        for why in user_name_problems(name) {
            complain("runAsUserName", name, &why);
        }
    }
    errors
}

/// `USER` or `DOMAIN\USER`.
fn user_name_problems(name: &str) -> Vec<String> {
    if name.is_empty() {
        return vec!["runAsUserName cannot be an empty string".to_owned()];
    }
    if name.chars().any(|c| c.is_ascii_control()) {
        return vec!["runAsUserName cannot contain control characters".to_owned()];
    }
    let (domain, user) = match name.split_once('\\') {
        Some((_, user)) if user.contains('\\') => {
            return vec!["runAsUserName cannot contain more than one backslash".to_owned()];
        }
        Some((domain, user)) => (Some(domain), user),
        None => (None, name),
    };
    let mut problems = Vec::new();
    if domain.is_some_and(|domain| domain.len() >= DOMAIN_MAX) {
        problems.push(format!("runAsUserName's Domain length must be under {DOMAIN_MAX} characters"));
    }
    if domain.is_some_and(|domain| !is_net_bios_name(domain) && !is_dns_name(domain)) {
        problems.push("runAsUserName's Domain doesn't match the NetBios nor the DNS format".to_owned());
    }
    if user.is_empty() {
        problems.push("runAsUserName's User cannot be empty".to_owned());
    } else if user.len() > USER_MAX {
        problems.push(format!("runAsUserName's User length must not be longer than {USER_MAX} characters"));
    }
    if !user.is_empty() && user.chars().all(|c| matches!(c, '.' | ' ')) {
        problems.push("runAsUserName's User cannot contain only periods or spaces".to_owned());
    }
    if user.contains(['"', '/', '\\', ':', ';', '|', '=', ',', '+', '*', '?', '<', '>', '@', '[', ']']) {
        problems.push(
            "runAsUserName's User cannot contain the following characters: \"/\\:;|=,+*?<>@[]".to_owned(),
        );
    }
    problems
}

/// At most fifteen characters, of which the first is no point.
fn is_net_bios_name(name: &str) -> bool {
    (1..=15).contains(&name.chars().count())
        && !name.starts_with('.')
        && !name.contains(['\\', '/', ':', '*', '?', '"', '<', '>', '|'])
}

/// Labels of letters, digits and inner dashes.
fn is_dns_name(name: &str) -> bool {
    name.split('.').all(|label| {
        let edge = |c: char| c.is_ascii_alphanumeric();
        (1..=63).contains(&label.len())
            && label.starts_with(edge)
            && label.ends_with(edge)
            && label.chars().all(|c| edge(c) || c == '-')
    })
}

/// Containers that are processes of a Windows host: all of a pod or none, and on the host's network.
pub(super) fn validate_host_process(spec: &Value, path: &Path) -> FieldErrors {
    let host_process = |context: &Value| context["windowsOptions"]["hostProcess"].as_bool();
    let of_pod = host_process(&spec["securityContext"]);
    let mut errors = Vec::new();
    let (mut all, mut of_host) = (0, 0);
    for (container, place) in containers(spec) {
        all += 1;
        let own = host_process(&container["securityContext"]);
        if let (Some(of_pod), Some(own)) = (of_pod, own)
            && of_pod != own
        {
            errors.push(FieldError::invalid(
                &place.under(path).child("securityContext").child("windowsOptions").child("hostProcess"),
                own,
                format!("pod hostProcess value must be identical if both are specified, was {of_pod}"),
            ));
        }
        of_host += usize::from(own.or(of_pod).unwrap_or(false));
    }
    if of_host == 0 {
        return errors;
    }
    if of_host != all {
        errors.push(FieldError::invalid(
            path,
            "",
            "If pod contains any hostProcess containers then all containers must be HostProcess containers",
        ));
    }
    if !flag(spec, "hostNetwork") {
        errors.push(FieldError::invalid(
            &path.child("hostNetwork"),
            false,
            "hostNetwork must be true if pod contains any hostProcess containers",
        ));
    }
    errors
}
