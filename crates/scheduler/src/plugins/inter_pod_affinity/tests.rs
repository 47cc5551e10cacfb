use ferrite_json::{Value, json};

use super::*;

#[test]
fn namespaces_are_selected_by_their_labels() {
    let namespace = |name: &str, team: &str| -> Namespace {
        ferrite_json::from_value(json!({"metadata": {"name": name, "labels": {"team": team}}})).unwrap()
    };
    let handle = Handle::default().with_objects([namespace("red", "a"), namespace("blue", "b")]);
    let plugin = new(&PluginArgs::default(), &handle).unwrap();
    let pod = |namespace: &str, spec: Value| {
        let pod = json!({"metadata": {"name": "p", "namespace": namespace, "labels": {"app": "web"}}, "spec": spec});
        PodInfo::new(&ferrite_json::from_value(pod).unwrap())
    };
    let apart = |selector: Value| {
        json!({"containers": [], "affinity": {"podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "host",
                "namespaceSelector": selector, "labelSelector": {"matchLabels": {"app": "web"}}}]}}})
    };
    for (selector, present_in, fits) in [
        (json!({"matchLabels": {"team": "a"}}), "red", false),
        (json!({"matchLabels": {"team": "a"}}), "blue", true),
        (json!({}), "blue", false),
    ] {
        let node = json!({"metadata": {"name": "n", "labels": {"host": "n"}}});
        let mut node = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
        node.add_pod(Arc::new(pod(present_in, json!({"containers": []}))));
        let incoming = pod("green", apart(selector.clone()));
        let node = Arc::new(node);
        let mut state = CycleState::default();
        let snapshot = Snapshot::new([node.clone()]);
        plugin.pre_filter().unwrap().pre_filter(&mut state, &incoming, &snapshot).unwrap();
        let verdict = plugin.filter().unwrap().filter(&state, &incoming, &node);
        assert_eq!(verdict.is_ok(), fits, "{selector} {present_in}");
    }
}

fn labelled(name: &str, app: &str, affinity: Value) -> PodInfo {
    let pod = json!({"metadata": {"name": name, "namespace": "ns", "labels": {"app": app}},
        "spec": {"containers": [], "affinity": affinity}});
    PodInfo::new(&ferrite_json::from_value(pod).unwrap())
}

fn term(app: &str) -> Value {
    json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": app}}})
}

fn required(kind: &str, app: &str) -> Value {
    json!({(kind): {"requiredDuringSchedulingIgnoredDuringExecution": [term(app)]}})
}

fn preferred(kind: &str, weight: i32, app: &str) -> Value {
    json!({(kind): {"preferredDuringSchedulingIgnoredDuringExecution":
        [{"weight": weight, "podAffinityTerm": term(app)}]}})
}

const TOGETHER: &str = "podAffinity";
const APART: &str = "podAntiAffinity";

/// Nodes in zones "a" and "b", with these pods.
fn zones(pods: [&[PodInfo]; 2]) -> [Arc<NodeInfo>; 2] {
    let zones = [("a", pods[0]), ("b", pods[1])];
    zones.map(|(zone, pods)| {
        let node = json!({"metadata": {"name": zone, "labels": {"zone": zone}}});
        let mut node = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
        pods.iter().for_each(|pod| node.add_pod(Arc::new(pod.clone())));
        Arc::new(node)
    })
}

fn plugin(args: Value) -> Arc<dyn Plugin> {
    let args = PluginArgs::new(args, ferrite_api::field::Path::new("args"));
    new(&args, &Handle::default()).unwrap()
}

/// The scores of the two nodes, or none if the plugin takes no part.
fn scores(args: Value, incoming: &PodInfo, nodes: &[Arc<NodeInfo>]) -> Option<Vec<i64>> {
    let plugin = plugin(args);
    let mut snapshot = Snapshot::new(nodes.iter().cloned());
    snapshot.has_affinity = nodes.iter().flat_map(|node| &node.pods).any(|pod| pod.has_affinity());
    let mut state = CycleState::default();
    let interest = plugin.pre_score().unwrap().pre_score(&mut state, incoming, &snapshot, nodes);
    (interest == Interest::Needed).then(|| {
        let score = plugin.score().unwrap();
        nodes.iter().map(|node| score.score(&state, incoming, node)).collect()
    })
}

#[test]
fn preferences_of_both_sides_add_up() {
    let web = |affinity: Value| labelled("web", "web", affinity);
    let db = |affinity: Value| labelled("db", "db", affinity);
    let none = || json!({});
    let ignoring = json!({"ignorePreferredTermsOfExistingPods": true});
    for (what, args, incoming, present, expected) in [
        ("nobody prefers anything", none(), web(none()), db(none()), None),
        ("the new pod likes it", none(), web(preferred(TOGETHER, 7, "db")), db(none()), Some([7, 0])),
        ("the new pod dislikes it", none(), web(preferred(APART, 7, "db")), db(none()), Some([-7, 0])),
        ("it likes the new pod", none(), web(none()), db(preferred(TOGETHER, 3, "web")), Some([3, 0])),
        ("it dislikes the new pod", none(), web(none()), db(preferred(APART, 3, "web")), Some([-3, 0])),
        ("it needs pods like the new one", none(), web(none()), db(required(TOGETHER, "web")), Some([1, 0])),
        (
            "a need weighs as the configuration says",
            json!({"hardPodAffinityWeight": 50}),
            web(none()),
            db(required(TOGETHER, "web")),
            Some([50, 0]),
        ),
        ("both", none(), web(preferred(TOGETHER, 7, "db")), db(preferred(TOGETHER, 3, "web")), Some([10, 0])),
        (
            "preferences of present pods are ignored",
            ignoring.clone(),
            web(none()),
            db(preferred(TOGETHER, 3, "web")),
            None,
        ),
        (
            "a new pod with preferences hears them all the same",
            ignoring,
            web(preferred(TOGETHER, 7, "db")),
            db(preferred(TOGETHER, 3, "web")),
            Some([10, 0]),
        ),
    ] {
        let scores = scores(args, &incoming, &zones([&[present], &[]]));
        assert_eq!(scores, expected.map(|scores: [i64; 2]| scores.to_vec()), "{what}");
    }
}

#[test]
fn scores_are_normalized_as_upstream_does() {
    let plugin = plugin(json!({}));
    let state = CycleState::default();
    let pod = labelled("web", "web", json!({}));
    for (mut scores, expected) in [
        (vec![0, 29, 100], vec![0, 28, 100]),
        (vec![-10, 0, 10], vec![0, 50, 100]),
        (vec![5, 5], vec![0, 0]),
        (vec![0, 1, 3], vec![0, 33, 100]),
    ] {
        plugin.score().unwrap().normalize(&state, &pod, &[], &mut scores);
        assert_eq!(scores, expected);
    }
}

#[test]
fn hints() {
    let plugin = plugin(json!({}));
    let together = labelled("p", "web", required(TOGETHER, "db"));
    let apart = labelled("p", "web", required(APART, "db"));
    let other = |app: &str| Arc::new(labelled("other", app, json!({})));
    let added = |app: &str| ClusterEvent::AssignedPodAdded(other(app));
    let deleted = |app: &str| ClusterEvent::AssignedPodDeleted(other(app));
    let relabelled =
        |old: &str, new: &str| ClusterEvent::AssignedPodRelabelled { old: other(old), new: other(new) };
    let hostile = Arc::new(labelled("other", "cache", required(APART, "web")));
    for (what, pod, event, expected) in [
        ("wanted company came", &together, added("db"), true),
        ("other company came", &together, added("cache"), false),
        ("a pod becomes wanted company", &together, relabelled("cache", "db"), true),
        ("a pod is no company any more", &together, relabelled("db", "cache"), false),
        ("the pod in the way went", &apart, deleted("db"), true),
        ("another pod went", &apart, deleted("cache"), false),
        ("a pod is no longer in the way", &apart, relabelled("db", "cache"), true),
        ("a pod comes in the way", &apart, relabelled("cache", "db"), false),
        ("a pod that avoids the new one went", &apart, ClusterEvent::AssignedPodDeleted(hostile), true),
        ("a node went", &together, ClusterEvent::NodeDeleted(Arc::default()), false),
    ] {
        assert_eq!(plugin.queueing_hint(pod, &event), expected, "{what}");
    }
}
