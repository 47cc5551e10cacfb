use super::*;
use crate::entry::Key;
use crate::txn::{Compare, Op};
use bytes::Bytes;

fn put(key: &str, value: &str) -> Txn {
    Txn::default().then(Op::put(Key::from(key), Bytes::copy_from_slice(value.as_bytes())))
}

fn value(snapshot: &Snapshot, key: &str) -> Option<String> {
    snapshot.get(key.as_bytes()).map(|e| String::from_utf8_lossy(&e.value).into_owned())
}

fn small() -> LogOptions {
    LogOptions { min_log: 32 << 10, ahead: 4096, ..LogOptions::default() }
}

fn open(dir: &Path) -> Store {
    Store::open(dir, small(), HistoryLimits::default()).unwrap()
}

#[tokio::test]
async fn numbers_every_change_and_counts_versions() {
    let store = Store::memory();
    store.commit(put("a", "1")).await.unwrap();
    store.commit(put("b", "1")).await.unwrap();
    let outcome = store.commit(put("a", "2")).await.unwrap();
    assert_eq!(outcome, Outcome::Committed { revision: Revision(3) });
    let snapshot = store.snapshot();
    let a = snapshot.get(b"a").unwrap();
    assert_eq!((a.created, a.modified, a.version), (Revision(1), Revision(3), 2));
}

#[tokio::test]
async fn a_failed_condition_changes_nothing_and_shows_the_current_value() {
    let store = Store::memory();
    store.commit(put("a", "1")).await.unwrap();
    let txn = put("a", "2").when(Compare::Absent(Key::from("a")));
    let Outcome::Conflict { revision, current } = store.commit(txn).await.unwrap() else {
        panic!("the key exists");
    };
    assert_eq!(revision, Revision(1));
    assert_eq!(current.unwrap().value, "1");
    assert_eq!(value(&store.snapshot(), "a").as_deref(), Some("1"));
}

#[tokio::test]
async fn two_transactions_follow_one_another_at_two_revisions_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let absent = || Compare::Absent(Key::from("a"));
    let removal = || Txn::default().then(Op::Delete { key: Key::from("a") });
    let mut watch = store.watch(b"", Revision(0)).unwrap();
    let committed = |revision| Outcome::Committed { revision: Revision(revision) };
    let both = store.commit_both(put("a", "1").when(absent()), removal()).await.unwrap();
    assert_eq!(both, (committed(1), Some(committed(2))));
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let changes = watch.next().await.unwrap();
        seen.extend(changes.iter().map(|change| (change.revision.0, change.entry.is_some())));
    }
    assert_eq!(seen, [(1, true), (2, false)]);

    store.commit(put("a", "2")).await.unwrap();
    let both = store.commit_both(put("a", "3").when(absent()), removal()).await.unwrap();
    assert!(matches!(both, (Outcome::Conflict { .. }, None)), "{both:?}");
    assert_eq!(value(&store.snapshot(), "a").as_deref(), Some("2"));
    drop(store);
    let store = open(dir.path());
    assert_eq!(value(&store.snapshot(), "a").as_deref(), Some("2"));
    assert_eq!(store.snapshot().revision(), Revision(3));
}

#[tokio::test]
async fn deleting_what_is_not_there_is_no_change() {
    let store = Store::memory();
    store.commit(put("a", "1")).await.unwrap();
    let txn = Txn::default().then(Op::Delete { key: Key::from("zzz") });
    assert_eq!(store.commit(txn).await.unwrap(), Outcome::Committed { revision: Revision(1) });
}

#[tokio::test]
async fn the_past_can_be_read_until_it_is_compacted() {
    let store = Store::memory();
    for v in ["1", "2", "3"] {
        store.commit(put("a", v)).await.unwrap();
    }
    store.commit(Txn::default().then(Op::Delete { key: Key::from("a") })).await.unwrap();
    let at = |r| store.snapshot_at(Revision(r)).map(|s| value(&s, "a"));
    assert_eq!(at(0).unwrap(), None);
    assert_eq!(at(2).unwrap().as_deref(), Some("2"));
    assert_eq!(at(4).unwrap(), None);
    assert!(matches!(at(5), Err(StoreError::Future { .. })));
    store.compact(Revision(2)).unwrap();
    assert!(matches!(at(1), Err(StoreError::Compacted { .. })));
    assert_eq!(at(2).unwrap().as_deref(), Some("2"));
}

#[tokio::test]
async fn the_past_of_a_prefix_undoes_nothing_else() {
    let store = Store::memory();
    for (key, v) in [("p/a", "1"), ("q/a", "1"), ("p/a", "2"), ("p/b", "1"), ("q/a", "2"), ("p/a", "3")] {
        store.commit(put(key, v)).await.unwrap();
    }
    store.commit(Txn::default().then(Op::Delete { key: Key::from("p/b") })).await.unwrap();
    for (revision, a, b) in
        [(1, Some("1"), None), (2, Some("1"), None), (3, Some("2"), None), (4, Some("2"), Some("1"))]
    {
        let past = store.snapshot_under(b"p/", Revision(revision)).unwrap();
        assert_eq!(past.revision(), Revision(revision));
        assert_eq!((value(&past, "p/a").as_deref(), value(&past, "p/b").as_deref()), (a, b), "{revision}");
        assert_eq!(value(&past, "q/a").as_deref(), Some("2"));
    }
}

#[tokio::test]
async fn a_watch_sees_its_prefix_in_order_from_where_it_asked() {
    let store = Store::memory();
    store.commit(put("p/a", "1")).await.unwrap();
    store.commit(put("q/a", "1")).await.unwrap();
    let mut watch = store.watch(b"p/", Revision(1)).unwrap();
    store.commit(put("p/b", "1")).await.unwrap();
    store.commit(put("p/b", "2")).await.unwrap();
    let mut seen = Vec::new();
    while seen.len() < 2 {
        seen.extend(watch.next().await.unwrap());
    }
    let seen: Vec<(u64, bool)> = seen.iter().map(|c| (c.revision.0, c.previous.is_some())).collect();
    assert_eq!(seen, [(3, false), (4, true)]);
    assert_eq!(watch.position(), Revision(4));
}

#[tokio::test]
async fn a_watch_that_is_too_slow_is_told() {
    let store = Store::memory_with(HistoryLimits { changes: 2, ..HistoryLimits::default() });
    let mut watch = store.watch(b"", Revision(0)).unwrap();
    for _ in 0..300 {
        store.commit(put("a", "x")).await.unwrap();
    }
    assert!(matches!(watch.next().await, Err(WatchEnd::Compacted { .. })));
    assert!(store.watch(b"", Revision(297)).is_err());
    assert!(store.watch(b"", Revision(298)).is_ok());
}

#[tokio::test]
async fn closing_ends_watches() {
    let store = Store::memory();
    let mut watch = store.watch(b"", Revision(0)).unwrap();
    let waiting = tokio::spawn(async move { watch.next().await });
    tokio::task::yield_now().await;
    drop(store);
    assert_eq!(waiting.await.unwrap(), Err(WatchEnd::Closed));
}

#[tokio::test]
async fn what_was_acknowledged_is_there_after_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let lease = store.grant(1 << 40).await.unwrap();
    for i in 0..500 {
        store.commit(put(&format!("k/{}", i % 50), &format!("{i:0>64}"))).await.unwrap();
    }
    store
        .commit(Txn::default().then(Op::Put { key: Key::from("l"), value: Bytes::from("x"), lease }))
        .await
        .unwrap();
    let before = store.snapshot();
    drop(store);
    let store = open(dir.path());
    let after = store.snapshot();
    assert_eq!(after.revision(), before.revision());
    assert_eq!(after.map, before.map);
    assert_eq!(store.leases().len(), 1);
    store.revoke(lease).await.unwrap();
    assert_eq!(value(&store.snapshot(), "l"), None);
    // Checkpoints keep the directory small: far less than the 500 blocks that were written.
    let size: u64 =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(size < 256 << 10, "{size}");
}

#[tokio::test]
async fn a_torn_tail_is_dropped_and_damage_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), LogOptions::default(), HistoryLimits::default()).unwrap();
    for v in ["1", "2", "3"] {
        store.commit(put("a", v)).await.unwrap();
    }
    drop(store);
    let log = dir.path().join("log-000000000000");
    let whole = std::fs::read(&log).unwrap();

    let open = |dir| Store::open(dir, LogOptions::default(), HistoryLimits::default()).unwrap();
    // Of the block that only says that all before it is durable nothing is needed.
    std::fs::write(&log, &whole[..whole.len() - 3]).unwrap();
    assert_eq!(value(&open(dir.path()).snapshot(), "a").as_deref(), Some("3"));
    std::fs::write(&log, &whole[..whole.len() - 4096 - 3]).unwrap();
    let store = open(dir.path());
    assert_eq!(value(&store.snapshot(), "a").as_deref(), Some("2"));
    store.commit(put("a", "4")).await.unwrap();
    drop(store);
    assert_eq!(value(&open(dir.path()).snapshot(), "a").as_deref(), Some("4"));

    let mut flipped = whole;
    flipped[40] ^= 1;
    std::fs::write(&log, flipped).unwrap();
    let error = Store::open(dir.path(), small(), HistoryLimits::default()).unwrap_err();
    assert!(matches!(error, OpenError::Corrupt(_)), "{error}");
}

#[tokio::test]
async fn a_second_process_cannot_open_it() {
    let dir = tempfile::tempdir().unwrap();
    let _store = open(dir.path());
    let error = Store::open(dir.path(), small(), HistoryLimits::default()).unwrap_err();
    assert!(matches!(error, OpenError::Held { .. }));
}

#[tokio::test]
async fn concurrent_compare_and_swap_loses_no_increment() {
    let store = Arc::new(Store::memory());
    store.commit(put("n", "0")).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let mut done = 0;
            while done < 25 {
                let entry = store.snapshot().get(b"n").cloned().unwrap();
                let n: u64 = std::str::from_utf8(&entry.value).unwrap().parse().unwrap();
                let txn =
                    put("n", &(n + 1).to_string()).when(Compare::ModifiedAt(Key::from("n"), entry.modified));
                if matches!(store.commit(txn).await.unwrap(), Outcome::Committed { .. }) {
                    done += 1;
                }
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(value(&store.snapshot(), "n").as_deref(), Some("200"));
}

#[tokio::test]
async fn a_lease_renewed_in_time_is_not_ended() {
    let store = Store::memory();
    let id = store.grant_for(LeaseId(7), 10, 100).await.unwrap();
    store
        .commit(Txn::default().then(Op::Put { key: Key::from("a"), value: "1".into(), lease: id }))
        .await
        .unwrap();
    let end =
        async |now| store.run(0, |head, changes| Ok(((), head.expire(id, now, changes)?))).await.unwrap().1;
    // A caller that saw the expiry at 100 comes after another that renewed the lease.
    store.renew(id, |ttl| 100 + ttl).await.unwrap();
    assert_eq!(end(100).await, Outcome::Committed { revision: Revision(1) });
    assert_eq!(value(&store.snapshot(), "a").as_deref(), Some("1"));
    assert_eq!(end(110).await, Outcome::Committed { revision: Revision(2) });
    assert_eq!((value(&store.snapshot(), "a"), store.leases().len()), (None, 0));
}

/// A remote store that only feeds.
#[derive(Debug)]
struct FeedOnly;

impl Remote for FeedOnly {
    fn commit(&self, _: Txn) -> crate::Answer<'_, Outcome> {
        Box::pin(async { Err(StoreError::Closed) })
    }
    fn grant(&self, _: u64) -> crate::Answer<'_, LeaseId> {
        Box::pin(async { Err(StoreError::Closed) })
    }
    fn revoke(&self, _: LeaseId) -> crate::Answer<'_, Outcome> {
        Box::pin(async { Err(StoreError::Closed) })
    }
    fn revision(&self) -> crate::Answer<'_, Revision> {
        Box::pin(async { Ok(Revision(0)) })
    }
}

#[tokio::test]
async fn a_remote_store_that_goes_back_ends_watches() {
    let mut feed = None;
    let store = Store::remote(HistoryLimits::default(), |f| {
        feed = Some(f);
        Box::new(FeedOnly)
    });
    let feed = feed.unwrap();
    feed.reset([], Revision(10));
    feed.apply(Vec::new(), Revision(9));
    assert_eq!(store.snapshot().revision(), Revision(10), "what comes twice changes nothing");
    let mut watch = store.watch(b"", Revision(10)).unwrap();
    feed.reset([], Revision(10));
    assert_eq!(watch.ready(), Ok(Vec::new()), "nothing was missed");
    feed.reset([], Revision(5));
    assert!(matches!(watch.ready(), Err(WatchEnd::Compacted { .. })), "10 is yet to come again");
    assert!(store.watch(b"", Revision(5)).is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_is_answered_sees_the_change_and_all_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(dir.path(), LogOptions::default(), HistoryLimits::default()).unwrap());
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..100 {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            for round in 0..20 {
                let key = format!("{writer:03}");
                let revision = store.commit(put(&key, &round.to_string())).await.unwrap().revision();
                let snapshot = store.snapshot();
                assert!(snapshot.revision() >= revision);
                assert_eq!(snapshot.get(key.as_bytes()).unwrap().modified, revision);
                let newest = snapshot.range(b"", None).map(|(_, e)| e.modified).max().unwrap();
                assert_eq!(newest, snapshot.revision(), "a snapshot is whole");
                let mut watch = store.watch(key.as_bytes(), Revision(revision.0 - 1)).unwrap();
                assert_eq!(watch.ready().unwrap()[0].revision, revision);
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(store.snapshot().revision(), Revision(2000));
}

#[tokio::test]
async fn a_snapshot_stays_as_it_was() {
    let store = Store::memory();
    for i in 0..100 {
        store.commit(put(&format!("{i:03}"), "old")).await.unwrap();
    }
    let before = store.snapshot();
    for i in 0..100 {
        store.commit(put(&format!("{i:03}"), "new")).await.unwrap();
    }
    assert!(before.range(b"", None).all(|(_, e)| e.value == "old"));
    assert!(store.snapshot().range(b"", None).all(|(_, e)| e.value == "new"));
}
