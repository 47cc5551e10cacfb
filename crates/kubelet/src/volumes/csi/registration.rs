//! CSI drivers that register themselves with this kubelet.

use super::Csi;
use super::ledger::VolumeId;
use super::paths::check_name;
use crate::plugin_sockets::{PluginHandler, RegistrationError};
use async_trait::async_trait;
use ferrite_csi::Driver;
use ferrite_csi::registration::PluginInfo;
use ferrite_csi::v1::NodeGetInfoRequest;
use std::path::Path;

/// The handler of plugins of type `CSIPlugin`.
pub(crate) struct CsiPlugins(pub Csi);

#[async_trait]
impl PluginHandler for CsiPlugins {
    fn plugin_type(&self) -> &'static str {
        "CSIPlugin"
    }

    async fn register(&self, info: &PluginInfo, endpoint: &Path) -> Result<(), RegistrationError> {
        let refused = |problem: String| RegistrationError::Refused(problem);
        check_name(&info.name).map_err(|e| refused(e.to_string()))?;
        if info.name.len() > 63 {
            return Err(refused(format!("the driver name {:?} is longer than 63 characters", info.name)));
        }
        check_versions(&info.supported_versions).map_err(refused)?;
        // A driver of this name that has just gone is forgotten first, or not at all.
        let _alone = self.0.exclusive(&VolumeId::new(&info.name, "")).await;
        let driver = Driver::new(endpoint);
        let node = driver.node_get_info(NodeGetInfoRequest {}).await.map_err(|e| refused(e.to_string()))?;
        self.0.install(&info.name, &node).await.map_err(|e| refused(e.to_string()))?;
        self.0.shared.drivers.set(&info.name, driver);
        tracing::info!(driver = info.name, endpoint = %endpoint.display(), "CSI driver registered");
        Ok(())
    }

    async fn deregister(&self, name: &str) {
        self.0.shared.drivers.remove(name);
        tracing::info!(driver = name, "CSI driver gone");
        // The API may not answer: other plugins do not wait for it.
        let (csi, name) = (self.0.clone(), name.to_owned());
        self.0.shared.scope.spawn(async move {
            let _alone = csi.exclusive(&VolumeId::new(&name, "")).await;
            if !csi.shared.drivers.has(&name) {
                csi.uninstall(&name).await;
            }
        });
    }
}

/// Fails unless one of the versions is of the first major version: `1.0.0`, `v1.2`.
fn check_versions(versions: &[String]) -> Result<(), String> {
    let first = |version: &String| {
        let major = version.strip_prefix('v').unwrap_or(version).split('.').next();
        major == Some("1")
    };
    match versions.iter().any(first) {
        true => Ok(()),
        false => Err(format!(
            "none of the CSI versions reported by this driver are supported: {versions:?}; this kubelet speaks v1"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_of_the_first_version_are_taken() {
        for (versions, taken) in [
            (vec!["1.0.0"], true),
            (vec!["v1.9"], true),
            (vec!["0.3.0", "1.2.0"], true),
            (vec!["0.3.0"], false),
            (vec!["10.0.0"], false),
            (vec![], false),
        ] {
            let versions: Vec<String> = versions.into_iter().map(str::to_owned).collect();
            assert_eq!(check_versions(&versions).is_ok(), taken, "{versions:?}");
        }
    }
}
