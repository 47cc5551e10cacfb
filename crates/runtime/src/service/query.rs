//! Reads: statuses and lists. They use memory only and never wait.

use std::collections::BTreeMap;

use ferrite_cri::Result;
use ferrite_cri::v1::{Container as CriContainer, ContainerStatus, *};
use ferrite_network::NotReady;

use super::Inner;
use super::sandbox::namespace_options;
use super::state::{Container, Sandbox, Status};
use crate::sys;

/// Returns true if an object has every wanted label.
fn has_labels(labels: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn state_of(status: &Status) -> ContainerState {
    match status {
        Status::Created => ContainerState::ContainerCreated,
        Status::Running { .. } => ContainerState::ContainerRunning,
        Status::Exited(_) => ContainerState::ContainerExited,
    }
}

fn sandbox_state(sandbox: &Sandbox) -> PodSandboxState {
    if sandbox.record().ready { PodSandboxState::SandboxReady } else { PodSandboxState::SandboxNotready }
}

impl Inner {
    pub(super) fn status(&self) -> StatusResponse {
        let condition =
            |kind: &str, result: std::result::Result<(), NotReady>, reason: &str| RuntimeCondition {
                r#type: kind.into(),
                status: result.is_ok(),
                reason: if result.is_ok() { String::new() } else { reason.into() },
                message: result.err().map(|error| error.to_string()).unwrap_or_default(),
            };
        let conditions = vec![
            condition("RuntimeReady", Ok(()), ""),
            condition("NetworkReady", self.config.network.ready(), "NetworkPluginNotReady"),
        ];
        let features = RuntimeHandlerFeatures { recursive_read_only_mounts: true, user_namespaces: true };
        // OCI runtimes differ in their support for recursive read-only mounts, so we report none.
        let under_handlers =
            RuntimeHandlerFeatures { recursive_read_only_mounts: false, user_namespaces: true };
        StatusResponse {
            status: Some(RuntimeStatus { conditions }),
            info: BTreeMap::new(),
            runtime_handlers: std::iter::once((String::new(), features))
                .chain(self.config.handlers.keys().map(|name| (name.clone(), under_handlers)))
                .map(|(name, features)| RuntimeHandler { name, features: Some(features) })
                .collect(),
            features: Some(RuntimeFeatures {
                supplemental_groups_policy: true,
                user_namespaces_host_network: false,
            }),
        }
    }

    pub(super) fn describe_sandbox(&self, sandbox: &Sandbox) -> PodSandboxStatus {
        let record = sandbox.record();
        let mut ips = record.ips.into_iter();
        let network = PodSandboxNetworkStatus {
            ip: ips.next().unwrap_or_default(),
            additional_ips: ips.map(|ip| PodIp { ip }).collect(),
        };
        PodSandboxStatus {
            id: sandbox.id.clone(),
            metadata: sandbox.config.metadata.clone(),
            state: sandbox_state(sandbox).into(),
            created_at: record.created_at,
            network: Some(network),
            linux: Some(LinuxPodSandboxStatus {
                namespaces: Some(Namespace { options: Some(namespace_options(&sandbox.config)) }),
            }),
            labels: sandbox.config.labels.clone(),
            annotations: sandbox.config.annotations.clone(),
            runtime_handler: record.runtime_handler,
        }
    }

    pub(super) fn sandbox_status(
        &self,
        request: &PodSandboxStatusRequest,
    ) -> Result<PodSandboxStatusResponse> {
        let sandbox = self.index.sandbox(&request.pod_sandbox_id)?;
        let containers = self.index.containers_of(&sandbox.id);
        Ok(PodSandboxStatusResponse {
            status: Some(self.describe_sandbox(&sandbox)),
            info: BTreeMap::new(),
            containers_statuses: containers.iter().map(|c| self.describe_container(c)).collect(),
            timestamp: sys::now(),
        })
    }

    pub(super) fn list_sandboxes(&self, filter: &PodSandboxFilter) -> ListPodSandboxResponse {
        let sandboxes: Vec<_> = self.index.read().sandboxes.values().cloned().collect();
        let items = sandboxes
            .iter()
            .filter(|sandbox| filter.id.is_empty() || sandbox.id.starts_with(&filter.id))
            .filter(|sandbox| filter.state.is_none_or(|wanted| wanted.state() == sandbox_state(sandbox)))
            .filter(|sandbox| has_labels(&sandbox.config.labels, &filter.label_selector))
            .map(|sandbox| PodSandbox {
                id: sandbox.id.clone(),
                metadata: sandbox.config.metadata.clone(),
                state: sandbox_state(sandbox).into(),
                created_at: sandbox.record().created_at,
                labels: sandbox.config.labels.clone(),
                annotations: sandbox.config.annotations.clone(),
                runtime_handler: sandbox.record().runtime_handler,
            })
            .collect();
        ListPodSandboxResponse { items }
    }

    pub(super) fn describe_container(&self, container: &Container) -> ContainerStatus {
        let (record, status) = (container.record(), container.status());
        let config = &container.config;
        let mut out = ContainerStatus {
            id: container.id.clone(),
            metadata: config.metadata.clone(),
            state: state_of(&status).into(),
            created_at: record.created_at,
            image: config.image.clone(),
            image_ref: record.image_ref.clone(),
            image_id: record.image_id.clone(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            log_path: record.log_path.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
            resources: config
                .linux
                .as_ref()
                .and_then(|linux| linux.resources.clone())
                .map(|resources| ContainerResources { linux: Some(resources), windows: None }),
            user: Some(ContainerUser {
                linux: Some(LinuxContainerUser {
                    uid: record.identity.uid.into(),
                    gid: record.identity.gid.into(),
                    supplemental_groups: record.identity.groups.iter().map(|gid| i64::from(*gid)).collect(),
                }),
            }),
            stop_signal: config.stop_signal,
            ..Default::default()
        };
        match status {
            Status::Created => {}
            Status::Running { started_at, .. } => out.started_at = started_at,
            Status::Exited(ended) => {
                out.started_at = ended.started_at;
                out.finished_at = ended.finished_at;
                out.exit_code = ended.code;
                out.reason = ended.reason.to_owned();
                out.message = ended.message;
            }
        }
        out
    }

    pub(super) fn container_status(
        &self,
        request: &ContainerStatusRequest,
    ) -> Result<ContainerStatusResponse> {
        let container = self.index.container(&request.container_id)?;
        let mut info = BTreeMap::new();
        if request.verbose
            && let Status::Running { pid, .. } = container.status()
        {
            info.insert("pid".to_owned(), pid.to_string());
        }
        Ok(ContainerStatusResponse { status: Some(self.describe_container(&container)), info })
    }

    pub(super) fn list_containers(&self, filter: &ContainerFilter) -> ListContainersResponse {
        let containers: Vec<_> = self.index.read().containers.values().cloned().collect();
        let containers = containers
            .iter()
            .filter(|c| filter.id.is_empty() || c.id.starts_with(&filter.id))
            .filter(|c| filter.pod_sandbox_id.is_empty() || c.sandbox.starts_with(&filter.pod_sandbox_id))
            .filter(|c| filter.state.is_none_or(|wanted| wanted.state() == state_of(&c.status())))
            .filter(|c| has_labels(&c.config.labels, &filter.label_selector))
            .map(|container| {
                let record = container.record();
                CriContainer {
                    id: container.id.clone(),
                    pod_sandbox_id: container.sandbox.clone(),
                    metadata: container.config.metadata.clone(),
                    image: container.config.image.clone(),
                    image_ref: record.image_ref,
                    image_id: record.image_id,
                    state: state_of(&container.status()).into(),
                    created_at: record.created_at,
                    labels: container.config.labels.clone(),
                    annotations: container.config.annotations.clone(),
                }
            })
            .collect();
        ListContainersResponse { containers }
    }
}
