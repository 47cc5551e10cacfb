//! The contract, and what only a cluster can do to us, against a real etcd on loopback. Skipped where `etcd` is not
//! installed.
#![allow(clippy::unwrap_used)]

#[path = "../../store/tests/contract/suite.rs"]
mod suite;

use bytes::Bytes;
use ferrite_etcd::client::{ConnectError, EtcdOptions, Layout, connect};
use ferrite_etcd::proto::etcdserverpb::CompactionRequest;
use ferrite_etcd::proto::etcdserverpb::StatusRequest;
use ferrite_etcd::proto::etcdserverpb::kv_client::KvClient;
use ferrite_etcd::proto::etcdserverpb::maintenance_client::MaintenanceClient;
use ferrite_store::{Compare, HistoryLimits, Key, Op, Outcome, Revision, Store, StoreError, Txn, WatchEnd};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

fn installed(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

/// A member of a cluster, ended with this value.
struct Member {
    name: String,
    url: String,
    peer: String,
    child: Option<Child>,
}

struct Cluster {
    dir: tempfile::TempDir,
    members: Vec<Member>,
    extra: Vec<String>,
}

fn free_url() -> String {
    format!("http://{}", std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

impl Cluster {
    fn start(size: usize, extra: &[&str]) -> Self {
        let members = (0..size)
            .map(|n| Member { name: format!("m{n}"), url: free_url(), peer: free_url(), child: None })
            .collect();
        let extra = extra.iter().map(|s| (*s).to_owned()).collect();
        let mut cluster = Self { dir: tempfile::tempdir().unwrap(), members, extra };
        (0..size).for_each(|n| cluster.run(n));
        cluster
    }

    fn run(&mut self, n: usize) {
        let all: Vec<String> = self.members.iter().map(|m| format!("{}={}", m.name, m.peer)).collect();
        let log = std::fs::File::create(self.dir.path().join(format!("{n}.log"))).unwrap();
        let dir = self.dir.path().join(&self.members[n].name);
        let member = &mut self.members[n];
        let child = Command::new("etcd")
            .args(["--name", &member.name, "--data-dir", dir.to_str().unwrap()])
            .args(["--listen-client-urls", &member.url, "--advertise-client-urls", &member.url])
            .args(["--listen-peer-urls", &member.peer, "--initial-advertise-peer-urls", &member.peer])
            .args(["--initial-cluster", &all.join(","), "--logger", "zap"])
            .args(&self.extra)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        member.child = Some(child);
    }

    fn kill(&mut self, n: usize) {
        if let Some(mut child) = self.members[n].child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn signal(&self, n: usize, signal: i32) {
        let pid = i32::try_from(self.members[n].child.as_ref().unwrap().id()).unwrap();
        // SAFETY: kill takes plain numbers; the process is our own child and has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    fn urls(&self) -> Vec<String> {
        self.members.iter().map(|m| m.url.clone()).collect()
    }

    fn options(&self, prefix: &str) -> EtcdOptions {
        EtcdOptions {
            layout: Layout { ours: Vec::new(), theirs: format!("/{prefix}/").into_bytes() },
            compact_every: None,
            timeout: Duration::from_secs(15),
            ..EtcdOptions::new(self.urls())
        }
    }

    async fn store(&self, prefix: &str) -> Store {
        connect(self.options(prefix), HistoryLimits::default()).await.unwrap()
    }

    fn channel(&self, n: usize) -> Channel {
        Endpoint::from_shared(self.members[n].url.clone()).unwrap().connect_lazy()
    }

    /// The member that leads, as soon as there is one.
    async fn leader(&self) -> usize {
        for _ in 0..200 {
            for n in (0..self.members.len()).filter(|n| self.members[*n].child.is_some()) {
                let status = MaintenanceClient::new(self.channel(n)).status(StatusRequest {}).await;
                if let Ok(status) = status.map(tonic::Response::into_inner)
                    && status.leader != 0
                    && status.leader == status.header.unwrap().member_id
                {
                    return n;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("no leader");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|n| self.kill(n));
    }
}

fn put(key: &str, value: &str) -> Txn {
    Txn::default().then(Op::put(Key::from(key), Bytes::copy_from_slice(value.as_bytes())))
}

fn value(store: &Store, key: &str) -> Option<String> {
    store.snapshot().get(key.as_bytes()).map(|e| String::from_utf8_lossy(&e.value).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds() {
    if !installed("etcd") {
        return;
    }
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
    if !installed("etcd") {
        return;
    }
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
    if !installed("etcd") {
        return;
    }
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
    if !installed("etcd") {
        return;
    }
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
    // Either the watch was back before the compaction and saw all five, or it is told.
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

/// Writers count up under compare-and-swap while `disturb` does its worst. Everything acknowledged is there
/// afterwards, and a watch has seen every step once.
async fn nothing_is_lost_while(
    cluster: Arc<tokio::sync::Mutex<Cluster>>,
    disturb: impl AsyncFn(&mut Cluster),
) {
    const WRITERS: usize = 4;
    const STEPS: u64 = 60;
    let dir = { cluster.lock().await.dir.path().to_owned() };
    let store = Arc::new(cluster.lock().await.store("load").await);
    let mut watch = store.watch(b"", store.snapshot().revision()).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    let (progress, mut half) = tokio::sync::watch::channel(0u64);
    for writer in 0..WRITERS {
        let (store, progress) = (Arc::clone(&store), progress.clone());
        tasks.spawn(async move {
            let key = Key::from(&format!("w{writer}"));
            let mut current = 0;
            while current < STEPS {
                let (compare, next) = match store.latest().await {
                    Ok(snapshot) => match snapshot.get(key.as_bytes()) {
                        // A change whose outcome was unknown may have happened: what is there counts.
                        Some(entry) => {
                            current = std::str::from_utf8(&entry.value).unwrap().parse().unwrap();
                            (Compare::ModifiedAt(key.clone(), entry.modified), current + 1)
                        }
                        None => (Compare::Absent(key.clone()), 1),
                    },
                    Err(_) => continue,
                };
                if current >= STEPS {
                    break;
                }
                let txn = Txn::default().when(compare).then(Op::put(key.clone(), next.to_string().into()));
                if let Ok(Outcome::Committed { .. }) = store.commit(txn).await {
                    current = next;
                    progress.send_modify(|p| *p += 1);
                }
            }
        });
    }
    half.wait_for(|p| *p >= 40).await.unwrap();
    disturb(&mut *cluster.lock().await).await;
    let finished = tokio::time::timeout(Duration::from_secs(60), tasks.join_all()).await;
    assert!(finished.is_ok(), "the writers did not finish; see {}", logs(&dir));
    let mut next = [1u64; WRITERS];
    while next.iter().any(|n| *n <= STEPS) {
        for change in watch.next().await.unwrap() {
            let writer: usize = std::str::from_utf8(&change.key.as_bytes()[1..]).unwrap().parse().unwrap();
            let value: u64 =
                std::str::from_utf8(&change.entry.as_ref().unwrap().value).unwrap().parse().unwrap();
            assert_eq!(value, next[writer], "a step of {writer} is missing or came twice");
            next[writer] += 1;
        }
    }
}

fn logs(dir: &Path) -> String {
    let mut all = String::new();
    for n in 0..3 {
        let text = std::fs::read_to_string(dir.join(format!("{n}.log"))).unwrap_or_default();
        all.extend(text.lines().rev().take(5).map(|l| format!("\n{n}: {l}")));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_dies_or_hangs_loses_nothing() {
    if !installed("etcd") {
        return;
    }
    let cluster = Arc::new(tokio::sync::Mutex::new(Cluster::start(3, &[])));
    nothing_is_lost_while(Arc::clone(&cluster), async |cluster| {
        let leader = cluster.leader().await;
        cluster.kill(leader);
        let next = cluster.leader().await;
        cluster.run(leader);
        // And the one that follows it stops without a word.
        cluster.signal(next, libc::SIGSTOP);
        tokio::time::sleep(Duration::from_secs(3)).await;
        cluster.signal(next, libc::SIGCONT);
    })
    .await;
}
