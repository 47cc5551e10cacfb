//! Certificate signing requests: approved if they are a node's own, signed once approved, and removed when old.

mod approve;
mod clean;
mod nodes;
mod pod_requests;
mod sign;
mod trust_bundles;

pub(crate) use approve::start as start_approving;
pub(crate) use clean::start as start_cleaning;
pub use nodes::NodeCertificates;
pub(crate) use nodes::start as start_approving_nodes;
pub(crate) use pod_requests::start as start_cleaning_pod_requests;
pub use sign::Signers;
pub(crate) use sign::start as start_signing;
pub(crate) use trust_bundles::start as start_publishing;

use ferrite_client::{is_conflict, is_not_found};
use ferrite_pki::Request;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::time::Duration;

use crate::error::{During, SyncError};

const API_CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const LEGACY_UNKNOWN: &str = "kubernetes.io/legacy-unknown";
const NODES: &str = "system:nodes";
const NODE: &str = "system:node:";

fn has(request: &CertificateSigningRequest, condition: &str) -> bool {
    let conditions = request.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == condition)
}

fn is_issued(request: &CertificateSigningRequest) -> bool {
    request.status.as_ref().and_then(|s| s.certificate.as_ref()).is_some_and(|c| !c.0.is_empty())
}

fn condition(type_: &str, reason: &str, message: &str) -> CertificateSigningRequestCondition {
    let now = Some(Time(jiff::Timestamp::now()));
    CertificateSigningRequestCondition {
        type_: type_.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_update_time: now.clone(),
        last_transition_time: now,
    }
}

fn with_condition(
    request: &CertificateSigningRequest,
    condition: CertificateSigningRequestCondition,
) -> CertificateSigningRequest {
    let mut request = request.clone();
    request.status.get_or_insert_default().conditions.get_or_insert_default().push(condition);
    request
}

/// Returns true if the request has the `needed` usage and no others than the two that every certificate may
/// have.
fn usages_are(request: &CertificateSigningRequest, needed: &str) -> bool {
    let usages = request.spec.usages.as_deref().unwrap_or_default();
    usages.iter().any(|u| u == needed)
        && usages.iter().all(|u| u == needed || u == "digital signature" || u == "key encipherment")
}

/// Why a request is not one for a kubelet's client certificate.
fn kubelet_client_problem(request: &CertificateSigningRequest, wanted: &Request) -> Option<&'static str> {
    if wanted.organizations != [NODES] {
        return Some("subject organization is not system:nodes");
    }
    if !wanted.dns_names.is_empty() || !wanted.addresses.is_empty() || wanted.other_names {
        return Some("subject alternative names are not allowed");
    }
    if !usages_are(request, "client auth") {
        return Some("usages did not match [key encipherment digital signature client auth]");
    }
    (!wanted.common_name.starts_with(NODE)).then_some("subject common name does not begin with system:node:")
}

/// Why a request is not one for a kubelet's serving certificate.
fn kubelet_serving_problem(request: &CertificateSigningRequest, wanted: &Request) -> Option<&'static str> {
    if wanted.organizations != [NODES] {
        return Some("subject organization is not system:nodes");
    }
    if wanted.dns_names.is_empty() && wanted.addresses.is_empty() {
        return Some("DNS or IP subjectAltName is required");
    }
    if wanted.other_names {
        return Some("email or URI subjectAltNames are not allowed");
    }
    if !usages_are(request, "server auth") {
        return Some("usages did not match [key encipherment digital signature server auth]");
    }
    if !wanted.common_name.starts_with(NODE) {
        return Some("subject common name does not begin with system:node:");
    }
    (request.spec.username.as_deref() != Some(&wanted.common_name))
        .then_some("requested certificate is not for the requesting node")
}

fn settled<T>(result: Result<T, kube::Error>, name: &str) -> Result<Option<Duration>, SyncError> {
    match result {
        Ok(_) => Ok(None),
        // A change of the object triggers another sync.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("write certificate signing request {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use ferrite_pki::{NewRequest, Subject};
    use k8s_openapi::ByteString;

    /// The request of the node `n` for its own client certificate.
    pub(super) fn node_request() -> CertificateSigningRequest {
        let subject = Subject {
            common_name: "system:node:n".into(),
            organization: Some(NODES.into()),
            names: Vec::new(),
        };
        let mut request = CertificateSigningRequest::default();
        request.metadata.name = Some("csr".into());
        request.spec.username = Some("system:node:n".into());
        request.spec.signer_name = KUBELET_CLIENT.into();
        request.spec.usages = Some(vec!["digital signature".into(), "client auth".into()]);
        request.spec.request = ByteString(NewRequest::new(&subject).unwrap().request.into_bytes());
        request
    }

    #[test]
    fn kubelets_ask_for_their_own() {
        let csr = |usages: &[&str]| -> CertificateSigningRequest {
            ferrite_json::from_value(json!({
                "metadata": {}, "spec": {"request": "", "signerName": KUBELET_SERVING, "usages": usages,
                "username": "system:node:n"},
            }))
            .unwrap()
        };
        let node = |change: &dyn Fn(&mut Request)| {
            let mut request = Request {
                common_name: "system:node:n".into(),
                organizations: vec![NODES.into()],
                ..Request::default()
            };
            change(&mut request);
            request
        };
        let client = csr(&["digital signature", "client auth"]);
        assert_eq!(kubelet_client_problem(&client, &node(&|_| {})), None);
        assert!(
            kubelet_client_problem(&client, &node(&|r| r.addresses = vec![[192, 0, 2, 1].into()])).is_some()
        );
        assert!(
            kubelet_client_problem(&client, &node(&|r| r.organizations.push("system:masters".into())))
                .is_some()
        );
        assert!(kubelet_client_problem(&csr(&["server auth"]), &node(&|_| {})).is_some());
        let serving = csr(&["digital signature", "server auth"]);
        assert_eq!(
            kubelet_serving_problem(&serving, &node(&|r| r.addresses = vec![[192, 0, 2, 1].into()])),
            None
        );
        assert!(kubelet_serving_problem(&serving, &node(&|_| {})).is_some());
        let other = node(&|r| {
            r.addresses = vec![[192, 0, 2, 1].into()];
            r.common_name = "system:node:other".into();
        });
        assert!(kubelet_serving_problem(&serving, &other).is_some());
    }
}
