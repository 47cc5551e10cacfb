//! Extended resources that DeviceClasses stand behind: the requests of a claim that is made for the pod.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_api::quantity::Quantity;
use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{Container, ContainerExtendedResourceRequest, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceRequest, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

/// Marks the claim that the scheduler makes for a pod's extended resources.
pub(super) const ANNOTATION: &str = "resource.kubernetes.io/extended-resource-claim";
/// The name of such a claim before it is written. No object can have it.
pub(super) const IN_MEMORY: &str = "<extended-resources>";

/// True if the name is that of a resource that a DeviceClass can provide: one with a domain outside of Kubernetes, or a
/// class named directly.
pub(super) fn is_extended(name: &str) -> bool {
    if name.starts_with(crate::devices::IMPLICIT_PREFIX) {
        return true;
    }
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    !is_native && !name.starts_with("requests.")
}

/// The claim of a pod's extended resources before it has requests. `uid` stands for it until the API gives it one.
pub(super) fn new_claim(key: &ObjectKey, pod_uid: &str, uid: String) -> ResourceClaim {
    ResourceClaim {
        metadata: ObjectMeta {
            namespace: Some(key.namespace.to_string()),
            name: Some(IN_MEMORY.to_owned()),
            generate_name: Some(format!("{}-extended-resources-", key.name)),
            uid: Some(uid),
            annotations: Some(BTreeMap::from([(ANNOTATION.to_owned(), "true".to_owned())])),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: key.name.to_string(),
                uid: pod_uid.to_owned(),
                controller: Some(true),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        ..ResourceClaim::default()
    }
}

/// The claim that an earlier attempt made for the pod's extended resources.
pub(super) fn is_of_pod(claim: &ResourceClaim, pod: &str, uid: &str) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(ANNOTATION)).is_some_and(|value| value == "true")
        && claim
            .metadata
            .owner_references
            .iter()
            .flatten()
            .any(|owner| owner.controller == Some(true) && owner.name == pod && owner.uid == uid)
}

/// Requests, and which of them each container uses for which resource.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Requests {
    pub devices: Vec<DeviceRequest>,
    pub mappings: Vec<ContainerExtendedResourceRequest>,
}

impl Requests {
    pub fn claim(&self, base: &ResourceClaim) -> ResourceClaim {
        let devices = DeviceClaim { requests: Some(self.devices.clone()), ..DeviceClaim::default() };
        ResourceClaim { spec: ResourceClaimSpec { devices: Some(devices) }, ..base.clone() }
    }
}

/// A request that a container adds, and those it uses.
#[derive(Default)]
struct OfContainer {
    added: Option<(String, i64)>,
    used: Vec<String>,
}

/// `reusable` are requests of containers that run later: an init container uses their devices first.
fn of_container(
    position: usize,
    container: &Container,
    resource: &str,
    reusable: &[Option<(String, i64)>],
) -> OfContainer {
    let mut of = OfContainer::default();
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let Some((index, wanted)) = requests.and_then(|requests| {
        let index = requests.keys().position(|name| name == resource)?;
        let quantity = Quantity::parse(&requests[resource].0).ok()?;
        Some((index, if quantity.is_integer() { quantity.value() } else { 0 }))
    }) else {
        return of;
    };
    if wanted <= 0 {
        return of;
    }
    let mut has = 0i64;
    for (name, count) in reusable.iter().flatten() {
        has = has.saturating_add(*count);
        of.used.push(name.clone());
        if has >= wanted {
            return of;
        }
    }
    let name = format!("container-{position}-request-{index}");
    of.used.push(name.clone());
    of.added = Some((name, wanted - has));
    of
}

/// The requests for `resources`, each with the DeviceClass behind it.
pub(super) fn requests(pod: &Pod, resources: &BTreeMap<String, String>) -> Requests {
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let main = spec.map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let containers: Vec<&Container> = init.iter().chain(main).collect();
    let is_short = |position: usize| {
        position < init.len() && containers[position].restart_policy.as_deref() != Some("Always")
    };
    let mut all = Requests::default();
    for (resource, class) in resources {
        let mapping = |container: &Container, request: &str| ContainerExtendedResourceRequest {
            container_name: container.name.clone(),
            resource_name: resource.clone(),
            request_name: request.to_owned(),
        };
        let mut long: Vec<Option<(String, i64)>> = vec![None; containers.len()];
        for (position, container) in containers.iter().enumerate().filter(|(at, _)| !is_short(*at)) {
            let of = of_container(position, container, resource, &[]);
            all.mappings.extend(of.used.iter().map(|request| mapping(container, request)));
            long[position] = of.added;
        }
        // Init containers run one after the other: the largest of their requests serves all.
        let mut largest: Option<(String, i64)> = None;
        let mut short_names = BTreeSet::new();
        let mut short_mappings = Vec::new();
        for (position, container) in containers.iter().enumerate().filter(|(at, _)| is_short(*at)) {
            let of = of_container(position, container, resource, &long[position..]);
            short_mappings.extend(of.used.iter().map(|request| mapping(container, request)));
            if let Some(added) = of.added {
                short_names.insert(added.0.clone());
                if largest.as_ref().is_none_or(|(_, count)| *count < added.1) {
                    largest = Some(added);
                }
            }
        }
        if let Some((name, _)) = &largest {
            for mapping in short_mappings.iter_mut().filter(|m| short_names.contains(&m.request_name)) {
                mapping.request_name.clone_from(name);
            }
        }
        all.mappings.extend(short_mappings);
        all.devices.extend(largest.into_iter().chain(long.into_iter().flatten()).map(|(name, count)| {
            DeviceRequest {
                name,
                exactly: Some(ExactDeviceRequest {
                    device_class_name: class.clone(),
                    allocation_mode: Some("ExactCount".to_owned()),
                    count: Some(count),
                    ..ExactDeviceRequest::default()
                }),
                first_available: None,
            }
        }));
    }
    all.devices.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn init_containers_use_devices_of_later_containers_first() {
        let container = |name: &str, count: u32| json!({"name": name, "resources": {"requests": {"cpu": "1", "example.com/gpu": count.to_string()}}});
        let mut sidecar = container("sidecar", 1);
        sidecar["restartPolicy"] = json!("Always");
        let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": {
            "initContainers": [container("first", 4), sidecar, container("second", 1), container("third", 5)],
            "containers": [container("main", 2), {"name": "plain"}],
        }}))
        .unwrap();
        let resources = BTreeMap::from([("example.com/gpu".to_owned(), "gpu".to_owned())]);
        let made = requests(&pod, &resources);
        let devices: Vec<_> = made
            .devices
            .iter()
            .map(|request| (request.name.as_str(), request.exactly.as_ref().unwrap().count.unwrap()))
            .collect();
        // The third init container asks for 5 and has the 2 of the main container.
        assert_eq!(
            devices,
            [("container-1-request-1", 1), ("container-3-request-1", 3), ("container-4-request-1", 2)]
        );
        let mappings: Vec<_> = made
            .mappings
            .iter()
            .map(|mapping| (mapping.container_name.as_str(), mapping.request_name.as_str()))
            .collect();
        assert_eq!(
            mappings,
            [
                ("sidecar", "container-1-request-1"),
                ("main", "container-4-request-1"),
                ("first", "container-1-request-1"),
                ("first", "container-4-request-1"),
                ("first", "container-3-request-1"),
                ("second", "container-4-request-1"),
                ("third", "container-4-request-1"),
                ("third", "container-3-request-1"),
            ]
        );
    }

    #[test]
    fn names_of_resources() {
        for (name, expected) in [
            ("example.com/gpu", true),
            ("deviceclass.resource.kubernetes.io/gpu", true),
            ("cpu", false),
            ("hugepages-2Mi", false),
            ("kubernetes.io/batch", false),
            ("requests.example.com/gpu", false),
        ] {
            assert_eq!(is_extended(name), expected, "{name}");
        }
    }
}
