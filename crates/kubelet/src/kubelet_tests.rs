//! The whole kubelet against an API server and a runtime in memory.

use super::*;
use crate::testing::{FakeApi, FakeRuntime, Key};
use ferrite_json::{Value, json};

fn key(resource: &str, namespace: &str) -> Key {
    Key { resource: resource.into(), namespace: namespace.into(), name: "node".into() }
}

fn ready(node: &Value) -> Option<String> {
    let conditions = node["status"]["conditions"].as_array()?;
    conditions.iter().find(|c| c["type"] == "Ready")?["status"].as_str().map(str::to_string)
}

#[tokio::test(start_paused = true)]
async fn the_node_is_registered_kept_alive_and_put_back() {
    let api = FakeApi::new();
    let runtime = Arc::new(FakeRuntime::new(Clock::paused()));
    let dir = tempfile::tempdir().unwrap();
    let scope = Scope::new();
    let config = Config {
        root_dir: dir.path().join("kubelet"),
        log_dir: dir.path().join("logs"),
        node_labels: [("role".to_string(), "test".to_string())].into(),
        ..Config::new("node", "192.0.2.1".parse().unwrap())
    };
    let kubelet =
        Kubelet::start(config, runtime.clone(), runtime.clone(), api.client(), &scope).await.unwrap();
    assert_eq!((kubelet.node_name(), kubelet.server_address()), ("node", None));
    let nodes = key("nodes", "");
    let until_ready = |status: &'static str| {
        let (api, nodes) = (api.clone(), nodes.clone());
        async move {
            let found = |api: &FakeApi| api.get(&nodes).filter(|n| ready(n).as_deref() == Some(status));
            api.until(&format!("node Ready={status}"), found).await
        }
    };
    let node = until_ready("True").await;
    let labels = &node["metadata"]["labels"];
    assert_eq!((&labels["kubernetes.io/hostname"], &labels["role"]), (&json!("node"), &json!("test")));
    assert_eq!(node["status"]["nodeInfo"]["containerRuntimeVersion"], "ferrite://0");
    assert_eq!(node["status"]["addresses"][0]["address"], "192.0.2.1");
    assert_eq!(node["status"]["capacity"]["pods"], "110");

    let leases = key("leases", "kube-node-lease");
    let lease = api.until("the lease is there", |api| api.get(&leases)).await;
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 40);
    api.until("the lease is renewed", |api| (api.history(&leases).len() > 2).then_some(())).await;

    runtime.set_ready(Some("the network is not set up"));
    let node = until_ready("False").await;
    let text = node["status"]["conditions"].to_string();
    assert!(text.contains("NetworkReady=false") && text.contains("KubeletNotReady"), "{text}");
    runtime.set_ready(None);
    until_ready("True").await;

    api.remove(&nodes);
    until_ready("True").await;
    scope.shutdown().await;
}
