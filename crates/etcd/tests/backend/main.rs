//! The contract, and faults that only a cluster has, against a real etcd on loopback.
#![allow(clippy::unwrap_used)]

#[path = "../../../store/tests/contract/suite.rs"]
mod suite;

mod cluster;
mod disturbed;
mod network;

use bytes::Bytes;
use cluster::{Cluster, free_url, require};
use ferrite_etcd::client::{ConnectError, EtcdOptions, connect};
use ferrite_etcd::proto::etcdserverpb::CompactionRequest;
use ferrite_etcd::proto::etcdserverpb::kv_client::KvClient;
use ferrite_store::{HistoryLimits, Key, Op, Revision, Store, StoreError, Txn, WatchEnd};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::sync::Arc;
use std::time::Duration;

fn put(key: &str, value: &str) -> Txn {
    Txn::default().then(Op::put(Key::from(key), Bytes::copy_from_slice(value.as_bytes())))
}

fn value(store: &Store, key: &str) -> Option<String> {
    store.snapshot().get(key.as_bytes()).map(|e| String::from_utf8_lossy(&e.value).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds() {
    require("etcd");
    let cluster = Cluster::start(1, &[]);
    let mut runner = TestRunner::deterministic();
    for case in 0..12 {
        let steps = suite::steps().new_tree(&mut runner).unwrap().current();
        let store = cluster.store(&format!("model-{case}")).await;
        suite::agrees_with_the_model(store, &steps, |store| store).await;
    }
    suite::concurrent_swaps_are_linearizable(Arc::new(cluster.store("swaps").await), 8, 20).await;
    suite::a_watch_sees_everything_in_order(Arc::new(cluster.store("order").await), 4, 25).await;
    suite::a_lease_takes_its_keys_along(Arc::new(cluster.store("lease").await)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_servers_see_each_others_writes() {
    require("etcd");
    let cluster = Cluster::start(1, &[]);
    let (one, two) = (cluster.store("shared").await, cluster.store("shared").await);
    let mut watch = two.watch(b"", two.snapshot().revision()).unwrap();
    for i in 0..50 {
        let (writer, reader) = if i % 2 == 0 { (&one, &two) } else { (&two, &one) };
        writer.commit(put("n", &i.to_string())).await.unwrap();
        assert_eq!(value(writer, "n"), Some(i.to_string()), "own writes are visible");
        let seen = reader.latest().await.unwrap();
        assert_eq!(seen.get(b"n").unwrap().value, i.to_string(), "everybody's are, when asked for");
    }
    let mut values = Vec::new();
    while values.len() < 50 {
        let changes = watch.next().await.unwrap();
        values.extend(
            changes.iter().map(|c| String::from_utf8_lossy(&c.entry.as_ref().unwrap().value).into_owned()),
        );
    }
    assert_eq!(values, (0..50).map(|i| i.to_string()).collect::<Vec<_>>());
    // Another prefix is another store.
    let other = cluster.store("elsewhere").await;
    assert!(other.latest().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_etcd_are_told() {
    require("etcd");
    let cluster = Cluster::start(1, &["--quota-backend-bytes", "3000000"]);
    let store = cluster.store("limits").await;
    let large = store.commit(put("large", &"x".repeat(3 << 20))).await;
    assert!(matches!(large, Err(StoreError::TooLarge { .. })), "{large:?}");
    let mut full = None;
    for i in 0..200 {
        match store.commit(put(&format!("k{i}"), &"x".repeat(100 << 10))).await {
            Ok(_) => {}
            Err(error) => {
                full = Some(error);
                break;
            }
        }
    }
    let Some(StoreError::Write(message)) = full else { panic!("{full:?}") };
    assert!(message.contains("etcd is full"), "{message}");
    assert!(store.latest().await.unwrap().len() > 5, "readers go on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_ends_watches_and_a_restart_does_not() {
    require("etcd");
    let mut cluster = Cluster::start(1, &[]);
    let store = cluster.store("gap").await;
    store.commit(put("a", "1")).await.unwrap();
    let mut watch = store.watch(b"", store.snapshot().revision()).unwrap();

    // All members restart: the watch goes on where it was.
    cluster.kill(0);
    assert!(matches!(store.commit(put("a", "lost")).await, Err(StoreError::Unreachable(_))));
    assert_eq!(value(&store, "a").as_deref(), Some("1"), "readers go on");
    cluster.run(0);
    store.commit(put("a", "2")).await.unwrap();
    let change = watch.next().await.unwrap().remove(0);
    assert_eq!(change.entry.unwrap().value, "2");
    let seen = watch.position();

    // While we are away, somebody writes and compacts: nobody can know what happened.
    cluster.kill(0);
    cluster.run(0);
    cluster.leader().await;
    let mut other = KvClient::new(cluster.channel(0));
    let mut last = 0;
    for i in 0..5 {
        let put = ferrite_etcd::proto::etcdserverpb::PutRequest {
            key: Bytes::from("/gap/b"),
            value: Bytes::from(i.to_string()),
            ..Default::default()
        };
        last = other.put(put).await.unwrap().into_inner().header.unwrap().revision;
    }
    other.compact(CompactionRequest { revision: last, physical: true }).await.unwrap();
    assert_eq!(store.latest().await.unwrap().get(b"b").unwrap().value, "4");
    // Either the watch was back before the compaction and saw all five, or it ends with an error.
    let mut seen_later = Vec::new();
    let end = loop {
        match watch.next().await {
            Ok(changes) => seen_later.extend(changes.into_iter().map(|c| c.revision)),
            Err(end) => break Some(end),
        }
        if seen_later.len() == 5 {
            break None;
        }
    };
    match end {
        Some(end) => assert!(matches!(end, WatchEnd::Compacted { .. }) && seen_later.is_empty()),
        None => assert_eq!(seen_later[0], Revision(seen.0 + 1)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_put_back_to_an_earlier_state_is_listed_anew() {
    require("etcd");
    let mut cluster = Cluster::start(1, &[]);
    let store = cluster.store("back").await;
    for i in 0..20 {
        store.commit(put("old", &i.to_string())).await.unwrap();
    }
    let mut watch = store.watch(b"", store.snapshot().revision()).unwrap();
    // As after a restore of a backup, here of an empty one.
    cluster.kill(0);
    std::fs::remove_dir_all(cluster.dir.path().join("m0")).unwrap();
    cluster.run(0);
    cluster.leader().await;
    let other = cluster.store("back").await;
    other.commit(put("new", "1")).await.unwrap();
    assert!(matches!(watch.next().await, Err(WatchEnd::Compacted { .. })));
    let snapshot = store.latest().await.unwrap();
    assert_eq!((snapshot.get(b"old"), snapshot.len()), (None, 1));
    let mut watch = store.watch(b"", snapshot.revision()).unwrap();
    other.commit(put("new", "2")).await.unwrap();
    assert_eq!(watch.next().await.unwrap()[0].entry.as_ref().unwrap().value, "2");
}

#[tokio::test]
async fn nobody_there_is_told() {
    let options = EtcdOptions { timeout: Duration::from_secs(1), ..EtcdOptions::new(vec![free_url()]) };
    let error = connect(options, HistoryLimits::default()).await.unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    let rows = [(vec![], "no etcd member"), (vec!["ftp://x"], "http://"), (vec!["https://x"], "CA file")];
    for (servers, expected) in rows {
        let servers = servers.into_iter().map(str::to_owned).collect();
        let error = connect(EtcdOptions::new(servers), HistoryLimits::default()).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}
