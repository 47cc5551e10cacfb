//! A device plugin: small and whole. Its devices are device nodes of this machine that anybody may share, such as
//! `/dev/null`, under names of their own.
//!
//! ```console
//! $ cargo run -p ferrite-devices --example device_plugin -- --kubelet /var/lib/ferrite/kubelet \
//!       --resource example.com/device --device one=/dev/null --device two=/dev/zero
//! ```
//! A container that asks for `example.com/device: 1` has the device node at `/dev/<name>`, and the names of its devices
//! in the variable `DEVICES`. `sick NAME` and `well NAME` on standard input change a device's health.
//!
//! A plugin must come again when the kubelet restarts: the kubelet then removes all sockets of its directory, and makes
//! its own anew. `main` watches for that.

mod plugin;

use ferrite_devices::deviceplugin::device_plugin_server::DevicePluginServer;
use ferrite_devices::deviceplugin::registration_client::RegistrationClient;
use ferrite_devices::deviceplugin::{DevicePluginOptions, RegisterRequest};
use hyper_util::rt::TokioIo;
use plugin::Plugin;
use std::error::Error;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tower::ServiceExt;

struct Options {
    kubelet: PathBuf,
    resource: String,
    devices: Vec<(String, PathBuf)>,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let (mut kubelet, mut resource, mut devices) = (None, None, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--kubelet" => kubelet = Some(PathBuf::from(value)),
            "--resource" => resource = Some(value),
            "--device" => {
                let (name, path) = value.split_once('=').ok_or("--device is NAME=PATH")?;
                devices.push((name.to_owned(), path.into()));
            }
            _ => return Err(format!("unknown flag {flag}: there are --kubelet, --resource, --device").into()),
        }
    }
    Ok(Options {
        kubelet: kubelet.ok_or("--kubelet DIRECTORY is needed: the kubelet's root")?,
        resource: resource.ok_or("--resource NAME is needed, such as example.com/device")?,
        devices,
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let dir = options.kubelet.join("device-plugins");
    let name = format!("{}.sock", options.resource.replace('/', "_"));
    let plugin = Plugin::new(options.devices);
    let orders = plugin.clone();
    let listening = tokio::task::spawn_blocking(move || obey(&orders));
    loop {
        let closing = CancellationToken::new();
        let listener = UnixListener::from_std(ferrite_hostfs::listen_private(&dir.join(&name))?)?;
        let service = DevicePluginServer::new(plugin.clone());
        let answer = move |request| service.clone().oneshot(request);
        let served = tokio::spawn(ferrite_devices::serve(listener, answer, closing.clone()));
        let kubelet = dir.join("kubelet.sock");
        let known = inode(&kubelet);
        match register(&kubelet, &name, &options.resource).await {
            Ok(()) => println!("registered"),
            Err(error) => eprintln!("the kubelet did not register this plugin: {error}"),
        }
        while inode(&kubelet) == known && dir.join(&name).exists() && !listening.is_finished() {
            // A plugin of production gets an event from the kernel.
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        closing.cancel();
        served.await?;
        if listening.is_finished() {
            return Ok(());
        }
    }
}

/// Which file the kubelet's socket is: a kubelet that restarts makes a new one.
fn inode(socket: &Path) -> Option<(u64, i64)> {
    std::fs::symlink_metadata(socket).ok().map(|found| (found.ino(), found.ctime_nsec()))
}

async fn register(kubelet: &Path, endpoint: &str, resource: &str) -> Result<(), Box<dyn Error>> {
    let kubelet = kubelet.to_owned();
    let connect = tower::service_fn(move |_: http::Uri| {
        let kubelet = kubelet.clone();
        async move { UnixStream::connect(kubelet).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connect).await?;
    let request = RegisterRequest {
        version: "v1beta1".into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        options: Some(DevicePluginOptions::default()),
    };
    RegistrationClient::new(channel).register(request).await?;
    Ok(())
}

/// Follows the commands on standard input, to its end.
fn obey(plugin: &Plugin) {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("sick", device)) => plugin.set_health(device, false),
            Some(("well", device)) => plugin.set_health(device, true),
            _ => eprintln!("{line:?} is none of: sick NAME, well NAME"),
        }
    }
}
