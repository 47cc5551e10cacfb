use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::Toleration;
use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn changes_beside_the_shared_counts_count(
        counts in prop::collection::vec(0i64..5, 1..6),
        changes in prop::collection::vec((0usize..6, any::<bool>()), 0..12),
    ) {
        let mut plain: HashMap<String, i64> =
            counts.iter().enumerate().map(|(index, count)| (index.to_string(), *count)).collect();
        let constraint = Constraint::new(&TopologySpreadConstraint::default(), nothing());
        let pod = PodInfo::new(&k8s_openapi::api::core::v1::Pod::default());
        let mut counted = Counted::new(constraint, plain.clone(), &pod);
        for (index, is_more) in changes {
            let (value, by) = (index.to_string(), if is_more { 1 } else { -1 });
            counted.change(&value, by);
            if let Some(count) = plain.get_mut(&value) {
                *count += by;
            }
        }
        for (value, count) in &plain {
            prop_assert_eq!(counted.get(value), Some(*count));
        }
        prop_assert_eq!(counted.least(), plain.values().min().copied().unwrap());
    }
}

const LABEL_MISSING: &str = "node(s) didn't match pod topology spread constraints (missing required label)";
const UNEVEN: &str = "node(s) didn't match pod topology spread constraints";

fn plugin(args: Value) -> Arc<dyn Plugin> {
    new(&PluginArgs::new(args, Path::new("args")), &Handle::default()).unwrap()
}

fn pod(name: &str, labels: Value, spec: Value) -> PodInfo {
    let mut pod =
        json!({"metadata": {"name": name, "namespace": "ns", "labels": labels}, "spec": {"containers": []}});
    for (key, value) in spec.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    PodInfo::new(&ferrite_json::from_value(pod).unwrap())
}

/// A pod of the application "web" with one constraint over zones.
fn spread(constraint: Value) -> PodInfo {
    let mut all = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": HARD,
        "labelSelector": {"matchLabels": {"app": "web"}}});
    for (key, value) in constraint.as_object().unwrap() {
        all[key] = value.clone();
    }
    pod("p", json!({"app": "web", "version": "2"}), json!({"topologySpreadConstraints": [all]}))
}

/// A node in a zone, with a taint unless `taint` is empty, and pods of "web" with these versions.
fn node(name: &str, zone: Option<&str>, taint: &str, versions: &[&str]) -> Arc<NodeInfo> {
    let mut node =
        json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": {}});
    if let Some(zone) = zone {
        node["metadata"]["labels"]["zone"] = json!(zone);
    }
    if !taint.is_empty() {
        node["spec"]["taints"] = json!([{"key": taint, "effect": "NoSchedule"}]);
    }
    let mut info = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    for (index, version) in versions.iter().enumerate() {
        let labels = json!({"app": "web", "version": *version});
        info.add_pod(Arc::new(pod(&format!("{name}-{index}"), labels, json!({}))));
    }
    Arc::new(info)
}

/// The verdict on each node: the reason, or nothing.
fn verdicts(incoming: &PodInfo, nodes: &[Arc<NodeInfo>]) -> Vec<String> {
    let plugin = plugin(json!({}));
    let mut state = CycleState::default();
    let snapshot = Snapshot::new(nodes.iter().cloned());
    plugin.pre_filter().unwrap().pre_filter(&mut state, incoming, &snapshot).unwrap();
    let verdict = |node: &Arc<NodeInfo>| plugin.filter().unwrap().filter(&state, incoming, node);
    nodes
        .iter()
        .map(|node| verdict(node).map_or_else(|rejection| rejection.to_string(), |()| String::new()))
        .collect()
}

#[test]
fn required_spreading_counts_as_its_constraint_says() {
    let zones = || [node("a", Some("a"), "", &["1", "2"]), node("b", Some("b"), "", &["1"])];
    let with_empty = |taint: &str| {
        let [a, b] = zones();
        vec![a, b, node("c", Some("c"), taint, &[])]
    };
    let tolerant = |constraint: Value| {
        let mut incoming = spread(constraint).placement.clone();
        incoming.tolerations =
            vec![Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() }];
        let constraints = ferrite_json::to_value(&incoming.topology_spread_constraints).unwrap();
        let tolerations = ferrite_json::to_value(&incoming.tolerations).unwrap();
        let spec = json!({"topologySpreadConstraints": constraints, "tolerations": tolerations});
        pod("p", json!({"app": "web"}), spec)
    };
    let on_ab = json!({"kubernetes.io/hostname": "x"});
    let elsewhere = |policy: &str| {
        let constraints = json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": HARD,
            "labelSelector": {"matchLabels": {"app": "web"}}, "nodeAffinityPolicy": policy}]);
        pod(
            "p",
            json!({"app": "web"}),
            json!({"topologySpreadConstraints": constraints, "nodeSelector": on_ab.clone()}),
        )
    };
    for (what, incoming, nodes, expected) in [
        ("the fuller zone", spread(json!({})), zones().to_vec(), vec![UNEVEN, ""]),
        ("a larger skew", spread(json!({"maxSkew": 2})), zones().to_vec(), vec!["", ""]),
        (
            "a node without the label",
            spread(json!({})),
            vec![node("a", Some("a"), "", &[]), node("x", None, "", &[])],
            vec!["", LABEL_MISSING],
        ),
        ("an empty zone is the least", spread(json!({})), with_empty(""), vec![UNEVEN, UNEVEN, ""]),
        (
            "fewer domains than wanted",
            spread(json!({"minDomains": 3})),
            zones().to_vec(),
            vec![UNEVEN, UNEVEN],
        ),
        ("as many domains as wanted", spread(json!({"minDomains": 2})), zones().to_vec(), vec![UNEVEN, ""]),
        (
            "only pods of the same version count",
            spread(json!({"matchLabelKeys": ["version"]})),
            zones().to_vec(),
            vec![UNEVEN, ""],
        ),
        (
            "a label that the pod does not have does not count",
            spread(json!({"matchLabelKeys": ["absent"]})),
            zones().to_vec(),
            vec![UNEVEN, ""],
        ),
        ("taints are ignored by default", spread(json!({})), with_empty("t"), vec![UNEVEN, UNEVEN, ""]),
        (
            "a tainted node does not count",
            spread(json!({"nodeTaintsPolicy": "Honor"})),
            with_empty("t"),
            vec![UNEVEN, "", ""],
        ),
        (
            "a tolerated taint counts",
            tolerant(json!({"nodeTaintsPolicy": "Honor"})),
            with_empty("t"),
            vec![UNEVEN, UNEVEN, ""],
        ),
        // Nodes that the pod's selector leaves out have no domains: nothing is counted there.
        ("nodes outside the selector do not count", elsewhere("Honor"), zones().to_vec(), vec!["", ""]),
        ("nodes outside the selector count", elsewhere("Ignore"), zones().to_vec(), vec![UNEVEN, ""]),
        (
            "a selector that selects everything counts nothing",
            spread(json!({"labelSelector": {}})),
            zones().to_vec(),
            vec!["", ""],
        ),
    ] {
        assert_eq!(verdicts(&incoming, &nodes), expected, "{what}");
    }
}

#[test]
fn only_pods_of_the_same_version_are_spread() {
    let incoming = |keys: Value| spread(json!({"matchLabelKeys": keys}));
    let nodes = [node("a", Some("a"), "", &["1", "1"]), node("b", Some("b"), "", &["2"])];
    assert_eq!(verdicts(&incoming(json!([])), &nodes), [UNEVEN, ""]);
    assert_eq!(verdicts(&incoming(json!(["version"])), &nodes), ["", UNEVEN]);
}

/// The normalized scores of the nodes.
fn scores(plugin: &Arc<dyn Plugin>, incoming: &PodInfo, nodes: &[Arc<NodeInfo>]) -> Vec<i64> {
    let mut state = CycleState::default();
    let snapshot = Snapshot::new(nodes.iter().cloned());
    plugin.pre_score().unwrap().pre_score(&mut state, incoming, &snapshot, nodes);
    let score = plugin.score().unwrap();
    let mut scores: Vec<i64> = nodes.iter().map(|node| score.score(&state, incoming, node)).collect();
    score.normalize(&state, incoming, nodes, &mut scores);
    scores
}

#[test]
fn preferred_spreading_likes_the_emptier_zone() {
    let plugin = plugin(json!({}));
    let soft = spread(json!({"whenUnsatisfiable": SOFT}));
    let nodes =
        [node("a", Some("a"), "", &["1", "1"]), node("b", Some("b"), "", &["1"]), node("x", None, "", &[])];
    assert_eq!(scores(&plugin, &soft, &nodes), [33, 100, 0], "a node without the label has nothing to say");
    let empty = [node("a", Some("a"), "", &[]), node("b", Some("b"), "", &[])];
    assert_eq!(scores(&plugin, &soft, &empty), [100, 100]);
}

#[test]
fn the_nodes_without_the_label_are_a_domain_of_the_systems_spreading() {
    let plugin = plugin(json!({}));
    let selector: Selector = [Expression::Equal("app".into(), "web".into())].into_iter().collect();
    let incoming = pod("p", json!({"app": "web"}), json!({})).with_siblings(Some(selector));
    let weights = |nodes: &[Arc<NodeInfo>]| {
        let mut state = CycleState::default();
        let snapshot = Snapshot::new(nodes.iter().cloned());
        plugin.pre_score().unwrap().pre_score(&mut state, &incoming, &snapshot, nodes);
        let preferred = state.get::<Preferred>().unwrap();
        preferred.preferences.iter().map(|preference| preference.weight).collect::<Vec<f64>>()
    };
    let in_zone = |name: &str| {
        let node =
            json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, (ZONE): "z"}}});
        Arc::new(NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap())))
    };
    assert_eq!(weights(&[in_zone("a"), in_zone("b")]), [4f64.ln(), 3f64.ln()]);
    assert_eq!(weights(&[in_zone("a"), node("b", None, "", &[])]), [4f64.ln(), 4f64.ln()]);
}

#[test]
fn hints() {
    let plugin = plugin(json!({}));
    let incoming = spread(json!({}));
    let other = |app: &str| Arc::new(pod("other", json!({"app": app}), json!({})));
    let relabelled =
        |old: &str, new: &str| ClusterEvent::AssignedPodRelabelled { old: other(old), new: other(new) };
    let in_zone = || node("n", Some("a"), "", &[]).node.clone();
    let outside = || node("n", None, "", &[]).node.clone();
    for (what, event, expected) in [
        ("a matching pod came", ClusterEvent::AssignedPodAdded(other("web")), true),
        ("another pod came", ClusterEvent::AssignedPodAdded(other("db")), false),
        ("a matching pod went", ClusterEvent::AssignedPodDeleted(other("web")), true),
        ("a pod matches no more", relabelled("web", "db"), true),
        ("a pod begins to match", relabelled("db", "web"), true),
        ("labels that do not count", relabelled("db", "cache"), false),
        ("a node of the topology came", ClusterEvent::NodeAdded(in_zone()), true),
        ("a node outside came", ClusterEvent::NodeAdded(outside()), false),
        ("a node of the topology went", ClusterEvent::NodeDeleted(in_zone()), true),
        ("a node outside went", ClusterEvent::NodeDeleted(outside()), false),
    ] {
        assert_eq!(plugin.queueing_hint(&incoming, &event), expected, "{what}");
    }
}
