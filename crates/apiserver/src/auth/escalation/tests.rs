use super::*;
use ferrite_json::json;

fn rules(value: &Value) -> Vec<Rule> {
    Rule::all(&json!({"rules": value}))
}

#[test]
fn what_is_missing_is_told_by_resource() {
    let user = User::new("mallory", ["developers"]);
    let held = rules(&json!([
        {"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]},
        {"verbs": ["*"], "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["mine"]},
    ]));
    let rows = [
        (json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]), ""),
        (
            json!([{"verbs": ["get", "list", "watch"], "apiGroups": [""], "resources": ["pods", "nodes"]}]),
            "{APIGroups:[\"\"], Resources:[\"nodes\"], Verbs:[\"get\" \"list\" \"watch\"]}\n\
             {APIGroups:[\"\"], Resources:[\"pods\"], Verbs:[\"list\" \"watch\"]}",
        ),
        (
            json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]),
            "{APIGroups:[\"\"], Resources:[\"secrets\"], Verbs:[\"get\"]}",
        ),
        (json!([{"verbs": ["get"], "nonResourceURLs": ["*"]}]), "{NonResourceURLs:[\"*\"], Verbs:[\"get\"]}"),
    ];
    for (given, told) in rows {
        let why = missing(&user, &held, &rules(&given));
        let why = why.as_deref().and_then(|why| why.split_once('\n')).map_or("", |(_, missing)| missing);
        assert_eq!(why, told, "{given}");
    }
    assert!(missing(&user, &held, &Rule::everything()).is_some());
    let admin = rules(&json!([
        {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}, {"verbs": ["*"], "nonResourceURLs": ["*"]},
    ]));
    assert_eq!(missing(&user, &admin, &Rule::everything()), None);
    assert!(missing(&user, &admin[..1], &Rule::everything()).is_some());
}

#[test]
fn only_the_fields_of_the_garbage_collector_go_unchecked() {
    let old = json!({"metadata": {"name": "a", "finalizers": ["f"]}, "rules": []});
    let with = |pointer: &str, key: &str, value: Value| {
        let mut new = old.clone();
        new.pointer_mut(pointer).unwrap()[key] = value;
        new
    };
    for (new, unchecked) in [
        (old.clone(), true),
        (with("/metadata", "finalizers", json!([])), true),
        (with("/metadata", "ownerReferences", json!([{"uid": "u"}])), true),
        (with("/metadata", "managedFields", json!([{}])), true),
        (with("/metadata", "labels", json!({"rbac.example.com/aggregate-to-admin": "true"})), false),
        (with("", "rules", json!([{}])), false),
        (with("", "aggregationRule", json!({})), false),
    ] {
        assert_eq!(only_for_garbage_collection(&new, &old), unchecked, "{new}");
    }
}

#[test]
fn an_aggregation_rule_without_selectors_gathers_nothing() {
    for (rule, gathers) in [
        (json!(null), false),
        (json!({}), false),
        (json!({"clusterRoleSelectors": []}), false),
        (json!({"clusterRoleSelectors": [{}]}), true),
    ] {
        assert_eq!(aggregates(&json!({"aggregationRule": rule})), gathers, "{rule}");
    }
}

#[test]
fn a_small_rule_with_many_combinations_costs_little() {
    let user = User::new("mallory", ["developers"]);
    let many = |letter: &str, count: usize| (0..count).map(|i| format!("{letter}{i}")).collect::<Vec<_>>();
    let rule = |count: usize| {
        rules(
            &json!([{"verbs": many("v", count), "apiGroups": many("g", count), "resources": many("r", count)}]),
        )
    };
    let few = missing(&user, &[], &rule(2)).unwrap();
    assert_eq!(few.lines().count(), 1 + 4, "one line for each resource: {few}");
    assert!(few.contains(r#"{APIGroups:["g0"], Resources:["r1"], Verbs:["v0" "v1"]}"#), "{few}");
    // A million combinations, and then more than can be compared.
    let listed = missing(&user, &[], &rule(100)).unwrap();
    assert!(
        listed.ends_with("\nand more") && listed.lines().count() == LISTED + 2,
        "{}",
        listed.lines().count()
    );
    assert!(missing(&user, &[], &rule(2000)).unwrap().contains("use smaller rules"));
    // A user who has all of them may give them away, and several rules together may cover the parts.
    let all = rules(&json!([{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]));
    assert_eq!(missing(&user, &all, &rule(2000)), None);
    let halves = |verb: &str| json!({"verbs": [verb], "apiGroups": ["*"], "resources": ["*"]});
    assert_eq!(missing(&user, &rules(&json!([halves("v0"), halves("v1")])), &rule(2)), None);
    assert!(missing(&user, &rules(&json!([halves("v0")])), &rule(2)).is_some());
}
