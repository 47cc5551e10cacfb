//! A pod's priority. Priority classes are not served yet, so the two built-in ones are known by name.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use serde_json::Value;

pub(super) struct Priority;

const BUILT_IN: [(&str, i64); 2] =
    [("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)];

impl Plugin for Priority {
    fn name(&self) -> &'static str {
        "Priority"
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        let class = spec.get("priorityClassName").and_then(Value::as_str).unwrap_or_default();
        let priority = match BUILT_IN.iter().find(|(name, _)| *name == class) {
            Some((_, priority)) => *priority,
            None if class.is_empty() => 0,
            None => {
                return Err(Status::forbidden(
                    "",
                    "pods",
                    attributes.name,
                    &format!("no PriorityClass with name {class} was found"),
                ));
            }
        };
        spec.insert("priority".into(), priority.into());
        spec.entry("preemptionPolicy").or_insert_with(|| "PreemptLowerPriority".into());
        Ok(())
    }
}
