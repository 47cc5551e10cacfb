//! Service account tokens for pods, kept until they are due for renewal.

use crate::clock;
use crate::pod::model::{self, PodId};
use ferrite_client::{Api, Object};
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use kube::Client;
use kube::api::PostParams;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TokenError {
    #[error("failed to fetch token: {0}")]
    Fetch(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Token {
    pub text: String,
    pub expires_at: Timestamp,
    pub refresh_at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    uid: String,
    audience: Option<String>,
    seconds: i64,
}

pub(crate) struct Tokens {
    client: Client,
    cache: Mutex<HashMap<Key, Token>>,
    refusal_logged: AtomicBool,
}

impl Tokens {
    pub(crate) fn new(client: Client) -> Self {
        Self { client, cache: Mutex::default(), refusal_logged: AtomicBool::new(false) }
    }

    /// A token for the pod, or nothing when the server issues none at all: the pod then runs without.
    pub(crate) async fn get(
        &self,
        pod: &Pod,
        wanted: &ServiceAccountTokenProjection,
        now: Timestamp,
    ) -> Result<Option<Token>, TokenError> {
        let id = PodId::of(pod);
        let seconds = wanted.expiration_seconds.unwrap_or(3600).max(600);
        let key = Key { uid: id.uid.clone(), audience: wanted.audience.clone(), seconds };
        if let Some(token) = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(&key)
            && token.refresh_at > now
        {
            return Ok(Some(token.clone()));
        }
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: Some(wanted.audience.iter().cloned().collect()),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("Pod".into()),
                    name: Some(id.name.clone()),
                    uid: Some(id.uid.clone()),
                }),
                expiration_seconds: Some(seconds),
            }),
            ..TokenRequest::default()
        };
        let account =
            model::spec(pod).service_account_name.as_deref().filter(|a| !a.is_empty()).unwrap_or("default");
        let api = Api::<ServiceAccount>::namespaced(self.client.clone(), &id.namespace);
        let answer: TokenRequest = match api
            .create_subresource("token", account, &PostParams::default(), &request)
            .await
        {
            Ok(answer) => {
                TokenRequest::decode(&answer).map_err(|error| TokenError::Fetch(error.to_string()))?
            }
            Err(kube::Error::Api(status)) if refuses_tokens(&status) => {
                if !self.refusal_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(reason = %status.message, "the server issues no service account tokens; pods run without");
                }
                return Ok(None);
            }
            Err(e) => return Err(TokenError::Fetch(ferrite_client::message_of(&e))),
        };
        let status = answer.status.unwrap_or_default();
        let text =
            status.token.filter(|t| !t.is_empty()).ok_or_else(|| TokenError::Fetch("empty answer".into()))?;
        let lifetime = status
            .expiration_timestamp
            .map_or(Duration::from_secs(u64::try_from(seconds).unwrap_or(3600)), |at| {
                clock::since(now, at.0)
            });
        // As upstream: at four fifths of its life, and at least once a day.
        let refresh = lifetime.mul_f64(0.8).min(Duration::from_secs(24 * 3600)).max(Duration::from_secs(60));
        let token =
            Token { text, expires_at: clock::add(now, lifetime), refresh_at: clock::add(now, refresh) };
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).insert(key, token.clone());
        Ok(Some(token))
    }

    pub(crate) fn forget(&self, uid: &str) {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| key.uid != uid);
    }
}

/// The path itself is unknown (not: the account or the pod is).
fn refuses_tokens(status: &kube::core::Status) -> bool {
    let about_account = status.message.contains("serviceaccounts \"") || status.message.contains("pods \"");
    status.code == 405 || (status.code == 404 && !about_account)
}
