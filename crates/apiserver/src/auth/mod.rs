//! Authentication and authorization.

mod action;
mod authorization;
mod authorization_config;
mod bearer;
pub(crate) mod bootstrap_token;
mod certificate;
mod claim_status;
mod config_file;
mod decide;
mod escalation;
mod impersonation;
mod jwt;
mod legacy_tokens;
mod modes;
pub(crate) mod node;
mod param_access;
mod pod_certificate_status;
mod rbac;
mod request_header;
mod static_tokens;
pub(crate) mod token;
mod token_webhook;
mod user;
mod webhook_authorizer;
mod websocket_token;

pub(crate) use action::Action;
pub(crate) use authorization::reload as reload_authorization;
pub use authorization::{Authorization, AuthorizationError};
pub use authorization_config::{AuthorizationConfig, AuthorizationConfigError};
pub(crate) use certificate::{Client, RefusedCertificate};
pub(crate) use claim_status::check as check_claim_status;
pub(crate) use decide::{Answers, Decision, aggregate, decide, settled};
pub(crate) use escalation::{Grant, check as check_escalation};
pub(crate) use impersonation::{forget as forget_impersonation, impersonate, impersonates};
pub(crate) use jwt::JwtAuthenticator;
pub use jwt::{AuthenticationConfig, AuthenticationConfigError, JwtAuthentication, OidcFlags};
pub(crate) use legacy_tokens::LegacyTokens;
pub(crate) use modes::usual as usual_modes;
pub use modes::{AbacPolicy, Mode, PolicyFileError};
pub(crate) use param_access::check as check_param_access;
pub(crate) use pod_certificate_status::check as check_pod_certificate_status;
pub(crate) use rbac::{Held, Rbac, Rule};
pub use request_header::RequestHeader;
pub(crate) use request_header::{FrontProxies, forget as forget_front_proxy};
pub use static_tokens::{StaticTokens, TokenFileError};
pub(crate) use token::bearer as bearer_token;
pub use token_webhook::TokenWebhook;
pub(crate) use token_webhook::{TokenVerdict, TokenWebhookAuthenticator, meant_for};
pub use user::User;
pub use webhook_authorizer::{AuthorizerWebhook, WebhookAuthorizer};
pub(crate) use websocket_token::{forget as forget_websocket_token, token as websocket_token};

use crate::registry::View;
use ferrite_api::Status;

/// Refuses an action that is not allowed.
pub(crate) async fn authorize(rbac: &Rbac, view: &View, user: &User, action: &Action) -> Result<(), Status> {
    let decision = settled(rbac, || decide(rbac, view, user, action)).await;
    if decision.allowed { Ok(()) } else { Err(denied(user, action, &decision.reason)) }
}

pub(crate) fn denied(user: &User, action: &Action, reason: &str) -> Status {
    let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    if let Some(path) = &action.path {
        let message = format!("forbidden: User {:?} cannot {} path {path:?}{why}", user.name, action.verb);
        return Status::new(403, "Forbidden", message).with_empty_details();
    }
    let resource = match action.subresource.as_str() {
        "" => action.resource.clone(),
        subresource => format!("{}/{subresource}", action.resource),
    };
    let scope = match action.namespace.as_str() {
        "" => "at the cluster scope".into(),
        namespace => format!("in the namespace {namespace:?}"),
    };
    Status::forbidden(
        &action.group,
        &action.resource,
        &action.name,
        &format!(
            "User {:?} cannot {} resource {resource:?} in API group {:?} {scope}{why}",
            user.name, action.verb, action.group
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Query;
    use crate::request::{Route, Verb, route};

    #[test]
    fn a_refusal_names_user_verb_and_resource() {
        let user = User::new("mallory", ["developers"]);
        let path = "/api/v1/namespaces/x/pods/web/log";
        let action = Action::of(&route(path), Some(Verb::Get), &http::Method::GET, path, &Query::default());
        assert_eq!(
            denied(&user, &action, "").message,
            r#"pods "web" is forbidden: User "mallory" cannot get resource "pods/log" in API group "" in the namespace "x""#
        );
        let action = Action::of(&Route::Metrics, None, &http::Method::GET, "/metrics", &Query::default());
        assert_eq!(
            denied(&user, &action, "").message,
            r#"forbidden: User "mallory" cannot get path "/metrics""#
        );
    }
}
