//! Validation of Services. The allocator checks values that depend on the cluster's ranges.

use super::{is_externally_accessible, is_headless};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, present, strings, text};
use crate::kinds::common::check::{
    IMMUTABLE, PROTOCOLS, cidr, complaints, endpoint_address, ip, one_of, one_of_if_set, port,
    port_number_or_name, repeated,
};
use crate::meta_validation::{dns1123_label, dns1123_subdomain, qualified_name, validate_labels};
use ferrite_json::Value;
use std::collections::HashSet;
use std::net::IpAddr;

const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";
const TOPOLOGY_HINTS: &str = "service.kubernetes.io/topology-aware-hints";
const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
const ONLY_BALANCERS: &str = "may only be used when `type` is 'LoadBalancer'";

pub(super) fn validate(service: &Value) -> FieldErrors {
    let (spec, path) = (&service["spec"], Path::new("spec"));
    let kind = text(spec, "type");
    let mut errors = Vec::new();
    let annotation = |key: &str| service["metadata"]["annotations"][key].as_str();
    if let (Some(mode), Some(hints)) = (annotation(TOPOLOGY_MODE), annotation(TOPOLOGY_HINTS))
        && mode != hints
    {
        errors.push(FieldError::invalid(
            &Path::new("metadata").child("annotations").key(TOPOLOGY_MODE),
            mode,
            format!("must match annotations[{TOPOLOGY_HINTS}] when both are specified"),
        ));
    }
    let ports = list(spec, "ports");
    if ports.is_empty() && !is_headless(spec) && kind != "ExternalName" {
        errors.push(FieldError::required(&path.child("ports"), ""));
    }
    errors.extend(validate_kind(spec, kind, &path));
    errors.extend(validate_ports(ports, &path.child("ports")));
    errors.extend(validate_labels(&spec["selector"], &path.child("selector")));
    errors.extend(one_of(spec, "sessionAffinity", &path, &["ClientIP", "None"]));
    errors.extend(validate_affinity(spec, &path.child("sessionAffinityConfig")));
    errors.extend(validate_cluster_ips(spec));
    for (index, address) in strings(spec, "externalIPs").into_iter().enumerate() {
        let path = path.child("externalIPs").index(index);
        match ip(address, &path) {
            Ok(parsed) => errors.extend(endpoint_address(parsed, address, &path)),
            Err(found) => errors.extend(found),
        }
    }
    errors.extend(one_of(spec, "type", &path, &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]));
    errors.extend(validate_port_uses(ports, kind, &path.child("ports")));
    errors.extend(validate_source_ranges(spec, kind, annotation(SOURCE_RANGES), &path));
    errors.extend(validate_balancer(spec, kind, &path));
    errors.extend(validate_traffic(spec, &path));
    errors
}

fn validate_kind(spec: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if matches!(kind, "LoadBalancer" | "NodePort") && is_headless(spec) {
        errors.push(FieldError::invalid(
            &path.child("clusterIPs").index(0),
            "None",
            format!("may not be set to 'None' for {kind} services"),
        ));
    }
    if kind == "ExternalName" {
        for key in ["clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
            let set = present(spec, key) && spec[key].as_array().is_none_or(|a| !a.is_empty());
            if set {
                errors.push(FieldError::forbidden(
                    &path.child(key),
                    "may not be set for ExternalName services",
                ));
            }
        }
        let name = text(spec, "externalName");
        let name = name.strip_suffix('.').unwrap_or(name);
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("externalName"), ""));
        } else {
            errors.extend(complaints(&path.child("externalName"), name, dns1123_subdomain(name)));
        }
    }
    errors
}

fn validate_ports(ports: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, entry) in ports.iter().enumerate() {
        let path = path.index(index);
        let name = text(entry, "name");
        if name.is_empty() {
            if ports.len() > 1 {
                errors.push(FieldError::required(&path.child("name"), ""));
            }
        } else {
            errors.extend(complaints(&path.child("name"), name, dns1123_label(name)));
            if !names.insert(name) {
                errors.push(FieldError::duplicate(&path.child("name"), name));
            }
        }
        errors.extend(port(int(entry, "port"), &path.child("port")));
        errors.extend(one_of(entry, "protocol", &path, PROTOCOLS));
        errors.extend(port_number_or_name(&entry["targetPort"], &path.child("targetPort")));
        if let Some(protocol) = entry["appProtocol"].as_str() {
            errors.extend(complaints(&path.child("appProtocol"), protocol, qualified_name(protocol)));
        }
    }
    errors
}

fn validate_port_uses(ports: &[Value], kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if kind == "ClusterIP" {
        for (index, entry) in ports.iter().enumerate() {
            if int(entry, "nodePort") != 0 {
                errors.push(FieldError::forbidden(
                    &path.index(index).child("nodePort"),
                    "may not be used when `type` is 'ClusterIP'",
                ));
            }
        }
    }
    let mut node_ports = HashSet::new();
    for (index, entry) in ports.iter().enumerate() {
        let number = int(entry, "nodePort");
        if number != 0 && !node_ports.insert((text(entry, "protocol"), number)) {
            errors.push(FieldError::duplicate(&path.index(index).child("nodePort"), number));
        }
    }
    let mut seen = HashSet::new();
    for (index, entry) in ports.iter().enumerate() {
        let (protocol, number) = (text(entry, "protocol"), int(entry, "port"));
        if !seen.insert((protocol, number)) {
            errors.push(FieldError::duplicate(&path.index(index), number).rendered_as(format!(
                "{{\"Name\":\"\",\"Protocol\":{protocol:?},\"AppProtocol\":null,\"Port\":{number},\"TargetPort\":0,\"NodePort\":0}}"
            )));
        }
    }
    errors
}

fn validate_affinity(spec: &Value, path: &Path) -> FieldErrors {
    match text(spec, "sessionAffinity") {
        "ClientIP" => {}
        "None" if present(spec, "sessionAffinityConfig") => {
            return vec![FieldError::forbidden(path, "must not be set when session affinity is None")];
        }
        _ => return Vec::new(),
    }
    let path = path.child("clientIP").child("timeoutSeconds");
    let seconds = int(&spec["sessionAffinityConfig"]["clientIP"], "timeoutSeconds");
    if (1..=86_400).contains(&seconds) {
        Vec::new()
    } else {
        vec![FieldError::invalid(&path, seconds, "must be greater than 0 and less than 86400")]
    }
}

/// The errors in a service's addresses, their families and its policy about them, taken together.
pub fn validate_cluster_ips(spec: &Value) -> FieldErrors {
    if text(spec, "type") == "ExternalName" {
        return Vec::new();
    }
    let path = Path::new("spec");
    let addresses_path = path.child("clusterIPs");
    let (addresses, single) = (strings(spec, "clusterIPs"), text(spec, "clusterIP"));
    let mut errors = Vec::new();
    let mut refuse = |why: &str| {
        errors.push(FieldError::invalid(&addresses_path, addresses.clone(), why));
    };
    match addresses.first() {
        Some(first) if !single.is_empty() && *first != single => refuse("first value must match `clusterIP`"),
        Some(_) if single.is_empty() => refuse("must be empty when `clusterIP` is not specified"),
        None if !single.is_empty() => errors.push(FieldError::required(&addresses_path, "")),
        _ => {}
    }
    errors.extend(validate_families(spec, &path));
    let mut well_formed = true;
    for (index, address) in addresses.iter().enumerate() {
        let found = match *address {
            "None" if index == 0 && addresses.len() == 1 => Vec::new(),
            "None" if index == 0 => {
                let why = "'None' must be the first and only value";
                vec![FieldError::invalid(&addresses_path, addresses.clone(), why)]
            }
            address => ip(address, &addresses_path.index(index)).err().unwrap_or_default(),
        };
        well_formed &= found.is_empty();
        errors.extend(found);
    }
    if addresses.len() > 2 {
        errors.push(FieldError::invalid(&addresses_path, addresses.clone(), "may only hold up to 2 values"));
    }
    if !well_formed {
        return errors;
    }
    let is_v6 = |address: &str| address.contains(':');
    if addresses.len() > 1 && addresses.iter().all(|a| is_v6(a) == is_v6(addresses[0])) {
        let why = "may specify no more than one IP for each IP family";
        errors.push(FieldError::invalid(&addresses_path, addresses.clone(), why));
    }
    if addresses != ["None"] {
        for (index, (address, family)) in addresses.iter().zip(strings(spec, "ipFamilies")).enumerate() {
            if matches!(family, "IPv4" | "IPv6") && is_v6(address) != (family == "IPv6") {
                let article = format!("expected an {family} value as indicated by `ipFamilies[{index}]`");
                errors.push(FieldError::invalid(&addresses_path.index(index), *address, article));
            }
        }
    }
    errors
}

fn validate_families(spec: &Value, path: &Path) -> FieldErrors {
    let families = strings(spec, "ipFamilies");
    let mut errors = Vec::new();
    let again = repeated(families.iter());
    for (index, family) in families.iter().enumerate() {
        let path = path.child("ipFamilies").index(index);
        if !matches!(*family, "IPv4" | "IPv6") {
            errors.push(FieldError::not_supported(&path, *family, &["IPv4", "IPv6"]));
        }
        if again[index] {
            errors.push(FieldError::duplicate(&path, *family));
        }
    }
    const POLICIES: &[&str] = &["PreferDualStack", "RequireDualStack", "SingleStack"];
    errors.extend(one_of_if_set(spec, "ipFamilyPolicy", path, POLICIES));
    errors
}

/// Whom a balancer serves, in the field or in the annotation that was there before. The field's name is upstream's.
fn validate_source_ranges(spec: &Value, kind: &str, annotation: Option<&str>, path: &Path) -> FieldErrors {
    let listed = strings(spec, "loadBalancerSourceRanges");
    let (at, ranges): (Path, Vec<(Option<usize>, &str)>) = match annotation {
        _ if !listed.is_empty() => {
            let ranges =
                listed.iter().enumerate().map(|(index, range)| (Some(index), range.trim())).collect();
            (path.child("LoadBalancerSourceRanges"), ranges)
        }
        Some(text) => {
            let ranges = text.trim().split(',').filter(|_| !text.trim().is_empty());
            let at = Path::new("metadata").child("annotations").key(SOURCE_RANGES);
            (at, ranges.map(|range| (None, range.trim())).collect())
        }
        None => return Vec::new(),
    };
    let mut errors = Vec::new();
    if kind != "LoadBalancer" {
        errors.push(FieldError::forbidden(&at, ONLY_BALANCERS));
    }
    for (index, range) in ranges {
        let at = index.map_or_else(|| at.clone(), |index| at.index(index));
        errors.extend(cidr(range, &at).err().unwrap_or_default());
    }
    errors
}

fn validate_balancer(spec: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["allocateLoadBalancerNodePorts", "loadBalancerClass"] {
        if present(spec, key) && kind != "LoadBalancer" {
            errors.push(FieldError::forbidden(&path.child(key), ONLY_BALANCERS));
        }
    }
    if let Some(class) = spec["loadBalancerClass"].as_str().filter(|_| kind == "LoadBalancer") {
        errors.extend(complaints(&path.child("loadBalancerClass"), class, qualified_name(class)));
    }
    errors
}

fn needs_health_check(spec: &Value) -> bool {
    text(spec, "type") == "LoadBalancer" && text(spec, "externalTrafficPolicy") == "Local"
}

fn validate_traffic(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let external = text(spec, "externalTrafficPolicy");
    let external_path = path.child("externalTrafficPolicy");
    if is_externally_accessible(spec) {
        match external {
            "Cluster" | "Local" => {}
            "" => errors.push(FieldError::required(&external_path, "")),
            other => errors.push(FieldError::not_supported(&external_path, other, &["Cluster", "Local"])),
        }
    } else if !external.is_empty() {
        errors.push(FieldError::invalid(
            &external_path,
            external,
            "may only be set for externally-accessible services",
        ));
    }
    let (health, health_path) = (int(spec, "healthCheckNodePort"), path.child("healthCheckNodePort"));
    match (needs_health_check(spec), health) {
        (true, 0) => errors.push(FieldError::required(&health_path, "")),
        (true, number) => errors.extend(port(number, &health_path)),
        (false, 0) => {}
        (false, number) => errors.push(FieldError::invalid(
            &health_path,
            number,
            "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'",
        )),
    }
    errors.extend(one_of_if_set(spec, "internalTrafficPolicy", path, &["Cluster", "Local"]));
    errors.extend(one_of_if_set(
        spec,
        "trafficDistribution",
        path,
        &["PreferClose", "PreferSameZone", "PreferSameNode"],
    ));
    errors
}

pub(super) fn validate_update(new: &Value, old: &Value) -> FieldErrors {
    let mut errors = Vec::new();
    let path = Path::new("spec");
    let (new_spec, old_spec) = (&new["spec"], &old["spec"]);
    let (new_kind, old_kind) = (text(new_spec, "type"), text(old_spec, "type"));
    errors.extend(validate_stack_change(new_spec, old_spec));
    if new_kind == "LoadBalancer"
        && old_kind == "LoadBalancer"
        && new_spec["loadBalancerClass"] != old_spec["loadBalancerClass"]
    {
        errors.push(FieldError::invalid(
            &path.child("loadBalancerClass"),
            new_spec["loadBalancerClass"].clone(),
            "may not change once set",
        ));
    }
    // As upstream: the class is validated as that of a changed Service, and again as that of a new one.
    if let Some(class) = new_spec["loadBalancerClass"].as_str() {
        let path = path.child("loadBalancerClass");
        errors.extend(match new_kind {
            "LoadBalancer" => complaints(&path, class, qualified_name(class)),
            _ => vec![FieldError::forbidden(&path, ONLY_BALANCERS)],
        });
    }
    if needs_health_check(new_spec)
        && needs_health_check(old_spec)
        && int(new_spec, "healthCheckNodePort") != int(old_spec, "healthCheckNodePort")
    {
        errors.push(FieldError::forbidden(&path.child("healthCheckNodePort"), IMMUTABLE));
    }
    errors.extend(validate(new));
    errors
}

/// Addresses and families of a service stay; a second one may come and go, the latter only if asked for.
fn validate_stack_change(new: &Value, old: &Value) -> FieldErrors {
    let is_external = |spec: &Value| text(spec, "type") == "ExternalName";
    let headless = |spec: &Value| strings(spec, "clusterIPs") == ["None"];
    if is_external(new) || is_external(old) || (headless(new) && headless(old)) {
        return Vec::new();
    }
    let mut errors = validate_kept(new, old, "clusterIPs", "clusterIP");
    if !headless(new) && !headless(old) {
        errors.extend(validate_kept(new, old, "ipFamilies", "ipFamily"));
    }
    errors
}

/// `key` is a list that may grow to two entries and shrink to one; entries that stay do not change. `one`
/// names an entry.
fn validate_kept(new: &Value, old: &Value, key: &str, one: &str) -> FieldErrors {
    const FIXED: &str = "may not change once set";
    let path = Path::new("spec").child(key);
    let (is, was) = (strings(new, key), strings(old, key));
    let mut errors = Vec::new();
    if is.len() == was.len() {
        for index in (0..is.len()).filter(|index| is[*index] != was[*index]) {
            // As upstream: a changed family is always reported as the first.
            let index = if key == "ipFamilies" { 0 } else { index };
            errors.push(FieldError::invalid(&path.index(index), is.clone(), FIXED));
        }
        return errors;
    }
    if is.is_empty() {
        let why = format!("primary {one} can not be unset");
        errors.push(FieldError::invalid(&path.index(0), is.clone(), why));
    }
    if let (Some(first), Some(before)) = (is.first(), was.first())
        && first != before
    {
        // As upstream: the error shows the addresses for both lists.
        errors.push(FieldError::invalid(&path.index(0), strings(new, "clusterIPs"), FIXED));
    }
    let policy = text(new, "ipFamilyPolicy");
    if is.len() == 1 && was.len() > 1 && policy != "SingleStack" {
        let why = format!("must be set to 'SingleStack' when releasing the secondary {one}");
        errors.push(FieldError::invalid(&Path::new("spec").child("ipFamilyPolicy"), policy, why));
    }
    errors
}

/// Validates the load balancer's report in the status.
pub(super) fn validate_status(service: &Value) -> FieldErrors {
    let path = Path::new("status").child("loadBalancer").child("ingress");
    let ingress = list(&service["status"]["loadBalancer"], "ingress");
    if !ingress.is_empty() && text(&service["spec"], "type") != "LoadBalancer" {
        return vec![FieldError::forbidden(&path, "may only be used when `spec.type` is 'LoadBalancer'")];
    }
    let mut errors = Vec::new();
    for (index, entry) in ingress.iter().enumerate() {
        let path = path.index(index);
        let address = text(entry, "ip");
        if !address.is_empty() {
            errors.extend(ip(address, &path.child("ip")).err().unwrap_or_default());
            if !present(entry, "ipMode") {
                errors
                    .push(FieldError::required(&path.child("ipMode"), "must be specified when `ip` is set"));
            }
        } else if present(entry, "ipMode") {
            errors.push(FieldError::forbidden(
                &path.child("ipMode"),
                "may not be specified when `ip` is not set",
            ));
        }
        if !address.is_empty() {
            errors.extend(one_of_if_set(entry, "ipMode", &path, &["Proxy", "VIP"]));
        }
        let name = text(entry, "hostname");
        if !name.is_empty() {
            let path = path.child("hostname");
            errors.extend(complaints(&path, name, dns1123_subdomain(name)));
            if name.parse::<IpAddr>().is_ok() {
                errors.push(FieldError::invalid(&path, name, "must be a DNS name, not an IP address"));
            }
        }
    }
    errors
}
