//! Pods may keep others away from their node, but not from more than that.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_json::Value;

pub(super) struct LimitPodHardAntiAffinityTopology;

const HOSTNAME: &str = "kubernetes.io/hostname";
const REQUIRED: &str = "/spec/affinity/podAntiAffinity/requiredDuringSchedulingIgnoredDuringExecution";

impl Plugin for LimitPodHardAntiAffinityTopology {
    fn name(&self) -> &'static str {
        "LimitPodHardAntiAffinityTopology"
    }

    fn validate(
        &self,
        _view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(pod) = object.filter(|_| attributes.writes("pods")) else { return Ok(()) };
        match too_wide(pod) {
            None => Ok(()),
            Some(key) => Err(attributes.forbid(format!(
                "affinity.PodAntiAffinity.RequiredDuringScheduling has TopologyKey {key} but only key {HOSTNAME} is allowed"
            ))),
        }
    }
}

/// The first key that reaches beyond a node.
fn too_wide(pod: &Value) -> Option<&str> {
    let terms = pod.pointer(REQUIRED).and_then(Value::as_array);
    terms.into_iter().flatten().filter_map(|term| term["topologyKey"].as_str()).find(|key| *key != HOSTNAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn only_the_node_may_be_kept_free() {
        let pod = |keys: &[&str]| {
            let terms: Vec<Value> = keys.iter().map(|key| json!({"topologyKey": key})).collect();
            json!({"spec": {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}})
        };
        assert_eq!(too_wide(&json!({"spec": {}})), None);
        assert_eq!(too_wide(&pod(&[HOSTNAME])), None);
        assert_eq!(too_wide(&pod(&[HOSTNAME, "zone"])), Some("zone"));
    }
}
