use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_network::PodNetwork;

use crate::rootfs::Images;

/// The directories and partners of a runtime.
#[derive(Clone)]
pub struct Config {
    /// Persistent state: records, writable layers. Must be on a file system overlayfs accepts as upper.
    pub root: PathBuf,
    /// Sockets, pinned namespaces, shared memory. May vanish at reboot.
    pub run: PathBuf,
    /// Control group below which everything of this runtime lives, e.g. `/ferrite`. Removed by
    /// [`crate::destroy`].
    pub cgroup_parent: String,
    /// The cgroup driver that the runtime reports to kubelets. The runtime always understands both: a
    /// parent that is a slice belongs to systemd.
    pub cgroup_driver: ferrite_cri::v1::CgroupDriver,
    /// The binary to run as supervisor; it must call [`crate::supervisor::main`] when started under the
    /// name [`crate::supervisor::NAME`]. Usually `/proc/self/exe`.
    pub supervisor: PathBuf,
    pub network: Arc<dyn PodNetwork>,
    pub images: Arc<dyn Images>,
    /// OCI runtimes by the handler name of a RuntimeClass, e.g. `runc` at `/usr/sbin/runc`. The empty name
    /// is always the built-in one.
    pub handlers: BTreeMap<String, PathBuf>,
    /// Where the streaming server for exec, attach and port-forward listens; loopback only.
    pub streaming_address: std::net::SocketAddr,
    /// Additional settings for containers outside of a cluster.
    pub extras: Extras,
}

/// Settings that CRI cannot express. The runtime of a cluster leaves all of them empty.
#[derive(Clone, Default)]
pub struct Extras {
    /// Directory in which containers write (`upper` and `work` below it), kept when they are removed. With
    /// none each container writes next to its record. Only for a runtime with one container at a time.
    pub writable: Option<PathBuf>,
    /// A network namespace that sandboxes join instead of having one made; the network is not asked then.
    pub join_network: Option<PathBuf>,
    /// A PID namespace that containers with the pod's are in instead.
    pub join_pid: Option<PathBuf>,
    /// Another sandbox's IPC namespace and shared memory.
    pub join_ipc: Option<JoinIpc>,
    /// Sandboxes have the host's name, whatever their network.
    pub host_uts: bool,
    /// Program and arguments the supervisor runs in the host's namespaces once a container has ended and
    /// everybody attached without loss has its output.
    pub on_exit: Vec<String>,
    /// Size of `/dev/shm` in bytes; 64 MiB when not given.
    pub shm_size: Option<u64>,
    /// The last word on every container's description.
    pub adjust: Option<Adjust>,
}

/// The IPC namespace of another sandbox, for sharing it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinIpc {
    pub namespace: PathBuf,
    /// The directory that containers see as `/dev/shm`.
    pub shared_memory: PathBuf,
}

/// Changes a container's description.
pub type Adjust = Arc<dyn Fn(&mut oci_spec::runtime::Spec) + Send + Sync>;

/// The OCI runtimes installed on this machine in their usual places, by the name a RuntimeClass uses.
pub fn installed_handlers() -> BTreeMap<String, PathBuf> {
    const PLACES: &[&str] = &["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];
    let find =
        |name: &str| PLACES.iter().map(|place| PathBuf::from(place).join(name)).find(|path| path.is_file());
    ["runc", "crun"].into_iter().filter_map(|name| Some((name.to_owned(), find(name)?))).collect()
}
