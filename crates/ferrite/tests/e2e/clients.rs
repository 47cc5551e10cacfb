//! Clients other than kubectl, unmodified, over TLS with the kubeconfig that `up` writes.

use crate::world::*;
use ferrite_json::{Value, json};
use futures_util::{StreamExt, TryStreamExt};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::{ConfigMap, Event as CoreEvent, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::{
    Api, DeleteParams, DynamicObject, EvictParams, ListParams, LogParams, Patch, PatchParams, PostParams,
    WatchEvent, WatchParams,
};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Config, ResourceExt};
use std::collections::BTreeMap;

/// Each function of the script is one step and prints its name when it has passed.
#[test]
fn the_python_client() {
    let world = World::start();
    let script = world.write("clients.py", include_str!("clients.py"));
    // Debian's own interpreter: only that one sees Debian's packages.
    let arguments = ["-s", "KILL", "120", "/usr/bin/python3", script.to_str().unwrap()];
    let output = world.command("timeout", &arguments).output().unwrap();
    let passed = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "passed: {passed}\nthen (python3-kubernetes is needed):\n{complaint}");
    let steps: Vec<&str> = passed.lines().collect();
    assert_eq!(steps.len(), 8, "{steps:?}");
}

/// Runs a task with a client that knows nothing but the kubeconfig.
pub fn with_kube_rs<F, T>(world: &World, task: impl FnOnce(Client) -> F + Send + 'static) -> T
where
    F: Future<Output = T>,
    T: Send + 'static,
{
    let file = world.path("kubeconfig");
    world.netns.run(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let kubeconfig = kube::config::Kubeconfig::read_from(file).unwrap();
            let mut config = Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
            // The tests want to see refusals, not to try again.
            config.default_retry = false;
            let client = Client::try_from(config).unwrap();
            tokio::time::timeout(PATIENCE, task(client)).await.expect("the clients' work ends in time")
        })
    })
}

pub fn object<K: serde::de::DeserializeOwned>(value: Value) -> K {
    ferrite_json::from_value(value).unwrap()
}

fn config_map(name: &str, data: Value) -> ConfigMap {
    object(json!({"metadata": {"name": name, "labels": {"made-by": "rust"}}, "data": data}))
}

/// The Status of an answer that must be a refusal.
fn refused<T>(answer: kube::Result<T>) -> (u16, String, String) {
    match answer.err().expect("the server refuses") {
        kube::Error::Api(status) => (status.code, status.reason.clone(), status.message.clone()),
        other => panic!("not a Status: {other}"),
    }
}

#[test]
fn kube_rs() {
    let world = World::start();
    with_kube_rs(&world, |client| async move {
        assert_eq!(client.apiserver_version().await.unwrap().minor, "36");
        let review: Api<SelfSubjectReview> = Api::all(client.clone());
        let me = review.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
        assert_eq!(me.status.unwrap().user_info.unwrap().username.as_deref(), Some("kubernetes-admin"));
        typed(client.clone()).await;
        watches(client.clone()).await;
        server_side_apply(client.clone()).await;
        dynamic(client.clone()).await;
        finalizers(client.clone()).await;
        events(client.clone()).await;
        pods(client).await;
    });
}

async fn typed(client: Client) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let post = PostParams::default();
    let made = maps.create(&post, &config_map("a", json!({"k": "1"}))).await.unwrap();
    assert!(made.uid().is_some());
    assert_eq!(
        refused(maps.create(&post, &config_map("a", json!({}))).await),
        (409, "AlreadyExists".into(), "configmaps \"a\" already exists".into())
    );
    assert_eq!(
        refused(maps.get("none").await),
        (404, "NotFound".into(), "configmaps \"none\" not found".into())
    );
    assert!(maps.get_opt("none").await.unwrap().is_none());
    let wrong: Deployment = object(json!({
        "metadata": {"name": "wrong"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "c"}}}},
    }));
    let (code, reason, _) =
        refused(Api::<Deployment>::default_namespaced(client.clone()).create(&post, &wrong).await);
    assert_eq!((code, reason.as_str()), (422, "Invalid"));

    let merge = PatchParams::default();
    let patched =
        maps.patch("a", &merge, &Patch::Merge(json!({"data": {"k": "2", "l": "3"}}))).await.unwrap();
    assert_eq!(patched.data.unwrap().len(), 2);
    let stale = maps.replace("a", &post, &made).await;
    assert_eq!(refused(stale).1, "Conflict");
    let dry = PostParams { dry_run: true, ..Default::default() };
    maps.create(&dry, &config_map("dry", json!({}))).await.unwrap();
    assert!(maps.get_opt("dry").await.unwrap().is_none());

    for number in 0..4 {
        maps.create(&post, &config_map(&format!("page-{number}"), json!({}))).await.unwrap();
    }
    let mut page = ListParams::default().labels("made-by=rust").limit(2);
    let mut names = Vec::new();
    loop {
        let list = maps.list(&page).await.unwrap();
        names.extend(list.items.iter().map(ResourceExt::name_any));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    assert_eq!(names, ["a", "page-0", "page-1", "page-2", "page-3"]);
    let metadata = maps.list_metadata(&ListParams::default().labels("made-by=rust")).await.unwrap();
    assert_eq!(metadata.items.len(), 5);
    let selected = ListParams::default().labels("made-by=rust");
    maps.delete_collection(&DeleteParams::default(), &selected).await.unwrap();
    assert!(maps.list(&selected).await.unwrap().items.is_empty());
}

/// A list and the watch that goes on from it are all that an informer needs.
async fn watches(client: Client) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let post = PostParams::default();
    let start = maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    maps.create(&post, &config_map("w", json!({"k": "1"}))).await.unwrap();
    maps.patch("w", &PatchParams::default(), &Patch::Merge(json!({"data": {"k": "2"}}))).await.unwrap();
    maps.delete("w", &DeleteParams::default()).await.unwrap();
    let parameters = WatchParams::default().labels("made-by=rust").timeout(20);
    let mut stream = maps.watch(&parameters, &start).await.unwrap().boxed();
    let mut seen = Vec::new();
    while seen.len() < 3 {
        let (what, map) = match stream.try_next().await.unwrap().expect("the watch goes on") {
            WatchEvent::Added(map) => ("added", map),
            WatchEvent::Modified(map) => ("modified", map),
            WatchEvent::Deleted(map) => ("deleted", map),
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(status) => panic!("{status}"),
        };
        seen.push((what, map.data.unwrap()["k"].clone()));
    }
    assert_eq!(seen, [("added", "1".into()), ("modified", "2".into()), ("deleted", "2".into())]);
    drop(stream);

    // A streamed list: the existing objects, then a bookmark that ends the list.
    maps.create(&post, &config_map("w", json!({}))).await.unwrap();
    let parameters = WatchParams::default().labels("made-by=rust").initial_events().timeout(20);
    let mut stream = maps.watch(&parameters, "0").await.unwrap().boxed();
    let mut store = BTreeMap::new();
    loop {
        match stream.try_next().await.unwrap().expect("the watch goes on") {
            WatchEvent::Added(map) => drop(store.insert(map.name_any(), map)),
            WatchEvent::Bookmark(mark) => {
                assert!(mark.metadata.annotations.contains_key("k8s.io/initial-events-end"));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(store.keys().collect::<Vec<_>>(), ["w"]);
    maps.delete("w", &DeleteParams::default()).await.unwrap();
}

async fn server_side_apply(client: Client) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let wanted = |value: &str| {
        Patch::Apply(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "applied"}, "data": {"k": value},
        }))
    };
    let (one, two) = (PatchParams::apply("one"), PatchParams::apply("two"));
    assert!(maps.patch("applied", &one, &wanted("1")).await.unwrap().uid().is_some());
    let (code, _, message) = refused(maps.patch("applied", &two, &wanted("2")).await);
    assert_eq!(code, 409);
    assert_eq!(message, "Apply failed with 1 conflict: conflict with \"one\": .data.k");
    let forced = maps.patch("applied", &two.clone().force(), &wanted("2")).await.unwrap();
    assert_eq!(forced.data.as_ref().unwrap()["k"], "2");
    let managers: Vec<_> = forced.managed_fields().iter().filter_map(|m| m.manager.as_deref()).collect();
    assert_eq!(managers, ["two"], "a manager without fields is gone");
    // A manager gives up the fields that it leaves out.
    let empty = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "applied"}});
    assert_eq!(maps.patch("applied", &two, &Patch::Apply(empty)).await.unwrap().data, None);
    maps.delete("applied", &DeleteParams::default()).await.unwrap();
}

async fn dynamic(client: Client) {
    let discovered = kube::Discovery::new(client.clone()).run().await.unwrap();
    assert!(discovered.has_group("apps") && discovered.has_group(""));
    let gvk = GroupVersionKind::gvk("", "v1", "Secret");
    let (resource, capabilities) = discovered.resolve_gvk(&gvk).unwrap();
    assert!(capabilities.supports_operation(kube::discovery::verbs::WATCH));
    let secrets: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &resource);
    let mut secret = DynamicObject::new("d", &resource);
    secret.data = serde_json::json!({"stringData": {"key": "value"}});
    let made = secrets.create(&PostParams::default(), &secret).await.unwrap();
    assert_eq!((&made.data["data"]["key"], &made.data["type"]), (&"dmFsdWU=".into(), &"Opaque".into()));
    assert_eq!(Api::<Secret>::default_namespaced(client.clone()).get("d").await.unwrap().name_any(), "d");
    secrets.delete("d", &DeleteParams::default()).await.unwrap();
    // A kind that nobody serves.
    let none = ApiResource::from_gvk(&GroupVersionKind::gvk("example.com", "v1", "Nothing"));
    let nothing: Api<DynamicObject> = Api::all_with(client, &none);
    let answer = refused(nothing.list(&ListParams::default()).await);
    assert_eq!(answer.0, 404, "{answer:?}");
}

async fn finalizers(client: Client) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let mut map = config_map("held", json!({}));
    map.metadata.finalizers = Some(vec!["example.com/hold".into()]);
    maps.create(&PostParams::default(), &map).await.unwrap();
    let held =
        maps.delete("held", &DeleteParams::default()).await.unwrap().left().expect("it is still there");
    assert!(held.metadata.deletion_timestamp.is_some());
    let more = json!({"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}});
    let refusal = maps.patch("held", &PatchParams::default(), &Patch::Merge(more)).await;
    assert_eq!(refused(refusal).0, 422, "nobody may add a finalizer to what is on its way out");
    let none = json!({"metadata": {"finalizers": null}});
    maps.patch("held", &PatchParams::default(), &Patch::Merge(none)).await.unwrap();
    assert!(maps.get_opt("held").await.unwrap().is_none());
}

async fn events(client: Client) {
    let new: Api<Event> = Api::default_namespaced(client.clone());
    let event = object(json!({
        "metadata": {"generateName": "told-"},
        "eventTime": "2024-01-01T00:00:00.000000Z",
        "reportingController": "example.com/teller", "reportingInstance": "one",
        "action": "Telling", "reason": "Told", "note": "a note", "type": "Normal",
        "regarding": {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "namespace": "default"},
    }));
    let name = new.create(&PostParams::default(), &event).await.unwrap().name_any();
    assert!(name.starts_with("told-"));
    // The same object by its older name.
    let old: Api<CoreEvent> = Api::default_namespaced(client);
    let listed = old.list(&ListParams::default().fields("reason=Told")).await.unwrap().items;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].message.as_deref(), Some("a note"));
    assert_eq!(listed[0].involved_object.name.as_deref(), Some("a"));
}

async fn pods(client: Client) {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let pod = object(json!({
        "metadata": {"name": "p"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": TOOLS, "args": ["tick", "20", "--count=5"]}],
            "restartPolicy": "Never",
        },
    }));
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let parameters = WatchParams::default().fields("metadata.name=p").timeout(50);
    let mut stream = pods.watch(&parameters, "0").await.unwrap().boxed();
    loop {
        match stream.try_next().await.unwrap().expect("the watch goes on") {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                let phase = pod.status.and_then(|s| s.phase);
                if phase.as_deref() == Some("Succeeded") {
                    break;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    let log = pods.logs("p", &LogParams { tail_lines: Some(1), ..Default::default() }).await.unwrap();
    assert_eq!(log, "tick 4\n");
    pods.evict("p", &EvictParams::default()).await.unwrap();
    let gone = pods.watch(&parameters, "0").await.unwrap();
    let ended = gone.try_any(|event| std::future::ready(matches!(event, WatchEvent::Deleted(_))));
    assert!(pods.get_opt("p").await.unwrap().is_none() || ended.await.unwrap());

    let deployments: Api<Deployment> = Api::default_namespaced(client);
    let deployment = object(json!({
        "metadata": {"name": "d"},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "c", "image": TOOLS}]},
            },
        },
    }));
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let scale = json!({"spec": {"replicas": 3}});
    let scaled = deployments.patch_scale("d", &PatchParams::default(), &Patch::Merge(scale)).await.unwrap();
    assert_eq!(scaled.spec.unwrap().replicas, Some(3));
    deployments.delete("d", &DeleteParams::foreground()).await.unwrap();
}
