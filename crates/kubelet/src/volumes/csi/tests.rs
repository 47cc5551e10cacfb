//! Pods with volumes of a driver that does as the test says: refuses, lies, hangs.

use super::*;
use crate::testing::{FakeApi, Harness};
use ferrite_client::csi::{attachment_name, unique_name};
use ferrite_csi::Driver;
use ferrite_csi::v1::node_server::{self, NodeServer};
use ferrite_csi::v1::node_service_capability::{Rpc, Type};
use ferrite_csi::v1::*;
use ferrite_hostfs::mounts;
use ferrite_json::{Value, json};
use hyper_util::rt::{TokioExecutor, TokioIo};
use nix::mount::{MsFlags, mount};
use tonic::{Request, Response, Status};

const NAME: &str = "d.example.com";

/// The driver's behaviour.
#[derive(Debug, Clone, Default)]
struct Manner {
    refuse: Option<Status>,
    /// It says that it mounts and unmounts, and does not.
    lie: bool,
    hang: bool,
}

#[derive(Clone)]
struct Fake {
    manner: watch::Sender<Manner>,
    calls: watch::Sender<Vec<String>>,
    published: Arc<Mutex<Option<NodePublishVolumeRequest>>>,
    capabilities: Vec<i32>,
    /// Volumes that the node can have.
    limit: watch::Sender<i64>,
}

impl Fake {
    /// A driver behind a socket, registered with the kubelet.
    fn start(h: &Harness, capabilities: &[i32]) -> Self {
        let fake = Self {
            manner: watch::channel(Manner::default()).0,
            calls: watch::channel(Vec::new()).0,
            published: Arc::default(),
            capabilities: capabilities.to_vec(),
            limit: watch::channel(0).0,
        };
        let socket = h.dir.path().join("csi.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let server = NodeServer::new(fake.clone());
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let server = server.clone();
                let service = hyper::service::service_fn(move |request| {
                    tower::ServiceExt::oneshot(server.clone(), request)
                });
                let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(builder.serve_connection(TokioIo::new(connection), service));
            }
        });
        h.context.volumes.csi().shared.drivers.set(NAME, Driver::new(&socket));
        fake
    }

    fn behave(&self, manner: Manner) {
        self.manner.send_replace(manner);
    }

    /// Notes the call, and answers as the test wants.
    async fn called(&self, call: &str) -> Result<bool, Status> {
        self.calls.send_modify(|calls| calls.push(call.to_owned()));
        let mut manner = self.manner.subscribe();
        let manner = manner.wait_for(|manner| !manner.hang).await.unwrap().clone();
        match manner.refuse {
            Some(status) => Err(status),
            None => Ok(!manner.lie),
        }
    }

    fn count(&self, call: &str) -> usize {
        self.calls.borrow().iter().filter(|one| *one == call).count()
    }

    async fn until(&self, call: &str, times: usize) {
        let mut calls = self.calls.subscribe();
        let enough = |calls: &Vec<String>| calls.iter().filter(|one| *one == call).count() >= times;
        let waited = tokio::time::timeout(std::time::Duration::from_secs(3600), calls.wait_for(enough)).await;
        assert!(waited.is_ok(), "{call} was not called {times} times: {:?}", self.calls.borrow());
    }
}

fn unmount(path: &str) -> Result<(), Status> {
    mounts::unmount_at(Path::new(path)).map_err(|e| Status::internal(e.to_string()))
}

#[tonic::async_trait]
impl node_server::Node for Fake {
    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let max_volumes_per_node = *self.limit.borrow();
        Ok(Response::new(NodeGetInfoResponse {
            node_id: "id".into(),
            max_volumes_per_node,
            ..Default::default()
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let one = |kind: &i32| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: *kind })) };
        let capabilities = self.capabilities.iter().map(one).collect();
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        self.called("stage").await?;
        let path = request.into_inner().staging_target_path;
        assert!(Path::new(&path).is_dir(), "the kubelet makes the staging directory");
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        self.called("unstage").await?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        *self.published.lock().unwrap() = Some(request.clone());
        if self.called("publish").await? {
            let target = Path::new(&request.target_path);
            std::fs::create_dir_all(target)?;
            if !mounts::is_mounted_at(target)? {
                mount(Some("tmpfs"), target, Some("tmpfs"), MsFlags::empty(), None::<&str>)
                    .map_err(|e| Status::internal(e.to_string()))?;
            }
        }
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        if self.called("unpublish").await? {
            unmount(&request.into_inner().target_path)?;
        }
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        self.called("expand").await?;
        Ok(Response::new(NodeExpandVolumeResponse::default()))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        Err(Status::unimplemented("none"))
    }
}

fn pod(source: Value) -> Value {
    let mut volume = source;
    volume["name"] = json!("v");
    json!({
        "containers": [{"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
                        "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [volume],
    })
}

fn inline() -> Value {
    pod(json!({"csi": {"driver": NAME, "volumeAttributes": {"colour": "red"}}}))
}

fn driver_object(h: &Harness, spec: Value) {
    h.api.put("csidrivers", json!({"metadata": {"name": NAME}, "spec": spec}));
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True")
}

fn nothing_is_mounted(h: &Harness) {
    assert_eq!(mounts::below(h.dir.path()).unwrap(), Vec::<PathBuf>::new());
}

/// A claim that is bound to a volume of the driver.
fn claim(h: &Harness, capacity: &str) {
    h.api.put(
        "persistentvolumes",
        json!({"metadata": {"name": "pv"}, "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "2Gi"},
            "claimRef": {"namespace": "default", "name": "c", "uid": "claim"},
            "csi": {"driver": NAME, "volumeHandle": "h"}}}),
    );
    h.api.put(
        "persistentvolumeclaims",
        json!({"metadata": {"name": "c", "namespace": "default", "uid": "claim"},
               "spec": {"volumeName": "pv", "resources": {"requests": {"storage": "2Gi"}}},
               "status": {"phase": "Bound", "capacity": {"storage": capacity}}}),
    );
}

fn claimed() -> Value {
    pod(json!({"persistentVolumeClaim": {"claimName": "c"}}))
}

#[tokio::test(start_paused = true)]
async fn a_driver_is_told_of_the_pod_and_its_lies_are_seen_through() {
    let h = Harness::start().await;
    driver_object(&h, json!({"podInfoOnMount": true, "volumeLifecycleModes": ["Ephemeral"]}));
    let fake = Fake::start(&h, &[]);
    fake.behave(Manner { lie: true, ..Manner::default() });
    h.create("p", inline());
    h.until_event("FailedMount", "but nothing is mounted at").await;
    assert!(h.runtime.is_empty(), "no container without its volume");
    fake.behave(Manner::default());
    h.until("p", "ready", is_ready).await;
    let told = fake.published.lock().unwrap().clone().unwrap().volume_context;
    let told: Vec<(&str, &str)> = told.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(
        told,
        [
            ("colour", "red"),
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "p"),
            ("csi.storage.k8s.io/pod.namespace", "default"),
            ("csi.storage.k8s.io/pod.uid", "uid-p"),
            ("csi.storage.k8s.io/serviceAccount.name", ""),
        ]
    );
    // It says that it unmounted, and did not.
    fake.behave(Manner { lie: true, ..Manner::default() });
    h.delete("p", 1);
    h.until_gone("p").await;
    assert_eq!(fake.count("unpublish"), 1);
    nothing_is_mounted(&h);
}

#[tokio::test(start_paused = true)]
async fn what_the_driver_refused_for_good_is_not_taken_back() {
    let h = Harness::start().await;
    driver_object(&h, json!({"volumeLifecycleModes": ["Ephemeral"]}));
    let fake = Fake::start(&h, &[]);
    for (refusal, unpublished) in [(Status::invalid_argument("no"), 0), (Status::aborted("busy"), 1)] {
        fake.behave(Manner { refuse: Some(refusal.clone()), ..Manner::default() });
        h.create("p", inline());
        h.until_event("FailedMount", refusal.message()).await;
        h.delete("p", 1);
        // A driver that is busy with the publication is asked until it answers.
        if unpublished == 1 {
            fake.until("unpublish", 1).await;
            fake.behave(Manner::default());
        }
        h.until_gone("p").await;
        h.until_workers(0).await;
        assert_eq!(fake.count("unpublish").min(1), unpublished, "{refusal}");
    }
    nothing_is_mounted(&h);
}

#[tokio::test(start_paused = true)]
async fn a_claim_waits_for_its_attachment_and_is_let_go_after_its_last_pod() {
    let h = Harness::start().await;
    let fake = Fake::start(&h, &[1, 3]);
    let csi = h.context.volumes.csi().clone();
    tokio::spawn(csi.clone().report());
    claim(&h, "1Gi");
    let name = unique_name(NAME, "h");
    let node = |h: &Harness| h.api.list("nodes").remove(0);
    // A pod that waits for its attachment can be deleted at once.
    h.create("early", claimed());
    h.api
        .until("in use", |api| (api.list("nodes")[0]["status"]["volumesInUse"][0] == *name).then_some(()))
        .await;
    h.delete("early", 1);
    h.until_gone("early").await;
    h.api
        .until("free", |api| {
            api.list("nodes")[0]["status"]["volumesInUse"].as_array().is_some_and(Vec::is_empty).then_some(())
        })
        .await;
    assert_eq!(fake.calls.borrow().len(), 0, "nothing was asked of the driver");

    h.create("a", claimed());
    h.api
        .until("in use", |api| (api.list("nodes")[0]["status"]["volumesInUse"][0] == *name).then_some(()))
        .await;
    h.api.put(
        "volumeattachments",
        json!({"metadata": {"name": attachment_name("h", NAME, "node")},
               "spec": {"attacher": NAME, "nodeName": "node", "source": {}},
               "status": {"attached": true, "attachmentMetadata": {"device": "sdb"}}}),
    );
    let mut attached = node(&h);
    attached["status"]["volumesAttached"] = json!([{"name": name, "devicePath": ""}]);
    h.api.put("nodes", attached);
    h.until("a", "ready", is_ready).await;
    let request = fake.published.lock().unwrap().clone().unwrap();
    assert_eq!(request.publish_context.get("device").map(String::as_str), Some("sdb"));
    assert!(request.staging_target_path.ends_with("/globalmount"), "{}", request.staging_target_path);
    assert!(request.target_path.ends_with("/pods/uid-a/volumes/kubernetes.io~csi/pv/mount"));
    // The volume is larger than the claim says: the node grows it.
    fake.until("expand", 1).await;
    h.api
        .until("grown", |api| {
            let claim = api.list("persistentvolumeclaims").remove(0);
            (claim["status"]["capacity"]["storage"] == "2Gi").then_some(())
        })
        .await;

    h.create("b", claimed());
    h.until("b", "ready", is_ready).await;
    h.delete("a", 1);
    h.until_gone("a").await;
    assert_eq!(fake.count("unstage"), 0, "another pod uses it");
    h.delete("b", 1);
    h.until_gone("b").await;
    fake.until("unstage", 1).await;
    h.api
        .until("free", |api| {
            api.list("nodes")[0]["status"]["volumesInUse"].as_array().is_some_and(Vec::is_empty).then_some(())
        })
        .await;
    nothing_is_mounted(&h);
    let staged = h.dir.path().join("kubelet/plugins/kubernetes.io/csi").join(NAME);
    assert_eq!(std::fs::read_dir(staged).unwrap().count(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_limit_of_volumes_is_asked_for_as_often_as_the_driver_wants() {
    let h = Harness::start().await;
    let fake = Fake::start(&h, &[]);
    tokio::spawn(h.context.volumes.csi().clone().follow_limits());
    let until = async |limit: i64| {
        let found = |api: &FakeApi| {
            let drivers = api.list("csinodes").pop()?["spec"]["drivers"].clone();
            (drivers[0]["allocatable"]["count"] == limit).then_some(())
        };
        h.api.until(&format!("the limit is {limit}"), found).await;
    };
    fake.limit.send_replace(5);
    driver_object(&h, json!({"nodeAllocatableUpdatePeriodSeconds": 60}));
    until(5).await;
    fake.limit.send_replace(3);
    until(3).await;
}

#[tokio::test(start_paused = true)]
async fn a_size_that_the_driver_cannot_give_is_asked_for_once() {
    let h = Harness::start().await;
    driver_object(&h, json!({"attachRequired": false}));
    let fake = Fake::start(&h, &[3]);
    claim(&h, "2Gi");
    h.create("a", claimed());
    h.until("a", "ready", is_ready).await;
    fake.behave(Manner { refuse: Some(Status::out_of_range("too large")), ..Manner::default() });
    claim(&h, "1Gi");
    h.api
        .until("told", |api| {
            let claim = api.list("persistentvolumeclaims").remove(0);
            let status = &claim["status"];
            let told = status["conditions"][0]["type"] == "NodeResizeError";
            (told && status["allocatedResourceStatuses"]["storage"] == "NodeResizeInfeasible").then_some(())
        })
        .await;
    // It is asked again when the controller has taken up another size.
    tokio::time::advance(std::time::Duration::from_secs(600)).await;
    fake.behave(Manner::default());
    let mut claim = h.api.list("persistentvolumeclaims").remove(0);
    claim["status"]["allocatedResourceStatuses"]["storage"] = json!("NodeResizePending");
    h.api.put("persistentvolumeclaims", claim);
    let grown = |api: &FakeApi| {
        let claim = api.list("persistentvolumeclaims").remove(0);
        (claim["status"]["capacity"]["storage"] == "2Gi").then_some(())
    };
    h.api.until("grown", grown).await;
    assert_eq!(fake.count("expand"), 2);
    h.delete("a", 1);
    h.until_gone("a").await;
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_hangs_holds_up_its_own_pod_alone() {
    let h = Harness::start().await;
    driver_object(&h, json!({"volumeLifecycleModes": ["Ephemeral"], "requiresRepublish": true}));
    let fake = Fake::start(&h, &[]);
    h.create("runs", inline());
    h.until("runs", "ready", is_ready).await;
    fake.until("publish", 3).await;
    assert_eq!(fake.count("unpublish"), 0, "published again and again, and never taken back");

    fake.behave(Manner { hang: true, ..Manner::default() });
    let before = fake.count("publish");
    fake.until("publish", before + 1).await;
    // The pod whose publication hangs is restarted all the same.
    h.runtime.kill_sandbox();
    h.until("runs", "restarted", |p| is_ready(p) && p["status"]["containerStatuses"][0]["restartCount"] == 1)
        .await;
    h.create("other", pod(json!({"emptyDir": {}})));
    h.until("other", "ready", is_ready).await;
    h.create("hangs", inline());
    h.until_event("FailedMount", "no answer to node_publish_volume in time").await;
    fake.behave(Manner::default());
    h.until("hangs", "ready", is_ready).await;
    for name in ["runs", "hangs", "other"] {
        h.delete(name, 1);
        h.until_gone(name).await;
    }
    nothing_is_mounted(&h);
}

#[tokio::test(start_paused = true)]
async fn a_kubelet_that_starts_anew_takes_back_what_is_left() {
    let h = Harness::start().await;
    driver_object(&h, json!({"attachRequired": false}));
    let fake = Fake::start(&h, &[1]);
    claim(&h, "2Gi");
    h.create("p", claimed());
    h.until("p", "ready", is_ready).await;
    assert_eq!((fake.count("stage"), fake.count("publish")), (1, 1));
    let h = h.restart().await;
    let driver = Driver::new(&h.dir.path().join("csi.sock"));
    h.until("p", "ready", is_ready).await;
    h.stop().await;
    assert_eq!((fake.count("stage"), fake.count("publish")), (1, 1), "what is published stays as it is");
    // The pod is deleted while no kubelet runs.
    h.api.remove(&Harness::key("p"));
    let h = h.restart().await;
    h.context.volumes.csi().shared.drivers.set(NAME, driver);
    fake.until("unstage", 1).await;
    assert_eq!(fake.count("unpublish"), 1);
    nothing_is_mounted(&h);
}
