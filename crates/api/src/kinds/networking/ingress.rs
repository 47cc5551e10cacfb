//! Ingresses.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, int, list, object, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, ip, lenient_ip, port};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_label, dns1123_subdomain, path_segment, port_name, wildcard_subdomain};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use crate::table::NONE;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::BTreeSet;

const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";
/// Number of hosts that a cell shows.
const HOSTS_SHOWN: usize = 3;

pub(in crate::kinds) struct Ingresses;

impl Strategy for Ingresses {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_spec(&object["spec"], &Path::new("spec"));
        let annotated = object["metadata"]["annotations"][CLASS_ANNOTATION].as_str();
        if let (Some(annotated), Some(class)) = (annotated, object["spec"]["ingressClassName"].as_str())
            && annotated != class
        {
            errors.push(FieldError::invalid(
                &Path::new("annotations").child(CLASS_ANNOTATION),
                annotated,
                "must match `ingressClassName` when both are specified",
            ));
        }
        errors
    }

    fn validate_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate_spec(&new["spec"], &Path::new("spec"))
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let path = Path::new("status").child("loadBalancer").child("ingress");
        let mut errors = Vec::new();
        for (index, entry) in list(&new["status"]["loadBalancer"], "ingress").iter().enumerate() {
            let path = path.index(index);
            let (address, host) = (text(entry, "ip"), text(entry, "hostname"));
            if !address.is_empty() {
                errors.extend(ip(address, &path.child("ip")).err().unwrap_or_default());
            }
            if !host.is_empty() {
                errors.extend(complaints(&path.child("hostname"), host, dns1123_subdomain(host)));
                errors.extend(not_an_address(host, &path.child("hostname")));
            }
        }
        errors
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        if object["metadata"]["annotations"][CLASS_ANNOTATION].is_string() {
            return vec![format!(
                "annotation {CLASS_ANNOTATION:?} is deprecated, please use 'spec.ingressClassName' instead"
            )];
        }
        Vec::new()
    }

    fn warnings_on_update(&self, _new: &Value, _old: &Value) -> Vec<String> {
        Vec::new()
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Class"), shown("Hosts"), shown("Address"), shown("Ports"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let ports = if list(spec, "tls").is_empty() { "80" } else { "80, 443" };
        vec![
            cell::name(object),
            cell::text_or(spec, "ingressClassName", NONE),
            hosts_cell(list(spec, "rules")).into(),
            address_cell(&object["status"]["loadBalancer"]).into(),
            ports.into(),
            cell::age(object, now),
        ]
    }
}

fn hosts_cell(rules: &[Value]) -> String {
    let mut hosts = Vec::new();
    let mut more = false;
    for rule in rules {
        more |= hosts.len() == HOSTS_SHOWN;
        let host = text(rule, "host");
        if !more && !host.is_empty() {
            hosts.push(host);
        }
    }
    match hosts.join(",") {
        shown if shown.is_empty() => "*".to_owned(),
        shown if more => format!("{shown} + {} more...", rules.len() - HOSTS_SHOWN),
        shown => shown,
    }
}

fn address_cell(balancer: &Value) -> String {
    let addresses: BTreeSet<&str> = list(balancer, "ingress")
        .iter()
        .map(|entry| match text(entry, "ip") {
            "" => text(entry, "hostname"),
            address => address,
        })
        .filter(|address| !address.is_empty())
        .collect();
    addresses.into_iter().collect::<Vec<_>>().join(",")
}

fn not_an_address(host: &str, path: &Path) -> Option<FieldError> {
    lenient_ip(host)
        .is_some()
        .then(|| FieldError::invalid(path, host, "must be a DNS name, not an IP address"))
}

fn validate_host(host: &str, path: &Path) -> FieldErrors {
    let problems = if host.contains('*') { wildcard_subdomain(host) } else { dns1123_subdomain(host) };
    complaints(path, host, problems)
}

fn validate_spec(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let rules = list(spec, "rules");
    let backend = object(spec, "defaultBackend");
    if rules.is_empty() && backend.is_none() {
        errors.push(FieldError::invalid(
            path,
            spec["rules"].clone(),
            "either `defaultBackend` or `rules` must be specified",
        ));
    }
    if let Some(backend) = backend {
        errors.extend(validate_backend(backend, &path.child("defaultBackend")));
    }
    for (index, rule) in rules.iter().enumerate() {
        let path = path.child("rules").index(index);
        let host = text(rule, "host");
        if !host.is_empty() {
            errors.extend(not_an_address(host, &path.child("host")));
            errors.extend(validate_host(host, &path.child("host")));
        }
        if let Some(http) = object(rule, "http") {
            errors.extend(validate_paths(list(http, "paths"), &path.child("http").child("paths")));
        }
    }
    for (index, tls) in list(spec, "tls").iter().enumerate() {
        let path = path.child("tls").index(index);
        for (index, host) in strings(tls, "hosts").into_iter().enumerate() {
            errors.extend(validate_host(host, &path.child("hosts").index(index)));
        }
        let secret = text(tls, "secretName");
        if !secret.is_empty() {
            errors.extend(complaints(&path.child("secretName"), secret, dns1123_subdomain(secret)));
        }
    }
    if let Some(class) = spec["ingressClassName"].as_str() {
        errors.extend(complaints(&path.child("ingressClassName"), class, dns1123_subdomain(class)));
    }
    errors
}

fn validate_paths(paths: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if paths.is_empty() {
        errors.push(FieldError::required(path, ""));
    }
    for (index, entry) in paths.iter().enumerate() {
        let path = path.index(index);
        let place = text(entry, "path");
        let at = path.child("path");
        let Some(kind) = entry["pathType"].as_str() else {
            errors.push(FieldError::required(&path.child("pathType"), "pathType must be specified"));
            continue;
        };
        match kind {
            "Exact" | "Prefix" => {
                if !place.starts_with('/') {
                    errors.push(FieldError::invalid(&at, place, "must be an absolute path"));
                }
                for sequence in ["//", "/./", "/../", "%2f", "%2F"] {
                    if place.contains(sequence) {
                        errors.push(FieldError::invalid(
                            &at,
                            place,
                            format!("must not contain '{sequence}'"),
                        ));
                    }
                }
                for suffix in ["/..", "/."] {
                    if place.ends_with(suffix) {
                        errors.push(FieldError::invalid(&at, place, format!("cannot end with '{suffix}'")));
                    }
                }
            }
            "ImplementationSpecific" => {
                if !place.is_empty() && !place.starts_with('/') {
                    errors.push(FieldError::invalid(&at, place, "must be an absolute path"));
                }
            }
            other => errors.push(FieldError::not_supported(
                &path.child("pathType"),
                other,
                &["Exact", "ImplementationSpecific", "Prefix"],
            )),
        }
        errors.extend(validate_backend(&entry["backend"], &path.child("backend")));
    }
    errors
}

fn validate_backend(backend: &Value, path: &Path) -> FieldErrors {
    match (object(backend, "resource"), object(backend, "service")) {
        (Some(_), Some(_)) => {
            vec![FieldError::invalid(path, "", "cannot set both resource and service backends")]
        }
        (Some(resource), None) => validate_reference(resource, &path.child("resource")),
        (None, Some(service)) => validate_service(service, path),
        (None, None) => vec![FieldError::invalid(path, "", "resource or service backend is required")],
    }
}

fn validate_service(service: &Value, backend: &Path) -> FieldErrors {
    let path = backend.child("service");
    let mut errors = match text(service, "name") {
        "" => vec![FieldError::required(&path.child("name"), "")],
        name => complaints(&path.child("name"), name, dns1123_label(name)),
    };
    let (name, number) = (text(&service["port"], "name"), int(&service["port"], "number"));
    let path = path.child("port");
    match (name.is_empty(), number == 0) {
        (false, false) => {
            errors.push(FieldError::invalid(backend, "", "cannot set both port name & port number"));
        }
        (false, true) => errors.extend(complaints(&path.child("name"), name, port_name(name))),
        (true, false) => errors.extend(port(number, &path.child("number"))),
        (true, true) => errors.push(FieldError::required(backend, "port name or number is required")),
    }
    errors
}

/// A reference to an object of any kind.
pub(super) fn validate_reference(reference: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if let Some(group) = reference["apiGroup"].as_str() {
        errors.extend(complaints(&path.child("apiGroup"), group, dns1123_subdomain(group)));
    }
    for key in ["kind", "name"] {
        match text(reference, key) {
            "" => errors.push(FieldError::required(&path.child(key), "")),
            value => errors.extend(complaints(&path.child(key), value, path_segment(value))),
        }
    }
    errors
}
