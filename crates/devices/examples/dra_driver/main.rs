//! A driver of dynamic resources: small and whole. Its devices are only names; a container that has one finds the name in
//! the variable `DRA_DEVICE`, through a CDI file that the driver writes for each claim.
//!
//! ```console
//! $ cargo run -p ferrite-devices --example dra_driver -- --kubelet /var/lib/ferrite/kubelet --node node \
//!       --devices 2
//! ```
//! `kubectl`, which it finds in the path with its configuration, publishes its ResourceSlice and reads its claims.
//!
//! A driver must publish its slice again when the slice is gone: the kubelet removes slices of drivers that are absent.

mod driver;

use driver::{Driver, NAME};
use ferrite_csi::RegisteredPlugin;
use ferrite_csi::registration::registration_server::RegistrationServer;
use ferrite_devices::dra::dra_plugin_server::DraPluginServer;
use std::error::Error;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

struct Options {
    kubelet: PathBuf,
    driver: Driver,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let (mut kubelet, mut node, mut devices) = (None, None, 1);
    let mut cdi = PathBuf::from("/var/run/cdi");
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--kubelet" => kubelet = Some(PathBuf::from(value)),
            "--node" => node = Some(value),
            "--devices" => devices = value.parse()?,
            "--cdi" => cdi = value.into(),
            _ => {
                let known = "--kubelet, --node, --devices, --cdi";
                return Err(format!("unknown flag {flag}: there are {known}").into());
            }
        }
    }
    Ok(Options {
        kubelet: kubelet.ok_or("--kubelet DIRECTORY is needed: the kubelet's root")?,
        driver: Driver { node: node.ok_or("--node NAME is needed")?, devices, cdi },
    })
}

fn listen(socket: &Path) -> Result<UnixListener, Box<dyn Error>> {
    Ok(UnixListener::from_std(ferrite_hostfs::listen_private(socket)?)?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let Options { kubelet, driver } = options()?;
    let dir = kubelet.join("plugins").join(NAME);
    std::fs::create_dir_all(&dir)?;
    std::fs::create_dir_all(&driver.cdi)?;
    let endpoint = dir.join("dra.sock");
    let closing = CancellationToken::new();
    let service = DraPluginServer::new(driver.clone());
    let answer = move |request| service.clone().oneshot(request);
    tokio::spawn(ferrite_devices::serve(listen(&endpoint)?, answer, closing.clone()));
    driver.publish().await?;
    let registrar = RegistrationServer::new(RegisteredPlugin {
        kind: "DRAPlugin",
        name: NAME,
        endpoint,
        versions: &["v1.DRAPlugin"],
    });
    let answer = move |request| registrar.clone().oneshot(request);
    let socket = kubelet.join("plugins_registry").join(format!("{NAME}-reg.sock"));
    ferrite_devices::serve(listen(&socket)?, answer, closing).await;
    Ok(())
}
