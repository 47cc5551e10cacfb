//! downwardAPI volumes.

use super::plugins::{SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError, content, payload};
use futures_util::FutureExt;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.downward_api.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.downward_api.as_ref().ok_or(SourceError::Unsupported)?;
    let mode = payload::mode(source.default_mode, 0o644);
    let items = source.items.as_deref().unwrap_or_default();
    let files = payload::from_fields(request.pod, items, mode, &request.volumes.limits)?;
    content::write(request, "downward-api", true, files).await
}
