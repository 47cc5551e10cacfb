//! Drivers of dynamic resources that register themselves, and the ResourceSlices of those that are gone.

use super::{Claims, health};
use crate::plugin_sockets::{PluginHandler, RegistrationError};
use async_trait::async_trait;
use ferrite_client::{Api, Backoff, is_not_found, message_of};
use ferrite_csi::registration::PluginInfo;
use ferrite_devices::{DraPlugin, DraVersion};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, Preconditions};
use std::path::Path;
use std::time::Duration;

/// A driver has so long to come back before its slices are removed, as upstream.
const ABSENCE: Duration = Duration::from_secs(30);
/// Instances of one driver: the old and the new one while it is replaced.
const MOST_INSTANCES: usize = 8;

pub(super) fn backoff() -> Backoff {
    Backoff::new(Duration::from_secs(1), Duration::from_secs(60), 0.1)
}

/// The handler of plugins of type `DRAPlugin`.
pub(crate) struct DraPlugins(pub Claims);

#[async_trait]
impl PluginHandler for DraPlugins {
    fn plugin_type(&self) -> &'static str {
        "DRAPlugin"
    }

    async fn register(&self, info: &PluginInfo, endpoint: &Path) -> Result<(), RegistrationError> {
        let refused = |problem: String| RegistrationError::Refused(problem);
        let problems = ferrite_api::meta_validation::dns1123_subdomain(&info.name);
        if info.name.len() > 63 || !problems.is_empty() {
            return Err(refused(format!("{:?} is no name of a driver", info.name)));
        }
        let Some(version) = DraVersion::choose(&info.supported_versions) else {
            return Err(refused(format!(
                "none of the DRA gRPC API versions is supported: {:?}; this kubelet speaks v1.DRAPlugin and v1beta1.DRAPlugin",
                info.supported_versions
            )));
        };
        let plugin = DraPlugin::new(endpoint, version);
        let waiting = {
            let mut inner = self.0.lock();
            let instances = inner.drivers.entry(info.name.clone()).or_default();
            instances.retain(|known| known.socket() != endpoint);
            if instances.len() >= MOST_INSTANCES {
                return Err(refused(format!("driver {} has too many instances", info.name)));
            }
            instances.push(plugin.clone());
            inner.waiting.remove(&info.name).unwrap_or_default()
        };
        tracing::info!(driver = info.name, endpoint = %endpoint.display(), ?version, "DRA driver registered");
        waiting.iter().for_each(|pod| (self.0.0.wake)(pod));
        if info.supported_versions.iter().any(|version| version == health::SERVICE) {
            self.0.0.scope.spawn(self.0.clone().watch_health(info.name.clone(), plugin));
        }
        Ok(())
    }

    /// Of several instances the oldest one is gone.
    async fn deregister(&self, name: &str) {
        let is_gone = {
            let mut inner = self.0.lock();
            let Some(instances) = inner.drivers.get_mut(name) else { return };
            if !instances.is_empty() {
                instances.remove(0);
            }
            let is_gone = instances.is_empty();
            if is_gone {
                inner.drivers.remove(name);
            }
            is_gone
        };
        tracing::info!(driver = name, "DRA driver gone");
        if is_gone {
            let (claims, name) = (self.0.clone(), name.to_owned());
            self.0.0.scope.spawn(async move { claims.remove_slices(Some(&name)).await });
        }
    }
}

impl Claims {
    /// Removes the slices of drivers that do not come, after the time they have for that. Pods that get such a driver's
    /// devices would wait on this node.
    pub(crate) async fn remove_slices(&self, driver: Option<&str>) {
        tokio::time::sleep(ABSENCE).await;
        let mut backoff = backoff();
        while let Err(error) = self.try_remove_slices(driver).await {
            let error = message_of(&error);
            tracing::warn!(error, "could not remove the ResourceSlices of absent drivers; will try again");
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    async fn try_remove_slices(&self, driver: Option<&str>) -> Result<(), kube::Error> {
        let is_absent = |name: &str| !self.lock().drivers.contains_key(name);
        if driver.is_some_and(|driver| !is_absent(driver)) {
            return Ok(());
        }
        let api = Api::<ResourceSlice>::all(self.0.client.clone());
        let params = ListParams::default().fields(&format!("spec.nodeName={}", self.0.node_name));
        for slice in api.list(&params).await?.items {
            let of = &slice.spec.driver;
            if driver.is_some_and(|driver| driver != of) || !is_absent(of) {
                continue;
            }
            let preconditions = Preconditions { uid: slice.metadata.uid.clone(), ..Preconditions::default() };
            let params = DeleteParams::default().preconditions(preconditions);
            match api.delete(slice.metadata.name.as_deref().unwrap_or_default(), &params).await {
                Err(error) if !is_not_found(&error) => return Err(error),
                _ => tracing::info!(
                    driver = of,
                    slice = slice.metadata.name,
                    "removed a slice of an absent driver"
                ),
            }
        }
        Ok(())
    }
}
