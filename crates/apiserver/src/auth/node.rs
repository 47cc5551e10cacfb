//! Nodes: each has the rights of the role of nodes, and may read only objects that its own pods need.

use super::{Action, Decision, Rbac, User};
use crate::registry::View;
use ferrite_api::meta;
use ferrite_api::quota::amounts::list;
use ferrite_json::Value;

/// The role whose rules hold for every node, though no binding gives it.
const ROLE: &str = "system:node";

/// Where nodes renew their leases.
pub(crate) const LEASES: &str = "kube-node-lease";

const CERTIFICATES: &str = "certificates.k8s.io";
const POD_CERTIFICATES: &str = "podcertificaterequests";

/// The node a user is.
pub(crate) fn name(user: &User) -> Option<&str> {
    user.name.strip_prefix("system:node:").filter(|name| !name.is_empty() && user.is_in("system:nodes"))
}

fn allowed() -> Decision {
    Decision { allowed: true, ..Decision::default() }
}

fn no(reason: impl Into<String>) -> Decision {
    Decision { reason: reason.into(), ..Decision::default() }
}

pub(super) fn decide(rbac: &Rbac, view: &View, node: &str, action: &Action) -> Decision {
    let by_role = || if rbac.role_allows(ROLE, action) { allowed() } else { Decision::default() };
    if action.path.is_some() {
        return by_role();
    }
    let (verb, subresource) = (action.verb.as_str(), action.subresource.as_str());
    match (action.group.as_str(), action.resource.as_str()) {
        ("", "secrets" | "configmaps") => match verb {
            "get" | "list" | "watch" if !subresource.is_empty() => no("cannot read subresource"),
            "get" | "list" | "watch" if action.namespace.is_empty() => {
                no("can only read namespaced object of this type")
            }
            "get" | "list" | "watch" => related(view, node, action),
            _ => no("can only read resources of this type"),
        },
        ("", "persistentvolumeclaims") if subresource == "status" => match verb {
            "update" | "patch" => related(view, node, action),
            _ => no("can only update PVC status"),
        },
        ("", "persistentvolumeclaims" | "persistentvolumes")
        | ("resource.k8s.io", "resourceclaims")
        | ("storage.k8s.io", "volumeattachments") => individual(view, node, action),
        ("", "serviceaccounts") => match (verb, subresource) {
            // Reading is for credential provider plugins, which get annotations.
            ("create", "token") | ("get", "") => related(view, node, action),
            ("create", _) => no("can only create token subresource of service accounts"),
            _ => no("can only create tokens for individual service accounts"),
        },
        ("", "nodes") => own_node(node, action),
        ("", "pods") => pods(view, node, action),
        ("coordination.k8s.io", "leases") => match verb {
            "get" | "create" | "update" | "patch" | "delete" if action.namespace != LEASES => {
                no(format!("can only access leases in the {LEASES:?} system namespace"))
            }
            // The name of a new object is not known yet.
            "create" => allowed(),
            "get" | "update" | "patch" | "delete" if action.name == node => allowed(),
            "get" | "update" | "patch" | "delete" => {
                no("can only access node lease with the same name as the requesting node")
            }
            _ => no("can only get, create, update, patch, or delete a node lease"),
        },
        ("storage.k8s.io", "csinodes") => match verb {
            _ if !subresource.is_empty() => no("cannot authorize CSINode subresources"),
            "create" => allowed(),
            "get" | "update" | "patch" | "delete" if action.name == node => allowed(),
            "get" | "update" | "patch" | "delete" => {
                no("can only access CSINode with the same name as the requesting node")
            }
            _ => no("can only get, create, update, patch, or delete a CSINode"),
        },
        ("resource.k8s.io", "resourceslices") => slices(view, node, action),
        // Without its feature gate, the server does not serve the resource.
        (CERTIFICATES, POD_CERTIFICATES) if !view.serves(CERTIFICATES, POD_CERTIFICATES) => {
            Decision::default()
        }
        (CERTIFICATES, POD_CERTIFICATES) => pod_certificates(view, node, action),
        _ => by_role(),
    }
}

/// An object that some pod of the node needs.
fn related(view: &View, node: &str, action: &Action) -> Decision {
    if action.name.is_empty() {
        return no("No Object name found");
    }
    if needs(view, node, action) {
        return allowed();
    }
    no(format!("no relationship found between node '{node}' and this object"))
}

fn individual(view: &View, node: &str, action: &Action) -> Decision {
    if action.verb != "get" {
        return no("can only get individual resources of this type");
    }
    if !action.subresource.is_empty() {
        return no("cannot get subresource");
    }
    related(view, node, action)
}

fn own_node(node: &str, action: &Action) -> Decision {
    match (action.subresource.as_str(), action.verb.as_str()) {
        // Which node that may be is a matter of admission, which sees the object.
        ("", "create" | "update" | "patch") | ("status", "update" | "patch") => allowed(),
        ("", "get" | "list" | "watch") => match action.name.as_str() {
            name if name == node => allowed(),
            "" => no(format!("node '{node}' cannot read all nodes, only its own Node object")),
            name => no(format!("node '{node}' cannot read '{name}', only its own Node object")),
        },
        _ => Decision::default(),
    }
}

fn pods(view: &View, node: &str, action: &Action) -> Decision {
    match (action.subresource.as_str(), action.verb.as_str()) {
        ("", "get") => individual(view, node, action),
        ("", "list" | "watch") => match action.selects("spec.nodeName") {
            Some(name) if name == node => allowed(),
            _ => no("can only list/watch pods with spec.nodeName field selector"),
        },
        ("", "create" | "delete") | ("status", "update" | "patch") | ("eviction", "create") => allowed(),
        _ => Decision::default(),
    }
}

fn slices(view: &View, node: &str, action: &Action) -> Decision {
    let own = || {
        let slice = view.get("resource.k8s.io", "resourceslices", "", &action.name);
        slice.is_some_and(|slice| slice["spec"]["nodeName"] == node)
    };
    match action.verb.as_str() {
        _ if !action.subresource.is_empty() => no("cannot authorize ResourceSlice subresources"),
        "create" => allowed(),
        "get" | "update" | "patch" | "delete" if own() => allowed(),
        "get" | "update" | "patch" | "delete" => {
            no(format!("no relationship found between node '{node}' and this object"))
        }
        "list" | "watch" | "deletecollection" => match action.selects("spec.nodeName") {
            Some(name) if name == node => allowed(),
            _ => no("can only list/watch/deletecollection resourceslices with nodeName field selector"),
        },
        _ => no(
            "only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection",
        ),
    }
}

/// Requests for certificates of the node's pods. Admission sees new ones, and restricts them further.
fn pod_certificates(view: &View, node: &str, action: &Action) -> Decision {
    let own = || {
        let request = view.get(CERTIFICATES, POD_CERTIFICATES, &action.namespace, &action.name);
        request.is_some_and(|request| request["spec"]["nodeName"] == node)
    };
    match action.verb.as_str() {
        _ if !action.subresource.is_empty() => {
            no("nodes may not access the status subresource of PodCertificateRequests")
        }
        "create" => allowed(),
        "get" if action.name.is_empty() => no("No Object name found"),
        "get" if own() => allowed(),
        "get" => no(format!("no relationship found between node '{node}' and this object")),
        "list" | "watch" => match action.selects("spec.nodeName") {
            Some(name) if name == node => allowed(),
            _ => no("can only list/watch podcertificaterequests with nodeName field selector"),
        },
        verb => no(format!("nodes may not {verb} podcertificaterequests")),
    }
}

/// Returns true if a pod of the node needs the object of the action.
fn needs(view: &View, node: &str, action: &Action) -> bool {
    let name = action.name.as_str();
    // The names of the node and of the object are in the text of such a pod.
    let some_pod = |namespace: &str, named: &str, uses: &dyn Fn(&Value) -> bool| {
        let mut pods = view.objects_with("", "pods", namespace, &[node, named]);
        pods.any(|pod| runs_on(&pod, node) && uses(&pod))
    };
    let claims = |namespace: &str, claim: &str| {
        // The name of an ephemeral claim is made of two others.
        some_pod(namespace, "", &|pod| {
            let ephemeral = list(&pod["spec"], "volumes").iter().any(|volume| {
                volume["ephemeral"].is_object()
                    && format!("{}-{}", meta::name(pod), volume["name"].as_str().unwrap_or_default()) == claim
            });
            ephemeral || refers(&pod["spec"], "persistentvolumeclaims", claim)
        })
    };
    match action.resource.as_str() {
        "pods" => view.get("", "pods", &action.namespace, name).is_some_and(|pod| runs_on(&pod, node)),
        "serviceaccounts" => {
            some_pod(&action.namespace, name, &|pod| pod["spec"]["serviceAccountName"] == name)
        }
        "persistentvolumeclaims" => claims(&action.namespace, name),
        "persistentvolumes" => view.get("", "persistentvolumes", "", name).is_some_and(|volume| {
            let reference = &volume["spec"]["claimRef"];
            let text = |key: &str| reference[key].as_str().unwrap_or_default();
            claims(text("namespace"), text("name"))
        }),
        "volumeattachments" => view
            .get("storage.k8s.io", "volumeattachments", "", name)
            .is_some_and(|attachment| attachment["spec"]["nodeName"] == node),
        "resourceclaims" => some_pod(&action.namespace, name, &|pod| {
            let direct = list(&pod["spec"], "resourceClaims").iter().any(|c| c["resourceClaimName"] == name);
            let made = list(&pod["status"], "resourceClaimStatuses");
            let extended = &pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"];
            direct || made.iter().any(|c| c["resourceClaimName"] == name) || *extended == name
        }),
        kind => {
            let of_pod = || some_pod(&action.namespace, name, &|pod| refers(&pod["spec"], kind, name));
            let of_volume = || {
                let mut volumes = view.objects_with("", "persistentvolumes", "", &[&action.namespace, name]);
                volumes.any(|volume| {
                    let claim = &volume["spec"]["claimRef"];
                    let text = |key: &str| claim[key].as_str().unwrap_or_default();
                    let wanted = (action.namespace.as_str(), name);
                    secrets_of_volume(&volume["spec"]).contains(&wanted)
                        && claims(text("namespace"), text("name"))
                })
            };
            of_pod() || (kind == "secrets" && of_volume())
        }
    }
}

/// Namespaces and names of the secrets with which a kubelet mounts a volume. As upstream, those of the controllers of storage
/// drivers are not among them.
fn secrets_of_volume(spec: &Value) -> Vec<(&str, &str)> {
    const CSI: [&str; 3] = ["nodeStageSecretRef", "nodePublishSecretRef", "nodeExpandSecretRef"];
    const OTHERS: [&str; 7] = ["cephfs", "cinder", "flexVolume", "iscsi", "rbd", "scaleIO", "storageos"];
    let of_claim = spec["claimRef"]["namespace"].as_str().unwrap_or_default();
    let references = CSI.iter().map(|key| &spec["csi"][*key]);
    let references = references.chain(OTHERS.iter().map(|source| &spec[*source]["secretRef"]));
    let references = references.map(|reference| (&reference["namespace"], &reference["name"]));
    let file = &spec["azureFile"];
    let all = references.chain([(&file["secretNamespace"], &file["secretName"])]);
    all.filter_map(|(namespace, name)| {
        let namespace = namespace.as_str().filter(|namespace| !namespace.is_empty());
        Some((namespace.unwrap_or(of_claim), name.as_str().filter(|name| !name.is_empty())?))
    })
    .collect()
}

fn runs_on(pod: &Value, node: &str) -> bool {
    pod.pointer("/spec/nodeName").and_then(Value::as_str) == Some(node)
}

/// Returns true if a pod's spec refers to the object, in any place.
pub(crate) fn refers(spec: &Value, kind: &str, name: &str) -> bool {
    let mut found = false;
    references(spec, kind, &mut |given| found |= given == name);
    found
}

/// Tells every name of an object of one kind that a pod's spec holds.
pub(crate) fn references(spec: &Value, kind: &str, tell: &mut dyn FnMut(&str)) {
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
        Value::Object(map) => {
            for (key, value) in map {
                for (_, inner) in keys.iter().filter(|(k, _)| k == key) {
                    match value {
                        Value::String(text) if inner.is_empty() => tell(text),
                        Value::Array(list) => {
                            list.iter().filter_map(|i| i[*inner].as_str()).for_each(&mut *tell)
                        }
                        value if !inner.is_empty() => {
                            value.get(*inner).and_then(Value::as_str).into_iter().for_each(&mut *tell);
                        }
                        _ => {}
                    }
                }
                references(value, kind, tell);
            }
        }
        Value::Array(list) => list.iter().for_each(|item| references(item, kind, tell)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

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

    #[test]
    fn a_volume_has_the_secrets_of_its_kubelet() {
        let reference = |name: &str| json!({"namespace": "s", "name": name});
        let csi = json!({"claimRef": {"namespace": "c", "name": "disk"}, "csi": {
            "controllerPublishSecretRef": reference("of the controller"),
            "nodeStageSecretRef": reference("stage"), "nodePublishSecretRef": reference("publish"),
            "nodeExpandSecretRef": {"namespace": "t", "name": "expand"}}});
        assert_eq!(secrets_of_volume(&csi), [("s", "stage"), ("s", "publish"), ("t", "expand")]);
        let claim = json!({"namespace": "c", "name": "disk"});
        let rbd = json!({"claimRef": claim, "rbd": {"secretRef": {"name": "ceph"}}});
        assert_eq!(secrets_of_volume(&rbd), [("c", "ceph")]);
        let file = json!({"claimRef": claim, "azureFile": {"secretName": "f", "secretNamespace": "n"}});
        assert_eq!(secrets_of_volume(&file), [("n", "f")]);
        assert_eq!(secrets_of_volume(&json!({"hostPath": {"path": "/x"}})), []);
    }

    #[test]
    fn a_node_reads_itself() {
        let action =
            |verb: &str, name: &str| Action { verb: verb.into(), name: name.into(), ..Action::default() };
        for (verb, name, expected) in [
            ("get", "n", allowed()),
            ("list", "", no("node 'n' cannot read all nodes, only its own Node object")),
            ("get", "m", no("node 'n' cannot read 'm', only its own Node object")),
            ("delete", "n", Decision::default()),
            ("create", "", allowed()),
        ] {
            assert_eq!(own_node("n", &action(verb, name)), expected, "{verb} {name}");
        }
    }
}
