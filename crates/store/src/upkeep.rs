//! Looking after a store from outside: check, measure, save, restore. Reading works while another process has the
//! store open, because a log is only appended to and a checkpoint is whole from the moment it has its name.

use crate::entry::Revision;
use crate::history::HistoryLimits;
use crate::log::{
    Contents, Recovered, checkpoint, disk, hold, last_log, log_path, read_checkpoint_file, recover,
    start_log, write_checkpoint,
};
use crate::replica::Snapshot;
use crate::store::OpenError;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The contents of a store on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub keys: usize,
    pub leases: usize,
    pub revision: Revision,
    /// Keys and values.
    pub live_bytes: u64,
    pub checkpoint_bytes: u64,
    pub log_bytes: u64,
    pub logs: u64,
    /// Bytes at the end of the last log that were never acknowledged.
    pub torn_bytes: u64,
    /// Keys and bytes by the first two parts of the key, as in `/registry/pods`.
    pub by_prefix: BTreeMap<String, (usize, u64)>,
}

/// A saved snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    pub path: PathBuf,
    pub revision: Revision,
    pub keys: usize,
    pub bytes: u64,
}

/// Why a snapshot was not saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum UpkeepError {
    #[error(transparent)]
    Read(#[from] OpenError),
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    #[error("there is no store in {}", .0.display())]
    NoStore(PathBuf),
    #[error("cannot write {}", .path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A store that is open elsewhere removes files while we read; a second look finds their successors.
const ATTEMPTS: usize = 5;

fn read(dir: &Path) -> Result<Recovered, UpkeepError> {
    if !dir.join("lock").exists() {
        return Err(UpkeepError::NoStore(dir.to_owned()));
    }
    let limits = HistoryLimits { changes: 0, ..HistoryLimits::default() };
    let mut attempt = 1;
    loop {
        match recover(dir, limits) {
            Ok(recovered) => return Ok(recovered),
            // No other process holds the directory and could have moved files, or all attempts failed.
            Err(error) if attempt == ATTEMPTS || hold(dir).is_ok() => return Err(error.into()),
            Err(_) => attempt += 1,
        }
    }
}

/// Reads everything, verifies every checksum and reports the contents.
pub fn inspect(dir: &Path) -> Result<Report, UpkeepError> {
    let recovered = read(dir)?;
    let mut by_prefix: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    let mut live_bytes = 0;
    for (key, entry) in &recovered.map {
        let bytes = (key.as_bytes().len() + entry.value.len()) as u64;
        live_bytes += bytes;
        let row = by_prefix.entry(two_parts(key.as_bytes())).or_default();
        *row = (row.0 + 1, row.1 + bytes);
    }
    Ok(Report {
        keys: recovered.map.len(),
        leases: recovered.leases.len(),
        revision: recovered.revision,
        live_bytes,
        checkpoint_bytes: recovered.checkpoint_length,
        log_bytes: recovered.logs_length,
        logs: recovered.last_log - recovered.first_log + 1,
        torn_bytes: recovered.torn,
        by_prefix,
    })
}

/// A batch that [`repair`] has taken out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repaired {
    pub log: PathBuf,
    pub offset: u64,
    /// Where the whole log is kept as it was.
    pub kept: PathBuf,
}

/// Drops the end of the last log from its first damaged batch on, so that the store opens without it. The log is kept
/// aside as it was. None when nothing is damaged; an error when something else than the last log is.
pub fn repair(dir: &Path) -> Result<Option<Repaired>, UpkeepError> {
    if !dir.join("lock").exists() {
        return Err(UpkeepError::NoStore(dir.to_owned()));
    }
    let _held = hold(dir)?;
    let damage = match recover(dir, HistoryLimits::default()) {
        Ok(_) => return Ok(None),
        Err(OpenError::Corrupt(damage)) => damage,
        Err(error) => return Err(error.into()),
    };
    let last = last_log(dir).map_err(|source| UpkeepError::Write { path: dir.to_owned(), source })?;
    if last.as_ref() != Some(&damage.path) {
        return Err(OpenError::Corrupt(damage).into());
    }
    let mut kept = damage.path.as_os_str().to_owned();
    kept.push(format!(".damaged-{}", damage.offset));
    let kept = PathBuf::from(kept);
    let failed = |source| UpkeepError::Write { path: kept.clone(), source };
    std::fs::copy(&damage.path, &kept).map_err(failed)?;
    File::open(&kept).and_then(|file| file.sync_all()).map_err(failed)?;
    let cut = || {
        let log = File::options().write(true).open(&damage.path)?;
        log.set_len(damage.offset)?;
        log.sync_all()?;
        disk::sync_dir(dir)
    };
    cut().map_err(|source| UpkeepError::Write { path: damage.path.clone(), source })?;
    Ok(Some(Repaired { log: damage.path, offset: damage.offset, kept }))
}

/// `/registry/pods` of `/registry/pods/default/a`.
fn two_parts(key: &[u8]) -> String {
    let key = String::from_utf8_lossy(key);
    let mut slashes = key.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
    let end = slashes.nth(1).unwrap_or(key.len());
    key[..end].to_owned()
}

/// Saves the contents of the store in `dir` to the file `to`, which appears whole or not at all.
pub fn save(dir: &Path, to: &Path) -> Result<SnapshotInfo, UpkeepError> {
    let Recovered { map, revision, leases, .. } = read(dir)?;
    write_snapshot(&Contents { snapshot: Snapshot::new(map, revision), leases }, to)
}

fn write_snapshot(contents: &Contents, to: &Path) -> Result<SnapshotInfo, UpkeepError> {
    let failed = |source| UpkeepError::Write { path: to.to_owned(), source };
    if to.exists() {
        return Err(UpkeepError::Exists(to.to_owned()));
    }
    let mut temporary = to.as_os_str().to_owned();
    temporary.push(".part");
    let temporary = PathBuf::from(temporary);
    let written =
        checkpoint::write(&disk::RealDisk, &temporary, contents, &AtomicBool::new(false)).and_then(|bytes| {
            std::fs::rename(&temporary, to)?;
            let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            disk::sync_dir(parent)?;
            Ok(bytes)
        });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    let Contents { snapshot, .. } = contents;
    let (revision, keys) = (snapshot.revision(), snapshot.len());
    Ok(SnapshotInfo { path: to.to_owned(), revision, keys, bytes: written.map_err(failed)? })
}

/// Reads a whole snapshot, verifies it, and returns its contents.
pub fn describe(path: &Path) -> Result<SnapshotInfo, UpkeepError> {
    let read = read_checkpoint_file(path)?;
    Ok(SnapshotInfo {
        path: path.to_owned(),
        revision: read.revision,
        keys: read.map.len(),
        bytes: read.checkpoint_length,
    })
}

/// Makes a store in `dir`, which must not have one, out of a snapshot. The revision is moved on by `skip`,
/// so that a client that has seen a later state does not take old numbers for new ones.
pub fn restore(from: &Path, dir: &Path, skip: u64) -> Result<SnapshotInfo, UpkeepError> {
    let failed = |source| UpkeepError::Write { path: dir.to_owned(), source };
    let info = describe(from)?;
    let Recovered { map, leases, .. } = read_checkpoint_file(from)?;
    std::fs::create_dir_all(dir).map_err(failed)?;
    let _held = hold(dir)?;
    let occupied = std::fs::read_dir(dir).map_err(failed)?.flatten().any(|e| e.file_name() != "lock");
    if occupied {
        return Err(UpkeepError::Exists(dir.to_owned()));
    }
    let revision = Revision(info.revision.0.saturating_add(skip));
    let contents = Contents { snapshot: Snapshot::new(map, revision), leases };
    // The second of its chain: without its checkpoint it is recognised as incomplete, should we be cut off here.
    start_log(&log_path(dir, 1)).and_then(|()| disk::sync_dir(dir)).map_err(failed)?;
    write_checkpoint(&disk::RealDisk, dir, 1, &contents, &AtomicBool::new(false)).map_err(failed)?;
    Ok(SnapshotInfo { revision, ..info })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Key, LogOptions, Op, Store, Txn};
    use bytes::Bytes;

    fn open(dir: &Path) -> Store {
        Store::open(dir, LogOptions::default(), HistoryLimits::default()).unwrap()
    }

    #[test]
    fn groups_keys_by_their_first_two_parts() {
        let rows = [
            ("/registry/pods/default/a", "/registry/pods"),
            ("/registry/x", "/registry/x"),
            ("a", "a"),
            ("a/b/c", "a/b"),
            ("", ""),
        ];
        for (key, expected) in rows {
            assert_eq!(two_parts(key.as_bytes()), expected);
        }
    }

    #[tokio::test]
    async fn a_snapshot_is_saved_online_and_restored() {
        let dir = tempfile::tempdir().unwrap();
        let (live, saved, back) = (dir.path().join("a"), dir.path().join("s.snapshot"), dir.path().join("b"));
        let store = open(&live);
        let lease = store.grant(1 << 40).await.unwrap();
        for i in 0..100 {
            let op =
                Op::Put { key: Key::from(&format!("/registry/pods/{i}")), value: Bytes::from("v"), lease };
            store.commit(Txn::default().then(op)).await.unwrap();
        }
        let info = save(&live, &saved).unwrap();
        assert_eq!((info.revision, info.keys), (Revision(100), 100));
        assert_eq!(describe(&saved).unwrap(), info);
        assert!(matches!(save(&live, &saved), Err(UpkeepError::Exists(_))));
        assert_eq!(inspect(&live).unwrap().by_prefix["/registry/pods"].0, 100);

        restore(&saved, &back, 1000).unwrap();
        assert!(matches!(restore(&saved, &back, 0), Err(UpkeepError::Exists(_))));
        let restored = open(&back);
        assert_eq!(restored.snapshot().revision(), Revision(1100));
        assert_eq!(restored.snapshot().map, store.snapshot().map);
        restored.revoke(lease).await.unwrap();
        assert!(restored.snapshot().is_empty());
    }

    #[tokio::test]
    async fn a_damaged_end_is_cut_off_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        for value in ["1", "2"] {
            store.commit(Txn::default().then(Op::put(Key::from("a"), Bytes::from(value)))).await.unwrap();
        }
        assert!(matches!(repair(dir.path()), Err(UpkeepError::Read(OpenError::Held { .. }))));
        drop(store);
        assert_eq!(repair(dir.path()).unwrap(), None);
        let log = log_path(dir.path(), 0);
        let mut bytes = std::fs::read(&log).unwrap();
        bytes[2 * 4096 + 40] ^= 1;
        std::fs::write(&log, &bytes).unwrap();
        assert!(matches!(inspect(dir.path()), Err(UpkeepError::Read(OpenError::Corrupt(_)))));
        let repaired = repair(dir.path()).unwrap().unwrap();
        assert_eq!((repaired.offset, std::fs::read(repaired.kept).unwrap()), (2 * 4096, bytes));
        assert_eq!(open(dir.path()).snapshot().revision(), Revision(1));
    }

    #[tokio::test]
    async fn a_damaged_snapshot_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (live, saved) = (dir.path().join("a"), dir.path().join("s"));
        let store = open(&live);
        store.commit(Txn::default().then(Op::put(Key::from("a"), Bytes::from(vec![7; 5000])))).await.unwrap();
        save(&live, &saved).unwrap();
        let whole = std::fs::read(&saved).unwrap();
        for (name, bytes) in [
            ("flipped", {
                let mut b = whole.clone();
                b[3000] ^= 4;
                b
            }),
            ("cut off", whole[..whole.len() - 1].to_vec()),
            ("longer", [&whole[..], b"x"].concat()),
            ("empty", Vec::new()),
        ] {
            std::fs::write(&saved, bytes).unwrap();
            let error = restore(&saved, &dir.path().join("b"), 0).unwrap_err();
            assert!(matches!(&error, UpkeepError::Read(OpenError::Corrupt(_))), "{name}: {error}");
        }
    }
}
