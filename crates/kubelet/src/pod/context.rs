//! State shared by all pod workers.

use crate::cgroup::Cgroups;
use crate::claims::Claims;
use crate::clock::Clock;
use crate::container::dns::ClusterDns;
use crate::container::env::ApiAddress;
use crate::container::fields::NodeLimits;
use crate::container::resources::NodeRules;
use crate::devices::Devices;
use crate::eviction::Pressures;
use crate::images::Images;
use crate::logs::LogLinks;
use crate::node::Readiness;
use crate::objects::Objects;
use crate::pod::admission::Abilities;
use crate::pod::backoff::BackOff;
use crate::pod::manager::Workers;
use crate::pod::pending_resizes::PendingResizes;
use crate::pod::table::PodTable;
use crate::probe::ProbeContext;
use crate::topology::ResourceManager;
use crate::userns::UserNamespaces;
use crate::volumes::Volumes;
use ferrite_client::{EventRecorder, EventType, Informer};
use ferrite_cri::RuntimeService;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

pub(crate) struct Context {
    pub node_name: String,
    pub node_hostname: String,
    pub host_ips: Vec<String>,
    pub log_dir: PathBuf,
    pub log_links: LogLinks,
    /// Where Localhost seccomp profiles are.
    pub seccomp_root: PathBuf,
    pub cluster_dns: ClusterDns,
    /// Read for every sandbox: the node may be given other resolvers while it runs.
    pub resolv_conf: PathBuf,
    pub api_address: Option<ApiAddress>,
    pub limits: NodeLimits,
    pub max_pods: i64,
    /// The node's rules for the resources of containers.
    pub rules: NodeRules,
    /// Interval at which a pod is synced whose obstacle nobody reports the end of.
    pub sync_frequency: Duration,
    /// Containers without a seccomp profile have the runtime's.
    pub seccomp_default: bool,
    /// The kernel ends a container as a whole when it has no memory left.
    pub oom_group: bool,
    /// The back-off that each pod begins with.
    pub restart_backoff: BackOff,
    /// Labels that the node has in any case, for the time before the API shows the node.
    pub own_labels: BTreeMap<String, String>,
    pub runtime_name: String,
    pub runtime: Arc<dyn RuntimeService>,
    pub images: Images,
    pub volumes: Volumes,
    pub userns: UserNamespaces,
    pub devices: Devices,
    pub claims: Claims,
    pub resources: Arc<ResourceManager>,
    /// The features of the node's kernel for pods.
    pub abilities: Abilities,
    pub objects: Arc<Objects>,
    pub cgroups: Cgroups,
    pub services: Informer<Service>,
    pub pods: PodTable,
    pub workers: Arc<Workers>,
    /// Resizes that wait for room.
    pub resizes: PendingResizes,
    pub node: Informer<Node>,
    pub readiness: watch::Receiver<Readiness>,
    /// The machine shuts down: no pod is taken any more.
    pub shutting_down: watch::Receiver<bool>,
    /// The resources that the node is short of.
    pub pressures: watch::Receiver<Pressures>,
    pub client: kube::Client,
    pub recorder: EventRecorder,
    pub probes: ProbeContext,
    pub clock: Clock,
}

impl Context {
    /// There may be room for resizes that wait: their pods look, the first in turn first.
    pub(crate) fn retry_resizes(&self) {
        for uid in self.resizes.in_order() {
            self.workers.wake(&uid);
        }
    }

    pub(crate) fn event(&self, pod: &Pod, kind: EventType, reason: &str, message: impl Into<String>) {
        self.recorder.event(&super::model::reference(pod, None), kind, reason, message.into());
    }
}
