//! The status of a ResourceClaim: the allocated devices, and their state.

use super::claim::{known_requests, validate_config, validate_request_name, validate_request_names};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, present, strings, text};
use crate::kinds::common::check::{complaints, conditions, repeated};
use crate::kinds::common::volume_source::validate_driver_name;
use crate::kinds::core::pod::validate_node_selector;
use crate::meta_validation::{dns1123_label, dns1123_subdomain, qualified_name};
use ferrite_json::{Value, json};
use std::collections::HashSet;
use std::net::IpAddr;

const POOL_NAME_MAX: usize = 253;
const RESULTS_MAX: usize = 32;
/// Those of the class and those of the claim.
const CONFIGS_MAX: usize = 64;
const BINDING_CONDITIONS_MAX: usize = 4;
const CONDITIONS_MAX: usize = 8;
const DATA_MAX: usize = 10 * 1024;
const ADDRESSES_MAX: usize = 16;
const INTERFACE_MAX: usize = 256;
const HARDWARE_ADDRESS_MAX: usize = 128;
const NOT_AN_INTERFACE_ADDRESS: &str =
    "must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)";

/// The name of a pool: one or more domains.
pub(super) fn validate_pool_name(name: &str, path: &Path) -> FieldErrors {
    if name.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let mut errors = Vec::new();
    if name.len() > POOL_NAME_MAX {
        errors.push(FieldError::too_long(path, POOL_NAME_MAX));
    }
    for part in name.split('/') {
        errors.extend(complaints(path, part, dns1123_subdomain(part)));
    }
    errors
}

fn validate_share(share: &Value, path: &Path) -> Option<FieldError> {
    const FORM: &str = "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase hexadecimal characters";
    let share = share.as_str()?;
    let bare: String = match share.len() {
        36 => share.to_owned(),
        // Go's parser also reads these forms, which are then refused for their form.
        32 => return wrong_share(share, path, share.bytes().all(|b| b.is_ascii_hexdigit()), FORM),
        38 => share.trim_start_matches('{').trim_end_matches('}').to_owned(),
        45 => share.trim_start_matches("urn:uuid:").to_owned(),
        length => {
            let why = format!("error validating uid: invalid UUID length: {length}");
            return Some(FieldError::invalid(path, share, why));
        }
    };
    let reads = bare.len() == 36
        && bare.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    match reads && share.len() == 36 && !share.bytes().any(|byte| byte.is_ascii_uppercase()) {
        true => None,
        false => wrong_share(share, path, reads, FORM),
    }
}

fn wrong_share(share: &str, path: &Path, reads: bool, form: &str) -> Option<FieldError> {
    let why = if reads { form } else { "error validating uid: invalid UUID format" };
    Some(FieldError::invalid(path, share, why))
}

/// A device of an allocation, as upstream prints it.
fn identity(device: &Value) -> Value {
    let part = |key: &str| text(device, key);
    json!({"Driver": part("driver"), "Pool": part("pool"), "Device": part("device"), "ShareID": part("shareID")})
}

fn printed(identity: &Value) -> String {
    let part = |key: &str| identity[key].to_string();
    let (driver, pool, device, share) = (part("Driver"), part("Pool"), part("Device"), part("ShareID"));
    format!("{{\"Driver\":{driver},\"Pool\":{pool},\"Device\":{device},\"ShareID\":{share}}}")
}

/// Drops reports of drivers about devices that the claim no longer has: a client that removes an allocation
/// need not know of the reports.
pub(super) fn drop_deallocated(status: &mut Value, old: &Value) {
    let named = |device: &Value| identity(device).to_string();
    let allocated = |status: &Value| -> HashSet<String> {
        list(&status["allocation"]["devices"], "results").iter().map(named).collect()
    };
    let is = allocated(status);
    let gone: HashSet<String> = allocated(old).into_iter().filter(|device| !is.contains(device)).collect();
    let Some(devices) = status.get_mut("devices").and_then(Value::as_array_mut) else { return };
    devices.retain(|device| !gone.contains(&named(device)));
    if devices.is_empty()
        && let Some(status) = status.as_object_mut()
    {
        status.remove("devices");
    }
}

/// The drivers' reports about devices. Each must be of a device that is allocated to the claim.
pub(super) fn validate_devices(status: &Value, path: &Path) -> FieldErrors {
    let allocated: Vec<Value> =
        list(&status["allocation"]["devices"], "results").iter().map(identity).collect();
    let path = path.child("devices");
    let mut errors = Vec::new();
    let mut seen: Vec<Value> = Vec::new();
    for (index, device) in list(status, "devices").iter().enumerate() {
        let path = path.index(index);
        let identity = identity(device);
        errors.extend(validate_device(device, &identity, &allocated, &path));
        if seen.contains(&identity) {
            errors.push(FieldError::duplicate(&path, identity.clone()).rendered_as(printed(&identity)));
        }
        seen.push(identity);
    }
    errors
}

fn validate_device(device: &Value, identity: &Value, allocated: &[Value], path: &Path) -> FieldErrors {
    let mut errors = validate_driver_name(text(device, "driver"), &path.child("driver"));
    errors.extend(validate_pool_name(text(device, "pool"), &path.child("pool")));
    let name = text(device, "device");
    errors.extend(complaints(&path.child("device"), name, dns1123_label(name)));
    errors.extend(validate_share(&device["shareID"], &path.child("shareID")));
    if !allocated.contains(identity) {
        let why = "must be an allocated device in the claim";
        errors.push(FieldError::invalid(path, identity.clone(), why).rendered_as(printed(identity)));
    }
    let reported = list(device, "conditions");
    let at = path.child("conditions");
    if reported.len() > CONDITIONS_MAX {
        errors.push(FieldError::too_many(&at, reported.len(), CONDITIONS_MAX));
    }
    errors.extend(conditions(reported, &at));
    let (data, at) = (&device["data"], path.child("data"));
    if present(device, "data") {
        if data.to_string().len() > DATA_MAX {
            errors.push(FieldError::too_long(&at, DATA_MAX));
        } else if !data.is_object() {
            errors.push(FieldError::invalid(&at, "<value omitted>", "must be a valid JSON object"));
        }
    }
    errors.extend(validate_network(&device["networkData"], &path.child("networkData")));
    errors
}

fn validate_network(data: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (key, max) in [("interfaceName", INTERFACE_MAX), ("hardwareAddress", HARDWARE_ADDRESS_MAX)] {
        if text(data, key).len() > max {
            errors.push(FieldError::too_long(&path.child(key), max));
        }
    }
    let addresses = strings(data, "ips");
    let path = path.child("ips");
    if addresses.len() > ADDRESSES_MAX {
        errors.push(FieldError::too_many(&path, addresses.len(), ADDRESSES_MAX));
        return errors;
    }
    let each = addresses.iter().enumerate();
    errors.extend(each.clone().filter_map(|(index, address)| validate_address(address, &path.index(index))));
    let twice = each.filter(|(index, address)| addresses[..*index].contains(address));
    errors.extend(twice.map(|(index, address)| FieldError::duplicate(&path.index(index), *address)));
    errors
}

/// An address of an interface with the length of its network, in the one form that it has.
fn validate_address(text: &str, path: &Path) -> Option<FieldError> {
    let wrong = || Some(FieldError::invalid(path, text, NOT_AN_INTERFACE_ADDRESS));
    let Some((address, length)) = text.split_once('/') else { return wrong() };
    // Go reads numbers with zeros before them, and then complains of the form.
    let plain: Vec<&str> = address.split('.').map(|part| part.trim_start_matches('0')).collect();
    let plain: Vec<&str> = plain.into_iter().map(|part| if part.is_empty() { "0" } else { part }).collect();
    let parsed = address.parse::<IpAddr>().ok().or_else(|| plain.join(".").parse().ok());
    let most = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
    let Some((address, bits)) = parsed.zip(length.parse::<u8>().ok()) else { return wrong() };
    if bits > most(&address) {
        return wrong();
    }
    let canonical = format!("{address}/{bits}");
    (text != canonical)
        .then(|| FieldError::invalid(path, text, format!("must be in canonical form ({canonical:?})")))
}

/// Validates a new allocation. A stored one is not validated again.
pub(super) fn validate_allocation(spec: &Value, allocation: &Value, path: &Path) -> FieldErrors {
    let known = known_requests(&spec["devices"]);
    let (devices, at) = (&allocation["devices"], path.child("devices"));
    let mut errors = Vec::new();
    let (results, of_results) = (list(devices, "results"), at.child("results"));
    if results.len() > RESULTS_MAX {
        errors.push(FieldError::too_many(&of_results, results.len(), RESULTS_MAX));
    } else {
        for (index, result) in results.iter().enumerate() {
            let path = of_results.index(index);
            errors.extend(validate_request_name(text(result, "request"), &known, &path.child("request")));
            errors.extend(validate_driver_name(text(result, "driver"), &path.child("driver")));
            errors.extend(validate_pool_name(text(result, "pool"), &path.child("pool")));
            let name = text(result, "device");
            errors.extend(complaints(&path.child("device"), name, dns1123_label(name)));
            errors.extend(validate_binding(result, &path));
            errors.extend(validate_share(&result["shareID"], &path.child("shareID")));
        }
    }
    let (configs, of_configs) = (list(devices, "config"), at.child("config"));
    if configs.len() > CONFIGS_MAX {
        errors.push(FieldError::too_many(&of_configs, configs.len(), CONFIGS_MAX));
    } else {
        for (index, config) in configs.iter().enumerate() {
            let path = of_configs.index(index);
            match text(config, "source") {
                "" => errors.push(FieldError::required(&path.child("source"), "")),
                "FromClaim" | "FromClass" => {}
                other => errors.push(FieldError::not_supported(
                    &path.child("source"),
                    other,
                    &["FromClaim", "FromClass"],
                )),
            }
            errors.extend(validate_request_names(config, &known, &path));
            errors.extend(validate_config(config, &path));
        }
    }
    if present(allocation, "nodeSelector") {
        errors.extend(validate_node_selector(&allocation["nodeSelector"], &path.child("nodeSelector")));
    }
    errors
}

/// Conditions that a pod waits for, and those that end the wait: both or neither, and none in both.
fn validate_binding(result: &Value, path: &Path) -> FieldErrors {
    const KEYS: [&str; 2] = ["bindingConditions", "bindingFailureConditions"];
    let [waits, fails] = KEYS.map(|key| strings(result, key));
    let mut errors = Vec::new();
    for (key, names) in [(KEYS[0], &waits), (KEYS[1], &fails)] {
        let path = path.child(key);
        if names.len() > BINDING_CONDITIONS_MAX {
            errors.push(FieldError::too_many(&path, names.len(), BINDING_CONDITIONS_MAX));
            continue;
        }
        for (index, name) in names.iter().enumerate() {
            errors.extend(complaints(&path.index(index), name, qualified_name(name)));
        }
    }
    for (key, names) in [(KEYS[0], &waits), (KEYS[1], &fails)] {
        let again = repeated(names.iter());
        for (index, name) in names.iter().enumerate() {
            let path = path.child(key).index(index);
            if again[index] {
                errors.push(FieldError::duplicate(&path, *name));
            }
            if key == KEYS[1] && waits.contains(name) {
                let why = "bindingFailureConditions must not overlap with bindingConditions";
                errors.push(FieldError::invalid(&path, *name, why));
            }
        }
    }
    for (key, other, missing) in [
        (KEYS[0], KEYS[1], waits.is_empty() && !fails.is_empty()),
        (KEYS[1], KEYS[0], fails.is_empty() && !waits.is_empty()),
    ] {
        if missing {
            let why = format!("{key} are required to use {other}");
            errors.push(FieldError::invalid(&path.child(key), result[key].clone(), why));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn reports_go_with_their_devices() {
        let device = |name: &str| json!({"driver": "d.example", "pool": "p", "device": name});
        let old = json!({"allocation": {"devices": {"results": [device("a"), device("b")]}}});
        let mut status = json!({"allocation": {"devices": {"results": [device("a")]}}, "devices": [device("a"), device("b"), device("c")]});
        drop_deallocated(&mut status, &old);
        assert_eq!(
            status["devices"],
            json!([device("a"), device("c")]),
            "validation refuses the unknown one"
        );
        let mut status = json!({"devices": [device("a"), device("b")]});
        drop_deallocated(&mut status, &old);
        assert_eq!(status, json!({}));
    }

    #[test]
    fn devices_are_those_of_the_allocation() {
        let device = |name: &str| json!({"driver": "d.example", "pool": "p", "device": name});
        let status = json!({
            "allocation": {"devices": {"results": [device("a")]}},
            "devices": [device("a"), device("b"), device("a")],
        });
        assert_eq!(
            fields(validate_devices(&status, &Path::new("status"))),
            [
                r#"status.devices[1]: Invalid value: {"Driver":"d.example","Pool":"p","Device":"b","ShareID":""}: must be an allocated device in the claim"#,
                r#"status.devices[2]: Duplicate value: {"Driver":"d.example","Pool":"p","Device":"a","ShareID":""}"#,
            ]
        );
    }

    #[test]
    fn addresses_of_interfaces_have_one_form() {
        let rows = [
            ("10.9.8.7/24", None),
            ("2001:db8::1/64", None),
            ("10.9.8.07/24", Some("must be in canonical form (\"10.9.8.7/24\")")),
            ("2001:DB8::1/64", Some("must be in canonical form (\"2001:db8::1/64\")")),
            ("10.9.8.7", Some(NOT_AN_INTERFACE_ADDRESS)),
            ("10.9.8.7/33", Some(NOT_AN_INTERFACE_ADDRESS)),
        ];
        for (text, wrong) in rows {
            let got = validate_address(text, &Path::new("ip")).map(|error| error.detail.to_string());
            assert_eq!(got.as_deref(), wrong, "{text}");
        }
    }

    #[test]
    fn shares_are_named_by_uids() {
        let rows = [
            ("6f9619ff-8b86-d011-b42d-00cf4fc964ff", None),
            ("x", Some("error validating uid: invalid UUID length: 1")),
            ("zf9619ff-8b86-d011-b42d-00cf4fc964ff", Some("error validating uid: invalid UUID format")),
        ];
        for (text, wrong) in rows {
            let got = validate_share(&json!(text), &Path::new("id")).map(|error| error.detail.to_string());
            assert_eq!(got.as_deref(), wrong, "{text}");
        }
        let upper = validate_share(&json!("6F9619FF-8B86-D011-B42D-00CF4FC964FF"), &Path::new("id"));
        assert!(upper.is_some_and(|error| error.detail.starts_with("uid must be in RFC 4122")));
    }
}
