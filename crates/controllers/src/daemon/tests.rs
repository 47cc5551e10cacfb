//! Decision tables, and rollouts from random states.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrite_json::{Value, json};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use proptest::prelude::*;

use super::decide::{Plan, View};
use super::is_rolling_update;
use super::placement::PodMaker;
use super::placements::verdicts;

const NOW: &str = "2024-01-01T01:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn set(strategy: Value, min_ready: i32) -> DaemonSet {
    ferrite_json::from_value(json!({
        "metadata": {"name": "d", "namespace": "ns", "uid": "u", "generation": 2},
        "spec": {"selector": {}, "template": {"spec": {"containers": []}}, "updateStrategy": strategy,
                 "minReadySeconds": min_ready},
    }))
    .unwrap()
}

fn rolling(max_unavailable: Value, max_surge: Value) -> Value {
    json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": max_unavailable, "maxSurge": max_surge}})
}

/// A node by name; `x…` evicts, `t…` takes no new pods, any other runs daemons.
fn node(name: &str) -> Arc<Node> {
    let effect = match name.as_bytes()[0] {
        b'x' => Some("NoExecute"),
        b't' => Some("NoSchedule"),
        _ => None,
    };
    let taints: Vec<_> = effect.into_iter().map(|effect| json!({"key": "k", "effect": effect})).collect();
    Arc::new(
        ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": {"taints": taints}})).unwrap(),
    )
}

/// A pod written as `name node hash state…`. States: ready, failed, succeeded, deleting, pinned (not scheduled), and
/// `age=` in seconds since creation and readiness.
fn pod(text: &str) -> Arc<Pod> {
    let mut words = text.split(' ');
    let (name, node, hash) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    let states: Vec<&str> = words.collect();
    let is = |state: &str| states.contains(&state);
    let age =
        states.iter().find_map(|state| state.strip_prefix("age=")).map_or(60, |age| age.parse().unwrap());
    let since = now() - jiff::SignedDuration::from_secs(age);
    let phase = match () {
        () if is("failed") => "Failed",
        () if is("succeeded") => "Succeeded",
        () if is("ready") => "Running",
        () => "Pending",
    };
    let mut made = PodMaker::new(&set(json!(null), 0), hash).pod_for(node);
    let whole: Pod = ferrite_json::from_value(json!({
        "metadata": {"name": name, "uid": name, "creationTimestamp": since,
                     "deletionTimestamp": is("deleting").then_some(NOW)},
        "status": {"phase": phase, "conditions": [
            {"type": "Ready", "status": if is("ready") { "True" } else { "False" }, "lastTransitionTime": since}]},
    }))
    .unwrap();
    made.metadata.name = whole.metadata.name;
    made.metadata.uid = whole.metadata.uid;
    made.metadata.creation_timestamp = whole.metadata.creation_timestamp;
    made.metadata.deletion_timestamp = whole.metadata.deletion_timestamp;
    made.status = whole.status;
    if !is("pinned") {
        made.spec.as_mut().unwrap().node_name = Some(node.to_owned());
    }
    Arc::new(made)
}

/// The plan as text: `+node` for a creation, `-pod` for a deletion.
fn text(plan: &Plan) -> String {
    let mut words: Vec<String> = plan.create.iter().map(|node| format!("+{node}")).collect();
    words.extend(
        plan.delete.iter().map(|doomed| format!("-{}", doomed.pod.metadata.name.as_deref().unwrap())),
    );
    words.sort();
    words.join(" ")
}

#[test]
fn nodes_get_the_pods_they_should_have() {
    let plain = || rolling(json!(1), json!(0));
    let surge = || rolling(json!(0), json!(1));
    for (what, strategy, nodes, pods, expected) in [
        ("no pods yet", plain(), &["a", "b"][..], &[][..], "+a +b"),
        ("one is there", plain(), &["a", "b"], &["p a new ready"], "+b"),
        ("tainted nodes get none", plain(), &["t", "x"], &[], ""),
        ("a tainted node keeps its own", plain(), &["t"], &["p t new ready"], ""),
        ("a node that evicts loses it", plain(), &["x"], &["p x new ready"], "-p"),
        ("a pod that is going is not deleted again", plain(), &["x"], &["p x new ready deleting"], ""),
        ("a pod that is going is waited for", plain(), &["a"], &["p a new ready deleting"], ""),
        ("with surge it is not", surge(), &["a"], &["p a new ready deleting"], "+a"),
        ("one that ended and is going holds nothing", plain(), &["a"], &["p a new failed deleting"], "+a"),
        ("a failed pod goes first", plain(), &["a"], &["p a new failed"], "-p"),
        ("with surge its successor comes at once", surge(), &["a"], &["p a new failed"], "+a -p"),
        ("a pod that ended goes", plain(), &["a"], &["p a new succeeded"], "-p"),
        ("the oldest stays", plain(), &["a"], &["p a new age=1", "q a new age=9", "r a new age=5"], "-p -r"),
        ("one that is scheduled stays", plain(), &["a"], &["p a new pinned age=9", "q a new age=1"], "-p"),
        ("surge keeps old and new", surge(), &["a"], &["o a old ready", "n a new"], ""),
        ("the new one is available", surge(), &["a"], &["o a old ready", "n a new ready"], "-o"),
        ("the old one is not ready", surge(), &["a"], &["o a old", "n a new"], "-o"),
        (
            "one of each",
            surge(),
            &["a"],
            &["o a old ready", "p a old ready age=1", "n a new", "m a new age=1"],
            "-m -p",
        ),
        ("the node of an unscheduled pod is gone", plain(), &[], &["p a new pinned"], "-p"),
        ("the node of a running pod is gone", plain(), &[], &["p a new ready"], ""),
    ] {
        let set = set(strategy, 0);
        let nodes: Vec<_> = nodes.iter().map(|name| node(name)).collect();
        let pods: Vec<_> = pods.iter().map(|pod_text| pod(pod_text)).collect();
        let plan = View::new(&set, "new", &verdicts(&set, &nodes), &pods, now()).manage();
        assert_eq!(text(&plan), expected, "{what}");
    }
}

#[test]
fn old_pods_are_replaced_within_the_limits() {
    let plain = |max: i32| rolling(json!(max), json!(0));
    let surge = |max: i32| rolling(json!(0), json!(max));
    for (what, strategy, nodes, pods, expected) in [
        ("nothing to do", plain(1), &["a"][..], &["p a new ready"][..], ""),
        ("one at a time", plain(1), &["a", "b"], &["p a old ready", "q b old ready"], "-p"),
        (
            "two at a time",
            plain(2),
            &["a", "b", "c"],
            &["p a old ready", "q b old ready", "r c old ready"],
            "-p -q",
        ),
        ("a new pod is not available yet", plain(1), &["a", "b"], &["p a new", "q b old ready"], ""),
        ("a node has no pod", plain(1), &["a", "b"], &["q b old ready"], ""),
        (
            "an old pod that is not available always goes",
            plain(1),
            &["a", "b"],
            &["p a old", "q b old ready"],
            "-p",
        ),
        (
            "a pod that is going counts",
            plain(1),
            &["a", "b"],
            &["p a old ready deleting", "q b old ready"],
            "",
        ),
        ("neither is allowed: one goes", surge(0), &["a", "b"], &["p a old ready", "q b old ready"], "-p"),
        ("half", rolling(json!("50%"), json!(0)), &["a", "b"], &["p a old ready", "q b old ready"], "-p"),
        (
            "a share rounds up",
            rolling(json!("10%"), json!(0)),
            &["a", "b"],
            &["p a old ready", "q b old ready"],
            "-p",
        ),
        ("surge: one more", surge(1), &["a", "b"], &["p a old ready", "q b old ready"], "+a"),
        (
            "surge: it is on its way",
            surge(1),
            &["a", "b"],
            &["p a old ready", "n a new", "q b old ready"],
            "",
        ),
        (
            "surge: it is available",
            surge(1),
            &["a", "b"],
            &["p a old ready", "n a new ready", "q b old ready"],
            "+b -p",
        ),
        ("surge: the old one does not serve", surge(1), &["a", "b"], &["p a old", "q b old"], "+a +b"),
        ("surge: not on a tainted node", surge(1), &["t"], &["p t old"], "-p"),
        ("surge: a tainted node keeps what serves", surge(1), &["t", "a"], &["p t old ready"], ""),
        ("surge: until another serves", surge(1), &["t", "a"], &["p t old ready", "n a new ready"], "-p"),
    ] {
        let set = set(strategy, 0);
        let nodes: Vec<_> = nodes.iter().map(|name| node(name)).collect();
        let pods: Vec<_> = pods.iter().map(|pod_text| pod(pod_text)).collect();
        let plan = View::new(&set, "new", &verdicts(&set, &nodes), &pods, now()).rolling_update();
        assert_eq!(text(&plan), expected, "{what}");
    }
}

#[test]
fn status_counts_nodes() {
    let set = set(json!(null), 30);
    let nodes: Vec<_> = ["a", "b", "c", "d", "t", "x"].into_iter().map(node).collect();
    let pods: Vec<_> =
        ["p a new ready", "q b old ready age=10", "r c new", "s t new ready", "u a old age=1 ready"]
            .into_iter()
            .map(pod)
            .collect();
    let nodes = verdicts(&set, &nodes);
    let view = View::new(&set, "new", &nodes, &pods, now());
    let status = view.status(true);
    assert_eq!(status.desired_number_scheduled, 4);
    assert_eq!(status.current_number_scheduled, 3);
    assert_eq!(status.number_misscheduled, 1);
    assert_eq!(status.number_ready, 2);
    assert_eq!(status.number_available, Some(1), "b is ready for ten seconds only");
    assert_eq!(status.number_unavailable, Some(3));
    assert_eq!(status.updated_number_scheduled, Some(2));
    assert_eq!(status.observed_generation, Some(2));
    assert_eq!(view.status(false).observed_generation, None, "not acted on yet");
}

#[test]
fn five_thousand_nodes_are_looked_at_once_each() {
    let set = set(rolling(json!("10%"), json!(0)), 0);
    let nodes: Vec<_> = (0..5000).map(|index| node(&format!("n{index:04}"))).collect();
    let pods: Vec<_> = (0..5000).map(|index| pod(&format!("p{index:04} n{index:04} old ready"))).collect();
    let nodes = verdicts(&set, &nodes);
    let view = View::new(&set, "new", &nodes, &pods, now());
    assert!(text(&view.manage()).is_empty());
    assert_eq!(view.rolling_update().delete.len(), 500);
    assert_eq!(view.status(true).number_available, Some(5000));
}

/// A pod of the model, which kubelet and scheduler act on.
#[derive(Debug, Clone)]
struct ModelPod {
    node: usize,
    new: bool,
    ready: bool,
    failed: bool,
    deleting: bool,
    id: usize,
}

impl ModelPod {
    fn object(&self) -> Arc<Pod> {
        let mut words = vec![
            format!("p{}", self.id),
            format!("n{}", self.node),
            if self.new { "new" } else { "old" }.to_owned(),
        ];
        for (state, word) in [(self.ready, "ready"), (self.failed, "failed"), (self.deleting, "deleting")] {
            words.extend(state.then(|| word.to_owned()));
        }
        pod(&words.join(" "))
    }
}

fn any_pods(nodes: usize) -> impl Strategy<Value = Vec<ModelPod>> {
    let any_pod = (0..nodes, any::<bool>(), 0..8_u8).prop_map(|(node, new, state)| ModelPod {
        node,
        new,
        ready: state < 5,
        failed: state == 5,
        deleting: state == 6,
        id: 0,
    });
    prop::collection::vec(any_pod, 0..nodes * 2).prop_map(|mut pods| {
        pods.iter_mut().enumerate().for_each(|(id, pod)| pod.id = id);
        pods
    })
}

/// The nodes with a pod that serves.
fn served(pods: &[ModelPod]) -> usize {
    let mut nodes: BTreeMap<usize, bool> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| pod.ready && !pod.deleting && !pod.failed) {
        nodes.insert(pod.node, true);
    }
    nodes.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// From any state each node ends with one pod of the revision in force, and no step of the update takes more
    /// nodes out of service than allowed.
    #[test]
    fn any_state_reaches_the_goal_within_the_limits(
        start in any_pods(5),
        limit in 1..3_i32,
        surge in any::<bool>(),
        order in prop::collection::vec(any::<prop::sample::Index>(), 400),
    ) {
        let strategy = if surge { rolling(json!(0), json!(limit)) } else { rolling(json!(limit), json!(0)) };
        let set = set(strategy, 0);
        prop_assert!(is_rolling_update(&set));
        let nodes: Vec<_> = (0..5).map(|index| node(&format!("n{index}"))).collect();
        let nodes = verdicts(&set, &nodes);
        let mut pods = start;
        let mut next_id = 100;
        let mut settled = false;
        for step in order {
            // The controller acts on the objects that it sees.
            let objects: Vec<_> = pods.iter().map(ModelPod::object).collect();
            let view = View::new(&set, "new", &nodes, &objects, now());
            let mut plan = view.manage();
            let managed = !plan.create.is_empty() || !plan.delete.is_empty();
            let before = served(&pods);
            if !managed {
                plan = view.rolling_update();
            }
            let idle = plan.create.is_empty() && plan.delete.is_empty();
            for node in &plan.create {
                let node = node[1..].parse().unwrap();
                pods.push(ModelPod { node, new: true, ready: false, failed: false, deleting: false, id: next_id });
                next_id += 1;
            }
            for doomed in &plan.delete {
                let id: usize = doomed.pod.metadata.name.as_deref().unwrap()[1..].parse().unwrap();
                pods.iter_mut().filter(|pod| pod.id == id).for_each(|pod| pod.deleting = true);
            }
            if !managed {
                let after = served(&pods);
                let floor = if surge { before } else { before.min(5 - usize::try_from(limit).unwrap()) };
                prop_assert!(after >= floor, "{before} nodes served, then {after}: {pods:?}");
                for node in 0..5 {
                    let live = pods.iter().filter(|pod| pod.node == node && !pod.deleting).count();
                    prop_assert!(live <= if surge { 2 } else { 1 }, "{live} pods on node {node}");
                }
            }
            // Then one kubelet does something: a pod ends, fails no more, or becomes ready.
            let moving: Vec<_> = (0..pods.len()).filter(|at| pods[*at].deleting || !pods[*at].ready).collect();
            if moving.is_empty() {
                if idle {
                    settled = true;
                    break;
                }
                continue;
            }
            let at = moving[step.index(moving.len())];
            if pods[at].deleting {
                pods.remove(at);
            } else if !pods[at].failed {
                pods[at].ready = true;
            }
        }
        prop_assert!(settled, "still at it: {pods:?}");
        prop_assert_eq!(pods.len(), 5);
        prop_assert!(pods.iter().all(|pod| pod.new && pod.ready));
    }
}
