//! Data of service accounts for plugins.

use crate::volumes::Tokens;
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

/// Where service accounts and their tokens come from.
#[async_trait]
pub(crate) trait Accounts: Send + Sync {
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String>;
    /// A token of the pod's service account that is bound to the pod.
    async fn token(&self, pod: &Pod, audience: &str, now: Timestamp) -> Result<String, String>;
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
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, String> {
        let api = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace);
        api.get(name).await.map_err(|error| ferrite_client::message_of(&error))
    }

    async fn token(&self, pod: &Pod, audience: &str, now: Timestamp) -> Result<String, String> {
        // Without a lifetime of its own, as upstream: the API's default.
        let wanted =
            ServiceAccountTokenProjection { audience: Some(audience.to_owned()), ..Default::default() };
        let token = self.tokens.get(pod, &wanted, now).await.map_err(|error| error.to_string())?;
        token.map(|token| token.text).ok_or_else(|| "the server issues no tokens".to_owned())
    }
}
