mod behaviour;
mod hostile;
mod validation;

use super::*;
use crate::field::FieldErrors;
use serde_json::{Value, json};

fn strategy(kind: &str) -> Arc<dyn Strategy> {
    built_in().into_iter().find(|r| r.kind == kind).unwrap().strategy
}

fn texts(errors: FieldErrors) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

/// Puts `changes` over `object`, objects merged and everything else replaced.
fn overlay(object: &mut Value, changes: &Value) {
    match changes {
        Value::Object(fields) if object.is_object() => {
            for (key, value) in fields {
                overlay(&mut object[key], value);
            }
        }
        other => *object = other.clone(),
    }
}

fn minimal(kind: &str) -> Value {
    let template =
        json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let workload = json!({"spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template}});
    let mut object = match kind {
        "Pod" => json!({"spec": template["spec"]}),
        "Deployment" | "ReplicaSet" => workload,
        "Service" => json!({"spec": {"ports": [{"port": 80}]}}),
        "EndpointSlice" => json!({"addressType": "IPv4", "endpoints": [{"addresses": ["192.0.2.1"]}]}),
        "Event" => json!({"involvedObject": {"namespace": "n"}}),
        "Binding" => json!({"target": {"kind": "Node", "name": "n"}}),
        _ => json!({}),
    };
    object["metadata"] = json!({"name": "x", "namespace": "n"});
    object
}

/// Errors of a minimal object with some fields changed, defaulted as the server would.
fn errors_with(kind: &str, changes: &Value) -> Vec<String> {
    let mut object = minimal(kind);
    overlay(&mut object, changes);
    let strategy = strategy(kind);
    strategy.default(&mut object);
    strategy.prepare_create(&mut object);
    texts(strategy.validate(&object))
}

#[test]
fn minimal_objects_are_valid() {
    for resource in built_in() {
        assert_eq!(errors_with(&resource.kind, &json!({})), [""; 0], "{resource:?}");
    }
}

#[test]
fn every_row_is_complete() {
    for resource in built_in() {
        assert!(
            !resource.kind.is_empty() && resource.plural.starts_with(&resource.singular[..3]),
            "{resource:?}"
        );
        assert!(resource.verbs.is_sorted(), "{resource:?}");
        assert!(resource.subresources.is_sorted_by_key(|s| s.name), "{resource:?}");
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut object = serde_json::json!({"metadata": {"name": "x"}});
        resource.strategy.default(&mut object);
        let once = object.clone();
        resource.strategy.default(&mut object);
        assert_eq!(object, once, "defaulting {resource:?} twice");
        let (columns, cells) = (resource.strategy.columns(), resource.strategy.cells(&object, now));
        assert_eq!(columns.len(), cells.len(), "{resource:?}");
        for field in resource.strategy.selectable_fields() {
            resource.strategy.selectable_value(&object, field);
        }
    }
}
