//! Volumes: set up before a pod's containers start, kept current while it runs, gone when it ends.

mod atomic;
mod empty_dir;
mod host_path;
mod kernel;
mod payload;
mod token;

#[cfg(test)]
pub(crate) use kernel::remove_tree;
pub(crate) use token::Tokens;

use crate::container::expand::expand;
use crate::container::fields::NodeLimits;
use crate::objects::{self, ObjectError, Objects};
use crate::pod::model::{self, PodContainer, PodId};
use crate::quantity;
use ferrite_cri::v1::{Mount, MountPropagation};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{KeyToPath, Pod, ProjectedVolumeSource, Volume, VolumeMount};
use payload::{Payload, PayloadError};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
    Token(#[from] token::TokenError),
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("no volume plugin matched")]
    Unsupported,
}

/// Which volume could not be set up, worded as upstream's event.
#[derive(Debug, thiserror::Error)]
#[error("MountVolume.SetUp failed for volume \"{volume}\" : {source}")]
pub(crate) struct VolumeError {
    pub volume: String,
    pub source: SourceError,
}

/// A volume, ready to be mounted.
#[derive(Debug, Clone)]
struct ReadyVolume {
    path: PathBuf,
    /// Containers never write it, whatever their mounts say, as upstream: the kubelet writes it as root.
    read_only: bool,
}

/// A pod's volumes, ready to be mounted.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodVolumes {
    volumes: BTreeMap<String, ReadyVolume>,
    /// When a token in one of them must be renewed.
    pub refresh_at: Option<Timestamp>,
}

pub(crate) struct Volumes {
    root: PathBuf,
    objects: Arc<Objects>,
    tokens: Arc<Tokens>,
    node: NodeLimits,
}

impl Volumes {
    pub(crate) fn new(root: PathBuf, client: kube::Client, objects: Arc<Objects>, node: NodeLimits) -> Self {
        Self { root, objects, tokens: Arc::new(Tokens::new(client)), node }
    }

    /// The pods' service account tokens.
    pub(crate) fn tokens(&self) -> Arc<Tokens> {
        self.tokens.clone()
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

    /// Brings every volume of the pod to what the API says now.
    pub(crate) async fn set_up(&self, pod: &Pod, now: Timestamp) -> Result<PodVolumes, VolumeError> {
        let mut ready = PodVolumes::default();
        let fs_group = model::spec(pod).security_context.as_ref().and_then(|c| c.fs_group);
        let group = fs_group.and_then(|g| u32::try_from(g).ok());
        for volume in model::spec(pod).volumes.iter().flatten() {
            let one = self.set_up_one(pod, volume, group, now, &mut ready.refresh_at).await;
            let one = one.map_err(|source| VolumeError { volume: volume.name.clone(), source })?;
            ready.volumes.insert(volume.name.clone(), one);
        }
        Ok(ready)
    }

    async fn set_up_one(
        &self,
        pod: &Pod,
        volume: &Volume,
        group: Option<u32>,
        now: Timestamp,
        refresh_at: &mut Option<Timestamp>,
    ) -> Result<ReadyVolume, SourceError> {
        let id = PodId::of(pod);
        let dir = |plugin: &str| {
            self.pod_dir(&id.uid).join("volumes").join(format!("kubernetes.io~{plugin}")).join(&volume.name)
        };
        if let Some(source) = &volume.host_path {
            let (path, kind) = (source.path.clone(), source.type_.clone().unwrap_or_default());
            // The path may be on a file system that does not answer.
            tokio::task::spawn_blocking(move || host_path::ensure(&path, &kind)).await.map_err(|e| {
                SourceError::Io { path: source.path.clone().into(), source: io::Error::other(e) }
            })??;
            return Ok(ReadyVolume { path: PathBuf::from(&source.path), read_only: false });
        }
        if let Some(source) = &volume.empty_dir {
            let path = dir("empty-dir");
            let limit = source.size_limit.as_ref().and_then(quantity::value).filter(|l| *l > 0);
            let memory = source.medium.as_deref() == Some("Memory");
            let target = path.clone();
            blocking(&path, move || empty_dir::ensure(&target, memory, limit, group)).await?;
            return Ok(ReadyVolume { path, read_only: false });
        }
        let (plugin, in_memory, payload) = if let Some(s) = &volume.config_map {
            let default = payload::mode(s.default_mode, 0o644);
            ("configmap", false, self.config_map(&id, &s.name, s.items.as_ref(), default, s.optional).await?)
        } else if let Some(s) = &volume.secret {
            let default = payload::mode(s.default_mode, 0o644);
            let name = s.secret_name.as_deref().unwrap_or_default();
            ("secret", true, self.secret(&id, name, s.items.as_ref(), default, s.optional).await?)
        } else if let Some(s) = &volume.downward_api {
            let default = payload::mode(s.default_mode, 0o644);
            let items = s.items.as_deref().unwrap_or_default();
            ("downward-api", true, payload::from_fields(pod, items, default, &self.node)?)
        } else if let Some(s) = &volume.projected {
            ("projected", true, self.projected(pod, &id, s, now, refresh_at).await?)
        } else {
            return Err(SourceError::Unsupported);
        };
        let path = dir(plugin);
        let target = path.clone();
        blocking(&path, move || {
            if in_memory {
                kernel::ensure_tmpfs(&target, kernel::Tmpfs { mode: 0o755, group: None, size: None })?;
            }
            atomic::write(&target, &payload, group)
        })
        .await?;
        Ok(ReadyVolume { path, read_only: true })
    }

    async fn config_map(
        &self,
        pod: &PodId,
        name: &str,
        items: Option<&Vec<KeyToPath>>,
        mode: u32,
        optional: Option<bool>,
    ) -> Result<Payload, SourceError> {
        let optional = optional == Some(true);
        match self.objects.config_map(&pod.uid, &pod.namespace, name).await? {
            Some(map) => {
                Ok(payload::from_data("config", &objects::config_map_data(&map), items, mode, optional)?)
            }
            None if optional => Ok(Payload::new()),
            None => Err(SourceError::NotFound { kind: "configmap", name: name.into() }),
        }
    }

    async fn secret(
        &self,
        pod: &PodId,
        name: &str,
        items: Option<&Vec<KeyToPath>>,
        mode: u32,
        optional: Option<bool>,
    ) -> Result<Payload, SourceError> {
        let optional = optional == Some(true);
        match self.objects.secret(&pod.uid, &pod.namespace, name).await? {
            Some(secret) => {
                Ok(payload::from_data("secret", &objects::secret_data(&secret), items, mode, optional)?)
            }
            None if optional => Ok(Payload::new()),
            None => Err(SourceError::NotFound { kind: "secret", name: name.into() }),
        }
    }

    async fn projected(
        &self,
        pod: &Pod,
        id: &PodId,
        source: &ProjectedVolumeSource,
        now: Timestamp,
        refresh_at: &mut Option<Timestamp>,
    ) -> Result<Payload, SourceError> {
        let mode = payload::mode(source.default_mode, 0o644);
        let mut all = Payload::new();
        for part in source.sources.iter().flatten() {
            if let Some(s) = &part.config_map {
                all.extend(self.config_map(id, &s.name, s.items.as_ref(), mode, s.optional).await?);
            } else if let Some(s) = &part.secret {
                all.extend(self.secret(id, &s.name, s.items.as_ref(), mode, s.optional).await?);
            } else if let Some(s) = &part.downward_api {
                let items = s.items.as_deref().unwrap_or_default();
                all.extend(payload::from_fields(pod, items, mode, &self.node)?);
            } else if let Some(s) = &part.service_account_token {
                let path = payload::checked(&s.path)?;
                if let Some(token) = self.tokens.get(pod, s, now).await? {
                    *refresh_at = Some(refresh_at.map_or(token.refresh_at, |at| at.min(token.refresh_at)));
                    all.insert(path, payload::File { data: token.text.into_bytes(), mode });
                }
            }
        }
        Ok(all)
    }

    /// The mounts of one container. `env` is what `subPathExpr` may refer to.
    pub(crate) async fn mounts(
        &self,
        pod: &Pod,
        container: &PodContainer,
        volumes: &PodVolumes,
        env: &[(String, String)],
    ) -> Result<Vec<Mount>, VolumeError> {
        let mut mounts = Vec::new();
        for (index, wanted) in container.spec.volume_mounts.iter().flatten().enumerate() {
            let fail = |source| VolumeError { volume: wanted.name.clone(), source };
            let volume = volumes.volumes.get(&wanted.name).ok_or_else(|| fail(SourceError::Unsupported))?;
            let host_path = match sub_path(wanted, env) {
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

    /// Unmounts and removes everything of the pod.
    pub(crate) async fn tear_down(&self, uid: &str) -> io::Result<()> {
        self.tokens.forget(uid);
        self.objects.release(uid);
        let dir = self.pod_dir(uid);
        tokio::task::spawn_blocking(move || kernel::remove_tree(&dir)).await.map_err(io::Error::other)?
    }
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_string() } else { format!("/{path}") }
}

fn sub_path(mount: &VolumeMount, env: &[(String, String)]) -> Option<String> {
    if let Some(expr) = mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        let lookup = |name: &str| env.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        return Some(expand(expr, lookup));
    }
    mount.sub_path.clone().filter(|s| !s.is_empty())
}

/// Runs work on files away from the threads that must not block. `path` names it in the error.
async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, SourceError> {
    let done = tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)));
    done.map_err(|source| SourceError::Io { path: path.to_owned(), source })
}
