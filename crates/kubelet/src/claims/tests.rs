//! A driver of this process, behind a real socket, and pods that use its devices.

use super::*;
use crate::plugin_sockets::PluginHandler;
use crate::testing::{Harness, Key};
use ferrite_csi::registration::PluginInfo;
use ferrite_devices::dra::dra_plugin_server::{self, DraPluginServer};
use ferrite_devices::dra::*;
use ferrite_devices::dra_health::dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer};
use ferrite_devices::dra_health::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use ferrite_devices::{Request, Response, Status, async_trait};
use ferrite_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

const DRIVER: &str = "gpu.example.com";

/// A way in which a driver misbehaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    Good,
    Refuses,
    SkipsClaims,
    AnswersForOthers,
    Hangs,
}

#[derive(Clone)]
struct Driver {
    manner: Arc<Mutex<Manner>>,
    calls: Arc<Mutex<Vec<String>>>,
    called: Arc<Notify>,
    closing: CancellationToken,
    health: tokio::sync::watch::Sender<HealthStatus>,
}

#[async_trait]
impl dra_plugin_server::DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        for claim in &claims {
            self.calls
                .lock()
                .unwrap()
                .push(format!("prepare {}/{} {}", claim.namespace, claim.name, claim.uid));
        }
        self.called.notify_one();
        let manner = *self.manner.lock().unwrap();
        let device = |claim: &Claim| NodePrepareResourceResponse {
            devices: vec![ferrite_devices::dra::Device {
                request_names: vec!["r".into()],
                pool_name: "node".into(),
                device_name: "dev-0".into(),
                cdi_device_ids: vec![format!("{DRIVER}/claim={}", claim.uid)],
                share_id: None,
            }],
            error: if manner == Manner::Refuses { "no power".into() } else { String::new() },
        };
        let answers = match manner {
            Manner::Hangs => std::future::pending().await,
            Manner::SkipsClaims => BTreeMap::new(),
            Manner::AnswersForOthers => [("another".to_owned(), device(&claims[0]))].into(),
            Manner::Good | Manner::Refuses => claims.iter().map(|c| (c.uid.clone(), device(c))).collect(),
        };
        Ok(Response::new(NodePrepareResourcesResponse { claims: answers }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        for claim in &claims {
            self.calls.lock().unwrap().push(format!("unprepare {}", claim.name));
        }
        self.called.notify_one();
        let claims = claims.into_iter().map(|c| (c.uid, NodeUnprepareResourceResponse::default())).collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

/// Reports what the test says, to whoever watches.
#[async_trait]
impl DraResourceHealth for Driver {
    type NodeWatchResourcesStream = std::pin::Pin<
        Box<dyn futures_util::Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>,
    >;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let mut health = self.health.subscribe();
        health.mark_changed();
        let reports = futures_util::stream::unfold(health, |mut health| async move {
            health.changed().await.ok()?;
            let status = *health.borrow_and_update();
            let device = DeviceIdentifier { pool_name: "node".into(), device_name: "dev-0".into() };
            let report = DeviceHealth {
                device: Some(device),
                health: status.into(),
                message: format!("{status:?} it is"),
                ..DeviceHealth::default()
            };
            Some((Ok(NodeWatchResourcesResponse { devices: vec![report] }), health))
        });
        Ok(Response::new(Box::pin(reports)))
    }
}

impl Driver {
    /// Serves below the harness's directory, and registers.
    async fn start(harness: &Harness, manner: Manner, version: &str) -> Self {
        let closing = CancellationToken::new();
        let driver = Self {
            manner: Arc::new(Mutex::new(manner)),
            calls: Arc::default(),
            called: Arc::default(),
            closing,
            health: tokio::sync::watch::channel(HealthStatus::Healthy).0,
        };
        let socket = harness.dir.path().join("dra.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let service = DraPluginServer::new(driver.clone());
        let reports = DraResourceHealthServer::new(driver.clone());
        let beta = version.starts_with("v1beta1");
        let answer = move |mut request: http::Request<hyper::body::Incoming>| {
            // Services of both versions have the same messages; this one has the name of v1.
            let path = request.uri().path().to_owned();
            if path.contains("DRAResourceHealth") {
                return futures_util::future::Either::Left(reports.clone().oneshot(request));
            }
            assert_eq!(path.contains(".v1beta1."), beta, "{path}");
            *request.uri_mut() = path.replace(".v1beta1.", ".v1.").parse().unwrap();
            futures_util::future::Either::Right(service.clone().oneshot(request))
        };
        tokio::spawn(ferrite_devices::serve(listener, answer, driver.closing.clone()));
        let info = PluginInfo {
            r#type: "DRAPlugin".into(),
            name: DRIVER.into(),
            endpoint: String::new(),
            supported_versions: vec![version.into(), "v1alpha1.DRAResourceHealth".into()],
        };
        DraPlugins(harness.context.claims.clone()).register(&info, &socket).await.unwrap();
        driver
    }

    /// Waits until a call was made whose line begins so.
    async fn until_called(&self, start: &str) {
        let wait = async {
            while !self.calls.lock().unwrap().iter().any(|call| call.starts_with(start)) {
                self.called.notified().await;
            }
        };
        let waited = tokio::time::timeout(std::time::Duration::from_secs(60), wait).await;
        waited.unwrap_or_else(|_| panic!("no call {start:?}: {:?}", self.calls()));
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

/// A claim with a device, reserved for these pods.
fn claim(harness: &Harness, name: &str, pods: &[&str]) {
    let reserved: Vec<Value> = pods
        .iter()
        .map(|pod| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")}))
        .collect();
    let result = json!({"request": "r", "driver": DRIVER, "pool": "node", "device": "dev-0"});
    harness.api.put(
        "resourceclaims",
        json!({"metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")}, "spec": {},
            "status": {"reservedFor": reserved, "allocation": {"devices": {"results": [result]}}}}),
    );
}

fn using(claim: &str) -> Value {
    json!({"resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
    "containers": [
        {"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
         "resources": {"claims": [{"name": "gpu", "request": "r"}]}},
        {"name": "plain", "image": "busybox:1", "imagePullPolicy": "IfNotPresent"},
    ]})
}

fn checkpoint(harness: &Harness) -> String {
    std::fs::read_to_string(harness.dir.path().join("kubelet").join(checkpoint::FILE)).unwrap_or_default()
}

#[tokio::test]
async fn a_pod_gets_prepared_devices_and_they_are_unprepared_after_it() {
    for version in ["v1.DRAPlugin", "v1beta1.DRAPlugin"] {
        let h = Harness::start().await;
        let driver = Driver::start(&h, Manner::Good, version).await;
        claim(&h, "shared", &["p", "q"]);
        h.create("p", using("shared"));
        h.until_phase("p", "Running").await;
        assert_eq!(driver.calls(), ["prepare default/shared uid-shared"]);
        let names = |container: &str| -> Vec<String> {
            let config = h.runtime.container_config(container).unwrap();
            config.cdi_devices.into_iter().map(|device| device.name).collect()
        };
        assert_eq!(names("c"), ["gpu.example.com/claim=uid-shared"]);
        assert!(names("plain").is_empty(), "it uses no claim");
        let pod: Pod = ferrite_json::from_value(h.pod("p").unwrap()).unwrap();
        let shown = h.context.claims.dynamic_resources(&pod, &model::containers(&pod)[0]);
        assert_eq!((&*shown[0].claim_name, &*shown[0].claim_resources[0].driver_name), ("shared", DRIVER));

        h.create("q", using("shared"));
        h.until_phase("q", "Running").await;
        assert_eq!(driver.calls(), [""; 0], "it is prepared");
        h.delete("p", 0);
        h.until_gone("p").await;
        assert_eq!(driver.calls(), [""; 0], "the other pod uses it");
        assert!(checkpoint(&h).contains("uid-q") && !checkpoint(&h).contains("uid-p"));
        h.delete("q", 0);
        h.until_gone("q").await;
        assert_eq!(driver.calls(), ["unprepare shared"]);
        assert!(!checkpoint(&h).contains("uid-shared"));
    }
}

#[tokio::test]
async fn a_pod_waits_for_what_it_may_use() {
    let h = Harness::start().await;
    let told = async |part: &str| h.until_event("FailedPrepareDynamicResources", part).await;
    h.create("p", using("mine"));
    told("fetch ResourceClaim mine").await;
    claim(&h, "mine", &["other"]);
    told("pod p (uid-p) is not allowed to use ResourceClaim mine (uid-mine)").await;
    claim(&h, "mine", &["p"]);
    told("DRA driver gpu.example.com is not registered").await;
    assert!(h.runtime.container_config("c").is_none());
    // The driver's arrival wakes the pod.
    let driver = Driver::start(&h, Manner::Good, "v1.DRAPlugin").await;
    h.until_phase("p", "Running").await;
    assert_eq!(driver.calls(), ["prepare default/mine uid-mine"]);
}

#[tokio::test]
async fn a_driver_that_lies_or_hangs_holds_up_only_its_pods() {
    for (manner, part) in [
        (Manner::Refuses, "NodePrepareResources failed for ResourceClaim mine: no power"),
        (Manner::SkipsClaims, "NodePrepareResources skipped 1 ResourceClaims"),
        (Manner::AnswersForOthers, "NodePrepareResources returned result for unknown claim UID another"),
    ] {
        let h = Harness::start().await;
        let driver = Driver::start(&h, manner, "v1.DRAPlugin").await;
        claim(&h, "mine", &["p"]);
        h.create("p", using("mine"));
        h.until_event("FailedPrepareDynamicResources", part).await;
        *driver.manner.lock().unwrap() = Manner::Good;
        h.until_phase("p", "Running").await;
    }
    let h = Harness::start().await;
    let driver = Driver::start(&h, Manner::Hangs, "v1.DRAPlugin").await;
    claim(&h, "mine", &["p"]);
    h.create("p", using("mine"));
    driver.until_called("prepare").await;
    h.create(
        "plain",
        json!({"containers": [{"name": "x", "image": "busybox:1", "imagePullPolicy": "IfNotPresent"}]}),
    );
    h.until_phase("plain", "Running").await;
    // It can be removed, and the driver undoes what it may have done.
    h.delete("p", 0);
    h.until_gone("p").await;
    assert!(driver.calls().contains(&"unprepare mine".to_owned()));
}

#[tokio::test]
async fn claims_survive_a_restart_of_the_kubelet() {
    let h = Harness::start().await;
    let first = Driver::start(&h, Manner::Good, "v1.DRAPlugin").await;
    claim(&h, "kept", &["kept"]);
    claim(&h, "gone", &["gone"]);
    h.create("kept", using("kept"));
    h.create("gone", using("gone"));
    h.until_phase("kept", "Running").await;
    h.until_phase("gone", "Running").await;
    h.stop().await;
    first.closing.cancel();
    // One pod vanishes while no kubelet is there.
    h.api.remove(&Harness::key("gone"));
    h.api.remove(&Key {
        resource: "resourceclaims".into(),
        namespace: "default".into(),
        name: "gone".into(),
    });
    let h = h.restart().await;
    let second = Driver::start(&h, Manner::Good, "v1.DRAPlugin").await;
    second.until_called("unprepare gone").await;
    assert_eq!(second.calls(), ["unprepare gone"], "the pod that runs is left alone");
    h.delete("kept", 0);
    h.until_gone("kept").await;
    assert_eq!(second.calls(), ["unprepare kept"]);
}

#[tokio::test]
async fn only_known_versions_and_names_register() {
    let h = Harness::start().await;
    let plugins = DraPlugins(h.context.claims.clone());
    let register = async |name: &str, version: &str| {
        let info = PluginInfo {
            r#type: "DRAPlugin".into(),
            name: name.into(),
            endpoint: String::new(),
            supported_versions: vec![version.into()],
        };
        plugins.register(&info, Path::new("/nowhere.sock")).await.map_err(|error| error.to_string())
    };
    assert!(register("../x", "v1.DRAPlugin").await.unwrap_err().contains("no name of a driver"));
    assert!(register(DRIVER, "v1alpha4.Node").await.unwrap_err().contains("is supported"));
    assert_eq!(register(DRIVER, "v1.DRAPlugin").await, Ok(()));
    assert!(h.context.claims.driver(DRIVER).is_some());
    plugins.deregister(DRIVER).await;
    assert!(h.context.claims.driver(DRIVER).is_none());
}

#[tokio::test(start_paused = true)]
async fn slices_of_absent_drivers_are_removed() {
    let h = Harness::start().await;
    let slice = |name: &str, driver: &str| {
        let pool = json!({"name": "node", "generation": 1, "resourceSliceCount": 1});
        let spec = json!({"driver": driver, "nodeName": "node", "pool": pool});
        h.api.put("resourceslices", json!({"metadata": {"name": name, "uid": name}, "spec": spec}));
    };
    slice("present", DRIVER);
    slice("absent", "other.example.com");
    let info = PluginInfo {
        r#type: "DRAPlugin".into(),
        name: DRIVER.into(),
        endpoint: String::new(),
        supported_versions: vec!["v1.DRAPlugin".into()],
    };
    DraPlugins(h.context.claims.clone()).register(&info, Path::new("/nowhere.sock")).await.unwrap();
    h.context.claims.remove_slices(None).await;
    let names: Vec<Value> =
        h.api.list("resourceslices").iter().map(|slice| slice["metadata"]["name"].clone()).collect();
    assert_eq!(names, ["present"]);
}

#[tokio::test]
async fn a_device_that_fails_is_shown_in_the_pods_status() {
    let h = Harness::start().await;
    let driver = Driver::start(&h, Manner::Good, "v1.DRAPlugin").await;
    claim(&h, "own", &["p"]);
    h.create("p", using("own"));
    let health = |state: &'static str| {
        move |pod: &Value| {
            let all = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
            let shown =
                all.iter().find(|c| c["name"] == "c").map(|c| c["allocatedResourcesStatus"][0].clone());
            let shown = shown.unwrap_or_default();
            shown["name"] == "claim:gpu/r"
                && shown["resources"][0]["health"] == state
                && shown["resources"][0]["resourceID"] == "gpu.example.com/claim=uid-own"
        }
    };
    h.until("p", "healthy", health("Healthy")).await;
    driver.health.send_replace(HealthStatus::Unhealthy);
    let pod = h.until("p", "unhealthy", health("Unhealthy")).await;
    let plain = &pod["status"]["containerStatuses"][1];
    assert!(plain["name"] == "plain" && plain.get("allocatedResourcesStatus").is_none(), "{plain}");
}
