//! The scale of a target: of any kind that has the subresource, built-in or custom.

use std::time::Duration;

use ferrite_client::{is_conflict, message_of, path_segment, read_document, write_document};
use ferrite_json::Value;
use k8s_openapi::api::autoscaling::v2::CrossVersionObjectReference;
use kube::Client;

use super::metrics::{group_of, no_match};
use crate::kinds::{Discovery, Kinds, Mapping};

const LARGEST: usize = 4 << 20;
/// As upstream: an update that loses against another writer is made again this often, after such a pause.
const RETRIES: usize = 5;
const PAUSE: Duration = Duration::from_millis(10);

/// A scale cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScaleError {
    #[error("{0}")]
    NoKind(String),
    #[error("unexpected GroupVersion string: {0}")]
    ApiVersion(String),
    #[error("{}", message_of(.0))]
    Api(#[from] kube::Error),
    #[error("the scale of {0} has no number of replicas")]
    Form(String),
}

/// The scale of a target as the server returned it.
#[derive(Debug)]
pub(super) struct Scale {
    path: String,
    document: Value,
    pub(super) spec_replicas: i32,
    pub(super) status_replicas: i32,
    pub(super) selector: String,
}

impl Scale {
    fn of(path: String, document: Value) -> Result<Self, ScaleError> {
        let number = |value: &Value| value.as_i64().and_then(|number| i32::try_from(number).ok());
        if !document["spec"].is_object() {
            return Err(ScaleError::Form(path));
        }
        Ok(Self {
            // As in Go, zero is not written.
            spec_replicas: number(&document["spec"]["replicas"]).unwrap_or(0),
            status_replicas: number(&document["status"]["replicas"]).unwrap_or(0),
            selector: document["status"]["selector"].as_str().unwrap_or_default().to_owned(),
            path,
            document,
        })
    }

    /// Reads the scale of a target in the first of its versions that has one.
    pub(super) async fn get(
        client: &Client,
        discovery: &Discovery,
        namespace: &str,
        target: &CrossVersionObjectReference,
    ) -> Result<Self, ScaleError> {
        let api_version = target.api_version.as_deref().unwrap_or_default();
        if api_version.matches('/').count() > 1 {
            return Err(ScaleError::ApiVersion(api_version.to_owned()));
        }
        let group = group_of(api_version);
        let kinds = discovery.kinds().await?;
        let mappings = scalable(&kinds, group, &target.kind)?;
        let mut first = None;
        for mapping in mappings {
            let path = format!("{}/{}/scale", mapping.path(namespace), path_segment(&target.name)?);
            match read_document(client, &path, "application/json", LARGEST).await {
                Ok(document) => return Self::of(path, document),
                Err(error) => drop(first.get_or_insert(error)),
            }
        }
        Err(first.map_or_else(|| ScaleError::NoKind("unrecognized resource".to_owned()), ScaleError::Api))
    }

    /// Sets the number of replicas, against whatever else has changed meanwhile.
    pub(super) async fn set(mut self, client: &Client, replicas: i32) -> Result<(), ScaleError> {
        for attempt in 1.. {
            self.document["spec"]["replicas"] = replicas.into();
            match write_document(client, &self.path, &self.document, LARGEST).await {
                Ok(_) => return Ok(()),
                Err(error) if is_conflict(&error) && attempt < RETRIES => {
                    tokio::time::sleep(PAUSE).await;
                    self.document = read_document(client, &self.path, "application/json", LARGEST).await?;
                    if !self.document["spec"].is_object() {
                        return Err(ScaleError::Form(self.path));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The versions of a kind; those with a scale first.
fn scalable<'a>(kinds: &'a Kinds, group: &str, kind: &str) -> Result<Vec<&'a Mapping>, ScaleError> {
    let mut mappings: Vec<&Mapping> = kinds.mappings(group, kind).iter().collect();
    if mappings.is_empty() {
        return Err(ScaleError::NoKind(no_match(group, kind)));
    }
    mappings.sort_by_key(|mapping| !mapping.has_scale);
    Ok(mappings)
}
