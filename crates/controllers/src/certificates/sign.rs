//! Signs approved requests that fit their signer.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, Informer};
use ferrite_pki::{Authority, Request};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::PostParams;

use super::{
    API_CLIENT, KUBELET_CLIENT, KUBELET_SERVING, LEGACY_UNKNOWN, condition, has, is_issued,
    kubelet_client_problem, kubelet_serving_problem, settled, usages_are, with_condition,
};
use crate::Context;

const NAME: &str = "certificatesigningrequest-signing-controller";
const LEAST_SECONDS: u64 = 600;

/// The authorities behind upstream's signers. A signer without one leaves its requests to others.
#[derive(Debug, Clone, Default)]
pub struct Signers {
    pub kubelet_serving: Option<Arc<Authority>>,
    pub kubelet_client: Option<Arc<Authority>>,
    pub api_client: Option<Arc<Authority>>,
    /// Signs anything that was approved. The API takes no new requests for it: existing ones come from
    /// older clusters.
    pub legacy_unknown: Option<Arc<Authority>>,
}

impl Signers {
    /// One authority for all signers.
    pub fn all(authority: Arc<Authority>) -> Self {
        Self {
            kubelet_serving: Some(authority.clone()),
            kubelet_client: Some(authority.clone()),
            api_client: Some(authority.clone()),
            legacy_unknown: Some(authority),
        }
    }

    fn is_empty(&self) -> bool {
        [API_CLIENT, KUBELET_CLIENT, KUBELET_SERVING, LEGACY_UNKNOWN]
            .iter()
            .all(|name| self.of(name).is_none())
    }

    fn of(&self, signer: &str) -> Option<&Authority> {
        match signer {
            KUBELET_SERVING => self.kubelet_serving.as_deref(),
            KUBELET_CLIENT => self.kubelet_client.as_deref(),
            API_CLIENT => self.api_client.as_deref(),
            LEGACY_UNKNOWN => self.legacy_unknown.as_deref(),
            _ => None,
        }
    }
}

pub(crate) fn start(context: &Context) {
    let (signers, lifetime) = (context.config.signers.clone(), context.config.signing_duration);
    if signers.is_empty() {
        return;
    }
    let requests: Informer<CertificateSigningRequest> = context.informers.get();
    let client = context.client.clone();
    context.controller(NAME).reconciles(&requests).run(move |key| {
        let signed = requests.get(&key).and_then(|request| decide(&request, &signers, lifetime));
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
    signers: &Signers,
    lifetime: Duration,
) -> Option<CertificateSigningRequest> {
    let authority = signers.of(&request.spec.signer_name)?;
    let open = has(request, "Approved") && !has(request, "Denied") && !has(request, "Failed");
    if !open || is_issued(request) {
        return None;
    }
    Some(match sign(request, authority, lifetime) {
        Ok(certificate) => {
            let mut signed = request.clone();
            signed.status.get_or_insert_default().certificate = Some(ByteString(certificate.into_bytes()));
            signed
        }
        Err(why) => with_condition(request, condition("Failed", "SignerValidationFailure", &why)),
    })
}

fn sign(
    request: &CertificateSigningRequest,
    authority: &Authority,
    lifetime: Duration,
) -> Result<String, String> {
    let pem = std::str::from_utf8(&request.spec.request.0).map_err(|e| e.to_string())?;
    let wanted = Request::parse(pem.as_bytes()).ok_or("the request is not a PEM of a certificate request")?;
    let problem = match request.spec.signer_name.as_str() {
        KUBELET_SERVING => kubelet_serving_problem(request, &wanted),
        KUBELET_CLIENT => kubelet_client_problem(request, &wanted),
        LEGACY_UNKNOWN => None,
        _ if !usages_are(request, "client auth") => {
            Some("usages did not match [key encipherment digital signature client auth]")
        }
        _ => None,
    };
    if let Some(problem) = problem {
        return Err(problem.to_owned());
    }
    let asked = request.spec.expiration_seconds.and_then(|s| u64::try_from(s).ok());
    let longest = lifetime.as_secs();
    let seconds = asked.map_or(longest, |seconds| seconds.max(LEAST_SECONDS).min(longest));
    let usages = request.spec.usages.clone().unwrap_or_default();
    authority.sign(pem, &usages, seconds).map_err(|e| format!("cannot sign: {e}"))
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn request(signer: &str, usages: &[&str], conditions: &[&str]) -> CertificateSigningRequest {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["db.example".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, "db");
        let pem = params.serialize_request(&key).unwrap().pem().unwrap();
        let conditions: Vec<_> =
            conditions.iter().map(|kind| json!({"type": kind, "status": "True"})).collect();
        let mut request: CertificateSigningRequest = ferrite_json::from_value(json!({
            "metadata": {"name": "r"},
            "spec": {"request": "", "signerName": signer, "usages": usages},
            "status": {"conditions": conditions},
        }))
        .unwrap();
        request.spec.request = ByteString(pem.into_bytes());
        request
    }

    #[test]
    fn each_signer_has_its_authority_and_its_rules() {
        let authority = Arc::new(Authority::create("ca").unwrap());
        let year = Duration::from_secs(365 * 24 * 3600);
        let all = Signers::all(authority.clone());
        let only_clients = Signers { api_client: Some(authority), ..Signers::default() };
        let (client, any): (&[&str], &[&str]) = (&["client auth"], &["server auth", "cert sign"]);
        for (what, request, signers, expected) in [
            ("approved", request(API_CLIENT, client, &["Approved"]), &all, Some(true)),
            ("not yet", request(API_CLIENT, client, &[]), &all, None),
            ("denied", request(API_CLIENT, client, &["Approved", "Denied"]), &all, None),
            ("wrong usages", request(API_CLIENT, any, &["Approved"]), &all, Some(false)),
            ("not a kubelet's", request(KUBELET_SERVING, &["server auth"], &["Approved"]), &all, Some(false)),
            ("no rules for the legacy signer", request(LEGACY_UNKNOWN, any, &["Approved"]), &all, Some(true)),
            (
                "which only its authority does",
                request(LEGACY_UNKNOWN, any, &["Approved"]),
                &only_clients,
                None,
            ),
            ("another's", request("example.com/x", client, &["Approved"]), &all, None),
        ] {
            let signed = decide(&request, signers, year).map(|signed| is_issued(&signed));
            assert_eq!(signed, expected, "{what}");
        }
    }
}
