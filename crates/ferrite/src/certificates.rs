//! Certificates that a node asks its cluster for: requests, their approval, and rotation while the node runs.

use ferrite_client::{Api, Backoff, Change, Informer, ListSelector, Scope, is_not_found, message_of};
use ferrite_pki::{Identity, NewRequest, PkiError, Subject};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use kube::api::{ObjectMeta, PostParams};
use std::time::Duration;

pub const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
pub const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
pub const API_CLIENT: &str = "kubernetes.io/kube-apiserver-client";

/// A request that nobody decides about in this time is made again.
const SIGNING_TIME: Duration = Duration::from_secs(15 * 60);

/// Why there is no certificate; trying again would not help.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("the request for the certificate {name} was refused: {why}")]
    Refused { name: &'static str, why: String },
    #[error("the API server does not sign certificates")]
    NotServed(#[source] kube::Error),
    #[error("cannot make a key")]
    Key(#[source] PkiError),
}

/// A certificate that the node wants.
pub struct WantedCertificate {
    /// For messages and files.
    pub name: &'static str,
    pub subject: Subject,
    pub signer: &'static str,
    pub usage: &'static str,
}

impl WantedCertificate {
    /// Makes a key, asks for its certificate and waits until somebody has decided.
    pub async fn obtain(&self, client: &kube::Client, scope: &Scope) -> Result<Identity, CertificateError> {
        let NewRequest { request, key } = NewRequest::new(&self.subject).map_err(CertificateError::Key)?;
        let certificate = self.sign(client, request, scope).await?;
        Ok(Identity { certificate, key })
    }

    async fn sign(
        &self,
        client: &kube::Client,
        request: String,
        scope: &Scope,
    ) -> Result<String, CertificateError> {
        let api = Api::<CertificateSigningRequest>::all(client.clone());
        let object = CertificateSigningRequest {
            metadata: ObjectMeta { generate_name: Some("node-csr-".into()), ..ObjectMeta::default() },
            spec: CertificateSigningRequestSpec {
                request: ByteString(request.into_bytes()),
                signer_name: self.signer.to_owned(),
                usages: Some(["digital signature", self.usage].map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        };
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(10), 0.2);
        loop {
            match api.create(&PostParams::default(), &object).await {
                Ok(created) => {
                    let name = created.metadata.name.unwrap_or_default();
                    match tokio::time::timeout(SIGNING_TIME, self.decided(&api, &name, scope)).await {
                        Ok(decided) => return decided,
                        Err(_) => {
                            tracing::warn!(request = name, "nobody decided about the request; will ask again")
                        }
                    }
                }
                // An invalid token never becomes valid, and nobody else reports it to the user.
                Err(kube::Error::Api(status)) if status.code == 401 || status.code == 403 => {
                    return Err(CertificateError::Refused { name: self.name, why: status.message.clone() });
                }
                Err(error) if is_not_found(&error) => return Err(CertificateError::NotServed(error)),
                Err(error) => {
                    tracing::warn!(
                        error = message_of(&error),
                        "cannot ask for a certificate; will try again"
                    );
                }
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// The certificate, once it is signed.
    async fn decided(
        &self,
        api: &Api<CertificateSigningRequest>,
        name: &str,
        scope: &Scope,
    ) -> Result<String, CertificateError> {
        let scope = scope.child();
        let selector = ListSelector::fields(format!("metadata.name={name}"));
        let informer = Informer::start(api.clone(), selector, &scope);
        let (found, mut seen) = tokio::sync::mpsc::channel(1);
        informer.subscribe(move |change: &Change<CertificateSigningRequest>| {
            if let Some(verdict) = verdict(change.object()) {
                // One verdict is enough; later ones find the channel full or closed.
                let _ = found.try_send(verdict);
            }
        });
        let told = seen.recv().await;
        scope.cancel();
        told.unwrap_or_else(|| Err("the process is stopping".into()))
            .map_err(|why| CertificateError::Refused { name: self.name, why })
    }
}

/// The certificate, or why there is none. None while nobody has decided.
fn verdict(request: &CertificateSigningRequest) -> Option<Result<String, String>> {
    let status = request.status.as_ref()?;
    let refused = |c: &&k8s_openapi::api::certificates::v1::CertificateSigningRequestCondition| {
        matches!(c.type_.as_str(), "Denied" | "Failed")
    };
    if let Some(condition) = status.conditions.as_deref().unwrap_or_default().iter().find(refused) {
        return Some(Err(condition.message.clone().unwrap_or_default()));
    }
    let certificate = status.certificate.as_ref().filter(|certificate| !certificate.0.is_empty())?;
    Some(String::from_utf8(certificate.0.clone()).map_err(|e| e.to_string()))
}

/// The time from now until a certificate should be replaced: between 70 % and 90 % of its life, as upstream, so that the
/// nodes of a cluster do not ask all at once. `share` is between 0 and 1.
pub fn until_rotation(certificate: &str, now: i64, share: f64) -> Option<Duration> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).ok()?;
    let parsed = pem.parse_x509().ok()?;
    let (from, to) = (parsed.validity().not_before.timestamp(), parsed.validity().not_after.timestamp());
    let life = to.saturating_sub(from) as f64;
    let at = from as f64 + life * (0.7 + 0.2 * share.clamp(0.0, 1.0));
    Some(Duration::from_secs_f64((at - now as f64).max(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn certificates_are_replaced_before_they_end() {
        let authority = ferrite_pki::Authority::create("test").unwrap();
        let subject = Subject::client("system:node:a", Some("system:nodes"));
        let NewRequest { request, .. } = NewRequest::new(&subject).unwrap();
        let usages = ["client auth".to_owned()];
        let certificate = authority.sign(&request, &usages, 1000).unwrap();
        let (_, pem) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()).unwrap();
        let parsed = pem.parse_x509().unwrap();
        let (from, to) = (parsed.validity().not_before.timestamp(), parsed.validity().not_after.timestamp());
        let life = u64::try_from(to - from).unwrap();
        for (now, share, least, most) in [
            (from, 0.0, life * 7 / 10 - 1, life * 7 / 10 + 1),
            (from, 1.0, life * 9 / 10 - 1, life * 9 / 10 + 1),
            (to, 0.0, 0, 0),
        ] {
            let seconds = until_rotation(&certificate, now, share).unwrap().as_secs();
            assert!((least..=most).contains(&seconds), "{seconds}");
        }
        assert_eq!(until_rotation("none", 0, 0.0), None);
    }

    #[test]
    fn verdicts() {
        let request = |status: Value| -> CertificateSigningRequest {
            ferrite_json::from_value(
                json!({"metadata": {}, "spec": {"request": "", "signerName": "s/s"}, "status": status}),
            )
            .unwrap()
        };
        let condition = |type_: &str| json!([{"type": type_, "status": "True", "message": "no"}]);
        for (status, want) in [
            (json!({}), None),
            (json!({"conditions": condition("Approved")}), None),
            (json!({"conditions": condition("Denied")}), Some(Err("no".to_owned()))),
            (json!({"conditions": condition("Failed")}), Some(Err("no".to_owned()))),
            (json!({"certificate": "UEVN"}), Some(Ok("PEM".to_owned()))),
        ] {
            assert_eq!(verdict(&request(status.clone())), want, "{status}");
        }
    }
}
