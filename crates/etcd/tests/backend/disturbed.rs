//! Three members under load and faults: no acknowledged write is lost, no event comes twice or out of
//! order.

use crate::cluster::{Cluster, logs, require};
use crate::network::Network;
use ferrite_etcd::proto::etcdserverpb::CompactionRequest;
use ferrite_etcd::proto::etcdserverpb::kv_client::KvClient;
use ferrite_store::{Compare, Key, Op, Outcome, Store, Txn, Watch};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

const WRITERS: usize = 4;
/// Time limit of a disturbance.
const PATIENCE: Duration = Duration::from_secs(90);

/// The progress of the writers.
struct Load {
    steps: watch::Receiver<u64>,
}

impl Load {
    /// Waits until the writers have made this many more steps.
    async fn go_on(&mut self, more: u64) {
        let goal = *self.steps.borrow() + more;
        let gone_on = tokio::time::timeout(PATIENCE, self.steps.wait_for(|s| *s >= goal)).await;
        gone_on.expect("the writers go on").expect("the writers live");
    }
}

fn number(bytes: &[u8]) -> u64 {
    std::str::from_utf8(bytes).unwrap().parse().unwrap()
}

/// Counts up with compare-and-swap until the test stops it. Returns the last number.
async fn count_up(
    store: Arc<Store>,
    key: Key,
    steps: watch::Sender<u64>,
    stop: watch::Receiver<bool>,
) -> u64 {
    let mut acknowledged = 0;
    while !*stop.borrow() {
        // A change whose outcome was unknown may have happened: the stored value counts.
        let Ok(snapshot) = store.latest().await else { continue };
        let (compare, next) = match snapshot.get(key.as_bytes()) {
            Some(entry) => (Compare::ModifiedAt(key.clone(), entry.modified), number(&entry.value) + 1),
            None => (Compare::Absent(key.clone()), 1),
        };
        assert!(next > acknowledged, "{key:?}: {acknowledged} was acknowledged, {next} would be next");
        let txn = Txn::default().when(compare).then(Op::put(key.clone(), next.to_string().into()));
        if let Ok(Outcome::Committed { .. }) = store.commit(txn).await {
            acknowledged = next;
            steps.send_modify(|s| *s += 1);
        }
    }
    acknowledged
}

/// The watch delivers every step of every writer once, in order, up to the last acknowledged one.
async fn sees_every_step(mut watch: Watch, acknowledged: &[u64]) {
    let mut seen = [0u64; WRITERS];
    while seen.iter().zip(acknowledged).any(|(seen, acknowledged)| seen < acknowledged) {
        let changes = tokio::time::timeout(PATIENCE, watch.next()).await.expect("events in time").unwrap();
        for change in changes {
            let writer = usize::try_from(number(&change.key.as_bytes()[1..])).unwrap();
            let value = number(&change.entry.as_ref().unwrap().value);
            assert_eq!(value, seen[writer] + 1, "a step of {writer} is missing or came twice");
            seen[writer] = value;
        }
    }
}

/// Writers count up through one server while `disturb` does its worst; another server looks on.
async fn nothing_is_lost_while(mut cluster: Cluster, disturb: impl AsyncFnOnce(&mut Cluster, &mut Load)) {
    let dir = cluster.dir.path().to_owned();
    cluster.leader().await;
    let store = Arc::new(cluster.store("load").await);
    let other = cluster.store("load").await;
    let watches = [&*store, &other].map(|s| s.watch(b"", s.snapshot().revision()).unwrap());
    let (steps, seen) = watch::channel(0);
    let (stop, stopped) = watch::channel(false);
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let key = Key::from(&format!("w{writer}"));
        let counting = count_up(Arc::clone(&store), key, steps.clone(), stopped.clone());
        tasks.spawn(async move { (writer, counting.await) });
    }
    let mut load = Load { steps: seen };
    load.go_on(40).await;
    disturb(&mut cluster, &mut load).await;
    load.go_on(40).await;
    stop.send_replace(true);
    let Ok(mut done) = tokio::time::timeout(PATIENCE, tasks.join_all()).await else {
        panic!("the writers did not finish; see {}", logs(&dir));
    };
    done.sort_unstable();
    let acknowledged: Vec<u64> = done.into_iter().map(|(_, last)| last).collect();
    for store in [&store, &other] {
        let snapshot = store.latest().await.unwrap();
        for (writer, acknowledged) in acknowledged.iter().enumerate() {
            let there = number(&snapshot.get(format!("w{writer}").as_bytes()).unwrap().value);
            assert!(there >= *acknowledged, "{writer}: {acknowledged} acknowledged, {there} there");
        }
    }
    for watch in watches {
        sees_every_step(watch, &acknowledged).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_dies_or_hangs_loses_nothing() {
    require("etcd");
    nothing_is_lost_while(Cluster::start(3, &[]), async |cluster, load| {
        let leader = cluster.leader().await;
        cluster.kill(leader);
        let next = cluster.leader().await;
        load.go_on(40).await;
        cluster.run(leader);
        // And the one that follows it stops without a word, until the others have gone on without it.
        cluster.signal(next, libc::SIGSTOP);
        cluster.leader_but(&[next]).await;
        load.go_on(40).await;
        cluster.signal(next, libc::SIGCONT);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_all_members_loses_nothing() {
    require("etcd");
    nothing_is_lost_while(Cluster::start(3, &[]), async |cluster, load| {
        for _ in 0..2 {
            (0..3).for_each(|n| cluster.kill(n));
            (0..3).for_each(|n| cluster.run(n));
            load.go_on(40).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_during_a_watch_loses_nothing() {
    require("etcd");
    nothing_is_lost_while(Cluster::start(3, &[]), async |cluster, load| {
        let reader = cluster.store("load").await;
        for member in 0..3 {
            let seen = i64::try_from(reader.latest().await.unwrap().revision().0).unwrap();
            load.go_on(40).await;
            let request = CompactionRequest { revision: seen, physical: true };
            KvClient::new(cluster.channel(member)).compact(request).await.unwrap();
        }
    })
    .await;
}

/// Runs a test in the namespace of the bridge.
fn in_network(test: impl AsyncFnOnce(Cluster) + Send + 'static) {
    require("etcd");
    require("ip");
    let network = Network::new(3);
    let runtime = network.runtime();
    let inside = std::thread::spawn(move || {
        network.enter_hub();
        runtime.block_on(test(Cluster::start_in(network)));
    });
    inside.join().unwrap();
}

#[test]
fn a_member_cut_off_from_everybody_loses_nothing() {
    in_network(async |cluster| {
        nothing_is_lost_while(cluster, async |cluster, load| {
            // First the leader, then one that follows.
            let leader = cluster.leader().await;
            let network = cluster.network.as_ref().unwrap();
            network.unplug(leader);
            let next = cluster.leader_but(&[leader]).await;
            load.go_on(40).await;
            network.plug_in(leader);
            load.go_on(40).await;
            let follower = (0..3).find(|n| ![leader, next].contains(n)).unwrap();
            network.unplug(follower);
            load.go_on(40).await;
            network.plug_in(follower);
        })
        .await;
    });
}

#[test]
fn a_leader_cut_off_from_its_peers_alone_loses_nothing() {
    in_network(async |cluster| {
        nothing_is_lost_while(cluster, async |cluster, load| {
            for _ in 0..2 {
                // Clients still reach it, and it may believe for a while that it leads.
                let leader = cluster.leader().await;
                let network = cluster.network.as_ref().unwrap();
                network.cut_off_from_peers(leader);
                cluster.leader_but(&[leader]).await;
                load.go_on(40).await;
                network.join_with_peers(leader);
                load.go_on(40).await;
            }
        })
        .await;
    });
}
