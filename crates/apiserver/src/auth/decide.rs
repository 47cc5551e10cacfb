//! The decision of all authorizers together.
//!
//! [`decide`] never waits. Where a webhook has a say, it uses the webhook's answers that are known, and notes the question
//! whose answer is missing. [`settled`] asks that question and decides again, until nothing is missing.

use super::modes::Mode;
use super::webhook_authorizer::{Opinion, Question, WebhookAuthorizer};
use super::{Action, Rbac, User, node};
use crate::registry::View;
use ferrite_component::metrics::{Counter, Family, registry};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// The answer to whether somebody may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    pub allowed: bool,
    /// An authorizer has refused for all others. Without it, and without `allowed`, none had an opinion.
    pub denied: bool,
    pub reason: String,
    /// Errors of authorizers that were asked.
    pub error: Option<String>,
    /// The answer of a webhook is missing, and the decision does not count. See [`settled`].
    pub pending: bool,
}

impl Decision {
    fn allowed() -> Self {
        Self { allowed: true, ..Self::default() }
    }

    pub fn no_opinion(reason: &str) -> Self {
        Self { reason: reason.to_owned(), ..Self::default() }
    }
}

/// As upstream: an authorizer that has no opinion decides nothing, so that it is not counted.
static DECISIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Decisions of authorizers that no other authorizer could change.";
    registry().counter("apiserver_authorization_decisions_total", help, &["decision", "name", "type"])
});
static BY_NODE: LazyLock<Arc<Counter>> = LazyLock::new(|| DECISIONS.with(&["allowed", "node", "Node"]));
static BY_ROLE: LazyLock<Arc<Counter>> = LazyLock::new(|| DECISIONS.with(&["allowed", "rbac", "RBAC"]));

fn count(mode: &Mode, decision: &Decision) {
    let word = if decision.allowed { "allowed" } else { "denied" };
    match mode {
        Mode::Node => BY_NODE.increment(),
        Mode::Rbac => BY_ROLE.increment(),
        Mode::AlwaysAllow => DECISIONS.with(&[word, "alwaysallow", "AlwaysAllow"]).increment(),
        Mode::AlwaysDeny => DECISIONS.with(&[word, "alwaysdeny", "AlwaysDeny"]).increment(),
        Mode::Abac(_) => DECISIONS.with(&[word, "abac", "ABAC"]).increment(),
        Mode::Webhook(webhook) => DECISIONS.with(&[word, webhook.name(), "Webhook"]).increment(),
    }
}

/// Asks the authorizers in their order; a member of `system:masters` may do everything.
pub(crate) fn decide(rbac: &Rbac, view: &View, user: &User, action: &Action) -> Decision {
    if user.is_master() {
        return Decision::allowed();
    }
    let mut reasons: Vec<String> = Vec::new();
    let mut errors: Vec<String> = Vec::new();
    for mode in &*rbac.modes() {
        let decision = match mode {
            Mode::AlwaysAllow => Decision::allowed(),
            Mode::AlwaysDeny => Decision::no_opinion("Everything is forbidden."),
            Mode::Rbac => rbac.decide(user, action),
            Mode::Abac(policy) if policy.allows(user, action) => Decision::allowed(),
            Mode::Abac(_) => Decision::no_opinion("No policy matched."),
            Mode::Node => match node::name(user) {
                Some(name) => node::decide(rbac, view, name, action),
                None => continue,
            },
            Mode::Webhook(webhook) => by_webhook(webhook, user, action),
        };
        if decision.pending {
            return decision;
        }
        if decision.allowed || decision.denied {
            count(mode, &decision);
            return decision;
        }
        if !decision.reason.is_empty() {
            reasons.push(decision.reason);
        }
        errors.extend(decision.error);
    }
    Decision { reason: reasons.join("\n"), error: aggregate(errors), ..Decision::default() }
}

/// Several errors in upstream's form.
pub(crate) fn aggregate(mut errors: Vec<String>) -> Option<String> {
    errors.dedup();
    match errors.len() {
        0 => None,
        1 => errors.pop(),
        _ => Some(format!("[{}]", errors.join(", "))),
    }
}

fn by_webhook(webhook: &Arc<WebhookAuthorizer>, user: &User, action: &Action) -> Decision {
    let question = match webhook.question(user, action) {
        Ok(Some(question)) => question,
        Ok(None) => return Decision::default(),
        Err(opinion) => return opinion.decision(),
    };
    let Some(answers) = CURRENT.with_borrow(Clone::clone) else {
        // A caller that cannot wait asks nobody, but may know the answer.
        return match webhook.cached(&question) {
            Some(opinion) => opinion.decision(),
            None => {
                Opinion::failed("the webhook cannot be asked here".to_owned(), webhook.denies_on_failure())
                    .decision()
            }
        };
    };
    match answers.find(webhook, &question).or_else(|| webhook.cached(&question)) {
        Some(opinion) => opinion.decision(),
        None => {
            answers.miss(webhook, question);
            Decision { pending: true, ..Decision::default() }
        }
    }
}

thread_local! {
    /// The answers that decisions on this thread may use and add questions to.
    static CURRENT: RefCell<Option<Arc<Answers>>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Known {
    /// By the webhook's name and the question.
    opinions: HashMap<(String, String), Opinion>,
    missing: Option<(Arc<WebhookAuthorizer>, Question)>,
}

/// The answers of webhooks that the decisions about one request share.
#[derive(Default)]
pub(crate) struct Answers(Mutex<Known>);

/// Puts the former answers back, also when a decision panics.
struct Entered(Option<Arc<Answers>>);

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, webhook: &WebhookAuthorizer, question: &Question) -> Option<Opinion> {
        self.lock().opinions.get(&(webhook.name().to_owned(), question.key.clone())).cloned()
    }

    fn miss(&self, webhook: &Arc<WebhookAuthorizer>, question: Question) {
        self.lock().missing.get_or_insert_with(|| (Arc::clone(webhook), question));
    }

    /// Decides with these answers, on whichever thread.
    pub fn enter<T>(self: &Arc<Self>, decide: impl FnOnce() -> T) -> T {
        let _entered = Entered(CURRENT.replace(Some(Arc::clone(self))));
        decide()
    }

    /// Decides, asks webhooks for the answers that are missing, and decides again. `decide` may run several times: only
    /// the result of the last counts.
    pub async fn settle<T>(self: &Arc<Self>, mut decide: impl FnMut() -> T) -> T {
        loop {
            let result = self.enter(&mut decide);
            let Some((webhook, question)) = self.lock().missing.take() else { return result };
            let opinion = webhook.ask(&question).await;
            self.lock().opinions.insert((webhook.name().to_owned(), question.key), opinion);
        }
    }
}

/// Decides with the answers of webhooks, if there are any webhooks. See [`Answers::settle`].
pub(crate) async fn settled<T>(rbac: &Rbac, mut decide: impl FnMut() -> T) -> T {
    match rbac.asks_webhooks() {
        false => decide(),
        true => Arc::new(Answers::default()).settle(decide).await,
    }
}
