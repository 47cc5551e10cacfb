//! Updates existing default roles and bindings, as upstream does at every start: missing rules are added,
//! additions of others stay, and an annotation keeps an object as it is.

use crate::auth::Rule;
use ferrite_api::meta;
use ferrite_json::{Map, Value, json};

/// Objects with this annotation set to `false` are left alone.
const AUTO_UPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";

/// The result of reconciling an object.
#[derive(Debug, PartialEq)]
pub(super) enum Reconciled {
    /// It stays, or becomes this.
    Is(Value),
    /// A binding to another role cannot be changed: it is deleted and made anew.
    Recreate,
}

pub(super) fn reconcile(existing: &Value, expected: &Value) -> Reconciled {
    let protected = existing["metadata"]["annotations"].get(AUTO_UPDATE).is_some_and(|v| v == "false");
    if protected {
        return Reconciled::Is(existing.clone());
    }
    if expected.get("roleRef").is_some() {
        return binding(existing, expected);
    }
    Reconciled::Is(role(existing, expected))
}

fn role(existing: &Value, expected: &Value) -> Value {
    let mut role = with_metadata(existing, expected);
    // Rules of an aggregated role are the aggregation controller's.
    let aggregated = expected.get("aggregationRule").is_some_and(|rule| !rule.is_null());
    if !aggregated {
        let held = Rule::all(existing);
        let mut missing: Vec<Value> = Vec::new();
        for rule in Rule::all(expected) {
            rule.for_each_not_covered(&held, &mut |part| {
                let (resources, paths) = part.rule().to_value();
                missing.extend(resources.into_iter().chain(paths));
            });
        }
        append(&mut role, "rules", missing);
        if let Some(role) = role.as_object_mut() {
            role.remove("aggregationRule");
        }
        return role;
    }
    let missing =
        missing_items(&existing["aggregationRule"], &expected["aggregationRule"], "clusterRoleSelectors");
    if !missing.is_empty() {
        if !role["aggregationRule"].is_object() {
            role["aggregationRule"] = json!({});
        }
        append(&mut role["aggregationRule"], "clusterRoleSelectors", missing);
    }
    role
}

fn binding(existing: &Value, expected: &Value) -> Reconciled {
    if existing["roleRef"] != expected["roleRef"] {
        return Reconciled::Recreate;
    }
    let mut binding = with_metadata(existing, expected);
    append(&mut binding, "subjects", missing_items(existing, expected, "subjects"));
    Reconciled::Is(binding)
}

/// The object with the expected labels and annotations where it has none of its own.
fn with_metadata(existing: &Value, expected: &Value) -> Value {
    let mut object = existing.clone();
    for field in ["labels", "annotations"] {
        let wanted = expected["metadata"].get(field).and_then(Value::as_object);
        for (key, value) in wanted.into_iter().flatten() {
            let metadata = meta::metadata_mut(&mut object);
            let map = metadata.entry(field).or_insert_with(|| Value::Object(Map::new()));
            if let Some(map) = map.as_object_mut() {
                map.entry(key.clone()).or_insert(value.clone());
            }
        }
    }
    object
}

/// Items of a list that only the expected object has.
fn missing_items(existing: &Value, expected: &Value, field: &str) -> Vec<Value> {
    let items = |value: &Value| value.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
    let held = items(existing);
    items(expected).into_iter().filter(|item| !held.contains(item)).collect()
}

fn append(object: &mut Value, field: &str, items: Vec<Value>) {
    if items.is_empty() {
        return;
    }
    match object.get_mut(field).and_then(Value::as_array_mut) {
        Some(list) => list.extend(items),
        None => object[field] = items.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role_with(rules: Value, annotations: Value) -> Value {
        json!({"metadata": {"name": "r", "annotations": annotations}, "rules": rules})
    }

    #[test]
    fn rules_that_are_missing_come_back_and_others_stay() {
        let get = json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]});
        let list = json!({"verbs": ["list"], "apiGroups": [""], "resources": ["pods"]});
        let own = json!({"verbs": ["get"], "apiGroups": ["example.com"], "resources": ["*"]});
        let both = json!([{"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods"]}]);
        let auto = json!({AUTO_UPDATE: "true"});
        let expected = role_with(both.clone(), auto.clone());
        for (existing, rules) in [
            (role_with(json!([get, own]), auto.clone()), json!([get, own, list])),
            (role_with(json!([]), auto.clone()), json!([get, list])),
            (role_with(both.clone(), auto.clone()), both.clone()),
            (role_with(json!([]), json!({AUTO_UPDATE: "false"})), json!([])),
        ] {
            let Reconciled::Is(role) = reconcile(&existing, &expected) else {
                panic!("a role is never made anew")
            };
            assert_eq!(role["rules"], rules, "{existing}");
        }
        // Without the annotation, it is added.
        let Reconciled::Is(role) = reconcile(&role_with(both, json!({"a": "b"})), &expected) else {
            panic!()
        };
        assert_eq!(role["metadata"]["annotations"], json!({"a": "b", AUTO_UPDATE: "true"}));
    }

    #[test]
    fn aggregated_roles_keep_their_rules() {
        let selector = |label: &str| json!({"matchLabels": {label: "true"}});
        let rule = json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]);
        let expected = json!({"metadata": {"name": "edit"}, "rules": rule,
            "aggregationRule": {"clusterRoleSelectors": [selector("a")]}});
        let existing = json!({"metadata": {"name": "edit"}, "rules": [],
            "aggregationRule": {"clusterRoleSelectors": [selector("b")]}});
        let Reconciled::Is(role) = reconcile(&existing, &expected) else { panic!() };
        assert_eq!(role["rules"], json!([]));
        assert_eq!(role["aggregationRule"]["clusterRoleSelectors"], json!([selector("b"), selector("a")]));
        // A role that should not aggregate does not any more.
        let plain = json!({"metadata": {"name": "edit"}, "rules": rule});
        let Reconciled::Is(role) = reconcile(&existing, &plain) else { panic!() };
        assert_eq!((role.get("aggregationRule"), &role["rules"]), (None, &rule));
    }

    #[test]
    fn subjects_come_back_and_another_role_makes_a_binding_anew() {
        let subject =
            |name: &str| json!({"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": name});
        let binding = |role: &str, subjects: Value| {
            json!({"metadata": {"name": "b"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": subjects})
        };
        let expected = binding("cluster-admin", json!([subject("system:masters")]));
        let existing = binding("cluster-admin", json!([subject("own")]));
        let Reconciled::Is(is) = reconcile(&existing, &expected) else { panic!() };
        assert_eq!(is["subjects"], json!([subject("own"), subject("system:masters")]));
        let mut bare = binding("cluster-admin", json!([]));
        bare.as_object_mut().unwrap().remove("subjects");
        let Reconciled::Is(is) = reconcile(&bare, &expected) else { panic!() };
        assert_eq!(is["subjects"], json!([subject("system:masters")]));
        assert_eq!(reconcile(&binding("view", json!([])), &expected), Reconciled::Recreate);
        assert_eq!(reconcile(&expected, &expected), Reconciled::Is(expected.clone()));
    }
}
