//! Defaults of a pod's specification, shared with pod templates.

use crate::kinds::common::access::{
    default_field, default_int, default_text, ensure_object, flag, int, list_mut, map, object_mut, present,
    remove, text,
};
use crate::kinds::common::volume_source::default_source;
use crate::kinds::core::persistentvolumeclaim::default_claim_spec;
use crate::quantity::{Quantity, canonicalise, is_plainly_canonical};
use ferrite_json::{Map, Value, json};

const MODE: i64 = 0o644;

/// The defaults of a pod that a template does not get: upstream leaves these to the pods made from a
/// template.
pub fn default_pod(spec: &mut Value) {
    if int(spec, "terminationGracePeriodSeconds") < 0 {
        spec["terminationGracePeriodSeconds"] = 1.into();
    }
    default_field(spec, "enableServiceLinks", true);
    for kind in ["containers", "initContainers"] {
        for container in list_mut(spec, kind) {
            requests_from_limits(container);
        }
    }
    if flag(spec, "hostNetwork") {
        for kind in ["containers", "initContainers"] {
            for container in list_mut(spec, kind) {
                for port in list_mut(container, "ports") {
                    let number = int(port, "containerPort");
                    default_int(port, "hostPort", number);
                }
            }
        }
    }
    default_pod_level_requests(spec);
}

/// Defaults of a `PodSpec` wherever it occurs.
pub fn default_spec(spec: &mut Value) {
    drop_disabled(spec);
    default_text(spec, "dnsPolicy", "ClusterFirst");
    default_text(spec, "restartPolicy", "Always");
    default_field(spec, "securityContext", json!({}));
    default_field(spec, "terminationGracePeriodSeconds", 30);
    default_text(spec, "schedulerName", "default-scheduler");
    alias_service_account(spec);
    for volume in list_mut(spec, "volumes") {
        default_volume(volume);
    }
    for kind in ["initContainers", "containers", "ephemeralContainers"] {
        for container in list_mut(spec, kind) {
            default_container(container);
        }
    }
    if let Some(overhead) = spec.get_mut("overhead") {
        default_resource_list(overhead);
    }
    if let Some(resources) = object_mut(spec, "resources") {
        default_resources(resources);
    }
}

/// Drops fields of features that cannot be turned on.
fn drop_disabled(spec: &mut Value) {
    remove(spec, "schedulingGroup");
    for kind in ["initContainers", "containers"] {
        for container in list_mut(spec, kind) {
            let Some(lifecycle) = object_mut(container, "lifecycle") else { continue };
            let dropped = remove(lifecycle, "stopSignal").is_some();
            if dropped && lifecycle.as_object().is_some_and(Map::is_empty) {
                remove(container, "lifecycle");
            }
        }
    }
}

/// `serviceAccount` is the old name of `serviceAccountName`; both always say the same.
fn alias_service_account(spec: &mut Value) {
    let name = match text(spec, "serviceAccountName") {
        "" => text(spec, "serviceAccount").to_owned(),
        name => name.to_owned(),
    };
    if !name.is_empty() {
        spec["serviceAccount"] = name.clone().into();
        spec["serviceAccountName"] = name.into();
    }
}

fn default_container(container: &mut Value) {
    if !container.is_object() {
        return;
    }
    let policy = pull_policy(text(container, "image"));
    default_text(container, "imagePullPolicy", policy);
    default_text(container, "terminationMessagePath", "/dev/termination-log");
    default_text(container, "terminationMessagePolicy", "File");
    for port in list_mut(container, "ports") {
        default_text(port, "protocol", "TCP");
    }
    for env in list_mut(container, "env") {
        let Some(source) = object_mut(env, "valueFrom") else { continue };
        if let Some(field) = object_mut(source, "fieldRef") {
            default_text(field, "apiVersion", "v1");
        }
        if let Some(resource) = object_mut(source, "resourceFieldRef") {
            default_divisor(resource);
        }
        if let Some(file) = object_mut(source, "fileKeyRef") {
            default_field(file, "optional", false);
        }
    }
    default_resources(ensure_object(container, "resources"));
    for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = object_mut(container, kind) {
            default_probe(probe);
        }
    }
    if let Some(lifecycle) = object_mut(container, "lifecycle") {
        for kind in ["postStart", "preStop"] {
            if let Some(handler) = object_mut(lifecycle, kind) {
                default_http_get(handler);
            }
        }
    }
}

fn default_probe(probe: &mut Value) {
    default_int(probe, "timeoutSeconds", 1);
    default_int(probe, "periodSeconds", 10);
    default_int(probe, "successThreshold", 1);
    default_int(probe, "failureThreshold", 3);
    default_http_get(probe);
    if let Some(grpc) = object_mut(probe, "grpc") {
        default_field(grpc, "service", "");
    }
}

fn default_http_get(handler: &mut Value) {
    if let Some(http) = object_mut(handler, "httpGet") {
        default_text(http, "path", "/");
        default_text(http, "scheme", "HTTP");
    }
}

fn default_resources(resources: &mut Value) {
    for kind in ["limits", "requests"] {
        if let Some(amounts) = resources.get_mut(kind) {
            default_resource_list(amounts);
        }
    }
}

/// Amounts of resources are kept in thousandths, rounded up.
pub fn default_resource_list(amounts: &mut Value) {
    for amount in amounts.as_object_mut().into_iter().flat_map(Map::values_mut) {
        if amount.as_str().is_some_and(is_plainly_canonical) {
            continue;
        }
        canonicalise(amount);
        if let Some(Ok(quantity)) = amount.as_str().map(Quantity::parse) {
            *amount = quantity.rounded_to_milli().to_string().into();
        }
    }
}

/// A limit without a request is also the request.
fn requests_from_limits(container: &mut Value) {
    let Some(resources) = object_mut(container, "resources") else { return };
    let Some(limits) = map(resources, "limits").filter(|l| !l.is_empty()).cloned() else { return };
    let requests = ensure_object(resources, "requests");
    for (name, amount) in limits {
        default_field(requests, &name, amount);
    }
}

/// Returns true if a resource may be given for the pod as a whole.
pub fn is_pod_level_resource(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

/// With limits for the whole pod, its requests are those of its containers, else its limits.
fn default_pod_level_requests(spec: &mut Value) {
    let Some(limits) =
        spec.get("resources").and_then(|r| map(r, "limits")).filter(|l| !l.is_empty()).cloned()
    else {
        return;
    };
    let total = super::resources::requests_of_containers(spec);
    let requests = ensure_object(ensure_object(spec, "resources"), "requests");
    for (name, amount) in total {
        if is_pod_level_resource(&name) {
            default_field(requests, &name, amount.to_string());
        }
    }
    for (name, amount) in limits {
        if is_pod_level_resource(&name) {
            default_field(requests, &name, amount);
        }
    }
    if requests.as_object().is_some_and(Map::is_empty)
        && let Some(resources) = spec["resources"].as_object_mut()
    {
        resources.remove("requests");
    }
}

fn default_divisor(reference: &mut Value) {
    default_text(reference, "divisor", "0");
    if let Some(divisor) = reference.get_mut("divisor") {
        canonicalise(divisor);
    }
}

/// Images that may change under the same name are pulled always.
fn pull_policy(image: &str) -> &'static str {
    if image_tag(image) == Some("latest") { "Always" } else { "IfNotPresent" }
}

/// A reference cannot be read whose name is longer.
const REPOSITORY_MAX: usize = 255;

/// The tag of an image reference, `latest` when it has neither tag nor digest; `None` when there is none or
/// the reference cannot be read.
fn image_tag(image: &str) -> Option<&str> {
    let (name, digest) = match image.split_once('@') {
        Some((name, digest)) => (name, Some(digest)),
        None => (image, None),
    };
    let after_slash = name.rfind('/').map_or(0, |i| i + 1);
    let (repository, tag) = match name[after_slash..].find(':') {
        Some(i) => (&name[..after_slash + i], Some(&name[after_slash + i + 1..])),
        None => (name, None),
    };
    let mut components = repository.split('/').peekable();
    // The first component is a host when it looks like one; hosts may have upper case.
    if repository.contains('/')
        && components.peek().is_some_and(|c| {
            c.contains(['.', ':']) || *c == "localhost" || c.bytes().any(|b| b.is_ascii_uppercase())
        })
    {
        components.next();
    }
    if repository.len() > REPOSITORY_MAX || !components.all(is_repository_component) {
        return None;
    }
    match (tag, digest) {
        (Some(tag), _) => Some(tag),
        (None, None) => Some("latest"),
        (None, Some(_)) => None,
    }
}

fn is_repository_component(component: &str) -> bool {
    let alnum = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    component.starts_with(alnum)
        && component.ends_with(alnum)
        && component.chars().all(|c| alnum(c) || matches!(c, '.' | '_' | '-'))
}

/// The keys of a volume that say where its content comes from.
pub const VOLUME_SOURCES: &[&str] = &[
    "emptyDir",
    "hostPath",
    "gitRepo",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "secret",
    "nfs",
    "iscsi",
    "glusterfs",
    "flocker",
    "persistentVolumeClaim",
    "rbd",
    "cinder",
    "cephfs",
    "quobyte",
    "downwardAPI",
    "fc",
    "flexVolume",
    "configMap",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "storageos",
    "projected",
    "scaleIO",
    "csi",
    "ephemeral",
    "image",
];

fn default_volume(volume: &mut Value) {
    if volume.is_object() && !VOLUME_SOURCES.iter().any(|source| present(volume, source)) {
        volume["emptyDir"] = json!({});
    }
    let Some(sources) = volume.as_object_mut() else { return };
    for (kind, source) in sources.iter_mut().filter(|(_, source)| source.is_object()) {
        match kind.as_str() {
            "secret" | "configMap" => default_field(source, "defaultMode", MODE),
            "downwardAPI" => {
                default_field(source, "defaultMode", MODE);
                default_downward_items(source);
            }
            "projected" => default_projected(source),
            "ephemeral" => {
                if let Some(template) = object_mut(source, "volumeClaimTemplate") {
                    ensure_object(template, "metadata");
                    default_claim_spec(ensure_object(template, "spec"));
                }
            }
            "image" => {
                let policy = pull_policy(text(source, "reference"));
                default_text(source, "pullPolicy", policy);
            }
            kind => default_source(kind, source),
        }
    }
}

fn default_downward_items(source: &mut Value) {
    for item in list_mut(source, "items") {
        if let Some(field) = object_mut(item, "fieldRef") {
            default_text(field, "apiVersion", "v1");
        }
        if let Some(resource) = object_mut(item, "resourceFieldRef") {
            default_divisor(resource);
        }
    }
}

fn default_projected(source: &mut Value) {
    default_field(source, "defaultMode", MODE);
    for part in list_mut(source, "sources") {
        if let Some(token) = object_mut(part, "serviceAccountToken") {
            default_field(token, "expirationSeconds", 3600);
        }
        if let Some(downward) = object_mut(part, "downwardAPI") {
            default_downward_items(downward);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_may_change_are_pulled_always() {
        for (image, policy) in [
            ("img", "Always"),
            ("img:latest", "Always"),
            ("img:1", "IfNotPresent"),
            ("registry:5000/img", "Always"),
            ("registry.example:5000/a/b:v1", "IfNotPresent"),
            ("img@sha256:aaaa", "IfNotPresent"),
            ("img:latest@sha256:aaaa", "Always"),
            ("", "IfNotPresent"),
            ("Not Valid", "IfNotPresent"),
        ] {
            assert_eq!(pull_policy(image), policy, "{image:?}");
        }
    }
}
