//! Nodes.

use super::access::{default_field, ensure_object, flag, keep, list, map, present, text};
use super::pod::defaults::default_resource_list;
use super::{NAME, shown, wide};
use crate::resource::{Column, Strategy};
use crate::table::{NONE, UNKNOWN, age};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeSet;

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

pub(super) struct Nodes;

impl Strategy for Nodes {
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

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
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
        vec![
            crate::meta::name(object).into(),
            status_cell(object).into(),
            roles_cell(object).into(),
            age(object, now).into(),
            text(info, "kubeletVersion").into(),
            address(status, "InternalIP").into(),
            address(status, "ExternalIP").into(),
            known("osImage").into(),
            known("kernelVersion").into(),
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

/// Roles are what follows the prefix in the keys of labels, or the value of the older label.
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
