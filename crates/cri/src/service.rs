use crate::Error;
use crate::v1::*;
use async_trait::async_trait;
use futures_util::stream::BoxStream;

pub type Result<T> = std::result::Result<T, Error>;

/// Container events in the order in which they happened. The stream ends when the runtime stops or when
/// the reader fell too far behind; the reader then lists and subscribes anew.
pub type ContainerEvents = BoxStream<'static, ContainerEventResponse>;

/// Sandboxes and containers.
///
/// Every call is idempotent in the way CRI asks: stopping a stopped object and removing a missing one
/// succeed. Reads never block on a running start, stop or removal of another container.
#[async_trait]
pub trait RuntimeService: Send + Sync + 'static {
    async fn version(&self, request: VersionRequest) -> Result<VersionResponse>;
    async fn status(&self, request: StatusRequest) -> Result<StatusResponse>;

    async fn run_pod_sandbox(&self, request: RunPodSandboxRequest) -> Result<RunPodSandboxResponse>;
    async fn stop_pod_sandbox(&self, request: StopPodSandboxRequest) -> Result<StopPodSandboxResponse>;
    async fn remove_pod_sandbox(&self, request: RemovePodSandboxRequest) -> Result<RemovePodSandboxResponse>;
    async fn pod_sandbox_status(&self, request: PodSandboxStatusRequest) -> Result<PodSandboxStatusResponse>;
    async fn list_pod_sandbox(&self, request: ListPodSandboxRequest) -> Result<ListPodSandboxResponse>;

    async fn create_container(&self, request: CreateContainerRequest) -> Result<CreateContainerResponse>;
    async fn start_container(&self, request: StartContainerRequest) -> Result<StartContainerResponse>;
    async fn stop_container(&self, request: StopContainerRequest) -> Result<StopContainerResponse>;
    async fn remove_container(&self, request: RemoveContainerRequest) -> Result<RemoveContainerResponse>;
    async fn list_containers(&self, request: ListContainersRequest) -> Result<ListContainersResponse>;
    async fn container_status(&self, request: ContainerStatusRequest) -> Result<ContainerStatusResponse>;
    async fn update_container_resources(
        &self,
        request: UpdateContainerResourcesRequest,
    ) -> Result<UpdateContainerResourcesResponse>;
    async fn reopen_container_log(
        &self,
        request: ReopenContainerLogRequest,
    ) -> Result<ReopenContainerLogResponse>;

    async fn exec_sync(&self, request: ExecSyncRequest) -> Result<ExecSyncResponse>;
    /// Returns a URL of the runtime's streaming server, good for one connection (SPDY/3.1 or WebSocket).
    async fn exec(&self, request: ExecRequest) -> Result<ExecResponse>;
    /// As [`RuntimeService::exec`].
    async fn attach(&self, request: AttachRequest) -> Result<AttachResponse>;
    /// As [`RuntimeService::exec`].
    async fn port_forward(&self, request: PortForwardRequest) -> Result<PortForwardResponse>;

    async fn container_stats(&self, request: ContainerStatsRequest) -> Result<ContainerStatsResponse>;
    async fn list_container_stats(
        &self,
        request: ListContainerStatsRequest,
    ) -> Result<ListContainerStatsResponse>;

    /// Resource usage of the pod as a whole.
    async fn pod_sandbox_stats(&self, _request: PodSandboxStatsRequest) -> Result<PodSandboxStatsResponse> {
        Err(Error::unimplemented("PodSandboxStats"))
    }
    async fn list_pod_sandbox_stats(
        &self,
        _request: ListPodSandboxStatsRequest,
    ) -> Result<ListPodSandboxStatsResponse> {
        Err(Error::unimplemented("ListPodSandboxStats"))
    }
    /// The names of the metrics of [`RuntimeService::list_pod_sandbox_metrics`].
    async fn list_metric_descriptors(
        &self,
        _request: ListMetricDescriptorsRequest,
    ) -> Result<ListMetricDescriptorsResponse> {
        Err(Error::unimplemented("ListMetricDescriptors"))
    }
    async fn list_pod_sandbox_metrics(
        &self,
        _request: ListPodSandboxMetricsRequest,
    ) -> Result<ListPodSandboxMetricsResponse> {
        Err(Error::unimplemented("ListPodSandboxMetrics"))
    }
    /// Tells the runtime about the pod's new resources; the kubelet has changed the pod's group itself.
    async fn update_pod_sandbox_resources(
        &self,
        _request: UpdatePodSandboxResourcesRequest,
    ) -> Result<UpdatePodSandboxResourcesResponse> {
        Err(Error::unimplemented("UpdatePodSandboxResources"))
    }
    async fn checkpoint_container(
        &self,
        _request: CheckpointContainerRequest,
    ) -> Result<CheckpointContainerResponse> {
        Err(Error::unimplemented("CheckpointContainer"))
    }

    async fn update_runtime_config(
        &self,
        request: UpdateRuntimeConfigRequest,
    ) -> Result<UpdateRuntimeConfigResponse>;
    async fn runtime_config(&self, request: RuntimeConfigRequest) -> Result<RuntimeConfigResponse>;
    async fn get_container_events(&self, request: GetEventsRequest) -> Result<ContainerEvents>;
}

/// Images.
#[async_trait]
pub trait ImageService: Send + Sync + 'static {
    async fn list_images(&self, request: ListImagesRequest) -> Result<ListImagesResponse>;
    /// The image is absent from the answer when the runtime does not have it.
    async fn image_status(&self, request: ImageStatusRequest) -> Result<ImageStatusResponse>;
    async fn pull_image(&self, request: PullImageRequest) -> Result<PullImageResponse>;
    async fn remove_image(&self, request: RemoveImageRequest) -> Result<RemoveImageResponse>;
    async fn image_fs_info(&self, request: ImageFsInfoRequest) -> Result<ImageFsInfoResponse>;
}
