//! Every call that has one answer. The server and the client are made from these tables, so that neither
//! can forget one.

/// Calls `$with!` with `name Request Response;` for every call of the runtime service.
macro_rules! runtime_calls {
    ($with:ident) => {
        $with! {
            version VersionRequest VersionResponse;
            status StatusRequest StatusResponse;
            run_pod_sandbox RunPodSandboxRequest RunPodSandboxResponse;
            stop_pod_sandbox StopPodSandboxRequest StopPodSandboxResponse;
            remove_pod_sandbox RemovePodSandboxRequest RemovePodSandboxResponse;
            pod_sandbox_status PodSandboxStatusRequest PodSandboxStatusResponse;
            list_pod_sandbox ListPodSandboxRequest ListPodSandboxResponse;
            create_container CreateContainerRequest CreateContainerResponse;
            start_container StartContainerRequest StartContainerResponse;
            stop_container StopContainerRequest StopContainerResponse;
            remove_container RemoveContainerRequest RemoveContainerResponse;
            list_containers ListContainersRequest ListContainersResponse;
            container_status ContainerStatusRequest ContainerStatusResponse;
            update_container_resources UpdateContainerResourcesRequest UpdateContainerResourcesResponse;
            reopen_container_log ReopenContainerLogRequest ReopenContainerLogResponse;
            exec_sync ExecSyncRequest ExecSyncResponse;
            exec ExecRequest ExecResponse;
            attach AttachRequest AttachResponse;
            port_forward PortForwardRequest PortForwardResponse;
            container_stats ContainerStatsRequest ContainerStatsResponse;
            list_container_stats ListContainerStatsRequest ListContainerStatsResponse;
            pod_sandbox_stats PodSandboxStatsRequest PodSandboxStatsResponse;
            list_pod_sandbox_stats ListPodSandboxStatsRequest ListPodSandboxStatsResponse;
            update_runtime_config UpdateRuntimeConfigRequest UpdateRuntimeConfigResponse;
            checkpoint_container CheckpointContainerRequest CheckpointContainerResponse;
            list_metric_descriptors ListMetricDescriptorsRequest ListMetricDescriptorsResponse;
            list_pod_sandbox_metrics ListPodSandboxMetricsRequest ListPodSandboxMetricsResponse;
            runtime_config RuntimeConfigRequest RuntimeConfigResponse;
            update_pod_sandbox_resources UpdatePodSandboxResourcesRequest UpdatePodSandboxResourcesResponse;
        }
    };
}

/// As [`runtime_calls`], for the image service.
macro_rules! image_calls {
    ($with:ident) => {
        $with! {
            list_images ListImagesRequest ListImagesResponse;
            image_status ImageStatusRequest ImageStatusResponse;
            pull_image PullImageRequest PullImageResponse;
            remove_image RemoveImageRequest RemoveImageResponse;
            image_fs_info ImageFsInfoRequest ImageFsInfoResponse;
        }
    };
}

pub(super) use {image_calls, runtime_calls};
