//! The kinds of volumes.

use super::{
    ReadyVolume, SourceError, Volumes, claim, config_map, csi, downward_api, empty_dir, host_path, image,
    local, nfs, projected, secret,
};
use crate::pod::model::PodId;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, Pod, Volume,
};
use std::path::PathBuf;
use tokio_util::sync::CancellationToken;

/// One volume of one pod, to be set up.
#[derive(Clone, Copy)]
pub(super) struct SetUp<'a> {
    pub volumes: &'a Volumes,
    pub pod: &'a Pod,
    pub id: &'a PodId,
    pub volume: &'a Volume,
    /// The pod's `fsGroup`.
    pub group: Option<u32>,
    pub now: Timestamp,
    /// Cancelled when the pod must end: nothing waits any longer.
    pub ending: &'a CancellationToken,
}

impl SetUp<'_> {
    /// Where upstream's kubelet has a volume of this plugin.
    pub(super) fn dir(&self, plugin: &str) -> PathBuf {
        self.place(plugin, &self.volume.name)
    }

    pub(super) fn place(&self, plugin: &str, name: &str) -> PathBuf {
        let volumes = self.volumes.pod_dir(&self.id.uid).join("volumes");
        volumes.join(format!("kubernetes.io~{plugin}")).join(name)
    }
}

/// A kind of volume.
pub(super) struct VolumePlugin {
    pub matches: fn(&Volume) -> bool,
    /// Makes the volume, or brings it up to date.
    pub set_up: for<'a> fn(SetUp<'a>) -> BoxFuture<'a, Result<ReadyVolume, SourceError>>,
}

/// Every kind of volume. A volume that no row matches is refused.
pub(super) const PLUGINS: &[VolumePlugin] = &[
    host_path::PLUGIN,
    empty_dir::PLUGIN,
    config_map::PLUGIN,
    secret::PLUGIN,
    downward_api::PLUGIN,
    projected::PLUGIN,
    nfs::PLUGIN,
    image::PLUGIN,
    claim::PLUGIN,
    claim::EPHEMERAL,
    csi::INLINE,
];

/// A PersistentVolume that a pod uses through a claim, to be set up.
#[derive(Clone, Copy)]
pub(super) struct PersistentSetUp<'a> {
    pub pod: SetUp<'a>,
    pub name: &'a str,
    pub volume: &'a PersistentVolume,
    pub spec: &'a PersistentVolumeSpec,
    pub claim: &'a PersistentVolumeClaim,
    /// The pod wants it for reading only.
    pub read_only: bool,
}

/// A kind of PersistentVolume.
pub(super) struct PersistentPlugin {
    pub matches: fn(&PersistentVolumeSpec) -> bool,
    pub set_up: for<'a> fn(PersistentSetUp<'a>) -> BoxFuture<'a, Result<ReadyVolume, SourceError>>,
}

/// Every kind of PersistentVolume.
pub(super) const PERSISTENT: &[PersistentPlugin] =
    &[host_path::PERSISTENT, local::PLUGIN, nfs::PERSISTENT, csi::PERSISTENT];
