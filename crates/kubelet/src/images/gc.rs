//! Removal of unused images when the image file system fills up.

use crate::clock::{self, Clock};
use ferrite_client::{EventRecorder, EventType};
use ferrite_cri::v1::{
    ImageFsInfoRequest, ImageSpec, ListContainersRequest, ListImagesRequest, RemoveImageRequest,
};
use ferrite_cri::{ImageService, RuntimeService};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// As upstream.
const PERIOD: Duration = Duration::from_secs(300);
const MIN_AGE: Duration = Duration::from_secs(120);

/// When an image was first seen, and last seen in use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    first: Timestamp,
    used: Timestamp,
}

#[derive(Debug, Clone)]
struct Candidate {
    id: String,
    size: u64,
    seen: Seen,
}

/// Bytes of a file system.
#[derive(Debug, Clone, Copy)]
struct Space {
    capacity: u64,
    available: u64,
}

/// Bytes to free; `None` while the file system is not too full.
fn excess(space: Space, high: u8, low: u8) -> Option<u64> {
    if space.capacity == 0 || high >= 100 {
        return None;
    }
    let available = space.available.min(space.capacity);
    let used_percent = 100 - available.saturating_mul(100) / space.capacity;
    if used_percent < u64::from(high) {
        return None;
    }
    let target = space.capacity / 100 * (100 - u64::from(low.min(100)));
    Some(target.saturating_sub(available)).filter(|bytes| *bytes > 0)
}

/// Which images go, the longest unused first, until enough is freed.
fn plan(mut unused: Vec<Candidate>, excess: u64, now: Timestamp) -> Vec<Candidate> {
    unused.retain(|c| clock::since(c.seen.first, now) >= MIN_AGE);
    unused.sort_by_key(|c| (c.seen.used, c.seen.first));
    let mut freed = 0u64;
    unused
        .into_iter()
        .take_while(|c| {
            let needed = freed < excess;
            freed = freed.saturating_add(c.size);
            needed
        })
        .collect()
}

pub(crate) struct ImageGc {
    pub images: Arc<dyn ImageService>,
    pub runtime: Arc<dyn RuntimeService>,
    pub recorder: EventRecorder,
    pub node: ObjectReference,
    pub clock: Clock,
    pub high: u8,
    pub low: u8,
    /// Told when images went.
    pub changed: Arc<Notify>,
    pub seen: SeenImages,
}

/// When images were seen, kept between passes. One pass at a time has it.
#[derive(Default)]
pub(crate) struct SeenImages(tokio::sync::Mutex<HashMap<String, Seen>>);

/// The amount of images to remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// As the thresholds say.
    Excess,
    Everything,
}

impl ImageGc {
    pub(crate) async fn run(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut failed_before = false;
        loop {
            ticks.tick().await;
            match self.pass(Wanted::Excess).await {
                Ok(()) => failed_before = false,
                Err(e) => {
                    tracing::warn!(error = %e, "image garbage collection failed");
                    // The first failure may only mean that the runtime has no figures yet.
                    if failed_before {
                        self.recorder.event(&self.node, EventType::Warning, "ImageGCFailed", e.to_string());
                    }
                    failed_before = true;
                }
            }
        }
    }

    /// Removes every image that nobody uses and that is not new.
    pub(crate) async fn remove_unused(&self) -> ferrite_cri::Result<()> {
        self.pass(Wanted::Everything).await
    }

    async fn pass(&self, wanted: Wanted) -> ferrite_cri::Result<()> {
        let mut seen = self.seen.0.lock().await;
        let now = self.clock.now();
        let containers = self.runtime.list_containers(ListContainersRequest { filter: None }).await?;
        let in_use: BTreeSet<String> = containers
            .containers
            .into_iter()
            .flat_map(|c| [c.image_ref, c.image_id, c.image.map(|i| i.image).unwrap_or_default()])
            .collect();
        let images = self.images.list_images(ListImagesRequest { filter: None }).await?.images;
        seen.retain(|id, _| images.iter().any(|i| i.id == *id));
        let mut unused = Vec::new();
        for image in images {
            let entry = seen.entry(image.id.clone()).or_insert(Seen { first: now, used: Timestamp::MIN });
            let names = std::iter::once(&image.id).chain(&image.repo_tags).chain(&image.repo_digests);
            if names.into_iter().any(|name| in_use.contains(name)) {
                entry.used = now;
            } else if !image.pinned {
                unused.push(Candidate { id: image.id, size: image.size, seen: *entry });
            }
        }
        let excess = match wanted {
            Wanted::Everything => Some(u64::MAX),
            Wanted::Excess => self.space().await?.and_then(|space| excess(space, self.high, self.low)),
        };
        let Some(excess) = excess else { return Ok(()) };
        let mut freed = 0u64;
        for candidate in plan(unused, excess, now) {
            let spec = ImageSpec { image: candidate.id.clone(), ..ImageSpec::default() };
            match self.images.remove_image(RemoveImageRequest { image: Some(spec) }).await {
                Ok(_) => freed = freed.saturating_add(candidate.size),
                Err(e) => tracing::warn!(image = %candidate.id, error = %e, "could not remove an image"),
            }
        }
        if freed > 0 {
            self.changed.notify_one();
        }
        if freed < excess && wanted == Wanted::Excess {
            let message = format!(
                "Failed to garbage collect required amount of images. Attempted to free {excess} bytes, but only found {freed} bytes eligible to free."
            );
            self.recorder.event(&self.node, EventType::Warning, "FreeDiskSpaceFailed", message);
        }
        Ok(())
    }

    async fn space(&self) -> ferrite_cri::Result<Option<Space>> {
        let info = self.images.image_fs_info(ImageFsInfoRequest {}).await?;
        let Some(mountpoint) =
            info.image_filesystems.into_iter().find_map(|f| f.fs_id).map(|id| id.mountpoint)
        else {
            return Ok(None);
        };
        let stat = nix::sys::statvfs::statvfs(Path::new(&mountpoint))
            .map_err(|e| ferrite_cri::Error::internal(format!("{mountpoint}: {e}")))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
        Ok(Some(Space { capacity: bytes(stat.blocks()), available: bytes(stat.blocks_available()) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    #[test]
    fn space_is_only_freed_above_the_high_threshold() {
        let gib = 1u64 << 30;
        for (available, high, expected) in [
            (50 * gib, 85, None),
            (16 * gib, 85, None),
            (15 * gib, 85, Some(5 * gib)),
            (0, 85, Some(20 * gib)),
            (0, 100, None),
        ] {
            let space = Space { capacity: 100 * gib, available };
            assert_eq!(excess(space, high, 80), expected, "{available}");
        }
        assert_eq!(excess(Space { capacity: 0, available: 0 }, 85, 80), None);
    }

    #[test]
    fn the_longest_unused_go_first_and_fresh_ones_stay() {
        let candidate = |id: &str, first, used| Candidate {
            id: id.into(),
            size: 10,
            seen: Seen { first: at(first), used: at(used) },
        };
        let unused = vec![
            candidate("recent", 0, 900),
            candidate("old", 0, 100),
            candidate("fresh", 950, 0),
            candidate("older", 0, 50),
        ];
        let ids =
            |excess| plan(unused.clone(), excess, at(1000)).into_iter().map(|c| c.id).collect::<Vec<_>>();
        assert_eq!(ids(5), ["older"]);
        assert_eq!(ids(15), ["older", "old"]);
        assert_eq!(ids(1000), ["older", "old", "recent"]);
    }
}
