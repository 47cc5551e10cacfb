//! A pod's priority, from its class.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use std::sync::Arc;

pub(super) struct Priority;

const GROUP: &str = "scheduling.k8s.io";

impl Plugin for Priority {
    fn name(&self) -> &'static str {
        "Priority"
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        let refused = |why: &str| Status::forbidden("", "pods", attributes.name, why);
        let name = spec.get("priorityClassName").and_then(Value::as_str).unwrap_or_default().to_owned();
        let class = if name.is_empty() {
            default_class(view)
        } else {
            let found = view.get(GROUP, "priorityclasses", "", &name);
            Some(found.ok_or_else(|| refused(&format!("no PriorityClass with name {name} was found")))?)
        };
        let priority = class.as_ref().and_then(|c| c["value"].as_i64()).unwrap_or(0);
        if spec.get("priority").and_then(Value::as_i64).is_some_and(|given| given != priority) {
            return Err(refused(&format!(
                "the integer value of priority ({}) must not be provided in pod spec; priority admission controller computed {priority} from the given PriorityClass name",
                spec["priority"]
            )));
        }
        let policy =
            class.as_ref().and_then(|c| c["preemptionPolicy"].as_str()).unwrap_or("PreemptLowerPriority");
        if spec.get("preemptionPolicy").and_then(Value::as_str).is_some_and(|given| given != policy) {
            return Err(refused(&format!(
                "the string value of PreemptionPolicy ({}) must not be provided in pod spec; priority admission controller computed {policy} from the given PriorityClass name",
                spec["preemptionPolicy"].as_str().unwrap_or_default()
            )));
        }
        if let Some(class) = class.as_ref().filter(|_| name.is_empty()) {
            spec.insert("priorityClassName", meta::name(class).into());
        }
        spec.insert("priority", priority.into());
        spec.insert("preemptionPolicy", policy.into());
        Ok(())
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(class) = object.filter(|_| attributes.is(GROUP, "priorityclasses")) else { return Ok(()) };
        let other = default_class(view).filter(|other| meta::name(other) != meta::name(class));
        match other.filter(|_| class["globalDefault"] == true) {
            None => Ok(()),
            Some(other) => Err(attributes.forbid(format!(
                "PriorityClass {} is already marked as default. Only one default can exist",
                meta::name(&other)
            ))),
        }
    }
}

/// The class of pods that name none: of several defaults the lowest, as upstream.
fn default_class(view: &View) -> Option<Arc<Value>> {
    view.few(GROUP, "priorityclasses", "")
        .filter(|class| class["globalDefault"] == true)
        .min_by_key(|class| class["value"].as_i64().unwrap_or(0))
}
