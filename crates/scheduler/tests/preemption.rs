//! Many pods preempt at once, beside a real API server: no pod loses its place for nothing.

use std::sync::Arc;
use std::time::Duration;

use ferrite_apiserver::{ApiServer, Config as ServerConfig, User};
use ferrite_client::{Api, Change, Events, Informer, Informers, Object, Scope};
use ferrite_json::{Value, json};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Client;
use kube::api::PostParams;
use tokio::sync::Notify;

const NODES: usize = 60;
/// Fewer than nodes: a preemptor that removes pods of a second node is noticed.
const PREEMPTORS: usize = 20;
/// Low pods that fit on a node, and those that must go for a high one.
const PLACES: usize = 4;
const VICTIMS: usize = 3;
/// The delay of the informer behind the server.
const LAG: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(120);

async fn create_all<K: Object>(api: &Api<K>, count: usize, object: impl Fn(usize) -> Value) {
    let writes = (0..count).map(|number| (api.clone(), object(number)));
    futures_util::stream::iter(writes)
        .for_each_concurrent(16, |(api, object)| async move {
            let text = ferrite_json::to_vec(&object).expect("text");
            let object = K::decode(&text).expect("an object of the kind");
            api.create(&PostParams::default(), &object).await.expect("the object is made");
        })
        .await;
}

fn pod(name: &str, cpu: &str, class: Option<&str>) -> Value {
    json!({"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 0, "priorityClassName": class,
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}}}]}})
}

/// The pods whose names begin with `kind` that have a node.
fn bound(pods: &Informer<Pod>, kind: &str) -> usize {
    let has_node = |pod: &Pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let is_kind = |pod: &Pod| pod.metadata.name.as_deref().is_some_and(|name| name.starts_with(kind));
    pods.list().iter().filter(|pod| has_node(pod) && is_kind(pod)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_preemptor_takes_one_set_of_victims() {
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
    let account = json!({"metadata": {"name": "default"}});
    create_all(&Api::<ServiceAccount>::namespaced(admin.clone(), "default"), 1, |_| account.clone()).await;
    let class = json!({"metadata": {"name": "high"}, "value": 1000});
    create_all(&Api::<PriorityClass>::all(admin.clone()), 1, |_| class.clone()).await;
    let amounts = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
    let tolerated = |number: usize| json!({"metadata": {"name": format!("node-{number}")}, "status": {"allocatable": amounts, "capacity": amounts}});
    create_all(&Api::<Node>::all(admin.clone()), NODES, tolerated).await;
    // Nobody removes the taint of new nodes here.
    let nodes: Api<Node> = Api::all(admin.clone());
    for number in 0..NODES {
        let patch = kube::api::Patch::Merge(json!({"spec": {"taints": null}}));
        nodes.patch(&format!("node-{number}"), &kube::api::PatchParams::default(), &patch).await.unwrap();
    }
    // A slow reader of the same informer comes first: the scheduler sees changes later than the server confirms them.
    let pods: Informer<Pod> = informers.get();
    pods.subscribe(|change| {
        if !matches!(change, Change::Added(_)) {
            std::thread::park_timeout(LAG);
        }
    });
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
    let until = async |what: &str, kind: &str, count: usize| {
        let reached = async {
            while bound(&pods, kind) < count {
                changed.notified().await;
            }
        };
        let is_reached = tokio::time::timeout(PATIENCE, reached).await.is_ok();
        assert!(is_reached, "{what}: {} of {count}", bound(&pods, kind));
    };
    let api: Api<Pod> = Api::namespaced(admin, "default");
    create_all(&api, NODES * PLACES, |n| pod(&format!("low-{n}"), "900m", None)).await;
    until("low pods have nodes", "low", NODES * PLACES).await;
    create_all(&api, PREEMPTORS, |n| pod(&format!("high-{n}"), "3000m", Some("high"))).await;
    until("high pods have nodes", "high", PREEMPTORS).await;
    assert_eq!(bound(&pods, "low"), NODES * PLACES - PREEMPTORS * VICTIMS, "pods that keep their places");
    scope.shutdown().await;
    server.shutdown().await;
}
