//! Calls to drivers of dynamic resources.

use crate::client::channel;
use crate::dra::{
    Claim, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use crate::dra_health::dra_resource_health_client::DraResourceHealthClient;
use crate::dra_health::{DeviceHealth, NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use ferrite_csi::{CallError, within};
use http::uri::PathAndQuery;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tonic::client::Grpc;
use tonic::{IntoRequest, Status, Streaming};
use tonic_prost::ProstCodec;

/// A driver has so long for one call, as upstream.
const PATIENCE: Duration = Duration::from_secs(45);
const MAX_ANSWER: usize = 1 << 20;

/// The version of the contract that a driver speaks. The messages are the same, the names of the services differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraVersion {
    V1,
    V1Beta1,
}

impl DraVersion {
    /// The newest of the versions that a driver registers with.
    pub fn choose(supported: &[String]) -> Option<Self> {
        let has = |name: &str| supported.iter().any(|version| version == name);
        if has("v1.DRAPlugin") {
            return Some(Self::V1);
        }
        has("v1beta1.DRAPlugin").then_some(Self::V1Beta1)
    }

    fn path(self, method: &'static str) -> PathAndQuery {
        PathAndQuery::from_static(match (self, method) {
            (Self::V1, "NodePrepareResources") => {
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
            }
            (Self::V1, _) => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            (Self::V1Beta1, "NodePrepareResources") => {
                "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources"
            }
            (Self::V1Beta1, _) => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
        })
    }
}

/// Lists of the health of a driver's devices, whenever it sends one.
pub struct HealthUpdates(Streaming<NodeWatchResourcesResponse>);

impl HealthUpdates {
    /// Waits for the next list; none when the driver has ended the stream.
    pub async fn next(&mut self) -> Result<Option<Vec<DeviceHealth>>, CallError> {
        let next = self.0.message().await.map_err(|status| CallError::of(&status))?;
        Ok(next.map(|list| list.devices))
    }
}

/// A driver behind a socket. Every call has a connection of its own, and never outlives a driver that restarts.
#[derive(Debug, Clone)]
pub struct DraPlugin {
    socket: Arc<Path>,
    version: DraVersion,
}

impl DraPlugin {
    /// Does not touch the socket yet.
    pub fn new(socket: &Path, version: DraVersion) -> Self {
        Self { socket: socket.into(), version }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    async fn call<A, B>(&self, method: &'static str, request: A) -> Result<B, CallError>
    where
        A: prost::Message + Send + Sync + 'static,
        B: prost::Message + Default + Send + Sync + 'static,
    {
        let mut client = Grpc::new(channel(&self.socket)).max_decoding_message_size(MAX_ANSWER);
        let path = self.version.path(method);
        within(method, PATIENCE, async move {
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            client.unary(request.into_request(), path, ProstCodec::<A, B>::default()).await
        })
        .await
    }

    /// Asks for the health of the driver's devices. A driver that never answers blocks only this caller.
    pub async fn watch_health(&self) -> Result<HealthUpdates, CallError> {
        let client = DraResourceHealthClient::new(channel(&self.socket));
        let mut client = client.max_decoding_message_size(MAX_ANSWER);
        let stream = client.node_watch_resources(NodeWatchResourcesRequest {}).await;
        Ok(HealthUpdates(stream.map_err(|status| CallError::of(&status))?.into_inner()))
    }

    /// Answers by UID of the claim.
    pub async fn prepare(
        &self,
        claims: Vec<Claim>,
    ) -> Result<BTreeMap<String, NodePrepareResourceResponse>, CallError> {
        let request = NodePrepareResourcesRequest { claims };
        let answer: NodePrepareResourcesResponse = self.call("NodePrepareResources", request).await?;
        Ok(answer.claims)
    }

    /// Answers by UID of the claim.
    pub async fn unprepare(
        &self,
        claims: Vec<Claim>,
    ) -> Result<BTreeMap<String, NodeUnprepareResourceResponse>, CallError> {
        let request = NodeUnprepareResourcesRequest { claims };
        let answer: NodeUnprepareResourcesResponse = self.call("NodeUnprepareResources", request).await?;
        Ok(answer.claims)
    }
}
