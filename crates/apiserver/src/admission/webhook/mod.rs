//! MutatingAdmissionWebhook and ValidatingAdmissionWebhook.
//!
//! [`compiled`] holds the stored configurations, [`review`] the request and the checks of the response,
//! [`invoke`] the call of one webhook. This module decides which webhooks are called, in which order, and
//! interprets their responses.

mod compiled;
mod conditions;
mod invoke;
mod metrics;
mod review;

pub(crate) use metrics::WebhookMetrics;

use super::configured::{Configured, Current};
use super::matching;
use super::stage::{MutatingStage, Parts, ValidatingStage, Waiting};
use super::times::conditions_took;
use super::{Attributes, Reinvocation};
use crate::auth::Answers;
use crate::outbound::{Credentials, Outbound};
use crate::registry::View;
use compiled::{Configuration, Webhook};
use conditions::Met;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_json::{Value, json};
use futures_util::future::join_all;
use invoke::{Failure, Outcome};
use metrics::Rejection;
use std::sync::Arc;
use std::time::Instant;

const GROUP: &str = "admissionregistration.k8s.io";

/// The webhooks of one kind of configuration.
struct Webhooks {
    configured: Configured<Configuration>,
    outbound: Arc<Outbound>,
    metrics: Arc<WebhookMetrics>,
    /// The step as metrics name it.
    step: &'static str,
}

impl Webhooks {
    fn new(parts: &Parts<'_>, plural: &'static str, step: &'static str) -> Result<Self, String> {
        let credentials =
            Credentials::of_configuration(parts.configuration).map_err(|error| error.to_string())?;
        let compile = move |object: &Value| Configuration::compile(object, &credentials);
        Ok(Self {
            configured: Configured::new(GROUP, plural, Box::new(compile)),
            outbound: Arc::clone(parts.outbound),
            metrics: Arc::clone(parts.webhook_metrics),
            step,
        })
    }

    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        if self.configured.is_empty(view) || matching::is_exempt(attributes.resource) {
            return false;
        }
        let current = self.configured.current(view);
        webhooks(&current).any(|webhook| webhook.matcher.may_match(attributes))
    }

    /// The resource as which a webhook is called, if it is.
    async fn selects<'a>(
        &self,
        webhook: &Webhook,
        view: &'a View,
        attributes: &Attributes<'a>,
        object: Option<&Value>,
    ) -> Result<Option<&'a Resource>, Status> {
        let Some(matched) = webhook.matcher.resource(view, attributes, object)? else { return Ok(None) };
        if webhook.conditions.is_empty() {
            return Ok(Some(matched));
        }
        let old = attributes.old;
        let (object, old) = invoke::versions(view, attributes, matched, object, old).await?;
        let answers = Arc::<Answers>::default();
        let check = || {
            let (object, old) = (object.as_deref(), old.as_deref());
            webhook.conditions.check(view, attributes, matched, object, old, &answers)
        };
        let started = Instant::now();
        let met = answers.settle(check).await;
        let operation = attributes.operation.name();
        conditions_took("webhook", &webhook.name, operation, self.step, started.elapsed());
        match met {
            Met::Yes => Ok(Some(matched)),
            Met::No => {
                self.metrics.condition_excluded(&webhook.name, self.step, operation);
                Ok(None)
            }
            Met::Failed(why) => {
                self.metrics.condition_failed(&webhook.name, self.step, operation);
                match webhook.ignores_failures {
                    true => Ok(None),
                    false => Err(attributes.forbid(why)),
                }
            }
        }
    }

    /// Calls a webhook and counts it. Returns its decision; none if it failed and that is ignored.
    async fn call(
        &self,
        webhook: &Webhook,
        view: &View,
        attributes: &Attributes<'_>,
        matched: &Resource,
        object: Option<&Value>,
        place: (u8, usize),
    ) -> Result<Option<Outcome>, Status> {
        let started = Instant::now();
        let mutating = self.step == ADMIT;
        let called =
            invoke::invoke(&self.outbound, webhook, view, attributes, matched, object, mutating).await;
        let operation = attributes.operation.name();
        let count = |rejected: bool, code: u16| {
            self.metrics.called(&webhook.name, self.step, operation, rejected, code, started.elapsed());
        };
        let reject = |why, code| self.metrics.rejected(&webhook.name, self.step, operation, why, code);
        let (round, index) = place;
        match called {
            Ok(outcome) => {
                count(false, 200);
                Ok(Some(outcome))
            }
            Err(Failure::Calling { why, code }) if webhook.ignores_failures => {
                count(false, code);
                self.metrics.failed_open(&webhook.name, self.step);
                let phase = if mutating { "mutation" } else { "validating" };
                attributes.options.warnings.annotate(
                    format!("failed-open.{phase}.webhook.admission.k8s.io/round_{round}_index_{index}"),
                    webhook.name.clone(),
                );
                tracing::warn!(
                    webhook = webhook.name,
                    error = why,
                    "cannot call a webhook; going on without it"
                );
                Ok(None)
            }
            Err(Failure::Calling { why, code }) => {
                count(true, code);
                reject(Rejection::Calling, code);
                Err(Status::internal(format!("failed calling webhook {:?}: {why}", webhook.name)))
            }
            Err(Failure::Refused(status)) => {
                count(true, status.code);
                reject(Rejection::No, status.code);
                Err(status)
            }
            Err(Failure::Internal(status)) => {
                count(true, 0);
                reject(Rejection::Internal, 0);
                Err(status)
            }
        }
    }
}

fn webhooks(current: &Current<Configuration>) -> impl Iterator<Item = &Webhook> {
    current.iter().flat_map(|configuration| &configuration.webhooks)
}

const ADMIT: &str = "admit";
const VALIDATING: &str = "validating";

pub(super) struct MutatingWebhooks(Webhooks);

impl MutatingWebhooks {
    pub const NAME: &'static str = "MutatingAdmissionWebhook";

    pub fn make(parts: &Parts<'_>) -> Result<Box<dyn MutatingStage>, String> {
        Ok(Box::new(Self(Webhooks::new(parts, "mutatingwebhookconfigurations", ADMIT)?)))
    }

    /// Calls webhooks one after the other; each sees the changes of those before.
    async fn dispatch(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        mut object: Option<&mut Value>,
        reinvocation: &mut Reinvocation,
    ) -> Result<(), Status> {
        reinvocation.begin(Self::NAME, object.as_deref());
        let current = self.0.configured.current(view);
        for (index, webhook) in webhooks(&current).enumerate() {
            let matched = self.0.selects(webhook, view, attributes, object.as_deref()).await?;
            let Some(matched) = matched else { continue };
            if !reinvocation.runs(Self::NAME, &webhook.id) {
                continue;
            }
            let round = u8::from(reinvocation.is_again());
            let annotate = |changed: bool| {
                attributes.options.warnings.annotate(
                    format!("mutation.webhook.admission.k8s.io/round_{round}_index_{index}"),
                    format!(
                        "{{\"configuration\":{:?},\"webhook\":{:?},\"mutated\":{changed}}}",
                        webhook.configuration, webhook.name
                    ),
                );
            };
            let called =
                self.0.call(webhook, view, attributes, matched, object.as_deref(), (round, index)).await;
            // As upstream: a webhook that refuses is recorded, too.
            let outcome = called.inspect_err(|_| annotate(false))?;
            let mut changed = false;
            let mut patch = None;
            if let (Some(Outcome { object: Some(patched), patch: applied }), Some(object)) =
                (outcome, object.as_deref_mut())
            {
                changed = *object != patched;
                *object = patched;
                patch = applied.filter(|_| changed);
            }
            annotate(changed);
            if let Some(patch) = patch {
                let (configuration, name) = (&webhook.configuration, &webhook.name);
                let told = json!({
                    "configuration": configuration, "webhook": name, "patch": patch, "patchType": "JSONPatch",
                });
                attributes.options.warnings.annotate(
                    format!("patch.webhook.admission.k8s.io/round_{round}_index_{index}"),
                    told.to_string(),
                );
            }
            if changed {
                reinvocation.changed(Self::NAME);
            }
            if webhook.reinvocable {
                reinvocation.reinvocable(Self::NAME, &webhook.id);
            }
        }
        reinvocation.end(Self::NAME, object.as_deref());
        Ok(())
    }
}

impl MutatingStage for MutatingWebhooks {
    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        self.0.concerns(view, attributes)
    }

    fn mutate<'a>(
        &'a self,
        view: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a mut Value>,
        reinvocation: &'a mut Reinvocation,
    ) -> Waiting<'a> {
        Box::pin(self.dispatch(view, attributes, object, reinvocation))
    }
}

pub(super) struct ValidatingWebhooks(Webhooks);

impl ValidatingWebhooks {
    pub const NAME: &'static str = "ValidatingAdmissionWebhook";

    pub fn make(parts: &Parts<'_>) -> Result<Box<dyn ValidatingStage>, String> {
        Ok(Box::new(Self(Webhooks::new(parts, "validatingwebhookconfigurations", VALIDATING)?)))
    }

    /// Calls all webhooks at once. The first in order that refuses is answered.
    async fn dispatch(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let current = self.0.configured.current(view);
        let mut selected = Vec::new();
        for webhook in webhooks(&current) {
            if let Some(matched) = self.0.selects(webhook, view, attributes, object).await? {
                selected.push((webhook, matched));
            }
        }
        let calls = selected.iter().enumerate().map(|(index, (webhook, matched))| {
            self.0.call(webhook, view, attributes, matched, object, (0, index))
        });
        join_all(calls).await.into_iter().try_for_each(|called| called.map(drop))
    }
}

impl ValidatingStage for ValidatingWebhooks {
    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        self.0.concerns(view, attributes)
    }

    fn validate<'a>(
        &'a self,
        view: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a Value>,
    ) -> Waiting<'a> {
        Box::pin(self.dispatch(view, attributes, object))
    }
}
