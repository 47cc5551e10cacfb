//! What expressions of admission read of a request: `request` and `authorizer`.

use super::{Attributes, Operation};
use crate::auth::{Action, Rbac, User, decide};
use crate::registry::View;
use ferrite_api::resource::Resource;
use ferrite_api::selector::FieldSelector;
use ferrite_api::{Gvk, Gvr};
use ferrite_cel::{AuthorizationDecision, Authorizer, AuthorizerValue, Check, Value as Cel};
use ferrite_json::{Map, Value, json};
use std::sync::Arc;

/// The kind of the object as one matched as `matched` sees it.
pub(crate) fn matched_kind(attributes: &Attributes<'_>, matched: &Resource) -> Gvk {
    let own = attributes.kind();
    if own == attributes.resource.gvk() { matched.gvk() } else { own }
}

/// The fields of an AdmissionRequest but for its UID and objects.
pub(crate) fn request(attributes: &Attributes<'_>, matched: &Resource) -> Map {
    let kind = |gvk: &Gvk| json!({"group": gvk.group, "version": gvk.version, "kind": gvk.kind});
    let resource = |gvr: &Gvr| json!({"group": gvr.group, "version": gvr.version, "resource": gvr.resource});
    let mut request = Map::new();
    request.insert("kind", kind(&matched_kind(attributes, matched)));
    request.insert("resource", resource(&matched.gvr()));
    request.insert("requestKind", kind(&attributes.kind()));
    request.insert("requestResource", resource(&attributes.resource.gvr()));
    if let Some(subresource) = attributes.subresource {
        request.insert("subResource", subresource.into());
        request.insert("requestSubResource", subresource.into());
    }
    for (key, text) in [("name", attributes.given_name()), ("namespace", attributes.given_namespace())] {
        if !text.is_empty() {
            request.insert(key, text.into());
        }
    }
    request.insert("operation", attributes.operation.name().into());
    request.insert("userInfo", user_info(attributes.user));
    request.insert("dryRun", attributes.options.dry_run.into());
    request.insert("options", options(attributes));
    request
}

fn user_info(user: &User) -> Value {
    let mut info = Map::new();
    for (key, text) in [("username", &user.name), ("uid", &user.uid)] {
        if !text.is_empty() {
            info.insert(key, text.as_str().into());
        }
    }
    if !user.groups.is_empty() {
        info.insert("groups", json!(user.groups));
    }
    if !user.extra.is_empty() {
        info.insert("extra", json!(user.extra));
    }
    info.into()
}

fn options(attributes: &Attributes<'_>) -> Value {
    let kind = match attributes.operation {
        Operation::Create => "CreateOptions",
        Operation::Update => "UpdateOptions",
        Operation::Delete => "DeleteOptions",
        Operation::Connect => return Value::Null,
    };
    attributes.options.as_sent(kind)
}

/// Decides as the server's own authorization does, for the user of a request or for a service account.
struct RequestAuthorizer {
    rbac: Arc<Rbac>,
    view: View,
    user: User,
}

impl Authorizer for RequestAuthorizer {
    fn authorize(&self, check: &Check) -> AuthorizationDecision {
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
pub(crate) fn authorizer(view: &View, attributes: &Attributes<'_>) -> (Cel<'static>, Cel<'static>) {
    let authorizer: Arc<dyn Authorizer> = Arc::new(RequestAuthorizer {
        rbac: Arc::clone(attributes.rbac),
        view: view.clone(),
        user: attributes.user.clone(),
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
