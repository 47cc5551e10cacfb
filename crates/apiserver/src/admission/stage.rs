//! Stages of admission that may wait: webhooks and policies.

use super::image_policy::{self, ImagePolicy};
use super::policy::{MutatingPolicies, ValidatingPolicies};
use super::webhook::{MutatingWebhooks, ValidatingWebhooks};
use super::{Attributes, Reinvocation, WebhookMetrics};
use crate::outbound::Outbound;
use crate::registry::View;
use crate::review_webhook::WebhookSender;
use ferrite_api::Status;
use ferrite_json::Value;
use std::pin::Pin;
use std::sync::Arc;

/// The answer of a stage.
pub(crate) type Waiting<'a> = Pin<Box<dyn Future<Output = Result<(), Status>> + Send + 'a>>;

/// A stage that may change objects.
pub(crate) trait MutatingStage: Send + Sync {
    /// Returns true if anything is configured that may select the request. Called for every write: it must
    /// be cheap, and a wrong result must be true.
    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool;

    /// Changes or refuses the object. There is none for a delete.
    ///
    /// A create is shown as upstream shows it: without UID, time of creation and a name that is still to be drawn.
    fn mutate<'a>(
        &'a self,
        view: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a mut Value>,
        reinvocation: &'a mut Reinvocation,
    ) -> Waiting<'a>;
}

/// A stage that may refuse requests.
pub(crate) trait ValidatingStage: Send + Sync {
    /// As [`MutatingStage::concerns`].
    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool;

    /// There is no object for a delete.
    fn validate<'a>(
        &'a self,
        view: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a Value>,
    ) -> Waiting<'a>;
}

/// The inputs for making a stage.
pub(crate) struct Parts<'a> {
    /// The stage's configuration from `--admission-control-config-file`.
    pub configuration: Option<&'a Value>,
    pub outbound: &'a Arc<Outbound>,
    pub webhook_metrics: &'a Arc<WebhookMetrics>,
    /// The connection of the plugin ImagePolicyWebhook, if that is on.
    pub image_policy: Option<&'a Arc<dyn WebhookSender>>,
}

/// Makes a stage, or says why it cannot.
type Make<S> = fn(&Parts<'_>) -> Result<Box<S>, String>;

/// A stage, and true if it is on by default.
pub(super) struct StageRow<S: ?Sized> {
    name: &'static str,
    make: Make<S>,
    default: bool,
}

/// In order.
pub(super) const MUTATING: &[StageRow<dyn MutatingStage>] = &[
    StageRow { name: MutatingPolicies::NAME, make: MutatingPolicies::make, default: true },
    StageRow { name: MutatingWebhooks::NAME, make: MutatingWebhooks::make, default: true },
];

/// In order.
pub(super) const VALIDATING: &[StageRow<dyn ValidatingStage>] = &[
    StageRow { name: image_policy::NAME, make: ImagePolicy::make, default: false },
    StageRow { name: ValidatingPolicies::NAME, make: ValidatingPolicies::make, default: true },
    StageRow { name: ValidatingWebhooks::NAME, make: ValidatingWebhooks::make, default: true },
];

/// The names of all stages.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    MUTATING.iter().map(|row| row.name).chain(VALIDATING.iter().map(|row| row.name))
}

/// Makes the stages that work.
pub(super) fn make<'a, S: ?Sized>(
    rows: &[StageRow<S>],
    works: &dyn Fn(&str, bool) -> bool,
    parts: &dyn Fn(&str) -> Parts<'a>,
) -> Result<Vec<Box<S>>, String> {
    let working = rows.iter().filter(|row| works(row.name, row.default));
    working
        .map(|row| {
            (row.make)(&parts(row.name))
                .map_err(|why| format!("admission plugin {} cannot be turned on: {why}", row.name))
        })
        .collect()
}
