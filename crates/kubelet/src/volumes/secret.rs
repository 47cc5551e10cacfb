//! secret volumes.

use super::content::{self, Selection};
use super::plugins::{SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError, payload};
use futures_util::FutureExt;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.secret.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.secret.as_ref().ok_or(SourceError::Unsupported)?;
    let wanted = Selection {
        items: source.items.as_ref(),
        mode: payload::mode(source.default_mode, 0o644),
        optional: source.optional == Some(true),
    };
    let name = source.secret_name.as_deref().unwrap_or_default();
    let files = request.volumes.secret(request.id, name, wanted).await?;
    content::write(request, "secret", true, files).await
}
