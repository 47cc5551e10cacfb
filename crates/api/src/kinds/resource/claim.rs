//! The devices that a claim asks for, in a claim, a template or a class.

use super::selector;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_text, int, list, list_mut, object, object_mut, present, strings, text,
};
use crate::kinds::common::check::{complaints, named, repeated};
use crate::kinds::common::volume_source::validate_driver_name;
use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use ferrite_json::Value;
use std::collections::HashSet;

const REQUESTS_MAX: usize = 32;
const CONSTRAINTS_MAX: usize = 32;
const CONFIGS_MAX: usize = 32;
const SELECTORS_MAX: usize = 32;
const ALTERNATIVES_MAX: usize = 8;
const TOLERATIONS_MAX: usize = 16;
pub(super) const EXPRESSION_MAX: usize = 10 * 1024;
const PARAMETERS_MAX: usize = 10 * 1024;
const DOMAIN_MAX: usize = 63;
const IDENTIFIER_MAX: usize = 32;
const UNKNOWN_REQUEST: &str =
    "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";

/// Defaults of a claim's requests.
pub(super) fn default_claim(spec: &mut Value) {
    let Some(devices) = object_mut(spec, "devices") else { return };
    for request in list_mut(devices, "requests") {
        if let Some(exactly) = object_mut(request, "exactly") {
            default_request(exactly);
        }
        for alternative in list_mut(request, "firstAvailable") {
            default_request(alternative);
        }
    }
}

fn default_request(request: &mut Value) {
    default_text(request, "allocationMode", "ExactCount");
    if text(request, "allocationMode") == "ExactCount" && int(request, "count") == 0 {
        request["count"] = 1.into();
    }
    for toleration in list_mut(request, "tolerations") {
        default_text(toleration, "operator", "Equal");
    }
}

/// Validates a claim's requests.
pub(super) fn validate_claim(spec: &Value, path: &Path) -> FieldErrors {
    let (devices, path) = (&spec["devices"], path.child("devices"));
    let mut errors = Vec::new();
    let requests = list(devices, "requests");
    let mut known: HashSet<String> = HashSet::new();
    errors.extend(too_many(requests, REQUESTS_MAX, &path.child("requests")));
    for (index, request) in requests.iter().enumerate() {
        let path = path.child("requests").index(index);
        let name = text(request, "name");
        errors.extend(validate_request(request, &path));
        if !name.is_empty() && !known.insert(name.to_owned()) {
            errors.push(FieldError::duplicate(&path, name));
        }
        known.extend(list(request, "firstAvailable").iter().map(|a| format!("{name}/{}", text(a, "name"))));
    }
    let constraints = list(devices, "constraints");
    errors.extend(too_many(constraints, CONSTRAINTS_MAX, &path.child("constraints")));
    for (index, constraint) in constraints.iter().enumerate() {
        let path = path.child("constraints").index(index);
        errors.extend(validate_request_names(constraint, &known, &path));
        let given =
            ["matchAttribute", "distinctAttribute"].into_iter().find(|key| constraint[*key].is_string());
        match given {
            Some(key) => errors.extend(validate_attribute_name(text(constraint, key), true, &path.child(key))),
            None => errors.push(FieldError::required(
                &path,
                "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required, but multiple fields are set",
            )),
        }
    }
    let configs = list(devices, "config");
    errors.extend(too_many(configs, CONFIGS_MAX, &path.child("config")));
    for (index, config) in configs.iter().enumerate() {
        let path = path.child("config").index(index);
        errors.extend(validate_request_names(config, &known, &path));
        errors.extend(validate_config(config, &path));
    }
    errors
}

fn too_many(items: &[Value], max: usize, path: &Path) -> Option<FieldError> {
    (items.len() > max).then(|| FieldError::too_many(path, items.len(), max))
}

/// Names of the requests of a claim, and of their alternatives.
pub(super) fn known_requests(devices: &Value) -> HashSet<String> {
    let requests = list(devices, "requests").iter();
    requests
        .flat_map(|request| {
            let name = text(request, "name");
            let alternatives = list(request, "firstAvailable").iter();
            let alternatives = alternatives.map(move |a| format!("{name}/{}", text(a, "name")));
            std::iter::once(name.to_owned()).chain(alternatives)
        })
        .collect()
}

/// The name of a request, or of an alternative of one.
pub(super) fn validate_request_name(name: &str, known: &HashSet<String>, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() <= 2 {
        for part in parts {
            errors.extend(complaints(path, part, dns1123_label(part)));
        }
    }
    if !known.contains(name) {
        errors.push(FieldError::invalid(path, name, UNKNOWN_REQUEST));
    }
    errors
}

pub(super) fn validate_request_names(parent: &Value, known: &HashSet<String>, path: &Path) -> FieldErrors {
    let path = path.child("requests");
    let names = strings(parent, "requests");
    let mut errors = Vec::new();
    let again = repeated(names.iter());
    for (index, name) in names.iter().enumerate() {
        let path = path.index(index);
        errors.extend(validate_request_name(name, known, &path));
        if again[index] {
            errors.push(FieldError::duplicate(&path, *name));
        }
    }
    errors
}

fn validate_request(request: &Value, path: &Path) -> FieldErrors {
    let name = text(request, "name");
    let mut errors = complaints(&path.child("name"), name, dns1123_label(name));
    let (exactly, alternatives) = (object(request, "exactly"), list(request, "firstAvailable"));
    match (exactly, alternatives.is_empty()) {
        (None, true) => errors
            .push(FieldError::required(path, "exactly one of `exactly` or `firstAvailable` is required")),
        (Some(_), false) => errors.push(FieldError::invalid(
            path,
            Value::Null,
            "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
        )),
        (Some(exactly), true) => errors.extend(validate_exact(exactly, &path.child("exactly"))),
        (None, false) => {
            let path = path.child("firstAvailable");
            errors.extend(too_many(alternatives, ALTERNATIVES_MAX, &path));
            let mut names = HashSet::new();
            for (index, alternative) in alternatives.iter().enumerate() {
                let path = path.index(index);
                let name = text(alternative, "name");
                errors.extend(complaints(&path.child("name"), name, dns1123_label(name)));
                errors.extend(validate_exact(alternative, &path));
                if !names.insert(name) {
                    errors.push(FieldError::duplicate(&path, name));
                }
            }
        }
    }
    errors
}

fn validate_exact(request: &Value, path: &Path) -> FieldErrors {
    let mut errors = named(request, "deviceClassName", path, dns1123_subdomain);
    errors.extend(validate_selectors(list(request, "selectors"), &path.child("selectors")));
    let count = int(request, "count");
    match text(request, "allocationMode") {
        "All" => {
            if count != 0 {
                errors.push(FieldError::invalid(
                    &path.child("count"),
                    count,
                    "must not be specified when allocationMode is 'All'",
                ));
            }
        }
        "ExactCount" => {
            if count <= 0 {
                errors.push(FieldError::invalid(&path.child("count"), count, "must be greater than zero"));
            }
        }
        other => errors.push(FieldError::not_supported(
            &path.child("allocationMode"),
            other,
            &["All", "ExactCount"],
        )),
    }
    let tolerations = list(request, "tolerations");
    errors.extend(too_many(tolerations, TOLERATIONS_MAX, &path.child("tolerations")));
    for (index, toleration) in tolerations.iter().enumerate() {
        let path = path.child("tolerations").index(index);
        let (key, operator, value) =
            (text(toleration, "key"), text(toleration, "operator"), text(toleration, "value"));
        if !key.is_empty() {
            errors.extend(complaints(&path.child("key"), key, crate::meta_validation::qualified_name(key)));
        }
        match operator {
            "Exists" if !value.is_empty() => errors.push(FieldError::invalid(
                &path.child("value"),
                value,
                "must be empty for operator `Exists`",
            )),
            "Equal" if key.is_empty() => errors
                .push(FieldError::required(&path.child("key"), "key must not be empty for operator `Equal`")),
            "Exists" | "Equal" => {}
            "" => errors.push(FieldError::required(&path.child("operator"), "")),
            other => {
                errors.push(FieldError::not_supported(&path.child("operator"), other, &["Equal", "Exists"]))
            }
        }
        let effect = text(toleration, "effect");
        if !matches!(effect, "" | "NoExecute" | "NoSchedule" | "None") {
            errors.push(FieldError::not_supported(
                &path.child("effect"),
                effect,
                &["NoExecute", "NoSchedule", "None"],
            ));
        }
    }
    errors
}

/// Conditions on devices, each an expression.
pub(super) fn validate_selectors(selectors: &[Value], path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = too_many(selectors, SELECTORS_MAX, path).into_iter().collect();
    for (index, given) in selectors.iter().enumerate() {
        let path = path.index(index).child("cel");
        let Some(cel) = object(given, "cel") else {
            errors.push(FieldError::required(&path, ""));
            continue;
        };
        errors.extend(selector::validate(text(cel, "expression"), &path.child("expression")));
    }
    errors
}

/// Configuration for one driver.
pub(super) fn validate_config(config: &Value, path: &Path) -> FieldErrors {
    let Some(opaque) = object(config, "opaque") else {
        return vec![FieldError::required(&path.child("opaque"), "")];
    };
    let path = path.child("opaque");
    let mut errors = validate_driver_name(text(opaque, "driver"), &path.child("driver"));
    let parameters = path.child("parameters");
    if !present(opaque, "parameters") {
        errors.push(FieldError::required(&parameters, ""));
    } else if opaque["parameters"].to_string().len() > PARAMETERS_MAX {
        errors.push(FieldError::too_long(&parameters, PARAMETERS_MAX));
    } else if !opaque["parameters"].is_object() {
        errors.push(FieldError::invalid(&parameters, "<value omitted>", "must be a valid JSON object"));
    }
    errors
}

/// The name of a device's attribute, with or without the driver's domain.
pub(super) fn validate_attribute_name(name: &str, full: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let identifier = match name.split_once('/') {
        Some((domain, identifier)) => {
            if domain.is_empty() {
                errors.push(FieldError::invalid(path, "", "the domain must not be empty"));
            } else {
                if domain.len() > DOMAIN_MAX {
                    errors.push(FieldError::too_long(path, DOMAIN_MAX));
                }
                errors.extend(complaints(path, domain, dns1123_subdomain(domain)));
            }
            if identifier.is_empty() {
                errors.push(FieldError::invalid(path, "", "the name must not be empty"));
                return errors;
            }
            identifier
        }
        None => name,
    };
    if identifier.len() > IDENTIFIER_MAX {
        errors.push(FieldError::too_long(path, IDENTIFIER_MAX));
    }
    let good = identifier.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && identifier.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if !good {
        errors.push(FieldError::invalid(
            path,
            identifier,
            "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric \
             characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is \
             '[A-Za-z_][A-Za-z0-9_]*')",
        ));
    }
    if full && !name.contains('/') {
        errors.push(FieldError::invalid(
            path,
            name,
            "a fully qualified name must be a domain and a name separated by a slash",
        ));
    }
    errors
}
