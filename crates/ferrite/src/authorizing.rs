//! Upstream's flags of kube-apiserver that choose authorizers, and the webhook that knows tokens.

use crate::apiserver::{BoxError, read_file};
use crate::webhook_client::{WebhookClient, WebhookClients};
use ferrite_apiserver::{
    AbacPolicy, Authorization, AuthorizerWebhook, Mode, TokenWebhook, WebhookAuthorizer, go_duration,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The versions of reviews that webhooks get.
const VERSIONS: [&str; 2] = ["v1", "v1beta1"];
/// As upstream: the webhook of flags has this name, and this long to answer.
const NAME: &str = "default";
const TIMEOUT: Duration = Duration::from_secs(30);

/// Options of the webhook that knows tokens.
#[derive(Debug, Clone, clap::Args)]
pub struct TokenWebhookOptions {
    /// File with the webhook that knows the users of tokens: a kubeconfig. It is asked about tokens that nothing else knows.
    #[arg(long, value_name = "FILE")]
    pub authentication_token_webhook_config_file: Option<PathBuf>,
    /// Version of the TokenReviews that the webhook gets: v1 or v1beta1.
    #[arg(long, value_name = "VERSION", default_value = "v1beta1", value_parser = VERSIONS)]
    pub authentication_token_webhook_version: String,
    /// The webhook's answers are kept this long; 0 keeps none.
    #[arg(long, value_name = "DURATION", default_value = "2m0s", value_parser = go_duration)]
    pub authentication_token_webhook_cache_ttl: Duration,
}

impl TokenWebhookOptions {
    pub async fn read(&self) -> Result<Option<TokenWebhook>, BoxError> {
        let Some(file) = &self.authentication_token_webhook_config_file else { return Ok(None) };
        let opened = WebhookClient::open(file).await;
        let sender = opened.map_err(|error| -> BoxError {
            format!("cannot use --authentication-token-webhook-config-file {}: {error}", file.display())
                .into()
        })?;
        Ok(Some(TokenWebhook {
            sender: Arc::new(sender),
            version: self.authentication_token_webhook_version.clone(),
            cache_ttl: self.authentication_token_webhook_cache_ttl,
        }))
    }
}

/// Options that choose authorizers.
#[derive(Debug, Clone, clap::Args)]
pub struct AuthorizationOptions {
    /// Authorizers in the order in which they are asked: AlwaysAllow, AlwaysDeny, ABAC, Webhook, Node, RBAC. Without it
    /// Node and RBAC.
    #[arg(long, value_name = "MODES", value_delimiter = ',')]
    pub authorization_mode: Vec<String>,
    /// File with the authorizers: an AuthorizationConfiguration of apiserver.config.k8s.io. Followed while the server
    /// runs. Not together with --authorization-mode and --authorization-webhook-*.
    #[arg(long, value_name = "FILE")]
    pub authorization_config: Option<PathBuf>,
    /// File with the rules of the authorizer ABAC, one in JSON a line.
    #[arg(long, value_name = "FILE")]
    pub authorization_policy_file: Option<PathBuf>,
    /// File with the webhook of the authorizer Webhook: a kubeconfig.
    #[arg(long, value_name = "FILE")]
    pub authorization_webhook_config_file: Option<PathBuf>,
    /// Version of the SubjectAccessReviews that the webhook gets: v1 or v1beta1. Without it v1beta1.
    #[arg(long, value_name = "VERSION", value_parser = VERSIONS)]
    pub authorization_webhook_version: Option<String>,
    /// Grants of the webhook are kept this long; 0 keeps none. Without it five minutes.
    #[arg(long, value_name = "DURATION", value_parser = go_duration)]
    pub authorization_webhook_cache_authorized_ttl: Option<Duration>,
    /// Other answers of the webhook are kept this long; 0 keeps none. Without it 30 seconds.
    #[arg(long, value_name = "DURATION", value_parser = go_duration)]
    pub authorization_webhook_cache_unauthorized_ttl: Option<Duration>,
}

/// Flags that contradict each other, in upstream's words where it has some.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorizationOptionsError {
    #[error(
        "--authorization-config can not be specified when --authorization-mode or --authorization-webhook-* flags are defined"
    )]
    ConfigAndFlags,
    #[error(
        "authorization-mode {0:?} is not a valid mode: choose among AlwaysAllow, AlwaysDeny, ABAC, Webhook, Node, RBAC"
    )]
    UnknownMode(String),
    #[error("authorization-mode has mode {0:?} specified more than once")]
    TwiceMode(String),
    #[error(
        "authorization-mode ABAC's authorization policy file not passed: give --authorization-policy-file"
    )]
    NoPolicyFile,
    #[error(
        "authorization-mode Webhook's authorization config file not passed: give --authorization-webhook-config-file"
    )]
    NoWebhookFile,
    #[error("cannot specify --authorization-policy-file without mode ABAC")]
    PolicyFileWithoutMode,
    #[error("cannot specify --authorization-webhook-config-file without mode Webhook")]
    WebhookFileWithoutMode,
}

impl AuthorizationOptions {
    /// Checks the flags against each other, as upstream does.
    fn check(&self) -> Result<(), AuthorizationOptionsError> {
        use AuthorizationOptionsError as Error;
        let names = &self.authorization_mode;
        if self.authorization_config.is_some() {
            let webhook = self.authorization_webhook_config_file.is_some()
                || self.authorization_webhook_version.is_some()
                || self.authorization_webhook_cache_authorized_ttl.is_some()
                || self.authorization_webhook_cache_unauthorized_ttl.is_some();
            return if webhook || !names.is_empty() { Err(Error::ConfigAndFlags) } else { Ok(()) };
        }
        let has = |mode: &str| names.iter().any(|name| name == mode);
        for (index, name) in names.iter().enumerate() {
            match name.as_str() {
                "AlwaysAllow" | "AlwaysDeny" | "RBAC" | "Node" => {}
                "ABAC" if self.authorization_policy_file.is_none() => return Err(Error::NoPolicyFile),
                "Webhook" if self.authorization_webhook_config_file.is_none() => {
                    return Err(Error::NoWebhookFile);
                }
                "ABAC" | "Webhook" => {}
                _ => return Err(Error::UnknownMode(name.clone())),
            }
            if names[..index].contains(name) {
                return Err(Error::TwiceMode(name.clone()));
            }
        }
        if self.authorization_policy_file.is_some() && !has("ABAC") {
            return Err(Error::PolicyFileWithoutMode);
        }
        if self.authorization_webhook_config_file.is_some() && !has("Webhook") {
            return Err(Error::WebhookFileWithoutMode);
        }
        Ok(())
    }

    fn policy(&self) -> Result<Option<Arc<AbacPolicy>>, BoxError> {
        let Some(file) = &self.authorization_policy_file else { return Ok(None) };
        Ok(Some(Arc::new(AbacPolicy::parse(&read_file("authorization-policy-file", file)?)?)))
    }

    /// The authorizers, in their order. None if no flag names any.
    pub async fn read(&self) -> Result<Option<Authorization>, BoxError> {
        self.check()?;
        if let Some(file) = &self.authorization_config {
            let authorization = Authorization::of_file(file, self.policy()?, Arc::new(WebhookClients)).await;
            let authorization = authorization
                .map_err(|error| format!("cannot use --authorization-config {}: {error}", file.display()))?;
            return Ok(Some(authorization));
        }
        let mut modes = Vec::new();
        for name in &self.authorization_mode {
            modes.push(match name.as_str() {
                "AlwaysAllow" => Mode::AlwaysAllow,
                "AlwaysDeny" => Mode::AlwaysDeny,
                "RBAC" => Mode::Rbac,
                "Node" => Mode::Node,
                "ABAC" => Mode::Abac(self.policy()?.ok_or(AuthorizationOptionsError::NoPolicyFile)?),
                _ => Mode::Webhook(Arc::new(self.webhook().await?)),
            });
        }
        Ok((!modes.is_empty()).then(|| modes.into()))
    }

    async fn webhook(&self) -> Result<WebhookAuthorizer, BoxError> {
        let file = self.authorization_webhook_config_file.as_ref();
        let file = file.ok_or(AuthorizationOptionsError::NoWebhookFile)?;
        let opened = WebhookClient::open(file).await;
        let sender = opened.map_err(|error| -> BoxError {
            format!("cannot use --authorization-webhook-config-file {}: {error}", file.display()).into()
        })?;
        let seconds = |given: Option<Duration>, usual| given.unwrap_or(Duration::from_secs(usual));
        Ok(WebhookAuthorizer::new(AuthorizerWebhook {
            name: NAME.to_owned(),
            sender: Arc::new(sender),
            version: self.authorization_webhook_version.clone().unwrap_or_else(|| "v1beta1".to_owned()),
            authorized_ttl: seconds(self.authorization_webhook_cache_authorized_ttl, 300),
            unauthorized_ttl: seconds(self.authorization_webhook_cache_unauthorized_ttl, 30),
            timeout: TIMEOUT,
            denies_on_failure: false,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        authorization: AuthorizationOptions,
    }

    fn options(flags: &[&str]) -> AuthorizationOptions {
        Line::try_parse_from([&["x"], flags].concat()).map(|line| line.authorization).unwrap()
    }

    #[tokio::test]
    async fn authorizers_are_asked_in_the_order_given() {
        assert!(options(&[]).read().await.unwrap().is_none());
        let modes = options(&["--authorization-mode=RBAC,Node"]).read().await.unwrap().unwrap().modes;
        assert_eq!(modes, [Mode::Rbac, Mode::Node]);
    }

    #[test]
    fn flags_that_contradict_each_other_are_refused() {
        use AuthorizationOptionsError as Error;
        for (flags, error) in [
            (&["--authorization-mode=RBAC,RBAC"][..], Error::TwiceMode("RBAC".into())),
            (&["--authorization-mode=Rbac"], Error::UnknownMode("Rbac".into())),
            (&["--authorization-mode=ABAC"], Error::NoPolicyFile),
            (&["--authorization-mode=Webhook"], Error::NoWebhookFile),
            (&["--authorization-policy-file=/x"], Error::PolicyFileWithoutMode),
            (
                &["--authorization-mode=RBAC", "--authorization-webhook-config-file=/x"],
                Error::WebhookFileWithoutMode,
            ),
            (&["--authorization-config=/x", "--authorization-mode=RBAC"], Error::ConfigAndFlags),
            (&["--authorization-config=/x", "--authorization-webhook-version=v1"], Error::ConfigAndFlags),
            (
                &["--authorization-config=/x", "--authorization-webhook-cache-authorized-ttl=1m"],
                Error::ConfigAndFlags,
            ),
        ] {
            assert_eq!(options(flags).check(), Err(error), "{flags:?}");
        }
        for flags in [
            &["--authorization-config=/x"][..],
            // As upstream: the rules of ABAC are in no configuration.
            &["--authorization-config=/x", "--authorization-policy-file=/y"],
            &[
                "--authorization-mode=ABAC,Webhook",
                "--authorization-policy-file=/y",
                "--authorization-webhook-config-file=/x",
            ],
        ] {
            assert_eq!(options(flags).check(), Ok(()), "{flags:?}");
        }
        assert!(Line::try_parse_from(["x", "--authorization-webhook-version=v2"]).is_err());
    }
}
