//! EndpointSlices.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, ensure_object, list, list_mut, map, remove, strings, text,
};
use crate::kinds::common::check::{
    IMMUTABLE, PROTOCOLS, complaints, endpoint_address, ip, ip_warning, one_of, strict_ip,
};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::endpoints::first_few;
use crate::meta_validation::{dns1123_label, dns1123_subdomain, label_value, qualified_name};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::age;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;
use std::net::IpAddr;

pub(in crate::kinds) struct EndpointSlices;

impl Strategy for EndpointSlices {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn default(&self, object: &mut Value) {
        for port in list_mut(object, "ports") {
            default_field(port, "name", "");
            default_field(port, "protocol", "TCP");
        }
        for endpoint in list_mut(object, "endpoints") {
            ensure_object(endpoint, "conditions");
        }
        for key in ["endpoints", "ports"] {
            default_field(object, key, Value::Null);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let kind = text(object, "addressType");
        let mut errors: FieldErrors =
            one_of(object, "addressType", &Path::default(), &["FQDN", "IPv4", "IPv6"]).into_iter().collect();
        errors.extend(validate_ports(list(object, "ports"), &Path::new("ports")));
        errors.extend(validate_endpoints(list(object, "endpoints"), kind, &Path::new("endpoints")));
        errors
    }

    fn prepare_create(&self, object: &mut Value) {
        drop_topology(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if new["endpoints"] != old["endpoints"] {
            drop_topology(new);
        }
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        let kind = text(new, "addressType");
        if kind != text(old, "addressType") {
            errors.push(FieldError::invalid(&Path::new("addressType"), kind, IMMUTABLE));
        }
        errors
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        if text(object, "addressType") == "FQDN" {
            return vec!["spec.addressType: FQDN endpoints are deprecated".to_owned()];
        }
        let mut warnings = Vec::new();
        for (index, endpoint) in list(object, "endpoints").iter().enumerate() {
            let path = Path::new("endpoints").index(index).child("addresses");
            for (index, address) in strings(endpoint, "addresses").into_iter().enumerate() {
                warnings.extend(ip_warning(address, &path.index(index)));
            }
        }
        warnings
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["addressType", "endpoints", "ports", "metadata.labels"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("AddressType"), shown("Ports"), shown("Endpoints"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let ports: Vec<String> = list(object, "ports")
            .iter()
            .map(|p| match (p["port"].as_i64(), p["name"].as_str()) {
                (Some(number), _) => number.to_string(),
                (None, Some(name)) => name.to_owned(),
                (None, None) => "*".to_owned(),
            })
            .collect();
        let addresses: Vec<String> = list(object, "endpoints")
            .iter()
            .flat_map(|e| list(e, "addresses"))
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        let or_unset = |all: &[String]| match first_few(all) {
            shown if shown.is_empty() => "<unset>".to_owned(),
            shown => shown,
        };
        vec![
            crate::meta::name(object).into(),
            text(object, "addressType").into(),
            or_unset(&ports).into(),
            or_unset(&addresses).into(),
            age(object, now).into(),
        ]
    }
}

const ENDPOINTS_MAX: usize = 1000;
const ADDRESSES_MAX: usize = 100;
const PORTS_MAX: usize = 20_000;
const ZONES_MAX: usize = 8;
const NODES_MAX: usize = 8;

/// The labels of the older version can be read, and no longer be written.
fn drop_topology(slice: &mut Value) {
    for endpoint in list_mut(slice, "endpoints") {
        remove(endpoint, "deprecatedTopology");
    }
}

fn validate_endpoints(endpoints: &[Value], kind: &str, path: &Path) -> FieldErrors {
    if endpoints.len() > ENDPOINTS_MAX {
        return vec![FieldError::too_many(path, endpoints.len(), ENDPOINTS_MAX)];
    }
    let mut errors = Vec::new();
    for (index, endpoint) in endpoints.iter().enumerate() {
        let path = path.index(index);
        let addresses = strings(endpoint, "addresses");
        let addresses_path = path.child("addresses");
        if addresses.is_empty() {
            errors.push(FieldError::required(&addresses_path, "must contain at least 1 address"));
        } else if addresses.len() > ADDRESSES_MAX {
            errors.push(FieldError::too_many(&addresses_path, addresses.len(), ADDRESSES_MAX));
        }
        for (index, address) in addresses.iter().enumerate() {
            errors.extend(validate_address(address, kind, &addresses_path, index));
        }
        if let Some(name) = endpoint["nodeName"].as_str() {
            errors.extend(complaints(&path.child("nodeName"), name, dns1123_subdomain(name)));
        }
        for (key, value) in map(endpoint, "deprecatedTopology").into_iter().flatten() {
            let path = path.child("deprecatedTopology").key(key);
            let value = value.as_str().unwrap_or_default();
            errors.extend(complaints(&path, key, qualified_name(key)));
            errors.extend(complaints(&path, value, label_value(value)));
        }
        if let Some(name) = endpoint["hostname"].as_str() {
            errors.extend(complaints(&path.child("hostname"), name, dns1123_label(name)));
        }
        let zones = list(&endpoint["hints"], "forZones");
        let zones_path = path.child("hints").child("forZones");
        if zones.len() > ZONES_MAX {
            errors.push(FieldError::too_many(&zones_path, zones.len(), ZONES_MAX));
            continue;
        }
        let nodes = list(&endpoint["hints"], "forNodes");
        let nodes_path = path.child("hints").child("forNodes");
        errors.extend(validate_hints(zones, &zones_path, label_value));
        if nodes.len() > NODES_MAX {
            errors.push(FieldError::too_many(&nodes_path, nodes.len(), NODES_MAX));
        } else {
            errors.extend(validate_hints(nodes, &nodes_path, dns1123_subdomain));
        }
    }
    errors
}

/// The zones or nodes for whose clients an endpoint is.
fn validate_hints(hints: &[Value], path: &Path, check: impl Fn(&str) -> Vec<String>) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, hint) in hints.iter().enumerate() {
        let (path, name) = (path.index(index).child("name"), text(hint, "name"));
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path, name));
        }
        errors.extend(complaints(&path, name, check(name)));
    }
    errors
}

fn validate_address(address: &str, kind: &str, path: &Path, index: usize) -> FieldErrors {
    let at = path.index(index);
    match kind {
        "FQDN" => {
            return complaints(&at, address, dns1123_subdomain(address.strip_suffix('.').unwrap_or(address)));
        }
        // As upstream: addresses of the older type may be written in other forms.
        "IPv6" if address.parse::<IpAddr>().is_ok_and(|address| address.is_ipv6()) => {
            let problems = strict_ip(address);
            if !problems.is_empty() {
                return complaints(&at, address, problems);
            }
        }
        "IPv4" | "IPv6" => {}
        // As upstream: addresses of unknown types are not checked.
        _ => return Vec::new(),
    }
    let parsed = match ip(address, &at) {
        Ok(parsed) => parsed,
        Err(found) => return found,
    };
    let mut errors = Vec::new();
    if kind == "IPv4" && !parsed.is_ipv4() {
        errors.push(FieldError::invalid(path, address, "must be an IPv4 address"));
    }
    if kind == "IPv6" && !parsed.is_ipv6() {
        errors.push(FieldError::invalid(path, address, "must be an IPv6 address"));
    }
    errors.extend(endpoint_address(parsed, address, &at));
    errors
}

fn validate_ports(ports: &[Value], path: &Path) -> FieldErrors {
    if ports.len() > PORTS_MAX {
        return vec![FieldError::too_many(path, ports.len(), PORTS_MAX)];
    }
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, entry) in ports.iter().enumerate() {
        let path = path.index(index);
        let name = text(entry, "name");
        if !name.is_empty() {
            errors.extend(complaints(&path.child("name"), name, dns1123_label(name)));
        }
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
        let protocol = text(entry, "protocol");
        if !PROTOCOLS.contains(&protocol) {
            errors.push(FieldError::not_supported(&path.child("protocol"), protocol, PROTOCOLS));
        }
        if let Some(protocol) = entry["appProtocol"].as_str() {
            errors.extend(complaints(&path.child("appProtocol"), protocol, qualified_name(protocol)));
        }
    }
    errors
}
