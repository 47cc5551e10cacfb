//! image volumes: the files of an image, read-only. The image is pulled with the containers that mount it, and the runtime
//! mounts it.

use super::plugins::{SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError};
use crate::images::ImageRequest;
use crate::pod::model::{self, PodContainer};
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Pod;
use std::path::PathBuf;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.image.is_some(),
    set_up: |request: SetUp<'_>| {
        async move {
            let source = request.volume.image.as_ref().ok_or(SourceError::Unsupported)?;
            let image = source.reference.clone().unwrap_or_default();
            let image = crate::images::tagged(&image);
            let ready = ReadyVolume::writable(PathBuf::new());
            Ok(ReadyVolume { image: Some(image), read_only: true, settled: true, ..ready })
        }
        .boxed()
    },
};

/// The images that the container mounts.
pub(crate) fn images_of<'a>(pod: &'a Pod, container: &'a PodContainer) -> Vec<ImageRequest<'a>> {
    let mounted = |name: &str| container.spec.volume_mounts.iter().flatten().any(|mount| mount.name == name);
    let volumes = model::spec(pod).volumes.iter().flatten().filter(|volume| mounted(&volume.name));
    volumes
        .filter_map(|volume| {
            let source = volume.image.as_ref()?;
            Some(ImageRequest {
                image: source.reference.as_deref().unwrap_or_default(),
                policy: source.pull_policy.as_deref(),
                key: format!("{}/{}", container.name(), volume.name),
                about: model::reference(pod, Some(container.field_path())),
            })
        })
        .collect()
}
