//! A resize that the pod's node could never do is refused at once.

use super::node_declared_features::bound_and_changed;
use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::quantity::Quantity;
use ferrite_api::quota::amounts::{Side, amounts, pod_total};
use ferrite_json::{Value, json};

pub(super) struct PodResizeValidator;

impl Plugin for PodResizeValidator {
    fn name(&self) -> &'static str {
        "PodResizeValidator"
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
        let resizes =
            attributes.operation == Operation::Update && attributes.is_sub("", "pods", Some("resize"));
        let (Some(new), Some(old), true) = (object, attributes.old, resizes) else { return Ok(()) };
        let Some(name) = bound_and_changed(new, old) else { return Ok(()) };
        let node = view.get("", "nodes", "", name);
        let node = node.ok_or_else(|| attributes.forbid(format!("node {name:?} not found")))?;
        let Err((why, cause)) = check(&new["spec"], &node) else { return Ok(()) };
        let mut status = attributes.forbid(why);
        if let Some(details) = &mut status.details {
            details.insert("causes", json!([{"reason": cause}]));
        }
        Err(status)
    }
}

/// Returns the reason and its name if the node will never have the resources that the pod asks for.
fn check(spec: &Value, node: &Value) -> Result<(), (String, &'static str)> {
    let os = node["metadata"]["labels"]["kubernetes.io/os"].as_str();
    if let Some(os) = os.filter(|os| *os != "linux") {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let why = format!("pod resize is only supported on linux nodes, node {name:?} is {os:?}");
        return Err((why, "UnsupportedPlatform"));
    }
    let (requests, allocatable) = (pod_total(spec, Side::Requests), amounts(&node["status"]["allocatable"]));
    let compare = |name: &str, unit: fn(&Quantity) -> i64| {
        let asked = requests.get(name).copied().unwrap_or(Quantity::ZERO);
        let has = allocatable.get(name).copied().unwrap_or(Quantity::ZERO);
        (asked > has).then(|| format!("{name}, requested: {}, allocatable: {}", unit(&asked), unit(&has)))
    };
    let missing = [compare("cpu", Quantity::milli_value), compare("memory", Quantity::value)];
    let missing: Vec<String> = missing.into_iter().flatten().collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err((
            format!("node didn't have enough allocatable resources: {}", missing.join("; ")),
            "NodeCapacity",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resize_beyond_the_node_is_refused() {
        let node = json!({"metadata": {"name": "n", "labels": {"kubernetes.io/os": "linux"}},
            "status": {"allocatable": {"cpu": "2", "memory": "1Ki"}}});
        let whole = |cpu: &str, memory: &str| json!({"resources": {"requests": {"cpu": cpu, "memory": memory}}, "containers": [{}]});
        for (spec, expected) in [
            (json!({"containers": [{}]}), None),
            (whole("2", "1Ki"), None),
            (whole("2500m", "1Ki"), Some("cpu, requested: 2500, allocatable: 2000")),
            (
                whole("3", "2Ki"),
                Some("cpu, requested: 3000, allocatable: 2000; memory, requested: 2048, allocatable: 1024"),
            ),
            (
                json!({"containers": [{"resources": {"requests": {"memory": "2Ki"}}}]}),
                Some("memory, requested: 2048, allocatable: 1024"),
            ),
        ] {
            let said = check(&spec, &node).err();
            let expected = expected.map(|text| {
                (format!("node didn't have enough allocatable resources: {text}"), "NodeCapacity")
            });
            assert_eq!(said, expected, "{spec}");
        }
        let mut windows = node;
        windows["metadata"]["labels"]["kubernetes.io/os"] = json!("windows");
        let (why, cause) = check(&json!({}), &windows).unwrap_err();
        assert_eq!(why, "pod resize is only supported on linux nodes, node \"n\" is \"windows\"");
        assert_eq!(cause, "UnsupportedPlatform");
    }
}
