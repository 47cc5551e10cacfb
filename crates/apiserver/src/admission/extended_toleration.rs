//! Pods that ask for a device tolerate nodes that are kept for it.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::kinds::core::pod::resources::is_native;
use ferrite_api::quota::amounts::{Side, amounts, list};
use ferrite_json::{Value, json};
use std::collections::BTreeSet;

pub(super) struct ExtendedResourceToleration;

impl Plugin for ExtendedResourceToleration {
    fn name(&self) -> &'static str {
        "ExtendedResourceToleration"
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.writes("pods") {
            return Ok(());
        }
        let spec = &object["spec"];
        let containers = list(spec, "containers").iter().chain(list(spec, "initContainers"));
        let devices: BTreeSet<ferrite_json::Text> = containers
            .flat_map(|c| amounts(&c["resources"][Side::Requests.key()]).into_keys())
            .filter(|name| name.contains('/') && !is_native(name))
            .collect();
        let Some(spec) = object["spec"].as_object_mut().filter(|_| !devices.is_empty()) else {
            return Ok(());
        };
        let Some(tolerations) = spec.entry("tolerations").or_insert_with(|| json!([])).as_array_mut() else {
            return Ok(());
        };
        for device in devices {
            let toleration = json!({"key": device, "operator": "Exists"});
            if !tolerations.contains(&toleration) {
                tolerations.push(toleration);
            }
        }
        Ok(())
    }
}
