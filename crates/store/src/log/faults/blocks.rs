//! Logs of whole blocks: their writes, their ends, and their damage.

use super::*;

fn roomy() -> LogOptions {
    LogOptions { ahead: 1 << 16, min_log: 1 << 30, ..options() }
}

fn recovered(dir: &Path) -> Result<u64, OpenError> {
    super::super::recover(dir, HistoryLimits::default()).map(|recovered| recovered.revision.0)
}

fn assert_damaged(dir: &Path, file: &Path, what: &str) {
    match recovered(dir) {
        Err(OpenError::Corrupt(error)) => assert_eq!(error.path, file, "{what}"),
        other => panic!("{what}: {other:?}"),
    }
}

#[tokio::test]
async fn what_was_acknowledged_is_never_written_again() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), roomy()).unwrap();
    for i in 0..20 {
        // Of every length around that of a block.
        store.commit(put("a", &"x".repeat(4000 + 10 * i))).await.unwrap();
        store.commit(put("b", "small")).await.unwrap();
    }
    drop(store);
    let log = last_log(dir.path());
    let written = disk.0.lock().unwrap().blocks.clone();
    let mut end = 4096;
    for (path, from, to) in written.into_iter().filter(|(path, ..)| *path == log) {
        assert_eq!((from, to % 4096), (end, 0), "{}", path.display());
        end = to;
    }
    // Only the word that all of it is durable follows.
    assert_eq!(end + 4096, std::fs::metadata(&log).unwrap().len());
    assert!(end >= 41 * 4096, "{end}");
}

#[tokio::test]
async fn a_flipped_bit_is_found_in_headers_and_fillings_too() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), roomy()).unwrap();
    for i in 0..3 {
        store.commit(put("a", &i.to_string())).await.unwrap();
    }
    drop(store);
    let log = last_log(dir.path());
    let whole = std::fs::read(&log).unwrap();
    assert_eq!(whole.len(), 5 * 4096);
    for at in (0..4 * 4096).step_by(11).chain(0..64) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        std::fs::write(&log, &damaged).unwrap();
        assert_damaged(dir.path(), &log, &format!("byte {at}"));
    }
}

#[tokio::test]
async fn the_last_batch_is_not_taken_for_cut_off_when_it_is_damaged() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), roomy()).unwrap();
    for i in 0..3 {
        store.commit(put("a", &i.to_string())).await.unwrap();
    }
    let log = last_log(dir.path());
    let crashed = std::fs::read(&log).unwrap();
    drop(store);
    let closed = std::fs::read(&log).unwrap();
    let last = 3 * 4096;
    // Closed: whatever happens to it is damage, for something whole follows.
    for (what, range, with) in
        [("zeros", 0..4096, 0), ("a few bytes", 12..30, b'x'), ("the header", 0..12, 0xff)]
    {
        let mut damaged = closed.clone();
        damaged[last..][range].fill(with);
        std::fs::write(&log, &damaged).unwrap();
        assert_damaged(dir.path(), &log, what);
    }
    // Killed a moment after the write: one flipped bit is recognised as damage.
    for at in (0..4096).step_by(7) {
        let mut damaged = crashed.clone();
        damaged[last + at] ^= 0x10;
        std::fs::write(&log, &damaged).unwrap();
        assert_damaged(dir.path(), &log, &format!("byte {at}"));
    }
    // A batch of which a part is missing was never acknowledged. It is kept aside.
    let mut torn = crashed.clone();
    torn[last + 20..last + 4096].fill(0);
    std::fs::write(&log, &torn).unwrap();
    drop(open(&disk, dir.path(), roomy()).unwrap());
    assert_eq!(recovered(dir.path()).unwrap(), 2);
    let kept = dir.path().join(format!("torn-{:012}-{last:012}", 0));
    assert_eq!(std::fs::read(kept).unwrap(), torn[last..]);
}

#[tokio::test]
async fn a_log_that_is_idle_says_that_it_is_durable() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let (mut log, _) = Log::open_on(Arc::new(disk), dir.path(), roomy(), HistoryLimits::default()).unwrap();
    assert!(log.confirm_at().is_some());
    log.confirm();
    assert!(log.confirm_at().is_none(), "once is enough");
    let path = last_log(dir.path());
    let before = std::fs::read(&path).unwrap();
    assert!(before[4096..].iter().any(|byte| *byte != 0));
    assert_eq!(recovered(dir.path()).unwrap(), 0);
}

#[tokio::test]
async fn the_next_log_tells_where_one_with_room_behind_it_ended() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), roomy()).unwrap();
    for i in 0..5 {
        store.commit(put("a", &i.to_string())).await.unwrap();
    }
    // The next log is begun, and both stay because there is no checkpoint.
    disk.set(|p| p.no_checkpoints = true);
    assert!(store.checkpoint().await.is_err());
    let (first, second) = (super::super::log_path(dir.path(), 0), super::super::log_path(dir.path(), 1));
    let begun = std::fs::read(&second).unwrap();
    for i in 0..5 {
        store.commit(put("b", &i.to_string())).await.unwrap();
    }
    drop(store);
    let (whole, later) = (std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    let end = 6 * 4096;
    assert!(whole.len() > end, "there is room behind it: {}", whole.len());
    assert_eq!(recovered(dir.path()).unwrap(), 10);
    // Room is nothing that is needed.
    std::fs::write(&first, &whole[..end]).unwrap();
    assert_eq!(recovered(dir.path()).unwrap(), 10);

    // Its last frame is damaged, beyond recognition or a little, or gone: in the last log that was a write cut off.
    for (what, bytes) in [
        ("zeros", [&whole[..end - 4096], &[0; 4096], &whole[end..]].concat()),
        ("nothing", whole[..end - 4096].to_vec()),
        ("a part", whole[..end - 1].to_vec()),
    ] {
        std::fs::write(&first, bytes).unwrap();
        assert_damaged(dir.path(), &first, what);
    }
    for at in [0, 5, 9, 20, 4000] {
        let mut damaged = whole.clone();
        damaged[end - 4096 + at] ^= 1;
        std::fs::write(&first, damaged).unwrap();
        assert_damaged(dir.path(), &first, &format!("byte {at} of the last frame"));
    }
    std::fs::write(&first, &whole).unwrap();

    // The next log has no word of it any more.
    std::fs::write(&second, &begun[..4096]).unwrap();
    assert_damaged(dir.path(), &first, "a log that says nothing");
    std::fs::write(&second, &later).unwrap();
    disk.set(|p| p.no_checkpoints = false);
    let store = open(&disk, dir.path(), roomy()).unwrap();
    assert_eq!(value(&store, "b").as_deref(), Some("4"));
    store.checkpoint().await.unwrap();
    assert!(!first.exists());
}

#[tokio::test]
async fn a_full_disk_is_survived_and_a_failing_one_is_not_trusted() {
    for written in [0, 1, 4096, 5000] {
        let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
        let store = open(&disk, dir.path(), roomy()).unwrap();
        let large = |c: &str| put("a", &c.repeat(6000));
        store.commit(large("1")).await.unwrap();
        disk.set(|p| p.write = Some((written, libc::ENOSPC)));
        assert!(matches!(store.commit(large("2")).await, Err(StoreError::Write(_))));
        disk.set(|p| p.write = None);
        assert_eq!(store.commit(large("3")).await.unwrap().revision().0, 2);
        // Written, perhaps, but not confirmed: nobody knows.
        disk.set(|p| p.sync = Some(libc::EIO));
        assert!(matches!(store.commit(large("4")).await, Err(StoreError::Failed(_))));
        disk.set(|p| p.sync = None);
        assert!(matches!(store.commit(large("5")).await, Err(StoreError::Failed(_))));
        assert_eq!(value(&store, "a"), Some("3".repeat(6000)), "readers go on");
        drop(store);
        let store = open(&disk, dir.path(), roomy()).unwrap();
        assert!(["3", "4"].map(|c| Some(c.repeat(6000))).contains(&value(&store, "a")));
    }
}

#[tokio::test]
async fn a_log_without_blocks_goes_on_and_is_followed_by_one_with() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let dense = LogOptions { ahead: 0, ..roomy() };
    let store = open(&disk, dir.path(), dense).unwrap();
    store.commit(put("a", "1")).await.unwrap();
    drop(store);
    let store = open(&disk, dir.path(), roomy()).unwrap();
    store.commit(put("a", "2")).await.unwrap();
    disk.set(|p| p.no_checkpoints = true);
    assert!(store.checkpoint().await.is_err());
    store.commit(put("a", "3")).await.unwrap();
    drop(store);
    assert_eq!(recovered(dir.path()).unwrap(), 3);
    // And back again.
    let store = open(&disk, dir.path(), dense).unwrap();
    store.commit(put("a", "4")).await.unwrap();
    assert!(store.checkpoint().await.is_err());
    store.commit(put("a", "5")).await.unwrap();
    drop(store);
    assert_eq!(super::super::numbered(dir.path(), "log-").unwrap().len(), 3);
    assert_eq!(recovered(dir.path()).unwrap(), 5);
}

#[tokio::test]
async fn room_of_a_larger_past_is_given_back() {
    let (disk, dir) = (FaultyDisk::default(), tempfile::tempdir().unwrap());
    let store = open(&disk, dir.path(), LogOptions { min_log: 1 << 18, ..roomy() }).unwrap();
    store.commit(put("a", "1")).await.unwrap();
    for (spare, expected) in [(1 << 19, 1 << 19), (1 << 24, 1 << 18)] {
        std::fs::write(dir.path().join(super::super::SPARE), vec![7; spare]).unwrap();
        store.checkpoint().await.unwrap();
        assert_eq!(std::fs::metadata(last_log(dir.path())).unwrap().len(), expected);
    }
}
