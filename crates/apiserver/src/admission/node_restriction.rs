//! A node writes itself, its pods and their own objects, and nothing that would let it reach further.

use super::{Attributes, Operation, Plugin};
use crate::auth::{Action, decide, node};
use crate::registry::View;
use base64::Engine;
use ferrite_api::quota::amounts::list;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use std::collections::BTreeSet;

mod pod_certificate;

pub(super) struct NodeRestriction;

const MIRROR: &str = "kubernetes.io/config.mirror";

impl Plugin for NodeRestriction {
    fn name(&self) -> &'static str {
        "NodeRestriction"
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(node) = node::name(attributes.user) else { return Ok(()) };
        if attributes.is_sub(pod_certificate::GROUP, pod_certificate::REQUESTS, attributes.subresource) {
            return pod_certificate::validate(view, node, attributes, object);
        }
        let problem =
            match (&*attributes.resource.group, &*attributes.resource.plural, attributes.subresource) {
                ("", "pods", None) => pod(view, node, attributes, object),
                ("", "pods", Some("status")) => pod_status(node, attributes, object),
                ("", "pods", Some("eviction")) => attributes
                    .old
                    .filter(|pod| pod["spec"]["nodeName"] != node)
                    .map(|_| format!("node {node:?} can only evict pods with spec.nodeName set to itself")),
                ("", "pods", Some(other)) => Some(format!(
                    "unexpected pod subresource {other:?}, only 'status' and 'eviction' are allowed"
                )),
                ("", "nodes", _) => own_node(node, attributes, object),
                ("", "persistentvolumeclaims", Some("status")) => claim_status(node, attributes, object),
                ("", "persistentvolumeclaims", _) => Some("may only update PVC status".into()),
                ("certificates.k8s.io", "certificatesigningrequests", None) => object
                    .filter(|_| attributes.operation == Operation::Create)
                    .and_then(|request| certificate_request(node, request)),
                ("", "serviceaccounts", Some("token")) => {
                    object.and_then(|token| bound_token(view, node, attributes, token))
                }
                ("coordination.k8s.io", "leases", None) => lease(node, attributes),
                ("storage.k8s.io", "csinodes", None) => (attributes.name != node)
                    .then(|| "can only access CSINode with the same name as the requesting node".to_owned()),
                ("resource.k8s.io", "resourceslices", None) => {
                    slice(node, attributes.operation, object, attributes.old)
                }
                _ => None,
            };
        problem.map_or(Ok(()), |why| Err(attributes.forbid(why)))
    }
}

fn pod(view: &View, node: &str, attributes: &Attributes<'_>, object: Option<&Value>) -> Option<String> {
    match attributes.operation {
        Operation::Create => {
            let own = view.get("", "nodes", "", node);
            new_pod(node, own.as_deref().map(meta::uid), object?)
        }
        Operation::Delete => (attributes.old?["spec"]["nodeName"] != node)
            .then(|| format!("node {node:?} can only delete pods with spec.nodeName set to itself")),
        Operation::Update => Some(format!(
            "unexpected operation \"UPDATE\", node {node:?} can only create and delete mirror pods"
        )),
        Operation::Connect => None,
    }
}

/// Reason why a node, which has this UID, may not create a pod.
fn new_pod(node: &str, uid: Option<&str>, pod: &Value) -> Option<String> {
    let spec = &pod["spec"];
    if pod["metadata"]["annotations"].get(MIRROR).is_none() {
        return Some(format!(
            "pod does not have {MIRROR:?} annotation, node {node:?} can only create mirror pods"
        ));
    }
    if spec["nodeName"] != node {
        return Some(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
    }
    if let Some(why) = owner_problem(node, uid, list(&pod["metadata"], "ownerReferences")) {
        return Some(why);
    }
    reference(spec).map(|kind| format!("node {node:?} can not create pods that reference {kind}"))
}

/// Reason why a mirror pod's owners are not its node and nothing else.
fn owner_problem(node: &str, uid: Option<&str>, owners: &[Value]) -> Option<String> {
    let [owner] = owners else {
        let single = if owners.is_empty() { "an" } else { "a single" };
        return Some(format!(
            "node {node:?} can only create pods with {single} owner reference set to itself"
        ));
    };
    if owner["apiVersion"] != "v1" || owner["kind"] != "Node" || owner["name"] != node {
        return Some(format!("node {node:?} can only create pods with an owner reference set to itself"));
    }
    if owner["controller"] != true {
        return Some(format!(
            "node {node:?} can only create pods with a controller owner reference set to itself"
        ));
    }
    if owner["blockOwnerDeletion"] == true {
        return Some(format!("node {node:?} must not set blockOwnerDeletion on an owner reference"));
    }
    let Some(uid) = uid else { return Some(format!("nodes {node:?} not found")) };
    let named = owner["uid"].as_str().unwrap_or_default();
    (named != uid).then(|| format!("node {node} UID mismatch: expected {named} got {uid}"))
}

/// The kind of API objects that a pod refers to, in upstream's words. A node may read the objects that its pods refer
/// to, so that a pod of its own must not refer to any.
fn reference(spec: &Value) -> Option<&'static str> {
    if !spec["serviceAccountName"].as_str().unwrap_or_default().is_empty() {
        return Some("serviceaccounts");
    }
    for kind in ["secrets", "configmaps", "persistentvolumeclaims"] {
        let mut any = false;
        node::references(spec, kind, &mut |_| any = true);
        if any {
            return Some(kind);
        }
    }
    if !list(spec, "resourceClaims").is_empty() {
        return Some("resourceclaims");
    }
    list(spec, "volumes").iter().find_map(|volume| {
        let has = |(source, kind): &(&str, &'static str)| volume[*source].is_object().then_some(*kind);
        let projected = || {
            let sources = list(&volume["projected"], "sources");
            sources.iter().find_map(|source| {
                PROJECTED.iter().find(|(part, _)| source[*part].is_object()).map(|(_, kind)| *kind)
            })
        };
        VOLUMES.iter().find_map(has).or_else(projected)
    })
}

/// Volumes that need the API, and the kind of objects that they need.
const VOLUMES: [(&str, &str); 7] = [
    ("configMap", "configmaps (via configmap volumes)"),
    ("secret", "secrets (via secret volumes)"),
    ("csi", "csidrivers (via CSI volumes)"),
    ("glusterfs", "endpoints (via glusterFS volumes)"),
    ("persistentVolumeClaim", "persistentvolumeclaims"),
    ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
    ("azureFile", "secrets (via azureFile volumes)"),
];

/// Sources of projected volumes that need the API.
const PROJECTED: [(&str, &str); 5] = [
    ("configMap", "configmaps (via projected volumes)"),
    ("secret", "secrets (via projected volumes)"),
    ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
    ("clusterTrustBundle", "clustertrustbundles"),
    ("podCertificate", "podcertificates"),
];

/// Reason why a node may not ask for a certificate of a kubelet: the certificate is another node's.
fn certificate_request(node: &str, request: &Value) -> Option<String> {
    const KUBELETS: [&str; 2] =
        ["kubernetes.io/kubelet-serving", "kubernetes.io/kube-apiserver-client-kubelet"];
    let spec = &request["spec"];
    if !spec["signerName"].as_str().is_some_and(|signer| KUBELETS.contains(&signer)) {
        return None;
    }
    let encoded = spec["request"].as_str().unwrap_or_default();
    let pem = base64::engine::general_purpose::STANDARD.decode(encoded).ok();
    let Some(parsed) = pem.and_then(|pem| ferrite_pki::Request::parse(&pem)) else {
        return Some("unable to parse csr: it is not a certificate request".into());
    };
    (parsed.common_name != format!("system:node:{node}"))
        .then(|| format!("can only create a node CSR with CN=system:node:{node}"))
}

fn pod_status(node: &str, attributes: &Attributes<'_>, object: Option<&Value>) -> Option<String> {
    let (old, new) = (attributes.old?, object?);
    if old["spec"]["nodeName"] != node {
        return Some(format!(
            "node {node:?} can only update pod status for pods with spec.nodeName set to itself"
        ));
    }
    if meta::labels(old) != meta::labels(new) {
        return Some(format!("node {node:?} cannot update labels through pod status"));
    }
    claims_in_status(node, old, new)
}

/// A node can read the claims that the status of its pods names: it may not name others.
fn claims_in_status(node: &str, old: &Value, new: &Value) -> Option<String> {
    let (old, new) = (&old["status"], &new["status"]);
    if list(old, "resourceClaimStatuses") != list(new, "resourceClaimStatuses") {
        return Some(format!("node {node:?} cannot update resource claim statues"));
    }
    (old["extendedResourceClaimStatus"] != new["extendedResourceClaimStatus"])
        .then(|| format!("node {node:?} cannot update extended resource claim status"))
}

fn own_node(node: &str, attributes: &Attributes<'_>, object: Option<&Value>) -> Option<String> {
    if attributes.name != node {
        return Some(format!("node {node:?} is not allowed to modify node {:?}", attributes.name));
    }
    let new = object?;
    let nothing = Value::Null;
    match (attributes.operation, attributes.old) {
        (Operation::Create, _) => {
            let forbidden = forbidden_labels(changed_labels(new, &nothing));
            (!forbidden.is_empty()).then(|| {
                format!("node {node:?} is not allowed to set the following labels: {}", forbidden.join(", "))
            })
        }
        (Operation::Update, Some(old)) => {
            if list(&new["metadata"], "ownerReferences") != list(&old["metadata"], "ownerReferences") {
                return Some(format!("node {node:?} is not allowed to modify ownerReferences"));
            }
            if new["spec"]["configSource"] != old["spec"]["configSource"]
                && !new["spec"]["configSource"].is_null()
            {
                return Some(format!(
                    "node {node:?} cannot update configSource to a new non-nil configSource"
                ));
            }
            if list(&new["spec"], "taints") != list(&old["spec"], "taints") {
                return Some(format!("node {node:?} is not allowed to modify taints"));
            }
            let forbidden = forbidden_labels(changed_labels(new, old));
            (!forbidden.is_empty())
                .then(|| format!("is not allowed to modify labels: {}", forbidden.join(", ")))
        }
        _ => None,
    }
}

/// Labels that differ between two objects.
fn changed_labels(new: &Value, old: &Value) -> BTreeSet<String> {
    let labels = |object: &Value| meta::labels(object).cloned().unwrap_or_default();
    let (new, old) = (labels(new), labels(old));
    new.keys()
        .chain(old.keys())
        .filter(|key| new.get(*key) != old.get(*key))
        .map(ToString::to_string)
        .collect()
}

/// Those that nodes may not touch: the API's own, but for the ones that kubelets are there to set.
fn forbidden_labels(labels: BTreeSet<String>) -> Vec<String> {
    const KUBELET: [&str; 14] = [
        "kubernetes.io/hostname",
        "kubernetes.io/os",
        "kubernetes.io/arch",
        "beta.kubernetes.io/os",
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/instance-type",
        "node.kubernetes.io/instance-type",
        "node.kubernetes.io/windows-build",
        "topology.kubernetes.io/zone",
        "topology.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/region",
        "failure-domain.kubernetes.io/zone",
        "failure-domain.kubernetes.io/region",
    ];
    let within = |domain: &str, parent: &str| domain == parent || domain.ends_with(&format!(".{parent}"));
    let forbidden = |label: &String| {
        let domain = label.split_once('/').map_or("", |(domain, _)| domain);
        if within(domain, "node-restriction.kubernetes.io") {
            return true;
        }
        let ours = within(domain, "kubernetes.io") || within(domain, "k8s.io");
        let kubelets = within(domain, "kubelet.kubernetes.io") || within(domain, "node.kubernetes.io");
        ours && !kubelets && !KUBELET.contains(&label.as_str())
    };
    labels.into_iter().filter(forbidden).collect()
}

fn claim_status(node: &str, attributes: &Attributes<'_>, object: Option<&Value>) -> Option<String> {
    const MUTABLE: [&str; 5] =
        ["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses", "resizeStatus"];
    let strip = |claim: &Value| {
        let mut claim = claim.clone();
        let metadata = meta::metadata_mut(&mut claim);
        metadata.remove("managedFields");
        metadata.remove("resourceVersion");
        if let Some(status) = claim["status"].as_object_mut() {
            MUTABLE.iter().for_each(|key| {
                status.remove(*key);
            });
        }
        claim
    };
    (strip(attributes.old?) != strip(object?)).then(|| {
        format!(
            "node {node:?} is not allowed to update fields other than status.quantity and status.conditions"
        )
    })
}

/// Tokens must be for pods of the node, and for audiences that those pods use.
fn bound_token(view: &View, node: &str, attributes: &Attributes<'_>, token: &Value) -> Option<String> {
    let reference = &token["spec"]["boundObjectRef"];
    if reference["apiVersion"] != "v1" || reference["kind"] != "Pod" || !reference["name"].is_string() {
        return Some("node requested token not bound to a pod".into());
    }
    let uid = reference["uid"].as_str().unwrap_or_default();
    if uid.is_empty() {
        return Some("node requested token with a pod binding without a uid".into());
    }
    let name = reference["name"].as_str().unwrap_or_default();
    let pod = view.get("", "pods", attributes.namespace, name)?;
    if meta::uid(&pod) != uid {
        return Some(format!(
            "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
        ));
    }
    if pod["spec"]["nodeName"] != node {
        return Some("node requested token bound to a pod scheduled on a different node".into());
    }
    audience_problem(view, attributes, &pod, list(&token["spec"], "audiences"))
}

/// Reason why a node may not ask for a token with these audiences for a pod: it may have those that the pod's volumes
/// name, and any that a role lets it have.
fn audience_problem(
    view: &View,
    attributes: &Attributes<'_>,
    pod: &Value,
    audiences: &[Value],
) -> Option<String> {
    let audience = match audiences {
        [] => "",
        [audience] => audience.as_str().unwrap_or_default(),
        _ => return Some("node may only request 0 or 1 audiences".into()),
    };
    if list(&pod["spec"], "volumes").iter().any(|volume| {
        let get = |group: &str, plural: &str, namespace: &str, name: &str| {
            view.get(group, plural, namespace, name).map(|object| Value::clone(&object))
        };
        names_audience(pod, volume, audience, &get)
    }) {
        return None;
    }
    // As upstream: the audience stands where a resource does, so that a star allows all of them.
    let action = Action {
        verb: "request-serviceaccounts-token-audience".into(),
        version: "v1".into(),
        resource: audience.into(),
        namespace: attributes.namespace.into(),
        name: attributes.name.into(),
        ..Action::default()
    };
    if decide(attributes.rbac, view, attributes.user, &action).allowed {
        return None;
    }
    let user = &attributes.user.name;
    Some(format!(
        "audience {audience:?} not found in pod spec volume, {user} is not authorized to request tokens for this audience"
    ))
}

/// Looks up an object by group, plural, namespace and name.
type Get<'a> = &'a dyn Fn(&str, &str, &str, &str) -> Option<Value>;

/// Returns true if a volume of a pod needs tokens for an audience: a projected one by itself, others by
/// their CSI driver.
fn names_audience(pod: &Value, volume: &Value, audience: &str, get: Get<'_>) -> bool {
    let projected = list(&volume["projected"], "sources").iter().any(|source| {
        let token = &source["serviceAccountToken"];
        token.is_object() && token["audience"].as_str().unwrap_or_default() == audience
    });
    if projected {
        return true;
    }
    let of_claim = |name: &str| {
        let claim = get("", "persistentvolumeclaims", meta::namespace(pod), name)?;
        let volume = get("", "persistentvolumes", "", claim["spec"]["volumeName"].as_str()?)?;
        volume["spec"]["csi"]["driver"].as_str().map(str::to_owned)
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let driver = if volume["ephemeral"]["volumeClaimTemplate"].is_object() {
        of_claim(&format!("{}-{}", meta::name(pod), text(&volume["name"])))
    } else if volume["persistentVolumeClaim"].is_object() {
        of_claim(&text(&volume["persistentVolumeClaim"]["claimName"]))
    } else {
        volume["csi"]["driver"].as_str().map(str::to_owned)
    };
    let driver = driver.and_then(|name| get("storage.k8s.io", "csidrivers", "", &name)).unwrap_or_default();
    let requests = list(&driver["spec"], "tokenRequests").iter();
    requests.map(|request| request["audience"].as_str().unwrap_or_default()).any(|named| named == audience)
}

/// Authorization does not see a new slice, nor each of those that go with a collection or that somebody puts in the place of
/// the one that it saw.
fn slice(node: &str, operation: Operation, new: Option<&Value>, old: Option<&Value>) -> Option<String> {
    let (verb, slice) = match operation {
        Operation::Create => ("create", new?),
        Operation::Delete => ("delete", old?),
        _ => return None,
    };
    (slice["spec"]["nodeName"] != node)
        .then(|| format!("can only {verb} ResourceSlice with the same NodeName as the requesting node"))
}

fn lease(node: &str, attributes: &Attributes<'_>) -> Option<String> {
    if attributes.namespace != node::LEASES {
        return Some(format!("can only access leases in the {:?} system namespace", node::LEASES));
    }
    (attributes.name != node)
        .then(|| "can only access node lease with the same name as the requesting node".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_node_makes_and_deletes_its_own_slices() {
        let (own, other) = (json!({"spec": {"nodeName": "n"}}), json!({"spec": {"nodeName": "m"}}));
        let shared = json!({"spec": {"allNodes": true}});
        for (operation, new, old, verb) in [
            (Operation::Create, Some(&own), None, None),
            (Operation::Create, Some(&other), None, Some("create")),
            (Operation::Create, Some(&shared), None, Some("create")),
            (Operation::Delete, None, Some(&own), None),
            (Operation::Delete, None, Some(&other), Some("delete")),
            (Operation::Delete, None, Some(&shared), Some("delete")),
            (Operation::Update, Some(&own), Some(&own), None),
        ] {
            let expected = verb.map(|verb| {
                format!("can only {verb} ResourceSlice with the same NodeName as the requesting node")
            });
            assert_eq!(slice("n", operation, new, old), expected, "{operation:?} {new:?} {old:?}");
        }
    }

    #[test]
    fn nodes_label_themselves_with_little() {
        let of = |labels: &[&str]| forbidden_labels(labels.iter().map(|l| (*l).to_owned()).collect());
        assert!(of(&["free", "example.com/x", "kubernetes.io/hostname", "node.kubernetes.io/x"]).is_empty());
        assert_eq!(of(&["kubernetes.io/bogus", "a.k8s.io/x"]), ["a.k8s.io/x", "kubernetes.io/bogus"]);
        assert_eq!(of(&["x.node-restriction.kubernetes.io/y"]).len(), 1);
    }

    #[test]
    fn a_node_gives_no_claims_to_its_pods() {
        let status = |status: Value| json!({"status": status});
        let none = status(json!({}));
        let empty = status(json!({"resourceClaimStatuses": []}));
        let made = status(json!({"resourceClaimStatuses": [{"name": "x", "resourceClaimName": "c"}]}));
        let extended = status(json!({"extendedResourceClaimStatus": {"resourceClaimName": "c"}}));
        assert_eq!(claims_in_status("n", &none, &empty), None);
        assert_eq!(claims_in_status("n", &made, &made), None);
        for (old, new) in [(&none, &made), (&made, &none), (&none, &extended), (&extended, &none)] {
            assert!(claims_in_status("n", old, new).is_some(), "{old} {new}");
        }
    }

    #[test]
    fn a_node_has_tokens_for_audiences_that_volumes_name() {
        let get =
            |group: &str, plural: &str, namespace: &str, name: &str| match (group, plural, namespace, name) {
                ("", "persistentvolumeclaims", "ns", "claim" | "p-own") => {
                    Some(json!({"spec": {"volumeName": "pv"}}))
                }
                ("", "persistentvolumes", "", "pv") => Some(json!({"spec": {"csi": {"driver": "d"}}})),
                ("storage.k8s.io", "csidrivers", "", "d") => {
                    Some(json!({"spec": {"tokenRequests": [{"audience": "vault"}]}}))
                }
                _ => None,
            };
        let pod = json!({"metadata": {"namespace": "ns", "name": "p"}});
        let token = |audience: Value| json!({"projected": {"sources": [{"serviceAccountToken": audience}]}});
        for (volume, audience, named) in [
            (token(json!({"path": "token"})), "", true),
            (token(json!({"path": "token"})), "vault", false),
            (token(json!({"audience": "vault"})), "vault", true),
            (token(json!({"audience": "vault"})), "", false),
            (json!({"projected": {"sources": [{"secret": {}}]}}), "", false),
            (json!({"csi": {"driver": "d"}}), "vault", true),
            (json!({"csi": {"driver": "other"}}), "vault", false),
            (json!({"persistentVolumeClaim": {"claimName": "claim"}}), "vault", true),
            (json!({"persistentVolumeClaim": {"claimName": "gone"}}), "vault", false),
            (json!({"name": "own", "ephemeral": {"volumeClaimTemplate": {}}}), "vault", true),
            (json!({"emptyDir": {}}), "", false),
        ] {
            assert_eq!(names_audience(&pod, &volume, audience, &get), named, "{volume} {audience}");
        }
    }

    fn mirror(spec: Value) -> Value {
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": true});
        json!({"metadata": {"annotations": {MIRROR: "x"}, "ownerReferences": [owner]}, "spec": spec})
    }

    #[test]
    fn only_mirrors_of_static_pods_are_created() {
        let with = |key: &str, value: Value| {
            let mut spec = json!({"nodeName": "n"});
            spec[key] = value;
            mirror(spec)
        };
        let volume = |source: Value| with("volumes", json!([source]));
        let projected = |part: &str| volume(json!({"projected": {"sources": [{part: {}}]}}));
        let rows = [
            (json!({"metadata": {}, "spec": {}}), Some("can only create mirror pods")),
            (mirror(json!({"nodeName": "other"})), Some("spec.nodeName set to itself")),
            (with("serviceAccountName", "a".into()), Some("reference serviceaccounts")),
            (with("resourceClaims", json!([{}])), Some("reference resourceclaims")),
            (volume(json!({"secret": {"secretName": "s"}})), Some("reference secrets")),
            (volume(json!({"secret": {}})), Some("reference secrets (via secret volumes)")),
            (volume(json!({"ephemeral": {}})), Some("persistentvolumeclaims (via ephemeral volumes)")),
            (volume(json!({"csi": {"driver": "d"}})), Some("csidrivers (via CSI volumes)")),
            (projected("serviceAccountToken"), Some("serviceaccounts (via projected volumes)")),
            (projected("clusterTrustBundle"), Some("clustertrustbundles")),
            (projected("downwardAPI"), None),
            (volume(json!({"hostPath": {"path": "/"}})), None),
            (with("hostNetwork", true.into()), None),
        ];
        for (pod, expected) in rows {
            let found = new_pod("n", Some("u"), &pod);
            match expected {
                None => assert_eq!(found, None, "{pod}"),
                Some(text) => assert!(found.as_ref().is_some_and(|f| f.ends_with(text)), "{found:?}"),
            }
        }
    }

    #[test]
    fn a_mirror_pod_is_owned_by_its_node() {
        let fine = mirror(json!({}))["metadata"]["ownerReferences"][0].clone();
        let other = |key: &str, value: Value| {
            let mut owner = fine.clone();
            owner[key] = value;
            vec![owner]
        };
        for (owners, text) in [
            (vec![], "an owner reference set to itself"),
            (vec![fine.clone(), fine.clone()], "a single owner reference set to itself"),
            (other("name", "m".into()), "an owner reference set to itself"),
            (other("controller", false.into()), "a controller owner reference set to itself"),
            (
                other("blockOwnerDeletion", true.into()),
                "must not set blockOwnerDeletion on an owner reference",
            ),
            (other("uid", "x".into()), "UID mismatch: expected x got u"),
        ] {
            let found = owner_problem("n", Some("u"), &owners);
            assert!(found.as_ref().is_some_and(|f| f.ends_with(text)), "{found:?} {text}");
        }
        assert_eq!(owner_problem("n", Some("u"), std::slice::from_ref(&fine)), None);
        assert!(owner_problem("n", None, &[fine]).is_some());
    }

    #[test]
    fn a_node_asks_for_its_own_certificate() {
        let request = |signer: &str, name: &str| {
            let subject = ferrite_pki::Subject {
                common_name: name.into(),
                organization: Some("system:nodes".into()),
                names: Vec::new(),
            };
            let pem = ferrite_pki::NewRequest::new(&subject).unwrap().request;
            let encoded = base64::engine::general_purpose::STANDARD.encode(pem);
            json!({"spec": {"signerName": signer, "request": encoded}})
        };
        const SERVING: &str = "kubernetes.io/kubelet-serving";
        const CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
        for (request, fine) in [
            (request(SERVING, "system:node:n"), true),
            (request(CLIENT, "system:node:n"), true),
            (request(SERVING, "system:node:m"), false),
            (request(CLIENT, "system:node:m"), false),
            (request("kubernetes.io/kube-apiserver-client", "system:kube-proxy"), true),
            (json!({"spec": {"signerName": CLIENT, "request": "bm9uZQ=="}}), false),
        ] {
            assert_eq!(certificate_request("n", &request).is_none(), fine, "{request}");
        }
    }
}
