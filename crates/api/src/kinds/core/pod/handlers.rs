//! Validation of lifecycle hooks and probes.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, present, text};
use crate::kinds::common::check::{not_negative, port_number_or_name};
use ferrite_json::Value;

/// Validates the hooks after the start and before the end. A sleep fits into the pod's grace period.
pub(super) fn validate_lifecycle(container: &Value, grace: Option<i64>, path: &Path) -> FieldErrors {
    let lifecycle = &container["lifecycle"];
    ["postStart", "preStop"]
        .iter()
        .filter(|kind| present(lifecycle, kind))
        .flat_map(|kind| {
            let kinds = ["exec", "httpGet", "tcpSocket", "sleep"];
            validate_handler(&lifecycle[*kind], &kinds, grace, &path.child(kind))
        })
        .collect()
}

pub(super) fn validate_probes(container: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let Some(probe) = container.get(kind).filter(|p| p.is_object()) else { continue };
        let path = path.child(kind);
        errors.extend(validate_handler(probe, &["exec", "httpGet", "tcpSocket", "grpc"], None, &path));
        for key in
            ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"]
        {
            errors.extend(not_negative(probe, key, &path));
        }
        let grace = probe["terminationGracePeriodSeconds"].as_i64();
        let grace_path = path.child("terminationGracePeriodSeconds");
        if let Some(seconds) = grace {
            if seconds <= 0 {
                errors.push(FieldError::invalid(&grace_path, seconds, "must be greater than 0"));
            }
            if kind == "readinessProbe" {
                errors.push(FieldError::invalid(&grace_path, seconds, "must not be set for readinessProbes"));
            }
        }
        let successes = int(probe, "successThreshold");
        if kind != "readinessProbe" && successes != 1 {
            errors.push(FieldError::invalid(&path.child("successThreshold"), successes, "must be 1"));
        }
    }
    errors
}

fn validate_handler(handler: &Value, kinds: &[&str], grace: Option<i64>, path: &Path) -> FieldErrors {
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
            "sleep" => {
                let seconds = int(action, "seconds");
                if let Some(grace) = grace.filter(|grace| !(0..=*grace).contains(&seconds)) {
                    let why =
                        format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
                    errors.push(FieldError::invalid(&path, seconds, why));
                }
            }
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
