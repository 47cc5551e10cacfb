//! Signs what was approved, if it is what its signer signs.

use std::time::Duration;

use ferrite_client::{Api, Informer};
use ferrite_pki::{Authority, Request};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::PostParams;

use super::{
    API_CLIENT, KUBELET_CLIENT, KUBELET_SERVING, condition, has, is_issued, kubelet_client_problem,
    kubelet_serving_problem, settled, usages_are, with_condition,
};
use crate::Context;

const NAME: &str = "certificatesigningrequest-signing-controller";
const LEAST_SECONDS: u64 = 600;

pub(crate) fn start(context: &Context) {
    let Some(authority) = context.config.authority.clone() else { return };
    let requests: Informer<CertificateSigningRequest> = context.informers.get();
    let client = context.client.clone();
    let longest = context.config.signing_duration.as_secs();
    context.controller(NAME).reconciles(&requests).run(move |key| {
        let signed = requests.get(&key).and_then(|request| decide(&request, &authority, longest));
        let client = client.clone();
        async move {
            let Some(signed) = signed else { return Ok(None::<Duration>) };
            let api: Api<CertificateSigningRequest> = Api::all(client);
            settled(api.replace_status(&key.name, &PostParams::default(), &signed).await, &key.name)
        }
    });
}

/// The request with its certificate, or with why it gets none. None when there is nothing to do.
fn decide(
    request: &CertificateSigningRequest,
    authority: &Authority,
    longest: u64,
) -> Option<CertificateSigningRequest> {
    let signer = request.spec.signer_name.as_str();
    let ours = matches!(signer, API_CLIENT | KUBELET_CLIENT | KUBELET_SERVING);
    let open = has(request, "Approved") && !has(request, "Denied") && !has(request, "Failed");
    if !ours || !open || is_issued(request) {
        return None;
    }
    Some(match sign(request, authority, longest) {
        Ok(certificate) => {
            let mut signed = request.clone();
            signed.status.get_or_insert_default().certificate = Some(ByteString(certificate.into_bytes()));
            signed
        }
        Err(why) => with_condition(request, condition("Failed", "SignerValidationFailure", &why)),
    })
}

/// `longest` is the life of a certificate that does not ask for another, in seconds.
fn sign(request: &CertificateSigningRequest, authority: &Authority, longest: u64) -> Result<String, String> {
    let pem = std::str::from_utf8(&request.spec.request.0).map_err(|e| e.to_string())?;
    let wanted = Request::parse(pem.as_bytes()).ok_or("the request is not a PEM of a certificate request")?;
    let problem = match request.spec.signer_name.as_str() {
        KUBELET_SERVING => kubelet_serving_problem(request, &wanted),
        KUBELET_CLIENT => kubelet_client_problem(request, &wanted),
        _ if !usages_are(request, "client auth") => {
            Some("usages did not match [key encipherment digital signature client auth]")
        }
        _ => None,
    };
    if let Some(problem) = problem {
        return Err(problem.to_owned());
    }
    let asked = request.spec.expiration_seconds.and_then(|s| u64::try_from(s).ok());
    let seconds = asked.map_or(longest, |s| s.max(LEAST_SECONDS).min(longest));
    let usages = request.spec.usages.clone().unwrap_or_default();
    authority.sign(pem, &usages, seconds).map_err(|e| format!("cannot sign: {e}"))
}
