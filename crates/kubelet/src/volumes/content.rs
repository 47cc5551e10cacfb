//! Volumes of files that the kubelet writes.

use super::payload::{self, Payload};
use super::plugins::SetUp;
use super::stats::Measure;
use super::{ReadyVolume, SourceError, Volumes, atomic, blocking, kernel};
use crate::objects;
use crate::pod::model::PodId;
use k8s_openapi::api::core::v1::KeyToPath;

/// Writes the files of a volume. Containers never write it, as upstream: the kubelet writes it as root.
pub(super) async fn write(
    request: SetUp<'_>,
    plugin: &str,
    in_memory: bool,
    payload: Payload,
) -> Result<ReadyVolume, SourceError> {
    let path = request.dir(plugin);
    let (target, group) = (path.clone(), request.group);
    blocking(&path, move || {
        if in_memory {
            kernel::ensure_tmpfs(&target, kernel::Tmpfs { mode: 0o755, group: None, size: None })?;
        }
        atomic::write(&target, &payload, group)
    })
    .await?;
    Ok(ReadyVolume { read_only: true, measure: Some(Measure::Count), ..ReadyVolume::writable(path) })
}

/// Which keys of an object become which files.
#[derive(Clone, Copy)]
pub(super) struct Selection<'a> {
    pub items: Option<&'a Vec<KeyToPath>>,
    pub mode: u32,
    pub optional: bool,
}

impl Volumes {
    pub(super) async fn config_map(
        &self,
        pod: &PodId,
        name: &str,
        wanted: Selection<'_>,
    ) -> Result<Payload, SourceError> {
        let Selection { items, mode, optional } = wanted;
        match self.objects.config_map(&pod.uid, &pod.namespace, name).await? {
            Some(map) => {
                Ok(payload::from_data("config", &objects::config_map_data(&map), items, mode, optional)?)
            }
            None if optional => Ok(Payload::new()),
            None => Err(SourceError::NotFound { kind: "configmap", name: name.into() }),
        }
    }

    pub(super) async fn secret(
        &self,
        pod: &PodId,
        name: &str,
        wanted: Selection<'_>,
    ) -> Result<Payload, SourceError> {
        let Selection { items, mode, optional } = wanted;
        match self.objects.secret(&pod.uid, &pod.namespace, name).await? {
            Some(secret) => {
                Ok(payload::from_data("secret", &objects::secret_data(&secret), items, mode, optional)?)
            }
            None if optional => Ok(Payload::new()),
            None => Err(SourceError::NotFound { kind: "secret", name: name.into() }),
        }
    }
}
