//! One CSI volume of one pod, read from the objects that describe it.

use super::CsiError;
use super::paths::check_name;
use crate::quantity;
use ferrite_client::csi::inline_handle;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, CSIVolumeSource, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Lifecycle {
    /// Of a PersistentVolume.
    #[default]
    Persistent,
    /// Written into the pod.
    Ephemeral,
}

impl Lifecycle {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Persistent => "Persistent",
            Self::Ephemeral => "Ephemeral",
        }
    }
}

/// The namespace and name of a Secret.
pub(super) type SecretKey = (String, String);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub driver: String,
    pub handle: String,
    /// The PersistentVolume's name, or the pod's name for the volume.
    pub spec_name: String,
    pub lifecycle: Lifecycle,
    pub block: bool,
    pub read_only: bool,
    pub fs_type: String,
    pub attributes: BTreeMap<String, String>,
    pub mount_options: Vec<String>,
    pub access_modes: Vec<String>,
    pub stage_secret: Option<SecretKey>,
    pub publish_secret: Option<SecretKey>,
    pub expand_secret: Option<SecretKey>,
    /// The size that the node must grow the file system to.
    pub grow_to: Option<i64>,
}

impl Wanted {
    pub(super) fn persistent(
        name: &str,
        spec: &PersistentVolumeSpec,
        source: &CSIPersistentVolumeSource,
        claim: &PersistentVolumeClaim,
        read_only: bool,
    ) -> Result<Self, CsiError> {
        for part in [name, &source.driver] {
            check_name(part)?;
        }
        let secret = |reference: &Option<k8s_openapi::api::core::v1::SecretReference>| {
            let reference = reference.as_ref()?;
            Some((reference.namespace.clone()?, reference.name.clone()?))
        };
        Ok(Self {
            driver: source.driver.clone(),
            handle: source.volume_handle.clone(),
            spec_name: name.to_owned(),
            lifecycle: Lifecycle::Persistent,
            block: spec.volume_mode.as_deref() == Some("Block"),
            read_only,
            fs_type: source.fs_type.clone().unwrap_or_default(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            mount_options: spec.mount_options.clone().unwrap_or_default(),
            access_modes: spec.access_modes.clone().unwrap_or_default(),
            stage_secret: secret(&source.node_stage_secret_ref),
            publish_secret: secret(&source.node_publish_secret_ref),
            expand_secret: secret(&source.node_expand_secret_ref),
            grow_to: grow_to(spec, claim),
        })
    }

    pub(super) fn inline(
        uid: &str,
        namespace: &str,
        volume: &str,
        source: &CSIVolumeSource,
    ) -> Result<Self, CsiError> {
        check_name(&source.driver)?;
        let secret = source.node_publish_secret_ref.as_ref();
        Ok(Self {
            driver: source.driver.clone(),
            handle: inline_handle(uid, volume),
            spec_name: volume.to_owned(),
            lifecycle: Lifecycle::Ephemeral,
            read_only: source.read_only == Some(true),
            fs_type: source.fs_type.clone().unwrap_or_default(),
            attributes: source.volume_attributes.clone().unwrap_or_default(),
            publish_secret: secret.map(|secret| (namespace.to_owned(), secret.name.clone())),
            ..Self::default()
        })
    }
}

fn storage(amounts: Option<&BTreeMap<String, Quantity>>) -> Option<i64> {
    amounts?.get("storage").and_then(quantity::value)
}

/// A volume that is larger than its claim says has yet to be grown by the node.
fn grow_to(spec: &PersistentVolumeSpec, claim: &PersistentVolumeClaim) -> Option<i64> {
    let has = storage(claim.status.as_ref().and_then(|status| status.capacity.as_ref()))?;
    storage(spec.capacity.as_ref()).filter(|size| *size > has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn volumes_grow_when_the_claim_has_less() {
        for (volume, claim, expected) in [
            ("1Gi", Some("1Gi"), None),
            ("2Gi", Some("1Gi"), Some(2 << 30)),
            ("1Gi", Some("2Gi"), None),
            ("2Gi", None, None),
        ] {
            let spec: PersistentVolumeSpec =
                ferrite_json::from_value(json!({"capacity": {"storage": volume}})).unwrap();
            let capacity = claim.map(|size| json!({"capacity": {"storage": size}}));
            let claim: PersistentVolumeClaim =
                ferrite_json::from_value(json!({"metadata": {}, "status": capacity})).unwrap();
            assert_eq!(grow_to(&spec, &claim), expected, "{volume}");
        }
    }
}
