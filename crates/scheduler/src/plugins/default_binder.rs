//! Posts the Binding.

use std::time::Duration;

use ferrite_client::{Api, message_of};
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::PostParams;
use tokio::time::timeout;

use crate::framework::{Bind, CycleState, Plugin, PluginError};
use crate::snapshot::PodInfo;

const NAME: &str = "DefaultBinder";
const TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct DefaultBinder {
    /// None in a dry run, which binds nothing.
    pub(super) client: Option<Client>,
}

#[derive(Debug, thiserror::Error)]
enum BindError {
    #[error("there is no client")]
    NoClient,
    #[error("{0}")]
    Rejected(String),
    #[error("the API server did not answer in time")]
    TimedOut,
}

/// The Binding of a pod to a node.
pub(crate) fn binding(pod: &PodInfo, node: &str) -> Binding {
    Binding {
        metadata: ObjectMeta {
            name: Some(pod.key.name.to_string()),
            namespace: Some(pod.key.namespace.to_string()),
            uid: pod.uid.as_ref().map(ToString::to_string),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    }
}

impl DefaultBinder {
    async fn post(&self, pod: &PodInfo, node: &str) -> Result<(), BindError> {
        let client = self.client.clone().ok_or(BindError::NoClient)?;
        let api: Api<Pod> = Api::namespaced(client, &pod.key.namespace);
        let (params, binding) = (PostParams::default(), binding(pod, node));
        let call = api.create_subresource("binding", &pod.key.name, &params, &binding);
        match timeout(TIMEOUT, call).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(BindError::Rejected(message_of(&error))),
            Err(_) => Err(BindError::TimedOut),
        }
    }
}

impl Plugin for DefaultBinder {
    fn name(&self) -> &'static str {
        NAME
    }

    fn bind(&self) -> Option<&dyn Bind> {
        Some(self)
    }
}

impl Bind for DefaultBinder {
    fn bind<'a>(
        &'a self,
        _state: &'a CycleState,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Option<Result<(), PluginError>>> {
        Box::pin(async move {
            Some(self.post(pod, node).await.map_err(|error| PluginError::new("Bind", NAME, error)))
        })
    }
}
