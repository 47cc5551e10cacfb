//! ResourceSlices: the devices of drivers.

use super::allocation::validate_pool_name;
use super::claim::validate_attribute_name;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    ensure_object, flag, int, list, list_mut, map, object, object_mut, present, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::common::semver::Version;
use crate::kinds::common::volume_source::validate_driver_name;
use crate::kinds::core::pod::validate_node_selector;
use crate::meta_validation::{dns1123_label, dns1123_subdomain, label_value, qualified_name};
use crate::quantity::canonicalise;
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

const DEVICES_MAX: usize = 128;
/// The limit where a device has taints or consumes counters: such devices cost more to validate and to allocate.
const ADVANCED_DEVICES_MAX: usize = 64;
const TAINTS_MAX: usize = 16;
const ATTRIBUTES_MAX: usize = 32;
const VALUE_MAX: usize = 64;
const WHERE: [&str; 4] = ["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];

pub(in crate::kinds) struct ResourceSlices;

impl Strategy for ResourceSlices {
    fn warnings(&self, object: &Value) -> Vec<String> {
        let driver = text(&object["spec"], "driver");
        let warning = || {
            format!("spec.driver: driver names should be lowercase; {driver:?} contains uppercase characters")
        };
        (driver != driver.to_lowercase()).then(warning).into_iter().collect()
    }

    fn warnings_on_update(&self, new: &Value, _old: &Value) -> Vec<String> {
        self.warnings(new)
    }

    fn default(&self, object: &mut Value) {
        for device in list_mut(ensure_object(object, "spec"), "devices") {
            default_taints(device);
            let Some(capacity) = object_mut(device, "capacity") else { continue };
            for amount in capacity.as_object_mut().into_iter().flatten().map(|(_, amount)| amount) {
                if let Some(value) = amount.get_mut("value") {
                    canonicalise(value);
                }
            }
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_spec(&object["spec"], None)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        validate_spec(&new["spec"], Some(&old["spec"]))
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["spec.driver", "spec.nodeName"]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        text(&object["spec"], field.strip_prefix("spec.").unwrap_or_default()).to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Node"), shown("Driver"), shown("Pool"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        vec![
            cell::name(object),
            text(spec, "nodeName").into(),
            text(spec, "driver").into(),
            text(&spec["pool"], "name").into(),
            cell::age(object, now),
        ]
    }

    fn unknown_field(&self, field: &str) -> String {
        format!("field label not supported for resource.k8s.io/v1, Kind=ResourceSlice: {field}")
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

/// Validates a specification that is new, or comes after `old`.
fn validate_spec(spec: &Value, old: Option<&Value>) -> FieldErrors {
    let path = Path::new("spec");
    let mut errors = validate_driver_name(text(spec, "driver"), &path.child("driver"));
    errors.extend(validate_pool(&spec["pool"], &path.child("pool")));
    if let Some(old) = old {
        for (is, was, path) in [
            (text(&spec["pool"], "name"), text(&old["pool"], "name"), path.child("pool").child("name")),
            (text(spec, "driver"), text(old, "driver"), path.child("driver")),
        ] {
            errors.extend((is != was).then(|| FieldError::invalid(&path, is, IMMUTABLE)));
        }
        if spec["nodeName"] != old["nodeName"] {
            errors.push(FieldError::invalid(&path.child("nodeName"), spec["nodeName"].clone(), IMMUTABLE));
        }
    }
    errors.extend(validate_where(spec, &path));
    let devices = list(spec, "devices");
    let path = path.child("devices");
    let max = if devices.iter().any(is_advanced) { ADVANCED_DEVICES_MAX } else { DEVICES_MAX };
    if devices.len() > max {
        errors.push(FieldError::too_many(&path, devices.len(), max));
    }
    let mut names = HashSet::new();
    for (index, device) in devices.iter().enumerate() {
        let path = path.index(index);
        errors.extend(validate_device(device, &path));
        let name = text(device, "name");
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path, name));
        }
    }
    errors
}

fn validate_pool(pool: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_pool_name(text(pool, "name"), &path.child("name"));
    if int(pool, "resourceSliceCount") <= 0 {
        errors.push(FieldError::invalid(
            &path.child("resourceSliceCount"),
            int(pool, "resourceSliceCount"),
            "must be greater than zero",
        ));
    }
    if int(pool, "generation") < 0 {
        errors.push(FieldError::invalid(
            &path.child("generation"),
            int(pool, "generation"),
            "must be greater than or equal to zero",
        ));
    }
    errors
}

/// Where the devices are is said in exactly one way.
fn validate_where(spec: &Value, path: &Path) -> FieldErrors {
    const ONE: &str =
        "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    let mut errors = Vec::new();
    let set: Vec<&str> = WHERE
        .into_iter()
        .filter(|key| match *key {
            "allNodes" | "perDeviceNodeSelection" => flag(spec, key),
            "nodeName" => !text(spec, "nodeName").is_empty(),
            _ => present(spec, key),
        })
        .collect();
    if let Some(node) = spec["nodeName"].as_str() {
        let path = path.child("nodeName");
        if node.is_empty() {
            errors.push(FieldError::invalid(
                &path,
                node,
                "must be either unset or set to a non-empty string",
            ));
        } else {
            errors.extend(complaints(&path, node, dns1123_subdomain(node)));
        }
    }
    if let Some(selector) = object(spec, "nodeSelector") {
        errors.extend(validate_node_selector(selector, &path.child("nodeSelector")));
        if list(selector, "nodeSelectorTerms").len() != 1 {
            errors.push(FieldError::invalid(
                &path.child("nodeSelector").child("nodeSelectorTerms"),
                list(selector, "nodeSelectorTerms").to_vec(),
                "must have exactly one node selector term",
            ));
        }
    }
    for key in ["allNodes", "perDeviceNodeSelection"] {
        if spec[key] == false {
            errors.push(FieldError::invalid(&path.child(key), false, "must be either unset or set to true"));
        }
    }
    match set.len() {
        0 => errors.push(FieldError::required(path, ONE)),
        1 => {}
        _ => {
            let named: Vec<String> = set.iter().map(|key| format!("`{key}`")).collect();
            errors.push(FieldError::invalid(
                path,
                format!("{{{}}}", named.join(", ")),
                format!("{ONE}, but multiple fields are set"),
            ));
        }
    }
    errors
}

fn validate_device(device: &Value, path: &Path) -> FieldErrors {
    let name = text(device, "name");
    let mut errors = complaints(&path.child("name"), name, dns1123_label(name));
    let (attributes, capacity) = (map(device, "attributes"), map(device, "capacity"));
    let total = attributes.map_or(0, ferrite_json::Map::len) + capacity.map_or(0, ferrite_json::Map::len);
    if total > ATTRIBUTES_MAX {
        errors.push(FieldError::invalid(
            path,
            total,
            format!("the total number of attributes and capacities must not exceed {ATTRIBUTES_MAX}"),
        ));
    }
    for (name, attribute) in attributes.into_iter().flatten() {
        let path = path.child("attributes").key(name);
        errors.extend(validate_attribute_name(name, false, &path));
        errors.extend(validate_attribute(attribute, &path));
    }
    for name in capacity.into_iter().flat_map(ferrite_json::Map::keys) {
        errors.extend(validate_attribute_name(name, false, &path.child("capacity").key(name)));
    }
    let (taints, path) = (list(device, "taints"), path.child("taints"));
    if taints.len() > TAINTS_MAX {
        errors.push(FieldError::too_many(&path, taints.len(), TAINTS_MAX));
    }
    for (index, taint) in taints.iter().enumerate() {
        errors.extend(validate_taint(taint, &path.index(index)));
    }
    errors
}

fn is_advanced(device: &Value) -> bool {
    !list(device, "taints").is_empty() || !list(device, "consumesCounters").is_empty()
}

/// The time of a taint: a second is as fine as the API writes it.
pub(super) fn date_taint(taint: &mut Value) {
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    taint["timeAdded"] = now.to_string().into();
}

/// A taint without a time was added now: the time that a claim tolerates it starts with its first write.
pub(super) fn default_taint(taint: &mut Value) {
    if taint["timeAdded"].is_null() {
        date_taint(taint);
    }
}

fn default_taints(device: &mut Value) {
    list_mut(device, "taints").filter(|taint| taint.is_object()).for_each(default_taint);
}

pub(super) fn validate_taint(taint: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_taint_label(taint, path);
    errors.extend(validate_effect(text(taint, "effect"), &path.child("effect")));
    errors
}

pub(super) fn validate_taint_label(taint: &Value, path: &Path) -> FieldErrors {
    let (key, value) = (text(taint, "key"), text(taint, "value"));
    let mut errors = complaints(&path.child("key"), key, qualified_name(key));
    errors.extend(complaints(&path.child("value"), value, label_value(value)));
    errors
}

fn validate_effect(effect: &str, path: &Path) -> Option<FieldError> {
    const EFFECTS: [&str; 3] = ["NoExecute", "NoSchedule", "None"];
    if effect.is_empty() {
        Some(FieldError::required(path, ""))
    } else if !EFFECTS.contains(&effect) {
        Some(FieldError::not_supported(path, effect, &EFFECTS))
    } else {
        None
    }
}

fn validate_attribute(attribute: &Value, path: &Path) -> FieldErrors {
    const ONE: &str = "exactly one value must be specified";
    let mut errors = Vec::new();
    let given = attribute.as_object().map_or(0, |a| a.values().filter(|v| !v.is_null()).count());
    for key in ["string", "version"] {
        let Some(value) = attribute[key].as_str() else { continue };
        if key == "version" && Version::parse(value).is_none() {
            errors.push(FieldError::invalid(
                &path.child(key),
                value,
                "must be a string compatible with semver.org spec 2.0.0",
            ));
        }
        if value.len() > VALUE_MAX {
            errors.push(FieldError::too_long(&path.child(key), VALUE_MAX));
        }
    }
    match given {
        0 => errors.push(FieldError::invalid(path, "", ONE)),
        1 => {}
        _ => errors.push(
            FieldError::invalid(path, attribute.clone(), ONE)
                .rendered_as(go::compact("DeviceAttribute", attribute)),
        ),
    }
    errors
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn taints_are_dated_and_validated() {
        let mut device = json!({"name": "d", "taints": [
            {"key": "example.com/broken", "effect": "NoExecute"},
            {"key": "a b", "value": "?", "effect": "Never", "timeAdded": "2026-01-01T00:00:00Z"},
            {"key": "", "timeAdded": null},
        ]});
        default_taints(&mut device);
        assert!(device["taints"][0]["timeAdded"].as_str().unwrap().parse::<Timestamp>().is_ok());
        assert_eq!(device["taints"][1]["timeAdded"], "2026-01-01T00:00:00Z");
        let errors = validate_device(&device, &Path::new("d"));
        let found: Vec<String> = errors.iter().map(|error| error.path.to_string()).collect();
        assert_eq!(
            found,
            [
                "d.taints[1].key",
                "d.taints[1].value",
                "d.taints[1].effect",
                "d.taints[2].key",
                "d.taints[2].key",
                "d.taints[2].effect"
            ]
        );
    }
}
