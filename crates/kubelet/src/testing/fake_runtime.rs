//! A container runtime in memory: a started container runs until the test ends it.

use crate::clock::Clock;
use crate::pod::labels;
use async_trait::async_trait;
use ferrite_cri::v1::*;
use ferrite_cri::{Code, ContainerEvents, Error, ImageService, Result, RuntimeService};
use futures_util::{StreamExt, stream};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use tokio::sync::broadcast;

struct Box_ {
    config: PodSandboxConfig,
    handler: String,
    ready: bool,
}

struct Live {
    sandbox: String,
    config: ContainerConfig,
    status: ContainerStatus,
}

#[derive(Default)]
struct State {
    serial: u32,
    sandboxes: BTreeMap<String, Box_>,
    containers: BTreeMap<String, Live>,
    calls: Vec<String>,
    images: BTreeSet<String>,
    exec_exit: HashMap<String, i32>,
    ignores_term: bool,
    start_error: Option<String>,
    stream_url: Option<String>,
    network_problem: Option<String>,
}

#[derive(Clone)]
pub(crate) struct FakeRuntime {
    state: Arc<Mutex<State>>,
    events: broadcast::Sender<ContainerEventResponse>,
    clock: Clock,
    /// A container runs on other processors.
    moved: Arc<tokio::sync::Notify>,
}

fn nanos(clock: &Clock) -> i64 {
    i64::try_from(clock.now().as_nanosecond()).unwrap()
}

impl FakeRuntime {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { state: Arc::default(), events: broadcast::channel(1024).0, clock, moved: Arc::default() }
    }

    /// The calls to the runtime, in order.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.state.lock().unwrap().calls.clone()
    }

    /// Number of containers started so far.
    pub(crate) fn started(&self) -> usize {
        self.calls().iter().filter(|call| call.starts_with("start:")).count()
    }

    pub(crate) fn forget_calls(&self) {
        self.state.lock().unwrap().calls.clear();
    }

    pub(crate) fn add_image(&self, image: &str) {
        self.state.lock().unwrap().images.insert(image.into());
    }

    /// Commands whose first word is this end with that code.
    pub(crate) fn exec_exits(&self, word: &str, code: i32) {
        self.state.lock().unwrap().exec_exit.insert(word.into(), code);
    }

    pub(crate) fn ignore_term(&self) {
        self.state.lock().unwrap().ignores_term = true;
    }

    pub(crate) fn fail_starts(&self, message: Option<&str>) {
        self.state.lock().unwrap().start_error = message.map(str::to_string);
    }

    /// Sets the network's readiness: `None` is ready, else the text says why not.
    pub(crate) fn set_ready(&self, problem: Option<&str>) {
        self.state.lock().unwrap().network_problem = problem.map(str::to_string);
    }

    /// Where exec is to connect.
    pub(crate) fn stream_at(&self, url: &str) {
        self.state.lock().unwrap().stream_url = Some(url.into());
    }

    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.sandboxes.is_empty() && state.containers.is_empty()
    }

    /// The configuration and the handler of a pod's sandbox.
    pub(crate) fn sandbox(&self, pod: &str) -> Option<(PodSandboxConfig, String)> {
        let state = self.state.lock().unwrap();
        let of = |s: &&Box_| s.config.metadata.as_ref().is_some_and(|m| m.name == pod);
        state.sandboxes.values().find(of).map(|s| (s.config.clone(), s.handler.clone()))
    }

    pub(crate) fn container_config(&self, name: &str) -> Option<ContainerConfig> {
        let state = self.state.lock().unwrap();
        state
            .containers
            .values()
            .find(|c| c.config.metadata.as_ref().is_some_and(|m| m.name == name))
            .map(|c| c.config.clone())
    }

    fn running(&self, name: &str) -> Option<String> {
        let state = self.state.lock().unwrap();
        let live = |c: &&Live| {
            c.status.state() == ContainerState::ContainerRunning
                && c.config.metadata.as_ref().unwrap().name == name
        };
        state.containers.values().find(live).map(|c| c.status.id.clone())
    }

    /// Waits until the container runs on these processors.
    pub(crate) async fn until_cpus(&self, name: &str, cpus: &str) {
        let wait = async {
            loop {
                let moved = self.moved.notified();
                let config = self.container_config(name).unwrap();
                if config.linux.unwrap().resources.unwrap().cpuset_cpus == cpus {
                    return;
                }
                moved.await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(3600), wait).await.expect("moved in vain");
    }

    /// The running container of that name ends.
    pub(crate) fn exit(&self, name: &str, code: i32) {
        let id = self.running(name).expect("the container runs");
        self.end(&id, code, "");
    }

    /// The sandbox dies with everything in it.
    pub(crate) fn kill_sandbox(&self) {
        let ids: Vec<String> = {
            let mut state = self.state.lock().unwrap();
            state.sandboxes.values_mut().for_each(|s| s.ready = false);
            state
                .containers
                .values()
                .filter(|c| c.status.state() == ContainerState::ContainerRunning)
                .map(|c| c.status.id.clone())
                .collect()
        };
        ids.iter().for_each(|id| self.end(id, 137, ""));
    }

    fn end(&self, id: &str, code: i32, reason: &str) {
        let now = nanos(&self.clock);
        let mut state = self.state.lock().unwrap();
        let Some(live) = state.containers.get_mut(id) else { return };
        live.status.set_state(ContainerState::ContainerExited);
        live.status.finished_at = now;
        live.status.exit_code = code;
        live.status.reason = reason.into();
        let uid = live.config.labels[labels::POD_UID].clone();
        drop(state);
        self.tell(id, &uid, ContainerEventType::ContainerStoppedEvent);
    }

    fn tell(&self, id: &str, uid: &str, kind: ContainerEventType) {
        let _ = self.events.send(ContainerEventResponse {
            container_id: id.into(),
            container_event_type: kind.into(),
            pod_sandbox_status: Some(PodSandboxStatus {
                labels: BTreeMap::from([(labels::POD_UID.to_string(), uid.to_string())]),
                ..PodSandboxStatus::default()
            }),
            ..ContainerEventResponse::default()
        });
    }

    fn note(&self, call: String) {
        self.state.lock().unwrap().calls.push(call);
    }

    fn next(&self, prefix: &str) -> String {
        let mut state = self.state.lock().unwrap();
        state.serial += 1;
        format!("{prefix}{}", state.serial)
    }

    fn name_of(&self, id: &str) -> String {
        let state = self.state.lock().unwrap();
        state
            .containers
            .get(id)
            .map(|c| c.config.metadata.as_ref().unwrap().name.clone())
            .unwrap_or_else(|| id.into())
    }
}

fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

#[async_trait]
impl RuntimeService for FakeRuntime {
    async fn version(&self, _: VersionRequest) -> Result<VersionResponse> {
        Ok(VersionResponse {
            runtime_name: "ferrite".into(),
            runtime_version: "0".into(),
            ..VersionResponse::default()
        })
    }

    async fn status(&self, _: StatusRequest) -> Result<StatusResponse> {
        let problem = self.state.lock().unwrap().network_problem.clone();
        let condition = |name: &str, problem: Option<String>| RuntimeCondition {
            r#type: name.into(),
            status: problem.is_none(),
            message: problem.unwrap_or_default(),
            ..RuntimeCondition::default()
        };
        let conditions = vec![condition("RuntimeReady", None), condition("NetworkReady", problem)];
        let status = RuntimeStatus { conditions };
        Ok(StatusResponse { status: Some(status), ..StatusResponse::default() })
    }

    async fn run_pod_sandbox(&self, request: RunPodSandboxRequest) -> Result<RunPodSandboxResponse> {
        let config = request.config.unwrap();
        let id = self.next("s");
        self.note(format!("sandbox#{}", config.metadata.as_ref().unwrap().attempt));
        self.state
            .lock()
            .unwrap()
            .sandboxes
            .insert(id.clone(), Box_ { config, handler: request.runtime_handler, ready: true });
        Ok(RunPodSandboxResponse { pod_sandbox_id: id })
    }

    async fn stop_pod_sandbox(&self, request: StopPodSandboxRequest) -> Result<StopPodSandboxResponse> {
        self.note("stop-sandbox".into());
        if let Some(s) = self.state.lock().unwrap().sandboxes.get_mut(&request.pod_sandbox_id) {
            s.ready = false;
        }
        Ok(StopPodSandboxResponse {})
    }

    async fn remove_pod_sandbox(&self, request: RemovePodSandboxRequest) -> Result<RemovePodSandboxResponse> {
        let mut state = self.state.lock().unwrap();
        state.sandboxes.remove(&request.pod_sandbox_id);
        state.containers.retain(|_, c| c.sandbox != request.pod_sandbox_id);
        Ok(RemovePodSandboxResponse {})
    }

    async fn pod_sandbox_status(&self, request: PodSandboxStatusRequest) -> Result<PodSandboxStatusResponse> {
        let state = self.state.lock().unwrap();
        let id = request.pod_sandbox_id;
        let found = state.sandboxes.get(&id).ok_or_else(|| Error::not_found("no such sandbox"))?;
        let ready =
            if found.ready { PodSandboxState::SandboxReady } else { PodSandboxState::SandboxNotready };
        let status = PodSandboxStatus {
            id: id.clone(),
            metadata: found.config.metadata.clone(),
            state: ready.into(),
            created_at: 1,
            network: Some(PodSandboxNetworkStatus {
                ip: format!("10.1.0.{}", &id[1..]),
                additional_ips: vec![],
            }),
            labels: found.config.labels.clone(),
            annotations: found.config.annotations.clone(),
            ..PodSandboxStatus::default()
        };
        Ok(PodSandboxStatusResponse { status: Some(status), ..PodSandboxStatusResponse::default() })
    }

    async fn list_pod_sandbox(&self, request: ListPodSandboxRequest) -> Result<ListPodSandboxResponse> {
        let selector = request.filter.unwrap_or_default().label_selector;
        let state = self.state.lock().unwrap();
        let items = state
            .sandboxes
            .iter()
            .filter(|(_, s)| selects(&selector, &s.config.labels))
            .map(|(id, s)| PodSandbox {
                id: id.clone(),
                labels: s.config.labels.clone(),
                annotations: s.config.annotations.clone(),
                ..PodSandbox::default()
            })
            .collect();
        Ok(ListPodSandboxResponse { items })
    }

    async fn create_container(&self, request: CreateContainerRequest) -> Result<CreateContainerResponse> {
        let config = request.config.unwrap();
        let id = self.next("c");
        let status = ContainerStatus {
            id: id.clone(),
            metadata: config.metadata.clone(),
            created_at: nanos(&self.clock),
            image: config.image.clone(),
            image_ref: "sha256:1".into(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            log_path: config.log_path.clone(),
            ..ContainerStatus::default()
        };
        let live = Live { sandbox: request.pod_sandbox_id, config, status };
        self.state.lock().unwrap().containers.insert(id.clone(), live);
        Ok(CreateContainerResponse { container_id: id })
    }

    async fn start_container(&self, request: StartContainerRequest) -> Result<StartContainerResponse> {
        let now = nanos(&self.clock);
        let mut state = self.state.lock().unwrap();
        if let Some(message) = state.start_error.clone() {
            return Err(Error::internal(message));
        }
        let live = state
            .containers
            .get_mut(&request.container_id)
            .ok_or_else(|| Error::not_found("no such container"))?;
        live.status.set_state(ContainerState::ContainerRunning);
        live.status.started_at = now;
        let metadata = live.config.metadata.clone().unwrap();
        let uid = live.config.labels[labels::POD_UID].clone();
        state.calls.push(format!("start:{}#{}", metadata.name, metadata.attempt));
        drop(state);
        self.tell(&request.container_id, &uid, ContainerEventType::ContainerStartedEvent);
        Ok(StartContainerResponse {})
    }

    async fn stop_container(&self, request: StopContainerRequest) -> Result<StopContainerResponse> {
        let name = self.name_of(&request.container_id);
        self.note(format!("stop:{name}:{}", request.timeout));
        let ignores = self.state.lock().unwrap().ignores_term;
        if ignores {
            tokio::time::sleep(std::time::Duration::from_secs(request.timeout.max(0) as u64)).await;
        }
        self.end(&request.container_id, if ignores { 137 } else { 143 }, "");
        Ok(StopContainerResponse {})
    }

    async fn remove_container(&self, request: RemoveContainerRequest) -> Result<RemoveContainerResponse> {
        self.state.lock().unwrap().containers.remove(&request.container_id);
        Ok(RemoveContainerResponse {})
    }

    async fn list_containers(&self, request: ListContainersRequest) -> Result<ListContainersResponse> {
        let selector = request.filter.unwrap_or_default().label_selector;
        let state = self.state.lock().unwrap();
        let containers = state
            .containers
            .values()
            .filter(|c| selects(&selector, &c.config.labels))
            .map(|c| Container {
                id: c.status.id.clone(),
                pod_sandbox_id: c.sandbox.clone(),
                state: c.status.state,
                labels: c.config.labels.clone(),
                annotations: c.config.annotations.clone(),
                ..Container::default()
            })
            .collect();
        Ok(ListContainersResponse { containers })
    }

    async fn container_status(&self, request: ContainerStatusRequest) -> Result<ContainerStatusResponse> {
        let state = self.state.lock().unwrap();
        let found = state
            .containers
            .get(&request.container_id)
            .ok_or_else(|| Error::not_found("no such container"))?;
        Ok(ContainerStatusResponse {
            status: Some(found.status.clone()),
            ..ContainerStatusResponse::default()
        })
    }

    async fn update_container_resources(
        &self,
        request: UpdateContainerResourcesRequest,
    ) -> Result<UpdateContainerResourcesResponse> {
        let linux = request.linux.unwrap_or_default();
        if !linux.cpuset_cpus.is_empty() {
            let mut state = self.state.lock().unwrap();
            let live = state.containers.get_mut(&request.container_id).unwrap();
            let resources = live.config.linux.get_or_insert_default().resources.get_or_insert_default();
            resources.cpuset_cpus = linux.cpuset_cpus;
            self.moved.notify_waiters();
            return Ok(UpdateContainerResourcesResponse {});
        }
        let quota = linux.cpu_quota;
        self.note(format!("resize:{quota}"));
        Ok(UpdateContainerResourcesResponse {})
    }

    async fn reopen_container_log(&self, _: ReopenContainerLogRequest) -> Result<ReopenContainerLogResponse> {
        Ok(ReopenContainerLogResponse {})
    }

    async fn exec_sync(&self, request: ExecSyncRequest) -> Result<ExecSyncResponse> {
        let word = request.cmd.first().cloned().unwrap_or_default();
        self.note(format!("exec:{word}"));
        let code = self.state.lock().unwrap().exec_exit.get(&word).copied().unwrap_or(0);
        Ok(ExecSyncResponse { stdout: b"output".to_vec(), stderr: vec![], exit_code: code })
    }

    async fn exec(&self, _: ExecRequest) -> Result<ExecResponse> {
        let url = self.state.lock().unwrap().stream_url.clone();
        url.map(|url| ExecResponse { url }).ok_or_else(|| Error::unimplemented("Exec"))
    }

    async fn attach(&self, _: AttachRequest) -> Result<AttachResponse> {
        Err(Error::unimplemented("Attach"))
    }

    async fn port_forward(&self, _: PortForwardRequest) -> Result<PortForwardResponse> {
        Err(Error::unimplemented("PortForward"))
    }

    async fn container_stats(&self, _: ContainerStatsRequest) -> Result<ContainerStatsResponse> {
        Err(Error::unimplemented("ContainerStats"))
    }

    async fn list_container_stats(&self, _: ListContainerStatsRequest) -> Result<ListContainerStatsResponse> {
        Ok(ListContainerStatsResponse::default())
    }

    async fn update_runtime_config(
        &self,
        _: UpdateRuntimeConfigRequest,
    ) -> Result<UpdateRuntimeConfigResponse> {
        Ok(UpdateRuntimeConfigResponse {})
    }

    async fn runtime_config(&self, _: RuntimeConfigRequest) -> Result<RuntimeConfigResponse> {
        Ok(RuntimeConfigResponse::default())
    }

    async fn get_container_events(&self, _: GetEventsRequest) -> Result<ContainerEvents> {
        let receiver = self.events.subscribe();
        let events = stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.ok().map(|event| (event, receiver))
        });
        Ok(events.boxed())
    }
}

#[async_trait]
impl ImageService for FakeRuntime {
    async fn list_images(&self, _: ListImagesRequest) -> Result<ListImagesResponse> {
        Ok(ListImagesResponse::default())
    }

    async fn image_status(&self, request: ImageStatusRequest) -> Result<ImageStatusResponse> {
        let name = request.image.unwrap_or_default().image;
        let present = self.state.lock().unwrap().images.contains(&name);
        let image = present.then(|| Image {
            id: "sha256:1".into(),
            size: 7,
            uid: Some(Int64Value { value: 0 }),
            ..Image::default()
        });
        Ok(ImageStatusResponse { image, ..ImageStatusResponse::default() })
    }

    async fn pull_image(&self, request: PullImageRequest) -> Result<PullImageResponse> {
        let name = request.image.unwrap_or_default().image;
        self.note(format!("pull:{name}"));
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        if name.contains("stuck") {
            std::future::pending::<()>().await;
        }
        if name.contains("private") && request.auth.is_none_or(|auth| auth.password != "open") {
            return Err(Error::new(Code::PermissionDenied, format!("{name}: authentication required")));
        }
        if name.contains("missing") {
            return Err(Error::new(Code::NotFound, format!("{name}: not found")));
        }
        self.add_image(&name);
        Ok(PullImageResponse { image_ref: "sha256:1".into() })
    }

    async fn remove_image(&self, _: RemoveImageRequest) -> Result<RemoveImageResponse> {
        Ok(RemoveImageResponse {})
    }

    async fn image_fs_info(&self, _: ImageFsInfoRequest) -> Result<ImageFsInfoResponse> {
        Ok(ImageFsInfoResponse::default())
    }
}
