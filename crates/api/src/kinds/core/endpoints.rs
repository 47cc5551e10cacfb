//! Endpoints, the older form of EndpointSlices.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_text, int, list, list_mut, text};
use crate::kinds::common::check::{PROTOCOLS, complaints, endpoint_address, ip, lenient_ip, one_of, port};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_label, dns1123_subdomain, qualified_name};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::{NONE, age};
use ferrite_json::Value;
use jiff::Timestamp;

/// Addresses shown before the rest is only counted.
pub(in crate::kinds) const SHOWN: usize = 3;

pub(in crate::kinds) const DEPRECATION: &str =
    "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice";

pub(in crate::kinds) struct Endpoints;

impl Strategy for Endpoints {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        for subset in list_mut(object, "subsets") {
            for port in list_mut(subset, "ports") {
                default_text(port, "protocol", "TCP");
            }
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        for (index, subset) in list(object, "subsets").iter().enumerate() {
            errors.extend(validate_subset(subset, &Path::new("subsets").index(index)));
        }
        errors
    }

    fn warnings(&self, _object: &Value) -> Vec<String> {
        vec![DEPRECATION.to_owned()]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Endpoints"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![crate::meta::name(object).into(), addresses_cell(object).into(), age(object, now).into()]
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

fn validate_subset(subset: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if list(subset, "addresses").is_empty() && list(subset, "notReadyAddresses").is_empty() {
        errors.push(FieldError::required(path, "must specify `addresses` or `notReadyAddresses`"));
    }
    for kind in ["addresses", "notReadyAddresses"] {
        for (index, address) in list(subset, kind).iter().enumerate() {
            let path = path.child(kind).index(index);
            let value = text(address, "ip");
            errors.extend(ip(value, &path.child("ip")).err().unwrap_or_default());
            let host = text(address, "hostname");
            if !host.is_empty() {
                errors.extend(complaints(&path.child("hostname"), host, dns1123_label(host)));
            }
            if let Some(node) = address["nodeName"].as_str() {
                errors.extend(complaints(&path.child("nodeName"), node, dns1123_subdomain(node)));
            }
            // Looked at once as an address and once more as an endpoint's.
            match lenient_ip(value) {
                Some(parsed) => errors.extend(endpoint_address(parsed, value, &path.child("ip"))),
                None => {
                    errors.push(FieldError::invalid(&path.child("ip"), value, "must be a valid IP address"));
                }
            }
        }
    }
    let ports = list(subset, "ports");
    for (index, entry) in ports.iter().enumerate() {
        let path = path.child("ports").index(index);
        let name = text(entry, "name");
        if name.is_empty() {
            if ports.len() > 1 {
                errors.push(FieldError::required(&path.child("name"), ""));
            }
        } else {
            errors.extend(complaints(&path.child("name"), name, dns1123_label(name)));
        }
        errors.extend(port(int(entry, "port"), &path.child("port")));
        errors.extend(one_of(entry, "protocol", &path, PROTOCOLS));
        if let Some(protocol) = entry["appProtocol"].as_str() {
            errors.extend(complaints(&path.child("appProtocol"), protocol, qualified_name(protocol)));
        }
    }
    errors
}

fn addresses_cell(endpoints: &Value) -> String {
    let subsets = list(endpoints, "subsets");
    if subsets.is_empty() {
        return NONE.to_owned();
    }
    let mut all = Vec::new();
    for subset in subsets {
        let addresses = || list(subset, "addresses").iter().map(|a| text(a, "ip"));
        let ports = list(subset, "ports");
        if ports.is_empty() {
            all.extend(addresses().map(str::to_owned));
        }
        for port in ports {
            let port = int(port, "port");
            all.extend(
                addresses().map(|ip| {
                    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
                }),
            );
        }
    }
    first_few(&all)
}

/// The first few entries, and the number of further ones.
pub(in crate::kinds) fn first_few(all: &[String]) -> String {
    let shown = all[..all.len().min(SHOWN)].join(",");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} + {more} more..."),
    }
}
