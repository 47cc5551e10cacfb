use super::*;

fn seen(uid: &str, owners: &[(&str, bool)]) -> Observation {
    Observation {
        identity: Identity {
            api_version: "v1".into(),
            kind: "Pod".into(),
            namespace: "ns".into(),
            name: uid.into(),
            uid: uid.into(),
        },
        owners: owners
            .iter()
            .map(|(uid, block)| OwnerReference { block_owner_deletion: Some(*block), ..named(uid, uid) })
            .collect(),
        deleting: false,
        foreground: false,
        orphan: false,
    }
}

/// A reference to a Pod.
fn named(uid: &str, name: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".into(),
        kind: "Pod".into(),
        name: name.into(),
        uid: uid.into(),
        ..OwnerReference::default()
    }
}

/// An object in a namespace that names a Pod.
fn dependent(uid: &str, namespace: &str, owner: OwnerReference) -> Observation {
    let mut seen = seen(uid, &[]);
    seen.identity.namespace = namespace.into();
    seen.owners = vec![owner];
    seen
}

fn identity(uid: &str, namespace: &str, name: &str) -> Identity {
    Identity::of_owner(&named(uid, name), namespace)
}

fn sorted(mut uids: Vec<Uid>) -> Vec<Uid> {
    uids.sort();
    uids
}

#[test]
fn an_owner_nobody_saw_is_verified_and_its_absence_wakes_dependents() {
    let mut graph = Graph::default();
    assert_eq!(graph.present(seen("pod", &[("rs", true)])).delete, ["rs"]);
    assert!(!graph.get("rs").unwrap().observed);
    assert_eq!(graph.gone("rs").delete, ["pod"]);
    assert!(graph.is_absent(&named("rs", "rs"), "ns"));
    assert!(!graph.is_absent(&named("rs", "rs"), "other") && !graph.is_absent(&named("rs", "x"), "ns"));
    assert_eq!(graph.present(seen("late", &[("rs", true)])).delete, ["rs", "late"]);
}

#[test]
fn a_known_owner_that_goes_wakes_its_dependents() {
    let mut graph = Graph::default();
    graph.present(seen("rs", &[]));
    assert_eq!(graph.present(seen("a", &[("rs", true)])), Work::default());
    graph.present(seen("b", &[("rs", false)]));
    assert_eq!(sorted(graph.gone("rs").delete), ["a", "b"]);
}

#[test]
fn foreground_deletion_wakes_dependents_and_then_the_owner() {
    let mut graph = Graph::default();
    graph.present(seen("rs", &[]));
    graph.present(seen("a", &[("rs", true)]));
    graph.present(seen("b", &[("rs", false)]));
    let deleting = Observation { deleting: true, foreground: true, ..seen("rs", &[]) };
    assert_eq!(sorted(graph.present(deleting.clone()).delete), ["a", "b", "rs"]);
    assert_eq!(graph.present(deleting), Work::default(), "only once");
    assert_eq!(graph.blocking(graph.get("rs").unwrap()).len(), 1);
    assert_eq!(graph.gone("a").delete, ["rs"]);
    assert!(graph.blocking(graph.get("rs").unwrap()).is_empty());
}

#[test]
fn orphaning_is_asked_for_once_and_letting_go_frees_the_owner() {
    let mut graph = Graph::default();
    graph.present(seen("rs", &[]));
    graph.present(seen("a", &[("rs", true)]));
    let orphaning = Observation { deleting: true, orphan: true, ..seen("rs", &[]) };
    assert_eq!(graph.present(orphaning.clone()).orphan, ["rs"]);
    assert!(graph.present(orphaning).orphan.is_empty());
    assert_eq!(graph.present(seen("a", &[])).delete, ["rs"], "a blocking reference went away");
    assert!(graph.get("rs").unwrap().dependents.is_empty());
}

#[test]
fn memory_of_absent_owners_is_bounded() {
    let mut graph = Graph::default();
    let name = |n: usize| n.to_string();
    (0..2 * REMEMBERED_ABSENT).for_each(|n| graph.note_absent(&identity(&name(n), "ns", "o")));
    assert_eq!(graph.absent.len(), REMEMBERED_ABSENT);
    assert!(graph.is_absent(&named(&name(2 * REMEMBERED_ABSENT - 1), "o"), "ns"));
    assert!(!graph.is_absent(&named("0", "o"), "ns"));
    // An object that appears makes room again.
    let mut back = seen(&name(2 * REMEMBERED_ABSENT - 1), &[]);
    back.identity.name = "o".into();
    graph.present(back);
    assert_eq!(
        (graph.absent.len(), graph.absent_order.len()),
        (REMEMBERED_ABSENT - 1, REMEMBERED_ABSENT - 1)
    );
}

#[test]
fn false_coordinates_do_not_harm_the_dependents_of_the_true_owner() {
    let mut graph = Graph::default();
    // The first one to name the owner is wrong about it.
    assert_eq!(graph.present(dependent("liar", "ns", named("owner", "false"))).delete, ["owner"]);
    assert_eq!(graph.present(dependent("child", "ns", named("owner", "true"))).delete, ["child"]);
    let absence = graph.not_found(&identity("owner", "ns", "false"));
    assert_eq!(absence.work.delete, ["liar"]);
    assert!(absence.has_alternative);
    assert_eq!(graph.get("owner").unwrap().identity, identity("owner", "ns", "true"));
    assert!(
        graph.is_absent(&named("owner", "false"), "ns") && !graph.is_absent(&named("owner", "true"), "ns")
    );
    // The other place is empty, too: the first one has its turn again, until its dependent is gone.
    assert!(graph.not_found(&identity("owner", "ns", "true")).has_alternative);
    assert_eq!(graph.get("owner").unwrap().identity, identity("owner", "ns", "false"));
    graph.gone("liar");
    let last = graph.not_found(&identity("owner", "ns", "false"));
    assert_eq!(graph.get("owner").unwrap().identity, identity("owner", "ns", "true"));
    assert!(last.has_alternative);
    let absence = graph.not_found(&identity("owner", "ns", "true"));
    assert_eq!((absence.work.delete, absence.has_alternative), (vec!["child".to_owned()], false));
    assert!(graph.get("owner").is_none());
}

#[test]
fn an_owner_that_watches_show_is_not_removed_by_a_search_elsewhere() {
    let mut graph = Graph::default();
    graph.present(seen("owner", &[]));
    graph.present(dependent("liar", "ns", named("owner", "false")));
    graph.present(dependent("child", "ns", named("owner", "owner")));
    let absence = graph.not_found(&identity("owner", "ns", "false"));
    assert_eq!((absence.work.delete, absence.has_alternative), (vec!["liar".to_owned()], false));
    assert!(graph.get("owner").is_some() && !graph.is_absent(&named("owner", "owner"), "ns"));
}

#[test]
fn an_owner_of_another_namespace_is_reported_and_verified() {
    let stranger = || dependent("child", "other", named("owner", "owner"));
    let invalid = || vec![(stranger().identity, named("owner", "owner"))];
    let mut graph = Graph::default();
    graph.present(seen("owner", &[]));
    let work = graph.present(stranger());
    assert_eq!((work.delete, work.invalid), (vec!["child".to_owned()], invalid()));
    assert_eq!(graph.present(stranger()), Work::default(), "only once");
    // The other way round.
    let mut graph = Graph::default();
    assert_eq!(graph.present(stranger()).invalid, []);
    let work = graph.present(seen("owner", &[]));
    assert_eq!((work.delete, work.invalid), (vec!["child".to_owned()], invalid()));
    // A cluster-scoped owner serves all namespaces.
    let mut graph = Graph::default();
    let mut node = seen("owner", &[]);
    node.identity.namespace = "".into();
    graph.present(node);
    assert_eq!(graph.present(stranger()), Work::default());
}

#[test]
fn a_placeholder_that_nobody_names_is_forgotten() {
    let mut graph = Graph::default();
    graph.present(dependent("child", "ns", named("owner", "owner")));
    graph.present(seen("child", &[]));
    assert!(graph.get("owner").is_none());
}
