//! NetworkPolicies.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, ensure_object, list, list_mut, object, present, strings, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{Cidr, cidr, port, port_number_or_name};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::common::workload;
use crate::resource::{Column, Strategy};
use crate::selector::validate_label_selector;
use ferrite_json::{Value, json};
use jiff::Timestamp;

pub(in crate::kinds) struct NetworkPolicies;

impl Strategy for NetworkPolicies {
    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        for direction in ["ingress", "egress"] {
            for rule in list_mut(spec, direction) {
                for port in list_mut(rule, "ports") {
                    default_field(port, "protocol", "TCP");
                }
            }
        }
        if list(spec, "policyTypes").is_empty() {
            let both = !list(spec, "egress").is_empty();
            spec["policyTypes"] = if both { json!(["Ingress", "Egress"]) } else { json!(["Ingress"]) };
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_label_selector(&spec["podSelector"], &path.child("podSelector"));
        for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
            for (index, rule) in list(spec, direction).iter().enumerate() {
                let path = path.child(direction).index(index);
                for (index, entry) in list(rule, "ports").iter().enumerate() {
                    errors.extend(validate_port(entry, &path.child("ports").index(index)));
                }
                for (index, peer) in list(rule, peers).iter().enumerate() {
                    errors.extend(validate_peer(peer, &path.child(peers).index(index)));
                }
            }
        }
        let (types, path) = (strings(spec, "policyTypes"), path.child("policyTypes"));
        if types.len() > 2 {
            errors.push(FieldError::invalid(&path, types, "may not specify more than two policyTypes"));
            return errors;
        }
        for (index, kind) in types.into_iter().enumerate() {
            if !matches!(kind, "Ingress" | "Egress") {
                errors.push(FieldError::not_supported(&path.index(index), kind, &["Ingress", "Egress"]));
            }
        }
        errors
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Pod-Selector"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            cell::name(object),
            workload::selector_cell(&object["spec"]["podSelector"]).into(),
            cell::age(object, now),
        ]
    }
}

fn validate_port(entry: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if let Some(protocol) = entry["protocol"].as_str().filter(|p| !matches!(*p, "TCP" | "UDP" | "SCTP")) {
        errors.push(FieldError::not_supported(&path.child("protocol"), protocol, &["TCP", "UDP", "SCTP"]));
    }
    let end_path = path.child("endPort");
    let end = entry["endPort"].as_i64();
    let mut complain = |why: &str| {
        if let Some(end) = end {
            errors.push(FieldError::invalid(&end_path, end, why));
        }
    };
    match &entry["port"] {
        Value::Null => complain("may not be specified when `port` is not specified"),
        Value::String(_) => {
            complain("may not be specified when `port` is non-numeric");
            errors.extend(port_number_or_name(&entry["port"], &path.child("port")));
        }
        number => {
            let number = number.as_i64().unwrap_or(0);
            let mut found: FieldErrors = port(number, &path.child("port")).into_iter().collect();
            if let Some(end) = end {
                if end < number {
                    // As upstream: the error shows the port.
                    found.push(FieldError::invalid(
                        &end_path,
                        number,
                        "must be greater than or equal to `port`",
                    ));
                }
                found.extend(port(end, &end_path));
            }
            errors.extend(found);
        }
    }
    errors
}

fn validate_peer(peer: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["podSelector", "namespaceSelector"] {
        if present(peer, key) {
            errors.extend(validate_label_selector(&peer[key], &path.child(key)));
        }
    }
    let block = object(peer, "ipBlock");
    if let Some(block) = block {
        errors.extend(validate_block(block, &path.child("ipBlock")));
    }
    let selectors = present(peer, "podSelector") || present(peer, "namespaceSelector");
    match (block.is_some(), selectors) {
        (false, false) => errors.push(FieldError::required(path, "must specify a peer")),
        (true, true) => {
            errors.push(FieldError::forbidden(path, "may not specify both ipBlock and another peer"));
        }
        _ => {}
    }
    errors
}

fn validate_block(block: &Value, path: &Path) -> FieldErrors {
    let value = text(block, "cidr");
    if value.is_empty() {
        return vec![FieldError::required(&path.child("cidr"), "")];
    }
    // A badly written range may still be understood.
    let mut errors = cidr(value, &path.child("cidr")).err().unwrap_or_default();
    let Some(whole) = Cidr::parse(value) else { return errors };
    for (index, except) in strings(block, "except").into_iter().enumerate() {
        let path = path.child("except").index(index);
        let strictly_within = |part: Cidr| whole.contains(part) && part.bits > whole.bits;
        errors.extend(cidr(except, &path).err().unwrap_or_default());
        if Cidr::parse(except).is_some_and(|part| !strictly_within(part)) {
            errors.push(FieldError::invalid(&path, except, "must be a strict subset of `cidr`"));
        }
    }
    errors
}
