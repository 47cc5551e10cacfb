//! `ferrite down`: everything that `up` made goes away.

use crate::apiserver::BoxError;
use crate::data_dir::Found;
use crate::kubeconfig;
use crate::machines::Machines;
use crate::node::{CgroupDriver, NodeParts};
use crate::paths::Paths;
use crate::progress::Progress;
use crate::status::State;
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::{
    ListPodSandboxRequest, PodSandboxMetadata, RemovePodSandboxRequest, StopPodSandboxRequest,
};
use ferrite_network::{Attachment, Bridge, NetworkError, PodNetwork, PodRef, Segment};
use ferrite_proxy::model::IpFamily;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

pub async fn run(paths: &Paths, keep_data: bool) -> Result<ExitCode, BoxError> {
    if !nix::unistd::geteuid().is_root() {
        return Err("removing a cluster needs root: try `sudo ferrite down`".into());
    }
    let progress = Progress::new(false);
    let Some(found) = Found::find(paths)? else {
        println!("no cluster in {}", paths.data.display());
        return Ok(ExitCode::SUCCESS);
    };
    if let Some(pid) = State::load(paths).and_then(|s| s.running()) {
        stop(pid).await?;
        progress.done("process", &format!("{pid} ended"));
    }
    let directory = found.lock()?;
    let state = State::load(paths);
    remove_nodes(paths, keep_data, &progress).await?;
    if let Some(endpoint) = state.as_ref().and_then(|s| s.runtime_endpoint.as_deref()) {
        remove_pods(endpoint, paths).await?;
    }
    // While the namespaces of pods are there.
    if let Err(error) = ferrite_network::cni::CniNetwork::purge(&paths.cni_results()).await {
        tracing::warn!(error = crate::chain(&error), "CNI plugins did not take everything back");
    }
    let images = NodeParts::images(paths, &[])?;
    // Whichever driver it ran with: slices are found by their name.
    let driver = CgroupDriver::default();
    ferrite_runtime::destroy(NodeParts::runtime_config(paths, Arc::new(NoNetwork), images, driver)).await?;
    ferrite_hostfs::mounts::unmount_below(&paths.kubelet())?;
    progress.done("containers", "ended, unmounted, their cgroups removed");
    if let Err(error) = ferrite_proxy::remove_tables(&paths.proxy_table(), &IpFamily::BOTH).await {
        // A kernel without nftables never had it.
        tracing::warn!(%error, "the rules of Services may still be there");
    }
    Bridge::purge(&paths.network()).await?;
    progress.done("network", "bridge, links, routes and rules removed");
    if let Some(file) = state.as_ref().and_then(|s| s.kubeconfig.as_ref()) {
        let before = state.as_ref().and_then(|s| s.previous_context.as_deref());
        kubeconfig::remove(file, &paths.cluster, before)?;
        progress.done("kubeconfig", &format!("context {} removed", paths.cluster));
    }
    if keep_data {
        // Objects, certificates, images and local volumes stay; the records of running containers are gone.
        State::emptied(paths)?;
        directory.remove_volatile(paths)?;
        progress.done("data", &format!("kept in {}", paths.data.display()));
    } else {
        directory.remove(paths)?;
        progress.done("data", &format!("{} removed", paths.data.display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes the other nodes of this machine away, with their segment.
async fn remove_nodes(paths: &Paths, keep_data: bool, progress: &Progress) -> Result<(), BoxError> {
    let machines = Machines::list(paths);
    if !machines.is_empty() {
        let lock = Machines::open(paths).await?;
        for machine in machines {
            let name = machine.name.clone();
            if keep_data {
                let off = lock.stop(machine).await?;
                lock.switch_on_at_start(off)?;
                progress.done("node", &format!("{name} is off"));
            } else {
                lock.remove(machine).await?;
                progress.done("node", &format!("{name} removed"));
            }
        }
    }
    Ok(Segment::remove(&paths.segment()).await?)
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
pub async fn stop(pid: i32) -> Result<(), BoxError> {
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

/// Waits for the end of a process that was killed.
pub async fn wait_until_gone(pid: i32) -> Result<(), BoxError> {
    match tokio::task::spawn_blocking(move || wait_for(pid)).await? {
        true => Ok(()),
        false => Err(format!("process {pid} does not end: look at it with `ps -fp {pid}`").into()),
    }
}

/// Returns true if the process ended in time. It is not our child, so we wait on a pidfd.
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

/// Nothing is attached any more when containers are removed: the bridge goes as a whole.
pub struct NoNetwork;

#[async_trait::async_trait]
impl PodNetwork for NoNetwork {
    async fn attach(&self, _: &str, _: &Path, _: &PodRef) -> Result<Attachment, NetworkError> {
        Ok(Attachment { ips: Vec::new() })
    }

    async fn detach(&self, _: &str, _: &Path) -> Result<(), NetworkError> {
        Ok(())
    }

    fn ready(&self) -> Result<(), ferrite_network::NotReady> {
        Err(ferrite_network::NotReady("the cluster is being removed".into()))
    }
}
