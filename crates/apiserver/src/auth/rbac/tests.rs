use super::*;

#[test]
fn a_rule_matches_verb_group_resource_and_name() {
    let rule = Rule::of(&json!({
        "verbs": ["get"], "apiGroups": ["", "apps"], "resources": ["pods", "*/scale", "pods/log"],
    }));
    let named = Rule::of(&json!({
        "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "resourceNames": ["a"],
    }));
    let rows = [
        ("get", "", "pods", "", "", true, false),
        ("list", "", "pods", "", "", false, false),
        ("get", "", "pods", "log", "a", true, true),
        ("get", "", "pods", "exec", "a", false, true),
        ("get", "apps", "deployments", "scale", "", true, false),
        ("get", "batch", "jobs", "scale", "", false, false),
    ];
    for (verb, group, resource, subresource, name, plain, by_name) in rows {
        let action = Action {
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            name: name.into(),
            ..Action::default()
        };
        assert_eq!((rule.allows(&action), named.allows(&action)), (plain, by_name), "{action:?}");
    }
}

#[test]
fn a_rule_covers_no_more_than_it_gives() {
    let rule = |groups: &[&str], resources: &[&str], names: &[&str], paths: &[&str], verbs: &[&str]| {
        Rule::of(&json!({"apiGroups": groups, "resources": resources, "resourceNames": names,
            "nonResourceURLs": paths, "verbs": verbs}))
    };
    let pods = |names: &[&str], verbs: &[&str]| rule(&[""], &["pods"], names, &[], verbs);
    let rows = [
        (pods(&[], &["get"]), pods(&[], &["get"]), true),
        (pods(&[], &["*"]), pods(&[], &["get", "list"]), true),
        (pods(&[], &["get", "list"]), pods(&[], &["*"]), false),
        (pods(&[], &["get"]), pods(&["a"], &["get"]), true),
        (pods(&["a"], &["get"]), pods(&[], &["get"]), false),
        (pods(&[""], &["get"]), pods(&[], &["get"]), false),
        (rule(&["*"], &["pods"], &[], &[], &["get"]), pods(&[], &["get"]), true),
        (pods(&[], &["get"]), rule(&["*"], &["pods"], &[], &[], &["get"]), false),
        (rule(&[""], &["*"], &[], &[], &["get"]), rule(&[""], &["pods/log"], &[], &[], &["get"]), true),
        (rule(&[""], &["*/log"], &[], &[], &["get"]), rule(&[""], &["pods/log"], &[], &[], &["get"]), true),
        (rule(&[""], &["pods/log"], &[], &[], &["get"]), rule(&[""], &["*/log"], &[], &[], &["get"]), false),
        (rule(&[""], &["pods"], &[], &[], &["get"]), rule(&[""], &["pods/log"], &[], &[], &["get"]), false),
        (rule(&[], &[], &[], &["/a/*"], &["get"]), rule(&[], &[], &[], &["/a/b"], &["get"]), true),
        (rule(&[], &[], &[], &["/a/*"], &["get"]), rule(&[], &[], &[], &["*"], &["get"]), false),
        (rule(&["*"], &["*"], &[], &[], &["*"]), rule(&[], &[], &[], &["/a"], &["get"]), false),
    ];
    for (held, wanted, covered) in rows {
        let mut all = true;
        wanted.for_each_not_covered(std::slice::from_ref(&held), &mut |_| all = false);
        assert_eq!(
            (all, held.covers_rule(&wanted)),
            (covered, covered),
            "{} {}",
            held.compact(),
            wanted.compact()
        );
    }
}

#[test]
fn a_rule_for_paths_takes_a_star_at_the_end() {
    let rule = Rule::of(&json!({"verbs": ["get"], "nonResourceURLs": ["/healthz", "/livez/*"]}));
    for (path, allowed) in [("/healthz", true), ("/healthz/x", false), ("/livez/ping", true), ("/", false)] {
        let action = Action { verb: "get".into(), path: Some(path.into()), ..Action::default() };
        assert_eq!(rule.allows(&action), allowed, "{path}");
    }
}

#[test]
fn what_a_user_is_bound_to_is_forgotten_with_every_change() {
    let role = |name: &str, verb: &str| {
        json!({"metadata": {"name": name},
            "rules": [{"verbs": [verb], "apiGroups": [""], "resources": ["pods"]}]})
    };
    let binding = |name: &str, namespace: &str, role: &str, subject: Value| {
        json!({"metadata": {"name": name, "namespace": namespace},
            "roleRef": {"kind": "ClusterRole", "name": role}, "subjects": [subject]})
    };
    let (alice, in_group) = (User::new("alice", ["g"]), User::new("alice", ["g", "h"]));
    let mut state = State::default();
    let names = |state: &mut State, user: &User, namespace: &str| {
        // Once to remember, once from memory.
        let first = state.bound_to(user, namespace);
        let again = state.bound_to(user, namespace);
        assert!(Arc::ptr_eq(&first, &again));
        first.iter().map(|(binding, subject)| (binding.name.clone(), *subject)).collect::<Vec<_>>()
    };
    state.put(0, role("get", "get"));
    assert!(names(&mut state, &alice, "").is_empty());
    state.put(2, binding("one", "", "get", json!({"kind": "User", "name": "alice"})));
    state.put(2, binding("two", "", "get", json!({"kind": "Group", "name": "h"})));
    state.put(3, binding("three", "ns", "get", json!({"kind": "Group", "name": "g"})));
    assert_eq!(names(&mut state, &alice, ""), [("one".to_owned(), 0)]);
    assert_eq!(names(&mut state, &in_group, "").len(), 2, "other groups");
    assert_eq!(names(&mut state, &alice, "ns"), [("three".to_owned(), 0)], "another namespace");
    state.remove(2, binding("one", "", "get", json!({})));
    assert!(names(&mut state, &alice, "").is_empty());
    for number in 0..2 * MOST_BOUND {
        state.bound_to(&User::new(format!("user-{number}"), ["g"]), "ns");
        state.bound_to(&alice, &format!("ns-{number}"));
    }
    assert!(state.bound.len() <= MOST_BOUND && state.bound["alice"].len() <= MOST_PLACES);
}
