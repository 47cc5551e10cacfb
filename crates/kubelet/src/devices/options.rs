//! The container options of devices, and their part of container statuses.

use super::state::{ContainerDevices, DeviceState};
use ferrite_cri::v1::{CdiDevice, Device, Mount};
use k8s_openapi::api::core::v1::{ResourceHealth, ResourceStatus};
use std::collections::{BTreeMap, BTreeSet};

/// Settings of a container that its devices need.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ContainerOptions {
    pub env: Vec<(String, String)>,
    pub mounts: Vec<Mount>,
    pub devices: Vec<Device>,
    pub annotations: BTreeMap<String, String>,
    pub cdi_devices: Vec<CdiDevice>,
}

/// Combines the answers of all plugins. As upstream, the first one to name a variable, a path or an annotation wins.
pub(crate) fn container_options(given: &ContainerDevices) -> ContainerOptions {
    let mut options = ContainerOptions::default();
    let (mut names, mut mounted, mut nodes) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut cdi = BTreeSet::new();
    for (resource, one) in given {
        let response = &one.response;
        for (name, value) in &response.envs {
            match names.insert(name.as_str()) {
                true => options.env.push((name.clone(), value.clone())),
                false => tracing::warn!(resource, name, "two device plugins set one environment variable"),
            }
        }
        for mount in &response.mounts {
            if mounted.insert(mount.container_path.as_str()) {
                options.mounts.push(Mount {
                    container_path: mount.container_path.clone(),
                    host_path: mount.host_path.clone(),
                    readonly: mount.read_only,
                    ..Mount::default()
                });
            }
        }
        for device in &response.devices {
            if nodes.insert(device.container_path.as_str()) {
                options.devices.push(Device {
                    container_path: device.container_path.clone(),
                    host_path: device.host_path.clone(),
                    permissions: device.permissions.clone(),
                });
            }
        }
        for (name, value) in &response.annotations {
            options.annotations.entry(name.clone()).or_insert_with(|| value.clone());
        }
        for device in &response.cdi_devices {
            if cdi.insert(device.name.as_str()) {
                options.cdi_devices.push(CdiDevice { name: device.name.clone() });
            }
        }
    }
    options
}

/// The health of the container's devices, by resource.
pub(crate) fn resource_statuses(state: &DeviceState, pod: &str, container: &str) -> Vec<ResourceStatus> {
    let given = state.given(pod, container).into_iter().flatten();
    given
        .map(|(resource, one)| ResourceStatus {
            name: resource.clone(),
            resources: Some(
                one.ids()
                    .into_iter()
                    .map(|id| {
                        let health = if state.is_healthy(resource, &id) { "Healthy" } else { "Unhealthy" };
                        ResourceHealth { health: Some(health.into()), resource_id: id, ..Default::default() }
                    })
                    .collect(),
            ),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::state::{Given, PerNuma};
    use ferrite_devices::deviceplugin::{
        CdiDevice as Cdi, ContainerAllocateResponse, DeviceSpec, Mount as Bind,
    };

    #[test]
    fn answers_are_combined_and_the_first_wins() {
        let answer = |tag: &str| ContainerAllocateResponse {
            envs: [("BOTH".into(), tag.into()), (format!("ONLY_{tag}"), "1".into())].into(),
            mounts: vec![Bind { container_path: "/m".into(), host_path: format!("/{tag}"), read_only: true }],
            devices: vec![DeviceSpec {
                container_path: "/dev/x".into(),
                host_path: format!("/dev/{tag}"),
                permissions: "rw".into(),
            }],
            annotations: [("both".into(), tag.into())].into(),
            cdi_devices: vec![Cdi { name: "v.org/d=1".into() }, Cdi { name: format!("v.org/d={tag}") }],
        };
        let given = |tag: &str| Given { devices: PerNuma::new(), response: answer(tag) };
        let both = ContainerDevices::from([("r/a".into(), given("a")), ("r/b".into(), given("b"))]);
        let options = container_options(&both);
        let env = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(options.env, [env("BOTH", "a"), env("ONLY_a", "1"), env("ONLY_b", "1")]);
        assert_eq!(options.mounts.len(), 1);
        assert!(options.mounts[0].readonly && options.mounts[0].host_path == "/a");
        assert_eq!(options.devices.len(), 1);
        assert_eq!(options.devices[0].host_path, "/dev/a");
        assert_eq!(options.annotations["both"], "a");
        let cdi: Vec<&str> = options.cdi_devices.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(cdi, ["v.org/d=1", "v.org/d=a", "v.org/d=b"]);
        assert_eq!(container_options(&ContainerDevices::new()), ContainerOptions::default());
    }
}
