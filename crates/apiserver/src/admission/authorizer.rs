//! The value of `authorizer` in expressions of admission.

use crate::admission::Attributes;
use crate::auth::{Action, Answers, Decision, Rbac, User, decide};
use crate::registry::View;
use ferrite_cel::{AuthorizationDecision, Authorizer, AuthorizerValue, Check, Value as Cel};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Decides as the server's own authorization does, for the user of a request or for a service account. The same
/// question gets the same answer for the length of a request.
struct RequestAuthorizer {
    rbac: Arc<Rbac>,
    view: View,
    user: User,
    decided: Mutex<HashMap<String, AuthorizationDecision>>,
    answers: Arc<Answers>,
}

impl Authorizer for RequestAuthorizer {
    fn authorize(&self, check: &Check) -> AuthorizationDecision {
        let question = format!("{check:?}");
        let mut decided = self.decided.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = decided.get(&question) {
            return known.clone();
        }
        let Decision { allowed, reason, error, pending, .. } = self.decide(check);
        let decision = AuthorizationDecision { allowed, reason, error };
        if !pending {
            decided.insert(question, decision.clone());
        }
        decision
    }
}

impl RequestAuthorizer {
    fn decide(&self, check: &Check) -> Decision {
        let account = check.service_account.as_ref().map(|(namespace, name)| User {
            // As upstream: a service account in an expression is not in `system:authenticated`.
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")],
            ..User::default()
        });
        let mut action = Action {
            verb: check.verb.clone(),
            group: check.group.clone(),
            resource: check.resource.clone(),
            subresource: check.subresource.clone(),
            namespace: check.namespace.clone(),
            name: check.name.clone(),
            version: "*".to_owned(),
            path: check.path.clone(),
            ..Action::default()
        };
        action.select(&check.field_selector, &check.label_selector);
        let user = account.as_ref().unwrap_or(&self.user);
        self.answers.enter(|| decide(&self.rbac, &self.view, user, &action))
    }
}

/// The values of `authorizer` and `authorizer.requestResource`. Expressions that read them are evaluated within
/// [`Answers::settle`].
pub(super) fn authorizer(
    view: &View,
    attributes: &Attributes<'_>,
    answers: &Arc<Answers>,
) -> (Cel<'static>, Cel<'static>) {
    let authorizer: Arc<dyn Authorizer> = Arc::new(RequestAuthorizer {
        rbac: Arc::clone(attributes.rbac),
        view: view.clone(),
        user: attributes.user.clone(),
        decided: Mutex::default(),
        answers: Arc::clone(answers),
    });
    let check = Check {
        group: attributes.resource.group.to_string(),
        resource: attributes.resource.plural.to_string(),
        subresource: attributes.subresource.unwrap_or_default().to_owned(),
        namespace: attributes.given_namespace().to_owned(),
        name: attributes.given_name().to_owned(),
        ..Check::default()
    };
    let resource = AuthorizerValue::request_resource(Arc::clone(&authorizer), check);
    (AuthorizerValue::authorizer(authorizer), resource)
}
