//! From a pod's RuntimeClass to the name its handler has in the runtime.

use crate::pod::model;
use ferrite_client::{Api, is_not_found, message_of};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Client;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RuntimeClassError {
    #[error("runtimeclass.node.k8s.io {0:?} not found")]
    NotFound(String),
    #[error("failed to lookup RuntimeClass {name}: {problem}")]
    Lookup { name: String, problem: String },
}

/// The handler to run the pod under; the default one has no name.
pub(crate) async fn handler(client: &Client, pod: &Pod) -> Result<String, RuntimeClassError> {
    let name = model::spec(pod).runtime_class_name.as_deref().filter(|name| !name.is_empty());
    let Some(name) = name else { return Ok(String::new()) };
    match Api::<RuntimeClass>::all(client.clone()).get(name).await {
        Ok(class) => Ok(class.handler),
        Err(e) if is_not_found(&e) => Err(RuntimeClassError::NotFound(name.to_string())),
        Err(e) => {
            Err(RuntimeClassError::Lookup { name: name.to_string(), problem: message_of(&e).to_string() })
        }
    }
}
