//! `ferrite down`: everything that `up` made goes away.

use crate::apiserver::BoxError;
use crate::cluster::{CgroupDriver, NodeParts};
use crate::kubeconfig;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::status::State;
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::{
    ListPodSandboxRequest, PodSandboxMetadata, RemovePodSandboxRequest, StopPodSandboxRequest,
};
use ferrite_network::{Attachment, Bridge, NetworkError, PodNetwork, PodRef};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::ErrorKind;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

pub async fn run(paths: &Paths, keep_data: bool) -> Result<ExitCode, BoxError> {
    if !nix::unistd::geteuid().is_root() {
        return Err("removing a cluster needs root: try `sudo ferrite down`".into());
    }
    let progress = Progress::new(false);
    if let Some(pid) = State::load(paths).and_then(|s| s.running()) {
        stop(pid).await?;
        progress.done("process", &format!("{pid} ended"));
    }
    let state = State::load(paths);
    if state.is_none() && !has_ours(&paths.data) {
        println!("no cluster in {}", paths.data.display());
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(endpoint) = state.as_ref().and_then(|s| s.runtime_endpoint.as_deref()) {
        remove_pods(endpoint, paths).await?;
    }
    let images = NodeParts::images(paths, &[])?;
    // Whichever driver it ran with: slices are found by their name.
    let driver = CgroupDriver::default();
    ferrite_runtime::destroy(NodeParts::runtime_config(paths, Arc::new(NoNetwork), images, driver)).await?;
    unmount_below(&paths.kubelet())?;
    progress.done("containers", "ended, unmounted, their cgroups removed");
    Bridge::purge(&paths.network()).await?;
    progress.done("network", "bridge, links, routes and rules removed");
    if let Some(file) = state.as_ref().and_then(|s| s.kubeconfig.as_ref()) {
        let before = state.as_ref().and_then(|s| s.previous_context.as_deref());
        kubeconfig::remove(file, &paths.cluster, before)?;
        progress.done("kubeconfig", &format!("context {} removed", paths.cluster));
    }
    remove_ours(&paths.run)?;
    if keep_data {
        // Objects, certificates and images stay; what described running containers is gone.
        State::emptied(paths)?;
        remove(&paths.kubelet())?;
        progress.done("data", &format!("kept in {}", paths.data.display()));
    } else {
        remove(&paths.config)?;
        remove_ours(&paths.data)?;
        progress.done("data", &format!("{} removed", paths.data.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes our pods from another runtime. Others may use it too: ours are those that have a directory in the
/// kubelet's, or logs, as pods have that came to their end.
async fn remove_pods(endpoint: &str, paths: &Paths) -> Result<(), BoxError> {
    let failed = |e: ferrite_cri::Error| -> BoxError {
        format!("cannot remove the pods from the container runtime at {endpoint}: {e}; start that runtime and run `ferrite down` again").into()
    };
    let runtime = ferrite_cri::grpc::Client::new(endpoint)?;
    let listed = runtime.list_pod_sandbox(ListPodSandboxRequest { filter: None }).await.map_err(failed)?;
    for sandbox in listed.items {
        let Some(PodSandboxMetadata { name, uid, namespace, .. }) = sandbox.metadata else { continue };
        let logs = format!("{namespace}_{name}_{uid}");
        let ours = [paths.kubelet().join("pods").join(&uid), paths.pod_logs().join(&logs)];
        if uid.is_empty() || logs.contains('/') || !ours.iter().any(|dir| dir.is_dir()) {
            continue;
        }
        let stop = StopPodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
        runtime.stop_pod_sandbox(stop).await.map_err(failed)?;
        let remove = RemovePodSandboxRequest { pod_sandbox_id: sandbox.id };
        runtime.remove_pod_sandbox(remove).await.map_err(failed)?;
    }
    Ok(())
}

/// Asks the process to stop, and insists when it does not.
async fn stop(pid: i32) -> Result<(), BoxError> {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        if kill(Pid::from_raw(pid), signal).is_err() {
            return Ok(());
        }
        let ended = tokio::task::spawn_blocking(move || wait_for(pid)).await?;
        if ended {
            return Ok(());
        }
    }
    Err(format!("process {pid} does not end: look at it with `ps -fp {pid}`").into())
}

/// Whether the process ended in time. It is not our child, so a pidfd tells.
fn wait_for(pid: i32) -> bool {
    // SAFETY: no pointers; a descriptor or an error comes back.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
    if fd < 0 {
        return true;
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let _owned = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let timeout = i32::try_from(PATIENCE.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one valid pollfd, alive for the call.
    unsafe { libc::poll(&raw mut poll, 1, timeout) > 0 }
}

/// The docker view's directory below ours. Its containers are no cluster's, and outlive every cluster.
const DOCKER: &str = "docker";

/// What a directory has of the cluster.
fn ours(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.file_name().is_some_and(|name| name != DOCKER)).collect()
}

fn has_ours(data: &Path) -> bool {
    // Without `/run` the docker view's sockets are below the data directory, too.
    data.exists() && ours(data).iter().any(|path| !path.ends_with("run") || !ours(path).is_empty())
}

/// Removes what is the cluster's, and the directory itself unless something else is in it.
fn remove_ours(dir: &Path) -> Result<(), BoxError> {
    for path in ours(dir) {
        match path.is_dir() && !path.is_symlink() {
            true if path.ends_with("run") => remove_ours(&path)?,
            true => remove(&path)?,
            false => {
                std::fs::remove_file(&path).map_err(|e| format!("cannot remove {}: {e}", path.display()))?
            }
        }
    }
    match std::fs::remove_dir(dir) {
        Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            Err(format!("cannot remove {}: {e}", dir.display()).into())
        }
        _ => Ok(()),
    }
}

fn remove(dir: &Path) -> Result<(), BoxError> {
    match ferrite_hostfs::remove_tree(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!(
            "cannot remove {}: {e}; see what uses it with `fuser -vm {}`",
            dir.display(),
            dir.display()
        )
        .into()),
        _ => Ok(()),
    }
}

/// Unmounts volumes of pods.
fn unmount_below(dir: &Path) -> Result<(), BoxError> {
    ferrite_hostfs::mounts::unmount_below(dir)
        .map_err(|e| format!("{e}; see what uses it with `fuser -vm`").into())
}

/// Nothing is attached any more when containers are removed: the bridge goes as a whole.
struct NoNetwork;

#[async_trait::async_trait]
impl PodNetwork for NoNetwork {
    async fn attach(&self, _: &str, _: &Path, _: &PodRef) -> Result<Attachment, NetworkError> {
        Ok(Attachment { ips: Vec::new() })
    }

    async fn detach(&self, _: &str, _: &Path) -> Result<(), NetworkError> {
        Ok(())
    }

    fn ready(&self) -> Result<(), String> {
        Err("the cluster is being removed".into())
    }
}
