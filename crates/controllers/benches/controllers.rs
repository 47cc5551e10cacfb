//! The controllers beside an API server with its store in memory, both in this process. Prints a table; numbers, not
//! tests.
//!
//! `cargo bench -p ferrite-controllers` runs all of it; parts can be chosen:
//! `-- deployment job statefulset daemonset namespace idle memory`. Nodes and kubelets are played: pods are made, and those
//! of the Job are said to have succeeded as soon as they are seen.
#![allow(clippy::unwrap_used, reason = "a benchmark that fails should stop at once")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_apiserver::{ApiServer, Config as ServerConfig, User};
use ferrite_client::{Api, Informer, Object, ObjectKey, Scope, WorkQueue, run_workers};
use ferrite_controllers::{Clients, Config, Context, Identity, start_all};
use ferrite_json::{Value, json};
use futures_util::StreamExt;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, Secret, Service, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Client, Resource};

#[global_allocator]
static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;

/// Writes under way at once, where many objects are made.
const WRITERS: usize = 64;

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    println!("{:<58} {:>12}", "what", "seen");
    runtime.block_on(async {
        if wanted("deployment") {
            deployment().await;
        }
        if wanted("job") {
            job().await;
        }
        if wanted("statefulset") {
            stateful_set().await;
        }
        if wanted("daemonset") {
            daemon_set().await;
        }
        if wanted("namespace") {
            namespace().await;
        }
        if wanted("idle") {
            idle().await;
        }
        if wanted("memory") {
            memory().await;
        }
    });
}

fn tell(what: &str, seen: impl std::fmt::Display) {
    println!("{what:<58} {seen:>12}");
}

fn seconds(elapsed: Duration) -> String {
    format!("{:.2} s", elapsed.as_secs_f64())
}

struct World {
    client: Client,
    context: Context,
    server: Arc<ApiServer>,
    scope: Scope,
}

impl World {
    async fn start() -> Self {
        let world = Self::without_controllers().await;
        world.start_controllers().await;
        world
    }

    async fn without_controllers() -> Self {
        let config = ServerConfig {
            service_ranges: vec![ferrite_api::Cidr::parse("10.96.0.0/12").unwrap()],
            ..ServerConfig::new("192.0.2.1:6443".parse().unwrap())
        };
        let server = ApiServer::start(Arc::new(ferrite_store::Store::memory()), config).await.unwrap();
        let admin = User::new("system:admin", ["system:masters"]);
        let client = client_of(&server, admin);
        let serving = server.clone();
        let clients: Clients = Arc::new(move |identity| {
            let user = match identity {
                Identity::Manager => User::new("system:kube-controller-manager", ["system:authenticated"]),
                Identity::ServiceAccount(name) => User::new(
                    format!("system:serviceaccount:kube-system:{name}"),
                    ["system:serviceaccounts", "system:serviceaccounts:kube-system"],
                ),
                Identity::Server => User::new("system:apiserver", ["system:masters"]),
            };
            client_of(&serving, user)
        });
        let scope = Scope::new();
        let context = Context::new(clients, scope.clone(), Config::default());
        Self { client, context, server, scope }
    }

    async fn start_controllers(&self) {
        assert!(start_all(&self.context, &["*"]).is_empty());
        self.until::<ServiceAccount>("the default account", |accounts| {
            accounts.get(&ObjectKey::new("default", "default")).is_some()
        })
        .await;
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn create<K>(&self, object: Value)
    where
        K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        create(&self.api::<K>(), &object).await;
    }

    /// Waits until the shared copy of a kind is as `check` wants it, woken by each change.
    async fn until<K: Object + Resource<DynamicType = ()>>(
        &self,
        what: &str,
        check: impl Fn(&Informer<K>) -> bool,
    ) {
        let informer: Informer<K> = self.context.informers.get();
        let (sender, mut changes) = tokio::sync::watch::channel(());
        informer.subscribe(move |_| {
            sender.send_replace(());
        });
        let wait = async {
            loop {
                changes.mark_unchanged();
                if check(&informer) {
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        assert!(tokio::time::timeout(Duration::from_secs(600), wait).await.is_ok(), "never came: {what}");
    }

    async fn stop(self) {
        self.scope.shutdown().await;
        self.server.shutdown().await;
    }
}

fn client_of(server: &Arc<ApiServer>, user: User) -> Client {
    Client::new(server.in_process_client(user), "default")
}

async fn create<K: Object>(api: &Api<K>, object: &Value) {
    let object = K::decode(&ferrite_json::to_vec(object).unwrap()).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap();
}

/// Makes `count` objects, several at a time.
async fn create_many<K: Object>(api: &Api<K>, count: usize, object: impl Fn(usize) -> Value) {
    let writes = (0..count).map(|number| (api.clone(), object(number)));
    futures_util::stream::iter(writes)
        .for_each_concurrent(WRITERS, |(api, object)| async move { create(&api, &object).await })
        .await;
}

fn template() -> Value {
    json!({"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}})
}

fn workload(name: &str, changes: Value) -> Value {
    let mut spec = json!({"selector": {"matchLabels": {"app": "web"}}, "template": template()});
    spec.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    json!({"metadata": {"name": name}, "spec": spec})
}

async fn deployment() {
    let world = World::start().await;
    world.create::<Deployment>(workload("web", json!({"replicas": 0}))).await;
    world.until::<ReplicaSet>("a replica set", |sets| sets.len() == 1).await;
    let began = Instant::now();
    let patch = Patch::Merge(json!({"spec": {"replicas": 1000}}));
    world.api::<Deployment>().patch("web", &PatchParams::default(), &patch).await.unwrap();
    world.until::<Pod>("pods", |pods| pods.len() == 1000).await;
    tell("Deployment, 0 to 1,000 pods made", seconds(began.elapsed()));
    world.stop().await;
}

async fn job() {
    let world = World::start().await;
    succeed(&world);
    let began = Instant::now();
    let mut template = template();
    template["spec"]["restartPolicy"] = json!("Never");
    let spec =
        json!({"completionMode": "Indexed", "completions": 1000, "parallelism": 1000, "template": template});
    world.create::<Job>(json!({"metadata": {"name": "many"}, "spec": spec})).await;
    world
        .until::<Job>("the job's end", |jobs| {
            let job = jobs.get(&ObjectKey::new("default", "many"));
            let status = job.and_then(|job| job.status.clone());
            status.is_some_and(|status| status.completion_time.is_some())
        })
        .await;
    tell("Job of 1,000 indexes, complete", seconds(began.elapsed()));
    world.stop().await;
}

/// Says of every pod that it has succeeded.
fn succeed(world: &World) {
    let pods: Informer<Pod> = world.context.informers.get();
    let queue = Arc::new(WorkQueue::new());
    let watching = queue.clone();
    pods.subscribe(move |change| watching.add(ObjectKey::of(&**change.object())));
    let (client, scope) = (world.client.clone(), world.scope.clone());
    world.scope.spawn(async move {
        run_workers("kubelets", queue, WRITERS, scope, move |key: ObjectKey| {
            let pod = pods.get(&key);
            let api: Api<Pod> = Api::namespaced(client.clone(), &key.namespace);
            async move {
                let runs = pod.is_some_and(|pod| {
                    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
                    phase == Some("Pending") && pod.metadata.deletion_timestamp.is_none()
                });
                if runs {
                    let status = Patch::Strategic(json!({"status": {"phase": "Succeeded"}}));
                    // A pod that is gone by now needs no status.
                    let _ = api.patch_status(&key.name, &PatchParams::default(), &status).await;
                }
                Ok::<_, kube::Error>(None)
            }
        })
        .await;
    });
}

async fn stateful_set() {
    let world = World::start().await;
    let began = Instant::now();
    let spec = json!({"replicas": 500, "podManagementPolicy": "Parallel", "serviceName": "web"});
    world.create::<StatefulSet>(workload("web", spec)).await;
    world.until::<Pod>("pods", |pods| pods.len() == 500).await;
    tell("StatefulSet, 500 parallel pods made", seconds(began.elapsed()));
    world.stop().await;
}

async fn daemon_set() {
    let world = World::start().await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    create_many(&nodes, 5000, |number| json!({"metadata": {"name": format!("node-{number}")}})).await;
    let began = Instant::now();
    world.create::<DaemonSet>(workload("everywhere", json!({}))).await;
    world.until::<Pod>("pods", |pods| pods.len() == 5000).await;
    tell("DaemonSet over 5,000 nodes, pods made", seconds(began.elapsed()));
    world.stop().await;
}

async fn namespace() {
    let world = World::start().await;
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    create(&namespaces, &json!({"metadata": {"name": "full"}})).await;
    let maps: Api<ConfigMap> = Api::namespaced(world.client.clone(), "full");
    create_many(&maps, 10_000, |number| json!({"metadata": {"name": format!("map-{number}")}})).await;
    let began = Instant::now();
    namespaces.delete("full", &DeleteParams::default()).await.unwrap();
    world
        .until::<Namespace>("the end of the namespace", |all| all.get(&ObjectKey::cluster("full")).is_none())
        .await;
    tell("namespace with 10,000 objects, deleted", seconds(began.elapsed()));
    world.stop().await;
}

async fn idle() {
    const EACH: usize = 10_000;
    let world = World::start().await;
    let named = |number: usize| format!("x-{number}");
    create_many(&world.api::<Deployment>(), EACH, |n| workload(&named(n), json!({"replicas": 0}))).await;
    create_many(&world.api::<StatefulSet>(), EACH, |n| {
        workload(&named(n), json!({"replicas": 0, "serviceName": "x"}))
    })
    .await;
    create_many(&world.api::<DaemonSet>(), EACH, |n| workload(&named(n), json!({}))).await;
    let mut template = template();
    template["spec"]["restartPolicy"] = json!("Never");
    let job = json!({"suspend": true, "template": template});
    create_many(&world.api::<Job>(), EACH, |n| json!({"metadata": {"name": named(n)}, "spec": job})).await;
    let cron =
        json!({"suspend": true, "schedule": "0 0 1 1 *", "jobTemplate": {"spec": {"template": template}}});
    create_many(&world.api::<CronJob>(), EACH, |n| json!({"metadata": {"name": named(n)}, "spec": cron}))
        .await;
    let service = json!({"ports": [{"port": 80}], "selector": {"app": "none"}});
    create_many(&world.api::<Service>(), EACH, |n| json!({"metadata": {"name": named(n)}, "spec": service}))
        .await;
    create_many(&world.api::<Secret>(), EACH, |n| json!({"metadata": {"name": named(n)}})).await;
    // The controllers first finish the work that the last writes caused.
    settle().await;
    let before = processor_time();
    tokio::time::sleep(Duration::from_secs(60)).await;
    tell("10,000 idle objects of 7 kinds, processor time in 60 s", seconds(processor_time() - before));
    world.stop().await;
}

/// Waits until a second passes in which the process does next to nothing.
async fn settle() {
    for _ in 0..300 {
        let before = processor_time();
        tokio::time::sleep(Duration::from_secs(1)).await;
        if processor_time() - before < Duration::from_millis(30) {
            return;
        }
    }
    println!("the process never came to rest");
}

async fn memory() {
    let world = World::without_controllers().await;
    let pods = world.api::<Pod>();
    create(
        &Api::<ServiceAccount>::namespaced(world.client.clone(), "default"),
        &json!({"metadata": {"name": "default"}}),
    )
    .await;
    create_many(
        &pods,
        10_000,
        |n| json!({"metadata": {"name": format!("p-{n}")}, "spec": template()["spec"]}),
    )
    .await;
    let before = proportional_memory();
    world.start_controllers().await;
    world.until::<Pod>("pods", |pods| pods.len() == 10_000).await;
    settle().await;
    let added = proportional_memory().saturating_sub(before) / 1024;
    tell("controllers with 10,000 pods, memory beyond the server's", format!("{added} MiB"));
    world.stop().await;
}

/// The processor time of this process.
fn processor_time() -> Duration {
    ferrite_memory::usage::processor_time(std::process::id())
}

/// The PSS of this process in KiB.
fn proportional_memory() -> u64 {
    ferrite_memory::usage::rollup(std::process::id(), "Pss:")
}
