//! A search that remembers must come to the results of one that asks every plugin.

use std::sync::Arc;

use ferrite_json::json;
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Node;
use proptest::prelude::*;

use crate::cache::Cache;
use crate::cycle::{ScheduleError, Search, schedule};
use crate::framework::{Framework, Handle, Nomination, Registry};
use crate::profile::Profile;
use crate::snapshot::{PodInfo, Shapes, Snapshot};

const NODES: usize = 4;
const SHAPES: usize = 7;

#[derive(Debug, Clone)]
enum Step {
    /// A pod of a shape arrives on a node.
    Place(usize, usize),
    /// The oldest pod of a node goes.
    Remove(usize),
    Nominate(usize, usize),
    /// The pod that was nominated first is not any more.
    Withdraw,
    Cordon(usize, bool),
    Label(usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..SHAPES, 0..NODES).prop_map(|(shape, node)| Step::Place(shape, node)),
        3 => (0..NODES).prop_map(Step::Remove),
        2 => (0..SHAPES, 0..NODES).prop_map(|(shape, node)| Step::Nominate(shape, node)),
        1 => Just(Step::Withdraw),
        1 => (0..NODES, any::<bool>()).prop_map(|(node, is)| Step::Cordon(node, is)),
        1 => (0..NODES, any::<bool>()).prop_map(|(node, is)| Step::Label(node, is)),
    ]
}

fn pod(shapes: &mut Shapes, name: &str, shape: usize) -> Arc<PodInfo> {
    let spec = [
        json!({"priority": 0, "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}),
        json!({"priority": 9, "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]}),
        json!({"priority": 5, "containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}]}]}),
        json!({"priority": 9, "nodeSelector": {"disk": "fast"},
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]}),
        // The rest depends on other nodes, too.
        json!({"priority": 3, "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone",
                "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "a"}}}],
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}),
        json!({"priority": 9, "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app": "a"}}, "nodeTaintsPolicy": "Honor"},
                {"maxSkew": 2, "topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app": "a"}}}],
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]}),
        json!({"priority": 5, "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "host", "labelSelector": {"matchLabels": {"app": "a"}}}]}},
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}),
    ];
    let labels = if shape < 4 { json!({}) } else { json!({"app": "a"}) };
    let metadata = json!({"name": name, "namespace": "ns", "uid": name, "labels": labels});
    let pod = json!({"metadata": metadata, "spec": spec[shape]});
    Arc::new(shapes.pod(&ferrite_json::from_value(pod).unwrap()))
}

fn node(index: usize, is_cordoned: bool, is_fast: bool) -> Arc<Node> {
    let mut labels = json!({"zone": format!("z{}", index % 2), "host": format!("n{index}")});
    if is_fast {
        labels["disk"] = "fast".into();
    }
    let node = json!({"metadata": {"name": format!("n{index}"), "labels": labels},
        "spec": {"unschedulable": is_cordoned},
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "6"}}});
    Arc::new(ferrite_json::from_value(node).unwrap())
}

/// The result of a cycle, as far as chance has no part in it.
fn result(framework: &Framework, snapshot: &Snapshot, pod: &PodInfo, search: &mut Search) -> String {
    let result = schedule(framework, snapshot, &[], pod, search, |_| 0).now_or_never();
    match result.expect("nothing waits without extenders") {
        Ok(placement) => format!("{} {} {}", placement.node, placement.evaluated, placement.feasible),
        Err(ScheduleError::Unschedulable(error)) => {
            let victims: Vec<i32> = error.victims.pods.iter().map(|victim| victim.priority).collect();
            let is_nominated = matches!(error.nomination, Nomination::Node(_));
            format!("{error} {:?} {is_nominated} {victims:?}", error.rejected_by)
        }
        Err(ScheduleError::Plugin(error)) => panic!("{error}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn remembered_results_are_those_of_the_plugins(steps in prop::collection::vec(step(), 1..40)) {
        let new = || Framework::new(&Profile::default(), &Registry::default(), &Handle::default()).unwrap();
        let (framework, mut remembering) = (new(), Search::default());
        let (mut cache, mut snapshot, mut shapes) = (Cache::new(), Snapshot::default(), Shapes::default());
        let (mut cordoned, mut fast) = ([false; NODES], [false, true, true, false]);
        let (mut placed, mut nominated): (Vec<Vec<_>>, Vec<_>) = (vec![Vec::new(); NODES], Vec::new());
        for (index, is_fast) in fast.iter().enumerate() {
            cache.set_node(node(index, false, *is_fast));
        }
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Place(shape, at) => {
                    let pod = pod(&mut shapes, &format!("p{number}"), shape);
                    placed[at].push(pod.key.clone());
                    cache.set_pod(pod, &format!("n{at}"));
                }
                Step::Remove(at) => {
                    if !placed[at].is_empty() {
                        cache.remove_pod(&placed[at].remove(0));
                    }
                }
                Step::Nominate(shape, at) => {
                    let pod = pod(&mut shapes, &format!("p{number}"), shape);
                    nominated.push((pod.clone(), shape));
                    cache.nominate(pod, &format!("n{at}"));
                }
                Step::Withdraw => {
                    if !nominated.is_empty() {
                        cache.remove_nomination(&nominated.remove(0).0.key);
                    }
                }
                Step::Cordon(at, is) => cordoned[at] = is,
                Step::Label(at, is) => fast[at] = is,
            }
            if let Step::Cordon(at, _) | Step::Label(at, _) = step {
                cache.set_node(node(at, cordoned[at], fast[at]));
            }
            cache.update(&mut snapshot);
            let mut pods: Vec<_> = (0..SHAPES).map(|s| pod(&mut shapes, &format!("new{number}"), s)).collect();
            // One that room is kept for does not stand in its own way.
            pods.extend(nominated.last().map(|(pod, _)| pod.clone()));
            for pod in pods {
                let mut plain = Search { start: remembering.start, ..Search::default() };
                let expected = result(&new(), &snapshot, &pod, &mut plain);
                prop_assert_eq!(result(&framework, &snapshot, &pod, &mut remembering), expected);
                prop_assert_eq!(remembering.start, plain.start);
            }
        }
    }
}
