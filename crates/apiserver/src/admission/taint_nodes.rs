//! A new node takes no pods until something has seen that it is ready.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_json::{Value, json};

pub(super) struct TaintNodesByCondition;

const NOT_READY: &str = "node.kubernetes.io/not-ready";

impl Plugin for TaintNodesByCondition {
    fn name(&self) -> &'static str {
        "TaintNodesByCondition"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        !validating && operation == Operation::Create
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("nodes") {
            return Ok(());
        }
        let Some(node) = object.as_object_mut() else { return Ok(()) };
        let spec = node.entry("spec").or_insert_with(|| json!({}));
        let Some(spec) = spec.as_object_mut() else { return Ok(()) };
        let Some(taints) = spec.entry("taints").or_insert_with(|| json!([])).as_array_mut() else {
            return Ok(());
        };
        if !taints.iter().any(|t| t["key"] == NOT_READY && t["effect"] == "NoSchedule") {
            taints.push(json!({"key": NOT_READY, "effect": "NoSchedule"}));
        }
        Ok(())
    }
}
