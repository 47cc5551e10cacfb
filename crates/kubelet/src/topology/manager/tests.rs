//! Pods with processors of their own, on a machine of two sockets (and NUMA nodes) with two processors each. One
//! processor of the first socket is reserved.

use super::*;
use crate::testing::Harness;
use crate::topology::CpuOptions;
use ferrite_json::{Value, json};

fn settings(policy: TopologyPolicy) -> ResourceSettings {
    ResourceSettings {
        cpu_policy: CpuPolicy::Static(CpuOptions::default()),
        topology_policy: policy,
        ..ResourceSettings::default()
    }
}

fn asking(name: &str, cpu: &str) -> Value {
    let amounts = json!({"cpu": cpu, "memory": "1Mi"});
    json!({"containers": [{"name": name, "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": &amounts, "requests": &amounts}}]})
}

fn plain(name: &str) -> Value {
    json!({"containers": [{"name": name, "image": "busybox:1", "imagePullPolicy": "IfNotPresent"}]})
}

fn given(h: &Harness, container: &str) -> LinuxContainerResources {
    let config = h.runtime.container_config(container).unwrap();
    config.linux.unwrap().resources.unwrap()
}

fn state(h: &Harness) -> String {
    std::fs::read_to_string(h.dir.path().join("kubelet/cpu_manager_state")).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_guaranteed_pod_has_processors_for_itself() {
    let h = Harness::start_with(settings(TopologyPolicy::None)).await;
    h.create("shared", plain("s"));
    h.until_phase("shared", "Running").await;
    assert_eq!(given(&h, "s").cpuset_cpus, "0-3");
    h.create("own", asking("o", "1"));
    h.until_phase("own", "Running").await;
    let own = given(&h, "o");
    assert_eq!((own.cpuset_cpus.as_str(), own.cpu_quota), ("1", -1), "and no quota");
    h.runtime.until_cpus("s", "0,2-3").await;
    assert!(state(&h).contains(r#""defaultCpuSet":"0,2-3""#), "{}", state(&h));
    assert!(state(&h).contains(r#""entries":{"uid-own":{"o":"1"}}"#), "{}", state(&h));

    // The kubelet restarts: everything is as it was.
    let h = h.restart().await;
    assert_eq!(h.context.resources.exclusive("uid-own", "o"), [1]);
    h.delete("own", 0);
    h.until_gone("own").await;
    h.runtime.until_cpus("s", "0-3").await;
    assert!(!state(&h).contains("entries"), "{}", state(&h));
}

#[tokio::test(start_paused = true)]
async fn a_container_that_asks_for_too_many_is_refused() {
    let h = Harness::start_with(settings(TopologyPolicy::None)).await;
    // The node promises two processors; four are there, and three can be allocated.
    h.create("p", asking("a", "2"));
    h.until_phase("p", "Running").await;
    assert_eq!(given(&h, "a").cpuset_cpus, "2-3", "a whole socket");
    h.delete("p", 0);
    h.until_gone("p").await;
    assert_eq!(h.context.resources.pods().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn resources_must_be_near_to_one_another_if_the_policy_says_so() {
    let h = Harness::start_with(settings(TopologyPolicy::SingleNumaNode)).await;
    h.create("one", asking("a", "1"));
    h.until_phase("one", "Running").await;
    assert_eq!(given(&h, "a").cpuset_cpus, "1", "the first node that has one");
    h.create("two", asking("b", "1"));
    h.until_phase("two", "Running").await;
    assert_eq!(given(&h, "b").cpuset_cpus, "2");
    h.delete("one", 0);
    h.until_gone("one").await;
    // Two are left, one at each node.
    let pod: Pod = ferrite_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "default", "uid": "p"}, "spec": asking("c", "2")}),
    )
    .unwrap();
    let refused = h.context.resources.allocate(&pod).await.unwrap_err();
    assert_eq!(
        refused.refusal(),
        ("TopologyAffinityError", "Resources cannot be allocated with Topology locality".to_owned())
    );
    h.delete("two", 0);
    h.until_gone("two").await;
    h.context.resources.allocate(&pod).await.unwrap();
    assert_eq!(h.context.resources.exclusive("p", "c"), [2, 3]);
}

#[tokio::test(start_paused = true)]
async fn the_nodes_of_a_pod_are_chosen_once() {
    let pod = |containers: Value| -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": "p", "namespace": "default", "uid": "p"},
            "spec": {"containers": containers}}))
        .unwrap()
    };
    let both = || json!([asking("a", "1")["containers"][0], asking("b", "1")["containers"][0]]);
    for (scope, expected) in [(TopologyScope::Container, [1, 2]), (TopologyScope::Pod, [2, 3])] {
        let settings = ResourceSettings { topology_scope: scope, ..settings(TopologyPolicy::SingleNumaNode) };
        let h = Harness::start_with(settings).await;
        h.context.resources.allocate(&pod(both())).await.unwrap();
        let of = |name: &str| h.context.resources.exclusive("p", name)[0];
        assert_eq!([of("a"), of("b")], expected, "{scope:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_resize_of_a_pod_with_its_own_processors_is_infeasible() {
    let h = Harness::start_with(settings(TopologyPolicy::None)).await;
    h.create("own", asking("o", "1"));
    h.until_phase("own", "Running").await;
    let mut pod = h.pod("own").unwrap();
    pod["spec"]["containers"][0]["resources"] = asking("o", "2")["containers"][0]["resources"].clone();
    pod["metadata"]["generation"] = json!(2);
    h.api.put("pods", pod);
    let pending = |p: &Value| {
        let conditions = p["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|c| c["type"] == "PodResizePending" && c["reason"] == "Infeasible")
    };
    h.until("own", "the resize is infeasible", pending).await;
    assert_eq!(h.context.resources.exclusive("uid-own", "o"), [1]);
}

#[test]
fn settings_that_do_not_go_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let start = |settings: ResourceSettings, topology: CpuTopology| {
        let scope = ferrite_client::Scope::new();
        let devices =
            Devices::open(&dir.path().join("d"), crate::clock::Clock::System, Arc::default(), |_| {}, &scope);
        ResourceManager::start(
            settings,
            topology,
            &NodeReserve { cpu_milli: 1000, ..NodeReserve::default() },
            dir.path(),
            devices.unwrap(),
        )
        .err()
    };
    let machine = crate::topology::test_machine;
    let aligned = CpuPolicy::Static(CpuOptions { align_by_socket: true, ..CpuOptions::default() });
    let single = settings(TopologyPolicy::SingleNumaNode);
    assert!(matches!(
        start(ResourceSettings { cpu_policy: aligned, ..single.clone() }, machine(1, 2, 2, 1)),
        Some(ResourceStartError::AlignBySocket)
    ));
    assert!(matches!(start(single.clone(), machine(9, 1, 1, 1)), Some(ResourceStartError::NumaNodes { .. })));
    let named = ResourceSettings { reserved_cpus: "x".into(), ..settings(TopologyPolicy::None) };
    assert!(matches!(start(named, machine(1, 1, 2, 1)), Some(ResourceStartError::Reserved(_))));
    assert!(start(single.clone(), machine(1, 1, 2, 1)).is_none());
    // The file is of the static policy now.
    let none = ResourceSettings { cpu_policy: CpuPolicy::None, ..single };
    let said = start(none, machine(1, 1, 2, 1)).unwrap().to_string();
    assert!(said.contains("please drain this node and delete the CPU manager checkpoint file"), "{said}");
}

/// Memory of the first node is reserved in part; a pod of a mebibyte has room there.
fn memory_settings(policy: TopologyPolicy) -> ResourceSettings {
    ResourceSettings {
        memory_policy: MemoryPolicy::Static,
        reserved_memory: vec![NumaReservation {
            numa_node: 0,
            limits: [("memory".to_owned(), 1 << 20)].into(),
        }],
        ..settings(policy)
    }
}

fn asking_memory(name: &str, cpu: &str, memory: &str) -> Value {
    let amounts = json!({"cpu": cpu, "memory": memory});
    json!({"containers": [{"name": name, "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": &amounts, "requests": &amounts}}]})
}

fn memory_state(h: &Harness) -> String {
    std::fs::read_to_string(h.dir.path().join("kubelet/memory_manager_state")).unwrap()
}

#[tokio::test(start_paused = true)]
async fn memory_and_processors_come_from_one_node() {
    let h = Harness::start_with(memory_settings(TopologyPolicy::SingleNumaNode)).await;
    // The first node has seven mebibytes and one processor.
    h.create("a", asking_memory("a", "1", "6Mi"));
    h.until_phase("a", "Running").await;
    let a = given(&h, "a");
    assert_eq!((a.cpuset_mems.as_str(), a.cpuset_cpus.as_str()), ("0", "1"));
    h.create("b", asking_memory("b", "500m", "8Mi"));
    h.until_phase("b", "Running").await;
    assert_eq!(given(&h, "b").cpuset_mems, "1");
    assert!(
        memory_state(&h).contains(r#""uid-b":{"b":[{"numaAffinity":[1],"type":"memory","size":8388608}]}"#)
    );
    let blocks = h.context.resources.memory_blocks("uid-a", "a");
    assert_eq!((blocks.len(), blocks[0].size), (1, 6 << 20));
    assert_eq!(h.context.resources.allocatable_memory().len(), 2);

    // No node has as much left.
    h.create("c", asking_memory("c", "100m", "2Mi"));
    let refused = h.until_phase("c", "Failed").await;
    assert_eq!(refused["status"]["reason"], "UnexpectedAdmissionError", "{refused}");

    // The kubelet restarts: everything is as it was. A pod that ends gives its memory back.
    let h = h.restart().await;
    assert_eq!(h.context.resources.memory_blocks("uid-b", "b").len(), 1);
    h.delete("b", 0);
    h.until_gone("b").await;
    assert!(!memory_state(&h).contains("uid-b"), "{}", memory_state(&h));
    h.create("d", asking_memory("d", "100m", "8Mi"));
    h.until_phase("d", "Running").await;
    assert_eq!(given(&h, "d").cpuset_mems, "1");
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_room_on_any_nodes_is_refused() {
    let h = Harness::start_with(memory_settings(TopologyPolicy::None)).await;
    h.create("wide", asking_memory("w", "500m", "10Mi"));
    h.until_phase("wide", "Running").await;
    assert_eq!(given(&h, "w").cpuset_mems, "0-1");
    // Both nodes give memory together: no pod has one of them alone.
    h.create("small", asking_memory("s", "100m", "1Mi"));
    h.until_phase("small", "Running").await;
    assert_eq!(given(&h, "s").cpuset_mems, "0-1");
    h.create("large", asking_memory("l", "100m", "5Mi"));
    let refused = h.until_phase("large", "Failed").await;
    assert_eq!(refused["status"]["reason"], "UnexpectedAdmissionError");
    let message = refused["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("no NUMA nodes with enough memory is available"), "{message}");
    // A pod that is not Guaranteed has memory of all nodes.
    h.create("plain", plain("p"));
    h.until_phase("plain", "Running").await;
    assert_eq!(given(&h, "p").cpuset_mems, "");
}
