//! Extenders: web services that filter and score nodes, choose victims and bind, each for the pods it is interested in.
//!
//! The wire is upstream's: members have Go's names (`NodeNames`, `FailedNodes`), in answers in any case.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_component::GoDuration;
use ferrite_json::{Value, json};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::config::{
    AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext,
};
use serde::Deserialize;

use crate::framework::{Store, Victims};
use crate::preemption::Candidate;
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// Answers may carry all nodes of a large cluster.
const LONGEST_ANSWER: usize = 64 << 20;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// An extender's best score; a plugin's is ten times as much.
const SCORE_FACTOR: i64 = crate::framework::MAX_SCORE / 10;

/// An extender, as the configuration has it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct ExtenderSettings {
    pub url_prefix: String,
    pub filter_verb: String,
    pub preempt_verb: String,
    pub prioritize_verb: String,
    pub weight: i64,
    pub bind_verb: String,
    #[serde(rename = "enableHTTPS")]
    pub enable_https: bool,
    pub tls_config: Option<ExtenderTls>,
    pub http_timeout: Option<GoDuration>,
    pub node_cache_capable: bool,
    pub managed_resources: Vec<ManagedResource>,
    pub ignorable: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ManagedResource {
    pub name: String,
    #[serde(default)]
    pub ignored_by_scheduler: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct ExtenderTls {
    pub insecure: bool,
    pub server_name: String,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    pub ca_file: Option<PathBuf>,
    /// As in all API objects, bytes are Base64.
    pub cert_data: Option<String>,
    pub key_data: Option<String>,
    pub ca_data: Option<String>,
}

/// An extender cannot be used, or did not answer as it must.
#[derive(Debug, thiserror::Error)]
pub enum ExtenderError {
    #[error("extender {url:?} cannot be used")]
    Settings {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("cannot call the extender at {url}: {source}")]
    Call {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("failed {verb} with extender at URL {url}, code {code}")]
    Code { verb: String, url: String, code: u16 },
    #[error("the extender at {url} did not answer within {limit:?}")]
    TimedOut { url: String, limit: Duration },
    #[error("{0}")]
    Reported(String),
    #[error("extender {url:?} claims a filtered node {node:?} which is not found in the input node list")]
    UnknownNode { url: String, node: String },
    #[error(
        "extender: {url} claims to preempt pod (UID: {uid}) on node: {node}, but the pod is not found on that node"
    )]
    UnknownVictim { url: String, uid: String, node: String },
    #[error("expected at least one victim pod on node {0:?}")]
    NoVictims(String),
    #[error("pod {0} is not known any more")]
    NoPod(String),
}

/// The nodes that an extender lets pass, and its reasons against the others.
#[derive(Debug, Default)]
pub struct ExtenderVerdict {
    pub nodes: Vec<Arc<NodeInfo>>,
    pub failed: BTreeMap<String, String>,
    pub unresolvable: BTreeMap<String, String>,
}

/// A web service that takes part in scheduling.
#[derive(Clone)]
pub struct Extender {
    settings: Arc<ExtenderSettings>,
    managed: BTreeSet<String>,
    client: kube::Client,
    pods: Store<Pod>,
}

impl std::fmt::Debug for Extender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Extender").field(&self.settings.url_prefix).finish()
    }
}

/// A member of an object, whatever the case of its name.
fn member<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let object = value.as_object()?;
    object
        .iter()
        .find(|(key, _)| key.eq_ignore_ascii_case(name))
        .map(|(_, value)| value)
        .filter(|v| !v.is_null())
}

fn texts(value: Option<&Value>) -> BTreeMap<String, String> {
    let members = value.and_then(Value::as_object).into_iter().flatten();
    members.filter_map(|(key, value)| Some((key.to_string(), value.as_str()?.to_owned()))).collect()
}

impl Extender {
    /// Prepares the connection; nothing is sent yet. `pods` has the objects that are sent.
    pub async fn new(settings: &ExtenderSettings, pods: Store<Pod>) -> Result<Self, ExtenderError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| ExtenderError::Settings {
            url: settings.url_prefix.clone(),
            source,
        };
        let tls = settings.tls_config.clone().unwrap_or_default();
        let path = |path: Option<PathBuf>| path.map(|path| path.to_string_lossy().into_owned());
        let has_authority = tls.ca_file.is_some() || tls.ca_data.is_some();
        let name = "extender".to_owned();
        let kubeconfig = Kubeconfig {
            current_context: Some(name.clone()),
            contexts: vec![NamedContext {
                name: name.clone(),
                context: Some(Context {
                    cluster: name.clone(),
                    user: Some(name.clone()),
                    ..Context::default()
                }),
                other: Default::default(),
            }],
            clusters: vec![NamedCluster {
                name: name.clone(),
                cluster: Some(Cluster {
                    server: Some(settings.url_prefix.trim_end_matches('/').to_owned()),
                    // As upstream: an extender over HTTPS without an authority is not verified.
                    insecure_skip_tls_verify: Some(tls.insecure || (settings.enable_https && !has_authority)),
                    certificate_authority: path(tls.ca_file),
                    certificate_authority_data: tls.ca_data,
                    tls_server_name: Some(tls.server_name).filter(|name| !name.is_empty()),
                    ..Cluster::default()
                }),
                other: Default::default(),
            }],
            auth_infos: vec![NamedAuthInfo {
                name,
                auth_info: Some(AuthInfo {
                    client_certificate: path(tls.cert_file),
                    client_certificate_data: tls.cert_data,
                    client_key: path(tls.key_file),
                    client_key_data: tls.key_data.map(Into::into),
                    ..AuthInfo::default()
                }),
                other: Default::default(),
            }],
            ..Kubeconfig::default()
        };
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .map_err(|error| failed(error.into()))?;
        let client = kube::Client::try_from(config).map_err(|error| failed(error.into()))?;
        let managed = settings.managed_resources.iter().map(|resource| resource.name.clone()).collect();
        Ok(Self { settings: Arc::new(settings.clone()), managed, client, pods })
    }

    pub fn name(&self) -> &str {
        &self.settings.url_prefix
    }

    /// Failures of this extender do not stop scheduling.
    pub fn is_ignorable(&self) -> bool {
        self.settings.ignorable
    }

    pub fn is_filter(&self) -> bool {
        !self.settings.filter_verb.is_empty()
    }

    pub fn is_prioritizer(&self) -> bool {
        !self.settings.prioritize_verb.is_empty()
    }

    pub fn is_binder(&self) -> bool {
        !self.settings.bind_verb.is_empty()
    }

    pub fn supports_preemption(&self) -> bool {
        !self.settings.preempt_verb.is_empty()
    }

    /// True if the pod asks for a resource that the extender manages; one that manages none is interested in all pods.
    pub fn is_interested(&self, pod: &PodInfo) -> bool {
        self.managed.is_empty() || pod.requests.scalar.keys().any(|name| self.managed.contains(name))
    }

    async fn send(&self, verb: &str, body: &Value) -> Result<Value, ExtenderError> {
        let url = format!("{}/{verb}", self.settings.url_prefix.trim_end_matches('/'));
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| ExtenderError::Call {
            url: url.clone(),
            source,
        };
        let limit = self.settings.http_timeout.map_or(Duration::ZERO, |timeout| timeout.0);
        let limit = if limit.is_zero() { DEFAULT_TIMEOUT } else { limit };
        let bytes = ferrite_json::to_vec(body).map_err(|error| failed(error.into()))?;
        let request = http::Request::post(format!("/{verb}"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(kube::client::Body::from(bytes))
            .map_err(|error| failed(error.into()))?;
        let call = async {
            let response = self.client.send(request).await.map_err(|error| failed(error.into()))?;
            let code = response.status().as_u16();
            if code != 200 {
                return Err(ExtenderError::Code { verb: verb.to_owned(), url: url.clone(), code });
            }
            let body = Limited::new(response.into_body(), LONGEST_ANSWER).collect().await.map_err(failed)?;
            ferrite_json::from_slice(&body.to_bytes()).map_err(|error| failed(error.into()))
        };
        match tokio::time::timeout(limit, call).await {
            Ok(answer) => answer,
            Err(_) => Err(ExtenderError::TimedOut { url: url.clone(), limit }),
        }
    }

    fn pod(&self, pod: &PodInfo) -> Result<Arc<Pod>, ExtenderError> {
        self.pods.get(&pod.key).ok_or_else(|| ExtenderError::NoPod(pod.key.to_string()))
    }

    /// The arguments of filter and prioritize: names for an extender that knows the nodes, else the nodes.
    fn args(&self, pod: &PodInfo, nodes: &[Arc<NodeInfo>]) -> Result<Value, ExtenderError> {
        let pod = self.pod(pod)?;
        if self.settings.node_cache_capable {
            let names: Vec<&str> = nodes.iter().map(|node| node.name()).collect();
            return Ok(json!({"Pod": *pod, "Nodes": null, "NodeNames": names}));
        }
        let items: Vec<&Node> = nodes.iter().map(|node| &*node.node).collect();
        Ok(json!({"Pod": *pod, "Nodes": {"metadata": {}, "items": items}, "NodeNames": null}))
    }

    pub async fn filter(
        &self,
        pod: &PodInfo,
        nodes: &[Arc<NodeInfo>],
    ) -> Result<ExtenderVerdict, ExtenderError> {
        if !self.is_filter() {
            return Ok(ExtenderVerdict { nodes: nodes.to_vec(), ..ExtenderVerdict::default() });
        }
        let answer = self.send(&self.settings.filter_verb, &self.args(pod, nodes)?).await?;
        if let Some(error) =
            member(&answer, "Error").and_then(Value::as_str).filter(|error| !error.is_empty())
        {
            return Err(ExtenderError::Reported(error.to_owned()));
        }
        let names: Vec<&str> = match member(&answer, "NodeNames").and_then(Value::as_array) {
            Some(names) if self.settings.node_cache_capable => {
                names.iter().filter_map(Value::as_str).collect()
            }
            _ => {
                let items = member(&answer, "Nodes").and_then(|list| member(list, "items"));
                let items = items.and_then(Value::as_array).into_iter().flatten();
                items.filter_map(|node| node.pointer("/metadata/name").and_then(Value::as_str)).collect()
            }
        };
        let known: BTreeMap<&str, &Arc<NodeInfo>> = nodes.iter().map(|node| (node.name(), node)).collect();
        let nodes = names.into_iter().map(|name| {
            known.get(name).map(|node| (*node).clone()).ok_or_else(|| ExtenderError::UnknownNode {
                url: self.settings.url_prefix.clone(),
                node: name.to_owned(),
            })
        });
        Ok(ExtenderVerdict {
            nodes: nodes.collect::<Result<_, _>>()?,
            failed: texts(member(&answer, "FailedNodes")),
            unresolvable: texts(member(&answer, "FailedAndUnresolvableNodes")),
        })
    }

    /// The points that the extender adds to the score of each node it names, weighted and in the plugins' scale.
    pub async fn prioritize(
        &self,
        pod: &PodInfo,
        nodes: &[Arc<NodeInfo>],
    ) -> Result<BTreeMap<String, i64>, ExtenderError> {
        if !self.is_prioritizer() {
            return Ok(BTreeMap::new());
        }
        let answer = self.send(&self.settings.prioritize_verb, &self.args(pod, nodes)?).await?;
        let entries = answer.as_array().into_iter().flatten();
        let scores = entries.filter_map(|entry| {
            let host = member(entry, "Host")?.as_str()?.to_owned();
            let score = member(entry, "Score").and_then(Value::as_i64).unwrap_or(0);
            Some((host, score.saturating_mul(self.settings.weight).saturating_mul(SCORE_FACTOR)))
        });
        Ok(scores.collect())
    }

    pub async fn bind(&self, pod: &PodInfo, node: &str) -> Result<(), ExtenderError> {
        let args = json!({"PodName": pod.key.name.as_str(), "PodNamespace": pod.key.namespace.as_str(),
                          "PodUID": pod.uid.as_deref().unwrap_or_default(), "Node": node});
        let answer = self.send(&self.settings.bind_verb, &args).await?;
        match member(&answer, "Error").and_then(Value::as_str).filter(|error| !error.is_empty()) {
            Some(error) => Err(ExtenderError::Reported(error.to_owned())),
            None => Ok(()),
        }
    }

    /// The candidates that the extender lets pass, with the victims that it chose.
    async fn preempt(
        &self,
        pod: &PodInfo,
        candidates: &[Arc<Candidate>],
        snapshot: &Snapshot,
    ) -> Result<Vec<Arc<Candidate>>, ExtenderError> {
        let mut args =
            json!({"Pod": *self.pod(pod)?, "NodeNameToVictims": null, "NodeNameToMetaVictims": null});
        let mut victims = json!({});
        for candidate in candidates {
            let pods: Vec<Value> = candidate
                .victims
                .pods
                .iter()
                .filter_map(|victim| {
                    if self.settings.node_cache_capable {
                        return Some(json!({"UID": victim.uid.as_deref().unwrap_or_default()}));
                    }
                    self.pods.get(&victim.key).map(|pod| json!(*pod))
                })
                .collect();
            victims[candidate.node.as_str()] =
                json!({"Pods": pods, "NumPDBViolations": candidate.victims.pdb_violations});
        }
        let form =
            if self.settings.node_cache_capable { "NodeNameToMetaVictims" } else { "NodeNameToVictims" };
        args[form] = victims;
        let answer = self.send(&self.settings.preempt_verb, &args).await?;
        let nodes = member(&answer, "NodeNameToMetaVictims").and_then(Value::as_object);
        let mut chosen = Vec::new();
        for (name, entry) in nodes.into_iter().flatten() {
            let unknown = || ExtenderError::UnknownNode {
                url: self.settings.url_prefix.clone(),
                node: name.to_string(),
            };
            let node = snapshot.get(name).ok_or_else(unknown)?;
            let mut victims = Victims {
                pods: Vec::new(),
                pdb_violations: member(entry, "NumPDBViolations")
                    .and_then(Value::as_u64)
                    .and_then(|count| usize::try_from(count).ok())
                    .unwrap_or(0),
            };
            for victim in member(entry, "Pods").and_then(Value::as_array).into_iter().flatten() {
                let uid = member(victim, "UID").and_then(Value::as_str).unwrap_or_default();
                let present = node.pods.iter().find(|present| present.uid.as_deref() == Some(uid));
                let present = present.ok_or_else(|| ExtenderError::UnknownVictim {
                    url: self.settings.url_prefix.clone(),
                    uid: uid.to_owned(),
                    node: name.to_string(),
                })?;
                victims.pods.push(present.clone());
            }
            if victims.pods.is_empty() {
                if self.is_ignorable() {
                    continue;
                }
                return Err(ExtenderError::NoVictims(name.to_string()));
            }
            chosen.push(Arc::new(Candidate::new(name, victims)));
        }
        Ok(chosen)
    }
}

/// Asks all extenders that take part in preemption, one after another.
pub async fn preempt_all(
    extenders: &[Extender],
    pod: &PodInfo,
    mut candidates: Vec<Arc<Candidate>>,
    snapshot: &Snapshot,
) -> Result<Vec<Arc<Candidate>>, ExtenderError> {
    for extender in extenders.iter().filter(|e| e.supports_preemption() && e.is_interested(pod)) {
        if candidates.is_empty() {
            break;
        }
        match extender.preempt(pod, &candidates, snapshot).await {
            Ok(chosen) => candidates = chosen,
            Err(error) if extender.is_ignorable() => {
                tracing::info!(extender = extender.name(), %error, "an extender that may be ignored failed");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(candidates)
}

#[cfg(test)]
mod tests;
