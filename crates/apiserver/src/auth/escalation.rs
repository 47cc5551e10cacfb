//! Nobody gives away more than they have: roles and bindings are checked against their author's own rights.

use super::rbac::{Held, Part, Rule};
use super::{Action, Rbac, User, aggregate, decide};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::meta;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use std::collections::{BTreeSet, HashMap};

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
            if let Some(why) = missing(user, &held.rules, &Rule::all(new)) {
                return forbidden(&(why + &unresolved(&held)));
            }
            // An aggregation rule can gather anything, and keep an administrator from taking rights away.
            let aggregates = aggregates(new) || grant.old.is_some_and(aggregates);
            if aggregates && missing(user, &held.rules, &Rule::everything()).is_some() {
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
            let held = held();
            let why = missing(user, &held.rules, &Rule::all(&role));
            why.map_or(Ok(()), |why| forbidden(&(why + &unresolved(&held))))
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

/// The most combinations of verb, group, resource and name that are compared one by one. A rule of a few hundred bytes
/// can have millions of them.
const COMPARED: usize = 1_000_000;
/// The most missing rules that an error lists.
const LISTED: usize = 1_000;

/// The reason why a user who holds some rules may not grant others; none if they may.
fn missing(user: &User, held: &[Rule], given: &[Rule]) -> Option<String> {
    let mut missing = Missing::default();
    let mut compared = 0usize;
    for rule in given {
        // One rule that covers the whole spares the parts.
        if held.iter().any(|held| held.covers_rule(rule)) {
            continue;
        }
        compared = compared.saturating_add(rule.combinations());
        if compared > COMPARED {
            let why = format!(
                "user {:?} is attempting to grant more than {COMPARED} combinations of verbs and resources that no single rule of theirs covers: use smaller rules",
                user.name
            );
            return Some(why);
        }
        rule.for_each_not_covered(held, &mut |part| missing.add(part));
    }
    if missing.rules.is_empty() {
        return None;
    }
    let groups: Vec<String> = user.groups.iter().map(|g| format!("{g:?}")).collect();
    let listed: BTreeSet<String> = missing.rules.iter().map(Rule::compact).collect();
    let mut listed: Vec<String> = listed.into_iter().collect();
    if missing.is_full {
        listed.push("and more".to_owned());
    }
    Some(format!(
        "user {:?} (groups=[{}]) is attempting to grant RBAC permissions not currently held:\n{}",
        user.name,
        groups.join(" "),
        listed.join("\n")
    ))
}

/// The end of a refusal for a user with bindings of absent roles.
fn unresolved(held: &Held) -> String {
    let errors = aggregate(held.missing.clone());
    errors.map(|errors| format!("; resolution errors: [{errors}]")).unwrap_or_default()
}

/// Rules of one resource or path each that are not held, with all their verbs.
#[derive(Default)]
struct Missing<'r> {
    rules: Vec<Rule>,
    /// Where the rule of a group, a resource and a name is.
    places: HashMap<(&'r str, &'r str, Option<&'r str>), usize>,
    is_full: bool,
}

impl<'r> Missing<'r> {
    fn add(&mut self, part: &Part<'r>) {
        let place = (part.group, part.resource, part.name);
        if let Some(at) = self.places.get(&place).filter(|_| part.path.is_none()) {
            self.rules[*at].verbs.push(part.verb.to_owned());
            return;
        }
        if self.rules.len() >= LISTED {
            self.is_full = true;
            return;
        }
        // As upstream: rules for paths stay apart.
        if part.path.is_none() {
            self.places.insert(place, self.rules.len());
        }
        self.rules.push(part.rule());
    }
}

#[cfg(test)]
mod tests;
