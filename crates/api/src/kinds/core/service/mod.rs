//! Services.

mod update;
mod validate;
mod warnings;

pub use validate::validate_cluster_ips;

use crate::field::FieldErrors;
use crate::kinds::common::access::{
    default_field, default_text, ensure_object, int, keep, list, list_mut, map, strings, text,
};
use crate::kinds::common::row::{NAME, shown, wide};
use crate::meta_validation::dns1123_label;
use crate::resource::{Column, Strategy};
use crate::table::{NONE, UNKNOWN, age};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::BTreeSet;

/// Default time that a client stays with the same endpoint: three hours.
const AFFINITY_SECONDS: i64 = 10_800;

pub(in crate::kinds) struct Services;

impl Strategy for Services {
    fn default(&self, object: &mut Value) {
        default_service_spec(ensure_object(object, "spec"));
        ensure_object(ensure_object(object, "status"), "loadBalancer");
        default_ip_mode(object);
    }

    fn prepare_create(&self, object: &mut Value) {
        object["status"] = json!({"loadBalancer": {}});
        update::normalise_cluster_ips(ensure_object(object, "spec"), None);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        if text(&new["spec"], "type") != "LoadBalancer"
            && let Some(balancer) = new.pointer_mut("/status/loadBalancer")
        {
            *balancer = json!({});
        }
        let spec = ensure_object(new, "spec");
        update::keep_allocations(spec, &old["spec"]);
        update::normalise_cluster_ips(spec, Some(&old["spec"]));
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate::validate(object)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        validate::validate_update(new, old)
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate::validate_status(new)
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        warnings::warnings(object)
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        dns1123_label(name)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["spec.clusterIP", "spec.type"]
    }

    fn text_fields(&self) -> &'static [&'static str] {
        &["spec.clusterIP", "spec.type"]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        text(&object["spec"], field.strip_prefix("spec.").unwrap_or_default()).to_owned()
    }

    fn returns_deleted(&self) -> bool {
        true
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Type"),
                shown("Cluster-IP"),
                shown("External-IP"),
                shown("Port(s)"),
                shown("Age"),
                wide("Selector"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        vec![
            crate::meta::name(object).into(),
            text(spec, "type").into(),
            strings(spec, "clusterIPs").first().copied().unwrap_or(NONE).into(),
            external_cell(object).into(),
            ports_cell(spec).into(),
            age(object, now).into(),
            selector_cell(spec).into(),
        ]
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

/// Addresses of a load balancer are its own unless it says otherwise.
fn default_ip_mode(service: &mut Value) {
    if text(&service["spec"], "type") != "LoadBalancer" {
        return;
    }
    for ingress in
        service.pointer_mut("/status/loadBalancer").map(|b| list_mut(b, "ingress")).into_iter().flatten()
    {
        if !text(ingress, "ip").is_empty() {
            default_field(ingress, "ipMode", "VIP");
        }
    }
}

fn default_service_spec(spec: &mut Value) {
    default_text(spec, "sessionAffinity", "None");
    match text(spec, "sessionAffinity") {
        "None" => {
            if let Some(spec) = spec.as_object_mut() {
                spec.remove("sessionAffinityConfig");
            }
        }
        "ClientIP" => {
            let client = ensure_object(ensure_object(spec, "sessionAffinityConfig"), "clientIP");
            default_field(client, "timeoutSeconds", AFFINITY_SECONDS);
        }
        _ => {}
    }
    default_text(spec, "type", "ClusterIP");
    for port in list_mut(spec, "ports") {
        default_text(port, "protocol", "TCP");
        let unset = match &port["targetPort"] {
            Value::Null => true,
            Value::Number(number) => number.as_i64() == Some(0),
            Value::String(name) => name.is_empty(),
            _ => false,
        };
        if unset && port.is_object() {
            port["targetPort"] = int(port, "port").into();
        }
    }
    if is_externally_accessible(spec) {
        default_text(spec, "externalTrafficPolicy", "Cluster");
    }
    if matches!(text(spec, "type"), "ClusterIP" | "NodePort" | "LoadBalancer") {
        default_field(spec, "internalTrafficPolicy", "Cluster");
    }
    if text(spec, "type") == "LoadBalancer" {
        default_field(spec, "allocateLoadBalancerNodePorts", true);
    }
}

/// Returns true if the service has no address of its own.
fn is_headless(spec: &Value) -> bool {
    text(spec, "clusterIP") == "None" || strings(spec, "clusterIPs") == ["None"]
}

/// Returns true if traffic from outside the cluster may reach the service.
fn is_externally_accessible(spec: &Value) -> bool {
    match text(spec, "type") {
        "LoadBalancer" | "NodePort" => true,
        "ClusterIP" => !list(spec, "externalIPs").is_empty(),
        _ => false,
    }
}

fn external_cell(service: &Value) -> String {
    let spec = &service["spec"];
    let external = strings(spec, "externalIPs");
    match text(spec, "type") {
        "ClusterIP" | "NodePort" if external.is_empty() => NONE.to_owned(),
        "ClusterIP" | "NodePort" => external.join(","),
        "LoadBalancer" => {
            let given: BTreeSet<&str> = list(&service["status"]["loadBalancer"], "ingress")
                .iter()
                .map(|i| match text(i, "ip") {
                    "" => text(i, "hostname"),
                    ip => ip,
                })
                .filter(|address| !address.is_empty())
                .collect();
            let all: Vec<&str> = given.into_iter().chain(external).collect();
            if all.is_empty() { "<pending>".to_owned() } else { all.join(",") }
        }
        "ExternalName" => text(spec, "externalName").to_owned(),
        _ => UNKNOWN.to_owned(),
    }
}

fn ports_cell(spec: &Value) -> String {
    let ports: Vec<String> = list(spec, "ports")
        .iter()
        .map(|port| match int(port, "nodePort") {
            0 => format!("{}/{}", int(port, "port"), text(port, "protocol")),
            node => format!("{}:{node}/{}", int(port, "port"), text(port, "protocol")),
        })
        .collect();
    if ports.is_empty() { NONE.to_owned() } else { ports.join(",") }
}

fn selector_cell(spec: &Value) -> String {
    let pairs: Vec<String> = map(spec, "selector")
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    if pairs.is_empty() { NONE.to_owned() } else { pairs.join(",") }
}
