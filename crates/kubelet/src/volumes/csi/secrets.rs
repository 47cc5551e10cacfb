//! The Secrets and tokens that drivers get.

use super::wanted::SecretKey;
use super::{Csi, CsiError};
use crate::pod::model::PodId;
use ferrite_client::{Api, message_of};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccountTokenProjection};
use k8s_openapi::api::storage::v1::CSIDriver;
use std::collections::BTreeMap;

const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

impl Csi {
    /// The texts of a Secret; none for no Secret.
    pub(super) async fn secret(&self, key: Option<&SecretKey>) -> Result<BTreeMap<String, String>, CsiError> {
        let Some((namespace, name)) = key else { return Ok(BTreeMap::new()) };
        let failed = |problem: String| CsiError::Secret(namespace.clone(), name.clone(), problem);
        let secrets = Api::<Secret>::namespaced(self.shared.client.clone(), namespace);
        let secret = secrets.get(name).await.map_err(|e| failed(message_of(&e)))?;
        let text = |(key, value): (String, k8s_openapi::ByteString)| match String::from_utf8(value.0) {
            Ok(text) => Ok((key, text)),
            Err(_) => Err(failed(format!("the value of {key:?} is no text"))),
        };
        secret.data.unwrap_or_default().into_iter().map(text).collect()
    }

    /// The pod's tokens that the driver asks for, as upstream hands them over.
    pub(super) async fn pod_tokens(
        &self,
        driver: &CSIDriver,
        pod: &Pod,
        now: Timestamp,
    ) -> Result<BTreeMap<String, String>, CsiError> {
        let wanted = driver.spec.token_requests.as_deref().unwrap_or_default();
        if wanted.is_empty() {
            return Ok(BTreeMap::new());
        }
        let mut tokens = json!({});
        for request in wanted {
            let projection = ServiceAccountTokenProjection {
                audience: Some(request.audience.clone()).filter(|audience| !audience.is_empty()),
                expiration_seconds: request.expiration_seconds,
                path: String::new(),
            };
            let failed = |problem: String| CsiError::Api {
                what: format!("a token of the pod {}", PodId::of(pod)),
                problem,
            };
            let token = self.shared.tokens.get(pod, &projection, now).await;
            let token = token.map_err(|e| failed(e.to_string()))?;
            let token = token.ok_or_else(|| failed("the server issues none".into()))?;
            tokens[request.audience.as_str()] =
                json!({"token": token.text, "expirationTimestamp": token.expires_at.to_string()});
        }
        Ok([(TOKENS.to_owned(), tokens.to_string())].into())
    }
}
