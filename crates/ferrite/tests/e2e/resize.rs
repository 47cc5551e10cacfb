//! Running pods get other CPU and memory.

use crate::world::*;
use ferrite_json::Value;

/// A pod that takes a part of the node's memory.
const OTHER: &str = r#"{"spec":{"containers":[{"name":"other","image":"ferrite.local/tools","args":["sleep"],
    "resources":{"requests":{"memory":"64Mi"}}}]}}"#;

fn resize_arguments(patch: &str) -> [String; 7] {
    ["patch", "pod", "p", "--subresource", "resize", "--patch", patch].map(str::to_owned)
}

/// All memory that the node has for pods.
fn all_memory(world: &World) -> String {
    let nodes = world.get(&["nodes"]);
    nodes["items"][0]["status"]["allocatable"]["memory"].as_str().unwrap().to_owned()
}

#[test]
fn a_running_pod_is_resized_in_place() {
    let mut world = World::start();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  containers:
  - name: c
    image: {TOOLS}
    args: [sleep]
    resources: {{limits: {{memory: 64Mi, cpu: 200m}}}}
    resizePolicy: [{{resourceName: memory, restartPolicy: NotRequired}}]
"#
    ));
    let pid = container_pid(&world.wait_ready("p"));
    let limit = || memory_limit(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap());
    assert_eq!(limit(), "67108864");
    let patch = |memory: &str| {
        let amounts = format!(r#"{{"memory":"{memory}","cpu":"300m"}}"#);
        let resources = format!(r#"{{"limits":{amounts},"requests":{amounts}}}"#);
        format!(r#"{{"spec":{{"containers":[{{"name":"c","resources":{resources}}}]}}}}"#)
    };
    let resize = |world: &World, memory: &str| {
        world.kubectl(&resize_arguments(&patch(memory)).each_ref().map(String::as_str));
    };
    let has = |pod: &Value, memory: &str| {
        let status = container_status(pod);
        status["resources"]["limits"]["memory"] == memory
            && status["allocatedResources"]["memory"] == memory
            && condition(pod, "PodResizeInProgress").is_none()
    };
    resize(&world, "96Mi");
    let pod = world.watch(&["pod", "p"], |pod| has(pod, "96Mi"));
    assert_eq!((container_status(&pod)["restartCount"].clone(), container_pid(&pod)), (Value::from(0), pid));
    assert_eq!(limit(), "100663296");
    // More than the node has is refused at once; more than is left waits, and gets nothing.
    let refused = world.kubectl_fails(&resize_arguments(&patch("900Ti")).each_ref().map(String::as_str));
    assert!(refused.contains("node didn't have enough allocatable resources: memory"), "{refused}");
    world.kubectl(&["run", "other", "--image", TOOLS, "--overrides", OTHER, "--", "sleep"]);
    world.wait_ready("other");
    resize(&world, &all_memory(&world));
    let pod = world.watch(&["pod", "p"], |pod| condition(pod, "PodResizePending") == Some("True"));
    assert_eq!(container_status(&pod)["allocatedResources"]["memory"], "96Mi");
    resize(&world, "80Mi");
    world.watch(&["pod", "p"], |pod| has(pod, "80Mi") && condition(pod, "PodResizePending").is_none());
    assert_eq!(limit(), "83886080");
    // The node remembers the allocated amounts after a restart.
    world.kill();
    world.start_again();
    let pod = world.watch(&["pod", "p"], |pod| is_ready(pod) && has(pod, "80Mi"));
    assert_eq!(container_pid(&pod), pid);
    let events = world.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]);
    assert!(events.contains("ResizeCompleted") && events.contains("ResizeDeferred"), "{events}");
}

/// The limits of memory, in mebibytes, of the pod's group and of those of containers `a` and `b`.
fn limits_of(pod: &Value) -> [u64; 3] {
    let groups = |container: usize| {
        let pid = status_pid(&pod["status"]["containerStatuses"][container]);
        std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap()
    };
    let mebibytes = |limit: String| limit.parse::<u64>().unwrap() >> 20;
    let (a, b) = (groups(0), groups(1));
    [mebibytes(limit_at(&a, 1)), mebibytes(memory_limit(&a)), mebibytes(memory_limit(&b))]
}

#[test]
fn a_whole_pod_is_resized_in_place() {
    let mut world = World::start();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  resources: {{requests: {{memory: 128Mi, cpu: 400m}}, limits: {{memory: 128Mi, cpu: 400m}}}}
  containers:
  - name: a
    image: {TOOLS}
    args: [eat, '48']
  - name: b
    image: {TOOLS}
    args: [sleep]
    resources: {{limits: {{memory: 32Mi}}}}
"#
    ));
    let pod = world.wait_ready("p");
    assert_eq!(pod["status"]["qosClass"], "Guaranteed");
    let features = world.kubectl(&["get", "nodes", "-o", "jsonpath={.items[0].status.declaredFeatures}"]);
    assert!(features.contains("InPlacePodLevelResourcesVerticalScaling"), "{features}");
    let resize = |world: &World, memory: &str, cpu: &str| {
        let amounts = format!(r#"{{"memory":"{memory}","cpu":"{cpu}"}}"#);
        let patch = format!(r#"{{"spec":{{"resources":{{"limits":{amounts},"requests":{amounts}}}}}}}"#);
        world.kubectl(&resize_arguments(&patch).each_ref().map(String::as_str));
    };
    // The status shows what the pod's control group has, and what is allocated.
    let shows = |pod: &Value, present: &str, allocated: &str| {
        let status = &pod["status"];
        let amounts = |side: &str| status["resources"][side]["memory"] == present;
        amounts("limits") && amounts("requests") && status["allocatedResources"]["memory"] == allocated
    };
    let settled = |pod: &Value, memory: &str| {
        shows(pod, memory, memory)
            && condition(pod, "PodResizeInProgress").is_none()
            && condition(pod, "PodResizePending").is_none()
    };
    let pod = world.watch(&["pod", "p"], |pod| settled(pod, "128Mi"));
    assert_eq!(limits_of(&pod), [128, 128, 32]);
    let ids = |pod: &Value| {
        let all = pod["status"]["containerStatuses"].as_array().unwrap().clone();
        all.into_iter().map(|status| status["containerID"].clone()).collect::<Vec<_>>()
    };
    let containers = ids(&pod);
    // It grows with the container that has no limit of its own, and nothing is started again.
    resize(&world, "192Mi", "500m");
    let pod = world.watch(&["pod", "p"], |pod| settled(pod, "192Mi"));
    assert_eq!((limits_of(&pod), ids(&pod)), ([192, 192, 32], containers.clone()));
    assert_eq!(pod["status"]["resources"]["limits"]["cpu"], "500m");
    // Without room it keeps its size.
    world.kubectl(&["run", "other", "--image", TOOLS, "--overrides", OTHER, "--", "sleep"]);
    world.wait_ready("other");
    resize(&world, &all_memory(&world), "500m");
    let pod = world.watch(&["pod", "p"], |pod| condition(pod, "PodResizePending") == Some("True"));
    assert!(shows(&pod, "192Mi", "192Mi"), "{pod}");
    // Memory that is in use is not taken away: the pod has a smaller size allocated and still its limits, also after a
    // restart of the node in the middle.
    resize(&world, "40Mi", "300m");
    let fails = |pod: &Value| {
        let all = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().any(|c| {
            let message = c["message"].as_str().unwrap_or_default();
            c["type"] == "PodResizeInProgress"
                && c["reason"] == "Error"
                && message.contains("below current usage")
        })
    };
    let pod = world.watch(&["pod", "p"], |pod| fails(pod) && shows(pod, "192Mi", "40Mi"));
    assert_eq!((limits_of(&pod)[0], ids(&pod)), (192, containers.clone()));
    world.kill();
    world.start_again();
    let pod = world.watch(&["pod", "p"], |pod| is_ready(pod) && fails(pod));
    assert!(shows(&pod, "192Mi", "40Mi"), "{pod}");
    assert_eq!((limits_of(&pod)[0], ids(&pod)), (192, containers.clone()));
    // A size that holds the memory in use is one to shrink to.
    resize(&world, "96Mi", "300m");
    let pod = world.watch(&["pod", "p"], |pod| settled(pod, "96Mi"));
    assert_eq!((limits_of(&pod), ids(&pod)), ([96, 96, 32], containers));
    let events = world.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]);
    for reason in ["ResizeStarted", "ResizeCompleted", "ResizeDeferred", "ResizeError"] {
        assert!(events.contains(reason), "{reason}: {events}");
    }
}

/// The memory limit of a process's control group, whichever version the machine has.
pub fn memory_limit(groups: &str) -> String {
    limit_at(groups, 0)
}

/// The same of the group so many levels above.
fn limit_at(groups: &str, levels: usize) -> String {
    let v1 = groups.lines().find_map(|l| l.split_once(":memory:").map(|(_, path)| path));
    let path = match v1 {
        Some(path) => format!("/sys/fs/cgroup/memory{}/memory.limit_in_bytes", above(path, levels)),
        None => {
            let path = groups.lines().find_map(|l| l.strip_prefix("0::")).unwrap();
            format!("/sys/fs/cgroup{}/memory.max", above(path, levels))
        }
    };
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

fn above(path: &str, levels: usize) -> &str {
    (0..levels).fold(path, |path, _| path.rsplit_once('/').unwrap().0)
}
