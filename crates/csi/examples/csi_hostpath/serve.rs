//! The two sockets: the driver's own, and the one by which it registers with the kubelet.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_csi::registration::registration_server::{Registration, RegistrationServer};
use ferrite_csi::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use ferrite_csi::v1::identity_server::{Identity, IdentityServer};
use ferrite_csi::v1::node_server::NodeServer;
use ferrite_csi::v1::*;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tonic::body::Body;
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
    let registrar = RegistrationServer::new(Registrar { endpoint });
    // The driver answers before the kubelet hears of it.
    let registered = UnixListener::from_std(ferrite_hostfs::listen_private(&registration)?)?;
    println!("serving at {}", own.display());
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = service.accept() => {
                let (socket, driver) = (accepted?.0, driver.clone());
                connections.spawn(connection(socket, move |request: http::Request<Incoming>| {
                    let driver = driver.clone();
                    async move {
                        match request.uri().path().starts_with("/csi.v1.Identity/") {
                            true => IdentityServer::new(About).oneshot(request).await,
                            false => driver.oneshot(request).await,
                        }
                    }
                }));
            }
            accepted = registered.accept() => {
                let (socket, registrar) = (accepted?.0, registrar.clone());
                connections.spawn(connection(socket, move |request| registrar.clone().oneshot(request)));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection<F, A>(socket: tokio::net::UnixStream, answer: F)
where
    F: Fn(http::Request<Incoming>) -> A,
    A: Future<Output = Result<http::Response<Body>, Infallible>> + Send + 'static,
{
    let service = hyper::service::service_fn(answer);
    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    if let Err(error) = builder.serve_connection(TokioIo::new(socket), service).await {
        eprintln!("a connection ended badly: {error}");
    }
}

struct Registrar {
    endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".into(),
            name: NAME.into(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec!["1.0.0".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        match status.plugin_registered {
            true => println!("registered"),
            false => eprintln!("the kubelet did not register this driver: {}", status.error),
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
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
