//! Adds the overhead and the scheduling constraints of a pod's RuntimeClass.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::quota::amounts::amounts;
use ferrite_json::{Value, json};
use std::sync::Arc;

pub(super) struct RuntimeClass;

const MISMATCH: &str = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";

impl Plugin for RuntimeClass {
    fn name(&self) -> &'static str {
        "RuntimeClass"
    }

    fn handles(&self, _validating: bool, operation: Operation) -> bool {
        operation == Operation::Create
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") {
            return Ok(());
        }
        let Some(class) = class_of(view, attributes, object)? else { return Ok(()) };
        apply(&class, &mut object["spec"]).map_err(|why| attributes.forbid(why))
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(pod) = object.filter(|_| attributes.creates("pods")) else { return Ok(()) };
        let class = class_of(view, attributes, pod)?.unwrap_or_default();
        let (wanted, given) = (&class["overhead"]["podFixed"], &pod["spec"]["overhead"]);
        match (wanted.is_object(), given.is_object()) {
            (true, _) if amounts(wanted) != amounts(given) => Err(attributes.forbid(MISMATCH)),
            (false, true) => Err(attributes.forbid(
                "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead",
            )),
            _ => Ok(()),
        }
    }
}

fn class_of(view: &View, attributes: &Attributes<'_>, pod: &Value) -> Result<Option<Arc<Value>>, Status> {
    let Some(name) = pod["spec"]["runtimeClassName"].as_str().filter(|n| !n.is_empty()) else {
        return Ok(None);
    };
    let class = view.get("node.k8s.io", "runtimeclasses", "", name);
    let missing = || attributes.forbid(format!("pod rejected: RuntimeClass {name:?} not found"));
    class.ok_or_else(missing).map(Some)
}

/// Overhead and places to run, into a pod's spec.
fn apply(class: &Value, spec: &mut Value) -> Result<(), String> {
    let overhead = &class["overhead"]["podFixed"];
    if overhead.is_object() {
        if spec["overhead"].is_object() && amounts(&spec["overhead"]) != amounts(overhead) {
            return Err(MISMATCH.into());
        }
        spec["overhead"] = overhead.clone();
    }
    let Some(spec) = spec.as_object_mut() else { return Ok(()) };
    let wanted = class["scheduling"]["nodeSelector"].as_object();
    if let Some(wanted) = wanted.filter(|w| !w.is_empty()) {
        let Some(given) = spec.entry("nodeSelector").or_insert_with(|| json!({})).as_object_mut() else {
            return Ok(());
        };
        for (key, value) in wanted {
            if let Some(other) = given.get(key).filter(|other| *other != value) {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                return Err(format!(
                    "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {}; pod.spec.nodeSelector[{key}] = {}",
                    text(value),
                    text(other)
                ));
            }
            given.insert(key.clone(), value.clone());
        }
    }
    let wanted = class["scheduling"]["tolerations"].as_array();
    if let Some(wanted) = wanted.filter(|w| !w.is_empty())
        && let Some(given) = spec.entry("tolerations").or_insert_with(|| json!([])).as_array_mut()
    {
        for toleration in wanted {
            if !given.contains(toleration) {
                given.push(toleration.clone());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_adds_its_cost_and_its_places() {
        let class = json!({
            "overhead": {"podFixed": {"cpu": "100m"}},
            "scheduling": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}]},
        });
        let mut spec = json!({"nodeSelector": {"c": "d"}});
        apply(&class, &mut spec).unwrap();
        let whole = json!({
            "overhead": {"cpu": "100m"}, "nodeSelector": {"a": "b", "c": "d"}, "tolerations": [{"key": "k"}],
        });
        assert_eq!(spec, whole);
        assert_eq!(apply(&class, &mut spec), Ok(()), "the same again changes nothing");
        assert_eq!(spec, whole);
        assert_eq!(apply(&class, &mut json!({"overhead": {"cpu": "1"}})), Err(MISMATCH.into()));
        assert_eq!(
            apply(&class, &mut json!({"nodeSelector": {"a": "x"}})).unwrap_err(),
            "conflict: runtimeClass.scheduling.nodeSelector[a] = b; pod.spec.nodeSelector[a] = x"
        );
    }
}
