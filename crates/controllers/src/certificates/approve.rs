//! Approves certificates that nodes may ask for themselves.

use std::time::Duration;

use ferrite_client::{Api, Informer};
use ferrite_pki::Request;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Client;
use kube::api::PostParams;

use super::{KUBELET_CLIENT, condition, has, is_issued, kubelet_client_problem, settled, with_condition};
use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "certificatesigningrequest-approving-controller";

pub(crate) fn start(context: &Context) {
    let requests: Informer<CertificateSigningRequest> = context.informers.get();
    let client = context.client.clone();
    context.controller(NAME).reconciles(&requests).run(move |key| {
        let request = requests.get(&key);
        let client = client.clone();
        async move {
            let Some(request) = request else { return Ok(None) };
            approve(&client, &request).await
        }
    });
}

/// The right that lets a request pass, and the message for it. None if it is not a node's.
fn recognise(request: &CertificateSigningRequest) -> Option<(&'static str, &'static str)> {
    let decided = is_issued(request) || has(request, "Approved") || has(request, "Denied");
    if decided || request.spec.signer_name != KUBELET_CLIENT {
        return None;
    }
    let wanted = Request::parse(&request.spec.request.0)?;
    if kubelet_client_problem(request, &wanted).is_some() {
        return None;
    }
    Some(match request.spec.username.as_deref() == Some(&wanted.common_name) {
        true => {
            ("selfnodeclient", "Auto approving self kubelet client certificate after SubjectAccessReview.")
        }
        false => ("nodeclient", "Auto approving kubelet client certificate after SubjectAccessReview."),
    })
}

async fn approve(
    client: &Client,
    request: &CertificateSigningRequest,
) -> Result<Option<Duration>, SyncError> {
    let Some((right, message)) = recognise(request) else { return Ok(None) };
    let name = request.metadata.name.as_deref().unwrap_or_default();
    let spec = &request.spec;
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: spec.username.clone(),
            uid: spec.uid.clone(),
            groups: spec.groups.clone(),
            extra: spec.extra.clone(),
            resource_attributes: Some(ResourceAttributes {
                group: Some("certificates.k8s.io".into()),
                resource: Some("certificatesigningrequests".into()),
                verb: Some("create".into()),
                subresource: Some(right.into()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let answer = reviews
        .create(&PostParams::default(), &review)
        .await
        .during(|| format!("ask whether certificate signing request {name} may pass"))?;
    if !answer.status.is_some_and(|status| status.allowed) {
        // As upstream: the right may come later, so ask again with growing delays.
        return Err(SyncError::Other(format!(
            "the requester of certificate signing request {name} may not have it approved"
        )));
    }
    let approved = with_condition(request, condition("Approved", "AutoApproved", message));
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    settled(api.replace_subresource("approval", name, &PostParams::default(), &approved).await, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::tests::node_request;
    use ferrite_json::json;
    use kube::client::Body;
    use std::convert::Infallible;

    #[tokio::test]
    async fn a_requester_without_the_right_is_asked_about_again() {
        for (allowed, is_done) in [(true, true), (false, false)] {
            let service = tower::service_fn(move |request: http::Request<Body>| async move {
                let body = match request.method() == http::Method::POST {
                    true => ferrite_json::to_vec(&json!({"kind": "SubjectAccessReview",
                        "apiVersion": "authorization.k8s.io/v1", "spec": {}, "status": {"allowed": allowed}}))
                    .expect("a review"),
                    false => request.into_body().collect_bytes().await.expect("a body").to_vec(),
                };
                Ok::<_, Infallible>(http::Response::new(Body::from(body)))
            });
            let client = Client::new(service, "default");
            let result = approve(&client, &node_request()).await;
            assert_eq!(result.is_ok(), is_done, "{result:?}");
        }
    }
}
