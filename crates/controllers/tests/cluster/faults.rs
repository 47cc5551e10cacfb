//! Controllers on an API server that refuses writes, loses answers, and shows changes late and twice, restarted between
//! any two writes. However it goes, the cluster ends in the same state.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context as Waker, Poll, ready};
use std::time::Duration;

use ferrite_apiserver::{ApiServer, InProcessClient, User};
use ferrite_client::Api;
use ferrite_controllers::{Clients, Context, Identity};
use ferrite_json::{Value, json};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response, StatusCode, header};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Pod, ResourceQuota, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::client::Body;
use tokio::sync::{Notify, watch};
use tokio::time::Sleep;

use crate::support::{Cluster, start_controllers, user_of};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// What becomes of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The write is not done: an error of the server.
    Refused,
    /// The write is not done: somebody else has written the object.
    Conflict,
    /// The write is done, and the connection ends before the answer comes.
    Lost,
}

/// The faults of one run. They end when the plan is told to.
struct Plan {
    numbers: AtomicU64,
    faulty: AtomicBool,
    refused: AtomicUsize,
    lost: AtomicUsize,
    delayed: AtomicUsize,
}

impl Plan {
    fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            numbers: AtomicU64::new(seed),
            faulty: AtomicBool::new(true),
            refused: AtomicUsize::new(0),
            lost: AtomicUsize::new(0),
            delayed: AtomicUsize::new(0),
        })
    }

    /// A number below `end`, from a sequence that the seed determines (SplitMix64).
    fn draw(&self, end: u64) -> u64 {
        let state = self.numbers.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn is_faulty(&self) -> bool {
        self.faulty.load(Ordering::Relaxed)
    }

    fn fault(&self, method: &Method) -> Fault {
        if !self.is_faulty() {
            return Fault::None;
        }
        match self.draw(10) {
            0 => Fault::Refused,
            1 => Fault::Lost,
            2 if matches!(*method, Method::PUT | Method::PATCH) => Fault::Conflict,
            _ => Fault::None,
        }
    }

    /// How long an event is held back.
    fn delay(&self) -> Option<Duration> {
        (self.is_faulty() && self.draw(4) == 0).then(|| Duration::from_millis(self.draw(40)))
    }

    fn is_doubled(&self) -> bool {
        self.is_faulty() && self.draw(6) == 0
    }
}

/// One run of the controllers, until it crashes.
struct Incarnation {
    plan: Arc<Plan>,
    /// Writes until the crash.
    left: AtomicUsize,
    crashed: AtomicBool,
    ended: Notify,
}

impl Incarnation {
    fn new(plan: &Arc<Plan>, writes: usize) -> Arc<Self> {
        Arc::new(Self {
            plan: Arc::clone(plan),
            left: AtomicUsize::new(writes),
            crashed: AtomicBool::new(false),
            ended: Notify::new(),
        })
    }

    /// False once it has crashed: nothing that it still tries reaches the server.
    fn may_write(&self) -> bool {
        let spent = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if spent.is_err() && !self.crashed.swap(true, Ordering::Relaxed) {
            self.ended.notify_one();
        }
        !self.crashed.load(Ordering::Relaxed)
    }
}

/// A connection of one controller to the server.
#[derive(Clone)]
struct Connection {
    inner: InProcessClient,
    incarnation: Arc<Incarnation>,
}

impl tower::Service<Request<Body>> for Connection {
    type Response = Response<Events>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Self::Response, Error>>;

    fn poll_ready(&mut self, _: &mut Waker<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let incarnation = Arc::clone(&self.incarnation);
        let plan = Arc::clone(&incarnation.plan);
        let is_read = *request.method() == Method::GET;
        let is_watch = is_read && request.uri().query().is_some_and(|query| query.contains("watch="));
        let mut inner = self.inner.clone();
        async move {
            if !is_read && !incarnation.may_write() {
                return Err("the process has crashed".into());
            }
            let fault = if is_read { Fault::None } else { plan.fault(request.method()) };
            if matches!(fault, Fault::Refused | Fault::Conflict) {
                plan.refused.fetch_add(1, Ordering::Relaxed);
                return Ok(refusal(fault));
            }
            let answer = inner.call(request).await?;
            if fault == Fault::Lost {
                plan.lost.fetch_add(1, Ordering::Relaxed);
                return Err("the connection has ended".into());
            }
            Ok(answer.map(|body| Events::new(body, is_watch.then_some(plan))))
        }
        .boxed()
    }
}

fn refusal(fault: Fault) -> Response<Events> {
    let (code, reason) = match fault {
        Fault::Conflict => (StatusCode::CONFLICT, "Conflict"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "InternalError"),
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "simulated",
        "reason": reason, "code": code.as_u16()});
    let body = Body::from(ferrite_json::to_vec(&status).unwrap());
    Response::builder()
        .status(code)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Events::new(body, None))
        .unwrap()
}

type Frame = http_body::Frame<bytes::Bytes>;

/// The body of a response. Events of a watch come late and some of them twice.
struct Events {
    inner: Pin<Box<dyn http_body::Body<Data = bytes::Bytes, Error = Error> + Send>>,
    plan: Option<Arc<Plan>>,
    held: Option<(bytes::Bytes, Pin<Box<Sleep>>)>,
    again: Option<bytes::Bytes>,
}

impl Events {
    fn new<B>(inner: B, plan: Option<Arc<Plan>>) -> Self
    where
        B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
        B::Error: Into<Error>,
    {
        let inner = Box::pin(http_body_util::BodyExt::map_err(inner, Into::into));
        Self { inner, plan, held: None, again: None }
    }
}

impl http_body::Body for Events {
    type Data = bytes::Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, waker: &mut Waker<'_>) -> Poll<Option<Result<Frame, Error>>> {
        let Some(plan) = self.plan.clone() else { return self.inner.as_mut().poll_frame(waker) };
        if let Some(again) = self.again.take() {
            return Poll::Ready(Some(Ok(Frame::data(again))));
        }
        if self.held.is_none() {
            let frame = match ready!(self.inner.as_mut().poll_frame(waker)) {
                Some(Ok(frame)) => frame,
                other => return Poll::Ready(other),
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            let delay = plan.delay().unwrap_or_default();
            plan.delayed.fetch_add(usize::from(!delay.is_zero()), Ordering::Relaxed);
            self.held = Some((data, Box::pin(tokio::time::sleep(delay))));
        }
        let (data, sleep) = self.held.as_mut().expect("a frame is held from here on");
        ready!(sleep.as_mut().poll(waker));
        // Only whole lines can be sent again.
        let is_line = data.ends_with(b"\n") && data.iter().filter(|byte| **byte == b'\n').count() == 1;
        let data = self.held.take().map(|(data, _)| data);
        self.again = data.clone().filter(|_| is_line && plan.is_doubled());
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }
}

fn clients(server: &Arc<ApiServer>, incarnation: &Arc<Incarnation>) -> Clients {
    let (server, incarnation) = (Arc::clone(server), Arc::clone(incarnation));
    Arc::new(move |identity: Identity| {
        let user: User = user_of(identity);
        let inner = server.in_process_client(user);
        Client::new(Connection { inner, incarnation: Arc::clone(&incarnation) }, "default")
    })
}

/// Runs controllers that crash again and again, until the plan has no more faults.
async fn run_controllers(cluster: &Cluster, plan: &Arc<Plan>, crashes: watch::Sender<usize>) {
    while plan.is_faulty() {
        let writes = 1 + usize::try_from(plan.draw(50)).unwrap();
        let incarnation = Incarnation::new(plan, writes);
        let scope = cluster.context.scope.child();
        let clients = clients(&cluster.server, &incarnation);
        let context = Context::new(clients, scope.clone(), (*cluster.context.config).clone());
        start_controllers(&context);
        // One that has nothing more to write does not crash by itself.
        let _ = tokio::time::timeout(Duration::from_secs(3), incarnation.ended.notified()).await;
        incarnation.left.store(0, Ordering::Relaxed);
        incarnation.crashed.store(true, Ordering::Relaxed);
        scope.shutdown().await;
        crashes.send_modify(|count| *count += 1);
    }
}

fn workload(kind: &str, name: &str, labels: Value, spec: Value) -> Value {
    let mut labels = labels;
    labels["app"] = json!(name);
    let is_job = kind == "Job";
    let mut pod = json!({"containers": [{"name": "c", "image": "a:1"}]});
    if is_job {
        pod["restartPolicy"] = json!("Never");
    }
    let mut whole = json!({"template": {"metadata": {"labels": labels}, "spec": pod}});
    if !is_job {
        whole["selector"] = json!({"matchLabels": {"app": name}});
    }
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let version = if is_job { "batch/v1" } else { "apps/v1" };
    json!({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": whole})
}

async fn create_all(cluster: &Cluster) {
    let plain = || json!({});
    cluster
        .create::<Deployment>("default", workload("Deployment", "web", plain(), json!({"replicas": 3})))
        .await;
    cluster
        .create::<Deployment>("default", workload("Deployment", "gone", plain(), json!({"replicas": 2})))
        .await;
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let spec = json!({"replicas": 3, "serviceName": "db", "volumeClaimTemplates": [claim]});
    cluster.create::<StatefulSet>("default", workload("StatefulSet", "db", plain(), spec)).await;
    cluster.create::<DaemonSet>("default", workload("DaemonSet", "agent", plain(), plain())).await;
    let indexed = json!({"completions": 6, "parallelism": 3, "completionMode": "Indexed"});
    cluster.create::<Job>("default", workload("Job", "indexed", json!({"exit": "0"}), indexed)).await;
    let plain_job = json!({"completions": 5, "parallelism": 2});
    cluster.create::<Job>("default", workload("Job", "many", json!({"exit": "0"}), plain_job)).await;
    let service = json!({"metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}});
    cluster.create::<Service>("default", service).await;
    let budget = json!({"metadata": {"name": "web"},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "web"}}}});
    cluster.create::<PodDisruptionBudget>("default", budget).await;
    let quota =
        json!({"metadata": {"name": "few"}, "spec": {"hard": {"pods": "100", "count/services": "9"}}});
    cluster.create::<ResourceQuota>("default", quota).await;
    cluster.create_namespace("leaving").await;
    cluster.create::<ConfigMap>("leaving", json!({"metadata": {"name": "content"}})).await;
    cluster
        .create::<Deployment>("leaving", workload("Deployment", "web", plain(), json!({"replicas": 1})))
        .await;
}

async fn change_all(cluster: &Cluster) {
    let image = |extra: Value| {
        let mut spec = json!({"template": {"spec": {"containers": [{"name": "c", "image": "a:2"}]}}});
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Patch::Strategic(json!({"spec": spec}))
    };
    let params = PatchParams::default();
    cluster.api::<Deployment>("default").patch("web", &params, &image(json!({"replicas": 4}))).await.unwrap();
    cluster.api::<StatefulSet>("default").patch("db", &params, &image(json!({}))).await.unwrap();
    cluster.api::<DaemonSet>("default").patch("agent", &params, &image(json!({}))).await.unwrap();
    cluster.api::<Deployment>("default").delete("gone", &DeleteParams::foreground()).await.unwrap();
    Api::<Namespace>::all(cluster.client.clone()).delete("leaving", &DeleteParams::default()).await.unwrap();
}

/// Names of pods by their `app`, and the images that they run.
fn pods_of(pods: &[Arc<Pod>], namespace: &str, app: &str) -> Vec<Arc<Pod>> {
    let is_wanted = |pod: &&Arc<Pod>| {
        let labels = pod.metadata.labels.as_ref();
        pod.metadata.namespace.as_deref() == Some(namespace)
            && labels.and_then(|labels| labels.get("app")).is_some_and(|found| found == app)
    };
    pods.iter().filter(is_wanted).cloned().collect()
}

/// True if these many pods are left, none of which is on its way out, and all run the second image.
fn are_new(pods: &[Arc<Pod>], count: usize) -> bool {
    pods.len() == count
        && pods.iter().all(|pod| {
            let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.as_deref());
            pod.metadata.deletion_timestamp.is_none() && image == Some("a:2")
        })
}

fn addresses(pods: &[Arc<Pod>]) -> BTreeSet<String> {
    pods.iter().filter_map(|pod| pod.status.as_ref()?.pod_ip.clone()).collect()
}

async fn workloads_are_whole(cluster: &Cluster) {
    cluster
        .eventually("the pods of all workloads", |pods: &[Arc<Pod>]| {
            let of = |app| pods_of(pods, "default", app);
            let (db, agents) = (of("db"), of("agent"));
            let names: BTreeSet<_> = db.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
            let nodes: BTreeSet<_> =
                agents.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.as_deref()).collect();
            (are_new(&of("web"), 4)
                && are_new(&db, 3)
                && names == ["db-0", "db-1", "db-2"].into()
                && are_new(&agents, 3)
                && nodes == ["n1", "n2", "n3"].into()
                && of("gone").is_empty()
                && pods.iter().all(|pod| pod.metadata.namespace.as_deref() != Some("leaving")))
            .then_some(())
        })
        .await;
    cluster
        .eventually("the Deployment's status", |found: &[Arc<Deployment>]| {
            let [web] = found else { return None };
            let status = web.status.as_ref()?;
            let counts = (status.replicas?, status.updated_replicas?, status.available_replicas?);
            (counts == (4, 4, 4) && status.observed_generation == web.metadata.generation).then_some(())
        })
        .await;
    cluster
        .eventually("one ReplicaSet with pods", |found: &[Arc<ReplicaSet>]| {
            let sizes = found.iter().filter_map(|set| set.spec.as_ref()?.replicas);
            (sizes.filter(|size| *size > 0).collect::<Vec<_>>() == [4]).then_some(())
        })
        .await;
    cluster
        .eventually("the claims", |claims: &[Arc<PersistentVolumeClaim>]| {
            let names: Vec<_> = claims.iter().filter_map(|claim| claim.metadata.name.as_deref()).collect();
            (names == ["data-db-0", "data-db-1", "data-db-2"]).then_some(())
        })
        .await;
    cluster
        .eventually("the end of the namespace", |found: &[Arc<Namespace>]| {
            found.iter().all(|one| one.metadata.name.as_deref() != Some("leaving")).then_some(())
        })
        .await;
}

async fn jobs_are_counted(cluster: &Cluster) {
    let jobs = cluster
        .eventually("the end of the Jobs", |jobs: &[Arc<Job>]| {
            let is_complete = |job: &Arc<Job>| {
                let conditions = job.status.as_ref().and_then(|status| status.conditions.as_ref());
                conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Complete" && c.status == "True"))
            };
            (jobs.len() == 2 && jobs.iter().all(is_complete)).then(|| jobs.to_vec())
        })
        .await;
    let statuses: BTreeMap<_, _> = jobs
        .iter()
        .map(|job| (job.metadata.name.as_deref().unwrap(), job.status.as_ref().unwrap()))
        .collect();
    assert_eq!(statuses["indexed"].succeeded, Some(6));
    assert_eq!(statuses["indexed"].completed_indexes.as_deref(), Some("0-5"));
    // The answer to a create may be lost: then there is a pod more than was asked for, as upstream.
    let succeeded = statuses["many"].succeeded.unwrap();
    cluster
        .eventually("pods without finalizers", |pods: &[Arc<Pod>]| {
            let (indexed, many) = (pods_of(pods, "default", "indexed"), pods_of(pods, "default", "many"));
            let held = |pod: &Arc<Pod>| pod.metadata.finalizers.as_ref().is_some_and(|all| !all.is_empty());
            if indexed.iter().chain(&many).any(held) {
                return None;
            }
            let ended = many.iter().filter(|pod| {
                pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Succeeded")
            });
            assert!((5..=i32::try_from(ended.count()).unwrap()).contains(&succeeded), "{succeeded} counted");
            Some(())
        })
        .await;
}

async fn dependents_are_true(cluster: &Cluster) {
    let web = cluster.api::<Pod>("default").list(&kube::api::ListParams::default().labels("app=web")).await;
    let wanted = addresses(&web.unwrap().items.into_iter().map(Arc::new).collect::<Vec<_>>());
    assert_eq!(wanted.len(), 4);
    cluster
        .eventually("the endpoints", |slices: &[Arc<EndpointSlice>]| {
            let is_of_web = |slice: &&Arc<EndpointSlice>| {
                let labels = slice.metadata.labels.as_ref();
                labels.and_then(|all| all.get("kubernetes.io/service-name")).is_some_and(|name| name == "web")
            };
            let found: Vec<String> = slices
                .iter()
                .filter(is_of_web)
                .flat_map(|slice| slice.endpoints.iter().flatten())
                .flat_map(|endpoint| endpoint.addresses.clone())
                .collect();
            (found.len() == 4 && found.into_iter().collect::<BTreeSet<_>>() == wanted).then_some(())
        })
        .await;
    cluster
        .eventually("the budget", |budgets: &[Arc<PodDisruptionBudget>]| {
            let status = budgets.first()?.status.as_ref()?;
            let counts = (status.expected_pods, status.current_healthy, status.disruptions_allowed);
            (counts == (Some(4), Some(4), Some(2))).then_some(())
        })
        .await;
    let pods = cluster.api::<Pod>("default").list(&kube::api::ListParams::default()).await.unwrap();
    let is_live = |pod: &&Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        !matches!(phase, Some("Succeeded" | "Failed"))
    };
    let live = pods.items.iter().filter(is_live).count().to_string();
    cluster
        .eventually("the quota", |quotas: &[Arc<ResourceQuota>]| {
            let used = quotas.first()?.status.as_ref()?.used.as_ref()?;
            // The Service `kubernetes` and `web`.
            (used.get("pods")?.0 == live && used.get("count/services")?.0 == "2").then_some(())
        })
        .await;
}

/// Runs everything once, with the faults that the seed determines.
async fn survive(seed: u64) {
    let config = ferrite_controllers::Config { quota_resync: Duration::from_secs(2), ..Default::default() };
    let cluster = Cluster::without_controllers(&["n1", "n2", "n3"], config, Vec::new()).await;
    cluster.provision();
    let plan = Plan::new(seed);
    let (sender, mut crashes) = watch::channel(0);
    let script = async {
        cluster.has_default_account().await;
        create_all(&cluster).await;
        crashes.wait_for(|count| *count >= 8).await.unwrap();
        change_all(&cluster).await;
        crashes.wait_for(|count| *count >= 18).await.unwrap();
        plan.faulty.store(false, Ordering::Relaxed);
    };
    tokio::join!(run_controllers(&cluster, &plan, sender), script);
    let seen = [&plan.refused, &plan.lost, &plan.delayed].map(|count| count.load(Ordering::Relaxed));
    assert!(seen.iter().all(|count| *count > 0), "refused, lost, delayed: {seen:?}");

    start_controllers(&cluster.context);
    workloads_are_whole(&cluster).await;
    jobs_are_counted(&cluster).await;
    dependents_are_true(&cluster).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_is_the_same_with_faults_and_crashes() {
    survive(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_is_the_same_with_other_faults_and_crashes() {
    survive(2).await;
}
