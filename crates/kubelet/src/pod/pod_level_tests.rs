//! Workers resize whole pods.

use crate::testing::Harness;
use ferrite_json::{Value, json};

/// A pod with this CPU for itself, and one container with these resources.
fn with_cpu(cpu: &str, resources: Value, policy: &str) -> Value {
    json!({"resources": {"requests": {"cpu": cpu, "memory": "64Mi"}, "limits": {"cpu": cpu}},
        "containers": [{"name": "c", "image": "busybox:1", "resources": resources,
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}]}]})
}

fn resize(h: &Harness, cpu: &str) {
    let mut pod = h.pod("p").unwrap();
    pod["spec"]["resources"] = with_cpu(cpu, json!({}), "")["resources"].clone();
    pod["metadata"]["generation"] = json!(pod["metadata"]["generation"].as_i64().unwrap_or(1) + 1);
    h.api.put("pods", pod);
}

fn condition(pod: &Value, type_: &str) -> Option<Value> {
    let all = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|condition| condition["type"] == type_)
}

/// The CPU that is allocated to the pod, and the request and limit that its status shows.
fn cpu_of(pod: &Value) -> [Value; 3] {
    let status = &pod["status"];
    let shown = |side: &str| status["resources"][side]["cpu"].clone();
    [status["allocatedResources"]["cpu"].clone(), shown("requests"), shown("limits")]
}

fn has(cpu: &'static str, restarts: i32) -> impl Fn(&Value) -> bool {
    move |pod| {
        cpu_of(pod) == [cpu, cpu, cpu]
            && condition(pod, "PodResizeInProgress").is_none()
            && condition(pod, "PodResizePending").is_none()
            && pod["status"]["containerStatuses"][0]["restartCount"] == restarts
    }
}

fn resizes(h: &Harness) -> Vec<String> {
    h.runtime.calls().into_iter().filter(|call| call.starts_with("resize:")).collect()
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_resized_with_its_containers_that_have_no_limit() {
    for (what, resources, policy, restarts, calls) in [
        (
            "the container has the pod's limit",
            json!({}),
            "NotRequired",
            0,
            &["resize:40000", "resize:20000"][..],
        ),
        ("its policy counts for that", json!({}), "RestartContainer", 2, &[]),
        ("it has a limit of its own", json!({"limits": {"cpu": "100m"}}), "RestartContainer", 0, &[]),
    ] {
        let h = Harness::start().await;
        h.create("p", with_cpu("200m", resources, policy));
        h.until("p", "it runs", has("200m", 0)).await;
        resize(&h, "400m");
        h.until("p", "it has grown", has("400m", restarts / 2)).await;
        resize(&h, "200m");
        let pod = h.until("p", "it has shrunk", has("200m", restarts)).await;
        assert_eq!(resizes(&h), calls, "{what}");
        assert_eq!(pod["status"]["resources"]["requests"]["memory"], "64Mi", "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_room_keeps_its_size() {
    let h = Harness::start().await;
    h.create("p", with_cpu("200m", json!({}), "NotRequired"));
    h.until("p", "it runs", has("200m", 0)).await;
    resize(&h, "100000");
    let waits = |pod: &Value| condition(pod, "PodResizePending").is_some_and(|c| c["reason"] == "Deferred");
    let pod = h.until("p", "it waits", waits).await;
    assert_eq!(cpu_of(&pod), ["200m", "200m", "200m"]);
    // A restart of its container is no way to the resources that it waits for.
    h.runtime.exit("c", 1);
    let again = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"] == 1;
    let pod = h.until("p", "the container runs again", again).await;
    assert!(waits(&pod), "{pod}");
    assert_eq!(cpu_of(&pod), ["200m", "200m", "200m"]);
    resize(&h, "200m");
    h.until("p", "it takes its wish back", has("200m", 1)).await;
    assert_eq!(resizes(&h), [""; 0]);
}
