//! Reads what the runtime has for a pod.

use super::labels;
use super::runtime_pod::{Instance, RunState, RuntimePod, Sandbox};
use ferrite_cri::v1::{
    ContainerFilter, ContainerStatusRequest, ListContainersRequest, ListPodSandboxRequest, PodSandboxFilter,
    PodSandboxStatusRequest,
};
use ferrite_cri::{Result, RuntimeService};
use std::collections::BTreeMap;
use std::path::Path;

/// As upstream: a message is cut here.
const MAX_MESSAGE: u64 = 4096;
const MAX_LOG_MESSAGE: usize = 2048;
const MAX_LOG_LINES: usize = 80;

/// Everything the runtime has for the pod. What vanishes while we look is simply not there.
pub(crate) async fn observe(runtime: &dyn RuntimeService, uid: &str) -> Result<RuntimePod> {
    let selector = BTreeMap::from([(labels::POD_UID.to_string(), uid.to_string())]);
    let filter = PodSandboxFilter { label_selector: selector.clone(), ..PodSandboxFilter::default() };
    let listed = runtime.list_pod_sandbox(ListPodSandboxRequest { filter: Some(filter) }).await?;
    let mut sandboxes = Vec::with_capacity(listed.items.len());
    for item in listed.items {
        let request = PodSandboxStatusRequest { pod_sandbox_id: item.id, verbose: false };
        match runtime.pod_sandbox_status(request).await {
            Ok(answer) => sandboxes.extend(answer.status.map(Sandbox::from_cri)),
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
    }
    let filter = ContainerFilter { label_selector: selector, ..ContainerFilter::default() };
    let listed = runtime.list_containers(ListContainersRequest { filter: Some(filter) }).await?;
    let mut instances = Vec::with_capacity(listed.containers.len());
    for container in listed.containers {
        let request = ContainerStatusRequest { container_id: container.id, verbose: false };
        match runtime.container_status(request).await {
            Ok(answer) => {
                let Some(status) = answer.status else { continue };
                let mut instance = Instance::from_cri(&container.pod_sandbox_id, status);
                if instance.state == RunState::Exited {
                    read_message(&mut instance);
                }
                instances.push(instance);
            }
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(RuntimePod::new(sandboxes, instances))
}

/// What the container left at its termination message path, or the end of its log.
fn read_message(instance: &mut Instance) {
    if !instance.message.is_empty() {
        return;
    }
    let path = instance.annotations.get(labels::TERMINATION_MESSAGE_PATH).filter(|p| !p.is_empty());
    let file = path.and_then(|p| instance.mounts.iter().find(|m| m.container_path == *p));
    if let Some(mount) = file {
        instance.message = head_of(Path::new(&mount.host_path));
    }
    let to_logs = instance.annotations.get(labels::TERMINATION_MESSAGE_POLICY).map(String::as_str)
        == Some("FallbackToLogsOnError");
    if instance.message.is_empty() && to_logs && instance.exit_code != 0 && !instance.log_path.is_empty() {
        instance.message =
            crate::logs::tail_text(Path::new(&instance.log_path), MAX_LOG_LINES, MAX_LOG_MESSAGE);
    }
}

fn head_of(path: &Path) -> String {
    use std::io::Read;
    let mut text = Vec::new();
    let read = std::fs::File::open(path).and_then(|f| f.take(MAX_MESSAGE).read_to_end(&mut text));
    if read.is_err() {
        return String::new();
    }
    String::from_utf8_lossy(&text).into_owned()
}
