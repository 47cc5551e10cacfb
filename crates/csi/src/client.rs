//! Calls to a driver and to a plugin's registration socket.

use crate::error::CallError;
use crate::registration::registration_client::RegistrationClient;
use crate::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use crate::v1::node_client::NodeClient;
use crate::v1::node_service_capability::Type;
use crate::v1::node_service_capability::rpc::Type as Rpc;
use crate::v1::*;
use hyper_util::rt::TokioIo;
use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

/// A driver has so long for one call, as upstream.
const PATIENCE: Duration = Duration::from_secs(120);
/// A registration socket has so long.
const REGISTRATION: Duration = Duration::from_secs(10);
/// Answers are short; a longer one is an error.
const MAX_ANSWER: usize = 1 << 20;

/// A connection for one call. A new one for each call, as upstream: it never outlives a driver that restarts.
fn connect(socket: &Arc<Path>) -> Channel {
    let path = socket.clone();
    // The address is never resolved: the connector knows where to go.
    Endpoint::from_static("http://localhost").connect_timeout(REGISTRATION).connect_with_connector_lazy(
        tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move { UnixStream::connect(&path).await.map(TokioIo::new) }
        }),
    )
}

/// Waits for a plugin's answer, and not for longer than `limit`.
pub async fn within<T>(
    call: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(limit, answer).await {
        Err(_) => Err(CallError::Silent { call }),
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(CallError::of(&status)),
    }
}

/// The capabilities of a driver's node service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeCapabilities(BTreeSet<i32>);

impl NodeCapabilities {
    /// Reads the driver's answer; capabilities that are not known here are left out.
    pub fn of(answer: &NodeGetCapabilitiesResponse) -> Self {
        let rpc = |one: &NodeServiceCapability| one.r#type.as_ref().map(|Type::Rpc(rpc)| rpc.r#type);
        Self(answer.capabilities.iter().filter_map(rpc).filter(|rpc| Rpc::try_from(*rpc).is_ok()).collect())
    }

    fn has(&self, rpc: Rpc) -> bool {
        self.0.contains(&rpc.into())
    }

    pub fn stage(&self) -> bool {
        self.has(Rpc::StageUnstageVolume)
    }

    pub fn stats(&self) -> bool {
        self.has(Rpc::GetVolumeStats)
    }

    pub fn expand(&self) -> bool {
        self.has(Rpc::ExpandVolume)
    }

    pub fn single_node_multi_writer(&self) -> bool {
        self.has(Rpc::SingleNodeMultiWriter)
    }

    /// The driver gives the volume's files to a group by itself.
    pub fn mount_group(&self) -> bool {
        self.has(Rpc::VolumeMountGroup)
    }
}

/// The node service of a driver behind a socket.
#[derive(Debug, Clone)]
pub struct Driver {
    socket: Arc<Path>,
}

macro_rules! node_calls {
    ($($(#[$doc:meta])* $name:ident $request:ident $response:ident;)*) => {
        $($(#[$doc])* pub async fn $name(&self, request: $request) -> Result<$response, CallError> {
            let mut client = self.node();
            within(stringify!($name), PATIENCE, client.$name(request)).await
        })*
    };
}

impl Driver {
    /// Does not touch the socket yet.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.into() }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(connect(&self.socket)).max_decoding_message_size(MAX_ANSWER)
    }

    node_calls! {
        node_get_info NodeGetInfoRequest NodeGetInfoResponse;
        node_stage_volume NodeStageVolumeRequest NodeStageVolumeResponse;
        node_unstage_volume NodeUnstageVolumeRequest NodeUnstageVolumeResponse;
        node_publish_volume NodePublishVolumeRequest NodePublishVolumeResponse;
        node_unpublish_volume NodeUnpublishVolumeRequest NodeUnpublishVolumeResponse;
        node_expand_volume NodeExpandVolumeRequest NodeExpandVolumeResponse;
        node_get_volume_stats NodeGetVolumeStatsRequest NodeGetVolumeStatsResponse;
    }

    pub async fn capabilities(&self) -> Result<NodeCapabilities, CallError> {
        let mut client = self.node();
        let request = NodeGetCapabilitiesRequest {};
        let answer = within("node_get_capabilities", PATIENCE, client.node_get_capabilities(request)).await?;
        Ok(NodeCapabilities::of(&answer))
    }
}

/// A plugin's registration socket.
#[derive(Debug, Clone)]
pub struct Registrar {
    socket: Arc<Path>,
}

impl Registrar {
    /// Does not touch the socket yet.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.into() }
    }

    fn client(&self) -> RegistrationClient<Channel> {
        RegistrationClient::new(connect(&self.socket)).max_decoding_message_size(MAX_ANSWER)
    }

    pub async fn info(&self) -> Result<PluginInfo, CallError> {
        let mut client = self.client();
        within("GetInfo", REGISTRATION, client.get_info(InfoRequest {})).await
    }

    /// Tells the plugin that it is registered, or why it is not.
    pub async fn notify(&self, problem: Option<String>) -> Result<(), CallError> {
        let status =
            RegistrationStatus { plugin_registered: problem.is_none(), error: problem.unwrap_or_default() };
        let mut client = self.client();
        let told = client.notify_registration_status(status);
        within("NotifyRegistrationStatus", REGISTRATION, told).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_capabilities_are_left_out() {
        let rpc = |kind: i32| NodeServiceCapability {
            r#type: Some(Type::Rpc(node_service_capability::Rpc { r#type: kind })),
        };
        let answer = NodeGetCapabilitiesResponse {
            capabilities: vec![rpc(1), rpc(3), rpc(77), NodeServiceCapability { r#type: None }],
        };
        let found = NodeCapabilities::of(&answer);
        assert!(found.stage() && found.expand());
        assert!(!found.stats() && !found.mount_group() && !found.single_node_multi_writer());
    }

    #[tokio::test]
    async fn a_socket_that_nobody_serves_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Driver::new(&dir.path().join("none.sock")).capabilities().await.unwrap_err();
        assert!(!missing.is_final(), "{missing}");
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(Registrar::new(&file).info().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_never_answers_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hung.sock");
        let _listener = tokio::net::UnixListener::bind(&path).unwrap();
        let hung = Driver::new(&path).node_get_info(NodeGetInfoRequest {}).await.unwrap_err();
        assert_eq!(hung, CallError::Silent { call: "node_get_info" });
    }
}
