//! A pod that is bound to a node is not changed in a way that the node's kubelet does not declare to know.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::quota::amounts::{amounts, list};
use ferrite_json::Value;

pub(super) struct NodeDeclaredFeatureValidator;

impl Plugin for NodeDeclaredFeatureValidator {
    fn name(&self) -> &'static str {
        "NodeDeclaredFeatureValidator"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        validating && operation == Operation::Update
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let updates = attributes.operation == Operation::Update
            && (attributes.is("", "pods") || attributes.is_sub("", "pods", Some("resize")));
        let (Some(new), Some(old), true) = (object, attributes.old, updates) else { return Ok(()) };
        let Some(name) = bound_and_changed(new, old) else { return Ok(()) };
        let needed = features(&new["spec"], &old["spec"]);
        if needed.is_empty() {
            return Ok(());
        }
        let node = view.get("", "nodes", "", name);
        let node = node.ok_or_else(|| attributes.forbid(format!("node {name:?} not found")))?;
        let declared = list(&node["status"], "declaredFeatures");
        let missing: Vec<&str> =
            needed.into_iter().filter(|feature| !declared.iter().any(|other| *other == **feature)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let missing = missing.join(", ");
        Err(attributes.forbid(format!(
            "pod update requires features {missing} which are not available on node {name:?}"
        )))
    }
}

/// The node of a pod whose spec changes.
pub(super) fn bound_and_changed<'a>(new: &'a Value, old: &Value) -> Option<&'a str> {
    let node = new["spec"]["nodeName"].as_str().filter(|name| !name.is_empty())?;
    // Only a change of the spec makes another generation.
    let generation = |pod: &Value| pod["metadata"]["generation"].as_i64();
    (generation(new) != generation(old)).then_some(node)
}

/// The features that the node needs for this change.
fn features(new: &Value, old: &Value) -> Vec<&'static str> {
    let differs = |new: &Value, old: &Value| {
        ["requests", "limits"].iter().any(|kind| amounts(&new[*kind]) != amounts(&old[*kind]))
            || list(new, "claims") != list(old, "claims")
    };
    let inits = || list(old, "initContainers").iter().zip(list(new, "initContainers"));
    let resizes_init = inits()
        .any(|(old, new)| old["restartPolicy"] != "Always" && differs(&new["resources"], &old["resources"]));
    let resizes_pod = differs(&new["resources"], &old["resources"]);
    [
        resizes_pod.then_some("InPlacePodLevelResourcesVerticalScaling"),
        resizes_init.then_some("InPlacePodVerticalScalingInitContainers"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn features_of_a_change() {
        let cpu = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let init = |policy: &str, resources: Value| json!({"initContainers": [{"restartPolicy": policy, "resources": resources}]});
        const POD: &str = "InPlacePodLevelResourcesVerticalScaling";
        const INIT: &str = "InPlacePodVerticalScalingInitContainers";
        let rows: &[(Value, Value, &[&str])] = &[
            (json!({}), json!({}), &[]),
            (json!({"resources": cpu("1")}), json!({"resources": cpu("2")}), &[POD]),
            (json!({}), json!({"resources": cpu("2")}), &[POD]),
            (json!({}), json!({"resources": {}}), &[]),
            (json!({"resources": cpu("1")}), json!({"resources": cpu("1000m")}), &[]),
            (
                json!({"containers": [{"resources": cpu("1")}]}),
                json!({"containers": [{"resources": cpu("2")}]}),
                &[],
            ),
            (init("", cpu("1")), init("", cpu("2")), &[INIT]),
            (init("Always", cpu("1")), init("Always", cpu("2")), &[]),
        ];
        for (old, new, expected) in rows {
            assert_eq!(features(new, old), *expected, "{old} {new}");
        }
    }
}
