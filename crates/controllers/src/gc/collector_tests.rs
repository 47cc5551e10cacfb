use std::collections::BTreeMap;
use std::convert::Infallible;

use ferrite_client::Events;
use kube::client::Body;

use super::*;
use crate::discovery::tests::{found, listed};

/// A server of single objects.
#[derive(Default)]
struct Server {
    /// By path, without the prefix of the API.
    objects: BTreeMap<String, Value>,
    /// The objects after the first deletion that was refused.
    after: BTreeMap<String, Value>,
    /// The path of each deletion and the version that it asks for.
    deletions: Vec<(String, String)>,
    /// Widgets cannot be listed.
    is_broken: bool,
    deleted: Arc<Notify>,
}

impl Server {
    fn respond(&mut self, method: &http::Method, path: &str, body: &Value) -> (u16, Value) {
        let [core, groups] = lists(false);
        match path {
            "/api" => return (200, core),
            "/apis" => return (200, groups),
            "widgets" if self.is_broken => return (500, json!({})),
            _ => {}
        }
        if path.ends_with("pods")
            || path.ends_with("configmaps")
            || path.ends_with("widgets")
            || path.ends_with("nodes")
        {
            return (
                200,
                json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}),
            );
        }
        let status = |code: u16, reason: &str| {
            (
                code,
                json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": reason, "code": code}),
            )
        };
        let Some(object) = self.objects.get(path).cloned() else { return status(404, "NotFound") };
        if method != http::Method::DELETE {
            return (200, object);
        }
        let version = body["preconditions"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        self.deletions.push((path.to_owned(), version));
        self.deleted.notify_one();
        let after = std::mem::take(&mut self.after);
        if after.is_empty() {
            return (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}));
        }
        self.objects.extend(after);
        status(409, "Conflict")
    }
}

struct Fixture {
    collector: Arc<Collector>,
    server: Arc<Mutex<Server>>,
    scope: Scope,
}

fn discovered(stale: bool) -> Discovered {
    found(&lists(stale))
}

fn lists(stale: bool) -> [Value; 2] {
    let all = ["delete", "list", "watch"];
    let core = json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "resources": [
        listed("pods", "Pod", "Namespaced", &all), listed("configmaps", "ConfigMap", "Namespaced", &all),
        listed("nodes", "Node", "Cluster", &all)]}]}]});
    let freshness = if stale { "Stale" } else { "Current" };
    let groups = json!({"items": [{"metadata": {"name": "a.example"}, "versions": [
        {"version": "v2", "freshness": freshness, "resources": [listed("widgets", "Widget", "Namespaced", &all)]}]}]});
    [core, groups]
}

impl Fixture {
    fn new(objects: &[(&str, Value)]) -> Self {
        let server = Server {
            objects: objects.iter().map(|(path, o)| ((*path).to_owned(), o.clone())).collect(),
            ..Server::default()
        };
        let server = Arc::new(Mutex::new(server));
        let serving = Arc::clone(&server);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let serving = Arc::clone(&serving);
            async move {
                if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
                    return std::future::pending().await;
                }
                let (path, method) = (request.uri().path().to_owned(), request.method().clone());
                let bytes = request.into_body().collect_bytes().await.expect("a body");
                let body = ferrite_json::from_slice(&bytes).unwrap_or_default();
                let path = path.trim_start_matches("/apis/a.example/v2/").trim_start_matches("/api/v1/");
                let path = path.trim_start_matches("namespaces/");
                let (code, response) = serving.lock().unwrap().respond(&method, path, &body);
                let bytes = ferrite_json::to_vec(&response).expect("a response");
                let response = http::Response::builder().status(code).body(Body::from(bytes));
                Ok::<_, Infallible>(response.expect("a response"))
            }
        });
        let client = Client::new(service, "default");
        let scope = Scope::new();
        let recorder = Events::start(client.clone(), &scope).recorder(NAME, None);
        let collector = Arc::new(Collector::new(client, recorder));
        collector.follow(&discovered(false), &scope);
        Self { collector, server, scope }
    }

    /// A watch reports the object.
    fn observe(&self, api_version: &str, kind: &str, plural: &str, object: &Value) {
        let resource = ApiResource {
            group: String::new(),
            version: "v1".into(),
            api_version: api_version.into(),
            kind: kind.into(),
            plural: plural.into(),
        };
        let object: Metadata = ferrite_json::from_value(object.clone()).expect("metadata");
        self.collector.changed(&resource, &Change::Added(Arc::new(object)));
    }

    async fn attempt(&self, uid: &str) -> Result<Option<Duration>, SyncError> {
        self.collector.attempt_to_delete(uid.to_owned()).await
    }

    fn deletions(&self) -> Vec<(String, String)> {
        self.server.lock().unwrap().deletions.clone()
    }
}

fn object(uid: &str, namespace: &str, version: &str, owners: Value) -> Value {
    let mut metadata =
        json!({"name": uid, "uid": uid, "resourceVersion": version, "ownerReferences": owners});
    if !namespace.is_empty() {
        metadata["namespace"] = json!(namespace);
    }
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
}

fn owner(api_version: &str, kind: &str, uid: &str) -> Value {
    json!([{"apiVersion": api_version, "kind": kind, "name": uid, "uid": uid}])
}

#[tokio::test]
async fn a_stale_version_keeps_its_watches() {
    let fixture = Fixture::new(&[]);
    let Fixture { collector, scope, .. } = &fixture;
    let followed = || {
        let monitors = collector.monitors.lock().unwrap();
        let mut keys: Vec<_> =
            monitors.keys().map(|(version, plural)| format!("{version} {plural}")).collect();
        keys.sort();
        keys
    };
    let all = ["a.example/v2 widgets", "v1 configmaps", "v1 nodes", "v1 pods"];
    assert_eq!(followed(), all);
    assert!(collector.follow(&discovered(true), scope).is_empty());
    assert_eq!(followed(), all);
    assert!(collector.resource("a.example/v2", "Widget").is_ok());
    let mut gone = discovered(true);
    gone.stale.clear();
    collector.follow(&gone, scope);
    assert_eq!(followed(), &all[1..]);
    assert!(collector.resource("a.example/v2", "Widget").is_err());
    // A discovery without any result says nothing.
    collector.follow(&Discovered::default(), scope);
    assert_eq!(followed(), &all[1..]);
    scope.cancel();
}

#[tokio::test]
async fn an_owner_counts_only_where_the_reference_says() {
    let pods = owner("v1", "Pod", "owner");
    let parent = object("owner", "a", "1", json!([]));
    let widget = object("widget", "a", "1", json!([]));
    let children = [
        ("configmaps", "near", "a", pods.clone(), false),
        ("configmaps", "far", "b", pods.clone(), true),
        // The server prefers another version of widgets.
        ("configmaps", "old", "a", owner("a.example/v1", "Widget", "widget"), false),
        ("configmaps", "kindless", "a", owner("v1", "ConfigMap", "owner"), true),
        // A cluster-scoped object cannot have an owner in a namespace: nobody can know.
        ("nodes", "node", "", pods, false),
    ];
    for (plural, uid, namespace, owners, is_deleted) in children {
        let child = object(uid, namespace, "7", owners);
        let path = if namespace.is_empty() {
            format!("{plural}/{uid}")
        } else {
            format!("{namespace}/{plural}/{uid}")
        };
        let fixture = Fixture::new(&[
            ("a/pods/owner", parent.clone()),
            ("a/widgets/widget", widget.clone()),
            (&path, child.clone()),
        ]);
        fixture.observe("v1", "Pod", "pods", &parent);
        fixture.observe("a.example/v2", "Widget", "widgets", &widget);
        let kind = if plural == "nodes" { "Node" } else { "ConfigMap" };
        fixture.observe("v1", kind, plural, &child);
        fixture.attempt(uid).await.expect("done");
        let expected: Vec<_> = is_deleted.then(|| (path, "7".to_owned())).into_iter().collect();
        assert_eq!(fixture.deletions(), expected, "{uid}");
        fixture.scope.cancel();
    }
}

#[tokio::test]
async fn an_object_that_is_adopted_meanwhile_stays() {
    let gone = owner("v1", "Pod", "gone");
    let child = |version: &str, owners: &Value| object("child", "a", version, owners.clone());
    for (case, owners, deletions) in [
        ("adopted", owner("v1", "Pod", "new"), vec!["7"]),
        ("changed otherwise", gone.clone(), vec!["7", ""]),
    ] {
        let fixture = Fixture::new(&[("a/configmaps/child", child("7", &gone))]);
        fixture.server.lock().unwrap().after.insert("a/configmaps/child".into(), child("8", &owners));
        fixture.observe("v1", "ConfigMap", "configmaps", &child("7", &gone));
        let result = fixture.attempt("child").await;
        let versions: Vec<String> = fixture.deletions().into_iter().map(|(_, version)| version).collect();
        assert_eq!(versions, deletions, "{case}");
        assert_eq!(result.is_err(), case == "adopted", "{case}");
        fixture.scope.cancel();
    }
}

#[tokio::test]
async fn a_live_owner_that_no_watch_shows_is_tried_again() {
    let child = object("child", "a", "7", owner("v1", "Pod", "owner"));
    let fixture = Fixture::new(&[("a/pods/owner", object("owner", "a", "1", json!([])))]);
    fixture.observe("v1", "ConfigMap", "configmaps", &child);
    assert!(fixture.attempt("owner").await.is_err());
    fixture.server.lock().unwrap().objects.clear();
    assert!(fixture.attempt("owner").await.is_ok());
    assert!(fixture.collector.graph().get("owner").is_none());
    fixture.scope.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_cannot_be_listed_does_not_stop_the_collection() {
    let child = object("child", "a", "7", owner("v1", "Pod", "gone"));
    let fixture = Fixture::new(&[("a/configmaps/child", child.clone())]);
    fixture.collector.monitors.lock().unwrap().clear();
    let deleted = {
        let mut server = fixture.server.lock().unwrap();
        server.is_broken = true;
        server.deleted.clone()
    };
    fixture.observe("v1", "ConfigMap", "configmaps", &child);
    let running = fixture.collector.clone().run(fixture.scope.clone(), 1, Arc::default());
    fixture.scope.spawn(running);
    deleted.notified().await;
    assert_eq!(fixture.deletions(), [("a/configmaps/child".to_owned(), "7".to_owned())]);
    fixture.scope.cancel();
}

#[test]
fn the_event_names_both() {
    let dependent = Identity {
        api_version: "v1".into(),
        kind: "Pod".into(),
        namespace: "b".into(),
        name: "p".into(),
        uid: "u".into(),
    };
    let reference = OwnerReference {
        api_version: "apps/v1".into(),
        kind: "ReplicaSet".into(),
        name: "r".into(),
        uid: "o".into(),
        ..OwnerReference::default()
    };
    let (regarding, message) = invalid_namespace(&dependent, &reference);
    assert_eq!(regarding.name.as_deref(), Some("p"));
    assert_eq!(
        message,
        "ownerRef [apps/v1/ReplicaSet, namespace: b, name: r, uid: o] does not exist in namespace \"b\""
    );
}
