//! Which taints the pods of a namespace tolerate without asking, and which they may ask to tolerate.

use super::{Attributes, Operation, Plugin, config};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::kinds::core::pod::resources::qos_class;
use ferrite_json::{Value, json};

pub(super) const NAME: &str = "PodTolerationRestriction";
const DEFAULTS: &str = "scheduler.alpha.kubernetes.io/defaultTolerations";
const WHITELIST: &str = "scheduler.alpha.kubernetes.io/tolerationsWhitelist";
const GROUP: &str = "podtolerationrestriction.admission.k8s.io";

/// The lists of namespaces without their own.
#[derive(Default)]
struct PodTolerationRestriction {
    defaults: Vec<Value>,
    whitelist: Vec<Value>,
}

pub(super) fn make(configuration: Option<&Value>) -> Result<Box<dyn Plugin>, String> {
    let Some(configuration) = configuration else { return Ok(Box::new(PodTolerationRestriction::default())) };
    config::check_kind(configuration, GROUP, "Configuration")?;
    let list = |key: &str| configuration[key].as_array().cloned().unwrap_or_default();
    Ok(Box::new(PodTolerationRestriction { defaults: list("default"), whitelist: list("whitelist") }))
}

impl Plugin for PodTolerationRestriction {
    fn name(&self) -> &'static str {
        NAME
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.writes("pods") || !object["spec"].is_object() {
            return Ok(());
        }
        let mut tolerations = given(object);
        if attributes.operation == Operation::Create {
            let defaults = listed(view, attributes, DEFAULTS)?;
            tolerations = merge(defaults.as_ref().unwrap_or(&self.defaults), &tolerations);
        }
        if qos_class(&object["spec"]) != "BestEffort" {
            let pressure = json!({"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"});
            tolerations = merge(&tolerations, &[pressure]);
        }
        if !tolerations.is_empty() {
            object["spec"]["tolerations"] = tolerations.into();
        }
        Ok(())
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(pod) = object.filter(|_| attributes.writes("pods")) else { return Ok(()) };
        let own = listed(view, attributes, WHITELIST)?;
        let (scope, whitelist) = match &own {
            Some(own) => ("namespace", own),
            None => ("cluster", &self.whitelist),
        };
        let may = |toleration: &Value| whitelist.iter().any(|wide| covers(wide, toleration));
        if whitelist.is_empty() || given(pod).iter().all(may) {
            return Ok(());
        }
        // As upstream: an error of the server rather than a refusal.
        Err(Status::internal(format!(
            "pod tolerations (possibly merged with namespace default tolerations) conflict with its {scope} whitelist"
        )))
    }
}

fn given(pod: &Value) -> Vec<Value> {
    pod["spec"]["tolerations"].as_array().cloned().unwrap_or_default()
}

/// The list in a namespace's annotation. None without the annotation.
fn listed(view: &View, attributes: &Attributes<'_>, key: &str) -> Result<Option<Vec<Value>>, Status> {
    let namespace = view.get("", "namespaces", "", attributes.namespace).unwrap_or_default();
    match namespace["metadata"]["annotations"].get(key).and_then(Value::as_str) {
        None | Some("") => Ok(None),
        Some(text) => ferrite_json::from_str(text).map(Some).map_err(|e| {
            Status::internal(format!("annotation {key} of the namespace is no list of tolerations: {e}"))
        }),
    }
}

/// Both lists without entries that another entry covers.
fn merge(first: &[Value], second: &[Value]) -> Vec<Value> {
    let all: Vec<&Value> = first.iter().chain(second).collect();
    let mut merged: Vec<Value> = Vec::new();
    for (index, toleration) in all.iter().enumerate() {
        let later = &all[index + 1..];
        if !merged.iter().chain(later.iter().copied()).any(|other| covers(other, toleration)) {
            merged.push((*toleration).clone());
        }
    }
    merged
}

/// Returns true if `wide` tolerates everything that `narrow` tolerates.
fn covers(wide: &Value, narrow: &Value) -> bool {
    let text = |toleration: &Value, key: &str| toleration[key].as_str().unwrap_or_default().to_owned();
    let exists = text(wide, "operator") == "Exists";
    let any_key = exists && text(wide, "key").is_empty();
    let same = |key: &str| text(wide, key) == text(narrow, key);
    if !(same("key") || any_key) || !(same("effect") || text(wide, "effect").is_empty()) {
        return false;
    }
    if text(wide, "effect") == "NoExecute"
        && let Some(most) = wide["tolerationSeconds"].as_i64()
        && narrow["tolerationSeconds"].as_i64().is_none_or(|seconds| seconds > most)
    {
        return false;
    }
    let operator = |toleration: &Value| match toleration["operator"].as_str() {
        None | Some("") => "Equal".to_owned(),
        Some(operator) => operator.to_owned(),
    };
    exists || (operator(wide) == operator(narrow) && same("value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toleration(key: &str, operator: &str, value: &str, effect: &str) -> Value {
        json!({"key": key, "operator": operator, "value": value, "effect": effect})
    }

    #[test]
    fn what_is_covered_is_said_once() {
        let exact = || toleration("a", "Equal", "1", "NoSchedule");
        let any_value = || toleration("a", "Exists", "", "NoSchedule");
        let anything = || json!({"operator": "Exists"});
        let other = || toleration("b", "Equal", "1", "NoSchedule");
        for (first, second, expected) in [
            (vec![exact()], vec![exact()], vec![exact()]),
            (vec![exact()], vec![any_value()], vec![any_value()]),
            (vec![any_value()], vec![exact()], vec![any_value()]),
            (vec![exact(), other()], vec![anything()], vec![anything()]),
            (vec![exact()], vec![other()], vec![exact(), other()]),
            (vec![], vec![], vec![]),
        ] {
            assert_eq!(merge(&first, &second), expected);
        }
    }

    #[test]
    fn a_shorter_stay_is_within_a_longer_one() {
        let for_seconds = |seconds: Value| json!({"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
        for (wide, narrow, covered) in [
            (json!(60), json!(30), true),
            (json!(60), json!(90), false),
            (json!(60), Value::Null, false),
            (Value::Null, json!(90), true),
        ] {
            assert_eq!(
                covers(&for_seconds(wide.clone()), &for_seconds(narrow.clone())),
                covered,
                "{wide} {narrow}"
            );
        }
    }
}
