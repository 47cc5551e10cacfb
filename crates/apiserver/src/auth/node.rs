//! Nodes: each may do what the role of nodes says, and read only what its own pods need.

use super::{Action, Decision, Rbac, User};
use crate::registry::View;
use serde_json::Value;

/// The role whose rules hold for every node, though no binding gives it.
const ROLE: &str = "system:node";

/// Where nodes renew their leases.
const LEASES: &str = "kube-node-lease";

/// The node a user is.
pub(super) fn name(user: &User) -> Option<&str> {
    user.name.strip_prefix("system:node:").filter(|name| !name.is_empty() && user.is_in("system:nodes"))
}

pub(super) fn decide(rbac: &Rbac, view: &View, node: &str, action: &Action) -> Decision {
    let unrelated = || Decision {
        allowed: false,
        reason: format!("no relationship found between node '{node}' and this object"),
    };
    if action.group.is_empty() && action.subresource.is_empty() {
        let field = match action.resource.as_str() {
            "secrets" | "configmaps" => Some(action.resource.as_str()),
            "persistentvolumeclaims" => Some("persistentvolumeclaims"),
            _ => None,
        };
        if let Some(kind) = field {
            if !matches!(action.verb.as_str(), "get" | "list" | "watch") {
                let reason = "can only get individual resources of this type".into();
                return Decision { allowed: false, reason };
            }
            if action.name.is_empty() || action.namespace.is_empty() {
                let reason = "can only read resources of this type by name".into();
                return Decision { allowed: false, reason };
            }
            let related = view
                .objects("", "pods", &action.namespace)
                .any(|pod| runs_on(&pod, node) && refers(&pod["spec"], kind, &action.name));
            return if related { allowed() } else { unrelated() };
        }
    }
    let own = match (action.group.as_str(), action.resource.as_str()) {
        ("", "nodes") if action.verb != "create" => action.name == node,
        ("coordination.k8s.io", "leases") => {
            action.namespace == LEASES && (action.name == node || action.verb == "create")
        }
        ("storage.k8s.io", "csinodes") => action.name == node || action.verb == "create",
        _ => true,
    };
    if !own {
        let reason = format!("node '{node}' can only access its own {}", action.resource);
        return Decision { allowed: false, reason };
    }
    if rbac.role_allows(ROLE, action) { allowed() } else { Decision::default() }
}

fn allowed() -> Decision {
    Decision { allowed: true, reason: String::new() }
}

fn runs_on(pod: &Value, node: &str) -> bool {
    pod.pointer("/spec/nodeName").and_then(Value::as_str) == Some(node)
}

/// Whether a pod's spec names the object, wherever it may.
fn refers(spec: &Value, kind: &str, name: &str) -> bool {
    let keys: &[(&str, &str)] = match kind {
        "secrets" => &[
            ("secretName", ""),
            ("secretKeyRef", "name"),
            ("secretRef", "name"),
            ("secret", "name"),
            ("nodePublishSecretRef", "name"),
            ("imagePullSecrets", "name"),
        ],
        "configmaps" => &[("configMapKeyRef", "name"), ("configMapRef", "name"), ("configMap", "name")],
        _ => &[("claimName", "")],
    };
    match spec {
        Value::Object(map) => map.iter().any(|(key, value)| {
            let direct = keys.iter().filter(|(k, _)| k == key).any(|(_, inner)| match value {
                Value::String(text) => inner.is_empty() && text == name,
                Value::Array(list) => list.iter().any(|item| item[*inner] == name),
                value => !inner.is_empty() && value.get(*inner).is_some_and(|v| v == name),
            });
            direct || refers(value, kind, name)
        }),
        Value::Array(list) => list.iter().any(|item| refers(item, kind, name)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_refers_to_what_it_mounts_and_reads() {
        let spec = json!({
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"env": [{"valueFrom": {"configMapKeyRef": {"name": "env", "key": "k"}}}]}],
            "volumes": [
                {"name": "a", "secret": {"secretName": "files"}},
                {"name": "b", "projected": {"sources": [{"configMap": {"name": "part"}}]}},
                {"name": "c", "persistentVolumeClaim": {"claimName": "disk"}},
            ],
        });
        for (kind, name, expected) in [
            ("secrets", "pull", true),
            ("secrets", "files", true),
            ("secrets", "env", false),
            ("configmaps", "env", true),
            ("configmaps", "part", true),
            ("persistentvolumeclaims", "disk", true),
            ("persistentvolumeclaims", "a", false),
        ] {
            assert_eq!(refers(&spec, kind, name), expected, "{kind} {name}");
        }
    }
}
