//! projected volumes: files of several sources in one directory.

use super::content::{self, Selection};
use super::payload::{self, Payload};
use super::plugins::{SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError};
use futures_util::FutureExt;
use jiff::Timestamp;

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.projected.is_some(),
    set_up: |request: SetUp<'_>| set_up(request).boxed(),
};

async fn set_up(request: SetUp<'_>) -> Result<ReadyVolume, SourceError> {
    let source = request.volume.projected.as_ref().ok_or(SourceError::Unsupported)?;
    let SetUp { volumes, pod, id, now, .. } = request;
    let mode = payload::mode(source.default_mode, 0o644);
    let mut refresh_at: Option<Timestamp> = None;
    let mut all = Payload::new();
    for part in source.sources.iter().flatten() {
        if let Some(s) = &part.config_map {
            let wanted = Selection { items: s.items.as_ref(), mode, optional: s.optional == Some(true) };
            all.extend(volumes.config_map(id, &s.name, wanted).await?);
        } else if let Some(s) = &part.secret {
            let wanted = Selection { items: s.items.as_ref(), mode, optional: s.optional == Some(true) };
            all.extend(volumes.secret(id, &s.name, wanted).await?);
        } else if let Some(s) = &part.downward_api {
            let items = s.items.as_deref().unwrap_or_default();
            all.extend(payload::from_fields(pod, items, mode, &volumes.limits)?);
        } else if let Some(s) = &part.service_account_token {
            let path = payload::checked(&s.path)?;
            if let Some(token) = volumes.tokens.get(pod, s, now).await? {
                refresh_at = Some(refresh_at.map_or(token.refresh_at, |at| at.min(token.refresh_at)));
                all.insert(path, payload::File { data: token.text.into_bytes(), mode });
            }
        }
    }
    let ready = content::write(request, "projected", true, all).await?;
    Ok(ReadyVolume { refresh_at, ..ready })
}
