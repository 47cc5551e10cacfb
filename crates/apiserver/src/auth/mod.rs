//! Authentication and authorization.

pub(crate) mod bootstrap_token;
mod certificate;
mod claim_status;
mod escalation;
mod impersonation;
mod jwt;
mod legacy_tokens;
mod modes;
pub(crate) mod node;
mod param_access;
mod rbac;
mod request_header;
mod static_tokens;
pub(crate) mod token;
mod user;

pub(crate) use certificate::{Client, RefusedCertificate};
pub(crate) use claim_status::check as check_claim_status;
pub(crate) use escalation::{Grant, check as check_escalation};
pub(crate) use impersonation::{forget as forget_impersonation, impersonate, impersonates};
pub(crate) use jwt::JwtAuthenticator;
pub use jwt::{AuthenticationConfig, AuthenticationConfigError, JwtAuthentication, OidcFlags};
pub(crate) use legacy_tokens::LegacyTokens;
pub(crate) use modes::usual as usual_modes;
pub use modes::{AbacPolicy, Mode, PolicyFileError};
pub(crate) use param_access::check as check_param_access;
pub(crate) use rbac::{Rbac, Rule};
pub use request_header::RequestHeader;
pub(crate) use request_header::{FrontProxies, forget as forget_front_proxy};
pub use static_tokens::{StaticTokens, TokenFileError};
pub(crate) use token::bearer as bearer_token;
pub use user::User;

use crate::options::Query;
use crate::registry::View;
use crate::request::{Route, Target, Verb};
use ferrite_api::Status;
use ferrite_api::selector::FieldSelector;
use ferrite_component::metrics::{Counter, Family, registry};
use std::sync::{Arc, LazyLock};

/// An action as policies describe it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Action {
    pub verb: String,
    pub group: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    /// Fields that a list is narrowed to, each with its only value.
    pub fields: Vec<(String, String)>,
    /// A path that is no resource's. The rest is then empty.
    pub path: Option<String>,
}

impl Action {
    /// The action of a request.
    pub fn of(route: &Route, verb: Option<Verb>, method: &http::Method, path: &str, query: &Query) -> Self {
        match route {
            Route::Resource(target) => {
                let mut action = Self::on(target, verb.map_or("", Verb::as_str));
                if matches!(verb, Some(Verb::List | Verb::Watch | Verb::DeleteCollection))
                    && let Ok(selector) = FieldSelector::parse(query.get("fieldSelector").unwrap_or_default())
                {
                    let exact = selector.terms().iter().filter(|term| term.equal);
                    action.fields = exact.map(|term| (term.field.clone(), term.value.clone())).collect();
                    // As upstream: a list of one is about that one.
                    if let Some(name) = action.selects("metadata.name") {
                        action.name = name.to_owned();
                    }
                }
                action
            }
            _ => {
                Self { verb: method.as_str().to_lowercase(), path: Some(path.to_owned()), ..Self::default() }
            }
        }
    }

    pub fn on(target: &Target, verb: &str) -> Self {
        let name = target.name.clone().unwrap_or_default();
        // A namespace is in itself, as upstream sees it.
        let itself = target.group.is_empty() && target.resource == "namespaces" && !name.is_empty();
        let namespace = match &target.namespace {
            Some(namespace) => namespace.clone(),
            None if itself => name.clone(),
            None => String::new(),
        };
        Self {
            verb: verb.to_owned(),
            group: target.group.clone(),
            resource: target.resource.clone(),
            subresource: target.subresource.clone().unwrap_or_default(),
            namespace,
            name,
            ..Self::default()
        }
    }

    /// The only value of a field that a list is narrowed to.
    pub fn selects(&self, field: &str) -> Option<&str> {
        self.fields.iter().find(|(name, _)| name == field).map(|(_, value)| value.as_str())
    }
}

/// The answer to whether somebody may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    pub allowed: bool,
    pub reason: String,
}

/// As upstream: an authorizer that has no opinion decides nothing, so that only grants are counted.
static DECISIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let help = "Decisions of authorizers that no other authorizer could change.";
    registry().counter("apiserver_authorization_decisions_total", help, &["decision", "name", "type"])
});
static BY_NODE: LazyLock<Arc<Counter>> = LazyLock::new(|| DECISIONS.with(&["allowed", "node", "Node"]));
static BY_ROLE: LazyLock<Arc<Counter>> = LazyLock::new(|| DECISIONS.with(&["allowed", "rbac", "RBAC"]));

/// Asks the authorizers in their order; a member of `system:masters` may do everything.
pub(crate) fn decide(rbac: &Rbac, view: &View, user: &User, action: &Action) -> Decision {
    let allowed = || Decision { allowed: true, reason: String::new() };
    if user.is_master() {
        return allowed();
    }
    let mut reasons: Vec<String> = Vec::new();
    for mode in rbac.modes() {
        let decision = match mode {
            Mode::AlwaysAllow => allowed(),
            Mode::AlwaysDeny => Decision { allowed: false, reason: "Everything is forbidden.".into() },
            Mode::Rbac => rbac.decide(user, action),
            Mode::Abac(policy) if policy.allows(user, action) => allowed(),
            Mode::Abac(_) => Decision { allowed: false, reason: "No policy matched.".into() },
            Mode::Node => match node::name(user) {
                Some(name) => node::decide(rbac, view, name, action),
                None => continue,
            },
        };
        if decision.allowed {
            match mode {
                Mode::Node => BY_NODE.increment(),
                Mode::Rbac => BY_ROLE.increment(),
                Mode::AlwaysAllow | Mode::AlwaysDeny | Mode::Abac(_) => {}
            }
            return decision;
        }
        if !decision.reason.is_empty() {
            reasons.push(decision.reason);
        }
    }
    Decision { allowed: false, reason: reasons.join("\n") }
}

/// Refuses an action that is not allowed.
pub(crate) fn authorize(rbac: &Rbac, view: &View, user: &User, action: &Action) -> Result<(), Status> {
    let decision = decide(rbac, view, user, action);
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
    use crate::request::route;

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
