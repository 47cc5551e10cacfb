use std::convert::Infallible;

use ferrite_client::Scope;
use ferrite_json::Value;
use kube::client::Body;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;

fn node(ready: &str) -> Value {
    json!({"kind": "Node", "apiVersion": "v1",
        "metadata": {"name": "n", "uid": "node", "labels": {"kubernetes.io/os": "linux"}},
        "status": {"conditions": [{"type": "Ready", "status": ready}]}})
}

fn pod(name: &str, ready: &str) -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "ns", "uid": name},
        "spec": {"nodeName": "n", "containers": []}, "status": {"conditions": [{"type": "Ready", "status": ready}]}})
}

/// A cluster of one node and these pods, whose watches never say anything. Writes arrive in the channel.
fn cluster(ready: &str, pods: &[Value]) -> (Context, UnboundedReceiver<String>) {
    let (sender, written) = unbounded_channel();
    let (nodes, pods) = (vec![node(ready)], pods.to_vec());
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let list = |items: &[Value]| json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}, "items": items});
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let (path, method) = (request.uri().path().to_owned(), request.method().clone());
        let answer = match path.as_str() {
            "/api/v1/nodes" => list(&nodes),
            "/api/v1/pods" => list(&pods),
            _ => list(&[]),
        };
        let sender = sender.clone();
        async move {
            if is_watch {
                return std::future::pending().await;
            }
            let mut bytes = ferrite_json::to_vec(&answer).expect("an answer");
            if method != http::Method::GET {
                let body = request.into_body().collect_bytes().await.expect("a body");
                let value: Value = ferrite_json::from_slice(&body).expect("an object");
                let what = match path.ends_with("/events") {
                    true => format!(
                        "{}: {}",
                        value["reason"].as_str().unwrap_or(""),
                        value["message"].as_str().unwrap_or("")
                    ),
                    false => format!("{method} {path}"),
                };
                let _ = sender.send(what);
                bytes = match path.contains("/pods/") {
                    true => ferrite_json::to_vec(&pod("p", "False")).expect("a pod"),
                    false => ferrite_json::to_vec(&node("Unknown")).expect("a node"),
                };
            }
            Ok::<_, Infallible>(http::Response::new(Body::from(bytes)))
        }
    });
    let client = Client::new(service, "default");
    let config = Config { node_monitor_grace: Duration::from_secs(50), ..Config::default() };
    (Context::new(Arc::new(move |_| client.clone()), Scope::new(), config), written)
}

#[tokio::test(start_paused = true)]
async fn a_node_that_falls_silent_takes_its_pods_out_of_service() {
    let (context, mut written) = cluster("True", &[pod("p", "True"), pod("other", "False")]);
    start(&context);
    let mut all = Vec::new();
    while !all.iter().any(|what: &String| what.starts_with("NodeNotReady: Node is")) {
        all.push(written.recv().await.expect("a write"));
    }
    for expected in [
        "RegisteredNode: Node n event: Registered Node n in Controller",
        "PATCH /api/v1/nodes/n",
        "PUT /api/v1/nodes/n/status",
        "NodeNotReady: Node n status is now: NodeNotReady",
        "PATCH /api/v1/namespaces/ns/pods/p/status",
    ] {
        assert!(all.iter().any(|what| what == expected), "{expected}: {all:?}");
    }
    assert!(!all.iter().any(|what| what.contains("pods/other")), "{all:?}");
    context.scope.cancel();
}

#[tokio::test]
async fn pods_are_marked_when_they_come_and_not_again() {
    let (context, _) = cluster("False", &[]);
    let queue = Arc::new(WorkQueue::new());
    let monitor = Monitor::new(&context, queue.clone());
    monitor.nodes.synced().await;
    let object = |name: &str, ready: &str| -> Arc<Pod> {
        Arc::new(ferrite_json::from_value(pod(name, ready)).expect("a pod"))
    };
    let mut unbound = (*object("bound", "True")).clone();
    unbound.spec.get_or_insert_default().node_name = None;
    for (case, change, expected) in [
        ("not ready", Change::Added(object("a", "False")), 0),
        ("new", Change::Added(object("b", "True")), 1),
        ("bound", Change::Updated { old: Arc::new(unbound).into(), new: object("bound", "True") }, 2),
        // Its kubelet says so.
        ("ready again", Change::Updated { old: object("c", "False").into(), new: object("c", "True") }, 2),
        ("gone", Change::Deleted(object("d", "True")), 2),
    ] {
        monitor.pod_changed(&change);
        assert_eq!(monitor.unmarked().get("n").map_or(0, HashSet::len), expected, "{case}");
    }
    assert_eq!(queue.len(), 1);
    // A pod may name a node that there is not.
    let mut lost = (*object("lost", "True")).clone();
    lost.spec.get_or_insert_default().node_name = Some("gone".to_owned());
    monitor.pod_changed(&Change::Added(Arc::new(lost)));
    assert!(monitor.unmarked().contains_key("gone"));
    monitor.sync(ObjectKey::cluster("gone")).await.expect("nothing to do");
    assert!(!monitor.unmarked().contains_key("gone"));
    context.scope.cancel();
}
