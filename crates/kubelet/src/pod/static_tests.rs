//! Static pods with their mirrors, from the manifest to the end.

use crate::testing::{Harness, Key};
use ferrite_json::{Value, json};
use std::fs;

fn manifest(name: &str, image: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 5,
                 "containers": [{"name": "c", "image": image, "imagePullPolicy": "IfNotPresent"}]},
    })
    .to_string()
}

fn write(harness: &Harness, name: &str, text: &str) {
    fs::write(harness.dir.path().join("manifests").join(name), text).unwrap();
}

fn hash(pod: &Value) -> String {
    pod["metadata"]["annotations"]["kubernetes.io/config.mirror"].as_str().unwrap_or_default().to_owned()
}

fn running(pod: &Value) -> bool {
    !hash(pod).is_empty() && pod["status"]["phase"] == "Running"
}

#[tokio::test]
async fn a_manifest_runs_and_its_mirror_follows() {
    let harness = Harness::start().await;
    write(&harness, "web.yaml", &manifest("web", "busybox:1"));
    let mirror = harness.until("web-node", "the mirror shows that it runs", running).await;
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["kind"], "Node");
    assert_eq!(mirror["metadata"]["annotations"]["kubernetes.io/config.source"], "file");
    assert_eq!(harness.workers.local_names().len(), 1);
    assert_eq!(*harness.workers.count().borrow(), 1, "the mirror itself is not run");

    // A user deletes the mirror: it comes back, and the containers run on.
    let started = harness.runtime.started();
    harness.delete("web-node", 30);
    let again = harness
        .until("web-node", "the mirror is back", |pod| {
            running(pod) && pod["metadata"]["deletionTimestamp"].is_null()
        })
        .await;
    assert_eq!(hash(&again), hash(&mirror));
    assert_eq!(harness.runtime.started(), started);

    // Half a file changes nothing; another manifest is another pod of the same name.
    write(&harness, "web.yaml", &manifest("web", "busybox:1")[..50]);
    write(&harness, "web.yaml", &manifest("web", "busybox:2"));
    harness.until("web-node", "the new one runs", |pod| running(pod) && hash(pod) != hash(&mirror)).await;

    fs::remove_file(harness.dir.path().join("manifests/web.yaml")).unwrap();
    harness.until_gone("web-node").await;
    harness.until_workers(0).await;
}

#[tokio::test]
async fn a_restart_adopts_static_pods_and_removes_mirrors_of_nobody() {
    let harness = Harness::start().await;
    write(&harness, "web.yaml", &manifest("web", "busybox:1"));
    harness.until("web-node", "running", running).await;
    let started = harness.runtime.started();
    harness.stop().await;
    harness.api.put(
        "pods",
        json!({"metadata": {"name": "left", "namespace": "default", "uid": "left",
                            "annotations": {"kubernetes.io/config.mirror": "x"}},
               "spec": {"nodeName": "node", "containers": []}}),
    );
    let harness = harness.restart().await;
    harness.until_gone("left").await;
    harness.until_workers(1).await;
    let mirror = harness.pod("web-node").unwrap();
    assert!(running(&mirror), "{mirror}");
    assert_eq!(harness.runtime.started(), started, "its container runs on");
}

#[tokio::test]
async fn static_pods_run_without_the_node_object_and_are_shown_when_it_comes() {
    let harness = Harness::start().await;
    let node = Key { resource: "nodes".into(), namespace: String::new(), name: "node".into() };
    harness.api.remove(&node);
    write(&harness, "web.yaml", &manifest("web", "busybox:1"));
    harness.until_workers(1).await;
    harness
        .api
        .until("it runs", |_| {
            let pods = harness.context.pods.list();
            pods.first()?.status.as_ref().filter(|s| s.phase.as_deref() == Some("Running")).map(drop)
        })
        .await;
    assert!(harness.pod("web-node").is_none(), "a pod of a node that does not exist");
    harness.api.put("nodes", json!({"metadata": {"name": "node", "uid": "n2"}}));
    let mirror = harness.until("web-node", "the mirror", running).await;
    assert_eq!(mirror["metadata"]["ownerReferences"][0]["uid"], "n2");
}
