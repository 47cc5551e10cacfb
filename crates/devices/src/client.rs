//! Calls to device plugins.

use crate::deviceplugin::device_plugin_client::DevicePluginClient;
use crate::deviceplugin::*;
use ferrite_csi::{CallError, within};
use hyper_util::rt::TokioIo;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

/// Time limit for connecting to a plugin and reading its options, as upstream.
const CONNECT: Duration = Duration::from_secs(10);
/// As upstream.
const PRE_START: Duration = Duration::from_secs(30);
/// Upstream waits for ever, and with it every pod that arrives.
const ALLOCATE: Duration = Duration::from_secs(60);
const PREFER: Duration = Duration::from_secs(10);
/// A list of devices may be long.
const MAX_LIST: usize = 4 << 20;
const MAX_ANSWER: usize = 1 << 20;

/// Connects to a socket that is a socket: a link is not followed, and nothing else is opened.
async fn connect(path: PathBuf) -> io::Result<TokioIo<UnixStream>> {
    let found = open(&path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    let held = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    if !std::fs::metadata(&held)?.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is no socket", path.display())));
    }
    UnixStream::connect(&held).await.map(TokioIo::new)
}

pub(crate) fn channel(socket: &Arc<Path>) -> Channel {
    let path = socket.clone();
    // The address is never resolved: the connector knows where to go.
    Endpoint::from_static("http://localhost")
        .connect_timeout(CONNECT)
        // Bytes that a plugin may send before we read them.
        .initial_stream_window_size(1 << 16)
        .initial_connection_window_size(1 << 17)
        .connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| connect(path.to_path_buf())))
}

/// A device plugin behind a socket, with one connection for as long as it lasts.
#[derive(Debug, Clone)]
pub struct DevicePlugin {
    socket: Arc<Path>,
    channel: Channel,
}

/// The list of a plugin's devices, whenever it changes.
pub struct DeviceUpdates(Streaming<ListAndWatchResponse>);

impl DeviceUpdates {
    /// Waits for the next list; none when the plugin has ended the stream.
    pub async fn next(&mut self) -> Result<Option<Vec<Device>>, CallError> {
        let next = self.0.message().await.map_err(|status| CallError::of(&status))?;
        Ok(next.map(|list| list.devices))
    }
}

impl DevicePlugin {
    /// Does not touch the socket yet.
    ///
    /// Must be called within a tokio runtime.
    pub fn new(socket: &Path) -> Self {
        let socket: Arc<Path> = socket.into();
        Self { channel: channel(&socket), socket }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn client(&self, limit: usize) -> DevicePluginClient<Channel> {
        DevicePluginClient::new(self.channel.clone()).max_decoding_message_size(limit)
    }

    pub async fn options(&self) -> Result<DevicePluginOptions, CallError> {
        let mut client = self.client(MAX_ANSWER);
        within("GetDevicePluginOptions", CONNECT, client.get_device_plugin_options(Empty {})).await
    }

    /// Asks for the devices. A plugin that never answers blocks only this caller.
    pub async fn list_and_watch(&self) -> Result<DeviceUpdates, CallError> {
        let mut client = self.client(MAX_LIST);
        let stream = client.list_and_watch(Empty {}).await.map_err(|status| CallError::of(&status))?;
        Ok(DeviceUpdates(stream.into_inner()))
    }

    /// Allocates devices. The response has the settings with which one container uses them.
    pub async fn allocate(&self, devices: Vec<String>) -> Result<AllocateResponse, CallError> {
        let request =
            AllocateRequest { container_requests: vec![ContainerAllocateRequest { devices_ids: devices }] };
        let mut client = self.client(MAX_ANSWER);
        within("Allocate", ALLOCATE, client.allocate(request)).await
    }

    /// Returns the devices that the plugin prefers among the available ones.
    pub async fn preferred(
        &self,
        available: Vec<String>,
        must_include: Vec<String>,
        size: usize,
    ) -> Result<Vec<String>, CallError> {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_i_ds: available,
                must_include_device_i_ds: must_include,
                allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
            }],
        };
        let mut client = self.client(MAX_ANSWER);
        let answer =
            within("GetPreferredAllocation", PREFER, client.get_preferred_allocation(request)).await?;
        Ok(answer.container_responses.into_iter().next().map(|one| one.device_i_ds).unwrap_or_default())
    }

    pub async fn pre_start(&self, devices: Vec<String>) -> Result<(), CallError> {
        let mut client = self.client(MAX_ANSWER);
        let started = client.pre_start_container(PreStartContainerRequest { devices_ids: devices });
        within("PreStartContainer", PRE_START, started).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_link_is_not_followed_and_a_file_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real.sock");
        let _listener = tokio::net::UnixListener::bind(&real).unwrap();
        let link = dir.path().join("link.sock");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let file = dir.path().join("file.sock");
        std::fs::write(&file, "").unwrap();
        let fifo = dir.path().join("fifo.sock");
        nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        assert!(connect(real).await.is_ok());
        for path in [link, file, fifo, dir.path().join("none.sock")] {
            assert!(connect(path.clone()).await.is_err(), "{}", path.display());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_never_answers_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hung.sock");
        let _listener = tokio::net::UnixListener::bind(&path).unwrap();
        let plugin = DevicePlugin::new(&path);
        assert_eq!(plugin.options().await, Err(CallError::Silent { call: "GetDevicePluginOptions" }));
        assert_eq!(plugin.allocate(vec![]).await, Err(CallError::Silent { call: "Allocate" }));
        assert_eq!(plugin.pre_start(vec![]).await, Err(CallError::Silent { call: "PreStartContainer" }));
    }
}
