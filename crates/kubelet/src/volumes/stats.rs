//! The space in the volumes of pods: for `/stats/summary` and the metrics `kubelet_volume_stats_*`.
//!
//! A volume is measured when somebody asks and the last figures are older than `volumeStatsAggPeriod`. A file system or a
//! driver that does not answer holds up nothing: its last figures are shown, and it is not asked a second time meanwhile.

use super::csi::Csi;
use futures_util::StreamExt;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The longest that a caller waits for figures.
const PATIENCE: Duration = Duration::from_secs(5);
/// Volumes that are measured at a time.
const AT_A_TIME: usize = 8;
/// Most files counted in one volume.
const MAX_COUNTED: u64 = 1 << 20;

/// The way to measure a volume, as upstream's plugins do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Measure {
    /// Its files are counted: the file system is not its own.
    Count,
    /// The file system is its own.
    FileSystem,
    /// The driver is asked.
    Driver { driver: String, handle: String, staging: Option<PathBuf> },
}

/// Bytes and inodes of a volume. Absent: not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct VolumeFigures {
    pub available: Option<u64>,
    pub capacity: Option<u64>,
    pub used: Option<u64>,
    pub inodes: Option<u64>,
    pub inodes_free: Option<u64>,
    pub inodes_used: Option<u64>,
}

/// One volume with its figures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MeasuredVolume {
    pub name: String,
    /// The name of the claim that the pod uses it through.
    pub claim: Option<String>,
    pub at: Timestamp,
    pub figures: VolumeFigures,
}

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    claim: Option<String>,
    measure: Measure,
    /// A measurement is under way.
    busy: AtomicBool,
    last: Mutex<Option<(Instant, Timestamp, VolumeFigures)>>,
}

impl Entry {
    fn last(&self) -> MutexGuard<'_, Option<(Instant, Timestamp, VolumeFigures)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stale(&self, period: Duration) -> bool {
        self.last().is_none_or(|(at, _, _)| at.elapsed() >= period)
    }
}

/// Ends the measurement of a volume, however it ends.
struct Busy(Arc<Entry>);

impl Busy {
    fn begin(entry: &Arc<Entry>) -> Option<Self> {
        let begun = !entry.busy.swap(true, Ordering::AcqRel);
        begun.then(|| Self(entry.clone()))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

type Pods = BTreeMap<String, BTreeMap<String, Arc<Entry>>>;

/// The volumes of the node's pods.
#[derive(Debug, Default)]
pub(crate) struct VolumeStats {
    /// None: volumes are not measured.
    period: Option<Duration>,
    pods: Mutex<Pods>,
}

impl VolumeStats {
    pub(super) fn new(period: Option<Duration>) -> Self {
        Self { period, pods: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod has the volume. One that is known keeps its figures.
    pub(super) fn note(&self, uid: &str, name: &str, path: &Path, claim: Option<String>, measure: Measure) {
        let mut pods = self.lock();
        let volumes = pods.entry(uid.to_owned()).or_default();
        let known = volumes
            .get(name)
            .is_some_and(|entry| entry.path == path && entry.measure == measure && entry.claim == claim);
        if !known {
            let entry = Entry {
                path: path.to_owned(),
                claim,
                measure,
                busy: AtomicBool::new(false),
                last: Mutex::default(),
            };
            volumes.insert(name.to_owned(), Arc::new(entry));
        }
    }

    pub(super) fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// The figures of all volumes, by UID of the pod.
    pub(super) async fn figures(&self, csi: &Csi) -> BTreeMap<String, Vec<MeasuredVolume>> {
        let Some(period) = self.period else { return BTreeMap::new() };
        let stale: Vec<Arc<Entry>> = {
            let pods = self.lock();
            pods.values()
                .flat_map(|volumes| volumes.values())
                .filter(|e| e.is_stale(period))
                .cloned()
                .collect()
        };
        let measuring =
            futures_util::stream::iter(stale).for_each_concurrent(AT_A_TIME, |entry| async move {
                let Some(busy) = Busy::begin(&entry) else { return };
                measure(csi, busy).await;
            });
        let _ = tokio::time::timeout(PATIENCE, measuring).await;
        let pods = self.lock();
        let shown = |(name, entry): (&String, &Arc<Entry>)| {
            let (_, at, figures) = (*entry.last())?;
            Some(MeasuredVolume { name: name.clone(), claim: entry.claim.clone(), at, figures })
        };
        pods.iter().map(|(uid, volumes)| (uid.clone(), volumes.iter().filter_map(shown).collect())).collect()
    }
}

/// Measures one volume. A thread that hangs in the kernel keeps the volume busy, and nothing else.
async fn measure(csi: &Csi, busy: Busy) {
    let entry = busy.0.clone();
    let figures = match entry.measure.clone() {
        Measure::Driver { driver, handle, staging } => {
            csi.figures(&driver, &handle, &entry.path, staging.as_deref()).await
        }
        how @ (Measure::Count | Measure::FileSystem) => {
            let path = entry.path.clone();
            let counted = tokio::task::spawn_blocking(move || {
                let figures = of_path(&path, how == Measure::Count);
                if let Some(figures) = figures {
                    *busy.0.last() = Some((Instant::now(), Timestamp::now(), figures));
                }
                drop(busy);
            });
            let _ = counted.await;
            return;
        }
    };
    if let Some(figures) = figures {
        *entry.last() = Some((Instant::now(), Timestamp::now(), figures));
    }
}

/// The figures of a directory.
fn of_path(path: &Path, count: bool) -> Option<VolumeFigures> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    let (inodes, inodes_free) = (stat.files(), stat.files_free());
    let mut figures = VolumeFigures {
        available: Some(bytes(stat.blocks_available())),
        capacity: Some(bytes(stat.blocks())),
        used: Some(bytes(stat.blocks().saturating_sub(stat.blocks_free()))),
        inodes: Some(inodes),
        inodes_free: Some(inodes_free),
        inodes_used: Some(inodes.saturating_sub(inodes_free)),
    };
    if count {
        let counted = ferrite_hostfs::usage(path, MAX_COUNTED).ok()?;
        (figures.used, figures.inodes_used) = (Some(counted.bytes), Some(counted.inodes));
    }
    Some(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted_or_the_file_system_is() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), vec![1; 8192]).unwrap();
        let counted = of_path(dir.path(), true).unwrap();
        assert!((8192..1 << 20).contains(&counted.used.unwrap()), "{counted:?}");
        assert!(counted.inodes_used >= Some(1));
        let whole = of_path(dir.path(), false).unwrap();
        assert_eq!(whole.capacity, counted.capacity);
        assert!(whole.used >= counted.used || whole.capacity == Some(0));
        assert_eq!(of_path(&dir.path().join("none"), false), None);
    }

    #[test]
    fn a_volume_is_measured_once_at_a_time_and_keeps_its_figures() {
        let stats = VolumeStats::new(Some(Duration::from_secs(60)));
        let note = |path: &str| stats.note("u", "v", Path::new(path), None, Measure::FileSystem);
        note("/a");
        let entry = stats.lock()["u"]["v"].clone();
        assert!(entry.is_stale(Duration::from_secs(60)));
        let busy = Busy::begin(&entry).unwrap();
        assert!(Busy::begin(&entry).is_none());
        drop(busy);
        assert!(Busy::begin(&entry).is_some());
        note("/a");
        assert!(Arc::ptr_eq(&entry, &stats.lock()["u"]["v"]), "nothing changed");
        note("/b");
        assert!(!Arc::ptr_eq(&entry, &stats.lock()["u"]["v"]));
        stats.forget("u");
        assert!(stats.lock().is_empty());
    }
}
