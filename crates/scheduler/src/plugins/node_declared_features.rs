//! Keeps pods that need a feature of the kubelet off nodes that do not declare it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::framework::{
    ClusterEvent, CycleState, Filter, Handle, Made, Plugin, PluginArgs, PreFilter, PreFiltered, Rejection,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

struct NodeDeclaredFeatures;

pub(super) fn new(args: &PluginArgs, _: &Handle) -> Made {
    super::no_args(args)?;
    Ok(Arc::new(NodeDeclaredFeatures))
}

fn declares(node: &Node, pod: &PodInfo) -> bool {
    let declared = node.status.as_ref().and_then(|status| status.declared_features.as_deref());
    let declared = declared.unwrap_or_default();
    pod.placement.node_features.iter().all(|feature| declared.iter().any(|other| other == feature))
}

impl Plugin for NodeDeclaredFeatures {
    fn name(&self) -> &'static str {
        "NodeDeclaredFeatures"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => declares(node, pod),
            ClusterEvent::NodeUpdated { old, new } => !declares(old, pod) && declares(new, pod),
            ClusterEvent::PodUpdated => true,
            _ => false,
        }
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

impl PreFilter for NodeDeclaredFeatures {
    fn pre_filter(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot) -> Result<PreFiltered, Rejection> {
        let needs_none = pod.placement.node_features.is_empty();
        Ok(if needs_none { PreFiltered::Skip } else { PreFiltered::Needed })
    }
}

impl Filter for NodeDeclaredFeatures {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if declares(&node.node, pod) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match Pod's required features"))
    }

    fn is_local(&self, _pod: &PodInfo) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn features_are_inferred_from_the_pod() {
        let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}});
        let node = |features: Value| {
            let node = json!({"metadata": {"name": "n"}, "status": {"declaredFeatures": features}});
            NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()))
        };
        for (spec, features, fits) in [
            (json!({"containers": [{"name": "c"}]}), json!([]), true),
            (json!({"containers": [{"name": "c", "restartPolicyRules": [rule]}]}), json!([]), false),
            (
                json!({"containers": [{"name": "c", "restartPolicyRules": [rule]}]}),
                json!(["RestartAllContainersOnContainerExits"]),
                true,
            ),
            (
                json!({"containers": [{"name": "c"}], "hostNetwork": true, "hostUsers": false}),
                json!([]),
                false,
            ),
            (
                json!({"containers": [{"name": "c"}], "hostNetwork": true, "hostUsers": false}),
                json!(["UserNamespacesHostNetworkSupport"]),
                true,
            ),
        ] {
            let pod = PodInfo::new(&ferrite_json::from_value(json!({"spec": spec})).unwrap());
            let verdict =
                Filter::filter(&NodeDeclaredFeatures, &CycleState::default(), &pod, &node(features));
            assert_eq!(verdict.is_ok(), fits, "{spec}");
        }
    }
}
