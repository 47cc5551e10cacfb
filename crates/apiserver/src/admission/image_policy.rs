//! The admission plugin ImagePolicyWebhook: a webhook says which images pods may have.

use super::stage::{Parts, ValidatingStage, Waiting};
use super::{AdmissionPlugins, Attributes, Operation};
use crate::registry::View;
use crate::review_webhook::{ExpiringCache, ReviewClient, ReviewError, WebhookSender};
use ferrite_api::Status;
use ferrite_json::{Map, Value, json};
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

pub(super) const NAME: &str = "ImagePolicyWebhook";
const AUDIT_PREFIX: &str = "imagepolicywebhook.image-policy.k8s.io/";
/// Annotations of pods that the webhook sees.
const ANNOTATIONS: &str = ".image-policy.k8s.io/";
const TIMEOUT: Duration = Duration::from_secs(30);
/// As upstream's cache.
const MAX_ENTRIES: usize = 1024;
const MAX_BYTES: usize = 16 << 20;

/// The plugin cannot be turned on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImagePolicyError {
    #[error("no config specified: name it in --admission-control-config-file")]
    NoConfig,
    #[error("the configuration cannot be read: {0}")]
    Decode(String),
    #[error("{name}: valid value is between {min} and {max}, got {value}")]
    Range { name: &'static str, min: i64, max: i64, value: i64 },
    #[error("imagePolicy.kubeConfigFile is not given")]
    NoKubeconfig,
    #[error("imagePolicy.kubeConfigFile: {0}")]
    Kubeconfig(String),
    #[error("this server has no connection to webhooks")]
    NoSenders,
}

/// The configuration as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Given {
    #[serde(rename = "imagePolicy")]
    image_policy: GivenPolicy,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GivenPolicy {
    kube_config_file: String,
    #[serde(rename = "allowTTL")]
    allow_ttl: i64,
    #[serde(rename = "denyTTL")]
    deny_ttl: i64,
    retry_backoff: i64,
    default_allow: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Settings {
    kubeconfig: PathBuf,
    allow_ttl: Duration,
    deny_ttl: Duration,
    retry_backoff: Duration,
    default_allow: bool,
}

/// As upstream: zero is the default, -1 turns it off.
fn in_range(
    name: &'static str,
    value: i64,
    max: i64,
    usual: Duration,
    unit: fn(u64) -> Duration,
) -> Result<Duration, ImagePolicyError> {
    match value {
        -1 => Ok(Duration::ZERO),
        0 => Ok(usual),
        given if (1..=max).contains(&given) => Ok(unit(given.unsigned_abs())),
        value => Err(ImagePolicyError::Range { name, min: 1, max, value }),
    }
}

impl Settings {
    fn parse(configuration: Option<&Value>) -> Result<Self, ImagePolicyError> {
        let configuration = configuration.ok_or(ImagePolicyError::NoConfig)?;
        let given: Given = ferrite_json::from_value(configuration.clone())
            .map_err(|error| ImagePolicyError::Decode(error.to_string()))?;
        let given = given.image_policy;
        if given.kube_config_file.is_empty() {
            return Err(ImagePolicyError::NoKubeconfig);
        }
        let seconds = Duration::from_secs;
        let half_hour = 30 * 60;
        Ok(Self {
            kubeconfig: given.kube_config_file.into(),
            allow_ttl: in_range("allowTTL", given.allow_ttl, half_hour, seconds(300), Duration::from_secs)?,
            deny_ttl: in_range("denyTTL", given.deny_ttl, half_hour, seconds(30), Duration::from_secs)?,
            retry_backoff: in_range(
                "retryBackoff",
                given.retry_backoff,
                5 * 60 * 1000,
                Duration::from_millis(500),
                Duration::from_millis,
            )?,
            default_allow: given.default_allow,
        })
    }
}

/// Opens the connection of the plugin, if it is turned on.
pub(crate) async fn open(
    plugins: &AdmissionPlugins,
) -> Result<Option<Arc<dyn WebhookSender>>, ImagePolicyError> {
    if !plugins.turns_on(NAME, false) {
        return Ok(None);
    }
    let settings = Settings::parse(plugins.configurations.get(NAME))?;
    let senders = plugins.webhook_senders.as_ref().ok_or(ImagePolicyError::NoSenders)?;
    let opened = senders.open(&settings.kubeconfig).await;
    opened.map(Some).map_err(|error| ImagePolicyError::Kubeconfig(error.to_string()))
}

/// The webhook's word.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Verdict {
    allowed: bool,
    reason: String,
    audit_annotations: Vec<(String, String)>,
}

impl Verdict {
    fn read(status: &Value) -> Self {
        let annotations = status["auditAnnotations"].as_object().into_iter().flatten();
        Self {
            allowed: status["allowed"] == true,
            reason: status["reason"].as_str().unwrap_or_default().to_owned(),
            audit_annotations: annotations
                .filter_map(|(key, value)| Some((key.to_string(), value.as_str()?.to_owned())))
                .collect(),
        }
    }

    /// The reason of a refusal, in upstream's words.
    fn refusal(&self) -> Option<String> {
        match (self.allowed, self.reason.as_str()) {
            (true, _) => None,
            (false, "") => Some("one or more images rejected by webhook backend".to_owned()),
            (false, reason) => {
                Some(format!("image policy webhook backend denied one or more images: {reason}"))
            }
        }
    }
}

/// The plugin at work.
pub(super) struct ImagePolicy {
    settings: Settings,
    client: ReviewClient,
    cache: Mutex<ExpiringCache<String, Verdict>>,
}

impl ImagePolicy {
    pub fn make(parts: &Parts<'_>) -> Result<Box<dyn ValidatingStage>, String> {
        let settings = Settings::parse(parts.configuration).map_err(|error| error.to_string())?;
        let sender = parts.image_policy.cloned().ok_or_else(|| ImagePolicyError::NoSenders.to_string())?;
        Ok(Box::new(Self::new(settings, sender)))
    }

    fn new(settings: Settings, sender: Arc<dyn WebhookSender>) -> Self {
        let client = ReviewClient {
            sender,
            group_version: "imagepolicy.k8s.io/v1alpha1".to_owned(),
            kind: "ImageReview",
            timeout: TIMEOUT,
            first_pause: settings.retry_backoff,
        };
        Self { settings, client, cache: Mutex::new(ExpiringCache::new(MAX_ENTRIES, MAX_BYTES)) }
    }

    async fn verdict(&self, spec: &Value) -> Result<Verdict, ReviewError> {
        let key = spec.to_string();
        let lock = || self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().get(&key, Instant::now());
        if let Some(known) = known {
            return Ok(known);
        }
        let status = self.client.status(spec, Instant::now() + 2 * TIMEOUT, &|_, _| {}).await?;
        let verdict = Verdict::read(&status);
        let ttl = if verdict.allowed { self.settings.allow_ttl } else { self.settings.deny_ttl };
        let notes: usize = verdict.audit_annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        let cost = 2 * key.len() + verdict.reason.len() + notes + 256;
        lock().insert(key, verdict.clone(), cost, ttl, Instant::now());
        Ok(verdict)
    }

    async fn admit(&self, attributes: &Attributes<'_>, pod: &Value) -> Result<(), Status> {
        let spec = spec_of(pod, attributes.subresource.is_some(), attributes.namespace);
        match self.verdict(&spec).await {
            Ok(verdict) => {
                for (key, value) in &verdict.audit_annotations {
                    attributes.annotate(format!("{AUDIT_PREFIX}{key}"), value.clone());
                }
                verdict.refusal().map_or(Ok(()), |why| Err(attributes.forbid(why)))
            }
            Err(error) => {
                tracing::warn!(%error, "the image policy webhook cannot be asked");
                if self.settings.default_allow {
                    attributes.annotate(format!("{AUDIT_PREFIX}failed-open"), "true");
                    return Ok(());
                }
                Err(attributes.forbid(error.to_string()))
            }
        }
    }
}

/// The question about a pod, or about its ephemeral containers.
fn spec_of(pod: &Value, ephemeral: bool, namespace: &str) -> Value {
    let lists: &[&str] = if ephemeral { &["ephemeralContainers"] } else { &["containers", "initContainers"] };
    let containers = lists.iter().filter_map(|list| pod["spec"][*list].as_array()).flatten();
    let images: Vec<Value> = containers.map(|container| json!({"image": container["image"]})).collect();
    let annotations = pod["metadata"]["annotations"].as_object().into_iter().flatten();
    let shown: Map = annotations
        .filter(|(key, _)| key.contains(ANNOTATIONS))
        .map(|(k, v)| (k.to_string(), v.clone()))
        .collect();
    let mut spec = json!({"containers": images});
    if !shown.is_empty() {
        spec["annotations"] = shown.into();
    }
    if !namespace.is_empty() {
        spec["namespace"] = namespace.into();
    }
    spec
}

impl ValidatingStage for ImagePolicy {
    fn concerns(&self, _: &View, attributes: &Attributes<'_>) -> bool {
        matches!(attributes.operation, Operation::Create | Operation::Update)
            && matches!(attributes.subresource, None | Some("ephemeralcontainers"))
            && attributes.resource.group.is_empty()
            && attributes.resource.plural == "pods"
    }

    fn validate<'a>(
        &'a self,
        _: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a Value>,
    ) -> Waiting<'a> {
        Box::pin(async move {
            match object {
                Some(pod) => self.admit(attributes, pod).await,
                None => Ok(()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::review_webhook::fake::FakeWebhook;

    fn settings(policy: Value) -> Result<Settings, String> {
        Settings::parse(Some(&json!({"imagePolicy": policy}))).map_err(|error| error.to_string())
    }

    #[test]
    fn configurations_are_read_as_upstream_reads_them() {
        let read = settings(json!({"kubeConfigFile": "/k"})).expect("settings");
        assert_eq!(
            (read.allow_ttl.as_secs(), read.deny_ttl.as_secs(), read.retry_backoff.as_millis()),
            (300, 30, 500)
        );
        assert!(!read.default_allow);
        let read = settings(
            json!({"kubeConfigFile": "/k", "allowTTL": 50, "denyTTL": -1, "retryBackoff": 10, "defaultAllow": true}),
        );
        let read = read.expect("settings");
        assert_eq!(
            (read.allow_ttl.as_secs(), read.deny_ttl.as_secs(), read.retry_backoff.as_millis()),
            (50, 0, 10)
        );
        assert!(read.default_allow);
        for (policy, part) in [
            (json!({}), "kubeConfigFile is not given"),
            (
                json!({"kubeConfigFile": "/k", "allowTTL": 1801}),
                "allowTTL: valid value is between 1 and 1800, got 1801",
            ),
            (json!({"kubeConfigFile": "/k", "denyTTL": -2}), "denyTTL: valid value"),
            (json!({"kubeConfigFile": "/k", "retryBackoff": 300_001}), "retryBackoff: valid value"),
            (json!({"kubeConfigFile": 7}), "cannot be read"),
        ] {
            let error = settings(policy).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
        assert!(matches!(Settings::parse(None), Err(ImagePolicyError::NoConfig)));
    }

    #[test]
    fn the_webhook_sees_images_and_its_own_annotations() {
        let pod = json!({
            "metadata": {"annotations": {"mycluster.image-policy.k8s.io/ticket": "1", "other": "2"}},
            "spec": {
                "containers": [{"image": "a"}], "initContainers": [{"image": "b"}],
                "ephemeralContainers": [{"image": "c"}],
            },
        });
        assert_eq!(
            spec_of(&pod, false, "n"),
            json!({"containers": [{"image": "a"}, {"image": "b"}], "namespace": "n",
                "annotations": {"mycluster.image-policy.k8s.io/ticket": "1"}})
        );
        assert_eq!(spec_of(&pod, true, "n")["containers"], json!([{"image": "c"}]));
    }

    #[test]
    fn refusals_have_upstreams_words() {
        let of = |status: Value| Verdict::read(&status).refusal();
        assert_eq!(of(json!({"allowed": true})), None);
        assert_eq!(of(json!({})).as_deref(), Some("one or more images rejected by webhook backend"));
        let reason = "image policy webhook backend denied one or more images: bad";
        assert_eq!(of(json!({"allowed": false, "reason": "bad"})).as_deref(), Some(reason));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_kept_and_failures_are_not() {
        let webhook = FakeWebhook::new(Duration::ZERO, |_, question| {
            let image = question["spec"]["containers"][0]["image"].as_str().unwrap_or_default();
            match image {
                "ill" => Ok((400, json!({}))),
                image => Ok((200, json!({"status": {"allowed": image == "good"}}))),
            }
        });
        let policy = ImagePolicy::new(
            settings(json!({"kubeConfigFile": "/k"})).expect("settings"),
            Arc::clone(&webhook) as _,
        );
        let ask = async |image: &str| policy.verdict(&json!({"containers": [{"image": image}]})).await;
        assert!(ask("good").await.is_ok_and(|verdict| verdict.allowed));
        assert!(ask("bad").await.is_ok_and(|verdict| !verdict.allowed));
        assert!(ask("good").await.is_ok() && ask("bad").await.is_ok());
        assert_eq!(webhook.questions(), 2);
        tokio::time::advance(Duration::from_secs(31)).await;
        assert!(ask("good").await.is_ok() && ask("bad").await.is_ok());
        assert_eq!(webhook.questions(), 3);
        assert!(ask("ill").await.is_err() && ask("ill").await.is_err());
        assert_eq!(webhook.questions(), 5);
    }
}
