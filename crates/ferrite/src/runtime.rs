//! `ferrite runtime`: the container runtime alone, on a CRI socket.

use crate::apiserver::BoxError;
use crate::cli::{DataDir, interrupted};
use crate::cluster::start_network;
use crate::data_dir::DataDirectory;
use crate::node::{CgroupDriver, OpeningImages, start_runtime};
use crate::status::State;
use crate::up::{check_machine, create_private};
use ferrite_client::Scope;
use ferrite_network::Cidrs;
use std::process::ExitCode;

/// Options of `ferrite runtime`.
#[derive(Debug, Clone, clap::Args)]
pub struct RuntimeAlone {
    #[command(flatten)]
    data: DataDir,
    /// Addresses of pods: a range, or one of each family. The first /24 of IPv4 and the first /64 of IPv6 are taken.
    #[arg(long, default_value = "10.244.0.0/16", value_name = "CIDRS", value_parser = crate::apiserver::parse_cidrs)]
    pod_cidr: Cidrs,
    /// Addresses of all pods of the cluster, where this node's are a part of them: pods reach those of other nodes with
    /// their own address. The routes between nodes are yours to make.
    #[arg(long, value_name = "CIDRS", value_parser = crate::apiserver::parse_cidrs)]
    cluster_cidr: Option<Cidrs>,
    /// Registries (host or host:port) to talk to without TLS; loopback addresses always are.
    #[arg(long, value_name = "REGISTRY")]
    insecure_registry: Vec<String>,
    /// The cgroup driver reported to kubelets: themselves, or systemd on their behalf.
    #[arg(long, value_enum, default_value_t, value_name = "DRIVER")]
    cgroup_driver: CgroupDriver,
}

impl RuntimeAlone {
    /// Serves until interrupted. Containers go on; `ferrite down` removes them and everything else.
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        check_machine()?;
        State::refuse_if_running(&paths)?;
        let _claimed = DataDirectory::claim(&paths)?;
        create_private(&paths)?;
        let images = OpeningImages::begin(&paths, &self.insecure_registry);
        let bridge =
            start_network(&paths, self.pod_cidr, self.cluster_cidr.unwrap_or(self.pod_cidr), None).await?;
        let scope = Scope::new();
        let embedded = start_runtime(&paths, images, self.cgroup_driver, bridge, &scope).await?;
        println!("serving unix://{}", paths.cri_socket().display());
        interrupted().await?;
        scope.shutdown().await;
        embedded.runtime.close().await;
        Ok(ExitCode::SUCCESS)
    }
}
