//! An authorizer that asks a webhook: a SubjectAccessReview for each question.

use super::decide::Decision;
use super::{Action, User};
use crate::review_webhook::{ExpiringCache, FIRST_PAUSE, Flights, ReviewClient, ReviewError, WebhookSender};
use ferrite_api::selector::Operator;
use ferrite_cel::{Activation, Limits, Program, Value as Cel};
use ferrite_component::metrics::{Counter, Family, Histogram, registry};
use ferrite_json::{Map, Value, json};
use futures_util::FutureExt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// As upstream: larger questions are not kept, since their authors choose their size.
const MAX_CACHED_ATTRIBUTES: usize = 10_000;
const MAX_ENTRIES: usize = 8192;
const MAX_BYTES: usize = 64 << 20;
/// One question, with all its attempts, may take this long.
const PATIENCE: Duration = Duration::from_secs(60);
/// One evaluation of a condition may cost this much. Upstream has no limit here.
const COST: u64 = 10_000_000;

struct WebhookMetrics {
    evaluations: Arc<Family<Counter>>,
    durations: Arc<Family<Histogram>>,
    fail_open: Arc<Family<Counter>>,
    condition_errors: Arc<Family<Counter>>,
    condition_exclusions: Arc<Family<Counter>>,
    condition_durations: Arc<Family<Histogram>>,
}

static METRICS: LazyLock<WebhookMetrics> = LazyLock::new(|| {
    const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
    let (of_call, of_condition) = (&["name", "result"], &["type", "name"]);
    let all = registry();
    WebhookMetrics {
        evaluations: all.counter(
            "apiserver_authorization_webhook_evaluations_total",
            "Round-trips to authorization webhooks.",
            of_call,
        ),
        durations: all.histogram(
            "apiserver_authorization_webhook_duration_seconds",
            "Duration of round-trips to authorization webhooks.",
            of_call,
            SECONDS,
        ),
        fail_open: all.counter(
            "apiserver_authorization_webhook_evaluations_fail_open_total",
            "Questions without an opinion because the webhook failed or took too long.",
            of_call,
        ),
        condition_errors: all.counter(
            "apiserver_authorization_match_condition_evaluation_errors_total",
            "Questions for which a match condition of an authorization webhook failed.",
            of_condition,
        ),
        condition_exclusions: all.counter(
            "apiserver_authorization_match_condition_exclusions_total",
            "Questions that a match condition kept from an authorization webhook.",
            of_condition,
        ),
        condition_durations: all.histogram(
            "apiserver_authorization_match_condition_evaluation_seconds",
            "Time to evaluate the match conditions of an authorization webhook.",
            of_condition,
            &[0.001, 0.005, 0.01, 0.025, 0.1, 0.2, 0.25],
        ),
    }
});

/// Settings of the webhook.
#[derive(Debug, Clone)]
pub struct AuthorizerWebhook {
    pub name: String,
    pub sender: Arc<dyn WebhookSender>,
    /// Version of the SubjectAccessReviews: `v1` or `v1beta1`.
    pub version: String,
    /// Zero keeps no answer.
    pub authorized_ttl: Duration,
    pub unauthorized_ttl: Duration,
    /// One attempt may take this long.
    pub timeout: Duration,
    /// True if a webhook that cannot be asked refuses; else it has no opinion.
    pub denies_on_failure: bool,
}

/// A condition that a question has to meet, compiled.
#[derive(Debug)]
pub(super) struct MatchCondition {
    pub source: String,
    pub program: Program,
}

/// The webhook's word, or the reason why there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Opinion {
    allowed: bool,
    denied: bool,
    reason: String,
    error: Option<String>,
}

impl Opinion {
    pub fn failed(error: String, denies: bool) -> Self {
        Self { denied: denies, error: Some(error), ..Self::default() }
    }

    /// As upstream: a refusal counts more than a grant.
    pub fn decision(self) -> Decision {
        let error = match self.allowed && self.denied {
            true => Some("webhook subject access review returned both allow and deny response".to_owned()),
            false => self.error,
        };
        Decision {
            allowed: self.allowed && !self.denied,
            denied: self.denied,
            reason: self.reason,
            error,
            pending: false,
        }
    }

    fn read(status: &Value) -> Self {
        Self {
            allowed: status["allowed"] == true,
            denied: status["denied"] == true,
            reason: status["reason"].as_str().unwrap_or_default().to_owned(),
            error: None,
        }
    }
}

/// A question to a webhook.
#[derive(Debug, Clone)]
pub(super) struct Question {
    spec: Value,
    /// The question as text: equal questions have equal answers.
    pub key: String,
    /// False if the answer is not kept.
    cacheable: bool,
}

/// The answers that are kept, by the text of the question.
type Cache = ExpiringCache<String, Opinion>;

/// Asks a webhook whether somebody may do something.
pub struct WebhookAuthorizer {
    settings: AuthorizerWebhook,
    client: ReviewClient,
    conditions: Vec<MatchCondition>,
    cache: Arc<Mutex<Cache>>,
    flights: Flights<String, Opinion>,
}

impl std::fmt::Debug for WebhookAuthorizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WebhookAuthorizer").field("name", &self.settings.name).finish_non_exhaustive()
    }
}

impl PartialEq for WebhookAuthorizer {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for WebhookAuthorizer {}

impl WebhookAuthorizer {
    pub fn new(settings: AuthorizerWebhook) -> Self {
        Self::with_conditions(settings, Vec::new())
    }

    pub(super) fn with_conditions(settings: AuthorizerWebhook, conditions: Vec<MatchCondition>) -> Self {
        LazyLock::force(&METRICS);
        let client = ReviewClient {
            sender: Arc::clone(&settings.sender),
            group_version: format!("authorization.k8s.io/{}", settings.version),
            kind: "SubjectAccessReview",
            timeout: settings.timeout,
            first_pause: FIRST_PAUSE,
        };
        Self {
            settings,
            client,
            conditions,
            cache: Arc::new(Mutex::new(ExpiringCache::new(MAX_ENTRIES, MAX_BYTES))),
            flights: Flights::default(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.settings.name
    }

    pub(super) fn denies_on_failure(&self) -> bool {
        self.settings.denies_on_failure
    }

    /// The question to the webhook. None if its conditions keep it out, an opinion if they fail.
    pub(super) fn question(&self, user: &User, action: &Action) -> Result<Option<Question>, Opinion> {
        let spec = spec_of(user, action);
        if !self.conditions.is_empty() {
            let labels = ["Webhook", self.name()];
            let begun = Instant::now();
            let met = meets(&self.conditions, &spec);
            METRICS.condition_durations.with(&labels).observe(begun.elapsed());
            match met {
                Ok(true) => {}
                Ok(false) => {
                    METRICS.condition_exclusions.with(&labels).increment();
                    return Ok(None);
                }
                Err(error) => {
                    METRICS.condition_errors.with(&labels).increment();
                    return Err(Opinion::failed(error, self.denies_on_failure()));
                }
            }
        }
        let cacheable = attributes_size(action) < MAX_CACHED_ATTRIBUTES;
        Ok(Some(Question { key: spec.to_string(), spec, cacheable }))
    }

    pub(super) fn cached(&self, question: &Question) -> Option<Opinion> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.get(&question.key, Instant::now())
    }

    /// Asks the webhook. Equal questions at the same time are asked once.
    pub(super) async fn ask(self: &Arc<Self>, question: &Question) -> Opinion {
        let asked = || {
            let (this, question) = (Arc::clone(self), question.clone());
            async move { this.ask_alone(&question).await }.boxed()
        };
        self.flights.join(&question.key, asked).await
    }

    async fn ask_alone(&self, question: &Question) -> Opinion {
        let name = self.name();
        let observe = |result: Result<(), &ReviewError>, elapsed: Duration| {
            let labels = [name, result_name(result)];
            METRICS.evaluations.with(&labels).increment();
            METRICS.durations.with(&labels).observe(elapsed);
        };
        let spec = match self.settings.version.as_str() {
            "v1beta1" => as_v1beta1(&question.spec),
            _ => question.spec.clone(),
        };
        match self.client.status(&spec, Instant::now() + PATIENCE, &observe).await {
            Ok(status) => {
                let opinion = Opinion::read(&status);
                let ttl = match opinion.allowed {
                    true => self.settings.authorized_ttl,
                    false => self.settings.unauthorized_ttl,
                };
                if question.cacheable {
                    let cost = question.key.len() * 2 + opinion.reason.len() + 256;
                    let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
                    cache.insert(question.key.clone(), opinion.clone(), cost, ttl, Instant::now());
                }
                opinion
            }
            Err(error) => {
                tracing::error!(%error, webhook = name, "Failed to make webhook authorizer request");
                if !self.denies_on_failure() {
                    METRICS.fail_open.with(&[name, result_name(Err(&error))]).increment();
                }
                Opinion::failed(error.to_string(), self.denies_on_failure())
            }
        }
    }
}

fn result_name(result: Result<(), &ReviewError>) -> &'static str {
    match result {
        Ok(()) => "success",
        Err(error) if error.is_timeout() => "timeout",
        Err(_) => "error",
    }
}

/// The size of the attributes that the author of a request chooses.
fn attributes_size(action: &Action) -> usize {
    let texts = [
        &action.namespace,
        &action.verb,
        &action.group,
        &action.version,
        &action.resource,
        &action.subresource,
        &action.name,
    ];
    texts.iter().map(|text| text.len()).sum::<usize>() + action.path.as_ref().map_or(0, String::len)
}

/// A question as the spec of a SubjectAccessReview of v1.
fn spec_of(user: &User, action: &Action) -> Value {
    fn put(map: &mut Map, key: &str, text: &str) {
        if !text.is_empty() {
            map.insert(key, text.into());
        }
    }
    let mut spec = Map::new();
    let mut attributes = Map::new();
    match &action.path {
        Some(path) => {
            put(&mut attributes, "path", path);
            put(&mut attributes, "verb", &action.verb);
            spec.insert("nonResourceAttributes", attributes.into());
        }
        None => {
            for (key, text) in [
                ("namespace", &action.namespace),
                ("verb", &action.verb),
                ("group", &action.group),
                ("version", &action.version),
                ("resource", &action.resource),
                ("subresource", &action.subresource),
                ("name", &action.name),
            ] {
                put(&mut attributes, key, text);
            }
            let fields = field_requirements(action);
            if !fields.is_empty() {
                attributes.insert("fieldSelector", json!({"requirements": fields}));
            }
            let labels = label_requirements(action);
            if !labels.is_empty() {
                attributes.insert("labelSelector", json!({"requirements": labels}));
            }
            spec.insert("resourceAttributes", attributes.into());
        }
    }
    put(&mut spec, "user", &user.name);
    if !user.groups.is_empty() {
        spec.insert("groups", user.groups.clone().into());
    }
    if !user.extra.is_empty() {
        spec.insert("extra", json!(user.extra));
    }
    put(&mut spec, "uid", &user.uid);
    spec.into()
}

fn field_requirements(action: &Action) -> Vec<Value> {
    let of = |term: &ferrite_api::selector::FieldTerm| {
        let operator = if term.equal { "In" } else { "NotIn" };
        json!({"key": term.field, "operator": operator, "values": [term.value]})
    };
    action.fields.iter().map(of).collect()
}

/// As upstream: comparisons of numbers are left out, which asks for more than the request wants.
fn label_requirements(action: &Action) -> Vec<Value> {
    let of = |requirement: &ferrite_api::selector::Requirement| {
        let operator = match requirement.operator {
            Operator::Equals | Operator::DoubleEquals | Operator::In => "In",
            Operator::NotEquals | Operator::NotIn => "NotIn",
            Operator::Exists => "Exists",
            Operator::DoesNotExist => "DoesNotExist",
            Operator::GreaterThan | Operator::LessThan => return None,
        };
        let mut value = json!({"key": requirement.key, "operator": operator});
        if !requirement.values.is_empty() {
            value["values"] = requirement.values.clone().into();
        }
        Some(value)
    };
    action.labels.iter().filter_map(of).collect()
}

/// The same question in the old version, which has another name for groups.
fn as_v1beta1(spec: &Value) -> Value {
    let mut spec = spec.clone();
    if let Some(map) = spec.as_object_mut()
        && let Some(groups) = map.remove("groups")
    {
        map.insert("group", groups);
    }
    spec
}

/// The value of `request` in conditions: as upstream, texts are there even when they are empty.
fn variable(spec: &Value) -> Value {
    let text = |from: &Value, key: &str| Value::from(from[key].as_str().unwrap_or_default());
    let or_empty = |key: &str, empty: Value| spec.get(key).cloned().unwrap_or(empty);
    let mut request = json!({
        "user": text(spec, "user"), "uid": text(spec, "uid"),
        "groups": or_empty("groups", json!([])), "extra": or_empty("extra", json!({})),
    });
    if let Some(given) = spec.get("resourceAttributes") {
        let mut attributes = given.clone();
        for key in ["namespace", "verb", "group", "version", "resource", "subresource", "name"] {
            attributes[key] = text(given, key);
        }
        request["resourceAttributes"] = attributes;
    }
    if let Some(given) = spec.get("nonResourceAttributes") {
        request["nonResourceAttributes"] = json!({"verb": text(given, "verb"), "path": text(given, "path")});
    }
    request
}

/// Returns true if a question meets all conditions. As upstream: a condition that is not met counts more than errors.
fn meets(conditions: &[MatchCondition], spec: &Value) -> Result<bool, String> {
    let request = variable(spec);
    let mut activation = Activation::new();
    activation.set("request", Cel::from_json(&request, None));
    let mut errors = Vec::new();
    for condition in conditions {
        let failed = |why: String| {
            format!("cel evaluation error: expression '{}' resulted in error: {why}", condition.source)
        };
        match condition.program.evaluate(&activation, Limits::cost(COST)).result {
            Ok(value) if value.as_bool() == Some(true) => {}
            Ok(value) if value.as_bool() == Some(false) => return Ok(false),
            Ok(_) => errors.push(failed("it is not a bool".to_owned())),
            Err(error) => errors.push(failed(error.to_string())),
        }
    }
    super::decide::aggregate(errors).map_or(Ok(true), Err)
}

#[cfg(test)]
mod tests;
