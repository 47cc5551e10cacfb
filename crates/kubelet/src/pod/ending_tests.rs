//! Ends of pods, on a paused clock: for the sake of others, in a hurry, in order, and without the API.

use super::ending::Ordered;
use super::status::Verdict;
use crate::clock;
use crate::testing::Harness;
use ferrite_json::{Value, json};
use std::time::Duration;

fn container(name: &str) -> Value {
    json!({"name": name, "image": "busybox:1", "imagePullPolicy": "IfNotPresent"})
}

fn ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn verdict(reason: &str, grace: Option<Duration>) -> Verdict {
    Verdict { reason: reason.into(), message: String::new(), disruption: None, grace }
}

fn position(calls: &[String], call: &str) -> usize {
    calls.iter().position(|c| c == call).unwrap_or_else(|| panic!("no {call} in {calls:?}"))
}

#[tokio::test(start_paused = true)]
async fn an_evicted_pod_frees_the_disk_without_the_api() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["terminationMessagePath"] = json!("/dev/termination-log");
    c["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    let volumes = json!([{"name": "v", "emptyDir": {}}]);
    h.create("p", json!({"restartPolicy": "Never", "containers": [c], "volumes": volumes}));
    h.until("p", "ready", ready).await;
    let mounts = h.runtime.container_config("c").unwrap().mounts;
    let path_of = |path: &str| {
        std::path::PathBuf::from(&mounts.iter().find(|m| m.container_path == path).unwrap().host_path)
    };
    std::fs::write(path_of("/dev/termination-log"), "last words").unwrap();
    std::fs::write(path_of("/v").join("large"), "x").unwrap();
    h.api.refuse_patches(true);
    assert_eq!(h.workers.end("uid-p", verdict("Evicted", Some(Duration::from_secs(1)))), Ordered::First);
    let released = |_: &_| h.workers.is_released("uid-p").then_some(());
    h.api.until("the pod holds nothing", released).await;
    assert!(!path_of("/v").exists());
    assert_eq!(h.pod("p").unwrap()["status"]["phase"], "Running", "the API does not know yet");
    // The next kubelet finds what the status needs.
    let h = h.restart().await;
    h.api.refuse_patches(false);
    let pod = h.until("p", "ended", |p| p["status"]["phase"] == "Failed").await;
    assert_eq!(pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"], "last words");
}

#[tokio::test(start_paused = true)]
async fn an_eviction_hurries_a_preempted_pod() {
    let h = Harness::start().await;
    h.runtime.ignore_term();
    h.create("p", json!({"terminationGracePeriodSeconds": 86_400, "containers": [container("c")]}));
    h.until("p", "ready", ready).await;
    assert_eq!(h.workers.end("uid-p", verdict("Preempting", None)), Ordered::First);
    h.until_event("Killing", "Stopping container c").await;
    let before = h.context.clock.now();
    assert_eq!(h.workers.end("uid-p", verdict("Evicted", Some(Duration::from_secs(1)))), Ordered::Sooner);
    let pod = h.until_phase("p", "Failed").await;
    assert_eq!(pod["status"]["reason"], "Preempting");
    assert!(clock::since(before, h.context.clock.now()).as_secs() < 60);
}

#[tokio::test(start_paused = true)]
async fn a_pull_does_not_hold_up_an_ordered_end() {
    let h = Harness::start().await;
    h.create("p", json!({"containers": [{"name": "c", "image": "stuck:1"}]}));
    h.until_event("Pulling", "stuck:1").await;
    h.workers.end("uid-p", verdict("Evicted", Some(Duration::from_secs(1))));
    let before = h.context.clock.now();
    h.until_phase("p", "Failed").await;
    assert!(clock::since(before, h.context.clock.now()).as_secs() < 60);
}

#[tokio::test(start_paused = true)]
async fn a_pod_past_its_deadline_can_be_hurried() {
    let h = Harness::start().await;
    h.runtime.ignore_term();
    h.create(
        "p",
        json!({"activeDeadlineSeconds": 30, "terminationGracePeriodSeconds": 3000, "containers": [container("c")]}),
    );
    h.until("p", "ready", ready).await;
    h.until_event("Killing", "Stopping container c").await;
    let before = h.context.clock.now();
    h.delete("p", 1);
    h.until_gone("p").await;
    assert!(clock::since(before, h.context.clock.now()).as_secs() < 60);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_ends_is_probed_for_readiness_only() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["readinessProbe"] = json!({"exec": {"command": ["ready"]}, "periodSeconds": 1, "failureThreshold": 1});
    c["livenessProbe"] = json!({"exec": {"command": ["live"]}, "periodSeconds": 1, "failureThreshold": 1});
    c["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 100}}});
    h.create("p", json!({"terminationGracePeriodSeconds": 200, "containers": [c]}));
    h.until("p", "ready", ready).await;
    h.runtime.exec_exits("live", 1);
    h.delete("p", 200);
    h.until_event("Killing", "Stopping container c").await;
    h.runtime.exec_exits("ready", 1);
    let pod = h.until("p", "not ready any more", |p| !ready(p)).await;
    assert!(!pod["status"]["containerStatuses"][0]["state"]["running"].is_null(), "{pod}");
    assert_eq!(pod["status"]["phase"], "Running");
    h.until_gone("p").await;
    let events = h.api.list("events");
    assert!(
        !events.iter().any(|e| e["message"].as_str().is_some_and(|m| m.contains("Liveness"))),
        "{events:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn sidecars_end_in_turn_and_run_their_hooks_at_once() {
    let h = Harness::start().await;
    h.runtime.ignore_term();
    let sidecar = |name: &str| {
        let mut c = container(name);
        c["restartPolicy"] = json!("Always");
        c["lifecycle"] = json!({"preStop": {"exec": {"command": [format!("bye-{name}")]}}});
        c
    };
    h.create("p", json!({"initContainers": [sidecar("s1"), sidecar("s2")], "containers": [container("c")]}));
    h.until("p", "ready", ready).await;
    h.runtime.forget_calls();
    h.delete("p", 10);
    h.until_gone("p").await;
    let calls = h.runtime.calls();
    // The container uses up the whole grace period. Each sidecar still gets the least there is.
    let order = ["stop:c:10", "stop:s2:2", "stop:s1:2"].map(|call| position(&calls, call));
    assert!(order[0] < order[1], "{calls:?}");
    for hook in ["exec:bye-s1", "exec:bye-s2"] {
        assert!(position(&calls, hook) < order[1].min(order[2]), "{calls:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_container_that_has_ended_is_probed_no_more() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["readinessProbe"] = json!({"exec": {"command": ["ready"]}, "periodSeconds": 1, "failureThreshold": 1});
    let mut sidecar = container("s");
    sidecar["restartPolicy"] = json!("Always");
    sidecar["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 100}}});
    let spec = json!({"terminationGracePeriodSeconds": 200, "initContainers": [sidecar], "containers": [c]});
    h.create("p", spec);
    h.until("p", "ready", ready).await;
    h.delete("p", 200);
    h.until_gone("p").await;
    let calls = h.runtime.calls();
    let last = calls.iter().rposition(|call| call == "exec:ready").unwrap();
    assert!(last < position(&calls, "stop:c:200"), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn sidecars_wait_for_those_that_they_serve() {
    let h = Harness::start().await;
    let sidecar = |name: &str| {
        let mut c = container(name);
        c["restartPolicy"] = json!("Always");
        c
    };
    h.create("p", json!({"initContainers": [sidecar("s1"), sidecar("s2")], "containers": [container("c")]}));
    h.until("p", "ready", ready).await;
    h.runtime.forget_calls();
    h.delete("p", 10);
    h.until_gone("p").await;
    let calls = h.runtime.calls();
    let order = ["stop:c:10", "stop:s2:10", "stop:s1:10"].map(|call| position(&calls, call));
    assert!(order.is_sorted(), "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn failed_hooks_keep_their_secrets() {
    let h = Harness::start().await;
    for command in ["post", "pre"] {
        h.runtime.exec_exits(command, 1);
    }
    let mut c = container("c");
    c["lifecycle"] = json!({"preStop": {"exec": {"command": ["pre", "--token=s3cret"]}}});
    h.create("p", json!({"containers": [c]}));
    h.until("p", "ready", ready).await;
    h.delete("p", 30);
    assert_eq!(h.until_event("FailedPreStopHook", "").await, "PreStopHook failed");
    let mut c = container("c");
    c["lifecycle"] = json!({"postStart": {"exec": {"command": ["post", "--token=s3cret"]}}});
    h.create("q", json!({"containers": [c]}));
    assert_eq!(h.until_event("FailedPostStartHook", "").await, "PostStartHook failed");
    // A container whose hook fails is not started again and again without a pause.
    let waits =
        |p: &Value| p["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    h.until("q", "back-off", waits).await;
    let mut c = container("c");
    c["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 100}}});
    h.create("r", json!({"containers": [c]}));
    h.until("r", "ready", ready).await;
    h.delete("r", 5);
    h.until_gone("r").await;
    let about_r = |e: &Value| e["involvedObject"]["name"] == "r" && e["reason"] == "FailedPreStopHook";
    assert!(!h.api.list("events").iter().any(about_r), "a hook that takes long did not fail");
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_the_kubelet_leaves_probed_containers_as_they_are() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["startupProbe"] = json!({"exec": {"command": ["up"]}, "periodSeconds": 1, "failureThreshold": 1});
    c["readinessProbe"] =
        json!({"exec": {"command": ["ready"]}, "periodSeconds": 5, "initialDelaySeconds": 600});
    h.create("p", json!({"containers": [c]}));
    h.until("p", "ready", ready).await;
    h.stop().await;
    h.runtime.exec_exits("up", 1);
    h.runtime.forget_calls();
    let before = h.api.history(&Harness::key("p")).len();
    let h = h.restart().await;
    // Something that makes the kubelet publish.
    let mut pod = h.pod("p").unwrap();
    pod["status"]["phase"] = json!("Pending");
    h.api.put("pods", pod);
    h.until("p", "put right", |p| p["status"]["phase"] == "Running").await;
    h.runtime.exec_exits("ready", 1);
    h.until("p", "not ready", |p| !ready(p)).await;
    let history = h.api.history(&Harness::key("p"));
    let flapped = history[before..history.len() - 1].iter().position(|p| !ready(p));
    assert_eq!(flapped, None, "{history:#?}");
    let calls = h.runtime.calls();
    assert!(!calls.iter().any(|call| call == "exec:up" || call.starts_with("stop")), "{calls:?}");
}
