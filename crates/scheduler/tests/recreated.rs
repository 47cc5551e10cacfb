//! Pods are deleted while their volumes are provisioned, beside a real API server: their room and their names are free.

use std::sync::Arc;
use std::time::Duration;

use ferrite_apiserver::{ApiServer, Config as ServerConfig, User};
use ferrite_client::{Api, Events, Informer, Informers, Object, Scope};
use ferrite_json::{Value, json};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use tokio::sync::Notify;

/// Far below the ten minutes that a volume may take.
const PATIENCE: Duration = Duration::from_secs(60);

async fn create<K: Object>(api: &Api<K>, object: Value) {
    let text = ferrite_json::to_vec(&object).expect("text");
    let object = K::decode(&text).expect("an object of the kind");
    api.create(&PostParams::default(), &object).await.expect("the object is made");
}

/// A pod that fills the node. Nobody provisions the volume of one with a claim.
fn pod(name: &str, has_claim: bool, finalizers: &[&str]) -> Value {
    let mut pod = json!({"metadata": {"name": name, "finalizers": finalizers}, "spec": {
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "2"}}}]}});
    if has_claim {
        pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]);
    }
    pod
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn nominated_to(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.nominated_node_name.as_deref()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_pod_gives_its_room_and_its_name_back() {
    let config = ServerConfig {
        service_ranges: vec![ferrite_api::Cidr::parse("10.96.0.0/12").unwrap()],
        ..ServerConfig::new("192.0.2.1:6443".parse().unwrap())
    };
    let server = ApiServer::start(Arc::new(ferrite_store::Store::memory()), config).await.unwrap();
    let client_of = |user| Client::new(server.in_process_client(user), "default");
    let admin = client_of(User::new("system:admin", ["system:masters"]));
    let scheduler = client_of(User::new("system:kube-scheduler", ["system:authenticated"]));
    let scope = Scope::new();
    let informers = Informers::new(scheduler.clone(), scope.clone());
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), "default");
    create(&accounts, json!({"metadata": {"name": "default"}})).await;
    let nodes: Api<Node> = Api::all(admin.clone());
    let amounts = json!({"cpu": "2", "memory": "8Gi", "pods": "110"});
    create(
        &nodes,
        json!({"metadata": {"name": "n"}, "status": {"allocatable": amounts, "capacity": amounts}}),
    )
    .await;
    // Nobody removes the taint of a new node here.
    let untainted = Patch::Merge(json!({"spec": {"taints": null}}));
    nodes.patch("n", &PatchParams::default(), &untainted).await.unwrap();
    let class = json!({"metadata": {"name": "slow"}, "provisioner": "example.com/never",
        "volumeBindingMode": "WaitForFirstConsumer"});
    create(&Api::<StorageClass>::all(admin.clone()), class).await;
    let claim = json!({"metadata": {"name": "data"}, "spec": {"storageClassName": "slow",
        "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    create(&Api::<PersistentVolumeClaim>::namespaced(admin.clone(), "default"), claim).await;

    let pods: Informer<Pod> = informers.get();
    ferrite_scheduler::start(&SchedulerContext {
        client: scheduler.clone(),
        informers: informers.clone(),
        events: Events::start(scheduler, &scope),
        scope: scope.clone(),
        configuration: Configuration::default(),
        registry: Registry::default(),
        extenders: Vec::new(),
    })
    .unwrap();
    let changed = Arc::new(Notify::new());
    let bell = changed.clone();
    pods.subscribe(move |_| bell.notify_one());
    let until = async |what: &str, name: &str, holds: fn(&Pod) -> bool| {
        let is_reached = || {
            let is_named = |pod: &Pod| pod.metadata.name.as_deref() == Some(name);
            pods.list().iter().any(|pod| is_named(pod) && holds(pod))
        };
        let reached = async {
            while !is_reached() {
                changed.notified().await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, reached).await.is_ok(), "{what}");
    };
    let api: Api<Pod> = Api::namespaced(admin.clone(), "default");
    let delete = async |name: &str| api.delete(name, &DeleteParams::default()).await.unwrap();

    create(&api, pod("web-0", true, &[])).await;
    until("it waits for its volume", "web-0", |pod| nominated_to(pod) == Some("n")).await;
    delete("web-0").await;
    create(&api, pod("web-0", false, &[])).await;
    until("its successor has the node", "web-0", |pod| node_of(pod) == Some("n")).await;
    delete("web-0").await;

    create(&api, pod("kept", true, &["example.com/keep"])).await;
    until("another one waits for its volume", "kept", |pod| nominated_to(pod) == Some("n")).await;
    delete("kept").await;
    until("its finalizer keeps it", "kept", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    create(&api, pod("next", false, &[])).await;
    until("its room is free", "next", |pod| node_of(pod) == Some("n")).await;

    let events: Informer<Event> = Informers::new(admin, scope.clone()).get();
    let seen = Arc::new(Notify::new());
    let bell = seen.clone();
    events.subscribe(move |_| bell.notify_one());
    let is_event = |event: &Event, reason: &str, action: &str, name: &str| {
        let regarding = event.regarding.as_ref().and_then(|object| object.name.as_deref());
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        text(&event.reason) == reason
            && text(&event.action) == action
            && regarding == Some(name)
            && text(&event.reporting_controller) == "default-scheduler"
            && event.event_time.is_some()
    };
    let told = async {
        let is_told = |reason: &str, action: &str, name: &str| {
            events.list().iter().any(|event| is_event(event, reason, action, name))
        };
        while !(is_told("Scheduled", "Binding", "next") && is_told("FailedScheduling", "Scheduling", "kept"))
        {
            seen.notified().await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, told).await.is_ok(), "{:?}", events.list());

    // It is tried again when it changes, and fails again.
    create(&api, pod("waits", false, &[])).await;
    let failures = async |count: i32| {
        let counted = |event: &Event| event.series.as_ref().map_or(1, |series| series.count);
        let is_there = || {
            let all = events.list();
            let mut of_pod =
                all.iter().filter(|event| is_event(event, "FailedScheduling", "Scheduling", "waits"));
            of_pod.any(|event| counted(event) == count)
        };
        let reached = async {
            while !is_there() {
                seen.notified().await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, reached).await.is_ok(), "{count}: {:?}", events.list());
    };
    failures(1).await;
    let changed = Patch::Merge(json!({"metadata": {"labels": {"again": "yes"}}}));
    api.patch("waits", &PatchParams::default(), &changed).await.unwrap();
    failures(2).await;
    scope.shutdown().await;
    server.shutdown().await;
}
