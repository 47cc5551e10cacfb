//! The space in a volume, as its driver tells it.

use super::Csi;
use crate::volumes::stats::VolumeFigures;
use ferrite_csi::v1::volume_usage::Unit;
use ferrite_csi::v1::{NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse};
use std::path::Path;

impl Csi {
    /// Asks the driver, if it can tell.
    pub(crate) async fn figures(
        &self,
        driver: &str,
        handle: &str,
        path: &Path,
        staging: Option<&Path>,
    ) -> Option<VolumeFigures> {
        let service = self.shared.drivers.get(driver)?;
        if !service.capabilities().await.ok()?.stats() {
            return None;
        }
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let request = NodeGetVolumeStatsRequest {
            volume_id: handle.to_owned(),
            volume_path: text(path),
            staging_target_path: staging.map(text).unwrap_or_default(),
        };
        match service.node_get_volume_stats(request).await {
            Ok(answer) => Some(read(&answer)),
            Err(error) => {
                tracing::debug!(driver, handle, %error, "a CSI driver did not tell the space in a volume");
                None
            }
        }
    }
}

/// Reads an answer. A negative number is none.
fn read(answer: &NodeGetVolumeStatsResponse) -> VolumeFigures {
    let mut figures = VolumeFigures::default();
    let number = |value: i64| u64::try_from(value).ok();
    for usage in &answer.usage {
        match usage.unit() {
            Unit::Bytes => {
                figures.available = number(usage.available);
                figures.capacity = number(usage.total);
                figures.used = number(usage.used);
            }
            Unit::Inodes => {
                figures.inodes_free = number(usage.available);
                figures.inodes = number(usage.total);
                figures.inodes_used = number(usage.used);
            }
            Unit::Unknown => {}
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_csi::v1::VolumeUsage;

    #[test]
    fn answers_are_read_and_lies_are_not_repeated() {
        let usage =
            |unit: Unit, available, total, used| VolumeUsage { available, total, used, unit: unit.into() };
        let answer = NodeGetVolumeStatsResponse {
            usage: vec![
                usage(Unit::Bytes, 1, 3, 2),
                usage(Unit::Inodes, -1, 9, i64::MIN),
                usage(Unit::Unknown, 7, 7, 7),
            ],
            volume_condition: None,
        };
        let expected = VolumeFigures {
            available: Some(1),
            capacity: Some(3),
            used: Some(2),
            inodes: Some(9),
            ..VolumeFigures::default()
        };
        assert_eq!(read(&answer), expected);
    }
}
