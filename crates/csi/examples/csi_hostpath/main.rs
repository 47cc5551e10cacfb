//! A CSI driver whose volumes are directories of the node: small, whole, and without anybody's sidecars.
//!
//! One process is the node's part (`node.rs`, called by the kubelet) and the controllers' part (`controller/`, a client of
//! the API: makes and removes volumes, attaches and detaches them, and grows them). On one node that is all there is; a
//! driver of a cluster runs the two parts apart.
//!
//! ```console
//! $ cargo run -p ferrite-csi --example csi_hostpath -- --node node --kubelet /var/lib/ferrite/kubelet \
//!       --data /var/lib/csi-hostpath --kubeconfig /etc/ferrite/admin.kubeconfig
//! ```
//! The end-to-end test `csi` has a StorageClass and pods for it.

mod controller;
mod node;
mod serve;
mod volumes;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};

/// The driver's name.
pub const NAME: &str = "hostpath.csi.ferrite.io";
/// The label that says on which node a volume is.
pub const TOPOLOGY: &str = "topology.hostpath.csi.ferrite.io/node";

struct Options {
    node: String,
    kubelet: PathBuf,
    data: PathBuf,
    kubeconfig: PathBuf,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let (mut node, mut kubelet, mut data, mut kubeconfig) = (None, None, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--node" => node = Some(value),
            "--kubelet" => kubelet = Some(value.into()),
            "--data" => data = Some(value.into()),
            "--kubeconfig" => kubeconfig = Some(value.into()),
            _ => {
                return Err(format!(
                    "unknown flag {flag}: there are --node, --kubelet, --data, --kubeconfig"
                )
                .into());
            }
        }
    }
    Ok(Options {
        node: node.ok_or("--node NAME is needed: the name of this node")?,
        kubelet: kubelet.ok_or("--kubelet DIRECTORY is needed: the kubelet's root")?,
        data: data.ok_or("--data DIRECTORY is needed: volumes are kept there")?,
        kubeconfig: kubeconfig
            .ok_or("--kubeconfig FILE is needed: the controllers' part is a client of the API")?,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run(options))
}

async fn run(options: Options) -> Result<(), Box<dyn Error>> {
    let kubeconfig = Kubeconfig::read_from(&options.kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    let volumes = Arc::new(volumes::Volumes::open(&options.data)?);
    let scope = ferrite_client::Scope::new();
    controller::start(&client, &volumes, &options.node, &scope);
    serve::serve(&options.kubelet, &options.node, volumes).await?;
    scope.shutdown().await;
    Ok(())
}
