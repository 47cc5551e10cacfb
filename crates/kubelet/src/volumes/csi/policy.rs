//! The meaning of a CSIDriver object and a driver's capabilities for one volume. Nothing here waits.

use super::CsiError;
use super::wanted::{Lifecycle, Wanted};
use crate::pod::model::{self, PodId};
use ferrite_csi::NodeCapabilities;
use ferrite_csi::v1::VolumeCapability;
use ferrite_csi::v1::volume_capability::access_mode::Mode;
use ferrite_csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIDriver;
use std::collections::BTreeMap;

const RWO: &str = "ReadWriteOnce";

/// Fails when the driver does not offer volumes of this kind.
pub(super) fn check_lifecycle(
    name: &str,
    driver: Option<&CSIDriver>,
    wanted: Lifecycle,
) -> Result<(), CsiError> {
    let mode = wanted.name();
    match driver {
        // Nothing is known; every driver has persistent volumes.
        None if wanted == Lifecycle::Persistent => Ok(()),
        None => Err(CsiError::NoLifecycle {
            mode,
            driver: name.to_owned(),
            offered: "no CSIDriver object".into(),
        }),
        Some(object) => {
            let offered = object.spec.volume_lifecycle_modes.as_deref().unwrap_or_default();
            let default = offered.is_empty() && wanted == Lifecycle::Persistent;
            if default || offered.iter().any(|offer| offer == mode) {
                return Ok(());
            }
            let offered = format!("only supports {offered:?}");
            Err(CsiError::NoLifecycle { mode, driver: name.to_owned(), offered })
        }
    }
}

/// Returns true if the kubelet gives the volume's files to the pod's group.
pub(super) fn applies_group(driver: Option<&CSIDriver>, wanted: &Wanted) -> bool {
    let policy = driver.and_then(|driver| driver.spec.fs_group_policy.as_deref());
    match policy.unwrap_or("ReadWriteOnceWithFSType") {
        _ if wanted.read_only || wanted.block => false,
        "None" => false,
        "File" => true,
        _ => {
            let once = wanted.lifecycle == Lifecycle::Ephemeral
                || wanted.access_modes.iter().any(|mode| mode == RWO);
            !wanted.fs_type.is_empty() && once
        }
    }
}

/// The volume capability in the request to the driver.
pub(super) fn capability(
    wanted: &Wanted,
    capabilities: &NodeCapabilities,
    group: Option<u32>,
) -> VolumeCapability {
    let access = if wanted.block {
        AccessType::Block(BlockVolume {})
    } else {
        let group = group.filter(|_| capabilities.mount_group());
        AccessType::Mount(MountVolume {
            fs_type: wanted.fs_type.clone(),
            mount_flags: wanted.mount_options.clone(),
            volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
        })
    };
    let mode = wanted.access_modes.first().map_or(RWO, String::as_str);
    let several = capabilities.single_node_multi_writer();
    let mode = match mode {
        RWO if several => Mode::SingleNodeMultiWriter,
        "ReadWriteOncePod" if several => Mode::SingleNodeSingleWriter,
        RWO | "ReadWriteOncePod" => Mode::SingleNodeWriter,
        "ReadOnlyMany" => Mode::MultiNodeReaderOnly,
        "ReadWriteMany" => Mode::MultiNodeMultiWriter,
        _ => Mode::Unknown,
    };
    VolumeCapability { access_type: Some(access), access_mode: Some(AccessMode { mode: mode.into() }) }
}

/// The facts about the pod for a driver that asked for them.
pub(super) fn pod_info(pod: &Pod, lifecycle: Lifecycle) -> BTreeMap<String, String> {
    let id = PodId::of(pod);
    let account = model::spec(pod).service_account_name.clone().unwrap_or_default();
    let ephemeral = lifecycle == Lifecycle::Ephemeral;
    [
        ("pod.name", id.name),
        ("pod.namespace", id.namespace),
        ("pod.uid", id.uid),
        ("serviceAccount.name", account),
        ("ephemeral", ephemeral.to_string()),
    ]
    .into_iter()
    .map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn driver(spec: Value) -> CSIDriver {
        ferrite_json::from_value(json!({"metadata": {"name": "d"}, "spec": spec})).unwrap()
    }

    #[test]
    fn kinds_of_volumes_that_a_driver_offers() {
        use Lifecycle::{Ephemeral, Persistent};
        for (object, wanted, allowed) in [
            (None, Persistent, true),
            (None, Ephemeral, false),
            (Some(json!({})), Persistent, true),
            (Some(json!({})), Ephemeral, false),
            (Some(json!({"volumeLifecycleModes": ["Ephemeral"]})), Ephemeral, true),
            (Some(json!({"volumeLifecycleModes": ["Ephemeral"]})), Persistent, false),
        ] {
            let object = object.map(driver);
            assert_eq!(check_lifecycle("d", object.as_ref(), wanted).is_ok(), allowed, "{object:?}");
        }
    }

    #[test]
    fn group_policies() {
        let rwo = Wanted { access_modes: vec![RWO.into()], fs_type: "ext4".into(), ..Wanted::default() };
        let rwx = Wanted { access_modes: vec!["ReadWriteMany".into()], ..rwo.clone() };
        let plain = Wanted { fs_type: String::new(), ..rwo.clone() };
        let read_only = Wanted { read_only: true, ..rwo.clone() };
        for (policy, wanted, expected) in [
            (None, &rwo, true),
            (None, &rwx, false),
            (None, &plain, false),
            (Some("ReadWriteOnceWithFSType"), &rwo, true),
            (Some("File"), &rwx, true),
            (Some("File"), &plain, true),
            (Some("File"), &read_only, false),
            (Some("None"), &rwo, false),
        ] {
            let object = policy.map(|policy| driver(json!({"fsGroupPolicy": policy})));
            assert_eq!(applies_group(object.as_ref(), wanted), expected, "{policy:?} {wanted:?}");
        }
    }

    #[test]
    fn access_modes_depend_on_what_the_driver_knows() {
        use ferrite_csi::v1::node_service_capability::{Rpc, Type};
        use ferrite_csi::v1::{NodeGetCapabilitiesResponse, NodeServiceCapability};
        let able = |rpcs: &[i32]| {
            let capabilities = rpcs
                .iter()
                .map(|rpc| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: *rpc })) })
                .collect();
            NodeCapabilities::of(&NodeGetCapabilitiesResponse { capabilities })
        };
        for (mode, rpcs, expected) in [
            (RWO, vec![], Mode::SingleNodeWriter),
            (RWO, vec![5], Mode::SingleNodeMultiWriter),
            ("ReadWriteOncePod", vec![], Mode::SingleNodeWriter),
            ("ReadWriteOncePod", vec![5], Mode::SingleNodeSingleWriter),
            ("ReadOnlyMany", vec![], Mode::MultiNodeReaderOnly),
            ("ReadWriteMany", vec![5], Mode::MultiNodeMultiWriter),
        ] {
            let wanted = Wanted { access_modes: vec![mode.into()], ..Wanted::default() };
            let made = capability(&wanted, &able(&rpcs), Some(7));
            assert_eq!(made.access_mode.unwrap().mode(), expected, "{mode}");
        }
        let group = |rpcs: &[i32]| match capability(&Wanted::default(), &able(rpcs), Some(7)).access_type {
            Some(AccessType::Mount(mount)) => mount.volume_mount_group,
            _ => panic!("not a mount"),
        };
        assert_eq!((group(&[]).as_str(), group(&[6]).as_str()), ("", "7"));
    }
}
