//! Discovery of extension API servers: their part of `/apis`, asked for ahead of time and kept.

use super::remote::{ReachError, Remote, identify};
use crate::auth::User;
use crate::http;
use crate::server::ApiServer;
use ::http::{HeaderValue, Request, StatusCode, header};
use ferrite_api::quota::amounts::list;
use ferrite_json::{Value, json};
use futures_util::future;
use http_body_util::{BodyExt, Limited};
use rand::seq::SliceRandom;
use std::net::IpAddr;
use std::time::Duration;

/// Upstream's limit for one answer of discovery.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Far more than the resources of any server take.
const LARGEST: usize = 4 << 20;
/// As upstream: so many attempts are made at once.
const ATTEMPTS: usize = 5;
const AGGREGATED: &str =
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";

/// The reason why a server cannot be listed.
#[derive(Debug, thiserror::Error)]
pub(super) enum DiscoveryError {
    #[error("failing or missing response from {url}: {source}")]
    Reach {
        url: String,
        #[source]
        source: ReachError,
    },
    #[error("failing or missing response from {url}: bad status from {url}: {code}")]
    Code { url: String, code: u16 },
    #[error("timed out waiting for {url}")]
    TimedOut { url: String },
    #[error("the answer of {url} is not an API resource list: {why}")]
    Response { url: String, why: String },
}

/// Everything this server knows of one version of an extension API server.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Discovered {
    /// In the form of aggregated discovery.
    pub resources: Vec<Value>,
    /// The address of its OpenAPI v3 document, if it has one.
    pub openapi: Option<String>,
}

/// Asks a server for the resources of a version. This is also how it shows that it is available. As upstream: several
/// attempts are made at once, and one that succeeds is enough.
pub(super) async fn discover(
    server: &ApiServer,
    remote: &Remote,
    group: &str,
    version: &str,
) -> Result<Discovered, DiscoveryError> {
    let path = format!("/apis/{group}/{version}");
    let mut places = remote.places(server);
    if places.is_empty() {
        return Err(DiscoveryError::Reach { url: url(remote, &path), source: remote.no_endpoint() });
    }
    places.shuffle(&mut rand::rng());
    let attempts = places.iter().cycle().take(ATTEMPTS).map(|&place| {
        let asking = get(server, remote, place, &path, "application/json");
        Box::pin(async move { asking.await.map(|legacy| (legacy, place)) })
    });
    let ((legacy, place), _) = future::select_ok(attempts).await?;
    let aggregated = get(server, remote, place, "/apis", AGGREGATED).await.ok();
    let found = aggregated.as_ref().and_then(|answer| version_of(answer, group, version));
    let resources = found.unwrap_or_else(|| from_legacy(&legacy, group, version));
    let openapi = get(server, remote, place, "/openapi/v3", "application/json").await.ok();
    let openapi = openapi.and_then(|root| {
        let path = &root["paths"][&*format!("apis/{group}/{version}")]["serverRelativeURL"];
        path.as_str().filter(|path| path.starts_with("/openapi/v3/")).map(str::to_owned)
    });
    Ok(Discovered { resources, openapi })
}

fn url(remote: &Remote, path: &str) -> String {
    let service = &remote.service;
    format!("https://{}.{}.svc:{}{path}", service.name, service.namespace, service.port)
}

/// Reads a document of one endpoint of a server, as this server itself.
async fn get(
    server: &ApiServer,
    remote: &Remote,
    place: (IpAddr, u16),
    path: &str,
    accept: &'static str,
) -> Result<Value, DiscoveryError> {
    let url = url(remote, path);
    let mut request = Request::new(http::full(bytes::Bytes::new()));
    *request.uri_mut() = path.parse().map_err(|error: ::http::uri::InvalidUri| DiscoveryError::Response {
        url: url.clone(),
        why: error.to_string(),
    })?;
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static(accept));
    // As upstream: the aggregator may list everything.
    identify(request.headers_mut(), &User::new("system:kube-aggregator", ["system:masters"]));
    let asking = async {
        let response = remote.send_to(server, None, place, request).await;
        let response = response.map_err(|source| DiscoveryError::Reach { url: url.clone(), source })?;
        if response.status() != StatusCode::OK {
            return Err(DiscoveryError::Code { url: url.clone(), code: response.status().as_u16() });
        }
        let unreadable = |why: String| DiscoveryError::Response { url: url.clone(), why };
        let body = Limited::new(response.into_body(), LARGEST).collect().await;
        let body = body.map_err(|e| unreadable(e.to_string()))?.to_bytes();
        let value: Value = ferrite_json::from_slice(&body).map_err(|e| unreadable(e.to_string()))?;
        if value.is_object() { Ok(value) } else { Err(unreadable("it is no JSON object".into())) }
    };
    match tokio::time::timeout(TIMEOUT, asking).await {
        Ok(answer) => answer,
        Err(_) => Err(DiscoveryError::TimedOut { url }),
    }
}

/// The resources of a version in an answer of aggregated discovery.
fn version_of(answer: &Value, group: &str, version: &str) -> Option<Vec<Value>> {
    if answer["kind"] != "APIGroupDiscoveryList" {
        return None;
    }
    let found = list(answer, "items").iter().find(|item| item["metadata"]["name"] == group)?;
    let found = list(found, "versions").iter().find(|item| item["version"] == version)?;
    Some(list(found, "resources").iter().filter(|resource| resource.is_object()).cloned().collect())
}

/// The same from a list of the older form, in which subresources stand beside their resources.
fn from_legacy(answer: &Value, group: &str, version: &str) -> Vec<Value> {
    let mut resources: Vec<Value> = Vec::new();
    let kind_of = |entry: &Value| {
        let own = |key: &str, default: &str| {
            entry[key].as_str().filter(|t| !t.is_empty()).unwrap_or(default).to_owned()
        };
        json!({"group": own("group", group), "version": own("version", version), "kind": entry["kind"].as_str().unwrap_or_default()})
    };
    for entry in list(answer, "resources") {
        let Some(name) = entry["name"].as_str() else { continue };
        let verbs = Value::from(list(entry, "verbs").to_vec());
        match name.split_once('/') {
            None => {
                let mut resource = json!({
                    "resource": name,
                    "responseKind": kind_of(entry),
                    "scope": if entry["namespaced"] == true { "Namespaced" } else { "Cluster" },
                    "singularResource": entry["singularName"].as_str().unwrap_or_default(),
                    "verbs": verbs,
                });
                for key in ["shortNames", "categories"] {
                    if let Some(names) = entry.get(key).filter(|names| names.is_array()) {
                        resource[key] = names.clone();
                    }
                }
                resources.push(resource);
            }
            Some((parent, part)) => {
                let Some(parent) = resources.iter_mut().find(|r| r["resource"] == parent) else { continue };
                let sub = json!({"subresource": part, "responseKind": kind_of(entry), "verbs": verbs});
                match parent.get_mut("subresources").and_then(Value::as_array_mut) {
                    Some(subs) => subs.push(sub),
                    None => parent["subresources"] = vec![sub].into(),
                }
            }
        }
    }
    resources
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_lists_become_aggregated_ones() {
        let answer = json!({"kind": "APIResourceList", "resources": [
            {"name": "flunders", "singularName": "flunder", "namespaced": true, "kind": "Flunder",
             "verbs": ["get", "list"], "shortNames": ["fl"]},
            {"name": "flunders/status", "namespaced": true, "kind": "Flunder", "verbs": ["get"]},
            {"name": "flunders/scale", "group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get"]},
            {"name": "orphans/status", "kind": "Orphan", "verbs": []},
            {"nonsense": true},
        ]});
        let own = json!({"group": "wardle.example", "version": "v1", "kind": "Flunder"});
        assert_eq!(
            from_legacy(&answer, "wardle.example", "v1"),
            [json!({
                "resource": "flunders", "singularResource": "flunder", "scope": "Namespaced",
                "responseKind": own, "verbs": ["get", "list"], "shortNames": ["fl"],
                "subresources": [
                    {"subresource": "status", "responseKind": own, "verbs": ["get"]},
                    {"subresource": "scale", "verbs": ["get"],
                     "responseKind": {"group": "autoscaling", "version": "v1", "kind": "Scale"}},
                ],
            })]
        );
    }

    #[test]
    fn one_version_is_taken_of_an_aggregated_list() {
        let answer = json!({"kind": "APIGroupDiscoveryList", "items": [
            {"metadata": {"name": "other"}, "versions": [{"version": "v1", "resources": [{"resource": "x"}]}]},
            {"metadata": {"name": "a"}, "versions": [{"version": "v1", "resources": [{"resource": "y"}, 7]}]},
        ]});
        assert_eq!(version_of(&answer, "a", "v1"), Some(vec![json!({"resource": "y"})]));
        assert_eq!(version_of(&answer, "a", "v2"), None);
        assert_eq!(version_of(&json!({"kind": "APIGroupList"}), "a", "v1"), None);
    }
}
