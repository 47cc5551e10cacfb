//! A node asks for certificates of pods that run on it, and of no others.

use super::{Attributes, MIRROR, Operation};
use crate::registry::View;
use ferrite_api::{Status, meta};
use ferrite_json::Value;

pub(super) const GROUP: &str = "certificates.k8s.io";
pub(super) const REQUESTS: &str = "podcertificaterequests";

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// It will never be allowed.
    Forbidden(String),
    /// It names objects that are not there, or not any more: upstream's nodes try again.
    Inconsistent(String),
}

/// The objects that a request names, as they are.
#[derive(Default)]
struct Named<'a> {
    node: Option<&'a Value>,
    pod: Option<&'a Value>,
    account: Option<&'a Value>,
}

/// Checks a node's write of a request.
pub(super) fn validate(
    view: &View,
    node: &str,
    attributes: &Attributes<'_>,
    object: Option<&Value>,
) -> Result<(), Status> {
    if attributes.operation != Operation::Create {
        return Err(attributes.forbid(format!("unexpected operation {}", attributes.operation.name())));
    }
    if let Some(subresource) = attributes.subresource {
        return Err(attributes.forbid(format!("unexpected subresource {subresource}")));
    }
    let Some(request) = object else { return Ok(()) };
    let spec = &request["spec"];
    let namespace = attributes.namespace;
    let text = |key: &str| spec[key].as_str().unwrap_or_default();
    let (own, pod, account) = (
        view.get("", "nodes", "", text("nodeName")),
        view.get("", "pods", namespace, text("podName")),
        view.get("", "serviceaccounts", namespace, text("serviceAccountName")),
    );
    let named = Named { node: own.as_deref(), pod: pod.as_deref(), account: account.as_deref() };
    match refusal(node, namespace, spec, &named) {
        None => Ok(()),
        Some(Refusal::Forbidden(why)) => Err(attributes.forbid(why)),
        Some(Refusal::Inconsistent(why)) => Err(Status::new(500, "", why)),
    }
}

fn refusal(node: &str, namespace: &str, spec: &Value, named: &Named<'_>) -> Option<Refusal> {
    let text = |key: &str| spec[key].as_str().unwrap_or_default();
    let (node_name, pod_name, account_name) = (text("nodeName"), text("podName"), text("serviceAccountName"));
    let pod_key = format!("{namespace}/{pod_name}");
    let forbidden = |why: String| Some(Refusal::Forbidden(why));
    let inconsistent = |why: String| Some(Refusal::Inconsistent(why));
    let missing = |kind: &str, key: &str, plural: &str, name: &str| {
        let missing = Status::not_found("", plural, name).message;
        inconsistent(format!("while retrieving {kind} {key:?} named in the PodCertificateRequest: {missing}"))
    };
    if node_name != node {
        return forbidden(format!(
            "PodCertificateRequest.Spec.NodeName={node_name:?}, which is not the requesting node {node:?}"
        ));
    }
    let Some(own) = named.node else { return missing("node", node_name, "nodes", node_name) };
    if meta::uid(own) != text("nodeUID") {
        return inconsistent(format!(
            "PodCertificateRequest for pod {pod_key:?} names node UID {:?}, inconsistent with the running node ({:?})",
            text("nodeUID"),
            meta::uid(own)
        ));
    }
    let Some(pod) = named.pod else { return missing("pod", &pod_key, "pods", pod_name) };
    if meta::uid(pod) != text("podUID") {
        return inconsistent(format!(
            "PodCertificateRequest for pod {pod_key:?} contains pod UID ({:?}) which differs from running pod {:?}",
            text("podUID"),
            meta::uid(pod)
        ));
    }
    if pod["spec"]["nodeName"] != node {
        return forbidden(format!(
            "pod {pod_key:?} is not running on node {node_name:?} named in the PodCertificateRequest"
        ));
    }
    if pod["metadata"]["annotations"].get(MIRROR).is_some() {
        return forbidden(format!("pod {pod_key:?} is a mirror pod"));
    }
    let of_pod = pod["spec"]["serviceAccountName"].as_str().unwrap_or_default();
    if account_name != of_pod {
        return forbidden(format!(
            "PodCertificateRequest for pod {pod_key:?} contains serviceAccountName ({account_name:?}) that differs from running pod ({of_pod:?})"
        ));
    }
    let Some(account) = named.account else {
        let key = format!("{namespace}/{account_name}");
        return missing("service account", &key, "serviceaccounts", account_name);
    };
    (meta::uid(account) != text("serviceAccountUID")).then(|| {
        Refusal::Inconsistent(format!(
            "PodCertificateRequest for pod {pod_key:?} names service account UID {:?}, which differs from the running service account ({:?})",
            text("serviceAccountUID"),
            meta::uid(account)
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_node_asks_for_its_own_pods_alone() {
        let node = json!({"metadata": {"name": "n", "uid": "1"}});
        let pod = json!({"metadata": {"uid": "2"}, "spec": {"nodeName": "n", "serviceAccountName": "s"}});
        let account = json!({"metadata": {"uid": "3"}});
        let request = json!({"nodeName": "n", "nodeUID": "1", "podName": "p", "podUID": "2",
            "serviceAccountName": "s", "serviceAccountUID": "3"});
        let changed = |object: &Value, pointer: &str, value: Value| {
            let mut object = object.clone();
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            object.pointer_mut(parent).unwrap()[key] = value;
            object
        };
        let elsewhere = changed(&pod, "/spec/nodeName", json!("m"));
        let mirror = changed(&pod, "/metadata/annotations", json!({MIRROR: "x"}));
        let of_other = changed(&pod, "/spec/serviceAccountName", json!("other"));
        let forbidden = |why: &str| Some(Refusal::Forbidden(why.to_owned()));
        let inconsistent = |why: &str| Some(Refusal::Inconsistent(why.to_owned()));
        let all = |pod| Named { node: Some(&node), pod: Some(pod), account: Some(&account) };
        let ask = |key: &str, value: &str| {
            changed(&json!({ "r": request }), &format!("/r/{key}"), json!(value))["r"].clone()
        };
        for (spec, named, expected) in [
            (request.clone(), all(&pod), None),
            (
                ask("nodeName", "m"),
                all(&pod),
                forbidden(r#"PodCertificateRequest.Spec.NodeName="m", which is not the requesting node "n""#),
            ),
            (
                ask("nodeUID", "x"),
                all(&pod),
                inconsistent(
                    r#"PodCertificateRequest for pod "ns/p" names node UID "x", inconsistent with the running node ("1")"#,
                ),
            ),
            (
                request.clone(),
                Named { node: Some(&node), ..Named::default() },
                inconsistent(
                    r#"while retrieving pod "ns/p" named in the PodCertificateRequest: pods "p" not found"#,
                ),
            ),
            (
                ask("podUID", "x"),
                all(&pod),
                inconsistent(
                    r#"PodCertificateRequest for pod "ns/p" contains pod UID ("x") which differs from running pod "2""#,
                ),
            ),
            (
                request.clone(),
                all(&elsewhere),
                forbidden(r#"pod "ns/p" is not running on node "n" named in the PodCertificateRequest"#),
            ),
            (request.clone(), all(&mirror), forbidden(r#"pod "ns/p" is a mirror pod"#)),
            (
                request.clone(),
                all(&of_other),
                forbidden(
                    r#"PodCertificateRequest for pod "ns/p" contains serviceAccountName ("s") that differs from running pod ("other")"#,
                ),
            ),
            (
                ask("serviceAccountUID", "x"),
                all(&pod),
                inconsistent(
                    r#"PodCertificateRequest for pod "ns/p" names service account UID "x", which differs from the running service account ("3")"#,
                ),
            ),
        ] {
            assert_eq!(refusal("n", "ns", &spec, &named), expected, "{spec}");
        }
    }
}
