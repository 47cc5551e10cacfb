//! Nobody gives away more than they have: roles and bindings are checked against their author's own rights.

use super::rbac::Rule;
use super::{Action, Rbac, User, decide};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::meta;
use ferrite_api::resource::Resource;
use ferrite_json::Value;

const GROUP: &str = "rbac.authorization.k8s.io";

/// Checks a role or binding that is about to be written.
pub(crate) fn check(
    rbac: &Rbac,
    view: &View,
    user: &User,
    resource: &Resource,
    namespace: &str,
    object: &Value,
) -> Result<(), Status> {
    if resource.group != GROUP || user.is_master() {
        return Ok(());
    }
    let name = meta::name(object);
    let may = |verb: &str, plural: &str, name: &str| {
        let action = Action {
            verb: verb.into(),
            group: GROUP.into(),
            resource: plural.into(),
            namespace: namespace.into(),
            name: name.into(),
            ..Action::default()
        };
        decide(rbac, view, user, &action).allowed
    };
    let rules = match &*resource.plural {
        "roles" | "clusterroles" if may("escalate", &resource.plural, name) => return Ok(()),
        "roles" | "clusterroles" => Rule::all(object),
        "rolebindings" | "clusterrolebindings" => {
            let text = |p: &str| object.pointer(p).and_then(Value::as_str).unwrap_or_default();
            let role = text("/roleRef/name");
            let (plural, within) = match text("/roleRef/kind") {
                "Role" => ("roles", namespace),
                _ => ("clusterroles", ""),
            };
            if may("bind", plural, role) {
                return Ok(());
            }
            let Some(role) = view.get(GROUP, plural, within, role) else {
                // As upstream: what is not found is told as the binding's own kind.
                return Err(Status::not_found(GROUP, &resource.plural, role));
            };
            Rule::all(&role)
        }
        _ => return Ok(()),
    };
    let held = |action: &Action| rbac.decide(user, action).allowed;
    let missing: Vec<String> = rules.iter().filter_map(|rule| rule.not_held(namespace, &held)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
    let why = format!(
        "user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
        user.name,
        groups.join(" "),
        missing.join("\n")
    );
    Err(Status::forbidden(GROUP, &resource.plural, name, &why))
}
