//! The status of a ResourceClaim has several writers: schedulers bind claims to devices, and each driver reports on its own
//! devices. The right to write the status alone is the right to neither: upstream's gate
//! `DRAResourceClaimGranularStatusAuthorization`.

use super::{Action, Grant, Rbac, User, decide, denied};
use crate::registry::View;
use ferrite_api::field::{FieldError, FieldErrors, Path};
use ferrite_api::meta_validation::dns1123_subdomain;
use ferrite_api::quota::amounts::list;
use ferrite_json::Value;
use std::collections::BTreeSet;

const GROUP: &str = "resource.k8s.io";
const PLURAL: &str = "resourceclaims";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Checks a change of the status of a claim. `verb` is that of the request.
pub(crate) fn check(rbac: &Rbac, view: &View, grant: &Grant<'_>, verb: &str) -> FieldErrors {
    if grant.resource.group != GROUP || grant.resource.plural != PLURAL || grant.user.is_master() {
        return Vec::new();
    }
    let nothing = Value::Null;
    let (new, old) = (&grant.new["status"], grant.old.map_or(&nothing, |old| &old["status"]));
    let mut errors = Vec::new();
    let path = Path::new("status");
    if binds(new, old) {
        let action = action(verb, "binding", "", "");
        if let Some(why) = refusal(rbac, view, grant.user, &action) {
            let why = format!(
                "changing status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\", verb=\"{verb}\" permission: {why}"
            );
            errors.push(FieldError::forbidden(&path.child("allocation"), why));
        }
    }
    // Reports on devices go with the devices.
    if new["allocation"].is_object() {
        let verbs = driver_verbs(verb, grant.user, &new["allocation"]);
        for driver in drivers(new, old) {
            let refused = verbs.iter().map(|verb| {
                refusal(rbac, view, grant.user, &action(verb, "driver", grant.namespace, driver))
            });
            // The first refusal is reported, unless another verb is allowed.
            let refused: Option<Vec<String>> = refused.collect();
            if let Some(why) = refused.as_ref().and_then(|refused| refused.first()) {
                let verbs = verbs.join(" ");
                let why = format!(
                    "changing status.devices requires resource=\"resourceclaims/driver\", verb=\"[{verbs}]\" permission: {why}"
                );
                errors.push(FieldError::forbidden(&path.child("devices"), why));
            }
        }
    }
    errors
}

fn action(verb: &str, subresource: &str, namespace: &str, name: &str) -> Action {
    Action {
        verb: verb.into(),
        group: GROUP.into(),
        resource: PLURAL.into(),
        subresource: subresource.into(),
        namespace: namespace.into(),
        name: name.into(),
        ..Action::default()
    }
}

fn refusal(rbac: &Rbac, view: &View, user: &User, action: &Action) -> Option<String> {
    let decision = decide(rbac, view, user, action);
    (!decision.allowed).then(|| denied(user, action, &decision.reason).message)
}

/// True if devices are given, taken or reserved.
fn binds(new: &Value, old: &Value) -> bool {
    new["allocation"] != old["allocation"] || list(new, "reservedFor") != list(old, "reservedFor")
}

/// The drivers whose reports were added, removed or changed.
fn drivers<'a>(new: &'a Value, old: &'a Value) -> BTreeSet<&'a str> {
    let changed = |these: &'a Value, others: &'a Value| {
        let others = list(others, "devices");
        let same = move |device: &Value| others.iter().any(|other| other == device);
        let changed = list(these, "devices").iter().filter(move |device| !same(device));
        changed.map(|device| device["driver"].as_str().unwrap_or_default())
    };
    changed(new, old).chain(changed(old, new)).collect()
}

/// The verbs of which one suffices. The account of a pod on the node that the claim is for has a right of its own.
fn driver_verbs(verb: &str, user: &User, allocation: &Value) -> Vec<String> {
    let mut verbs = vec![format!("arbitrary-node:{verb}")];
    if node_of(allocation).is_some_and(|node| is_at(user, node)) {
        verbs.insert(0, format!("associated-node:{verb}"));
    }
    verbs
}

/// The only node that an allocation can be used on.
fn node_of(allocation: &Value) -> Option<&str> {
    let [term] = list(&allocation["nodeSelector"], "nodeSelectorTerms") else { return None };
    let ([], [field]) = (list(term, "matchExpressions"), list(term, "matchFields")) else { return None };
    let [name] = list(field, "values") else { return None };
    let is_name = field["key"] == "metadata.name" && field["operator"] == "In";
    name.as_str().filter(|name| is_name && !name.is_empty())
}

/// True for a service account whose token is bound to a pod of the node.
fn is_at(user: &User, node: &str) -> bool {
    let account = user.name.strip_prefix("system:serviceaccount:");
    let is_account = account
        .and_then(|account| account.split_once(':'))
        .is_some_and(|(namespace, name)| !namespace.is_empty() && !name.is_empty() && !name.contains(':'));
    let names = user.extra.get(NODE_NAME).map(Vec::as_slice).unwrap_or_default();
    is_account && matches!(names, [name] if name == node && dns1123_subdomain(name).is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn only_drivers_whose_reports_changed_are_asked_for() {
        let status = |devices: &[(&str, &str, &str)]| {
            let devices: Vec<Value> = devices
                .iter()
                .map(|(driver, device, data)| json!({"driver": driver, "pool": "p", "device": device, "data": data}))
                .collect();
            json!({ "devices": devices })
        };
        let old = status(&[("a", "1", "x"), ("b", "1", "x")]);
        for (new, expected) in [
            (old.clone(), &[][..]),
            (status(&[("b", "1", "x"), ("a", "1", "x")]), &[]),
            (status(&[("a", "1", "y"), ("b", "1", "x")]), &["a"]),
            (status(&[("a", "1", "x")]), &["b"]),
            (status(&[("a", "1", "x"), ("b", "1", "x"), ("c", "1", "x")]), &["c"]),
            (json!({}), &["a", "b"]),
        ] {
            assert_eq!(drivers(&new, &old).into_iter().collect::<Vec<_>>(), expected, "{new}");
        }
    }

    #[test]
    fn accounts_of_pods_on_the_claims_node_are_told_apart() {
        let at = |values: Value| {
            json!({"nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": values}]}]}})
        };
        let user = |name: &str, nodes: &[&str]| {
            let mut user = User::new(name, [""; 0]);
            user.extra.insert(NODE_NAME.into(), nodes.iter().map(|node| (*node).to_owned()).collect());
            user
        };
        let account = "system:serviceaccount:ns:driver";
        let (near, far) =
            (vec!["associated-node:update", "arbitrary-node:update"], vec!["arbitrary-node:update"]);
        for (user, allocation, expected) in [
            (user(account, &["n"]), at(json!(["n"])), &near),
            (user(account, &["m"]), at(json!(["n"])), &far),
            (user(account, &["n", "m"]), at(json!(["n"])), &far),
            (user(account, &[]), at(json!(["n"])), &far),
            (user("mallory", &["n"]), at(json!(["n"])), &far),
            (user(account, &["n"]), at(json!(["n", "m"])), &far),
            (user(account, &["n"]), json!({}), &far),
        ] {
            assert_eq!(driver_verbs("update", &user, &allocation), *expected, "{} {allocation}", user.name);
        }
    }
}
