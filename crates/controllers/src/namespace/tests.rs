use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use ferrite_json::{Value, json};
use jiff::SignedDuration;
use kube::client::Body;
use kube::core::ObjectMeta;

use super::*;
use crate::discovery::tests::{found, listed};

fn reported(content: &Content) -> Vec<String> {
    let all = conditions(content).into_iter().filter(|(_, holds, _, _)| *holds);
    all.map(|(kind, _, reason, message)| format!("{kind} {reason}: {message}")).collect()
}

#[test]
fn conditions_say_what_is_left() {
    assert!(reported(&Content::default()).is_empty());
    let content = Content {
        discovery_failure: Some("no discovery".to_owned()),
        failures: vec!["b".to_owned(), "a".to_owned()],
        remaining: BTreeMap::from([("pods.".to_owned(), 2), ("configmaps.".to_owned(), 1)]),
        finalizers: BTreeMap::from([("example.com/hold".to_owned(), 1), ("example.com/a".to_owned(), 3)]),
        estimate: 0,
    };
    assert_eq!(
        reported(&content),
        [
            "NamespaceDeletionDiscoveryFailure DiscoveryFailed: no discovery",
            "NamespaceDeletionContentFailure ContentDeletionFailed: \
             Failed to delete all resource types, 2 remaining: a, b",
            "NamespaceContentRemaining SomeResourcesRemain: Some resources are remaining: \
             configmaps. has 1 resource instances, pods. has 2 resource instances",
            "NamespaceFinalizersRemaining SomeFinalizersRemain: \
             Some content in the namespace has finalizers remaining: \
             example.com/a in 3 resource instances, example.com/hold in 1 resource instances",
        ]
    );
}

#[test]
fn the_rest_is_expected_to_take_as_long_as_grace_periods_and_finalizers() {
    let lists = [json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "resources": [
        listed("configmaps", "ConfigMap", "Namespaced", &[]), listed("pods", "Pod", "Namespaced", &[])]}]}]})];
    let served = found(&lists).served;
    let (maps, pods) = (&served[0], &served[1]);
    let object = |finalizer: Option<&str>, grace| ObjectMeta {
        finalizers: finalizer.map(|name| vec![name.to_owned()]),
        deletion_grace_period_seconds: grace,
        ..ObjectMeta::default()
    };
    let unexpected = |plural: &str| {
        vec![format!("unexpected items still remain in namespace: n for gvr: /v1, Resource={plural}")]
    };
    for (case, served, left, since, estimate, failures) in [
        ("nothing", maps, vec![], 1, 0, vec![]),
        ("a finalizer", maps, vec![object(Some("f"), None)], 1, 15, vec![]),
        ("no reason to stay", maps, vec![object(None, Some(40))], 1, 0, unexpected("configmaps")),
        ("pods that stop", pods, vec![object(None, None), object(None, Some(40))], 35, 40, vec![]),
        ("pods that should have stopped", pods, vec![object(None, Some(40))], 41, 0, unexpected("pods")),
        ("pods with finalizers", pods, vec![object(Some("f"), Some(40))], 41, 15, vec![]),
    ] {
        let mut content = Content::default();
        content.count("n", served, &left, SignedDuration::from_secs(since));
        assert_eq!((content.estimate, content.failures), (estimate, failures), "{case}");
    }
}

#[test]
fn a_namespace_that_stays_is_looked_at_less_often() {
    for (remaining, estimate, since, expected) in [
        ("pods.", 30, 0, 16),
        ("configmaps.", 15, 0, 1),
        ("configmaps.", 15, 3, 3),
        ("configmaps.", 15, 3600, 8),
    ] {
        let content = Content {
            remaining: BTreeMap::from([(remaining.to_owned(), 1)]),
            estimate,
            ..Content::default()
        };
        let pause = content.pause(SignedDuration::from_secs(since));
        assert_eq!(pause.as_secs(), expected, "{remaining} {since}");
    }
}

/// A server with these groups (besides the core group with ConfigMaps and Secrets) and the ConfigMap `c` and the Secret `s` in
/// every namespace, until somebody deletes them. It has no deletion of all ConfigMaps. Requests that write are noted.
fn server(groups: Value) -> (Client, Arc<Mutex<Vec<String>>>) {
    let written: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = Arc::clone(&written);
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (path, method) = (request.uri().path().to_owned(), request.method().clone());
        let all = ["delete", "deletecollection", "list"];
        let is_deleted = |name: &str| {
            noted.lock().unwrap().iter().any(|line| line.starts_with("DELETE") && line.ends_with(name))
        };
        let list = |name: &str, item: &str| {
            let items = if is_deleted(item) || is_deleted(name) {
                json!([])
            } else {
                json!([{"metadata": {"name": item}}])
            };
            json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
        };
        let status = |code: u16| json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": "", "code": code});
        let (code, response) = match (method.as_str(), path.as_str()) {
            (_, "/api") => (
                200,
                json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "resources": [
                listed("configmaps", "ConfigMap", "Namespaced", &all), listed("secrets", "Secret", "Namespaced", &all)]}]}]}),
            ),
            (_, "/apis") => (200, json!({"items": groups})),
            ("GET", "/api/v1/namespaces/n") => (
                200,
                json!({"kind": "Namespace", "apiVersion": "v1",
                "metadata": {"name": "n", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Terminating"}}),
            ),
            ("GET", "/api/v1/namespaces/n/configmaps") => (200, list("configmaps", "c")),
            ("GET", "/api/v1/namespaces/n/secrets") => (200, list("secrets", "s")),
            ("DELETE", "/api/v1/namespaces/n/configmaps") => (405, status(405)),
            _ => (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})),
        };
        let noted = Arc::clone(&noted);
        async move {
            let mut response = response;
            if method != http::Method::GET {
                let bytes = request.into_body().collect_bytes().await.expect("a body");
                if method == http::Method::PUT {
                    response = ferrite_json::from_slice(&bytes).expect("an object");
                }
                if code == 200 {
                    noted.lock().unwrap().push(format!("{method} {path}"));
                }
                for condition in response["status"]["conditions"].as_array().into_iter().flatten() {
                    if condition["status"] == "True" {
                        let message = condition["message"].as_str().unwrap_or_default();
                        noted.lock().unwrap().push(message.to_owned());
                    }
                }
            }
            let bytes = ferrite_json::to_vec(&response).expect("a response");
            let response = http::Response::builder().status(code).body(Body::from(bytes));
            Ok::<_, Infallible>(response.expect("a response"))
        }
    });
    (Client::new(service, "default"), written)
}

async fn synced(groups: Value) -> (bool, Vec<String>) {
    let (client, written) = server(groups);
    let known = Namespace {
        metadata: ObjectMeta { name: Some("n".into()), uid: Some("u".into()), ..ObjectMeta::default() },
        ..Namespace::default()
    };
    let result = sync(&client, &known).await;
    let written = written.lock().unwrap().clone();
    (result.is_ok(), written)
}

const DELETIONS: [&str; 2] =
    ["DELETE /api/v1/namespaces/n/configmaps/c", "DELETE /api/v1/namespaces/n/secrets"];

#[tokio::test]
async fn all_is_deleted_one_by_one_where_the_server_does_not_delete_collections() {
    let (done, written) = synced(json!([])).await;
    assert!(done);
    assert_eq!(written, [DELETIONS[0], DELETIONS[1], "PUT /api/v1/namespaces/n/finalize"]);
}

#[tokio::test]
async fn a_group_that_is_down_keeps_the_namespace_and_nothing_else() {
    let down = json!([{"metadata": {"name": "down.example"}, "versions": [{"version": "v1", "freshness": "Stale"}]}]);
    let (done, written) = synced(down).await;
    assert!(!done);
    assert_eq!(
        written,
        [
            DELETIONS[0],
            DELETIONS[1],
            "PUT /api/v1/namespaces/n/status",
            "Discovery failed for some groups, 1 failing: unable to retrieve the complete list of server APIs: \
             down.example/v1: stale GroupVersion discovery: down.example/v1",
        ]
    );
}
