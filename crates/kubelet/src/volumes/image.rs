//! Images as volumes: the runtime mounts an image's files, read-only, wherever a container wants them.
//!
//! There is nothing on the node to set up. The image is pulled when a container that mounts it starts, as the volume's
//! pull policy says.

use super::plugins::VolumePlugin;
use super::{ReadyVolume, SourceError};
use crate::pod::model::{self, PodContainer};
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::{Container, Pod, Volume};
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.image.is_some(),
    set_up: |_| {
        let volume = ReadyVolume { read_only: true, settled: true, ..ReadyVolume::writable(PathBuf::new()) };
        async { Ok::<_, SourceError>(volume) }.boxed()
    },
};

/// Images that the runtime has, by the name of the volume that mounts them.
pub(crate) type PresentImages = BTreeMap<String, String>;

/// The image volumes that a container mounts.
pub(crate) fn mounted<'a>(pod: &'a Pod, container: &'a PodContainer) -> impl Iterator<Item = &'a Volume> {
    let mounts = container.spec.volume_mounts.as_deref().unwrap_or_default();
    let volumes = model::spec(pod).volumes.iter().flatten();
    volumes.filter(|volume| volume.image.is_some() && mounts.iter().any(|mount| mount.name == volume.name))
}

/// The container in whose name the volume's image is pulled: its events and its failures are the container's.
pub(crate) fn puller(container: &PodContainer, volume: &Volume) -> PodContainer {
    let image = volume.image.clone().unwrap_or_default();
    PodContainer {
        kind: container.kind,
        target: None,
        spec: Container {
            name: container.name().to_owned(),
            image: image.reference,
            image_pull_policy: image.pull_policy,
            ..Container::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn only_mounted_images_are_pulled_with_their_own_policy() {
        let pod: Pod = ferrite_json::from_value(json!({"spec": {
            "containers": [{"name": "c", "image": "app", "volumeMounts": [{"name": "data", "mountPath": "/d"},
                                                                         {"name": "dir", "mountPath": "/e"}]}],
            "volumes": [{"name": "data", "image": {"reference": "r/data:1", "pullPolicy": "Always"}},
                        {"name": "other", "image": {"reference": "r/other:1"}}, {"name": "dir", "emptyDir": {}}],
        }}))
        .unwrap();
        let containers = model::containers(&pod);
        let volumes: Vec<&Volume> = mounted(&pod, &containers[0]).collect();
        assert_eq!(volumes.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["data"]);
        let puller = puller(&containers[0], volumes[0]);
        assert_eq!(puller.name(), "c");
        assert_eq!(puller.spec.image.as_deref(), Some("r/data:1"));
        assert_eq!(puller.spec.image_pull_policy.as_deref(), Some("Always"));
    }
}
