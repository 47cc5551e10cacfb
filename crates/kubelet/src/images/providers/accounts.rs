//! Data of service accounts for plugins.

use crate::volumes::{TokenError, Tokens};
use async_trait::async_trait;
use ferrite_client::Api;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use kube::Client;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The data of a service account that a plugin gets.
#[derive(Clone)]
pub(super) struct AccountData {
    pub token: String,
    pub annotations: BTreeMap<String, String>,
}

/// The data of a service account cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccountError {
    #[error("{}", ferrite_client::message_of(.0))]
    Api(#[from] kube::Error),
    #[error("{0}")]
    Token(#[from] TokenError),
    #[error("the server issues no tokens")]
    NoTokens,
}

/// Where service accounts and their tokens come from.
#[async_trait]
pub(crate) trait Accounts: Send + Sync {
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, AccountError>;
    /// A token of the pod's service account that is bound to the pod.
    async fn token(&self, pod: &Pod, audience: &str, now: Timestamp) -> Result<String, AccountError>;
}

/// The API server.
pub(crate) struct ApiAccounts {
    client: Client,
    tokens: Arc<Tokens>,
}

impl ApiAccounts {
    pub(crate) fn new(client: Client, tokens: Arc<Tokens>) -> Self {
        Self { client, tokens }
    }
}

#[async_trait]
impl Accounts for ApiAccounts {
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, AccountError> {
        let api = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace);
        Ok(api.get(name).await?)
    }

    async fn token(&self, pod: &Pod, audience: &str, now: Timestamp) -> Result<String, AccountError> {
        // Without a lifetime of its own, as upstream: the API's default.
        let wanted =
            ServiceAccountTokenProjection { audience: Some(audience.to_owned()), ..Default::default() };
        let token = self.tokens.get(pod, &wanted, now).await?;
        token.map(|token| token.text).ok_or(AccountError::NoTokens)
    }
}
