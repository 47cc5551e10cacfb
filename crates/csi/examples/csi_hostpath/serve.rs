//! The two sockets: the driver's own, and the one by which it registers with the kubelet.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ferrite_csi::registration::registration_server::RegistrationServer;
use ferrite_csi::v1::identity_server::{Identity, IdentityServer};
use ferrite_csi::v1::node_server::NodeServer;
use ferrite_csi::v1::*;
use ferrite_csi::{RegisteredPlugin, serve as serve_socket};
use hyper::body::Incoming;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tower::ServiceExt;

use crate::NAME;
use crate::node::HostPath;
use crate::volumes::Volumes;

/// Serves until the process ends.
pub async fn serve(kubelet: &Path, node: &str, volumes: Arc<Volumes>) -> io::Result<()> {
    let own = kubelet.join("plugins").join(NAME);
    std::fs::create_dir_all(&own)?;
    let endpoint = own.join("csi.sock");
    let registry = kubelet.join("plugins_registry");
    std::fs::create_dir_all(&registry)?;
    let driver = NodeServer::new(HostPath::new(node.to_owned(), volumes));
    let (service, registration) = (
        UnixListener::from_std(ferrite_hostfs::listen_private(&endpoint)?)?,
        registry.join(format!("{NAME}-reg.sock")),
    );
    let registrar = RegistrationServer::new(RegisteredPlugin {
        kind: "CSIPlugin",
        name: NAME,
        endpoint,
        versions: &["1.0.0"],
    });
    // The driver answers before the kubelet hears of it.
    let registered = UnixListener::from_std(ferrite_hostfs::listen_private(&registration)?)?;
    println!("serving at {}", own.display());
    let driver = move |request: http::Request<Incoming>| {
        let driver = driver.clone();
        async move {
            match request.uri().path().starts_with("/csi.v1.Identity/") {
                true => IdentityServer::new(About).oneshot(request).await,
                false => driver.oneshot(request).await,
            }
        }
    };
    let registrar = move |request| registrar.clone().oneshot(request);
    let never = CancellationToken::new();
    tokio::join!(serve_socket(service, driver, never.clone()), serve_socket(registered, registrar, never));
    Ok(())
}

#[derive(Clone)]
struct About;

#[tonic::async_trait]
impl Identity for About {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Response::new(GetPluginInfoResponse {
            name: NAME.into(),
            vendor_version: version,
            ..GetPluginInfoResponse::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        use plugin_capability::{Service, Type, service};
        let topology = service::Type::VolumeAccessibilityConstraints;
        let service = Type::Service(Service { r#type: topology.into() });
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities: vec![PluginCapability { r#type: Some(service) }],
        }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
