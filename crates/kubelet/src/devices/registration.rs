//! Plugins come and go: the socket at which they register, and the list of devices that each keeps sending.

use super::state::Device;
use super::{Devices, MOST_RESOURCES, Registered};
use crate::plugin_sockets::{PluginHandler, RegistrationError};
use ferrite_api::meta_validation::qualified_name;
use ferrite_csi::registration::PluginInfo;
use ferrite_devices::deviceplugin::registration_server::{Registration, RegistrationServer};
use ferrite_devices::deviceplugin::{self, Empty, RegisterRequest};
use ferrite_devices::{CallError, DevicePlugin, Request, Response, Status, async_trait};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixListener;
use tower::ServiceExt;

const VERSION: &str = "v1beta1";
const SOCKET: &str = "kubelet.sock";
/// Lists of one plugin that come faster wait: each may be written to the disk and to the API.
const BETWEEN_LISTS: Duration = Duration::from_millis(100);
/// Lists that are read in that time; the last one counts. More of them wait in the plugin.
const MOST_LISTS: usize = 100;

#[derive(Debug, thiserror::Error)]
enum RegisterError {
    #[error("requested API version {0:?} is not supported by kubelet. Supported version is [{VERSION:?}]")]
    Version(String),
    #[error("the ResourceName {0:?} is invalid")]
    Name(String),
    #[error("the endpoint {0:?} is no name of a socket in the directory of device plugins")]
    Endpoint(String),
    #[error("{MOST_RESOURCES} resources are registered already; remove plugins that are not used")]
    TooMany,
    #[error("failed to get device plugin options: {0}")]
    Options(#[from] CallError),
}

/// The rule of extended resource names, as upstream.
pub(crate) fn is_extended_resource(name: &str) -> bool {
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
        && qualified_name(&format!("requests.{name}")).is_empty()
}

fn check(name: &str, version: bool, said: impl Fn() -> String) -> Result<(), RegisterError> {
    if !version {
        return Err(RegisterError::Version(said()));
    }
    if !is_extended_resource(name) {
        return Err(RegisterError::Name(name.to_owned()));
    }
    Ok(())
}

/// The socket of a plugin: a plain name, so that nothing outside the directory is reached.
fn endpoint(dir: &Path, name: &str) -> Result<PathBuf, RegisterError> {
    let plain = !name.is_empty() && !name.contains(['/', '\0']) && !matches!(name, "." | ".." | SOCKET);
    match plain {
        true => Ok(dir.join(name)),
        false => Err(RegisterError::Endpoint(name.to_owned())),
    }
}

/// Removes sockets that were left in the directory, as upstream: plugins notice, and come again.
fn remove_sockets(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.path().symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

impl Devices {
    /// Listens for plugins that register, until the scope ends.
    pub(crate) fn serve(&self) -> io::Result<()> {
        let dir = &self.0.dir;
        remove_sockets(dir)?;
        // Through a descriptor: the path of a socket may have 107 characters only.
        let held = std::fs::File::open(dir)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join(SOCKET);
        let listener = UnixListener::from_std(ferrite_hostfs::listen_private(&path)?)?;
        let service = RegistrationServer::new(Registrar(self.clone()));
        let answer = move |request| service.clone().oneshot(request);
        let closing = self.0.scope.token().clone();
        self.0.scope.spawn_graceful(ferrite_devices::serve(listener, answer, closing));
        self.0.scope.spawn(self.clone().forget_plugins());
        Ok(())
    }

    /// Takes a plugin. One that had the resource before is replaced.
    async fn register(&self, resource: &str, socket: &Path) -> Result<(), RegisterError> {
        let plugin = DevicePlugin::new(socket);
        let options = plugin.options().await?;
        let (generation, scope) = {
            let mut inner = self.lock();
            if !inner.state.has_resource(resource) && inner.state.resource_count() >= MOST_RESOURCES {
                return Err(RegisterError::TooMany);
            }
            inner.generation += 1;
            let (generation, scope) = (inner.generation, self.0.scope.child());
            inner.state.connected(resource);
            let one = Registered { plugin: plugin.clone(), options, generation, scope: scope.clone() };
            if let Some(old) = inner.plugins.insert(resource.to_owned(), one) {
                old.scope.cancel();
            }
            (generation, scope)
        };
        tracing::info!(resource, socket = %socket.display(), "device plugin registered");
        scope.spawn(self.clone().follow(resource.to_owned(), plugin, generation));
        Ok(())
    }

    /// Follows the list of a plugin's devices until the plugin is gone.
    async fn follow(self, resource: String, plugin: DevicePlugin, generation: u64) {
        let ended = self.updates(&resource, &plugin, generation).await;
        match ended {
            Ok(()) => tracing::warn!(resource, "the device plugin ended its list"),
            Err(error) => tracing::warn!(resource, %error, "the device plugin is gone"),
        }
        self.disconnect(&resource, Some(generation)).await;
    }

    async fn updates(&self, resource: &str, plugin: &DevicePlugin, generation: u64) -> Result<(), CallError> {
        let mut updates = plugin.list_and_watch().await?;
        while let Some(devices) = updates.next().await? {
            self.update(resource, generation, devices).await;
            let pause = tokio::time::Instant::now() + BETWEEN_LISTS;
            let (mut latest, mut count) = (None, 0);
            while count < MOST_LISTS
                && let Ok(next) = tokio::time::timeout_at(pause, updates.next()).await
            {
                let Some(devices) = next? else { return Ok(()) };
                latest = Some(devices);
                count += 1;
            }
            if let Some(devices) = latest {
                self.update(resource, generation, devices).await;
            }
            tokio::time::sleep_until(pause).await;
        }
        Ok(())
    }

    async fn update(&self, resource: &str, generation: u64, devices: Vec<deviceplugin::Device>) {
        let devices: BTreeMap<String, Device> = devices
            .into_iter()
            .map(|device| {
                let nodes = device.topology.into_iter().flat_map(|t| t.nodes).map(|node| node.id).collect();
                (device.id, Device { healthy: device.health == "Healthy", nodes })
            })
            .collect();
        let (pods, is_same) = {
            let mut inner = self.lock();
            if inner.plugins.get(resource).is_none_or(|one| one.generation != generation) {
                return;
            }
            let before = (inner.state.capacity(), inner.state.registered());
            let pods = inner.state.update(resource, devices);
            (pods, before == (inner.state.capacity(), inner.state.registered()))
        };
        if !is_same {
            self.save_or_warn().await;
            self.0.refresh.notify_one();
        }
        for pod in pods {
            (self.0.wake)(&pod);
        }
    }

    /// The plugin is gone, if it is still the one that is meant.
    async fn disconnect(&self, resource: &str, generation: Option<u64>) {
        {
            let mut inner = self.lock();
            let known = inner.plugins.get(resource).map(|one| one.generation);
            if known.is_none() || generation.is_some_and(|generation| known != Some(generation)) {
                return;
            }
            let now = self.0.clock.now();
            inner.state.disconnected(resource, now);
            let removed = inner.plugins.remove(resource);
            // The task that follows the plugin's list ends by itself, and may be the caller.
            if let Some(one) = removed.filter(|_| generation.is_none()) {
                one.scope.cancel();
            }
        }
        self.0.gone.notify_one();
        self.save_or_warn().await;
        self.0.refresh.notify_one();
    }
}

/// The kubelet's registration service.
struct Registrar(Devices);

#[async_trait]
impl Registration for Registrar {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let asked = request.into_inner();
        let (resource, devices) = (&asked.resource_name, &self.0);
        let taken = async {
            check(resource, asked.version == VERSION, || asked.version.clone())?;
            let socket = endpoint(&devices.0.dir, &asked.endpoint)?;
            devices.register(resource, &socket).await
        };
        match taken.await {
            Ok(()) => Ok(Response::new(Empty {})),
            Err(error) => {
                tracing::warn!(resource, %error, "a device plugin was not registered");
                Err(Status::unknown(error.to_string()))
            }
        }
    }
}

/// The handler of plugins of type `DevicePlugin` in the directory of all plugins.
pub(crate) struct DevicePlugins(pub Devices);

#[async_trait]
impl PluginHandler for DevicePlugins {
    fn plugin_type(&self) -> &'static str {
        "DevicePlugin"
    }

    async fn register(&self, info: &PluginInfo, endpoint: &Path) -> Result<(), RegistrationError> {
        let refused = |e: RegisterError| RegistrationError::Refused(e.to_string());
        let versions = &info.supported_versions;
        let known = versions.iter().any(|version| version == VERSION);
        check(&info.name, known, || versions.join(", ")).map_err(refused)?;
        self.0.register(&info.name, endpoint).await.map_err(refused)
    }

    async fn deregister(&self, name: &str) {
        self.0.disconnect(name, None).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_resources_and_sockets() {
        for (name, fine) in [
            ("example.com/gpu", true),
            ("example.com/GPU-1_a.b", true),
            ("gpu", false),
            ("kubernetes.io/gpu", false),
            ("x.kubernetes.io/gpu", false),
            ("requests.example.com/gpu", false),
            ("example.com/", false),
            ("example.com/a/b", false),
            ("", false),
        ] {
            assert_eq!(is_extended_resource(name), fine, "{name}");
        }
        let long = format!("example.com/{}", "x".repeat(64));
        assert!(!is_extended_resource(&long));
        let dir = Path::new("/d");
        assert_eq!(endpoint(dir, "gpu.sock").unwrap(), dir.join("gpu.sock"));
        for bad in ["", ".", "..", "../x.sock", "/x.sock", "a/b.sock", "kubelet.sock"] {
            assert!(endpoint(dir, bad).is_err(), "{bad}");
        }
    }
}
