//! The runtime's state of one pod.

use super::labels;
use super::pod_level::PodLevel;
use crate::clock;
use ferrite_cri::v1::{self, ContainerState as CriState};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceRequirements;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunState {
    /// Made but not started: a start failed, or the kubelet died between the two steps.
    Created,
    Running,
    Exited,
    Unknown,
}

/// One container instance in the runtime, running or dead.
#[derive(Debug, Clone)]
pub(crate) struct Instance {
    pub id: String,
    pub sandbox_id: String,
    pub name: String,
    /// The restart count this instance was created with.
    pub attempt: u32,
    pub state: RunState,
    pub created_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub exit_code: i32,
    pub reason: String,
    pub message: String,
    pub image: String,
    pub image_ref: String,
    pub image_id: String,
    pub hash: Option<String>,
    /// The resources that it was started with, if the kubelet recorded them.
    pub resources: Option<ResourceRequirements>,
    /// The resources that the pod as a whole had then, if the kubelet recorded them.
    pub of_pod: Option<PodLevel>,
    pub log_path: String,
    pub annotations: BTreeMap<String, String>,
    pub user: Option<v1::LinuxContainerUser>,
    pub mounts: Vec<v1::Mount>,
}

impl Instance {
    pub(crate) fn from_cri(sandbox_id: &str, status: v1::ContainerStatus) -> Self {
        let metadata = status.metadata.clone().unwrap_or_default();
        let state = match status.state() {
            CriState::ContainerCreated => RunState::Created,
            CriState::ContainerRunning => RunState::Running,
            CriState::ContainerExited => RunState::Exited,
            CriState::ContainerUnknown => RunState::Unknown,
        };
        let name = status.labels.get(labels::CONTAINER_NAME).cloned().unwrap_or(metadata.name);
        Self {
            id: status.id,
            sandbox_id: sandbox_id.to_string(),
            name,
            attempt: metadata.attempt,
            state,
            created_at: clock::from_nanos(status.created_at),
            started_at: clock::from_nanos(status.started_at),
            finished_at: clock::from_nanos(status.finished_at),
            exit_code: status.exit_code,
            reason: status.reason,
            message: status.message,
            image: status
                .image
                .map(|i| if i.user_specified_image.is_empty() { i.image } else { i.user_specified_image })
                .unwrap_or_default(),
            image_ref: status.image_ref,
            image_id: status.image_id,
            hash: status.annotations.get(labels::CONTAINER_HASH).cloned(),
            resources: status.annotations.get(labels::RESOURCES).and_then(|r| ferrite_json::from_str(r).ok()),
            of_pod: status
                .annotations
                .get(labels::POD_RESOURCES)
                .and_then(|r| ferrite_json::from_str(r).ok()),
            log_path: status.log_path,
            annotations: status.annotations,
            user: status.user.and_then(|u| u.linux),
            mounts: status.mounts,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state == RunState::Running
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    pub id: String,
    pub attempt: u32,
    pub ready: bool,
    pub created_at: i64,
    pub ips: Vec<String>,
}

impl Sandbox {
    pub(crate) fn from_cri(status: v1::PodSandboxStatus) -> Self {
        let ready = status.state() == v1::PodSandboxState::SandboxReady;
        let mut ips = Vec::new();
        if let Some(network) = status.network {
            ips.push(network.ip);
            ips.extend(network.additional_ips.into_iter().map(|ip| ip.ip));
        }
        ips.retain(|ip| !ip.is_empty());
        Self {
            id: status.id,
            attempt: status.metadata.map_or(0, |m| m.attempt),
            ready,
            created_at: status.created_at,
            ips,
        }
    }
}

/// Everything the runtime has for one pod, newest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuntimePod {
    pub sandboxes: Vec<Sandbox>,
    pub instances: Vec<Instance>,
}

impl RuntimePod {
    pub(crate) fn new(mut sandboxes: Vec<Sandbox>, mut instances: Vec<Instance>) -> Self {
        sandboxes.sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_at)));
        instances.sort_by_key(|i| std::cmp::Reverse((i.attempt, i.created_at)));
        Self { sandboxes, instances }
    }

    /// The sandbox the pod lives in, when it is alive.
    pub(crate) fn sandbox(&self) -> Option<&Sandbox> {
        self.sandboxes.first().filter(|s| s.ready)
    }

    /// The newest instance of a container.
    pub(crate) fn latest(&self, name: &str) -> Option<&Instance> {
        self.instances.iter().find(|i| i.name == name)
    }

    /// The newest instance of a container inside one sandbox.
    pub(crate) fn latest_in(&self, sandbox: &str, name: &str) -> Option<&Instance> {
        self.instances.iter().find(|i| i.name == name && i.sandbox_id == sandbox)
    }

    /// The newest dead instance older than `than`.
    pub(crate) fn previous(&self, name: &str, than: &Instance) -> Option<&Instance> {
        self.instances
            .iter()
            .skip_while(|i| i.id != than.id)
            .skip(1)
            .find(|i| i.name == name && i.state == RunState::Exited)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Instance> {
        self.instances.iter().filter(|i| i.is_running())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sandboxes.is_empty() && self.instances.is_empty()
    }
}
