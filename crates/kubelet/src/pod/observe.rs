//! Reads the runtime's state of a pod.

use super::labels;
use super::runtime_pod::{Instance, RunState, RuntimePod, Sandbox};
use ferrite_cri::v1::{
    ContainerFilter, ContainerStatusRequest, ListContainersRequest, ListPodSandboxRequest, PodSandboxFilter,
    PodSandboxStatusRequest,
};
use ferrite_cri::{Result, RuntimeService};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// As upstream: a message is cut here.
const MAX_MESSAGE: u64 = 4096;
const MAX_LOG_MESSAGE: usize = 2048;
const MAX_LOG_LINES: usize = 80;

/// The runtime's sandboxes and containers of the pod. Those that vanish meanwhile are left out.
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
                    instance.message = message(&instance).await;
                }
                instances.push(instance);
            }
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(RuntimePod::new(sandboxes, instances))
}

/// Where a container may have left its last words.
#[derive(Debug, Default, PartialEq, Eq)]
struct MessageSources {
    /// The file at the termination message path.
    file: Option<PathBuf>,
    /// The log, of which the end is the message when the file is empty.
    log: Option<PathBuf>,
}

fn message_sources(instance: &Instance) -> MessageSources {
    let path = instance.annotations.get(labels::TERMINATION_MESSAGE_PATH).filter(|p| !p.is_empty());
    let mount = path.and_then(|p| instance.mounts.iter().find(|m| m.container_path == *p));
    let to_logs = instance.annotations.get(labels::TERMINATION_MESSAGE_POLICY).map(String::as_str)
        == Some("FallbackToLogsOnError");
    // A container that could not even be started has no log.
    let ran = instance.reason != "ContainerCannotRun";
    let log = to_logs && instance.exit_code != 0 && ran && !instance.log_path.is_empty();
    MessageSources {
        file: mount.map(|m| PathBuf::from(&m.host_path)),
        log: log.then(|| PathBuf::from(&instance.log_path)),
    }
}

/// The container's termination message: the file at its path, or the end of its log.
async fn message(instance: &Instance) -> String {
    let sources = message_sources(instance);
    if sources == MessageSources::default() {
        return instance.message.clone();
    }
    // Files of a container: even a regular one may be on a file system that does not answer.
    let read = tokio::task::spawn_blocking(move || read_message(&sources)).await.unwrap_or_default();
    joined(&instance.message, &read)
}

/// As upstream: the runtime's own message stands before the container's.
fn joined(runtime: &str, container: &str) -> String {
    match (runtime, container) {
        ("", only) | (only, "") => only.to_owned(),
        (first, second) => format!("{first}: {second}"),
    }
}

fn read_message(sources: &MessageSources) -> String {
    if let Some(path) = &sources.file {
        // The container may have mounted anything there: a link or a FIFO is an error, not followed or
        // waited for.
        match ferrite_hostfs::read_tail(path, MAX_MESSAGE) {
            Ok(text) if !text.is_empty() => return String::from_utf8_lossy(&text).into_owned(),
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return format!("Error on reading termination log {}: {e}", path.display());
            }
            _ => {}
        }
    }
    let Some(log) = sources.log.as_deref() else { return String::new() };
    crate::logs::tail_text(log, MAX_LOG_LINES, MAX_LOG_MESSAGE)
        .unwrap_or_else(|e| format!("Error on reading termination message from logs: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn messages() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let sources = |file: &str, log: &str| MessageSources { file: Some(path(file)), log: Some(path(log)) };
        fs::write(path("said"), "last words").unwrap();
        fs::write(path("long"), format!("{}{}", "x".repeat(5000), "y".repeat(4096))).unwrap();
        fs::write(path("empty"), "").unwrap();
        fs::write(path("log"), "2026-01-01T00:00:00Z stderr F from the log\n").unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path("link")).unwrap();
        let refused = format!("Error on reading termination log {}: ", path("pipe").display());
        let unread = "Error on reading termination message from logs: ";
        for (file, log, expected) in [
            ("said", "log", "last words"),
            ("long", "log", "y".repeat(4096).as_str()),
            ("empty", "log", "from the log\n"),
            ("missing", "log", "from the log\n"),
            ("empty", "pipe", &format!("{unread}{} is not a regular file", path("pipe").display())),
            ("empty", "missing", &format!("{unread}No such file or directory (os error 2)")),
            ("pipe", "log", &format!("{refused}{} is not a regular file", path("pipe").display())),
        ] {
            assert_eq!(read_message(&sources(file, log)), expected, "{file} {log}");
        }
        let through_link = read_message(&sources("link", "log"));
        assert!(through_link.starts_with("Error on reading termination log"), "{through_link}");
        let link_as_log = read_message(&sources("empty", "link"));
        assert!(link_as_log.starts_with(unread), "{link_as_log}");
    }
}
