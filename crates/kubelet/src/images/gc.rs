//! Removal of unused images when the image file system fills up.

use super::PulledImages;
use crate::clock::{self, Clock};
use ferrite_client::{EventRecorder, EventType};
use ferrite_cri::v1::{
    ContainerStatusRequest, ImageFsInfoRequest, ImageSpec, ListContainersRequest, ListImagesRequest,
    RemoveImageRequest,
};
use ferrite_cri::{ImageService, RuntimeService};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// As upstream.
const PERIOD: Duration = Duration::from_secs(300);

/// When images are removed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageGcPolicy {
    /// Images go when the file system is this full, in percent; 100 disables it.
    pub high: u8,
    /// … until it is no fuller than this.
    pub low: u8,
    /// Younger images stay.
    pub min_age: Duration,
    /// Images that nobody used for longer go in any case; zero disables it.
    pub max_age: Duration,
}

/// Parts unused images into those that are too old and the rest. As upstream, no image is too old before the kubelet has
/// watched for that long.
fn too_old(
    unused: Vec<Candidate>,
    began: Timestamp,
    now: Timestamp,
    max_age: Duration,
) -> (Vec<Candidate>, Vec<Candidate>) {
    if max_age.is_zero() || clock::since(began, now) <= max_age {
        return (Vec::new(), unused);
    }
    unused.into_iter().partition(|candidate| clock::since(candidate.seen.used, now) > max_age)
}

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
fn plan(mut unused: Vec<Candidate>, excess: u64, now: Timestamp, min_age: Duration) -> Vec<Candidate> {
    unused.retain(|c| clock::since(c.seen.first, now) >= min_age);
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
    pub policy: ImageGcPolicy,
    /// When the kubelet started.
    pub began: Timestamp,
    /// Told when images went.
    pub changed: Arc<Notify>,
    pub seen: SeenImages,
    pub pulled: PulledImages,
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
        let mut in_use = BTreeSet::new();
        for container in containers.containers {
            // Images can be volumes, too.
            let request = ContainerStatusRequest { container_id: container.id, verbose: false };
            let status = self.runtime.container_status(request).await.ok().and_then(|answer| answer.status);
            let mounts = status.map(|status| status.mounts).unwrap_or_default();
            in_use.extend(mounts.into_iter().filter_map(|mount| Some(mount.image?.image)));
            in_use.extend([container.image_ref, container.image_id]);
            in_use.extend(container.image.map(|image| image.image));
        }
        let images = self.images.list_images(ListImagesRequest { filter: None }).await?.images;
        let mut present: HashSet<String> = images.iter().map(|image| image.id.clone()).collect();
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
        let ImageGcPolicy { high, low, min_age, max_age } = self.policy;
        let (old, unused) = too_old(unused, self.began, now, max_age);
        let mut removed = false;
        for candidate in old {
            if self.remove(&candidate).await {
                present.remove(&candidate.id);
                removed = true;
            }
        }
        if removed {
            self.changed.notify_one();
        }
        let excess = match wanted {
            Wanted::Everything => Some(u64::MAX),
            Wanted::Excess => self.space().await?.and_then(|space| excess(space, high, low)),
        };
        let Some(excess) = excess else {
            self.pulled.prune(present, now, &*self.images).await;
            return Ok(());
        };
        let mut freed = 0u64;
        for candidate in plan(unused, excess, now, min_age) {
            if self.remove(&candidate).await {
                freed = freed.saturating_add(candidate.size);
                present.remove(&candidate.id);
            }
        }
        self.pulled.prune(present, now, &*self.images).await;
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

    async fn remove(&self, candidate: &Candidate) -> bool {
        let spec = ImageSpec { image: candidate.id.clone(), ..ImageSpec::default() };
        let removed = self.images.remove_image(RemoveImageRequest { image: Some(spec) }).await;
        if let Err(error) = &removed {
            tracing::warn!(image = %candidate.id, %error, "could not remove an image");
        }
        removed.is_ok()
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
    fn images_that_nobody_used_for_long_go() {
        let candidate =
            |id: &str, used| Candidate { id: id.into(), size: 1, seen: Seen { first: at(0), used } };
        let unused =
            vec![candidate("never", Timestamp::MIN), candidate("old", at(100)), candidate("new", at(900))];
        // Seconds of the kubelet's life and of the age, and who goes.
        for (now, age, expected) in [
            (1000, 0, vec![]),
            (1000, 1000, vec![]),
            (1000, 500, vec!["never", "old"]),
            (1000, 50, vec!["never", "old", "new"]),
            (40, 50, vec![]),
        ] {
            let (old, rest) = too_old(unused.clone(), at(0), at(now), Duration::from_secs(age));
            assert_eq!(old.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), expected, "{now} {age}");
            assert_eq!(old.len() + rest.len(), unused.len());
        }
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
        let ids = |excess| {
            plan(unused.clone(), excess, at(1000), Duration::from_secs(120))
                .into_iter()
                .map(|c| c.id)
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(5), ["older"]);
        assert_eq!(ids(15), ["older", "old"]);
        assert_eq!(ids(1000), ["older", "old", "recent"]);
    }
}
