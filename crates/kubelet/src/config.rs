//! Configuration of a kubelet, with the defaults of upstream's KubeletConfiguration.

use crate::cgroup::Enforcement;
use crate::container::resources::{CpuQuota, SwapBehavior};
use crate::container::sysctl::UnsafeSysctls;
use crate::eviction::EvictionSettings;
use crate::images::{PullLimits, VerificationPolicy};
use crate::logs::LogLimits;
use crate::shutdown::ShutdownPeriod;
use crate::topology::ResourceSettings;
use ferrite_client::RateLimit;
use ferrite_component::FeatureGates;
use ferrite_cri::v1::CgroupDriver;
use ferrite_pki::ServerTls;
use k8s_openapi::api::core::v1::Taint;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// The authorization of authenticated callers of the kubelet API.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Authorization {
    /// The API server decides, asked with SubjectAccessReviews.
    #[default]
    Webhook,
    /// Nobody decides: every authenticated caller may do everything.
    AlwaysAllow,
}

/// Authentication and authorization of the kubelet API's callers. Certificates of the authority in
/// [`Config::tls`] are always accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubeletAccess {
    /// Callers without credentials are `system:anonymous`.
    pub anonymous: bool,
    /// Bearer tokens are accepted; the API server says whose they are.
    pub webhook_tokens: bool,
    pub token_ttl: Duration,
    pub authorization: Authorization,
    pub authorized_ttl: Duration,
    pub unauthorized_ttl: Duration,
}

impl Default for KubeletAccess {
    fn default() -> Self {
        Self {
            anonymous: false,
            webhook_tokens: true,
            token_ttl: Duration::from_secs(120),
            authorization: Authorization::Webhook,
            authorized_ttl: Duration::from_secs(300),
            unauthorized_ttl: Duration::from_secs(30),
        }
    }
}

/// A cloud provider that runs outside of the kubelet (`--cloud-provider=external`): the Node is tainted until it was
/// there, and the Node's addresses are its decision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExternalCloudProvider {
    /// Addresses that an administrator gave the node: a hint for the cloud provider.
    pub provided: Vec<IpAddr>,
    /// There is no address until the cloud provider gives one: none was given, and no family preferred.
    pub without_address: bool,
}

/// All settings of a kubelet. [`Config::new`] fills in upstream's defaults.
#[derive(Clone)]
pub struct Config {
    /// The name of the Node object.
    pub node_name: String,
    /// The addresses published as the node's internal addresses and as the host addresses of pods, the primary one first.
    pub node_ips: Vec<IpAddr>,
    /// Pod directories and volumes live here.
    pub root_dir: PathBuf,
    /// Features that are on or off.
    pub feature_gates: FeatureGates,
    /// Local volumes that a provisioner asks for are made here; without it the node has none.
    pub local_volumes: Option<PathBuf>,
    /// Logs of pods, one directory per pod.
    pub log_dir: PathBuf,
    /// Below which cgroup pods live.
    pub cgroup_root: String,
    /// The maker of cgroups, unless the runtime reports the driver that it expects.
    pub cgroup_driver: CgroupDriver,
    /// Where the kubelet API listens. The port is published in the Node's status.
    pub server_address: SocketAddr,
    /// The kubelet API's TLS settings, with the authority of the callers' certificates, now and as they change. While
    /// there are none, callers are turned away; without the channel the API is not served.
    pub tls: Option<watch::Receiver<Option<ServerTls>>>,
    /// Access to the kubelet API.
    pub access: KubeletAccess,
    /// Serve the paths that run commands, stream, or show logs.
    pub debugging_handlers: bool,
    /// Serve files of the host's log directory at `/logs/`.
    pub system_log_handler: bool,
    /// Answer queries of the services' logs there, with the machine's `journalctl`.
    pub system_log_query: bool,
    /// That directory.
    pub system_log_dir: PathBuf,
    /// Sets how much this process logs (`/debug/flags/v`); none: the path is closed.
    pub set_verbosity: Option<fn(u8)>,
    /// A directory (or one file) with manifests of static pods.
    pub static_pod_path: Option<PathBuf>,
    /// Interval at which it is read even if the kernel reports no change.
    pub file_check_frequency: Duration,
    /// A URL with manifests of static pods, and headers for it.
    pub static_pod_url: Option<(String, Vec<(String, String)>)>,
    pub http_check_frequency: Duration,
    /// There is no API server: static pods are all there is. The client is [`crate::standalone::client`].
    pub standalone: bool,
    /// Address of the paths that show and change nothing, without TLS and authentication.
    pub read_only_address: Option<SocketAddr>,
    /// Address of `/healthz` without TLS, for a supervisor of the process.
    pub healthz_address: Option<SocketAddr>,
    /// The cluster's name servers. Without one, pods resolve names as the node does.
    pub cluster_dns: Vec<IpAddr>,
    pub cluster_domain: String,
    /// The node's resolver configuration.
    pub resolv_conf: PathBuf,
    /// Labels the Node is registered with, besides the well-known ones.
    pub node_labels: BTreeMap<String, String>,
    /// Without registration an administrator creates the Node; its status is reported all the same.
    pub register_node: bool,
    /// Taints that the Node is created with.
    pub register_with_taints: Vec<Taint>,
    /// The name of the machine for a cloud provider.
    pub provider_id: String,
    /// Images named in the Node's status, the largest ones; none: all.
    pub node_status_max_images: Option<usize>,
    pub max_pods: i64,
    /// Processes that a pod may have.
    pub pod_pids_limit: Option<i64>,
    /// Identities of a pod with its own users.
    pub ids_per_pod: u32,
    pub cpu_quota: CpuQuota,
    pub swap_behavior: SwapBehavior,
    /// Settings of the kernel beyond the safe ones that pods may have.
    pub unsafe_sysctls: UnsafeSysctls,
    /// Containers without a seccomp profile have the runtime's.
    pub seccomp_default: bool,
    /// Where pods reach the API server when there is no Service `default/kubernetes` yet: the Service's
    /// address and port.
    pub api_server: Option<(IpAddr, u16)>,
    /// The machine's cloud provider runs outside of the kubelet, and knows its addresses.
    pub cloud_provider: Option<ExternalCloudProvider>,
    /// Reserved for the system, subtracted from the pods' share.
    pub reserved_cpu_milli: i64,
    pub reserved_memory: i64,
    pub reserved_ephemeral_storage: i64,
    pub reserved_pids: i64,
    /// The control groups that the pods' share and the reservations are enforced on.
    pub enforcement: Enforcement,
    /// Limits of local storage are counted and enforced.
    pub local_storage_isolation: bool,
    /// Pods are evicted below this much free memory (upstream's hard eviction threshold), so it is not
    /// allocatable either.
    pub eviction_memory: i64,
    /// When pods are ended so that the node does not run out of something.
    pub eviction: EvictionSettings,
    pub node_lease_duration: Duration,
    pub node_status_report_frequency: Duration,
    /// Interval between looks at the runtime and the node.
    pub node_status_update_frequency: Duration,
    /// Interval at which a pod is synced whose obstacle nobody reports the end of.
    pub sync_frequency: Duration,
    /// Written events a second; none: no limit.
    pub event_limit: Option<RateLimit>,
    /// Interval at which the space in volumes is measured; none: never.
    pub volume_stats_period: Option<Duration>,
    /// The range of pods' addresses that the runtime is told where there is no API server.
    pub pod_cidr: String,
    /// The command line, for `/flagz`.
    pub flags: BTreeMap<String, String>,
    /// Images are removed when the image file system is fuller than this, in percent; 100 disables it.
    pub image_gc_high_threshold: u8,
    /// … until it is no fuller than this.
    pub image_gc_low_threshold: u8,
    /// Younger images are not removed.
    pub image_minimum_gc_age: Duration,
    /// Images that nobody used for longer are removed; zero: no image is for that reason.
    pub image_maximum_gc_age: Duration,
    /// Limits of image pulls: at a time, and per second.
    pub pull_limits: PullLimits,
    pub logs: LogLimits,
    /// Where the kernel can end a container as a whole when its memory runs out, it ends one process all the same.
    pub single_process_oom_kill: bool,
    /// The time that pods have when the machine shuts down. Without periods nothing holds up a shutdown.
    pub shutdown_periods: Vec<ShutdownPeriod>,
    /// The longest back-off between restarts of a container.
    pub max_restart_backoff: Duration,
    /// Managers of processors and of resources near to one another.
    pub resources: ResourceSettings,
    /// Where the configuration of credential provider plugins is (a file or a directory), and where their
    /// programs are. Without it only pull secrets open registries.
    pub image_credential_providers: Option<(PathBuf, PathBuf)>,
    /// Which images of the node a pod may use without credentials that are known to open them.
    pub image_verification: VerificationPolicy,
}

impl Config {
    /// A configuration with upstream's defaults.
    pub fn new(node_name: impl Into<String>, node_ip: IpAddr) -> Self {
        Self {
            node_name: node_name.into(),
            node_ips: vec![node_ip],
            root_dir: PathBuf::from("/var/lib/ferrite/kubelet"),
            feature_gates: FeatureGates::default(),
            local_volumes: None,
            log_dir: PathBuf::from("/var/log/pods"),
            cgroup_root: "/ferrite".into(),
            cgroup_driver: CgroupDriver::Cgroupfs,
            server_address: SocketAddr::from(([0, 0, 0, 0], 10250)),
            tls: None,
            access: KubeletAccess::default(),
            debugging_handlers: true,
            system_log_handler: true,
            system_log_query: false,
            set_verbosity: None,
            system_log_dir: PathBuf::from("/var/log"),
            static_pod_path: None,
            file_check_frequency: Duration::from_secs(20),
            static_pod_url: None,
            http_check_frequency: Duration::from_secs(20),
            standalone: false,
            healthz_address: None,
            read_only_address: None,
            cluster_dns: Vec::new(),
            cluster_domain: "cluster.local".into(),
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            node_labels: BTreeMap::new(),
            register_node: true,
            register_with_taints: Vec::new(),
            provider_id: String::new(),
            node_status_max_images: Some(50),
            max_pods: 110,
            pod_pids_limit: None,
            ids_per_pod: 65_536,
            cpu_quota: CpuQuota::default(),
            swap_behavior: SwapBehavior::default(),
            unsafe_sysctls: UnsafeSysctls::default(),
            seccomp_default: false,
            api_server: None,
            reserved_cpu_milli: 0,
            reserved_memory: 0,
            reserved_ephemeral_storage: 0,
            reserved_pids: 0,
            enforcement: Enforcement::default(),
            local_storage_isolation: true,
            cloud_provider: None,
            eviction_memory: 100 << 20,
            eviction: EvictionSettings::memory_only(),
            node_lease_duration: Duration::from_secs(40),
            node_status_report_frequency: Duration::from_secs(300),
            node_status_update_frequency: Duration::from_secs(10),
            sync_frequency: Duration::from_secs(60),
            event_limit: None,
            volume_stats_period: Some(Duration::from_secs(60)),
            pod_cidr: String::new(),
            flags: BTreeMap::new(),
            image_gc_high_threshold: 85,
            image_gc_low_threshold: 80,
            image_minimum_gc_age: Duration::from_secs(120),
            image_maximum_gc_age: Duration::ZERO,
            pull_limits: PullLimits::default(),
            logs: LogLimits::default(),
            single_process_oom_kill: false,
            shutdown_periods: Vec::new(),
            max_restart_backoff: Duration::from_secs(300),
            resources: ResourceSettings::default(),
            image_credential_providers: None,
            image_verification: VerificationPolicy::default(),
        }
    }
}
