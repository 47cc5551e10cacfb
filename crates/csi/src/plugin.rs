//! The plugin's side of registration.

use std::path::PathBuf;

use tonic::{Request, Response, Status};

use crate::registration::registration_server::Registration;
use crate::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};

/// Tells the kubelet which plugin it has found, and prints the kubelet's verdict.
#[derive(Debug, Clone)]
pub struct RegisteredPlugin {
    /// `CSIPlugin` or `DRAPlugin`.
    pub kind: &'static str,
    pub name: &'static str,
    /// The socket at which the plugin answers.
    pub endpoint: PathBuf,
    pub versions: &'static [&'static str],
}

#[tonic::async_trait]
impl Registration for RegisteredPlugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: self.kind.into(),
            name: self.name.into(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: self.versions.iter().map(|version| (*version).to_owned()).collect(),
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
