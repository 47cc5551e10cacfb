//! `ferrite kube-controller-manager`: the controllers in a process of their own, with upstream's flags.

pub mod accepted;
mod concurrency;

use self::accepted::ControllerManagerFlags;
use self::concurrency::Concurrency;
use crate::accepted::AcceptedFlags;
use crate::alone::{Alone, AloneOptions};
use crate::apiserver::BoxError;
use ferrite_api::Cidr;
use ferrite_client::{Fence, Scope, Term, service_account_client};
use ferrite_component::GoDuration;
use ferrite_controllers::{
    AutoscalingConfig, Clients, Config, Context, EvictionRates, Identity, NodeCidrs, Signers,
};
use ferrite_json::json;
use ferrite_pki::{Authority, TokenSigner};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const NAME: &str = "kube-controller-manager";
/// The namespace of the controllers' service accounts.
const ACCOUNTS: &str = "kube-system";

/// Flags of kube-controller-manager.
#[derive(Debug, clap::Args)]
pub struct KubeControllerManager {
    #[command(flatten)]
    alone: AloneOptions,
    /// Port for health checks and metrics; 0 for none.
    #[arg(long, default_value_t = 10257, value_name = "PORT")]
    secure_port: u16,
    /// Controllers to run, by upstream's names: `*` is all, `-name` all but that one.
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_value = "*",
        value_name = "NAMES"
    )]
    controllers: Vec<String>,
    /// Let each controller act as a service account of its own.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    use_service_account_credentials: bool,
    /// Certificates that pods verify the API server with; published in every namespace.
    #[arg(long, value_name = "FILE")]
    root_ca_file: Option<PathBuf>,
    /// Key that signs tokens kept in Secrets.
    #[arg(long, value_name = "FILE")]
    service_account_private_key_file: Option<PathBuf>,
    #[command(flatten)]
    signing: SigningFlags,
    /// Tokens in Secrets that nobody used for so long are marked invalid, and deleted after as long again.
    #[arg(long, default_value = "8760h0m0s", value_name = "DURATION")]
    legacy_service_account_token_clean_up_period: GoDuration,
    /// Give each node a range of addresses for its pods.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    allocate_node_cidrs: bool,
    #[command(flatten)]
    node_cidrs: NodeCidrOptions,
    /// Addresses of Services, which no node gets.
    #[arg(long, value_delimiter = ',', value_name = "CIDR[,CIDR]", value_parser = parse_range)]
    service_cluster_ip_range: Vec<Cidr>,
    /// Time without a heartbeat after which a node counts as lost.
    #[arg(long, default_value = "50s", value_name = "DURATION")]
    node_monitor_grace_period: GoDuration,
    /// The same for a node that has never reported.
    #[arg(long, default_value = "1m0s", value_name = "DURATION")]
    node_startup_grace_period: GoDuration,
    #[command(flatten)]
    evictions: EvictionFlags,
    /// Endpoints in one EndpointSlice at most.
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    max_endpoints_per_slice: u16,
    /// Addresses of one subset of Endpoints that are mirrored at most.
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    mirroring_max_endpoints_per_subset: u16,
    /// Delete objects whose owners are gone. The API server must have the same setting.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    enable_garbage_collector: bool,
    /// Hand claims without a volume to the provisioners of their classes.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    enable_dynamic_provisioning: bool,
    /// Leave volumes on a node that does not answer, however long that takes; only the taint
    /// `node.kubernetes.io/out-of-service` takes them from it.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    disable_force_detach_on_timeout: bool,
    /// Quotas are counted anew so often even if nothing changed.
    #[arg(long, default_value = "5m0s", value_name = "DURATION")]
    resource_quota_sync_period: GoDuration,
    /// Number of finished pods to keep; beyond it the oldest are removed. 0 keeps all.
    #[arg(long, default_value_t = 12500, value_name = "N")]
    terminated_pod_gc_threshold: usize,
    #[command(flatten)]
    autoscaling: AutoscalingFlags,
    #[command(flatten)]
    concurrency: Concurrency,
    /// Keys that a controller works on at once for which there is no flag of its own.
    #[arg(long, default_value_t = 5, value_name = "N")]
    concurrent_syncs: usize,
    #[command(flatten)]
    accepted: AcceptedFlags<ControllerManagerFlags>,
}

/// The authorities that sign approved requests for certificates.
#[derive(Debug, clap::Args)]
pub struct SigningFlags {
    /// Certificate of the authority of all signers.
    #[arg(long, requires = "cluster_signing_key_file", value_name = "FILE")]
    cluster_signing_cert_file: Option<PathBuf>,
    /// Key of that authority.
    #[arg(long, requires = "cluster_signing_cert_file", value_name = "FILE")]
    cluster_signing_key_file: Option<PathBuf>,
    /// Certificate of the authority of kubernetes.io/kubelet-serving alone.
    #[arg(long, requires = "cluster_signing_kubelet_serving_key_file", value_name = "FILE")]
    cluster_signing_kubelet_serving_cert_file: Option<PathBuf>,
    /// Key of that authority.
    #[arg(long, requires = "cluster_signing_kubelet_serving_cert_file", value_name = "FILE")]
    cluster_signing_kubelet_serving_key_file: Option<PathBuf>,
    /// Certificate of the authority of kubernetes.io/kube-apiserver-client-kubelet alone.
    #[arg(long, requires = "cluster_signing_kubelet_client_key_file", value_name = "FILE")]
    cluster_signing_kubelet_client_cert_file: Option<PathBuf>,
    /// Key of that authority.
    #[arg(long, requires = "cluster_signing_kubelet_client_cert_file", value_name = "FILE")]
    cluster_signing_kubelet_client_key_file: Option<PathBuf>,
    /// Certificate of the authority of kubernetes.io/kube-apiserver-client alone.
    #[arg(long, requires = "cluster_signing_kube_apiserver_client_key_file", value_name = "FILE")]
    cluster_signing_kube_apiserver_client_cert_file: Option<PathBuf>,
    /// Key of that authority.
    #[arg(long, requires = "cluster_signing_kube_apiserver_client_cert_file", value_name = "FILE")]
    cluster_signing_kube_apiserver_client_key_file: Option<PathBuf>,
    /// Certificate of the authority of kubernetes.io/legacy-unknown alone.
    #[arg(long, requires = "cluster_signing_legacy_unknown_key_file", value_name = "FILE")]
    cluster_signing_legacy_unknown_cert_file: Option<PathBuf>,
    /// Key of that authority.
    #[arg(long, requires = "cluster_signing_legacy_unknown_cert_file", value_name = "FILE")]
    cluster_signing_legacy_unknown_key_file: Option<PathBuf>,
    /// The lifetime of certificates whose requests do not ask for less.
    #[arg(long, default_value = "8760h0m0s", value_name = "DURATION")]
    cluster_signing_duration: GoDuration,
}

impl SigningFlags {
    fn signers(&self) -> Result<Signers, BoxError> {
        let authority = |certificate: &Option<PathBuf>, key: &Option<PathBuf>| match (certificate, key) {
            (Some(certificate), Some(key)) => {
                let identity = ferrite_pki::Identity { certificate: read(certificate)?, key: read(key)? };
                Ok::<_, BoxError>(Some(Arc::new(Authority::from_identity(identity)?)))
            }
            _ => Ok(None),
        };
        let own = Signers {
            kubelet_serving: authority(
                &self.cluster_signing_kubelet_serving_cert_file,
                &self.cluster_signing_kubelet_serving_key_file,
            )?,
            kubelet_client: authority(
                &self.cluster_signing_kubelet_client_cert_file,
                &self.cluster_signing_kubelet_client_key_file,
            )?,
            api_client: authority(
                &self.cluster_signing_kube_apiserver_client_cert_file,
                &self.cluster_signing_kube_apiserver_client_key_file,
            )?,
            legacy_unknown: authority(
                &self.cluster_signing_legacy_unknown_cert_file,
                &self.cluster_signing_legacy_unknown_key_file,
            )?,
        };
        let is_given = [&own.kubelet_serving, &own.kubelet_client, &own.api_client, &own.legacy_unknown];
        let is_given = is_given.iter().any(|authority| authority.is_some());
        match authority(&self.cluster_signing_cert_file, &self.cluster_signing_key_file)? {
            // As upstream: nobody should have to know which of two wins.
            Some(_) if is_given => Err("--cluster-signing-cert-file is for all signers: leave it out, or the flags of single signers".into()),
            Some(authority) => Ok(Signers::all(authority)),
            None => Ok(own),
        }
    }
}

/// The rates at which silent nodes lose their pods.
#[derive(Debug, clap::Args)]
pub struct EvictionFlags {
    /// Nodes per second that lose their pods in a zone that is well.
    #[arg(long, default_value_t = 0.1, value_name = "RATE")]
    node_eviction_rate: f64,
    /// The same in a large zone of which many nodes do not answer.
    #[arg(long, default_value_t = 0.01, value_name = "RATE")]
    secondary_node_eviction_rate: f64,
    /// A zone with more nodes is large; a smaller one of which many nodes do not answer keeps its pods.
    #[arg(long, default_value_t = 50, value_name = "N")]
    large_cluster_size_threshold: usize,
    /// The share of a zone's nodes that are many.
    #[arg(long, default_value_t = 0.55, value_name = "SHARE")]
    unhealthy_zone_threshold: f64,
}

impl EvictionFlags {
    fn rates(&self) -> Result<EvictionRates, BoxError> {
        for (flag, value) in [
            ("node-eviction-rate", self.node_eviction_rate),
            ("secondary-node-eviction-rate", self.secondary_node_eviction_rate),
            ("unhealthy-zone-threshold", self.unhealthy_zone_threshold),
        ] {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("--{flag} must be a number that is not negative: {value}").into());
            }
        }
        Ok(EvictionRates {
            normal: self.node_eviction_rate,
            reduced: self.secondary_node_eviction_rate,
            large: self.large_cluster_size_threshold,
            unhealthy_share: self.unhealthy_zone_threshold,
        })
    }
}

/// Flags of the horizontal pod autoscaler.
#[derive(Debug, clap::Args)]
pub struct AutoscalingFlags {
    /// The time between two syncs of a HorizontalPodAutoscaler.
    #[arg(long, default_value = "15s", value_name = "DURATION")]
    horizontal_pod_autoscaler_sync_period: GoDuration,
    /// Nothing is scaled below a recommendation of so long ago.
    #[arg(long, default_value = "5m0s", value_name = "DURATION")]
    horizontal_pod_autoscaler_downscale_stabilization: GoDuration,
    /// The share by which usage may be off its target before anything is scaled.
    #[arg(long, default_value_t = 0.1, value_name = "SHARE")]
    horizontal_pod_autoscaler_tolerance: f64,
    /// The time after a pod's start in which its CPU usage may not count.
    #[arg(long, default_value = "5m0s", value_name = "DURATION")]
    horizontal_pod_autoscaler_cpu_initialization_period: GoDuration,
    /// The time after a pod's start in which changes of its readiness are part of the start.
    #[arg(long, default_value = "30s", value_name = "DURATION")]
    horizontal_pod_autoscaler_initial_readiness_delay: GoDuration,
    /// Number of HorizontalPodAutoscalers synced in parallel.
    #[arg(long, default_value_t = 5, value_name = "N")]
    concurrent_horizontal_pod_autoscaler_syncs: usize,
}

impl AutoscalingFlags {
    fn config(&self) -> Result<AutoscalingConfig, BoxError> {
        let tolerance = self.horizontal_pod_autoscaler_tolerance;
        if !tolerance.is_finite() || tolerance < 0.0 {
            return Err(
                format!("--horizontal-pod-autoscaler-tolerance must not be negative: {tolerance}").into()
            );
        }
        if self.concurrent_horizontal_pod_autoscaler_syncs == 0 {
            return Err("--concurrent-horizontal-pod-autoscaler-syncs must be greater than 0".into());
        }
        if self.horizontal_pod_autoscaler_sync_period.0.is_zero() {
            return Err("--horizontal-pod-autoscaler-sync-period must be greater than 0".into());
        }
        Ok(AutoscalingConfig {
            sync_period: self.horizontal_pod_autoscaler_sync_period.0,
            downscale_stabilization: self.horizontal_pod_autoscaler_downscale_stabilization.0,
            tolerance,
            cpu_initialization_period: self.horizontal_pod_autoscaler_cpu_initialization_period.0,
            initial_readiness_delay: self.horizontal_pod_autoscaler_initial_readiness_delay.0,
            workers: self.concurrent_horizontal_pod_autoscaler_syncs,
        })
    }
}

/// Where the pod CIDRs of nodes come from.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeCidrOptions {
    /// Addresses of all pods: one range, or one of each family.
    #[arg(long, value_delimiter = ',', value_name = "CIDR[,CIDR]", value_parser = parse_range)]
    cluster_cidr: Vec<Cidr>,
    /// Mask of a node's range in a cluster of one family; 24 for IPv4 and 64 for IPv6 without it.
    #[arg(long, value_name = "BITS", conflicts_with_all = ["node_cidr_mask_size_ipv4", "node_cidr_mask_size_ipv6"])]
    node_cidr_mask_size: Option<u8>,
    /// Mask of a node's range of IPv4.
    #[arg(long, value_name = "BITS")]
    node_cidr_mask_size_ipv4: Option<u8>,
    /// Mask of a node's range of IPv6.
    #[arg(long, value_name = "BITS")]
    node_cidr_mask_size_ipv6: Option<u8>,
}

impl NodeCidrOptions {
    fn read(&self) -> Result<NodeCidrs, BoxError> {
        if self.cluster_cidr.len() > 1 && self.node_cidr_mask_size.is_some() {
            return Err("--node-cidr-mask-size is for clusters of one family: give --node-cidr-mask-size-ipv4 and --node-cidr-mask-size-ipv6".into());
        }
        let mask = |range: &Cidr| match range.address.is_ipv4() {
            true => self.node_cidr_mask_size.or(self.node_cidr_mask_size_ipv4).unwrap_or(24),
            false => self.node_cidr_mask_size.or(self.node_cidr_mask_size_ipv6).unwrap_or(64),
        };
        Ok(NodeCidrs::new(self.cluster_cidr.iter().map(|range| (*range, mask(range))).collect())?)
    }
}

fn parse_range(text: &str) -> Result<Cidr, String> {
    Cidr::parse(text.trim()).ok_or_else(|| format!("{text:?} is not a range like 10.244.0.0/16 or fd00::/56"))
}

impl KubeControllerManager {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let names = self.names()?;
        let config = self.config()?;
        let alone = Alone {
            name: NAME,
            secure_port: self.secure_port,
            config: json!({"kubecontrollermanager.config.k8s.io": {
                "Generic": {"Controllers": self.controllers, "LeaderElection": {"leaderElect": self.alone.leader_elect}},
            }}),
            options: self.alone,
            pages: config.pages.clone(),
            ready: Vec::new(),
        };
        let server = alone.server().await?;
        let manager = kube::Client::try_from(server.clone())?;
        let own_accounts = self.use_service_account_credentials;
        let acting = manager.clone();
        let running = alone.run(manager, Scope::new(), move |Term { scope, fence }| {
            let acting = fence.guard(acting);
            let clients: Clients = match own_accounts {
                true => accounts(server, acting, fence, scope.clone()),
                false => Arc::new(move |_| acting.clone()),
            };
            let context = Context::new(clients, scope, config);
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            ferrite_controllers::start_all(&context, &names);
            Ok(())
        });
        Box::pin(running).await?;
        Ok(ExitCode::SUCCESS)
    }

    /// The controllers to start, with the rules of `--controllers`. A wrong name is an error before anything starts.
    fn names(&self) -> Result<Vec<String>, BoxError> {
        let mut names = self.controllers.clone();
        let given: Vec<&str> = names.iter().map(String::as_str).collect();
        let unknown = ferrite_controllers::unknown(&given);
        if !unknown.is_empty() {
            return Err(unknown_controllers(&unknown).into());
        }
        if !self.enable_garbage_collector {
            // The first entry for a controller decides.
            names.insert(0, "-garbage-collector-controller".into());
        }
        // Those of the API server are its own business.
        names.extend(ferrite_controllers::OF_THE_SERVER.iter().map(|name| format!("-{name}")));
        Ok(names)
    }

    fn config(&self) -> Result<Config, BoxError> {
        let tokens = match &self.service_account_private_key_file {
            Some(key) => Some(Arc::new(TokenSigner::new(&read(key)?, ferrite_pki::LEGACY_ISSUER)?)),
            None => None,
        };
        let node_cidrs = match self.allocate_node_cidrs {
            true => Some(self.node_cidrs.read()?.without(self.service_cluster_ip_range.clone())),
            false => None,
        };
        Ok(Config {
            node_cidrs,
            root_ca: self.root_ca_file.as_deref().map(read).transpose()?,
            feature_gates: self.alone.feature_gates.clone().unwrap_or_default(),
            signers: self.signing.signers()?,
            signing_duration: self.signing.cluster_signing_duration.0,
            legacy_token_period: jiff::SignedDuration::try_from(
                self.legacy_service_account_token_clean_up_period.0,
            )
            .map_err(|_| "--legacy-service-account-token-clean-up-period is too long")?,
            evictions: self.evictions.rates()?,
            endpoints_per_slice: self.max_endpoints_per_slice.into(),
            mirrored_endpoints_per_subset: self.mirroring_max_endpoints_per_subset.into(),
            dynamic_provisioning: self.enable_dynamic_provisioning,
            force_detach: !self.disable_force_detach_on_timeout,
            quota_resync: self.resource_quota_sync_period.0.max(Duration::from_secs(1)),
            concurrency: self.concurrency.0.clone(),
            tokens,
            node_monitor_grace: self.node_monitor_grace_period.0,
            node_startup_grace: self.node_startup_grace_period.0,
            terminated_pod_threshold: self.terminated_pod_gc_threshold,
            autoscaling: self.autoscaling.config()?,
            workers: self.concurrent_syncs.max(1),
            ..Config::default()
        })
    }
}

/// Names the wrong names, and similar ones.
fn unknown_controllers(names: &[String]) -> String {
    let hints = names.iter().map(|name| {
        let known = ferrite_controllers::CONTROLLERS.iter().map(|entry| entry.name);
        match ferrite_component::nearest(name, known) {
            Some(known) => format!("{name:?} (did you mean {known:?}?)"),
            None => format!("{name:?}"),
        }
    });
    format!("--controllers: no controller is called {}", hints.collect::<Vec<_>>().join(", "))
}

fn read(path: &Path) -> Result<String, BoxError> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}

/// A client for each service account, made when the first controller asks for it.
fn accounts(server: kube::Config, manager: kube::Client, fence: Fence, scope: Scope) -> Clients {
    let made: Mutex<HashMap<&'static str, kube::Client>> = Mutex::default();
    Arc::new(move |identity| {
        let Identity::ServiceAccount(name) = identity else { return manager.clone() };
        let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = made.get(name) {
            return client.clone();
        }
        match service_account_client(&server, manager.clone(), ACCOUNTS, name, &scope) {
            Ok(client) => made.entry(name).or_insert(fence.guard(client)).clone(),
            Err(error) => {
                // The manager's own client was made from the same settings a moment ago.
                tracing::error!(%error, account = name, "cannot make a client; the controller acts as the manager");
                manager.clone()
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        manager: KubeControllerManager,
    }

    #[tokio::test]
    async fn a_wrong_name_is_an_error_before_anything_starts() {
        for (names, expected) in [
            ("*,-deploymnt-controller", "did you mean \"deployment-controller\"?"),
            // With right names the manager goes on to the kubeconfig.
            ("*,-deployment-controller", "cannot read the kubeconfig"),
        ] {
            let flags = ["x", "--kubeconfig=/nonexistent/kubeconfig", "--controllers", names];
            let error = Box::pin(Flags::parse_from(flags).manager.run()).await.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn masks_of_pod_cidrs() {
        let options = |cidrs: &str, any: Option<u8>, v4: Option<u8>, v6: Option<u8>| NodeCidrOptions {
            cluster_cidr: cidrs
                .split(',')
                .filter(|c| !c.is_empty())
                .map(|c| parse_range(c).unwrap())
                .collect(),
            node_cidr_mask_size: any,
            node_cidr_mask_size_ipv4: v4,
            node_cidr_mask_size_ipv6: v6,
        };
        let range = |text: &str, mask| (parse_range(text).unwrap(), mask);
        for (options, want) in [
            (options("10.0.0.0/16", None, None, None), Some(vec![range("10.0.0.0/16", 24)])),
            (options("10.0.0.0/16", Some(26), None, None), Some(vec![range("10.0.0.0/16", 26)])),
            (
                options("10.0.0.0/16,fd00::/56", None, Some(25), Some(66)),
                Some(vec![range("10.0.0.0/16", 25), range("fd00::/56", 66)]),
            ),
            (options("fd00::/56", None, Some(25), None), Some(vec![range("fd00::/56", 64)])),
            (options("10.0.0.0/16,fd00::/56", Some(24), None, None), None),
            (options("10.0.0.0/16", Some(8), None, None), None),
            (options("", None, None, None), None),
        ] {
            let want = want.map(|ranges| NodeCidrs::new(ranges).unwrap());
            assert_eq!(options.read().ok(), want, "{options:?}");
        }
    }
}
