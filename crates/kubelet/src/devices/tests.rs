//! A plugin of this process, behind real sockets, and pods that ask for its devices.

use super::*;
use crate::testing::Harness;
use ferrite_devices::deviceplugin::device_plugin_server::{self, DevicePluginServer};
use ferrite_devices::deviceplugin::registration_client::RegistrationClient;
use ferrite_devices::deviceplugin::*;
use ferrite_devices::{Request, Response, Status, async_trait};
use ferrite_json::{Value, json};
use futures_util::stream::{BoxStream, StreamExt};
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tower::ServiceExt;

const GPU: &str = "example.com/gpu";

/// The misbehaviour of a plugin.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    Good,
    RefusesAllocate,
    AnswersNothing,
    RefusesPreStart,
    /// It lists the same devices again and again, as fast as it can.
    Floods,
}

#[derive(Clone)]
pub(crate) struct Plugin {
    manner: Manner,
    devices: watch::Sender<Vec<(String, bool)>>,
    calls: Arc<Mutex<Vec<String>>>,
    closing: CancellationToken,
}

#[async_trait]
impl device_plugin_server::DevicePlugin for Plugin {
    type ListAndWatchStream = BoxStream<'static, Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (changes, floods) = (self.devices.subscribe(), self.manner == Manner::Floods);
        let lists = futures_util::stream::unfold((changes, true), move |(mut changes, first)| async move {
            if !first && !floods {
                changes.changed().await.ok()?;
            }
            let device = |(id, healthy): &(String, bool)| ferrite_devices::deviceplugin::Device {
                id: id.clone(),
                health: if *healthy { "Healthy" } else { "no" }.into(),
                topology: None,
            };
            let devices = changes.borrow_and_update().iter().map(device).collect();
            Some((Ok(ListAndWatchResponse { devices }), (changes, false)))
        });
        Ok(Response::new(lists.boxed()))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        // The last of them, and one that is nobody's to give.
        let one = &request.get_ref().container_requests[0];
        let chosen = vec!["lie".to_owned(), one.available_device_i_ds.last().cloned().unwrap_or_default()];
        let container_responses = vec![ContainerPreferredAllocationResponse { device_i_ds: chosen }];
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let ids = request.get_ref().container_requests[0].devices_ids.join(",");
        self.calls.lock().unwrap().push(format!("allocate {ids}"));
        match self.manner {
            Manner::RefusesAllocate => return Err(Status::internal("broken")),
            Manner::AnswersNothing => return Ok(Response::new(AllocateResponse::default())),
            _ => {}
        }
        let answer = ContainerAllocateResponse {
            envs: [("GPU".to_owned(), ids.clone())].into(),
            mounts: vec![Mount { container_path: "/lib".into(), host_path: "/opt".into(), read_only: true }],
            devices: vec![DeviceSpec {
                container_path: "/dev/gpu".into(),
                host_path: "/dev/null".into(),
                permissions: "r".into(),
            }],
            annotations: [("gpu".to_owned(), ids)].into(),
            cdi_devices: vec![CdiDevice { name: "example.com/gpu=1".into() }],
        };
        Ok(Response::new(AllocateResponse { container_responses: vec![answer] }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.calls.lock().unwrap().push(format!("start {}", request.get_ref().devices_ids.join(",")));
        match self.manner {
            Manner::RefusesPreStart => Err(Status::internal("not today")),
            _ => Ok(Response::new(PreStartContainerResponse {})),
        }
    }
}

impl Plugin {
    /// Serves at a socket in the directory of plugins.
    fn serve(harness: &Harness, name: &str, manner: Manner, devices: &str) -> Self {
        let path = harness.dir.path().join("kubelet/device-plugins").join(name);
        let listener = UnixListener::from_std(ferrite_hostfs::listen_private(&path).unwrap()).unwrap();
        let plugin = Self {
            manner,
            devices: watch::Sender::default(),
            calls: Arc::default(),
            closing: CancellationToken::new(),
        };
        plugin.list(devices);
        let service = DevicePluginServer::new(plugin.clone());
        let answer = move |request| service.clone().oneshot(request);
        tokio::spawn(ferrite_devices::serve(listener, answer, plugin.closing.clone()));
        plugin
    }

    /// `a b!`: the second one is unhealthy.
    fn list(&self, text: &str) {
        let devices = text.split_whitespace().map(|word| {
            let name = word.trim_end_matches('!');
            (name.to_owned(), name == word)
        });
        self.devices.send_replace(devices.collect());
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

async fn register(harness: &Harness, version: &str, endpoint: &str, resource: &str) -> Result<(), Status> {
    let socket = harness.dir.path().join("kubelet/device-plugins/kubelet.sock");
    let connect = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connect).await.unwrap();
    let request = RegisterRequest {
        version: version.into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        options: None,
    };
    RegistrationClient::new(channel).register(request).await.map(drop)
}

pub(crate) async fn plugin(harness: &Harness, manner: Manner, devices: &str) -> Plugin {
    let plugin = Plugin::serve(harness, "gpu.sock", manner, devices);
    register(harness, "v1beta1", "gpu.sock", GPU).await.unwrap();
    let count = devices.split_whitespace().filter(|word| !word.ends_with('!')).count();
    until(harness, |amounts| amounts.get(GPU).is_some_and(|(_, usable)| *usable == count)).await;
    plugin
}

/// Waits for amounts of resources.
async fn until(harness: &Harness, test: impl Fn(&BTreeMap<String, (usize, usize)>) -> bool) {
    let devices = &harness.context.devices;
    let wait = async {
        while !test(&devices.capacity()) {
            devices.0.refresh.notified().await;
        }
    };
    let waited = tokio::time::timeout(std::time::Duration::from_secs(30), wait).await;
    waited.unwrap_or_else(|_| panic!("the devices are {:?}", devices.capacity()));
}

pub(crate) fn asking(count: &str) -> Value {
    let amounts = json!({GPU: count});
    json!({"containers": [{"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
        "env": [{"name": "GPU_COPY", "value": "$(GPU)"}],
        "resources": {"limits": &amounts, "requests": &amounts}}]})
}

fn checkpoint(harness: &Harness) -> String {
    let path = harness.dir.path().join("kubelet/device-plugins").join(super::checkpoint::FILE);
    std::fs::read_to_string(path).unwrap_or_default()
}

#[tokio::test]
async fn a_container_gets_its_devices_and_they_are_free_again_afterwards() {
    let h = Harness::start().await;
    let plugin = plugin(&h, Manner::Good, "a b c").await;
    h.create("p", asking("2"));
    let pod = h.until_phase("p", "Running").await;
    // The preferred one, and one more.
    assert_eq!(plugin.calls(), ["allocate a,c", "start a,c"]);
    let config = h.runtime.container_config("c").unwrap();
    let variable = |name: &str| config.envs.iter().rfind(|e| e.key == name).map(|e| e.value.clone());
    assert_eq!(variable("GPU").unwrap(), b"a,c");
    assert_eq!((&*config.devices[0].container_path, &*config.devices[0].permissions), ("/dev/gpu", "r"));
    assert!(config.mounts.iter().any(|m| m.container_path == "/lib" && m.host_path == "/opt" && m.readonly));
    assert_eq!(config.annotations["gpu"], "a,c");
    assert_eq!(config.cdi_devices[0].name, "example.com/gpu=1");
    let status = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"];
    let healthy = |id: &str| json!({"health": "Healthy", "resourceID": id});
    assert_eq!(*status, json!([{"name": GPU, "resources": [healthy("a"), healthy("c")]}]));

    plugin.list("a! b c");
    let sick = |p: &Value| {
        p["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0]["resources"][0]["health"]
            == "Unhealthy"
    };
    h.until("p", "the device's health is told", sick).await;
    plugin.list("a b c");
    until(&h, |amounts| amounts[GPU] == (3, 3)).await;

    h.create("q", asking("2"));
    let refused = h.until_phase("q", "Failed").await;
    assert_eq!(refused["status"]["reason"], format!("OutOf{GPU}"));
    h.delete("p", 0);
    h.until_gone("p").await;
    assert!(!checkpoint(&h).contains("uid-p"));
    h.create("r", asking("3"));
    h.until_phase("r", "Running").await;
}

#[tokio::test]
async fn init_containers_leave_their_devices_to_the_others() {
    let h = Harness::start().await;
    let plugin = plugin(&h, Manner::Good, "a b").await;
    let mut spec = asking("2");
    let mut init = spec["containers"][0].clone();
    init["name"] = json!("i");
    spec["initContainers"] = json!([init]);
    h.create("p", spec);
    h.until("p", "init runs", |p| !p["status"]["initContainerStatuses"][0]["state"]["running"].is_null())
        .await;
    assert_eq!(plugin.calls(), ["allocate a,b", "allocate a,b", "start a,b"]);
    h.runtime.exit("i", 0);
    h.until_phase("p", "Running").await;
}

#[tokio::test]
async fn devices_survive_a_restart_of_the_kubelet() {
    let h = Harness::start().await;
    let first = plugin(&h, Manner::Good, "a b").await;
    h.create("p", asking("1"));
    h.until_phase("p", "Running").await;
    first.calls();
    first.closing.cancel();
    let h = h.restart().await;
    assert_eq!(h.context.devices.capacity()[GPU], (0, 0), "no plugin has come yet");
    let had: Vec<String> = h.context.devices.given("uid-p", "c")[GPU].ids().into_iter().collect();
    assert_eq!(had, ["b"]);
    let again = plugin(&h, Manner::Good, "a b").await;
    h.runtime.exit("c", 1);
    h.until("p", "restarted", |p| p["status"]["containerStatuses"][0]["restartCount"] == 1).await;
    assert_eq!(again.calls(), ["start b"], "it has its device; nothing is allocated anew");
    h.create("q", asking("1"));
    h.until_phase("q", "Running").await;
    assert_eq!(again.calls(), ["allocate a", "start a"]);

    // A pod that went while the kubelet was away leaves its device.
    h.stop().await;
    h.api.remove(&Harness::key("q"));
    let h = h.restart().await;
    h.until_workers(1).await;
    assert!(h.context.devices.given("uid-q", "c").is_empty());
    assert!(!h.context.devices.given("uid-p", "c").is_empty());
}

#[tokio::test]
async fn a_plugin_that_goes_or_fails_is_told() {
    let h = Harness::start().await;
    let gone = plugin(&h, Manner::Good, "a b").await;
    gone.closing.cancel();
    until(&h, |amounts| amounts[GPU] == (2, 0)).await;
    h.create("p", asking("1"));
    assert_eq!(h.until_phase("p", "Failed").await["status"]["reason"], format!("OutOf{GPU}"));

    for (name, manner, message) in [
        ("q", Manner::RefusesAllocate, "rpc error: code = Internal desc = broken"),
        ("r", Manner::AnswersNothing, "no containers return in allocation response of example.com/gpu"),
    ] {
        let bad = plugin(&h, manner, "a b").await;
        h.create(name, asking("1"));
        let pod = h.until_phase(name, "Failed").await;
        assert_eq!(pod["status"]["reason"], "UnexpectedAdmissionError");
        let said = format!("Pod was rejected: Allocate failed due to {message}, which is unexpected");
        assert_eq!(pod["status"]["message"], said);
        bad.closing.cancel();
        until(&h, |amounts| amounts[GPU].1 == 0).await;
    }
    let _late = plugin(&h, Manner::RefusesPreStart, "a b").await;
    h.create("s", asking("1"));
    let waits = |p: &Value| {
        p["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    };
    h.until("s", "it cannot start", waits).await;
    h.until_event("Failed", "device plugin PreStartContainer rpc failed with err").await;
}

#[tokio::test]
async fn strange_registrations_are_refused() {
    let h = Harness::start().await;
    let _plugin = Plugin::serve(&h, "gpu.sock", Manner::Good, "a");
    let dir = h.dir.path().join("kubelet/device-plugins");
    std::os::unix::fs::symlink(dir.join("gpu.sock"), dir.join("link.sock")).unwrap();
    std::fs::write(dir.join("file.sock"), "").unwrap();
    for (version, endpoint, resource) in [
        ("v1alpha", "gpu.sock", GPU),
        ("v1beta1", "gpu.sock", "gpu"),
        ("v1beta1", "gpu.sock", "kubernetes.io/gpu"),
        ("v1beta1", "../device-plugins/gpu.sock", GPU),
        ("v1beta1", "kubelet.sock", GPU),
        ("v1beta1", "link.sock", GPU),
        ("v1beta1", "file.sock", GPU),
        ("v1beta1", "none.sock", GPU),
    ] {
        let refused = register(&h, version, endpoint, resource).await;
        assert!(refused.is_err(), "{version} {endpoint} {resource}");
    }
    assert!(h.context.devices.capacity().is_empty());
    register(&h, "v1beta1", "gpu.sock", GPU).await.unwrap();
    until(&h, |amounts| amounts.get(GPU) == Some(&(1, 1))).await;
}

#[tokio::test]
async fn a_plugin_that_talks_too_much_is_bounded() {
    let h = Harness::start().await;
    // It blocks nobody, and its own devices can be allocated.
    let flood = plugin(&h, Manner::Floods, "a").await;
    h.create("p", asking("1"));
    h.until_phase("p", "Running").await;
    flood.closing.cancel();
    until(&h, |amounts| amounts[GPU] == (1, 0)).await;
    h.delete("p", 0);
    h.until_gone("p").await;
    // More than a list may have: the plugin counts as gone, and its earlier list does not count any longer.
    let talker = plugin(&h, Manner::Good, "a").await;
    let devices = (0..200_000).map(|n| (format!("device-with-a-rather-long-name-{n}"), true)).collect();
    talker.devices.send_replace(devices);
    until(&h, |amounts| amounts[GPU] == (1, 0)).await;
}

#[tokio::test]
async fn a_new_plugin_replaces_the_old_one() {
    let h = Harness::start().await;
    let old = plugin(&h, Manner::Good, "a").await;
    let _new = Plugin::serve(&h, "gpu2.sock", Manner::Good, "x y");
    register(&h, "v1beta1", "gpu2.sock", GPU).await.unwrap();
    until(&h, |amounts| amounts[GPU] == (2, 2)).await;
    // The end of the old one is not the end of the resource.
    old.closing.cancel();
    h.create("p", asking("2"));
    h.until_phase("p", "Running").await;
}

#[tokio::test]
async fn a_pod_waits_for_devices_of_one_that_is_gone_but_has_not_ended() {
    let h = Harness::start().await;
    let _plugin = plugin(&h, Manner::Good, "a").await;
    h.create("p", asking("1"));
    h.until_phase("p", "Running").await;
    h.runtime.ignore_term();
    h.api.remove(&Harness::key("p"));
    h.create("q", asking("1"));
    h.until_phase("q", "Running").await;
}
