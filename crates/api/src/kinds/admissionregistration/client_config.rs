//! The address of a webhook.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, int, object, object_mut, text};
use crate::kinds::common::check::{complaints, repeated};
use crate::meta_validation::{dns1035_label, dns1123_subdomain, port_number};
use ferrite_json::Value;

const PORT: i64 = 443;
const URL_FORM: &str = "; desired format: https://host[/path]";

/// The port of a service that names none.
pub(in crate::kinds) fn default_service_port(config: &mut Value) {
    if let Some(service) = object_mut(config, "service") {
        default_field(service, "port", PORT);
    }
}

/// Either a URL or a service.
pub(in crate::kinds) fn validate_client_config(config: &Value, path: &Path) -> FieldErrors {
    match (config["url"].as_str(), object(config, "service")) {
        (None, None) | (Some(_), Some(_)) => {
            vec![FieldError::required(path, "exactly one of url or service is required")]
        }
        (Some(url), None) => validate_url(url, &path.child("url")),
        (None, Some(service)) => validate_service(service, &path.child("service")),
    }
}

fn validate_url(url: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (scheme, rest) = match url.split_once(':') {
        Some((scheme, rest)) if !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
            (scheme, rest)
        }
        _ => ("", url),
    };
    if scheme != "https" {
        errors.push(FieldError::invalid(
            path,
            scheme,
            format!("'https' is the only allowed URL scheme{URL_FORM}"),
        ));
    }
    let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let authority = rest.strip_prefix("//").map_or("", |r| r.split('/').next().unwrap_or_default());
    let (user, host) = match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    };
    if host.is_empty() {
        errors.push(FieldError::invalid(path, host, format!("host must be specified{URL_FORM}")));
    }
    if let Some(user) = user {
        errors.push(FieldError::invalid(path, user, "user information is not permitted in the URL"));
    }
    if !fragment.is_empty() {
        errors.push(FieldError::invalid(path, fragment, "fragments are not permitted in the URL"));
    }
    if !query.is_empty() {
        errors.push(FieldError::invalid(path, query, "query parameters are not permitted in the URL"));
    }
    errors
}

fn validate_service(service: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    // As upstream: each is missed under the other's name.
    for (key, told) in [("namespace", "name"), ("name", "namespace")] {
        if text(service, key).is_empty() {
            errors.push(FieldError::required(&path.child(told), ""));
        }
    }
    let port = int(service, "port");
    if let Some(problem) = port_number(port) {
        errors.push(FieldError::invalid(&path.child("port"), port, format!("port is not valid: {problem}")));
    }
    let place = text(service, "path");
    let path = path.child("path");
    if matches!(place, "" | "/") {
        return errors;
    }
    if place == "//" {
        errors.push(FieldError::invalid(&path, place, "segment[0] may not be empty"));
        return errors;
    }
    if !place.starts_with('/') {
        errors.push(FieldError::invalid(&path, place, "must start with a '/'"));
    }
    // The first character is taken for the slash even when it is none, as upstream does.
    let rest = place.get(1..).unwrap_or_default();
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    for (index, segment) in rest.split('/').enumerate() {
        if segment.is_empty() {
            errors.push(FieldError::invalid(&path, place, format!("segment[{index}] may not be empty")));
            continue;
        }
        let problems =
            dns1123_subdomain(segment).into_iter().map(|p| format!("segment[{index}]: {p}")).collect();
        errors.extend(complaints(&path, place, problems));
    }
    errors
}

/// Versions of the review a webhook understands, of which the server speaks two.
pub(in crate::kinds) fn validate_review_versions(versions: &[&str], path: &Path) -> FieldErrors {
    if versions.is_empty() {
        return vec![FieldError::required(path, "must specify one of v1, v1beta1")];
    }
    let mut errors = Vec::new();
    let again = repeated(versions.iter());
    for (index, version) in versions.iter().enumerate() {
        if again[index] {
            errors.push(FieldError::invalid(&path.index(index), *version, "duplicate version"));
            continue;
        }
        errors.extend(complaints(&path.index(index), version, dns1035_label(version)));
    }
    if !versions.iter().any(|v| matches!(*v, "v1" | "v1beta1")) {
        errors.push(FieldError::invalid(path, versions.to_vec(), "must include at least one of v1, v1beta1"));
    }
    errors
}
