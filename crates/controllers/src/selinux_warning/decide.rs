//! Finds the labels that a pod asks for its volumes.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    FCVolumeSource, ISCSIPersistentVolumeSource, PersistentVolume, Pod, SELinuxOptions, SecurityContext,
    Volume, VolumeMount,
};

use super::volumes::Policy;

/// A volume that several pods may share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shared {
    /// The same for all pods that have this volume.
    pub(super) name: String,
    /// The CSI driver; none for kinds of volumes that the kubelet mounts itself, all of which can be mounted with a label.
    pub(super) driver: Option<String>,
}

/// The label that a container asks for, in the form `user:role:type:level`. The node fills in the parts that are left out.
fn label(options: Option<&SELinuxOptions>) -> String {
    let Some(options) = options else { return String::new() };
    let part = |value: &Option<String>| value.clone().unwrap_or_default();
    let label = [&options.user, &options.role, &options.type_, &options.level].map(part).join(":");
    if label == ":::" { String::new() } else { label }
}

/// The names of the volumes that containers of the pod mount, and the labels with which they do.
pub(super) fn labels<'a>(pod: &'a Pod, volume: &str) -> Option<BTreeSet<String>> {
    let spec = pod.spec.as_ref()?;
    let of_pod = spec.security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
    let mounts =
        |mounts: &Option<Vec<VolumeMount>>| mounts.iter().flatten().any(|mount| mount.name == volume);
    let options = |context: &'a Option<SecurityContext>| {
        context.as_ref().and_then(|context| context.se_linux_options.as_ref()).or(of_pod)
    };
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let containers =
        containers.filter(|c| mounts(&c.volume_mounts)).map(|container| options(&container.security_context));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let ephemeral =
        ephemeral.filter(|c| mounts(&c.volume_mounts)).map(|container| options(&container.security_context));
    let all: Vec<Option<&SELinuxOptions>> = containers.chain(ephemeral).collect();
    if all.is_empty() {
        return None;
    }
    // A container that asks for no label takes the one that the volume has.
    Some(all.into_iter().flatten().map(|options| label(Some(options))).collect())
}

/// The storage behind a volume of a pod, if pods can share it and it can be mounted with a label. `bound` is the
/// PersistentVolume of a claim.
pub(super) fn shared(volume: &Volume, bound: Option<&PersistentVolume>) -> Option<Shared> {
    let in_tree = |name: String| Some(Shared { name, driver: None });
    if let Some(iscsi) = &volume.iscsi {
        return in_tree(format!("kubernetes.io/iscsi/{}:{}:{}", iscsi.target_portal, iscsi.iqn, iscsi.lun));
    }
    if let Some(fc) = &volume.fc {
        return in_tree(fibre_channel(fc)?);
    }
    let spec = bound?.spec.as_ref()?;
    if let Some(csi) = &spec.csi {
        let name = format!("kubernetes.io/csi/{}^{}", csi.driver, csi.volume_handle);
        return Some(Shared { name, driver: Some(csi.driver.clone()) });
    }
    if let Some(ISCSIPersistentVolumeSource { target_portal, iqn, lun, .. }) = &spec.iscsi {
        return in_tree(format!("kubernetes.io/iscsi/{target_portal}:{iqn}:{lun}"));
    }
    in_tree(fibre_channel(spec.fc.as_ref()?)?)
}

fn fibre_channel(source: &FCVolumeSource) -> Option<String> {
    let list = |names: &Option<Vec<String>>| names.as_ref().filter(|n| !n.is_empty()).map(|n| n.join(" "));
    match (list(&source.target_wwns), source.lun, list(&source.wwids)) {
        (Some(names), Some(lun), _) => Some(format!("kubernetes.io/fc/[{names}]:{lun}")),
        (_, _, Some(ids)) => Some(format!("kubernetes.io/fc/[{ids}]")),
        _ => None,
    }
}

/// The label and the way in which the volume gets it. `mountable`: the volume can be mounted with a label.
pub(super) fn effective(pod: &Pod, label: String, mountable: bool) -> (String, Policy) {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let asked = context.and_then(|context| context.se_linux_change_policy.as_deref());
    let recursive = asked == Some("Recursive") || !mountable;
    let label = if recursive { String::new() } else { label };
    // Without a label there is nothing to mount with.
    let policy = if label.is_empty() { Policy::Recursive } else { Policy::MountOption };
    (label, policy)
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn pod(of_pod: Value, containers: Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": "p"},
            "spec": {"securityContext": of_pod, "containers": containers}}))
        .unwrap()
    }

    #[test]
    fn labels_are_those_of_the_containers_that_mount_the_volume() {
        let container = |name: &str, volume: &str, level: Option<&str>| {
            let context = level.map(|level| json!({"seLinuxOptions": {"level": level}}));
            json!({"name": name, "securityContext": context, "volumeMounts": [{"name": volume, "mountPath": "/x"}]})
        };
        let of_pod = json!({"seLinuxOptions": {"type": "t", "level": "s0:c1"}});
        for (what, pod, expected) in [
            ("not mounted", pod(json!(null), json!([container("a", "other", None)])), None),
            ("no label", pod(json!(null), json!([container("a", "v", None)])), Some(vec![])),
            ("the pod's", pod(of_pod.clone(), json!([container("a", "v", None)])), Some(vec!["::t:s0:c1"])),
            (
                "the container's own",
                pod(of_pod.clone(), json!([container("a", "v", Some("s0:c2"))])),
                Some(vec![":::s0:c2"]),
            ),
            (
                "two",
                pod(of_pod, json!([container("a", "v", Some("s0:c2")), container("b", "v", None)])),
                Some(vec![":::s0:c2", "::t:s0:c1"]),
            ),
        ] {
            let expected = expected.map(|all| all.into_iter().map(str::to_owned).collect::<BTreeSet<_>>());
            assert_eq!(labels(&pod, "v"), expected, "{what}");
        }
    }

    #[test]
    fn volumes_that_pods_share_have_one_name() {
        let volume = |source: Value| -> Volume { ferrite_json::from_value(source).unwrap() };
        let bound = |spec: Value| -> PersistentVolume {
            ferrite_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).unwrap()
        };
        let claim = volume(json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}}));
        let csi = bound(json!({"csi": {"driver": "d.example", "volumeHandle": "h"}}));
        let nfs = bound(json!({"nfs": {"server": "s", "path": "/"}}));
        let fc = volume(json!({"name": "v", "fc": {"wwids": ["x", "y"]}}));
        let shown = |found: Option<Shared>| found.map(|shared| (shared.name, shared.driver.is_some()));
        assert_eq!(shown(shared(&claim, Some(&csi))), Some(("kubernetes.io/csi/d.example^h".into(), true)));
        assert_eq!(shown(shared(&claim, Some(&nfs))), None);
        assert_eq!(shown(shared(&claim, None)), None, "not bound yet");
        assert_eq!(shown(shared(&fc, None)), Some(("kubernetes.io/fc/[x y]".into(), false)));
    }

    #[test]
    fn labels_are_mounted_where_that_is_possible_and_not_declined() {
        let with = |policy: Value| pod(json!({"seLinuxChangePolicy": policy}), json!([]));
        let label = ":::s0:c1";
        for (policy, label, mountable, expected) in [
            (json!(null), label, true, (label, Policy::MountOption)),
            (json!("MountOption"), label, true, (label, Policy::MountOption)),
            (json!("Recursive"), label, true, ("", Policy::Recursive)),
            (json!(null), label, false, ("", Policy::Recursive)),
            (json!(null), "", true, ("", Policy::Recursive)),
        ] {
            let (found, how) = effective(&with(policy.clone()), label.to_owned(), mountable);
            assert_eq!((found.as_str(), how), expected, "{policy} {mountable}");
        }
    }
}
