//! A user who lets a policy read parameters must be able to read them: messages of a policy can show them
//! to others.

use super::{Action, Grant, Rbac, User, decide};
use crate::registry::View;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::policy::param_kind;
use ferrite_json::Value;

const GROUP: &str = "admissionregistration.k8s.io";

/// Checks a policy or binding that is about to be written and is otherwise valid.
pub(crate) fn check(rbac: &Rbac, view: &View, grant: &Grant<'_>) -> Option<FieldError> {
    if grant.resource.group != GROUP || grant.user.is_master() {
        return None;
    }
    let spec = &grant.new["spec"];
    match &*grant.resource.plural {
        "validatingadmissionpolicies" | "mutatingadmissionpolicies" => {
            let same = grant.old.is_some_and(|old| old["spec"].get("paramKind") == spec.get("paramKind"));
            if same {
                return None;
            }
            of_policy(rbac, view, grant.user, spec)
        }
        "validatingadmissionpolicybindings" => {
            of_binding(rbac, view, grant.user, spec, "validatingadmissionpolicies")
        }
        "mutatingadmissionpolicybindings" => {
            of_binding(rbac, view, grant.user, spec, "mutatingadmissionpolicies")
        }
        _ => None,
    }
}

/// The group and the resource of a kind; a star where there is none.
fn resolved(view: &View, (group, version, kind): (&str, &str, &str)) -> (String, Option<String>) {
    let found = view.of_kind(group, version, kind);
    (group.to_owned(), found.map(|resource| resource.plural.to_string()))
}

fn of_policy(rbac: &Rbac, view: &View, user: &User, spec: &Value) -> Option<FieldError> {
    let kind = param_kind(spec)?;
    let (group, resource) = resolved(view, kind);
    let action = Action {
        verb: "get".into(),
        group,
        version: kind.1.to_owned(),
        resource: resource.unwrap_or_else(|| "*".into()),
        namespace: "*".into(),
        name: "*".into(),
        ..Action::default()
    };
    if decide(rbac, view, user, &action).allowed {
        return None;
    }
    let version = spec["paramKind"]["apiVersion"].as_str().unwrap_or_default();
    let why = format!(
        "user {} must have \"get\" permission on all objects of the referenced paramKind (kind={}, apiVersion={version})",
        shown(user),
        kind.2
    );
    Some(FieldError::forbidden(&Path::new("spec").child("paramKind"), why))
}

fn of_binding(rbac: &Rbac, view: &View, user: &User, spec: &Value, policies: &str) -> Option<FieldError> {
    let reference = spec.get("paramRef").filter(|reference| reference.is_object())?;
    let text = |key: &str| reference.get(key).and_then(Value::as_str).unwrap_or_default();
    let name = spec["policyName"].as_str().unwrap_or_default();
    let policy = view.get(GROUP, policies, "", name);
    let kind = policy.as_deref().and_then(|policy| param_kind(&policy["spec"]));
    let (group, resource) = kind.map_or(("*".to_owned(), None), |kind| resolved(view, kind));
    let verb = if text("name").is_empty() { "list" } else { "get" };
    let unresolved = kind.is_some() && resource.is_none();
    let action = Action {
        verb: verb.into(),
        group,
        version: kind.map_or("*", |kind| kind.1).to_owned(),
        resource: resource.unwrap_or_else(|| "*".into()),
        namespace: text("namespace").into(),
        name: text("name").into(),
        ..Action::default()
    };
    if decide(rbac, view, user, &action).allowed {
        return None;
    }
    let user = shown(user);
    let why = match (&policy, kind) {
        (None, _) => format!(
            "unable to get policy {name} to determine minimum required permissions and user {user} does not have \"{verb}\" permission for all groups, versions and resources"
        ),
        (Some(policy), Some((_, _, kind))) if unresolved => {
            let version = policy["spec"]["paramKind"]["apiVersion"].as_str().unwrap_or_default();
            format!(
                "unable to resolve paramKind &ParamKind{{APIVersion:{version},Kind:{kind},}} to determine minimum required permissions and user {user} does not have \"{verb}\" permission for all groups, versions and resources"
            )
        }
        _ => format!("user {user} does not have \"{verb}\" permission on the object referenced by paramRef"),
    };
    Some(FieldError::forbidden(&Path::new("spec").child("paramRef"), why))
}

/// A user as Go prints one.
fn shown(user: &User) -> String {
    let extra: Vec<String> =
        user.extra.iter().map(|(key, values)| format!("{key}:[{}]", values.join(" "))).collect();
    format!("&{{{} {} [{}] map[{}]}}", user.name, user.uid, user.groups.join(" "), extra.join(" "))
}
