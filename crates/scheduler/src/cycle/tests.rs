use ferrite_json::{Value, json};

use super::*;
use crate::framework::{Handle, Registry};
use crate::profile::Profile;
use futures_util::FutureExt;

fn node(name: &str, change: &[(&str, Value)]) -> Arc<NodeInfo> {
    let mut value = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "disk": "ssd"}},
        "spec": {"taints": null, "unschedulable": false},
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"}},
    });
    for (pointer, new) in change {
        *value.pointer_mut(pointer).unwrap() = new.clone();
    }
    Arc::new(NodeInfo::new(Arc::new(ferrite_json::from_value(value).unwrap())))
}

fn pod(name: &str, cpu: &str, spec: Value) -> Arc<PodInfo> {
    let mut value = json!({
        "metadata": {"name": name, "namespace": "ns", "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}]},
    });
    for (key, field) in spec.as_object().unwrap() {
        value["spec"][key] = field.clone();
    }
    Arc::new(PodInfo::new(&ferrite_json::from_value(value).unwrap()))
}

fn with_pods(node: &Arc<NodeInfo>, pods: &[Arc<PodInfo>]) -> Arc<NodeInfo> {
    let mut node = (**node).clone();
    pods.iter().for_each(|pod| node.add_pod(pod.clone()));
    Arc::new(node)
}

fn framework() -> Framework {
    Framework::new(&Profile::default(), &Registry::default(), &Handle::default()).unwrap()
}

fn run_in(snapshot: &Snapshot, pod: &PodInfo, search: &mut Search) -> Result<Placement, FitError> {
    let framework = framework();
    let result = schedule(&framework, snapshot, &[], pod, search, |_| 0).now_or_never();
    result.expect("nothing waits without extenders").map_err(|error| match error {
        ScheduleError::Unschedulable(error) => *error,
        ScheduleError::Plugin(error) => panic!("{error}"),
    })
}

fn run(nodes: Vec<Arc<NodeInfo>>, pod: &PodInfo) -> Result<Placement, FitError> {
    let mut snapshot = Snapshot::new(nodes);
    snapshot.has_affinity = true;
    run_in(&snapshot, pod, &mut Search::default())
}

#[test]
fn evaluations_of_plugins_are_counted() {
    let profile = Profile { scheduler_name: "counted".into(), ..Profile::default() };
    let framework = Framework::new(&profile, &Registry::default(), &Handle::default()).unwrap();
    let count = |plugin: &str, point: &str| measures::evaluations(plugin, point, "counted").get();
    let snapshot = Snapshot::new(vec![
        node("a", &[]),
        node("b", &[]),
        node("c", &[("/spec/unschedulable", true.into())]),
    ]);
    let mut search = Search::default();
    let schedule = |search: &mut Search| {
        let pod = pod("p", "1", json!({}));
        schedule(&framework, &snapshot, &[], &pod, search, |_| 0).now_or_never().unwrap().unwrap();
    };
    schedule(&mut search);
    assert_eq!(count("NodeDeclaredFeatures", "PreFilter"), 1);
    // The first filter sees three nodes; one of them gets no further.
    assert_eq!((count("NodeUnschedulable", "Filter"), count("NodeResourcesFit", "Filter")), (3, 2));
    assert_eq!(count("NodeResourcesFit", "Score"), 2);
    assert_eq!(count("InterPodAffinity", "PreScore"), 1);
    assert_eq!(count("NodePorts", "Filter"), 0, "the pod has no ports");
    schedule(&mut search);
    assert_eq!((count("NodeUnschedulable", "Filter"), count("NodeResourcesFit", "Score")), (6, 4));
}

#[test]
fn rejections_are_told_as_upstream_tells_them() {
    let taint = json!([{"key": "k", "effect": "NoSchedule"}]);
    let hosts_port = json!({"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]});
    let taken = pod("taken", "0", hosts_port.clone());
    let web = pod("web", "0", json!({}));
    let not_helpful = "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.";
    let no_victims = "preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.";
    let small = |free: &str| with_pods(&node("n", &[]), &[pod("present", free, json!({}))]);
    for (node, pod, reason, remedy) in [
        (small("2"), pod("p", "3", json!({})), "Insufficient cpu", no_victims),
        (node("n", &[]), pod("p", "5", json!({})), "Insufficient cpu", not_helpful),
        (
            node("n", &[("/spec/unschedulable", true.into())]),
            pod("p", "1", json!({})),
            "node(s) were unschedulable",
            not_helpful,
        ),
        (
            node("n", &[("/spec/taints", taint)]),
            pod("p", "1", json!({})),
            "node(s) had untolerated taint(s)",
            not_helpful,
        ),
        (
            node("n", &[]),
            pod("p", "1", json!({"nodeSelector": {"disk": "hdd"}})),
            "node(s) didn't match Pod's node affinity/selector",
            not_helpful,
        ),
        (
            with_pods(&node("n", &[]), &[taken]),
            pod("p", "1", hosts_port),
            "node(s) didn't have free ports for the requested pod ports",
            no_victims,
        ),
        (
            node("n", &[("/status/allocatable/pods", "0".into())]),
            pod("p", "1", json!({})),
            "Too many pods",
            no_victims,
        ),
        (
            with_pods(&node("n", &[]), std::slice::from_ref(&web)),
            pod(
                "p",
                "1",
                json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "web"}}}]}}}),
            ),
            "node(s) didn't match pod anti-affinity rules",
            no_victims,
        ),
        (
            node("n", &[]),
            pod(
                "p",
                "1",
                json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "other"}}}]}}}),
            ),
            "node(s) didn't match pod affinity rules",
            not_helpful,
        ),
        (
            node("n", &[]),
            pod(
                "p",
                "1",
                json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone",
                "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}]}),
            ),
            "node(s) didn't match pod topology spread constraints (missing required label)",
            not_helpful,
        ),
    ] {
        let error = run(vec![node], &pod).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("0/1 nodes are available: 1 {reason}. no new claims to deallocate, {remedy}")
        );
    }
}

#[test]
fn reasons_are_counted_and_sorted() {
    let nodes = vec![
        node("a", &[("/spec/unschedulable", true.into())]),
        node("b", &[("/status/allocatable/cpu", "1".into())]),
        node("c", &[("/status/allocatable/cpu", "1".into()), ("/status/allocatable/memory", "1Mi".into())]),
    ];
    let error = run(nodes, &pod("p", "2", json!({"preemptionPolicy": "Never"}))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "0/3 nodes are available: 1 Insufficient memory, 1 node(s) were unschedulable, 2 Insufficient cpu. \
         no new claims to deallocate, preemption: not eligible due to preemptionPolicy=Never."
    );
    assert_eq!(error.rejected_by, ["NodeResourcesFit", "NodeUnschedulable"]);
    let error = run(vec![], &pod("p", "1", json!({}))).unwrap_err();
    assert_eq!(error.to_string(), "no nodes available to schedule pods");
    assert_eq!(error.nomination, Nomination::Clear, "there is no node to be nominated to");
}

#[test]
fn scores_choose_among_feasible_nodes() {
    let busy = with_pods(&node("a-busy", &[]), &[pod("present", "3", json!({}))]);
    let prefer = |key: &str, value: &str| {
        json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}}]}}})
    };
    let soft = json!([{"key": "k", "effect": "PreferNoSchedule"}]);
    for (what, nodes, pod, expected) in [
        ("most free", vec![busy.clone(), node("b", &[])], pod("p", "1", json!({})), "b"),
        (
            "preferred affinity outweighs free room",
            vec![busy.clone(), node("b", &[])],
            pod("p", "500m", prefer("kubernetes.io/hostname", "a-busy")),
            "a-busy",
        ),
        (
            "no soft taint",
            vec![node("a", &[("/spec/taints", soft)]), node("b", &[])],
            pod("p", "1", json!({})),
            "b",
        ),
        (
            "required spread",
            vec![with_pods(&node("a", &[]), &[self::pod("x", "0", json!({}))]), busy],
            pod(
                "p",
                "100m",
                json!({"topologySpreadConstraints": [{"maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": "web"}}}]}),
            ),
            "a",
        ),
    ] {
        assert_eq!(run(nodes, &pod).unwrap().node, expected, "{what}");
    }
}

#[test]
fn siblings_spread_over_hosts_by_default() {
    let siblings = Some([("app".to_owned(), "web".to_owned())].into_iter().collect());
    let plain = |name: &str| {
        let pod = ferrite_json::from_value(
            json!({"metadata": {"name": name, "namespace": "ns", "labels": {"app": "web"}},
                                                "spec": {"containers": []}}),
        );
        PodInfo::new(&pod.unwrap()).with_siblings(siblings.clone())
    };
    let nodes = vec![with_pods(&node("a", &[]), &[Arc::new(plain("x"))]), node("b", &[])];
    assert_eq!(run(nodes, &plain("p")).unwrap().node, "b");
}

#[test]
fn large_clusters_are_searched_in_part_and_in_turn() {
    for (nodes, percentage, expected) in [
        (50, None, 50),
        (100, None, 100),
        (1000, None, 420),
        (5000, None, 500),
        (6000, None, 300),
        (1000, Some(1), 100),
        (1000, Some(100), 1000),
    ] {
        assert_eq!(enough(nodes, percentage), expected, "{nodes} {percentage:?}");
    }
    let snapshot = Snapshot::new((0..200).map(|n| node(&format!("n{n:03}"), &[])));
    let mut search = Search::default();
    let found = run_in(&snapshot, &pod("p", "1", json!({})), &mut search).unwrap();
    assert_eq!((found.evaluated, found.feasible), (100, 100));
    assert_eq!(search.start, 100);
}
