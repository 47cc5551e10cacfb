//! Whole lives of pods, on a paused clock.

use crate::testing::Harness;
use ferrite_json::{Value, json};

fn container(name: &str) -> Value {
    json!({"name": name, "image": "busybox:1", "imagePullPolicy": "IfNotPresent"})
}

fn one() -> Value {
    json!({"containers": [container("c")]})
}

fn state(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]["state"]
}

fn condition(pod: &Value, name: &str) -> String {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|c| c["type"] == name).cloned().unwrap_or_default();
    found["status"].as_str().unwrap_or_default().to_string()
}

fn ready(pod: &Value) -> bool {
    condition(pod, "Ready") == "True"
}

#[tokio::test(start_paused = true)]
async fn a_pod_runs_and_is_deleted() {
    let h = Harness::start().await;
    h.create("p", one());
    let pod = h.until("p", "ready", ready).await;
    assert_eq!(pod["status"]["phase"], "Running");
    assert_eq!(pod["status"]["podIP"], "10.1.0.1");
    assert_eq!(pod["status"]["hostIP"], "192.0.2.1");
    assert_eq!(pod["status"]["qosClass"], "BestEffort");
    assert_eq!(pod["status"]["observedGeneration"], 1);
    let status = &pod["status"]["containerStatuses"][0];
    assert_eq!(status["containerID"], "ferrite://c2");
    assert_eq!((&status["restartCount"], &status["started"]), (&json!(0), &json!(true)));
    assert_eq!(h.runtime.calls(), ["sandbox#0", "pull:busybox:1", "start:c#0"]);
    for (reason, part) in [
        ("Pulling", "busybox:1"),
        ("Pulled", "Successfully pulled"),
        ("Created", "Container created"),
        ("Started", "Container started"),
    ] {
        h.until_event(reason, part).await;
    }
    let first = h.api.history(&Harness::key("p"))[1].clone();
    assert_eq!(state(&first)["waiting"]["reason"], "ContainerCreating");
    let config = h.runtime.container_config("c").unwrap();
    assert!(config.envs.iter().any(|e| e.key == "KUBERNETES_SERVICE_HOST" && e.value == b"10.96.0.1"));
    assert_eq!(config.log_path, "c/0.log");

    h.runtime.forget_calls();
    h.delete("p", 30);
    h.until_gone("p").await;
    assert_eq!(h.runtime.calls()[..2], ["stop:c:30".to_string(), "stop-sandbox".to_string()]);
    let last = h.api.history(&Harness::key("p")).pop().unwrap();
    assert_eq!(state(&last)["terminated"]["exitCode"], 143);
    h.until_event("Killing", "Stopping container c").await;
    h.until_workers(0).await;
    assert!(h.runtime.is_empty());
    assert!(!h.dir.path().join("kubelet/pods/uid-p").exists());
}

#[tokio::test(start_paused = true)]
async fn a_crashing_container_is_restarted_with_growing_delay() {
    let h = Harness::start().await;
    h.create("p", one());
    h.until("p", "ready", ready).await;
    h.runtime.exit("c", 1);
    h.until("p", "restarted once", |p| p["status"]["containerStatuses"][0]["restartCount"] == 1).await;
    h.runtime.exit("c", 1);
    let waiting = h.until("p", "back-off", |p| state(p)["waiting"]["reason"] == "CrashLoopBackOff").await;
    assert_eq!(
        state(&waiting)["waiting"]["message"],
        "back-off 10s restarting failed container=c pod=p_default(uid-p)"
    );
    assert_eq!(waiting["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"], 1);
    assert_eq!(waiting["status"]["phase"], "Running");
    h.until_event("BackOff", "Back-off restarting failed container c in pod p_default(uid-p)").await;
    let before = h.context.clock.now();
    h.until("p", "restarted twice", |p| p["status"]["containerStatuses"][0]["restartCount"] == 2).await;
    let waited = crate::clock::since(before, h.context.clock.now()).as_secs();
    assert!((9..=11).contains(&waited), "{waited}");
    h.runtime.exit("c", 1);
    h.until("p", "longer back-off", |p| {
        state(p)["waiting"]["message"].as_str().unwrap_or_default().starts_with("back-off 20s")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn jobs_end() {
    for (policy, code, phase) in
        [("Never", 0, "Succeeded"), ("Never", 3, "Failed"), ("OnFailure", 0, "Succeeded")]
    {
        let h = Harness::start().await;
        h.create("p", json!({"restartPolicy": policy, "containers": [container("c")]}));
        h.until("p", "ready", ready).await;
        h.runtime.exit("c", code);
        let pod = h.until_phase("p", phase).await;
        assert_eq!(state(&pod)["terminated"]["exitCode"], code);
        assert_eq!(state(&pod)["terminated"]["reason"], if code == 0 { "Completed" } else { "Error" });
        assert!(!ready(&pod));
        h.delete("p", 0);
        h.until_gone("p").await;
    }
}

#[tokio::test(start_paused = true)]
async fn init_containers_come_first() {
    let h = Harness::start().await;
    h.create(
        "p",
        json!({"initContainers": [container("i1"), container("i2")], "containers": [container("c")]}),
    );
    let pod = h
        .until("p", "first init runs", |p| {
            !p["status"]["initContainerStatuses"][0]["state"]["running"].is_null()
        })
        .await;
    assert_eq!(state(&pod)["waiting"]["reason"], "PodInitializing");
    assert_eq!(condition(&pod, "Initialized"), "False");
    h.runtime.exit("i1", 0);
    h.until("p", "second init runs", |p| {
        !p["status"]["initContainerStatuses"][1]["state"]["running"].is_null()
    })
    .await;
    h.runtime.exit("i2", 0);
    let pod = h.until("p", "ready", ready).await;
    assert_eq!(condition(&pod, "Initialized"), "True");
    let starts: Vec<String> = h.runtime.calls().into_iter().filter(|c| c.starts_with("start")).collect();
    assert_eq!(starts, ["start:i1#0", "start:i2#0", "start:c#0"]);
}

#[tokio::test(start_paused = true)]
async fn a_missing_image_backs_off() {
    let h = Harness::start().await;
    h.create("p", json!({"containers": [{"name": "c", "image": "missing:1"}]}));
    let pod = h.until("p", "pull failed", |p| state(p)["waiting"]["reason"] == "ErrImagePull").await;
    assert_eq!(state(&pod)["waiting"]["message"], "missing:1: not found");
    h.until("p", "pull back-off", |p| state(p)["waiting"]["reason"] == "ImagePullBackOff").await;
    h.until_event("BackOff", "Back-off pulling image \"missing:1\"").await;
    h.until_event("Failed", "Error: ErrImagePull").await;
    h.until("p", "tried again", |_| h.runtime.calls().iter().filter(|c| c.starts_with("pull")).count() == 2)
        .await;
    h.delete("p", 30);
    h.until_gone("p").await;
    let h = Harness::start().await;
    h.create("q", json!({"containers": [{"name": "c", "image": "absent:1", "imagePullPolicy": "Never"}]}));
    h.until("q", "never pulled", |p| state(p)["waiting"]["reason"] == "ErrImageNeverPull").await;
    h.create("r", json!({"containers": [{"name": "c", "image": "NOT VALID"}]}));
    h.until("r", "invalid", |p| state(p)["waiting"]["reason"] == "InvalidImageName").await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_kubelet_adopts_what_runs() {
    let h = Harness::start().await;
    h.create("p", one());
    h.create("gone", one());
    h.until("p", "ready", ready).await;
    h.until("gone", "ready", ready).await;
    h.stop().await;
    h.api.remove(&Harness::key("gone"));
    h.runtime.forget_calls();
    let h = h.restart().await;
    h.until_workers(1).await;
    assert!(h.runtime.calls().contains(&"stop-sandbox".to_string()));
    assert!(
        !h.runtime.calls().iter().any(|c| c.starts_with("start") || c.starts_with("sandbox")),
        "{:?}",
        h.runtime.calls()
    );
    let pod = h.pod("p").unwrap();
    assert!(ready(&pod) && pod["status"]["containerStatuses"][0]["restartCount"] == 0);
}

#[tokio::test(start_paused = true)]
async fn probes_decide_readiness_and_life() {
    let h = Harness::start().await;
    h.runtime.exec_exits("ready", 1);
    let mut c = container("c");
    c["readinessProbe"] = json!({"exec": {"command": ["ready"]}, "periodSeconds": 5});
    c["livenessProbe"] = json!({"exec": {"command": ["live"]}, "periodSeconds": 10, "failureThreshold": 2});
    h.create("p", json!({"containers": [c], "terminationGracePeriodSeconds": 7}));
    h.until_event("Unhealthy", "Readiness probe failed: output").await;
    let pod = h.until_phase("p", "Running").await;
    assert!(!ready(&pod));
    h.runtime.exec_exits("ready", 0);
    h.until("p", "ready", ready).await;
    h.runtime.exec_exits("live", 1);
    h.until_event("Killing", "Container c failed liveness probe, will be restarted").await;
    h.runtime.exec_exits("live", 0);
    h.until("p", "restarted", |p| p["status"]["containerStatuses"][0]["restartCount"] == 1).await;
    assert!(h.runtime.calls().contains(&"stop:c:7".to_string()));
}

#[tokio::test(start_paused = true)]
async fn a_startup_probe_holds_the_others_back() {
    let h = Harness::start().await;
    h.runtime.exec_exits("up", 1);
    let mut c = container("c");
    c["startupProbe"] = json!({"exec": {"command": ["up"]}, "periodSeconds": 1, "failureThreshold": 30});
    c["livenessProbe"] = json!({"exec": {"command": ["live"]}});
    h.create("p", json!({"containers": [c]}));
    let pod = h.until_phase("p", "Running").await;
    assert_eq!(pod["status"]["containerStatuses"][0]["started"], false);
    h.until_event("Unhealthy", "Startup probe failed").await;
    assert!(!h.runtime.calls().contains(&"exec:live".to_string()));
    h.runtime.exec_exits("up", 0);
    h.until("p", "started", |p| p["status"]["containerStatuses"][0]["started"] == true).await;
}

#[tokio::test(start_paused = true)]
async fn hooks_run_and_count_against_the_grace_period() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["lifecycle"] =
        json!({"postStart": {"exec": {"command": ["post"]}}, "preStop": {"sleep": {"seconds": 20}}});
    h.create("p", json!({"containers": [c]}));
    h.until("p", "ready", ready).await;
    assert!(h.runtime.calls().contains(&"exec:post".to_string()));
    h.delete("p", 30);
    h.until_gone("p").await;
    assert!(h.runtime.calls().contains(&"stop:c:10".to_string()), "{:?}", h.runtime.calls());
}

#[tokio::test(start_paused = true)]
async fn a_shorter_grace_period_takes_effect_at_once() {
    let h = Harness::start().await;
    h.runtime.ignore_term();
    h.create("p", one());
    h.until("p", "ready", ready).await;
    h.delete("p", 3000);
    h.until_event("Killing", "Stopping container c").await;
    let before = h.context.clock.now();
    h.delete("p", 1);
    h.until_gone("p").await;
    assert!(crate::clock::since(before, h.context.clock.now()).as_secs() < 60);
}

#[tokio::test(start_paused = true)]
async fn a_pod_removed_by_force_is_cleaned_up() {
    let h = Harness::start().await;
    h.create("p", one());
    h.until("p", "ready", ready).await;
    h.api.remove(&Harness::key("p"));
    h.create("other", one());
    h.until("other", "ready", ready).await;
    h.until_event("Killing", "Stopping container c").await;
    h.until_workers(1).await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_sandbox_is_replaced() {
    let h = Harness::start().await;
    h.create("p", one());
    h.until("p", "ready", ready).await;
    h.runtime.kill_sandbox();
    let pod = h.until("p", "new address", |p| p["status"]["podIP"] == "10.1.0.3" && ready(p)).await;
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 1);
    h.until_event("SandboxChanged", "Pod sandbox changed, it will be killed and re-created.").await;
}

#[tokio::test(start_paused = true)]
async fn pods_are_refused_and_ended_by_the_node() {
    let h = Harness::start().await;
    let mut big = container("c");
    big["resources"] = json!({"requests": {"cpu": "64"}});
    h.create("big", json!({"containers": [big]}));
    let pod = h.until_phase("big", "Failed").await;
    assert_eq!(pod["status"]["reason"], "OutOfcpu");
    let message = "Node didn't have enough resource: cpu, requested: 64000, used: 0, capacity: 2000";
    assert_eq!(pod["status"]["message"], format!("Pod was rejected: {message}"));
    assert_eq!(h.until_event("OutOfcpu", "").await, message);
    assert!(pod["status"]["containerStatuses"].is_null());
    h.create("slow", json!({"containers": [container("c")], "activeDeadlineSeconds": 30}));
    h.until("slow", "ready", ready).await;
    let pod = h.until_phase("slow", "Failed").await;
    assert_eq!(pod["status"]["reason"], "DeadlineExceeded");
    assert_eq!(state(&pod)["terminated"]["exitCode"], 143);
}

#[tokio::test(start_paused = true)]
async fn a_missing_config_map_is_waited_for_and_updates_arrive() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["volumeMounts"] = json!([{"name": "v", "mountPath": "/cfg"}]);
    c["env"] = json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "a"}}}]);
    h.create("p", json!({"containers": [c], "volumes": [{"name": "v", "configMap": {"name": "cm"}}]}));
    let message = h.until_event("FailedMount", "configmap").await;
    assert_eq!(message, "MountVolume.SetUp failed for volume \"v\" : configmap \"cm\" not found");
    let map = |value: &str| json!({"metadata": {"name": "cm", "namespace": "default", "uid": "cm"}, "data": {"a": value}});
    h.api.put("configmaps", map("1"));
    h.until("p", "ready", ready).await;
    let config = h.runtime.container_config("c").unwrap();
    assert!(config.envs.iter().any(|e| e.key == "A" && e.value == b"1"));
    let file = std::path::PathBuf::from(&config.mounts[0].host_path).join("a");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "1");
    h.api.put("configmaps", map("2"));
    let wait = async {
        while std::fs::read_to_string(&file).ok().as_deref() != Some("2") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), wait).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_is_tried_again_later() {
    let h = Harness::start().await;
    h.runtime.fail_starts(Some("no such program"));
    h.create("p", one());
    let pod = h.until("p", "start failed", |p| state(p)["waiting"]["reason"] == "RunContainerError").await;
    assert_eq!(state(&pod)["waiting"]["message"], "no such program");
    h.until_event("Failed", "Error: no such program").await;
    let before = h.context.clock.now();
    // Whatever else wakes the worker meanwhile, the start is not tried again before its time.
    let attempts = h.runtime.calls().len();
    h.workers.wake_all();
    h.runtime.fail_starts(None);
    let pod = h.until("p", "ready", ready).await;
    assert_eq!(h.runtime.calls().len(), attempts + 1);
    assert!(crate::clock::since(before, h.context.clock.now()).as_secs() >= 9);
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
}

#[tokio::test(start_paused = true)]
async fn a_status_written_by_others_is_put_right() {
    let h = Harness::start().await;
    h.create(
        "p",
        json!({"containers": [container("c")], "readinessGates": [{"conditionType": "example.com/gate"}]}),
    );
    let pod = h.until("p", "running", |p| condition(p, "ContainersReady") == "True").await;
    assert!(!ready(&pod), "the gate is closed");
    let mut edited = h.pod("p").unwrap();
    edited["status"]["phase"] = json!("Pending");
    let gate = json!({"type": "example.com/gate", "status": "True"});
    edited["status"]["conditions"].as_array_mut().unwrap().push(gate);
    h.api.put("pods", edited);
    let pod = h.until("p", "ready", |p| ready(p) && p["status"]["phase"] == "Running").await;
    assert_eq!(condition(&pod, "example.com/gate"), "True");
}

#[tokio::test(start_paused = true)]
async fn nothing_stays_mounted_after_a_pod() {
    let h = Harness::start().await;
    let data = json!({"token": "c2VjcmV0"});
    let secret = json!({"metadata": {"name": "s", "namespace": "default", "uid": "s"}, "data": data});
    h.api.put("secrets", secret);
    let mut c = container("c");
    c["volumeMounts"] = json!([
        {"name": "all", "mountPath": "/all"},
        {"name": "all", "mountPath": "/one", "subPath": "secret/token", "readOnly": true},
        {"name": "scratch", "mountPath": "/scratch", "subPathExpr": "$(NAME)"},
    ]);
    c["env"] = json!([{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]);
    let sources = json!([
        {"secret": {"name": "s", "items": [{"key": "token", "path": "secret/token", "mode": 256}]}},
        {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"serviceAccountToken": {"path": "sa"}},
    ]);
    h.create(
        "p",
        json!({"containers": [c], "volumes": [
            {"name": "all", "projected": {"sources": sources}},
            {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ]}),
    );
    h.until("p", "ready", ready).await;
    let mounts = h.runtime.container_config("c").unwrap().mounts;
    let read = |path: &str, file: &str| {
        let mount = mounts.iter().find(|m| m.container_path == path).unwrap();
        let path =
            if file.is_empty() { mount.host_path.clone() } else { format!("{}/{file}", mount.host_path) };
        std::fs::read_to_string(path).unwrap_or_else(|e| e.to_string())
    };
    assert_eq!(read("/all", "name"), "p");
    assert_eq!(read("/one", ""), "secret");
    // The server issues no tokens: the pod runs without one.
    assert!(read("/all", "sa").contains("No such file"));
    let uid = "kubelet/pods/uid-p";
    assert!(h.dir.path().join(uid).join("volumes/kubernetes.io~empty-dir/scratch/p").is_dir());
    let mounted = || {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.lines().filter(|l| l.contains(h.dir.path().to_str().unwrap())).count()
    };
    assert_eq!(mounted(), 4, "two memory file systems, two sub-paths");
    h.delete("p", 1);
    h.until_gone("p").await;
    h.until_workers(0).await;
    assert_eq!(mounted(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_ephemeral_container_joins_a_running_pod() {
    let h = Harness::start().await;
    h.create("p", one());
    h.until("p", "ready", ready).await;
    let mut pod = h.pod("p").unwrap();
    let debugger = json!({"name": "debug", "image": "busybox:1", "imagePullPolicy": "IfNotPresent", "targetContainerName": "c"});
    pod["spec"]["ephemeralContainers"] = json!([debugger]);
    h.api.put("pods", pod);
    let running = |p: &Value| !p["status"]["ephemeralContainerStatuses"][0]["state"]["running"].is_null();
    let pod = h.until("p", "the debugger runs", running).await;
    assert!(ready(&pod));
    let context = h.runtime.container_config("debug").unwrap().linux.unwrap().security_context.unwrap();
    assert_eq!(context.namespace_options.unwrap().target_id, "c2");
    h.runtime.exit("debug", 0);
    let ended = |p: &Value| !p["status"]["ephemeralContainerStatuses"][0]["state"]["terminated"].is_null();
    assert_eq!(h.until("p", "the debugger ended", ended).await["status"]["phase"], "Running");
}

/// The host's file behind the container's termination message path.
fn message_file(h: &Harness, container: &str) -> std::path::PathBuf {
    let config = h.runtime.container_config(container).unwrap();
    let mount = config.mounts.iter().find(|m| m.container_path == "/dev/termination-log").unwrap();
    mount.host_path.clone().into()
}

#[tokio::test(start_paused = true)]
async fn a_termination_message_waits_for_the_api_server() {
    let h = Harness::start().await;
    let mut c = container("c");
    c["terminationMessagePath"] = json!("/dev/termination-log");
    h.create("p", json!({"restartPolicy": "Never", "containers": [c]}));
    h.until("p", "ready", ready).await;
    std::fs::write(message_file(&h, "c"), "last words").unwrap();
    h.api.refuse_patches(true);
    h.runtime.exit("c", 0);
    h.api.until_refused(4).await;
    // Somebody else's write to the status triggers a sync of the kubelet.
    let mut pod = h.pod("p").unwrap();
    pod["status"]["conditions"].as_array_mut().unwrap().push(json!({"type": "Else", "status": "True"}));
    h.api.put("pods", pod);
    h.api.until_refused(4).await;
    h.api.refuse_patches(false);
    let pod = h.until_phase("p", "Succeeded").await;
    assert_eq!(state(&pod)["terminated"]["message"], "last words");
    assert_eq!(condition(&pod, "Else"), "True");
}

/// A pod of one container with this CPU, and a change of it in the API.
fn with_cpu(cpu: &str, policy: &str) -> Value {
    let mut c = container("c");
    c["resources"] = json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}});
    c["resizePolicy"] = json!([{"resourceName": "cpu", "restartPolicy": policy}]);
    json!({"containers": [c]})
}

fn resize(h: &Harness, cpu: &str) {
    let mut pod = h.pod("p").unwrap();
    pod["spec"]["containers"][0]["resources"] = with_cpu(cpu, "")["containers"][0]["resources"].clone();
    pod["metadata"]["generation"] = json!(pod["metadata"]["generation"].as_i64().unwrap_or(1) + 1);
    h.api.put("pods", pod);
}

fn cpu_of(pod: &Value) -> [&Value; 2] {
    let status = &pod["status"]["containerStatuses"][0];
    [&status["allocatedResources"]["cpu"], &status["resources"]["limits"]["cpu"]]
}

#[tokio::test(start_paused = true)]
async fn a_container_is_resized_while_it_runs() {
    let h = Harness::start().await;
    h.create("p", with_cpu("100m", "NotRequired"));
    h.until("p", "ready", ready).await;
    resize(&h, "200m");
    let pod = h.until("p", "resized", |p| cpu_of(p) == ["200m", "200m"]).await;
    let pod = match condition(&pod, "PodResizeInProgress").is_empty() {
        true => pod,
        false => h.until("p", "done", |p| condition(p, "PodResizeInProgress").is_empty()).await,
    };
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    assert!(h.runtime.calls().iter().any(|note| note == "resize:20000"), "{:?}", h.runtime.calls());
    // The next instance knows the resources, too.
    h.runtime.exit("c", 1);
    let pod = h.until("p", "restarted", |p| p["status"]["containerStatuses"][0]["restartCount"] == 1).await;
    assert_eq!(cpu_of(&pod)[0], "200m");
}

#[tokio::test(start_paused = true)]
async fn a_resize_without_room_is_deferred_and_not_claimed() {
    let h = Harness::start().await;
    h.create("p", with_cpu("100m", "NotRequired"));
    h.until("p", "ready", ready).await;
    resize(&h, "100000");
    let pod = h.until("p", "pending", |p| condition(p, "PodResizePending") == "True").await;
    let conditions = pod["status"]["conditions"].as_array().unwrap();
    let pending = conditions.iter().find(|c| c["type"] == "PodResizePending").unwrap();
    assert!(pending["message"].as_str().unwrap().starts_with("Node didn't have enough"), "{pending}");
    assert_eq!(cpu_of(&pod), ["100m", "100m"]);
    assert!(!h.runtime.calls().iter().any(|note| note.starts_with("resize:")));
    // Taken back, it is no longer pending.
    resize(&h, "100m");
    h.until("p", "settled", |p| condition(p, "PodResizePending").is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn a_policy_may_want_a_restart() {
    let h = Harness::start().await;
    h.create("p", with_cpu("100m", "RestartContainer"));
    h.until("p", "ready", ready).await;
    resize(&h, "200m");
    let done =
        |p: &Value| p["status"]["containerStatuses"][0]["restartCount"] == 1 && cpu_of(p) == ["200m", "200m"];
    h.until("p", "restarted with more", done).await;
    assert!(!h.runtime.calls().iter().any(|note| note.starts_with("resize:")));
}

#[tokio::test(start_paused = true)]
async fn a_container_of_another_image_is_replaced_while_the_pod_stays_ready() {
    let h = Harness::start().await;
    h.create("p", one());
    let mut pod = h.until("p", "ready", ready).await;
    h.runtime.add_image("busybox:2");
    let before = h.api.history(&Harness::key("p")).len();
    pod["spec"]["containers"][0]["image"] = "busybox:2".into();
    h.api.put("pods", pod);
    let restarted = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"] == 1 && ready(pod);
    h.until("p", "the other image runs", restarted).await;
    let history = h.api.history(&Harness::key("p"));
    assert!(history.len() > before && history[before..].iter().all(ready), "{:?}", &history[before..]);
}

#[tokio::test(start_paused = true)]
async fn all_containers_begin_anew_after_an_exit_code() {
    let h = Harness::start().await;
    let mut spec = json!({"restartPolicy": "Never", "initContainers": [{"name": "i", "image": "busybox:1"}], "containers": [
        {"name": "a", "image": "busybox:1"}, {"name": "b", "image": "busybox:1"}]});
    spec["containers"][0]["restartPolicy"] = json!("Never");
    spec["containers"][0]["restartPolicyRules"] =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    h.create("p", spec);
    let init = |count: i32| {
        move |p: &Value| {
            let status = &p["status"]["initContainerStatuses"][0];
            status["restartCount"] == count && status["state"].get("running").is_some()
        }
    };
    let running = |count: i32| {
        move |p: &Value| {
            let all = p["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
            !all.is_empty()
                && all.iter().all(|s| s["restartCount"] == count && s["state"].get("running").is_some())
        }
    };
    h.until("p", "init runs", init(0)).await;
    h.runtime.exit("i", 0);
    h.until("p", "runs", running(0)).await;
    h.runtime.exit("a", 42);
    let again = h.until("p", "init runs again", init(1)).await;
    assert_eq!(again["status"]["phase"], "Running", "a pod does not begin to wait: {again}");
    let condition = |pod: &Value, type_: &str| {
        let all = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().find(|c| c["type"] == type_).map(|c| c["status"].clone()).unwrap_or_default()
    };
    assert_eq!(condition(&again, "Initialized"), "True");
    h.runtime.exit("i", 0);
    let pod = h.until("p", "runs again", running(1)).await;
    assert_eq!(condition(&pod, "AllContainersRestarting"), "False");
    let history = h.api.history(&Harness::key("p"));
    assert!(history.iter().any(|pod| condition(pod, "AllContainersRestarting") == "True"), "shown meanwhile");
    let ended = |index: usize| pod["status"]["containerStatuses"][index]["lastState"]["terminated"].clone();
    assert_eq!(ended(0)["exitCode"], 42, "{pod}");
    assert_eq!(
        (ended(1)["exitCode"].clone(), ended(1)["reason"].clone()),
        (json!(137), json!("RestartingAllContainers"))
    );
    // Another code ends the container as its policy says.
    h.runtime.exit("a", 1);
    h.runtime.exit("b", 0);
    h.until_phase("p", "Failed").await;
}

#[tokio::test(start_paused = true)]
async fn room_goes_to_the_more_important_resize() {
    let h = Harness::start().await;
    // The node has two processors.
    let asking = |cpu: &str, priority: i32| {
        json!({"priority": priority, "containers": [{"name": "c", "image": "busybox:1",
            "resources": {"requests": {"cpu": cpu}}}]})
    };
    for (name, cpu, priority) in [("filler", "1200m", 0), ("low", "400m", 0), ("high", "400m", 5)] {
        h.create(name, asking(cpu, priority));
        h.until_phase(name, "Running").await;
    }
    let request = |name: &str, cpu: &str| {
        let mut pod = h.pod(name).unwrap();
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!(cpu);
        pod["metadata"]["generation"] = json!(2);
        h.api.put("pods", pod);
    };
    let deferred = |p: &Value| {
        let all = p["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().any(|c| c["type"] == "PodResizePending" && c["reason"] == "Deferred")
    };
    let has = |cpu: &'static str| {
        move |p: &Value| p["status"]["containerStatuses"][0]["allocatedResources"]["cpu"] == cpu
    };
    // Room for one of the two comes when the filler ends.
    request("low", "1500m");
    h.until("low", "deferred", deferred).await;
    request("high", "1500m");
    h.until("high", "deferred", deferred).await;
    h.delete("filler", 0);
    h.until("high", "resized", has("1500m")).await;
    let low = h.pod("low").unwrap();
    assert!(deferred(&low) && has("400m")(&low), "{low}");
    h.delete("high", 0);
    h.until("low", "resized", has("1500m")).await;
}
