//! `ferrite kube-controller-manager`: the controllers in a process of their own, with upstream's flags.

use crate::alone::{Alone, AloneOptions};
use crate::apiserver::BoxError;
use ferrite_api::Cidr;
use ferrite_client::{Scope, service_account_client};
use ferrite_component::GoDuration;
use ferrite_controllers::{Clients, Config, Context, Identity, NodeCidrs};
use ferrite_json::json;
use ferrite_pki::{Authority, TokenSigner};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

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
    /// Certificate of the authority that signs approved requests.
    #[arg(long, requires = "cluster_signing_key_file", value_name = "FILE")]
    cluster_signing_cert_file: Option<PathBuf>,
    /// Key of that authority.
    #[arg(long, requires = "cluster_signing_cert_file", value_name = "FILE")]
    cluster_signing_key_file: Option<PathBuf>,
    /// Give each node a range of addresses for its pods.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    allocate_node_cidrs: bool,
    #[command(flatten)]
    node_cidrs: NodeCidrOptions,
    /// Addresses of Services, which no node gets.
    #[arg(long, value_delimiter = ',', value_name = "CIDR[,CIDR]", value_parser = parse_range)]
    service_cluster_ip_range: Vec<Cidr>,
    /// How long a node may be silent before it is taken for lost.
    #[arg(long, default_value = "50s", value_name = "DURATION")]
    node_monitor_grace_period: GoDuration,
    /// The same for a node that has never reported.
    #[arg(long, default_value = "1m0s", value_name = "DURATION")]
    node_startup_grace_period: GoDuration,
    /// Finished pods beyond so many are removed, oldest first; 0 keeps all.
    #[arg(long, default_value_t = 12500, value_name = "N")]
    terminated_pod_gc_threshold: usize,
    /// Keys that one controller works on at once.
    #[arg(long, default_value_t = 5, value_name = "N")]
    concurrent_syncs: usize,
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
        let config = self.config()?;
        let alone = Alone {
            name: NAME,
            secure_port: self.secure_port,
            config: json!({"kubecontrollermanager.config.k8s.io": {
                "Generic": {"Controllers": self.controllers, "LeaderElection": {"leaderElect": self.alone.leader_elect}},
            }}),
            options: self.alone,
        };
        let server = alone.server().await?;
        let manager = kube::Client::try_from(server.clone())?;
        let names = self.controllers;
        let own_accounts = self.use_service_account_credentials;
        let acting = manager.clone();
        alone
            .run(manager, Scope::new(), move |scope| {
                let clients: Clients = match own_accounts {
                    true => accounts(server, acting, scope.clone()),
                    false => Arc::new(move |_| acting.clone()),
                };
                let context = Context::new(clients, scope, config);
                // Those of the API server are its own business.
                let off = ferrite_controllers::OF_THE_SERVER.iter().map(|name| format!("-{name}"));
                let names: Vec<String> = names.into_iter().chain(off).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                match ferrite_controllers::start_all(&context, &names).as_slice() {
                    [] => Ok(()),
                    unknown => Err(format!("no controller is called {}", unknown.join(", ")).into()),
                }
            })
            .await?;
        Ok(ExitCode::SUCCESS)
    }

    fn config(&self) -> Result<Config, BoxError> {
        let authority = match (&self.cluster_signing_cert_file, &self.cluster_signing_key_file) {
            (Some(certificate), Some(key)) => {
                let identity = ferrite_pki::Identity { certificate: read(certificate)?, key: read(key)? };
                Some(Arc::new(Authority::from_identity(identity)?))
            }
            _ => None,
        };
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
            authority,
            tokens,
            node_monitor_grace: self.node_monitor_grace_period.0,
            node_startup_grace: self.node_startup_grace_period.0,
            terminated_pod_threshold: self.terminated_pod_gc_threshold,
            workers: self.concurrent_syncs.max(1),
            ..Config::default()
        })
    }
}

fn read(path: &Path) -> Result<String, BoxError> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()).into())
}

/// A client for each service account, made when the first controller asks for it.
fn accounts(server: kube::Config, manager: kube::Client, scope: Scope) -> Clients {
    let made: Mutex<HashMap<&'static str, kube::Client>> = Mutex::default();
    Arc::new(move |identity| {
        let Identity::ServiceAccount(name) = identity else { return manager.clone() };
        let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = made.get(name) {
            return client.clone();
        }
        match service_account_client(&server, manager.clone(), ACCOUNTS, name, &scope) {
            Ok(client) => made.entry(name).or_insert(client).clone(),
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
