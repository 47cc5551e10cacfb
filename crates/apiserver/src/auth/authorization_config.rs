//! AuthorizationConfiguration of apiserver.config.k8s.io: decoding, and validation with upstream's words.

use super::config_file::{self, MAX_BYTES};
use super::decide::aggregate;
use super::webhook_authorizer::MatchCondition;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation::dns1123_subdomain;
use ferrite_cel::{Environment, Type};
use ferrite_component::GoDuration;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

const KIND: &str = "AuthorizationConfiguration";
const VERSIONS: [&str; 3] =
    ["apiserver.config.k8s.io/v1", "apiserver.config.k8s.io/v1beta1", "apiserver.config.k8s.io/v1alpha1"];
/// The authorizers that there are, in upstream's order.
const TYPES: [&str; 6] = ["ABAC", "AlwaysAllow", "AlwaysDeny", "Node", "RBAC", "Webhook"];
const WEBHOOK: &str = "Webhook";
const MAX_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_CONDITIONS: usize = 64;

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorizationConfigError {
    #[error("open {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{0} is larger than 1 MiB")]
    TooLarge(String),
    #[error("failed to load AuthorizationConfiguration from file: {0}")]
    Decode(String),
    #[error("{0}")]
    Invalid(String),
}

/// The file as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Given {
    authorizers: Vec<GivenAuthorizer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GivenAuthorizer {
    r#type: String,
    name: String,
    webhook: Option<GivenWebhook>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct GivenWebhook {
    #[serde(rename = "authorizedTTL")]
    authorized_ttl: Signed,
    cache_authorized_requests: Option<bool>,
    #[serde(rename = "unauthorizedTTL")]
    unauthorized_ttl: Signed,
    cache_unauthorized_requests: Option<bool>,
    timeout: Signed,
    subject_access_review_version: String,
    match_condition_subject_access_review_version: String,
    failure_policy: String,
    connection_info: ConnectionInfo,
    match_conditions: Vec<GivenCondition>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct ConnectionInfo {
    r#type: String,
    kube_config_file: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct GivenCondition {
    expression: String,
}

/// A duration that may be negative, which is refused later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Signed {
    negative: bool,
    length: Duration,
}

impl Default for Signed {
    fn default() -> Self {
        Self { negative: false, length: Duration::ZERO }
    }
}

impl Signed {
    fn is_zero(self) -> bool {
        self.length.is_zero()
    }

    fn text(self) -> String {
        format!("{}{}", if self.negative { "-" } else { "" }, GoDuration(self.length))
    }
}

impl<'de> Deserialize<'de> for Signed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?.unwrap_or_else(|| "0".to_owned());
        let (negative, length) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.as_str()),
        };
        let length: GoDuration = length.parse().map_err(serde::de::Error::custom)?;
        Ok(Self { negative, length: length.0 })
    }
}

/// An authorizer of a configuration.
#[derive(Debug)]
pub(super) enum Authorizer {
    /// Its type. The name follows from it.
    BuiltIn(String),
    Webhook(Box<WebhookConfig>),
}

/// A webhook of a configuration.
#[derive(Debug)]
pub(super) struct WebhookConfig {
    pub name: String,
    pub kubeconfig: PathBuf,
    pub version: String,
    pub authorized_ttl: Duration,
    pub unauthorized_ttl: Duration,
    pub timeout: Duration,
    pub denies_on_failure: bool,
    pub conditions: Vec<MatchCondition>,
}

/// A configuration that was read and found valid.
#[derive(Debug)]
pub struct AuthorizationConfig {
    pub(super) authorizers: Vec<Authorizer>,
}

impl AuthorizationConfig {
    /// Reads a file. Returns its contents, too.
    pub fn read(path: &std::path::Path) -> Result<(Self, Vec<u8>), AuthorizationConfigError> {
        let name = path.display().to_string();
        let text = config_file::read(path)
            .map_err(|source| AuthorizationConfigError::Read { path: name.clone(), source })?;
        if text.len() as u64 > MAX_BYTES {
            return Err(AuthorizationConfigError::TooLarge(name));
        }
        Ok((Self::parse(&text)?, text))
    }

    pub fn parse(text: &[u8]) -> Result<Self, AuthorizationConfigError> {
        let given: Given = match text.is_empty() {
            true => Given::default(),
            false => config_file::decode(text, KIND, &VERSIONS).map_err(AuthorizationConfigError::Decode)?,
        };
        let names: Vec<(String, String)> =
            given.authorizers.iter().map(|one| (one.r#type.clone(), one.name.clone())).collect();
        let (authorizers, errors) = validate(given);
        if !errors.is_empty() {
            return Err(AuthorizationConfigError::Invalid(config_file::joined(&errors)));
        }
        match aggregate(names.iter().filter_map(|(kind, name)| misnamed(kind, name)).collect()) {
            None => Ok(Self { authorizers }),
            Some(error) => Err(AuthorizationConfigError::Invalid(error)),
        }
    }

    /// The types of its authorizers that are no webhooks.
    pub(super) fn built_in(&self) -> impl Iterator<Item = &str> {
        self.authorizers.iter().filter_map(|authorizer| match authorizer {
            Authorizer::BuiltIn(name) => Some(name.as_str()),
            Authorizer::Webhook(_) => None,
        })
    }
}

fn validate(given: Given) -> (Vec<Authorizer>, Vec<FieldError>) {
    let root = Path::new("authorizers");
    let mut errors = Vec::new();
    if given.authorizers.is_empty() {
        errors.push(FieldError::required(&root, "at least one authorization mode must be defined"));
    }
    let (mut types, mut names) = (BTreeSet::new(), BTreeSet::new());
    let mut authorizers = Vec::new();
    for (index, one) in given.authorizers.into_iter().enumerate() {
        let path = root.index(index);
        let of_type = path.child("type");
        if one.r#type.is_empty() {
            errors.push(FieldError::required(&of_type, ""));
            continue;
        }
        if !TYPES.contains(&one.r#type.as_str()) {
            errors.push(FieldError::not_supported(&of_type, one.r#type.as_str(), &TYPES));
            continue;
        }
        if !types.insert(one.r#type.clone()) && one.r#type != WEBHOOK {
            errors.push(FieldError::duplicate(&of_type, one.r#type.as_str()));
            continue;
        }
        errors.extend(check_name(&one.name, &path.child("name"), &names));
        names.insert(one.name.clone());
        match (one.r#type.as_str(), one.webhook) {
            (WEBHOOK, None) => {
                errors.push(FieldError::required(&path.child("webhook"), "required when type=Webhook"));
            }
            (WEBHOOK, Some(webhook)) => match validate_webhook(one.name, webhook, &path) {
                Ok(webhook) => authorizers.push(Authorizer::Webhook(Box::new(webhook))),
                Err(complaints) => errors.extend(complaints),
            },
            (_, Some(_)) => {
                let why = "may only be specified when type=Webhook";
                errors.push(FieldError::invalid(&path.child("webhook"), "non-null", why));
            }
            (_, None) => authorizers.push(Authorizer::BuiltIn(one.r#type)),
        }
    }
    (authorizers, errors)
}

/// As upstream: an authorizer that is no webhook has the name of its type.
fn misnamed(kind: &str, name: &str) -> Option<String> {
    let expected = kind.to_lowercase();
    (kind != WEBHOOK && name != expected)
        .then(|| format!("expected name {expected} for authorizer {kind} instead of {name}"))
}

fn check_name(name: &str, path: &Path, taken: &BTreeSet<String>) -> Option<FieldError> {
    if name.is_empty() {
        return Some(FieldError::required(path, ""));
    }
    if taken.contains(name) {
        return Some(FieldError::duplicate(path, name));
    }
    let problems = dns1123_subdomain(name);
    let why = || format!("authorizer name is invalid: {}", problems.join(", "));
    (!problems.is_empty()).then(|| FieldError::invalid(path, name, why()))
}

/// As upstream: the paths of errors do not name the member `webhook`.
fn validate_webhook(
    name: String,
    given: GivenWebhook,
    path: &Path,
) -> Result<WebhookConfig, Vec<FieldError>> {
    let mut errors = Vec::new();
    let timeout = path.child("timeout");
    match given.timeout {
        none if none.is_zero() => errors.push(FieldError::required(&timeout, "")),
        given if given.negative || given.length > MAX_TIMEOUT => {
            errors.push(FieldError::invalid(&timeout, given.text(), "must be > 0s and <= 30s"));
        }
        _ => {}
    }
    let mut ttl = |field: &str, given: Signed, usual: u64, keeps: Option<bool>| {
        if given.negative && !given.is_zero() {
            errors.push(FieldError::invalid(&path.child(field), given.text(), "must be > 0s"));
        }
        match (keeps, given.is_zero()) {
            (Some(false), _) => Duration::ZERO,
            (_, true) => Duration::from_secs(usual),
            (_, false) => given.length,
        }
    };
    let authorized_ttl = ttl("authorizedTTL", given.authorized_ttl, 300, given.cache_authorized_requests);
    let unauthorized_ttl =
        ttl("unauthorizedTTL", given.unauthorized_ttl, 30, given.cache_unauthorized_requests);
    let mut one_of = |field: &str, given: &str, known: &[&str]| match given {
        "" => errors.push(FieldError::required(&path.child(field), "")),
        given if known.contains(&given) => {}
        given => errors.push(FieldError::not_supported(&path.child(field), given, known)),
    };
    one_of("subjectAccessReviewVersion", &given.subject_access_review_version, &["v1", "v1beta1"]);
    let of_conditions = path.child("matchConditionSubjectAccessReviewVersion");
    match given.match_condition_subject_access_review_version.as_str() {
        "" if !given.match_conditions.is_empty() => {
            errors.push(FieldError::required(&of_conditions, "required if match conditions are specified"));
        }
        "" | "v1" => {}
        other => errors.push(FieldError::not_supported(&of_conditions, other, &["v1"])),
    }
    let mut one_of = |field: &str, given: &str, known: &[&str]| match given {
        "" => errors.push(FieldError::required(&path.child(field), "")),
        given if known.contains(&given) => {}
        given => errors.push(FieldError::not_supported(&path.child(field), given, known)),
    };
    one_of("failurePolicy", &given.failure_policy, &["NoOpinion", "Deny"]);
    errors.extend(check_connection(&given.connection_info, &path.child("connectionInfo")));
    let (conditions, complaints) = compile(&given.match_conditions, &path.child("matchConditions"));
    errors.extend(complaints);
    match errors.is_empty() {
        false => Err(errors),
        true => Ok(WebhookConfig {
            name,
            kubeconfig: given.connection_info.kube_config_file.unwrap_or_default().into(),
            version: given.subject_access_review_version,
            authorized_ttl,
            unauthorized_ttl,
            timeout: given.timeout.length,
            denies_on_failure: given.failure_policy == "Deny",
            conditions,
        }),
    }
}

fn check_connection(given: &ConnectionInfo, path: &Path) -> Option<FieldError> {
    let file = path.child("kubeConfigFile");
    match given.r#type.as_str() {
        "" => Some(FieldError::required(&path.child("type"), "")),
        "InClusterConfig" => match &given.kube_config_file {
            Some(given) => {
                let why = "can only be set when type=KubeConfigFile";
                Some(FieldError::invalid(&file, given.as_str(), why))
            }
            None => {
                let why = "this server cannot be the client of its own authorization";
                Some(FieldError::invalid(&path.child("type"), "InClusterConfig", why))
            }
        },
        "KubeConfigFile" => {
            let given = given.kube_config_file.as_deref().unwrap_or_default();
            if given.is_empty() {
                return Some(FieldError::required(&file, ""));
            }
            if !given.starts_with('/') {
                return Some(FieldError::invalid(&file, given, "must be an absolute path"));
            }
            match std::fs::metadata(given) {
                Err(error) => {
                    let why = error.to_string().to_lowercase();
                    let why = why.split(" (os error").next().unwrap_or_default();
                    Some(FieldError::invalid(
                        &file,
                        given,
                        format!("error loading file: stat {given}: {why}"),
                    ))
                }
                Ok(found) if !found.is_file() => {
                    Some(FieldError::invalid(&file, given, "must be a regular file"))
                }
                Ok(_) => None,
            }
        }
        other => {
            let shown =
                format!("apiserver.WebhookConnectionInfo{{Type:{other:?}, KubeConfigFile:(*string)(nil)}}");
            let known = ["InClusterConfig", "KubeConfigFile"];
            Some(FieldError::not_supported(&path.child("type"), other, &known).rendered_as(shown))
        }
    }
}

fn compile(given: &[GivenCondition], path: &Path) -> (Vec<MatchCondition>, Vec<FieldError>) {
    if given.len() > MAX_CONDITIONS {
        return (Vec::new(), vec![FieldError::too_many(path, given.len(), MAX_CONDITIONS)]);
    }
    let (mut conditions, mut errors) = (Vec::new(), Vec::new());
    let mut seen = BTreeSet::new();
    let environment = Environment::kubernetes(36).with_subject_access_review();
    for (index, condition) in given.iter().enumerate() {
        let path = path.index(index).child("expression");
        let source = condition.expression.as_str();
        if source.trim().is_empty() {
            errors.push(FieldError::required(&path, ""));
            continue;
        }
        if !seen.insert(source) {
            errors.push(FieldError::duplicate(&path, source));
            continue;
        }
        match environment.compile(source) {
            Err(error) => {
                errors.push(FieldError::invalid(&path, source, format!("compilation failed: {error}")));
            }
            Ok(program) if *program.result_type() != Type::Bool => {
                let why = format!("must evaluate to bool but got {}", program.result_type());
                errors.push(FieldError::invalid(&path, source, why));
            }
            Ok(program) => conditions.push(MatchCondition { source: source.to_owned(), program }),
        }
    }
    (conditions, errors)
}

#[cfg(test)]
mod tests;
