//! configMap volumes.

use super::content::{self, Selection};
use super::plugins::{SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError, payload};
use futures_util::FutureExt;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.config_map.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.config_map.as_ref().ok_or(SourceError::Unsupported)?;
    let wanted = Selection {
        items: source.items.as_ref(),
        mode: payload::mode(source.default_mode, 0o644),
        optional: source.optional == Some(true),
    };
    let files = request.volumes.config_map(request.id, &source.name, wanted).await?;
    content::write(request, "configmap", false, files).await
}
