//! The authorizers of a server: those of flags, or of an AuthorizationConfiguration that is followed while the server runs.

use super::authorization_config::{Authorizer, WebhookConfig};
use super::modes::Mode;
use super::webhook_authorizer::{AuthorizerWebhook, WebhookAuthorizer};
use super::{AbacPolicy, AuthorizationConfig, AuthorizationConfigError};
use crate::http::BoxError;
use crate::review_webhook::WebhookSenders;
use crate::server::ApiServer;
use ferrite_component::FollowedFiles;
use ferrite_component::metrics::{Counter, Family, Gauge, registry};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The authorizers cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorizationError {
    #[error(transparent)]
    Config(#[from] AuthorizationConfigError),
    #[error("authorizer type {0} is not allowed if it was not enabled at initial server startup")]
    New(String),
    #[error("missing required types: [{0}]")]
    Missing(String),
    #[error("authorizer type ABAC needs --authorization-policy-file")]
    NoPolicy,
    #[error("webhook {name:?}: {source}")]
    Webhook { name: String, source: BoxError },
}

/// The authorizers of a server, and the file that names them.
#[derive(Debug, Clone)]
pub struct Authorization {
    /// In the order in which they are asked.
    pub modes: Vec<Mode>,
    /// None where flags say everything.
    file: Option<Arc<ConfigFile>>,
}

impl From<Vec<Mode>> for Authorization {
    /// Authorizers that do not change.
    fn from(modes: Vec<Mode>) -> Self {
        Self { modes, file: None }
    }
}

/// The file that names the authorizers.
#[derive(Debug)]
struct ConfigFile {
    path: PathBuf,
    senders: Arc<dyn WebhookSenders>,
    /// The rules of ABAC, which do not change.
    policy: Option<Arc<AbacPolicy>>,
    /// Types of the first configuration. As upstream: a later one has all of them that are no webhooks.
    initial: BTreeSet<String>,
    contents: Vec<u8>,
    /// Follows the file from before it was first read, so that no change is missed. Taken by the task that reloads.
    followed: Mutex<Option<FollowedFiles>>,
}

impl Authorization {
    /// Reads a file, which is followed from now on. `policy` has the rules of ABAC, if there are any.
    pub async fn of_file(
        path: &Path,
        policy: Option<Arc<AbacPolicy>>,
        senders: Arc<dyn WebhookSenders>,
    ) -> Result<Self, AuthorizationError> {
        let followed = FollowedFiles::new(vec![path.to_owned()]);
        let (config, contents) = AuthorizationConfig::read(path)?;
        let initial = config.built_in().map(str::to_owned).collect();
        let followed = Mutex::new(Some(followed));
        let file = ConfigFile { path: path.to_owned(), senders, policy, initial, contents, followed };
        let modes = file.modes(config).await?;
        Ok(Self { modes, file: Some(Arc::new(file)) })
    }
}

impl ConfigFile {
    /// The authorizers of a configuration.
    async fn modes(&self, config: AuthorizationConfig) -> Result<Vec<Mode>, AuthorizationError> {
        let here: BTreeSet<&str> = config.built_in().collect();
        let missing: Vec<&str> =
            self.initial.iter().map(String::as_str).filter(|name| !here.contains(name)).collect();
        if !missing.is_empty() {
            return Err(AuthorizationError::Missing(missing.join(" ")));
        }
        let mut modes = Vec::new();
        for authorizer in config.authorizers {
            modes.push(match authorizer {
                Authorizer::BuiltIn(name) => self.built_in(&name)?,
                Authorizer::Webhook(webhook) => Mode::Webhook(Arc::new(self.webhook(*webhook).await?)),
            });
        }
        Ok(modes)
    }

    fn built_in(&self, name: &str) -> Result<Mode, AuthorizationError> {
        let is_new = || AuthorizationError::New(name.to_owned());
        match name {
            "AlwaysAllow" => Ok(Mode::AlwaysAllow),
            "AlwaysDeny" => Ok(Mode::AlwaysDeny),
            _ if !self.initial.contains(name) => Err(is_new()),
            "RBAC" => Ok(Mode::Rbac),
            "Node" => Ok(Mode::Node),
            "ABAC" => self.policy.clone().map(Mode::Abac).ok_or(AuthorizationError::NoPolicy),
            _ => Err(is_new()),
        }
    }

    async fn webhook(&self, config: WebhookConfig) -> Result<WebhookAuthorizer, AuthorizationError> {
        let WebhookConfig { name, kubeconfig, conditions, .. } = config;
        let opened = self.senders.open(&kubeconfig).await;
        let sender = opened.map_err(|source| AuthorizationError::Webhook { name: name.clone(), source })?;
        let settings = AuthorizerWebhook {
            name,
            sender,
            version: config.version,
            authorized_ttl: config.authorized_ttl,
            unauthorized_ttl: config.unauthorized_ttl,
            timeout: config.timeout,
            denies_on_failure: config.denies_on_failure,
        };
        Ok(WebhookAuthorizer::with_conditions(settings, conditions))
    }
}

struct ReloadMetrics {
    reloads: Arc<Family<Counter>>,
    last: Arc<Family<Gauge>>,
    info: Arc<Family<Gauge>>,
}

static METRICS: LazyLock<ReloadMetrics> = LazyLock::new(|| {
    ReloadMetrics {
    reloads: registry().counter(
        "apiserver_authorization_config_controller_automatic_reloads_total",
        "Automatic reloads of the authorization configuration, by their result and the identity of the server.",
        &["status", "apiserver_id_hash"],
    ),
    last: registry().gauge(
        "apiserver_authorization_config_controller_automatic_reload_last_timestamp_seconds",
        "Time of the last automatic reload of the authorization configuration, by its result and the identity of the server.",
        &["status", "apiserver_id_hash"],
    ),
    info: registry().gauge(
        "apiserver_authorization_config_controller_last_config_info",
        "The hash of the authorization configuration that was last applied.",
        &["apiserver_id_hash", "hash"],
    ),
}
});

fn hash(data: &[u8]) -> String {
    use std::fmt::Write;
    let digest = ring::digest::digest(&ring::digest::SHA256, data);
    digest.as_ref().iter().fold("sha256:".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Follows the file that names the authorizers. An invalid one leaves everything as it was. Runs until it is dropped.
pub(crate) async fn reload(server: &ApiServer) {
    let Some(file) = &server.config().authorization.file else { return };
    let Some(mut followed) = file.followed.lock().unwrap_or_else(PoisonError::into_inner).take() else {
        return;
    };
    let config = server.config();
    let id = hash(crate::identity_lease::name(&config.host_name, config.advertise).as_bytes());
    let mut applied = hash(&file.contents);
    METRICS.info.with(&[&id, &applied]).set(1);
    loop {
        followed.changed().await;
        let loaded = async {
            let (config, contents) = AuthorizationConfig::read(&file.path)?;
            Ok::<_, AuthorizationError>((file.modes(config).await?, contents))
        };
        let status = match loaded.await {
            Ok((modes, contents)) => {
                server.registry.rbac.set_modes(modes);
                METRICS.info.remove(&[&id, &applied]);
                applied = hash(&contents);
                METRICS.info.with(&[&id, &applied]).set(1);
                tracing::info!(file = %file.path.display(), "loaded a new authorization configuration");
                "success"
            }
            Err(error) => {
                tracing::error!(%error, "the authorization configuration stays as it was");
                "failure"
            }
        };
        METRICS.reloads.with(&[status, &id]).increment();
        METRICS.last.with(&[status, &id]).set(jiff::Timestamp::now().as_second());
    }
}
