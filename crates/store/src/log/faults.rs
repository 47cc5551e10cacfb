//! Tests of the store on a disk that fails.

mod blocks;

use super::disk::{Disk, DiskFile, RealDisk};
use super::{Log, LogOptions};
use crate::store::{OpenError, StoreError};
use crate::txn::{Op, Txn};
use crate::{HistoryLimits, Key, Store};
use bytes::Bytes;
use proptest::prelude::*;
use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The faults that the disk shows now.
#[derive(Debug, Default)]
struct Plan {
    /// A write puts down this many bytes and then fails with this error.
    write: Option<(usize, i32)>,
    sync: Option<i32>,
    set_len: Option<i32>,
    /// Where the last write to each file, known by its inode, ended.
    written: HashMap<u64, u64>,
    /// The disk will lose power: how much of each file was synchronised.
    synced: HashMap<u64, u64>,
    fill: Option<i32>,
    writes: usize,
    /// The ranges written with direct I/O: file, start, end.
    blocks: Vec<(PathBuf, u64, u64)>,
    /// Checkpoints cannot even be begun.
    no_checkpoints: bool,
}

#[derive(Debug, Clone, Default)]
struct FaultyDisk(Arc<Mutex<Plan>>);

#[derive(Debug)]
struct FaultyFile {
    path: PathBuf,
    /// Files are given other names while they are open.
    inode: u64,
    inner: Box<dyn DiskFile>,
    plan: FaultyDisk,
}

impl FaultyDisk {
    fn set(&self, change: impl FnOnce(&mut Plan)) {
        change(&mut self.0.lock().unwrap());
    }

    fn writes(&self) -> usize {
        self.0.lock().unwrap().writes
    }
}

impl Disk for FaultyDisk {
    fn open(&self, path: &Path, truncate: bool) -> io::Result<Box<dyn DiskFile>> {
        if self.0.lock().unwrap().no_checkpoints && path.ends_with("checkpoint.tmp") {
            return Err(errno(libc::ENOSPC));
        }
        let inner = RealDisk.open(path, truncate)?;
        let inode = std::fs::metadata(path)?.ino();
        if truncate {
            // It may have been another file's.
            self.set(|p| {
                p.written.remove(&inode);
                p.synced.remove(&inode);
            });
        }
        Ok(Box::new(FaultyFile { path: path.to_owned(), inode, inner, plan: self.clone() }))
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl DiskFile for FaultyFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut plan = self.plan.0.lock().unwrap();
        plan.writes += 1;
        plan.written.insert(self.inode, offset + bytes.len() as u64);
        match plan.write {
            Some((length, error)) => {
                self.inner.write_all_at(&bytes[..length.min(bytes.len())], offset)?;
                Err(errno(error))
            }
            None => self.inner.write_all_at(bytes, offset),
        }
    }

    fn write_blocks(&self, blocks: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        let mut plan = self.plan.0.lock().unwrap();
        let end = offset + blocks.len() as u64;
        if let Some((length, error)) = plan.write {
            plan.writes += 1;
            plan.written.insert(self.inode, end);
            self.inner.write_all_at(&blocks[..length.min(blocks.len())], offset)?;
            return Err(errno(error));
        }
        self.inner.write_blocks(blocks, offset, durable)?;
        plan.writes += 1;
        plan.written.insert(self.inode, end);
        if durable {
            plan.blocks.push((self.path.clone(), offset, end));
            if let Some(error) = plan.sync {
                return Err(errno(error));
            }
            plan.synced.insert(self.inode, end);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut plan = self.plan.0.lock().unwrap();
        if let Some(error) = plan.sync {
            return Err(errno(error));
        }
        self.inner.sync()?;
        if let Some(end) = plan.written.get(&self.inode).copied() {
            plan.synced.insert(self.inode, end);
        }
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        match self.plan.0.lock().unwrap().set_len {
            Some(error) => Err(errno(error)),
            None => self.inner.set_len(length),
        }
    }

    fn fill(&self, start: u64, end: u64) -> io::Result<()> {
        match self.plan.0.lock().unwrap().fill {
            Some(error) => {
                self.inner.fill(start, start + (end - start) / 2)?;
                Err(errno(error))
            }
            None => self.inner.fill(start, end),
        }
    }
}

fn options() -> LogOptions {
    LogOptions { min_log: 4096, max_ratio: 1, relaxed_window: Duration::from_secs(3600), ahead: 0 }
}

fn open(disk: &FaultyDisk, dir: &Path, options: LogOptions) -> Result<Store, OpenError> {
    let (log, recovered) = Log::open_on(Arc::new(disk.clone()), dir, options, HistoryLimits::default())?;
    Ok(Store::start(recovered, Some(log)))
}

fn put(key: &str, value: &str) -> Txn {
    Txn::default().then(Op::put(Key::from(key), Bytes::copy_from_slice(value.as_bytes())))
}

fn value(store: &Store, key: &str) -> Option<String> {
    store.snapshot().get(key.as_bytes()).map(|e| String::from_utf8_lossy(&e.value).into_owned())
}

#[tokio::test]
async fn a_full_disk_refuses_writers_and_recovers() {
    for written in [0, 1, 11, 12, 30] {
        let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
        let store = open(&disk, dir.path(), options()).unwrap();
        let lease = store.grant(1 << 40).await.unwrap();
        store.commit(put("a", "1")).await.unwrap();
        disk.set(|p| p.write = Some((written, libc::ENOSPC)));
        for attempt in [store.commit(put("a", "2")).await, store.revoke(lease).await] {
            assert!(matches!(attempt, Err(StoreError::Write(_))), "{attempt:?}");
        }
        assert!(store.grant(5).await.is_err());
        assert_eq!(value(&store, "a").as_deref(), Some("1"), "readers go on");
        assert_eq!(
            store.leases().len(),
            1,
            "what was not revoked is still there, what was not granted is not"
        );
        disk.set(|p| p.write = None);
        let revision = store.commit(put("a", "3")).await.unwrap().revision();
        assert_eq!(revision.0, 2, "the revision of what never happened is free");
        store.revoke(lease).await.unwrap();
        drop(store);
        let store = open(&disk, dir.path(), options()).unwrap();
        assert_eq!(value(&store, "a").as_deref(), Some("3"), "after {written} bytes");
        assert_eq!(store.leases(), []);
    }
}

#[tokio::test]
async fn after_a_failed_synchronisation_it_does_not_pretend() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), options()).unwrap();
    store.commit(put("a", "1")).await.unwrap();
    disk.set(|p| p.sync = Some(libc::EIO));
    assert!(matches!(store.commit(put("a", "2")).await, Err(StoreError::Failed(_))));
    disk.set(|p| p.sync = None);
    let writes = disk.writes();
    for _ in 0..3 {
        assert!(matches!(store.commit(put("a", "3")).await, Err(StoreError::Failed(_))));
    }
    assert_eq!(value(&store, "a").as_deref(), Some("1"), "readers go on");
    drop(store);
    assert_eq!(disk.writes(), writes, "not one byte behind what nobody knows");
    // Unconfirmed writes may or may not be there; confirmed ones are.
    let store = open(&disk, dir.path(), options()).unwrap();
    assert!(["1", "2"].contains(&value(&store, "a").unwrap().as_str()));
    store.commit(put("a", "4")).await.unwrap();
}

#[tokio::test]
async fn a_failed_write_that_cannot_be_taken_back_stops_the_store() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), options()).unwrap();
    store.commit(put("a", "1")).await.unwrap();
    disk.set(|p| (p.write, p.set_len) = (Some((10, libc::EIO)), Some(libc::EIO)));
    assert!(matches!(store.commit(put("a", "2")).await, Err(StoreError::Failed(_))));
    disk.set(|p| (p.write, p.set_len) = (None, None));
    assert!(matches!(store.commit(put("a", "3")).await, Err(StoreError::Failed(_))));
    drop(store);
    let store = open(&disk, dir.path(), options()).unwrap();
    assert_eq!(value(&store, "a").as_deref(), Some("1"));
}

#[tokio::test]
async fn heartbeats_wait_for_the_next_durable_change() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), LogOptions { min_log: 1 << 20, ..options() }).unwrap();
    // The first reserves revisions for those that follow.
    store.commit(put("beat", "0").relaxed()).await.unwrap();
    let writes = disk.writes();
    for i in 1..=500 {
        store.commit(put("beat", &i.to_string()).relaxed()).await.unwrap();
    }
    assert_eq!(disk.writes(), writes, "visible without a write");
    assert_eq!(value(&store, "beat").as_deref(), Some("500"));
    store.commit(put("a", "1")).await.unwrap();
    assert_eq!(disk.writes(), writes + 1, "all of them in one write");

    // A full disk takes nothing back that was shown.
    store.commit(put("beat", "501").relaxed()).await.unwrap();
    disk.set(|p| p.write = Some((3, libc::ENOSPC)));
    assert!(store.commit(put("a", "2")).await.is_err());
    assert_eq!(value(&store, "beat").as_deref(), Some("501"));
    disk.set(|p| p.write = None);
    let before = store.snapshot().revision();
    drop(store);
    let store = open(&disk, dir.path(), options()).unwrap();
    assert_eq!(value(&store, "beat").as_deref(), Some("501"), "closing writes what was put off");
    assert_eq!(store.snapshot().revision(), before, "a clean close gives reserved revisions back");
}

#[tokio::test]
async fn heartbeats_are_written_when_their_window_is_over() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let window = LogOptions { relaxed_window: Duration::from_millis(1), ..options() };
    let store = open(&disk, dir.path(), window).unwrap();
    store.commit(put("beat", "0").relaxed()).await.unwrap();
    let writes = disk.writes();
    store.commit(put("beat", "1").relaxed()).await.unwrap();
    let on_disk = || crate::upkeep::inspect(dir.path()).unwrap().revision.0;
    // The file shows it; how long that takes is the machine's affair.
    while disk.writes() == writes {
        tokio::task::yield_now().await;
    }
    assert!(on_disk() >= 2);
}

#[tokio::test]
async fn revisions_of_lost_heartbeats_are_not_used_again() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), options()).unwrap();
    store.commit(put("a", "1")).await.unwrap();
    for i in 0..10 {
        store.commit(put("beat", &i.to_string()).relaxed()).await.unwrap();
    }
    let shown = store.snapshot().revision();
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(dir.path()).unwrap().flatten() {
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    // The copy is the state after a power loss.
    let after = open(&FaultyDisk::default(), copy.path(), options()).unwrap();
    assert_eq!(value(&after, "beat").as_deref(), Some("0"));
    assert!(after.snapshot().revision() > shown);
    assert!(after.watch(b"", shown).is_err(), "who has seen a lost change has to list anew");
    let next = after.commit(put("a", "2")).await.unwrap().revision();
    assert!(next > shown);
    drop(after);
    let after = open(&FaultyDisk::default(), copy.path(), options()).unwrap();
    assert_eq!(after.snapshot().revision(), next);
}

#[tokio::test]
async fn a_checkpoint_that_fails_leaves_a_store_that_works() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), LogOptions { min_log: 1 << 30, ..options() }).unwrap();
    for i in 0..20 {
        store.commit(put(&format!("k{i}"), "v")).await.unwrap();
    }
    disk.set(|p| p.write = Some((3, libc::ENOSPC)));
    assert!(store.checkpoint().await.is_err());
    disk.set(|p| p.write = None);
    store.commit(put("k0", "w")).await.unwrap();
    store.checkpoint().await.unwrap();
    store.commit(put("k1", "w")).await.unwrap();
    let before = store.snapshot();
    drop(store);
    let report = crate::upkeep::inspect(dir.path()).unwrap();
    assert!(report.checkpoint_bytes > 0 && report.logs == 1);
    assert_eq!(open(&disk, dir.path(), options()).unwrap().snapshot().map, before.map);
}

#[tokio::test]
async fn endless_updates_do_not_grow_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let store =
        open(&FaultyDisk::default(), dir.path(), LogOptions { min_log: 16 << 10, ..options() }).unwrap();
    let store = Arc::new(store);
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..10 {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            for i in 0..400 {
                let key = format!("k{}", (writer * 7 + i) % 100);
                store.commit(put(&key, &format!("{i:0>200}"))).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let size: u64 =
        std::fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.metadata().unwrap().len()).sum();
    let live: usize =
        store.snapshot().range(b"", None).map(|(k, e)| k.as_bytes().len() + e.value.len()).sum();
    assert!(size < 6 * live as u64, "{size} bytes for {live}");
}

/// Every file of a store with a checkpoint and two logs.
async fn a_store_of_several_files(dir: &Path) -> Vec<PathBuf> {
    let disk = FaultyDisk::default();
    let store = open(&disk, dir, LogOptions { min_log: 1 << 30, ..options() }).unwrap();
    for i in 0..20 {
        store.commit(put(&format!("k{i}"), "value")).await.unwrap();
    }
    store.checkpoint().await.unwrap();
    for i in 0..5 {
        store.commit(put(&format!("k{i}"), "later")).await.unwrap();
    }
    // The checkpoint of this rotation fails, so that both logs stay.
    disk.set(|p| p.synced.clear());
    drop(store);
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().flatten().map(|e| e.path()).collect();
    files.retain(|p| p.file_name().is_some_and(|n| n != "lock"));
    files.sort();
    files
}

#[tokio::test]
async fn a_check_tells_whether_changes_are_taken() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), options()).unwrap();
    assert_eq!(store.check().await, Ok(()));
    disk.set(|p| p.write = Some((0, libc::ENOSPC)));
    assert!(store.commit(put("a", "1")).await.is_err());
    // The real disk has room, and the check tries that disk.
    assert_eq!(store.check().await, Ok(()));
    std::fs::create_dir(dir.path().join("probe")).unwrap();
    assert!(matches!(store.check().await, Err(StoreError::Write(_))));
    disk.set(|p| p.write = None);
    store.commit(put("a", "1")).await.unwrap();
    assert_eq!(store.check().await, Ok(()), "a write has succeeded since");
    disk.set(|p| p.sync = Some(libc::EIO));
    assert!(store.commit(put("a", "2")).await.is_err());
    disk.set(|p| p.sync = None);
    assert!(matches!(store.check().await, Err(StoreError::Failed(_))), "for good");
}

#[tokio::test]
async fn a_flipped_bit_is_found_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let files = a_store_of_several_files(dir.path()).await;
    assert_eq!(files.len(), 2);
    for file in &files {
        let whole = std::fs::read(file).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1 << (at % 8);
            std::fs::write(file, &damaged).unwrap();
            match super::recover(dir.path(), HistoryLimits::default()) {
                Err(OpenError::Corrupt(error)) => {
                    assert_eq!(&error.path, file);
                    assert!(
                        error.offset <= at as u64 || at < super::format::HEADER,
                        "{error} although byte {at} was changed"
                    );
                }
                other => panic!("byte {at} of {}: {:?}", file.display(), other.map(|r| r.revision)),
            }
        }
        std::fs::write(file, &whole).unwrap();
    }
}

#[tokio::test]
async fn a_file_that_is_cut_off_or_gone_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let files = a_store_of_several_files(dir.path()).await;
    for file in &files {
        let whole = std::fs::read(file).unwrap();
        let is_log = file.ends_with("log-000000000001");
        for length in 0..whole.len() {
            std::fs::write(file, &whole[..length]).unwrap();
            match super::recover(dir.path(), HistoryLimits::default()) {
                Err(OpenError::Corrupt(error)) if !is_log => assert_eq!(&error.path, file),
                // A log that ends early is one whose last write was cut off.
                Ok(recovered) if is_log => assert!((20..=24).contains(&recovered.revision.0)),
                other => panic!("{length} bytes of {}: {:?}", file.display(), other.map(|r| r.revision)),
            }
        }
        std::fs::remove_file(file).unwrap();
        let error = super::recover(dir.path(), HistoryLimits::default()).unwrap_err();
        assert!(matches!(error, OpenError::Corrupt(_)), "{error}");
        std::fs::write(file, &whole).unwrap();
    }
}

#[tokio::test]
async fn a_value_that_looks_like_a_frame_is_only_a_value() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&FaultyDisk::default(), dir.path(), options()).unwrap();
    store.commit(put("a", "1")).await.unwrap();
    let log = super::log_path(dir.path(), 0);
    // The most that a client could know of the format: a frame of an earlier file.
    let frame = std::fs::read(&log).unwrap()[super::format::HEADER..].to_vec();
    let txn = Txn::default().then(Op::put(Key::from("b"), Bytes::from(frame)));
    drop(store);
    std::fs::remove_file(&log).unwrap();
    let store = open(&FaultyDisk::default(), dir.path(), options()).unwrap();
    store.commit(txn).await.unwrap();
    drop(store);
    let whole = std::fs::read(&log).unwrap();
    std::fs::write(&log, &whole[..whole.len() - 1]).unwrap();
    assert!(open(&FaultyDisk::default(), dir.path(), options()).unwrap().snapshot().is_empty());
}

fn last_log(dir: &Path) -> PathBuf {
    super::log_path(dir, super::numbered(dir, "log-").unwrap().pop().unwrap())
}

#[tokio::test]
async fn room_is_made_ahead_and_is_not_taken_for_data() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let roomy = LogOptions { ahead: 10_000, min_log: 1 << 30, ..options() };
    let store = open(&disk, dir.path(), roomy).unwrap();
    for i in 0..3 {
        store.commit(put("a", &i.to_string())).await.unwrap();
    }
    let log = last_log(dir.path());
    let running = std::fs::read(&log).unwrap();
    assert!(running.len() > 10_000, "{}", running.len());

    // The state after a crash: trailing zeros are no data, and opening reports no damage.
    let copy = tempfile::tempdir().unwrap();
    std::fs::write(copy.path().join(log.file_name().unwrap()), &running).unwrap();
    let recovered = super::recover(copy.path(), HistoryLimits::default()).unwrap();
    assert_eq!((recovered.revision.0, recovered.torn), (3, 0));
    // A flipped bit in acknowledged data is still found, as long as something intact follows.
    let mut damaged = running.clone();
    damaged[30] ^= 1;
    std::fs::write(copy.path().join(log.file_name().unwrap()), &damaged).unwrap();
    assert!(matches!(super::recover(copy.path(), HistoryLimits::default()), Err(OpenError::Corrupt(_))));

    // Logs that came before the last have no room left, and neither has one that was closed.
    for i in 0..60 {
        store.commit(put("a", &format!("{i:0>100}"))).await.unwrap();
    }
    store.checkpoint().await.unwrap();
    drop(store);
    let length = std::fs::metadata(last_log(dir.path())).unwrap().len();
    assert_eq!(length, 3 * 4096, "the header, what it follows, and that this is durable");
    // Where no room can be made, everything goes on as before.
    disk.set(|p| p.fill = Some(libc::ENOSPC));
    let store = open(&disk, dir.path(), roomy).unwrap();
    store.commit(put("a", "last")).await.unwrap();
    drop(store);
    assert_eq!(value(&open(&disk, dir.path(), roomy).unwrap(), "a").as_deref(), Some("last"));
}

#[tokio::test]
async fn an_old_log_is_written_over_and_what_is_left_of_it_is_nothing() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let roomy = LogOptions { ahead: 1 << 16, min_log: 1 << 30, ..options() };
    let store = open(&disk, dir.path(), roomy).unwrap();
    for round in 0..3 {
        for i in 0..20 {
            store.commit(put(&format!("k{i}"), &format!("{round:0>200}"))).await.unwrap();
        }
        store.checkpoint().await.unwrap();
    }
    let last = |i: u32| put("a", &format!("{i:0>100}"));
    for i in 0..3 {
        store.commit(last(i)).await.unwrap();
    }
    // Three logs have ended and the fourth is written over one of them.
    let log = last_log(dir.path());
    assert_eq!(log, super::log_path(dir.path(), 3));
    let running = std::fs::read(&log).unwrap();
    let remains = b"00000000000000001";
    assert!(running.windows(remains.len()).any(|w| w == remains));
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(dir.path()).unwrap().flatten() {
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let copied = copy.path().join(log.file_name().unwrap());
    let recover = || super::recover(copy.path(), HistoryLimits::default());
    let recovered = recover().unwrap();
    let end = recovered.log_length as usize;
    assert_eq!((recovered.revision.0, recovered.torn), (63, 0));

    // The store reports an interrupted write, wherever it ended.
    store.commit(last(3)).await.unwrap();
    let frame = std::fs::read(&log).unwrap()[end..].to_vec();
    for cut in [4, 12, 50, 130] {
        let mut torn = running.clone();
        torn[end..end + cut].copy_from_slice(&frame[..cut]);
        std::fs::write(&copied, &torn).unwrap();
        let recovered = recover().unwrap();
        assert_eq!(recovered.revision.0, 63);
        assert!(recovered.torn > 0, "{cut} bytes");
    }
    // So is damage.
    let mut damaged = running.clone();
    damaged[30] ^= 1;
    std::fs::write(&copied, &damaged).unwrap();
    assert!(matches!(recover(), Err(OpenError::Corrupt(_))));

    // It opens again, goes on, and leaves nothing that is not needed.
    drop(store);
    let store = open(&disk, dir.path(), roomy).unwrap();
    assert_eq!(store.snapshot().revision().0, 64);
    drop(store);
    assert!(!dir.path().join(super::SPARE).exists());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// The power goes: of unsynchronised data any part may be there, or something else.
    #[test]
    fn a_power_loss_keeps_what_was_acknowledged(
        commits in 1..120usize,
        relaxed_every in 2..6usize,
        keep in any::<proptest::sample::Index>(),
        garbage in proptest::collection::vec(any::<u8>(), 0..300),
        ahead in prop::sample::select(vec![0, 700, 1 << 16]),
    ) {
        let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // About as many transactions to a log, whether they take a block each or not.
        let min_log = if ahead > 0 { 96 << 10 } else { 4096 };
        let store = open(&disk, dir.path(), LogOptions { ahead, min_log, ..options() }).unwrap();
        let mut acknowledged = 0;
        runtime.block_on(async {
            for i in 1..=commits {
                if i % relaxed_every == 0 {
                    store.commit(put("beat", &i.to_string()).relaxed()).await.unwrap();
                } else {
                    store.commit(put("a", &format!("{i:0>150}"))).await.unwrap();
                    acknowledged = i;
                }
            }
            // Written but never confirmed.
            disk.set(|p| p.sync = Some(libc::EIO));
            let _ = store.commit(put("a", &format!("{:0>150}", commits + 1))).await;
        });
        let shown = store.snapshot().revision();
        drop(store);
        let synced = std::mem::take(&mut disk.0.lock().unwrap().synced);
        for file in std::fs::read_dir(dir.path()).unwrap().flatten() {
            let path = file.path();
            let Some(length) = synced.get(&file.metadata().unwrap().ino()).copied() else { continue };
            let bytes = std::fs::read(&path).unwrap();
            let Some(tail) = bytes.get(length as usize..) else { continue };
            let kept = if tail.is_empty() { 0 } else { keep.index(tail.len()) };
            let mut left = bytes[..length as usize + kept].to_vec();
            if !tail.is_empty() {
                left.extend_from_slice(&garbage);
            }
            if ahead > 0 && path.ends_with(last_log(dir.path())) {
                // The room that was made ahead stays, be it zeros or the remains of an older log.
                left.extend_from_slice(bytes.get(left.len()..).unwrap_or_default());
            }
            std::fs::write(&path, left).unwrap();
        }
        let store = open(&FaultyDisk::default(), dir.path(), options()).unwrap();
        if acknowledged > 0 {
            let found: usize = value(&store, "a").unwrap().parse().unwrap();
            prop_assert!(found == acknowledged || found == commits + 1, "{found} for {acknowledged}");
        }
        prop_assert!(store.snapshot().revision() >= shown);
    }
}
