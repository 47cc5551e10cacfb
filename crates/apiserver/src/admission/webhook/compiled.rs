//! Webhook configurations, compiled once for each of their versions.

use super::conditions::Conditions;
use super::review::Version;
use crate::admission::matching::Matcher;
use crate::outbound::{Credentials, Destination, DestinationError};
use ferrite_api::meta;
use ferrite_json::Value;
use std::time::Duration;

/// The timeout of a webhook that names none, and the longest that one may name.
const TIMEOUT: u64 = 10;
const LONGEST: u64 = 30;

/// The effects of a webhook outside of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SideEffects {
    /// None, or none on a dry run.
    None,
    Some,
    Unsaid,
}

/// A webhook.
pub(super) struct Webhook {
    pub name: String,
    pub configuration: String,
    /// Tells webhooks of all configurations apart.
    pub id: String,
    pub matcher: Matcher,
    pub conditions: Conditions,
    pub ignores_failures: bool,
    pub timeout: Duration,
    pub side_effects: SideEffects,
    pub reinvocable: bool,
    /// None when it takes no version that this server knows.
    pub version: Option<Version>,
    pub destination: Result<Destination, DestinationError>,
}

/// A MutatingWebhookConfiguration or ValidatingWebhookConfiguration.
pub(super) struct Configuration {
    pub webhooks: Vec<Webhook>,
}

impl Configuration {
    pub fn compile(object: &Value, credentials: &Credentials) -> Self {
        let configuration = meta::name(object);
        let list = object["webhooks"].as_array().into_iter().flatten().enumerate();
        let compile = |(index, webhook): (usize, &Value)| {
            let name = webhook["name"].as_str().unwrap_or_default();
            let seconds = webhook["timeoutSeconds"].as_u64().unwrap_or(TIMEOUT).clamp(1, LONGEST);
            Webhook {
                id: format!("{configuration}/{name}/{index}"),
                name: name.to_owned(),
                configuration: configuration.to_owned(),
                matcher: Matcher::of_webhook(webhook),
                conditions: Conditions::compile(&webhook["matchConditions"]),
                ignores_failures: webhook["failurePolicy"] == "Ignore",
                timeout: Duration::from_secs(seconds),
                side_effects: match webhook["sideEffects"].as_str() {
                    Some("None" | "NoneOnDryRun") => SideEffects::None,
                    Some(_) => SideEffects::Some,
                    None => SideEffects::Unsaid,
                },
                reinvocable: webhook["reinvocationPolicy"] == "IfNeeded",
                version: Version::of(&webhook["admissionReviewVersions"]),
                destination: Destination::parse(&webhook["clientConfig"], credentials),
            }
        };
        Self { webhooks: list.map(compile).collect() }
    }
}
