//! Volumes: set up before a pod's containers start, kept current while it runs, gone when it ends.
//!
//! A kind of volume is one file and one row of [`plugins::PLUGINS`]; a kind of PersistentVolume is a row of
//! [`plugins::PERSISTENT`].

mod atomic;
mod claim;
mod config_map;
mod content;
pub(crate) mod csi;
mod downward_api;
mod empty_dir;
mod format;
#[cfg(test)]
mod hang_tests;
mod host_path;
pub(crate) mod image;
mod kernel;
mod local;
pub(crate) mod local_path;
mod nfs;
mod ownership;
mod payload;
mod plugins;
mod pod_certificate;
mod projected;
mod secret;
pub(crate) mod stats;
mod token;
mod trust_bundles;

#[cfg(test)]
pub(crate) use kernel::remove_tree;
pub(crate) use token::{TokenError, Tokens};

use crate::container::expand::expand;
use crate::container::fields::NodeLimits;
use crate::objects::{ObjectError, Objects};
use crate::pod::model::{self, PodContainer, PodId};
use csi::{Csi, CsiError};
use ferrite_client::{EventRecorder, Informer, Scope};
use ferrite_component::FeatureGates;
use ferrite_cri::v1::{Device, ImageSpec, Mount, MountPropagation};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Volume, VolumeMount};
use payload::PayloadError;
use plugins::SetUp;
use pod_certificate::{PodCertificates, PodCertificatesConfig};
use stats::{Measure, MeasuredVolume, VolumeStats};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use trust_bundles::TrustBundles;

#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    #[error("{kind} \"{name}\" not found")]
    NotFound { kind: &'static str, name: String },
    #[error(transparent)]
    Objects(#[from] ObjectError),
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error(transparent)]
    HostPath(#[from] host_path::HostPathError),
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    TrustBundle(#[from] trust_bundles::TrustBundleError),
    #[error(transparent)]
    PodCertificate(#[from] pod_certificate::PodCertificateError),
    #[error(transparent)]
    Claim(#[from] claim::ClaimError),
    #[error(transparent)]
    Local(#[from] local::LocalError),
    #[error(transparent)]
    Nfs(#[from] nfs::NfsError),
    #[error(transparent)]
    Csi(#[from] csi::CsiError),
    #[error(transparent)]
    Medium(#[from] empty_dir::MediumError),
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("no volume plugin matched")]
    Unsupported,
    #[error("cannot find volume {volume:?} to pass into container {container:?}")]
    NoDevice { volume: String, container: String },
}

/// Which volume could not be set up, worded as upstream's event.
#[derive(Debug, thiserror::Error)]
#[error("MountVolume.SetUp failed for volume \"{volume}\" : {source}")]
pub(crate) struct VolumeError {
    pub volume: String,
    pub source: SourceError,
}

/// Why a container cannot be given its mounts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MountError {
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error("missing value for {0}")]
    NoVariable(String),
}

/// Why a pod's volumes could not be removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TearDownError {
    #[error(transparent)]
    Csi(#[from] CsiError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A volume, ready to be given to containers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ReadyVolume {
    path: PathBuf,
    /// Containers never write it, whatever their mounts say.
    read_only: bool,
    /// It is a device, not a file system.
    block: bool,
    /// It stays as it is as long as the pod runs: there is nothing to bring up to date.
    settled: bool,
    /// When it must be brought up to date at the latest.
    refresh_at: Option<Timestamp>,
    /// The way to measure it; as upstream, not every kind is measured.
    measure: Option<Measure>,
    /// The claim that the pod uses it through.
    claim: Option<String>,
}

impl ReadyVolume {
    /// A directory or file that containers may write.
    fn writable(path: PathBuf) -> Self {
        Self {
            path,
            read_only: false,
            block: false,
            settled: false,
            refresh_at: None,
            measure: None,
            claim: None,
        }
    }
}

/// A pod's volumes, ready to be mounted.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodVolumes {
    volumes: BTreeMap<String, ReadyVolume>,
    /// When a token in one of them must be renewed.
    pub refresh_at: Option<Timestamp>,
}

impl PodVolumes {
    /// The directory of a volume on this node; nothing for devices and images.
    pub(crate) fn directory(&self, volume: &str) -> Option<&Path> {
        let volume = self.volumes.get(volume).filter(|v| !v.block && !v.path.as_os_str().is_empty());
        volume.map(|v| v.path.as_path())
    }
}

/// The settings of a node's volumes.
pub(crate) struct VolumesConfig {
    /// The kubelet's directory.
    pub root: PathBuf,
    /// Where local volumes that a provisioner asked for are; without it this node has none.
    pub local_volumes: Option<PathBuf>,
    pub limits: NodeLimits,
    pub node_name: String,
    pub recorder: EventRecorder,
    /// Interval at which the space in volumes is measured; none: never.
    pub stats_period: Option<Duration>,
    pub feature_gates: FeatureGates,
}

pub(crate) struct Volumes {
    root: PathBuf,
    local_volumes: Option<PathBuf>,
    client: kube::Client,
    objects: Arc<Objects>,
    tokens: Arc<Tokens>,
    trust_bundles: TrustBundles,
    pod_certificates: PodCertificates,
    limits: NodeLimits,
    node: Informer<Node>,
    csi: Csi,
    stats: VolumeStats,
    /// One device is formatted at a time.
    formatting: tokio::sync::Mutex<()>,
}

impl Volumes {
    pub(crate) fn new(
        config: VolumesConfig,
        client: kube::Client,
        objects: Arc<Objects>,
        node: Informer<Node>,
        scope: &Scope,
    ) -> Self {
        let VolumesConfig { root, local_volumes, limits, node_name, recorder, stats_period, feature_gates } =
            config;
        let stats = VolumeStats::new(stats_period);
        let tokens = Arc::new(Tokens::new(client.clone()));
        let is_on = |gate: &str| feature_gates.enabled(gate);
        let trust_bundles =
            TrustBundles::new(is_on("ClusterTrustBundleProjection"), client.clone(), scope, objects.wake());
        let certificates = PodCertificatesConfig {
            enabled: is_on("PodCertificateRequest"),
            node_name: node_name.clone(),
            recorder: recorder.clone(),
            wake: objects.wake(),
        };
        let pod_certificates = PodCertificates::new(certificates, client.clone(), node.clone(), scope);
        let csi = Csi::new(&root, &node_name, client.clone(), tokens.clone(), recorder, node.clone(), scope);
        Self {
            root,
            local_volumes,
            client,
            objects,
            tokens,
            trust_bundles,
            pod_certificates,
            limits,
            node,
            csi,
            stats,
            formatting: Default::default(),
        }
    }

    /// The pods' service account tokens.
    pub(crate) fn tokens(&self) -> Arc<Tokens> {
        self.tokens.clone()
    }

    /// The volumes of CSI drivers.
    pub(crate) fn csi(&self) -> &Csi {
        &self.csi
    }

    /// The space in the volumes of pods, by UID of the pod.
    pub(crate) async fn figures(&self) -> BTreeMap<String, Vec<MeasuredVolume>> {
        self.stats.figures(&self.csi).await
    }

    /// The kubelet's directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn pod_dir(&self, uid: &str) -> PathBuf {
        self.root.join("pods").join(uid)
    }

    /// UIDs of the pods that have a directory.
    pub(crate) fn known_pods(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.root.join("pods")) else { return Vec::new() };
        entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
    }

    /// Brings every volume of the pod to the state of the API. `before` is the pod's present state. Waiting
    /// ends when `ending` is cancelled.
    pub(crate) async fn set_up(
        &self,
        pod: &Pod,
        now: Timestamp,
        before: Option<&PodVolumes>,
        ending: &CancellationToken,
    ) -> Result<PodVolumes, VolumeError> {
        let mut ready = PodVolumes::default();
        let fs_group = model::spec(pod).security_context.as_ref().and_then(|c| c.fs_group);
        let group = fs_group.and_then(|g| u32::try_from(g).ok());
        for volume in model::spec(pod).volumes.iter().flatten() {
            let settled = before.and_then(|b| b.volumes.get(&volume.name)).filter(|v| v.settled);
            let one = match settled {
                Some(settled) => settled.clone(),
                None => self
                    .set_up_one(pod, volume, group, now, ending)
                    .await
                    .map_err(|source| VolumeError { volume: volume.name.clone(), source })?,
            };
            ready.refresh_at = [ready.refresh_at, one.refresh_at].into_iter().flatten().min();
            ready.volumes.insert(volume.name.clone(), one);
        }
        let uid = PodId::of(pod).uid;
        for (name, volume) in &ready.volumes {
            if let Some(measure) = &volume.measure {
                self.stats.note(&uid, name, &volume.path, volume.claim.clone(), measure.clone());
            }
        }
        Ok(ready)
    }

    async fn set_up_one(
        &self,
        pod: &Pod,
        volume: &Volume,
        group: Option<u32>,
        now: Timestamp,
        ending: &CancellationToken,
    ) -> Result<ReadyVolume, SourceError> {
        let plugin = plugins::PLUGINS.iter().find(|plugin| (plugin.matches)(volume));
        let plugin = plugin.ok_or(SourceError::Unsupported)?;
        let id = PodId::of(pod);
        (plugin.set_up)(SetUp { volumes: self, pod, id: &id, volume, group, now, ending }).await
    }

    /// The mounts of one container. `images` are those of its image volumes, `env` has the variables for
    /// `subPathExpr`.
    pub(crate) async fn mounts(
        &self,
        pod: &Pod,
        container: &PodContainer,
        volumes: &PodVolumes,
        images: &image::PresentImages,
        env: &[(String, String)],
    ) -> Result<Vec<Mount>, MountError> {
        let mut mounts = Vec::new();
        for (index, wanted) in container.spec.volume_mounts.iter().flatten().enumerate() {
            let fail = |source| VolumeError { volume: wanted.name.clone(), source };
            let volume = volumes.volumes.get(&wanted.name).ok_or_else(|| fail(SourceError::Unsupported))?;
            if volume.block {
                return Err(fail(claim::ClaimError::BlockMounted(wanted.name.clone()).into()).into());
            }
            let sub = sub_path(wanted, env)?;
            if let Some(reference) = images.get(&wanted.name) {
                mounts.push(image_mount(wanted, reference, sub));
                continue;
            }
            let host_path = match sub {
                None => volume.path.clone(),
                Some(sub) => {
                    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
                    let point = self
                        .pod_dir(uid)
                        .join("volume-subpaths")
                        .join(&wanted.name)
                        .join(container.name())
                        .join(index.to_string());
                    let (from, to) = (volume.path.clone(), point.clone());
                    blocking(&volume.path.join(&sub), move || kernel::bind_sub_path(&from, &sub, &to))
                        .await
                        .map_err(fail)?;
                    point
                }
            };
            mounts.push(Mount {
                container_path: absolute(&wanted.mount_path),
                host_path: host_path.to_string_lossy().into_owned(),
                readonly: wanted.read_only.unwrap_or(false) || volume.read_only,
                recursive_read_only: wanted.recursive_read_only.as_deref() == Some("Enabled"),
                propagation: match wanted.mount_propagation.as_deref() {
                    Some("HostToContainer") => MountPropagation::PropagationHostToContainer,
                    Some("Bidirectional") => MountPropagation::PropagationBidirectional,
                    _ => MountPropagation::PropagationPrivate,
                }
                .into(),
                ..Mount::default()
            });
        }
        Ok(mounts)
    }

    /// The raw devices of one container.
    pub(crate) fn devices(
        &self,
        container: &PodContainer,
        volumes: &PodVolumes,
    ) -> Result<Vec<Device>, SourceError> {
        let wanted = container.spec.volume_devices.iter().flatten();
        wanted
            .map(|wanted| {
                let missing = || SourceError::NoDevice {
                    volume: wanted.name.clone(),
                    container: container.name().to_owned(),
                };
                let volume = volumes.volumes.get(&wanted.name).ok_or_else(missing)?;
                if !volume.block {
                    return Err(claim::ClaimError::FilesystemDevice(wanted.name.clone()).into());
                }
                Ok(Device {
                    container_path: wanted.device_path.clone(),
                    host_path: volume.path.to_string_lossy().into_owned(),
                    permissions: if volume.read_only { "r" } else { "mrw" }.into(),
                })
            })
            .collect()
    }

    /// Unmounts and removes everything of the pod. Drivers take their volumes back first.
    pub(crate) async fn tear_down(&self, uid: &str) -> Result<(), TearDownError> {
        self.free(uid).await?;
        let dir = self.pod_dir(uid);
        let removed = tokio::task::spawn_blocking(move || kernel::remove_tree(&dir)).await;
        Ok(removed.map_err(io::Error::other)??)
    }

    /// Removes the pod's volumes and their content. The rest of the pod's directory stays: it has the termination
    /// messages.
    pub(crate) async fn free(&self, uid: &str) -> Result<(), TearDownError> {
        // Sub-paths keep a volume busy: they go first, as upstream.
        let sub_paths = self.pod_dir(uid).join("volume-subpaths");
        let removed = tokio::task::spawn_blocking(move || kernel::remove_tree(&sub_paths)).await;
        removed.map_err(io::Error::other)??;
        self.stats.forget(uid);
        self.csi.unpublish(uid).await?;
        self.tokens.forget(uid);
        self.trust_bundles.forget(uid);
        self.pod_certificates.forget(uid);
        self.objects.release(uid);
        let volumes = self.pod_dir(uid).join("volumes");
        let removed = tokio::task::spawn_blocking(move || kernel::remove_tree(&volumes)).await;
        removed.map_err(io::Error::other)??;
        self.csi.release(uid);
        Ok(())
    }
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_string() } else { format!("/{path}") }
}

/// The sub-path of a mount. As upstream, a variable that is empty is as bad as one that is not there.
fn sub_path(mount: &VolumeMount, env: &[(String, String)]) -> Result<Option<String>, MountError> {
    let Some(expr) = mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) else {
        return Ok(mount.sub_path.clone().filter(|s| !s.is_empty()));
    };
    let missing = RefCell::new(BTreeSet::new());
    let path = expand(expr, |name: &str| {
        let value = env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()).unwrap_or_default();
        if value.is_empty() {
            missing.borrow_mut().insert(name.to_owned());
        }
        Some(value)
    });
    let missing = missing.into_inner();
    match missing.is_empty() {
        true => Ok(Some(path).filter(|path| !path.is_empty())),
        false => Err(MountError::NoVariable(missing.into_iter().collect::<Vec<_>>().join(", "))),
    }
}

/// An image's files, which nobody writes.
fn image_mount(wanted: &VolumeMount, image: &str, sub: Option<String>) -> Mount {
    Mount {
        container_path: absolute(&wanted.mount_path),
        image: Some(ImageSpec { image: image.to_owned(), ..ImageSpec::default() }),
        image_sub_path: sub.unwrap_or_default(),
        readonly: true,
        ..Mount::default()
    }
}

/// Runs work on files away from the threads that must not block. `path` names it in the error.
async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, SourceError> {
    let done = tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)));
    done.map_err(|source| SourceError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_paths_need_every_variable() {
        let env = [("A".to_owned(), "x".to_owned()), ("EMPTY".to_owned(), String::new())];
        for (path, expr, expected) in [
            (None, None, Ok(None)),
            (Some("a"), None, Ok(Some("a"))),
            (None, Some("$(A)/b"), Ok(Some("x/b"))),
            (None, Some("$$(A)"), Ok(Some("$(A)"))),
            (None, Some("$(NONE)"), Err("missing value for NONE")),
            (None, Some("a$(EMPTY)$(NONE)"), Err("missing value for EMPTY, NONE")),
        ] {
            let mount = VolumeMount {
                sub_path: path.map(str::to_owned),
                sub_path_expr: expr.map(str::to_owned),
                ..VolumeMount::default()
            };
            let found = sub_path(&mount, &env).map_err(|e| e.to_string());
            assert_eq!(found.as_ref().map(Option::as_deref).map_err(String::as_str), expected, "{expr:?}");
        }
    }
}
