//! The value of `authorizer` in expressions of admission.

use crate::admission::Attributes;
use crate::auth::{Action, Rbac, User, decide};
use crate::registry::View;
use ferrite_api::selector::FieldSelector;
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
}

impl Authorizer for RequestAuthorizer {
    fn authorize(&self, check: &Check) -> AuthorizationDecision {
        let question = format!("{check:?}");
        let mut decided = self.decided.lock().unwrap_or_else(PoisonError::into_inner);
        decided.entry(question).or_insert_with(|| self.decide(check)).clone()
    }
}

impl RequestAuthorizer {
    fn decide(&self, check: &Check) -> AuthorizationDecision {
        let account = check.service_account.as_ref().map(|(namespace, name)| User {
            // As upstream: a service account in an expression is not in `system:authenticated`.
            name: format!("system:serviceaccount:{namespace}:{name}"),
            groups: vec!["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")],
            ..User::default()
        });
        let selector = FieldSelector::parse(&check.field_selector).unwrap_or_default();
        let exact = selector.terms().iter().filter(|term| term.equal);
        let action = Action {
            verb: check.verb.clone(),
            group: check.group.clone(),
            resource: check.resource.clone(),
            subresource: check.subresource.clone(),
            namespace: check.namespace.clone(),
            name: check.name.clone(),
            fields: exact.map(|term| (term.field.clone(), term.value.clone())).collect(),
            path: check.path.clone(),
        };
        let decision = decide(&self.rbac, &self.view, account.as_ref().unwrap_or(&self.user), &action);
        AuthorizationDecision { allowed: decision.allowed, reason: decision.reason, error: None }
    }
}

/// The values of `authorizer` and `authorizer.requestResource`.
pub(super) fn authorizer(view: &View, attributes: &Attributes<'_>) -> (Cel<'static>, Cel<'static>) {
    let authorizer: Arc<dyn Authorizer> = Arc::new(RequestAuthorizer {
        rbac: Arc::clone(attributes.rbac),
        view: view.clone(),
        user: attributes.user.clone(),
        decided: Mutex::default(),
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
