//! Nodes.

mod config;

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, ensure_object, flag, keep, list, map, present, remove, strings, text,
};
use crate::kinds::common::check::{NOT_NEGATIVE, cidr, complaints, repeated};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::kinds::core::pod::defaults::default_resource_list;
use crate::kinds::core::pod::resources::{amounts, is_integer_resource};
use crate::kinds::core::pod::validate_taint_effect;
use crate::meta_validation::{label_value, qualified_name};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::{NONE, UNKNOWN, age};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::{BTreeSet, HashSet};

const NODE_INFO: [&str; 10] = [
    "machineID",
    "systemUUID",
    "bootID",
    "kernelVersion",
    "osImage",
    "containerRuntimeVersion",
    "kubeletVersion",
    "kubeProxyVersion",
    "operatingSystem",
    "architecture",
];

pub(in crate::kinds) struct Nodes;

impl Strategy for Nodes {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_pod_cidrs(ensure_object(object, "spec"));
        let status = ensure_object(object, "status");
        if !present(status, "allocatable")
            && let Some(capacity) = status.get("capacity").filter(|c| c.is_object()).cloned()
        {
            status["allocatable"] = capacity;
        }
        for key in ["capacity", "allocatable"] {
            if let Some(amounts) = status.get_mut(key) {
                default_resource_list(amounts);
            }
        }
        default_field(ensure_object(ensure_object(status, "daemonEndpoints"), "kubeletEndpoint"), "Port", 0);
        let info = ensure_object(status, "nodeInfo");
        for key in NODE_INFO {
            default_field(info, key, "");
        }
    }

    fn prepare_create(&self, object: &mut Value) {
        remove(&mut object["spec"], "configSource");
        remove(&mut object["status"], "config");
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        if !present(&old["spec"], "configSource") {
            remove(&mut new["spec"], "configSource");
        }
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        // As upstream: kubelets are no longer configured through the API, and nothing new is reported of that.
        if !present(&old["status"], "config") {
            remove(&mut new["status"], "config");
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let spec = &object["spec"];
        let mut errors = validate_annotations(&object["metadata"]);
        errors.extend(validate_taints(list(spec, "taints"), &taints_path()));
        errors.extend(validate_amounts(&object["status"]));
        if let Some(swap) = object["status"]["nodeInfo"]["swap"]["capacity"].as_i64().filter(|s| *s <= 0) {
            // As upstream: swap is named at the metadata.
            let path = Path::new("metadata").child("nodeSwapStatus").child("capacity");
            errors.push(FieldError::invalid(&path, swap, "must be greater than zero"));
        }
        errors.extend(validate_features(&object["status"]));
        errors.extend(validate_pod_cidrs(spec, &Path::new("spec").child("podCIDRs")));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        // As upstream: the node is checked as a new one, and again as one that changes.
        let mut errors = self.validate(new);
        errors.extend(validate_change(new, old));
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        validate_change(new, old)
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        let spec = &object["spec"];
        let mut warnings = Vec::new();
        if present(spec, "configSource") {
            warnings.push("spec.configSource: the feature is removed".to_owned());
        }
        if !text(spec, "externalID").is_empty() {
            warnings
                .push("spec.externalID: this field is deprecated, and is unused by Kubernetes".to_owned());
        }
        warnings
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["spec.unschedulable"]
    }

    fn selectable_value(&self, object: &Value, _field: &str) -> String {
        flag(&object["spec"], "unschedulable").to_string()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Status"),
                shown("Roles"),
                shown("Age"),
                shown("Version"),
                wide("Internal-IP"),
                wide("External-IP"),
                wide("OS-Image"),
                wide("Kernel-Version"),
                wide("Container-Runtime"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let status = &object["status"];
        let info = &status["nodeInfo"];
        let known = |key: &str| match text(info, key) {
            "" => UNKNOWN,
            value => value,
        };
        let kernel = match text(info, "architecture") {
            "" => known("kernelVersion").to_owned(),
            architecture => format!("{} ({architecture})", known("kernelVersion")),
        };
        vec![
            crate::meta::name(object).into(),
            status_cell(object).into(),
            roles_cell(object).into(),
            age(object, now).into(),
            text(info, "kubeletVersion").into(),
            address(status, "InternalIP").into(),
            address(status, "ExternalIP").into(),
            known("osImage").into(),
            kernel.into(),
            known("containerRuntimeVersion").into(),
        ]
    }
}

/// `podCIDR` is the first of `podCIDRs`; where only one of them is set, or they differ, the single one counts.
fn default_pod_cidrs(spec: &mut Value) {
    let single = text(spec, "podCIDR").to_owned();
    let first = list(spec, "podCIDRs").first().and_then(Value::as_str).unwrap_or_default().to_owned();
    if !single.is_empty() && single != first {
        spec["podCIDRs"] = json!([single]);
    } else if single.is_empty() && !first.is_empty() {
        spec["podCIDR"] = first.into();
    }
}

fn status_cell(node: &Value) -> String {
    let ready = list(&node["status"], "conditions").iter().find(|c| text(c, "type") == "Ready");
    let word = match ready.map(|c| text(c, "status")) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    };
    if flag(&node["spec"], "unschedulable") { format!("{word},SchedulingDisabled") } else { word.to_owned() }
}

/// Roles are the parts after the prefix in the keys of labels, or the value of the older label.
fn roles_cell(node: &Value) -> String {
    let mut roles = BTreeSet::new();
    for (key, value) in map(&node["metadata"], "labels").into_iter().flatten() {
        if let Some(role) = key.strip_prefix("node-role.kubernetes.io/") {
            roles.insert(role);
        } else if key == "kubernetes.io/role" {
            roles.insert(value.as_str().unwrap_or_default());
        }
    }
    roles.remove("");
    if roles.is_empty() { NONE.to_owned() } else { roles.into_iter().collect::<Vec<_>>().join(",") }
}

fn address<'a>(status: &'a Value, kind: &str) -> &'a str {
    list(status, "addresses").iter().find(|a| text(a, "type") == kind).map_or(NONE, |a| text(a, "address"))
}

/// Where upstream says that taints are.
fn taints_path() -> Path {
    Path::new("metadata").child("taints")
}

fn validate_change(new: &Value, old: &Value) -> FieldErrors {
    let (is, was, path) = (&new["spec"], &old["spec"], Path::new("spec"));
    let mut errors = validate_annotations(&new["metadata"]);
    errors.extend(validate_amounts(&new["status"]));
    errors.extend(validate_features(&new["status"]));
    let addresses = list(&new["status"], "addresses");
    let again = repeated(addresses.iter().map(Value::to_string));
    for (index, address) in addresses.iter().enumerate() {
        if again[index] {
            let path = Path::new("status").child("addresses").index(index);
            let shown = format!("{{\"Type\":{},\"Address\":{}}}", address["type"], address["address"]);
            errors.push(FieldError::duplicate(&path, address.clone()).rendered_as(shown));
        }
    }
    // A range, once given to a node, stays with it.
    let (cidrs, old_cidrs) = (list(is, "podCIDRs"), list(was, "podCIDRs"));
    let changes = match old_cidrs.len() {
        0 => 0,
        length if length != cidrs.len() => 1,
        _ => cidrs.iter().zip(old_cidrs).filter(|(is, was)| is != was).count(),
    };
    for _ in 0..changes {
        errors.push(FieldError::forbidden(
            &path.child("podCIDRs"),
            "node updates may not change podCIDR except from \"\" to valid",
        ));
    }
    let provider = text(was, "providerID");
    if !provider.is_empty() && provider != text(is, "providerID") {
        errors.push(FieldError::forbidden(
            &path.child("providerID"),
            "node updates may not change providerID except from \"\" to valid",
        ));
    }
    errors.extend(config::validate(new));
    errors.extend(validate_taints(list(is, "taints"), &taints_path()));
    if text(is, "externalID") != text(was, "externalID") {
        errors.push(FieldError::forbidden(&path.child("externalID"), "may not be updated"));
    }
    errors
}

/// The features of a node's agent: sorted names, each once.
fn validate_features(status: &Value) -> FieldErrors {
    const MAX: usize = 253;
    let path = Path::new("status").child("declaredFeatures");
    let features = strings(status, "declaredFeatures");
    let sound = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.split('/').all(|s| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric()))
    };
    let mut errors = Vec::new();
    for (index, feature) in features.iter().enumerate() {
        let mut wrong = |index: usize, value: &str, why: String| {
            errors.push(FieldError::invalid(&path.index(index), value, why));
        };
        if feature.len() > MAX {
            let why = format!("invalid feature name {feature:?}: must be no more than {MAX} characters");
            wrong(index, feature, why);
        } else if !sound(feature) {
            let why = format!(
                "invalid feature name {feature:?}: must start with an UpperCamelCase segment, with subsequent segments \
                 separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters \
                 and slashes"
            );
            wrong(index, feature, why);
        }
        match features.get(index + 1) {
            Some(next) if next < feature => {
                wrong(index + 1, next, "list must be sorted alphabetically".to_owned());
            }
            Some(next) if next == feature => {
                errors.push(FieldError::duplicate(&path.index(index + 1), *next));
            }
            _ => {}
        }
    }
    errors
}

/// Taints and pods to avoid, as they were written before they were fields.
fn validate_annotations(metadata: &Value) -> FieldErrors {
    const TAINTS: &str = "scheduler.alpha.kubernetes.io/taints";
    const AVOID: &str = "scheduler.alpha.kubernetes.io/preferAvoidPods";
    let path = Path::new("metadata").child("annotations");
    let mut errors = Vec::new();
    let written = |key: &str| metadata["annotations"][key].as_str().filter(|value| !value.is_empty());
    if let Some(value) = written(TAINTS) {
        match crate::codec::json::decode_any(value.as_bytes()) {
            Err(error) => errors.push(FieldError::invalid(&path, TAINTS, error.to_string())),
            Ok(decoded) => errors.extend(validate_taints(
                decoded.value.as_array().map(Vec::as_slice).unwrap_or_default(),
                &path.child(TAINTS),
            )),
        }
    }
    if let Some(value) = written(AVOID) {
        match crate::codec::json::decode_any(value.as_bytes()) {
            Err(error) => {
                errors.push(FieldError::invalid(&path.child("AvoidPods"), AVOID, error.to_string()));
            }
            Ok(decoded) => {
                for (index, entry) in list(&decoded.value, "preferAvoidPods").iter().enumerate() {
                    let path = path.child(AVOID).index(index).child("PodSignature");
                    let controller = &entry["podSignature"]["podController"];
                    if !controller.is_object() {
                        errors.push(FieldError::required(&path, ""));
                    } else if !flag(controller, "controller") {
                        errors.push(FieldError::invalid(
                            &path.child("PodController").child("Controller"),
                            false,
                            "must point to a controller",
                        ));
                    }
                }
            }
        }
    }
    errors
}

/// A node's amounts must not be negative, and must be whole where fractions make no sense.
fn validate_amounts(status: &Value) -> FieldErrors {
    let mut errors = Vec::new();
    for kind in ["capacity", "allocatable"] {
        for (name, amount) in amounts(status, kind) {
            let path = Path::new("status").child(kind).child(&name);
            if amount.is_negative() {
                errors.push(FieldError::invalid(&path, amount.to_string(), NOT_NEGATIVE));
            }
            if is_integer_resource(&name) && !amount.is_integer() {
                errors.push(FieldError::invalid(&path, amount.to_string(), "must be an integer"));
            }
        }
    }
    errors
}

fn validate_taints(taints: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for (index, taint) in taints.iter().enumerate() {
        let path = path.index(index);
        let (key, value, effect) = (text(taint, "key"), text(taint, "value"), text(taint, "effect"));
        errors.extend(complaints(&path.child("key"), key, qualified_name(key)));
        let problems = label_value(value);
        if !problems.is_empty() {
            errors.push(FieldError::invalid(&path.child("value"), value, problems.join(";")));
        }
        if effect.is_empty() {
            errors.push(FieldError::required(&path.child("effect"), ""));
        } else {
            errors.extend(validate_taint_effect(effect, &path.child("effect")));
        }
        if !seen.insert((key, effect)) {
            errors.push(
                FieldError::duplicate(&path, taint.clone())
                    .rendered_as(go::compact("Taint", taint))
                    .with_detail("taints must be unique by key and effect pair"),
            );
        }
    }
    errors
}

/// At most one range of each family.
fn validate_pod_cidrs(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut families = HashSet::new();
    let ranges = list(spec, "podCIDRs");
    for (index, range) in ranges.iter().filter_map(Value::as_str).enumerate() {
        match cidr(range, &path.index(index)) {
            Ok(range) => {
                families.insert(range.address.is_ipv4());
            }
            Err(found) => errors.extend(found),
        }
    }
    if ranges.len() < 2 {
        return errors;
    }
    // As upstream: the ranges are read once more for their families.
    if let Some((index, range)) =
        ranges.iter().enumerate().find(|(_, range)| cidr(range.as_str().unwrap_or_default(), path).is_err())
    {
        let range = range.as_str().unwrap_or_default();
        errors.push(FieldError::internal(
            path,
            format!(
                "invalid PodCIDRs. failed to check with dual stack with error:invalid CIDR[{index}]: <nil> \
                 (invalid CIDR address: {range})"
            ),
        ));
        families.clear();
    }
    if families.len() < ranges.len() {
        errors.push(FieldError::invalid(
            path,
            ranges.to_vec(),
            "may specify no more than one CIDR for each IP family",
        ));
    }
    errors
}
