//! Nobody gives away more than they have: roles and bindings are checked against their author's own rights.

use super::rbac::Rule;
use super::{Action, Rbac, User, decide};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::meta;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use std::collections::BTreeSet;

const GROUP: &str = "rbac.authorization.k8s.io";

/// A role or binding that is about to be written.
pub(crate) struct Grant<'a> {
    pub user: &'a User,
    pub resource: &'a Resource,
    pub namespace: &'a str,
    /// The name in the request's path; a create has none. As upstream, a right to escalate some names by `resourceNames`
    /// is therefore no right to create them.
    pub requested: &'a str,
    /// The stored object, if there is one.
    pub old: Option<&'a Value>,
    pub new: &'a Value,
}

/// Checks a role or binding that is about to be written.
pub(crate) fn check(rbac: &Rbac, view: &View, grant: &Grant<'_>) -> Result<(), Status> {
    let Grant { user, resource, namespace, new, .. } = grant;
    if resource.group != GROUP || user.is_master() {
        return Ok(());
    }
    if grant.old.is_some_and(|old| only_for_garbage_collection(new, old)) {
        return Ok(());
    }
    let may = |verb: &str, plural: &str, name: &str| {
        let action = Action {
            verb: verb.into(),
            group: GROUP.into(),
            version: "*".into(),
            resource: plural.into(),
            namespace: (*namespace).into(),
            name: name.into(),
            ..Action::default()
        };
        decide(rbac, view, user, &action).allowed
    };
    let forbidden = |why: &str| Err(Status::forbidden(GROUP, &resource.plural, meta::name(new), why));
    let held = || rbac.rules_for(user, namespace);
    match &*resource.plural {
        plural @ ("roles" | "clusterroles") => {
            if may("escalate", plural, grant.requested) {
                return Ok(());
            }
            let held = held();
            if let Some(why) = missing(user, &held, &Rule::all(new)) {
                return forbidden(&why);
            }
            // An aggregation rule can gather anything, and keep an administrator from taking rights away.
            let aggregates = aggregates(new) || grant.old.is_some_and(aggregates);
            if aggregates && missing(user, &held, &Rule::everything()).is_some() {
                return forbidden("must have cluster-admin privileges to use the aggregationRule");
            }
            Ok(())
        }
        "rolebindings" | "clusterrolebindings" => {
            let text = |p: &str| new.pointer(p).and_then(Value::as_str).unwrap_or_default();
            let role = text("/roleRef/name");
            let (plural, within) = match text("/roleRef/kind") {
                "Role" => ("roles", *namespace),
                "ClusterRole" => ("clusterroles", ""),
                // No such role can be bound: validation says so.
                _ => return Ok(()),
            };
            if may("bind", plural, role) {
                return Ok(());
            }
            let Some(role) = view.get(GROUP, plural, within, role) else {
                // As upstream: a missing role is reported as the binding's own kind.
                return Err(Status::not_found(GROUP, &resource.plural, role));
            };
            missing(user, &held(), &Rule::all(&role)).map_or(Ok(()), |why| forbidden(&why))
        }
        _ => Ok(()),
    }
}

/// Returns true if an update changes only the fields that the garbage collector changes. Everything else
/// counts: a label alone can add a role's rules to an aggregated one.
fn only_for_garbage_collection(new: &Value, old: &Value) -> bool {
    let stripped = |object: &Value| {
        let mut object = object.clone();
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["ownerReferences", "finalizers", "selfLink", "managedFields"] {
                metadata.remove(field);
            }
        }
        object
    };
    stripped(new) == stripped(old)
}

fn aggregates(role: &Value) -> bool {
    let selectors = role.pointer("/aggregationRule/clusterRoleSelectors").and_then(Value::as_array);
    selectors.is_some_and(|selectors| !selectors.is_empty())
}

/// The reason why a user who holds some rules may not grant others; none if they may.
fn missing(user: &User, held: &[Rule], given: &[Rule]) -> Option<String> {
    let mut missing: Vec<Rule> = Vec::new();
    for rule in given.iter().flat_map(Rule::broken_down) {
        let covered = held.iter().any(|held| held.covers_rule(&rule));
        if !covered && !missing.iter_mut().any(|other| other.absorb(&rule)) {
            missing.push(rule);
        }
    }
    if missing.is_empty() {
        return None;
    }
    let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
    let missing: BTreeSet<String> = missing.iter().map(Rule::compact).collect();
    Some(format!(
        "user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
        user.name,
        groups.join(" "),
        missing.into_iter().collect::<Vec<_>>().join("\n")
    ))
}

#[cfg(test)]
mod tests;
