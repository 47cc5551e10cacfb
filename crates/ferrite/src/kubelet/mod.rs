//! `ferrite kubelet`: the kubelet in a process of its own, with upstream's flags and configuration file, against any API
//! server and any container runtime with a CRI socket.

mod flags;
mod identity;
mod limits;
mod machine;
mod memory;
mod registration;
mod reservations;
mod resources;
mod settings;
mod table;

use crate::apiserver::BoxError;
use crate::cli::interrupted;
use crate::node::Services;
use ferrite_api::quantity::Quantity;
use ferrite_client::Scope;
use ferrite_component::GoDuration;
use ferrite_cri::ImageService;
use ferrite_cri::v1::CgroupDriver;
use ferrite_kubelet::{
    Authorization, Config, EvictionSettings, Kubelet, KubeletAccess, VerificationPolicy,
    VerificationPolicyError,
};
use ferrite_network::{Addresses, IpFamily};
use flags::{Flags, NodeIp};
use identity::{CertificateStore, ClientIdentity, ServingIdentity, TlsChoices};
use reservations::Reserved;
use settings::{Settings, SettingsError};
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Why the kubelet does not start here.
#[derive(Debug, thiserror::Error)]
enum RefusedStart {
    #[error("running with swap on is not supported, please disable swap or set --fail-swap-on flag to false")]
    Swap,
    #[error("cgroup v1 support is deprecated; set failCgroupV1: false to use it all the same")]
    CgroupV1,
    #[error("singleProcessOOMKill must not be explicitly set to false when using cgroup v1")]
    OomGroup,
    #[error("--bootstrap-kubeconfig needs --kubeconfig: the file that the kubelet writes")]
    BootstrapAlone,
    #[error(
        "no client provided, cannot use webhook authentication: set authentication.webhook.enabled: false"
    )]
    StandaloneAuthentication,
    #[error("no client provided, cannot use webhook authorization: set authorization.mode: AlwaysAllow")]
    StandaloneAuthorization,
    #[error("protectKernelDefaults: {0}")]
    Kernel(String),
    #[error("{0} must be given together with {1}")]
    Pair(&'static str, &'static str),
}

/// `-v` of the kubelet's own command line.
pub fn verbosity(arguments: &[OsString]) -> u8 {
    Flags::parse(arguments.iter().cloned()).map(|flags| flags.verbosity()).unwrap_or(0)
}

fn verbosity_of(settings: &Settings) -> u8 {
    u8::try_from(settings.int("logging.verbosity").max(0)).unwrap_or(u8::MAX)
}

/// Runs until interrupted. Containers go on.
pub async fn run(arguments: Vec<OsString>) -> Result<ExitCode, BoxError> {
    let flags = Flags::parse(arguments)?;
    if flags.help {
        print!("{}", flags::help());
        return Ok(ExitCode::SUCCESS);
    }
    if flags.version {
        println!("Kubernetes {}", ferrite_apiserver::KUBERNETES_VERSION);
        return Ok(ExitCode::SUCCESS);
    }
    let (file, drop_ins) = (flags.path("config"), flags.path("config-dir"));
    let settings = Settings::read(file.as_deref(), drop_ins.as_deref(), &flags.settings)?;
    settings.gates()?.report();
    crate::logging::set_verbosity(flags.verbosity().max(verbosity_of(&settings)));
    machine::check(&settings)?;
    let _lock = match flags.path("lock-file") {
        Some(path) => Some(machine::ProcessLock::acquire(path).await?),
        None => None,
    };
    let scope = Scope::new();
    let started = tokio::select! {
        started = start(&flags, &settings, &scope) => Some(started?),
        signal = interrupted() => {
            signal?;
            None
        }
    };
    if let Some(kubelet) = started {
        notify_ready();
        println!("serving node {}", kubelet.node_name());
        interrupted().await?;
        tracing::info!("stopping; containers go on");
    }
    scope.shutdown().await;
    Ok(ExitCode::SUCCESS)
}

async fn start(flags: &Flags, settings: &Settings, scope: &Scope) -> Result<Kubelet, BoxError> {
    let name = match flags.text("hostname-override") {
        Some(name) => name.trim().to_lowercase(),
        None => nix::unistd::gethostname()?.to_string_lossy().trim().to_lowercase(),
    };
    let kubeconfig = flags.path("kubeconfig");
    let standalone = kubeconfig.is_none();
    if standalone && flags.path("bootstrap-kubeconfig").is_some() {
        return Err(RefusedStart::BootstrapAlone.into());
    }
    let wanted = flags.node_ip()?;
    let found = match wanted {
        NodeIp::Given(addresses) => Some(addresses),
        NodeIp::Any => ferrite_network::node_address().await?.map(Addresses::single),
        NodeIp::Preferred(family) => {
            let other = if family == IpFamily::V4 { IpFamily::V6 } else { IpFamily::V4 };
            let families = [family, other];
            ferrite_network::node_addresses(&families).await?.into_iter().next().map(Addresses::single)
        }
    };
    let node_ips = match found {
        Some(addresses) => addresses,
        None if standalone => Addresses::single(Ipv4Addr::LOCALHOST.into()),
        None => return Err("this machine has no address that others reach: give --node-ip".into()),
    };
    let config = config(flags, settings, &name, node_ips, standalone)?;
    let cert_dir = flags.path("cert-dir").unwrap_or_else(|| PathBuf::from("/var/lib/kubelet/pki"));
    let store = Arc::new(CertificateStore::open(&cert_dir)?);
    let client = match &kubeconfig {
        None => {
            tracing::warn!("Standalone mode, no API client");
            None
        }
        Some(kubeconfig) => {
            let bootstrap = flags.path("bootstrap-kubeconfig");
            let rotate = settings.bool("rotateCertificates");
            let identity =
                ClientIdentity { node: &name, kubeconfig, bootstrap: bootstrap.as_deref(), rotate };
            Some(identity.connect(store.clone(), limits::api_requests(settings)?, scope).await?)
        }
    };
    let tls = match settings.bool("enableServer") {
        true => Some(serving(settings, &name, node_ips)?.serve(store, client.as_ref(), scope)?),
        false => None,
    };
    let config = Config { tls, ..config };
    let Services { runtime, images } = runtime(settings)?;
    let client = client.unwrap_or_else(ferrite_kubelet::standalone::client);
    Ok(Kubelet::start(config, runtime, images, client, scope).await?)
}

/// The runtime, and the images, which may be elsewhere.
fn runtime(settings: &Settings) -> Result<Services, BoxError> {
    let endpoint = settings.text("containerRuntimeEndpoint");
    let timeout = settings.duration("runtimeRequestTimeout");
    let runtime = Arc::new(ferrite_cri::grpc::Client::new(&endpoint)?.with_timeout(timeout));
    let images: Arc<dyn ImageService> = match settings.text("imageServiceEndpoint") {
        other if other.is_empty() || other == endpoint => runtime.clone(),
        other => Arc::new(ferrite_cri::grpc::Client::new(&other)?.with_timeout(timeout)),
    };
    Ok(Services { runtime, images })
}

fn serving<'a>(
    settings: &Settings,
    node: &'a str,
    addresses: Addresses,
) -> Result<ServingIdentity<'a>, BoxError> {
    let files = match (settings.path("tlsCertFile"), settings.path("tlsPrivateKeyFile")) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(RefusedStart::Pair("tlsCertFile", "tlsPrivateKeyFile").into()),
    };
    Ok(ServingIdentity {
        node,
        addresses,
        files,
        from_cluster: settings.bool("serverTLSBootstrap"),
        client_ca: settings.path("authentication.x509.clientCAFile"),
        handshake: TlsChoices::read(settings)?,
    })
}

fn bad(field: &'static str, problem: impl Into<String>) -> SettingsError {
    SettingsError::Value { field, problem: problem.into() }
}

fn config(
    flags: &Flags,
    settings: &Settings,
    name: &str,
    node_ips: Addresses,
    standalone: bool,
) -> Result<Config, BoxError> {
    let address = |field: &'static str| -> Result<IpAddr, SettingsError> {
        settings.text(field).parse().map_err(|_| bad(field, "it is no IP address"))
    };
    let port = |field: &'static str| {
        u16::try_from(settings.int(field)).map_err(|_| bad(field, "it is no port between 0 and 65535"))
    };
    let percent = |field: &'static str| {
        let value = u8::try_from(settings.int(field)).ok().filter(|value| *value <= 100);
        value.ok_or_else(|| bad(field, "it is not between 0 and 100"))
    };
    let (high, low) = (percent("imageGCHighThresholdPercent")?, percent("imageGCLowThresholdPercent")?);
    if low >= high {
        let problem = "it is not less than imageGCHighThresholdPercent";
        return Err(bad("imageGCLowThresholdPercent", problem).into());
    }
    let reserved = Reserved::of(settings)?;
    let gates = settings.gates()?;
    let eviction = eviction(settings)?;
    let healthz_port = port("healthzPort")?;
    let providers =
        (flags.path("image-credential-provider-config"), flags.path("image-credential-provider-bin-dir"));
    Ok(Config {
        root_dir: flags.path("root-dir").unwrap_or_else(|| PathBuf::from("/var/lib/kubelet")),
        log_dir: settings.text("podLogsDir").into(),
        cgroup_root: settings.text("cgroupRoot"),
        cgroup_driver: match settings.text("cgroupDriver").as_str() {
            "cgroupfs" => CgroupDriver::Cgroupfs,
            "systemd" => CgroupDriver::Systemd,
            _ => return Err(bad("cgroupDriver", "it is neither cgroupfs nor systemd").into()),
        },
        server_address: SocketAddr::new(address("address")?, port("port")?),
        access: access(settings, standalone)?,
        debugging_handlers: settings.bool("enableDebuggingHandlers"),
        system_log_handler: settings.bool("enableSystemLogHandler"),
        system_log_query: limits::system_log_query(settings)?,
        set_verbosity: settings
            .bool("enableDebugFlagsHandler")
            .then_some(crate::logging::set_verbosity as fn(u8)),
        static_pod_path: settings.path("staticPodPath"),
        file_check_frequency: settings.duration("fileCheckFrequency"),
        static_pod_url: settings
            .path("staticPodURL")
            .map(|_| (settings.text("staticPodURL"), settings.lists("staticPodURLHeader"))),
        http_check_frequency: settings.duration("httpCheckFrequency"),
        standalone,
        read_only_address: match port("readOnlyPort")? {
            0 => None,
            port => Some(SocketAddr::new(address("address")?, port)),
        },
        healthz_address: match healthz_port {
            0 => None,
            port => Some(SocketAddr::new(address("healthzBindAddress")?, port)),
        },
        cluster_dns: cluster_dns(settings)?,
        cluster_domain: settings.text("clusterDomain"),
        resolv_conf: settings.text("resolvConf").into(),
        node_labels: flags.node_labels()?,
        register_node: settings.bool("registerNode"),
        register_with_taints: registration::taints(settings)?,
        provider_id: settings.text("providerID"),
        node_status_max_images: registration::max_images(settings)?,
        max_pods: registration::max_pods(settings, cpus())?,
        pod_pids_limit: registration::pids_limit(settings)?,
        seccomp_default: settings.bool("seccompDefault"),
        reserved_cpu_milli: reserved.cpu_milli,
        reserved_memory: reserved.memory,
        reserved_ephemeral_storage: reserved.ephemeral_storage,
        reserved_pids: reserved.pids,
        enforcement: reservations::enforcement(settings)?,
        local_storage_isolation: settings.bool("localStorageCapacityIsolation"),
        ids_per_pod: limits::ids_per_pod(settings)?,
        cpu_quota: limits::cpu_quota(settings)?,
        swap_behavior: limits::swap_behavior(settings)?,
        unsafe_sysctls: limits::unsafe_sysctls(settings)?,
        cloud_provider: flags.cloud_provider()?,
        node_status_update_frequency: settings.duration("nodeStatusUpdateFrequency"),
        sync_frequency: settings.duration("syncFrequency"),
        event_limit: Some(limits::events(settings)?),
        volume_stats_period: limits::volume_stats_period(settings),
        pod_cidr: settings.text("podCIDR"),
        flags: flags.shown(settings),
        eviction_memory: eviction_memory(&eviction, total_memory())?,
        eviction,
        node_lease_duration: Duration::from_secs(
            u64::try_from(settings.int("nodeLeaseDurationSeconds"))
                .map_err(|_| bad("nodeLeaseDurationSeconds", "it is negative"))?,
        ),
        node_status_report_frequency: settings.duration("nodeStatusReportFrequency"),
        image_gc_high_threshold: high,
        image_gc_low_threshold: low,
        resources: resources::read(settings, |gate| gates.enabled(gate))?,
        image_minimum_gc_age: settings.duration("imageMinimumGCAge"),
        image_maximum_gc_age: limits::image_maximum_gc_age(settings)?,
        pull_limits: limits::pulls(settings)?,
        logs: limits::logs(settings)?,
        single_process_oom_kill: settings.bool("singleProcessOOMKill"),
        shutdown_periods: limits::shutdown(settings)?,
        max_restart_backoff: limits::max_restart_backoff(settings)?,
        image_credential_providers: match providers {
            (Some(config), Some(programs)) => Some((config, programs)),
            (None, None) => None,
            _ => {
                return Err(RefusedStart::Pair(
                    "--image-credential-provider-config",
                    "--image-credential-provider-bin-dir",
                )
                .into());
            }
        },
        node_ips: node_ips.iter().copied().collect(),
        image_verification: image_verification(settings)?,
        feature_gates: gates,
        ..Config::new(name, *node_ips.primary())
    })
}

fn image_verification(settings: &Settings) -> Result<VerificationPolicy, SettingsError> {
    let (policy, list) = ("imagePullCredentialsVerificationPolicy", "preloadedImagesVerificationAllowlist");
    VerificationPolicy::parse(&settings.text(policy), &settings.texts(list)).map_err(|error| {
        let field = if matches!(error, VerificationPolicyError::Policy(_)) { policy } else { list };
        bad(field, error.to_string())
    })
}

fn access(settings: &Settings, standalone: bool) -> Result<KubeletAccess, BoxError> {
    let webhook_tokens = settings.bool("authentication.webhook.enabled");
    let authorization = match settings.text("authorization.mode").as_str() {
        "Webhook" => Authorization::Webhook,
        "AlwaysAllow" => Authorization::AlwaysAllow,
        _ => return Err(bad("authorization.mode", "it is neither Webhook nor AlwaysAllow").into()),
    };
    if standalone && settings.bool("enableServer") {
        if webhook_tokens {
            return Err(RefusedStart::StandaloneAuthentication.into());
        }
        if authorization == Authorization::Webhook {
            return Err(RefusedStart::StandaloneAuthorization.into());
        }
    }
    Ok(KubeletAccess {
        anonymous: settings.bool("authentication.anonymous.enabled"),
        webhook_tokens,
        token_ttl: settings.duration("authentication.webhook.cacheTTL"),
        authorization,
        authorized_ttl: settings.duration("authorization.webhook.cacheAuthorizedTTL"),
        unauthorized_ttl: settings.duration("authorization.webhook.cacheUnauthorizedTTL"),
    })
}

fn cluster_dns(settings: &Settings) -> Result<Vec<IpAddr>, SettingsError> {
    let read =
        |text: String| text.parse().map_err(|_| bad("clusterDNS", format!("{text:?} is no IP address")));
    settings.texts("clusterDNS").into_iter().map(read).collect()
}

fn quantity(field: &'static str, text: &str) -> Result<Quantity, SettingsError> {
    Quantity::parse(text).map_err(|_| bad(field, format!("{text:?} is no quantity")))
}

/// The thresholds at which pods are evicted. As upstream: one hard threshold replaces all defaults, unless
/// the defaults are to be merged.
fn eviction(settings: &Settings) -> Result<EvictionSettings, SettingsError> {
    const FIELD: &str = "evictionSoftGracePeriod";
    let (usual, given) = (EvictionSettings::upstream(), settings.map("evictionHard"));
    let hard = match (given.is_empty(), settings.bool("mergeDefaultEvictionSettings")) {
        (true, _) => usual.hard,
        (false, true) => usual.hard.into_iter().chain(given).collect(),
        (false, false) => given,
    };
    let mut soft_grace = std::collections::BTreeMap::new();
    for (signal, text) in settings.map(FIELD) {
        let grace: GoDuration = text.parse().map_err(|e| bad(FIELD, format!("{signal}: {e}")))?;
        soft_grace.insert(signal, grace.0);
    }
    let most = u64::try_from(settings.int("evictionMaxPodGracePeriod"));
    Ok(EvictionSettings {
        hard,
        soft: settings.map("evictionSoft"),
        soft_grace,
        minimum_reclaim: settings.map("evictionMinimumReclaim"),
        transition: settings.duration("evictionPressureTransitionPeriod"),
        max_pod_grace: Duration::from_secs(
            most.map_err(|_| bad("evictionMaxPodGracePeriod", "it is negative"))?,
        ),
    })
}

/// Memory that pods cannot have, as upstream subtracts its hard threshold from allocatable memory.
fn eviction_memory(eviction: &EvictionSettings, total: i64) -> Result<i64, SettingsError> {
    const FIELD: &str = "evictionHard";
    let Some(text) = eviction.hard.get("memory.available") else { return Ok(0) };
    match text.strip_suffix('%') {
        Some(percent) => {
            let percent: f64 =
                percent.parse().map_err(|_| bad(FIELD, format!("{text:?} is no percentage")))?;
            Ok((total as f64 * percent / 100.0) as i64)
        }
        None => Ok(quantity(FIELD, text)?.value()),
    }
}

fn cpus() -> i64 {
    std::thread::available_parallelism().map_or(1, |count| i64::try_from(count.get()).unwrap_or(i64::MAX))
}

/// The machine's memory in bytes.
fn total_memory() -> i64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes: Option<i64> = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok());
    kilobytes.unwrap_or(0).saturating_mul(1024)
}

/// Tells systemd, where it waits for that.
fn notify_ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = std::os::unix::net::UnixDatagram::unbound()
        .and_then(|socket| socket.send_to(b"READY=1", Path::new(&path)));
    if let Err(error) = sent {
        tracing::warn!(%error, "cannot tell systemd that the kubelet is ready");
    }
}
