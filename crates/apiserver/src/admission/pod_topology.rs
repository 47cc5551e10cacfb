//! Pods carry where in the world their node is.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::{Status, meta};
use ferrite_json::{Map, Value, json};

pub(super) struct PodTopologyLabels;

const LABELS: [&str; 2] = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"];

impl Plugin for PodTopologyLabels {
    fn name(&self) -> &'static str {
        "PodTopologyLabels"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        !validating && operation == Operation::Create
    }

    /// A pod that is created on a node, or the binding that brings it there.
    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        let node = match attributes.subresource {
            _ if attributes.operation != Operation::Create => return Ok(()),
            None if attributes.creates("pods") => &object["spec"]["nodeName"],
            Some("binding") if attributes.is_sub("", "pods", Some("binding")) => &object["target"]["name"],
            _ => return Ok(()),
        };
        let Some(node) = view.get("", "nodes", "", node.as_str().unwrap_or_default()) else { return Ok(()) };
        let copied = topology(&node);
        if !copied.is_empty() {
            let labels = meta::metadata_mut(object).entry("labels").or_insert_with(|| json!({}));
            if let Some(labels) = labels.as_object_mut() {
                labels.extend(copied);
            }
        }
        Ok(())
    }
}

fn topology(node: &Value) -> Map {
    let labels = &node["metadata"]["labels"];
    LABELS.iter().filter_map(|key| Some(((*key).to_owned(), labels.get(key)?.clone()))).collect()
}
