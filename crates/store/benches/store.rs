//! The store beside alternative engines, and beside etcd, in one run on one machine.
//!
//! `cargo bench -p ferrite-store` prints a table. Parts can be chosen: `-- writes reads watch open
//! endless`. `FERRITE_BENCH_UPDATES` sets the number of updates of the `endless` part, by default a
//! million; a hundred million fit as well.
//! etcd is left out where it is not installed. Files go to a directory below `FERRITE_BENCH_DIR`, or below the
//! build directory: not to a file system in memory, where a synchronisation costs nothing.
#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use ferrite_etcd::proto::etcdserverpb::kv_client::KvClient;
use ferrite_etcd::proto::etcdserverpb::watch_client::WatchClient;
use ferrite_etcd::proto::etcdserverpb::watch_request::RequestUnion;
use ferrite_etcd::proto::etcdserverpb::{PutRequest, RangeRequest, WatchCreateRequest, WatchRequest};
use ferrite_store::{HistoryLimits, Key, LogOptions, Op, Revision, Store, Txn};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

#[global_allocator]
static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;

const VALUE: usize = 1536;
const FOR: Duration = Duration::from_secs(3);
/// Writers take turns in slices, so that all of them see the same disk: its other load changes by the
/// second.
const SLICE: Duration = Duration::from_millis(500);
const TURNS: usize = 8;
const WATCHERS: usize = 1000;
const OBJECTS: usize = 200_000;
const OPENED: &str = "FERRITE_BENCH_OPEN";

fn main() {
    if let Some(dir) = std::env::var_os(OPENED) {
        return open_and_tell(Path::new(&dir));
    }
    let parts: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|p| p == part);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    if wanted("writes") {
        runtime.block_on(writes());
    }
    if wanted("reads") {
        runtime.block_on(reads());
    }
    if wanted("watch") {
        runtime.block_on(watches());
    }
    if wanted("open") {
        runtime.block_on(opening());
    }
    if wanted("endless") {
        runtime.block_on(endless());
    }
}

fn scratch() -> tempfile::TempDir {
    let base = std::env::var_os("FERRITE_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    tempfile::tempdir_in(base).unwrap()
}

fn key(n: u64) -> String {
    format!("/registry/pods/default/pod-{n:08}")
}

fn row(what: &str, figure: impl std::fmt::Display, note: &str) {
    println!("{what:<44} {figure:>14}  {note}");
}

/// One durable write, with the way to say that it is done.
type Job = (u64, tokio::sync::oneshot::Sender<()>);

/// A store to measure.
#[derive(Clone)]
enum Engine {
    Own(Arc<Store>),
    /// A thread that commits all waiting writes in one transaction, as the own log does.
    Redb(mpsc::SyncSender<Job>),
    Etcd(Vec<KvClient<Channel>>),
}

impl Engine {
    async fn put(&mut self, client: usize, n: u64) {
        match self {
            Self::Own(store) => {
                let op = Op::put(Key::from(&key(n)), Bytes::from(vec![b'x'; VALUE]));
                store.commit(Txn::default().then(op)).await.unwrap();
            }
            Self::Redb(jobs) => {
                let (done, answer) = tokio::sync::oneshot::channel();
                jobs.send((n, done)).unwrap();
                answer.await.unwrap();
            }
            Self::Etcd(clients) => {
                let at = client % clients.len();
                let value = Bytes::from(vec![b'x'; VALUE]);
                let put = PutRequest { key: key(n).into(), value, ..PutRequest::default() };
                clients[at].put(put).await.unwrap();
            }
        }
    }
}

/// Durable writes per second that `clients` clients make to ten thousand keys.
async fn rate(engine: &Engine, clients: usize) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    let begun = Instant::now();
    for client in 0..clients {
        let (mut engine, stop) = (engine.clone(), Arc::clone(&stop));
        tasks.spawn(async move {
            let mut done = 0u64;
            while !stop.load(Ordering::Relaxed) {
                engine.put(client, (client as u64 * 7919 + done * 31) % 10_000).await;
                done += 1;
            }
            done
        });
    }
    tokio::time::sleep(SLICE).await;
    stop.store(true, Ordering::Relaxed);
    let done: u64 = tasks.join_all().await.into_iter().sum();
    done as f64 / begun.elapsed().as_secs_f64()
}

fn bare_fdatasync(dir: &Path) -> f64 {
    let mut file = std::fs::File::create(dir.join("bare")).unwrap();
    let (begun, mut done) = (Instant::now(), 0);
    while begun.elapsed() < SLICE {
        file.write_all(&[7; VALUE]).unwrap();
        file.sync_data().unwrap();
        done += 1;
    }
    f64::from(done) / begun.elapsed().as_secs_f64()
}

fn redb_engine(dir: &Path) -> (Engine, std::thread::JoinHandle<()>) {
    const TABLE: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("kv");
    let database = redb::Database::create(dir.join("redb")).unwrap();
    let (jobs, waiting) = mpsc::sync_channel::<Job>(4096);
    let thread = std::thread::spawn(move || {
        while let Ok(first) = waiting.recv() {
            let batch: Vec<Job> = std::iter::once(first).chain(waiting.try_iter()).collect();
            let write = database.begin_write().unwrap();
            {
                let mut table = write.open_table(TABLE).unwrap();
                for (n, _) in &batch {
                    table.insert(key(*n).as_bytes(), &[b'x'; VALUE][..]).unwrap();
                }
            }
            write.commit().unwrap();
            for (_, done) in batch {
                let _ = done.send(());
            }
        }
    });
    (Engine::Redb(jobs), thread)
}

/// A real etcd on loopback, ended with this value.
struct Etcd {
    child: Child,
    url: String,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn start_etcd(dir: &Path) -> Option<Etcd> {
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (url, peer) = (format!("http://{}", free()), format!("http://{}", free()));
    let child = Command::new("etcd")
        .args(["--data-dir", dir.join("etcd").to_str().unwrap(), "--quota-backend-bytes", "8589934592"])
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap", "--log-level", "error"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let etcd = Etcd { child, url };
    let until = Instant::now() + Duration::from_secs(30);
    while Instant::now() < until {
        if let Ok(channel) = Endpoint::from_shared(etcd.url.clone()).unwrap().connect().await {
            let get = RangeRequest { key: Bytes::from("a"), ..RangeRequest::default() };
            if KvClient::new(channel).range(get).await.is_ok() {
                return Some(etcd);
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    None
}

async fn channels(url: &str, count: usize) -> Vec<Channel> {
    let mut channels = Vec::new();
    for _ in 0..count {
        channels.push(Endpoint::from_shared(url.to_owned()).unwrap().connect().await.unwrap());
    }
    channels
}

async fn writes() {
    println!("\ndurable writes of {VALUE} bytes per second");
    let dir = scratch();
    let own = Store::open(&dir.path().join("own"), LogOptions::default(), HistoryLimits::default()).unwrap();
    let etcd = start_etcd(dir.path()).await;
    let (redb, thread) = redb_engine(dir.path());
    let mut engines = vec![("own log", Engine::Own(Arc::new(own))), ("redb, batched", redb)];
    if let Some(etcd) = &etcd {
        let clients = channels(&etcd.url, 8).await.into_iter().map(KvClient::new).collect();
        engines.push(("etcd", Engine::Etcd(clients)));
    }
    for clients in [1, 64, 256] {
        let mut rates = vec![0.0; engines.len()];
        let mut bare = 0.0;
        for _ in 0..TURNS {
            bare += bare_fdatasync(dir.path()) / TURNS as f64;
            for ((_, engine), sum) in engines.iter().zip(&mut rates) {
                *sum += rate(engine, clients).await / TURNS as f64;
            }
        }
        row("bare append and fdatasync", format!("{bare:.0}"), "");
        for ((name, _), rate) in engines.iter().zip(&rates) {
            let note = match *name {
                "own log" => format!("{:.2} of bare fdatasyncs", rate / bare),
                _ => format!("own log is {:.1} times as fast", rates[0] / rate),
            };
            row(&format!("{name}, {clients} clients"), format!("{rate:.0}"), &note);
        }
    }
    drop(engines);
    thread.join().unwrap();
}

/// The time a core has worked for this thread, whatever else the machine does.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours that lives through the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

async fn reads() {
    println!("\nreads per second of one core's time, 100,000 keys in random order");
    let store = Store::memory();
    for chunk in 0..100u64 {
        let ops = (0..1000).map(|i| Op::put(Key::from(&key(chunk * 1000 + i)), Bytes::from(vec![1; VALUE])));
        store.commit(ops.fold(Txn::default(), Txn::then)).await.unwrap();
    }
    let keys: Vec<String> = (0..100_000u64).map(|i| key((i * 7919) % 100_000)).collect();
    let measure = |what: &str, get: &dyn Fn(&str) -> usize| {
        let (begun, mut done, mut sum) = (thread_time(), 0u64, 0);
        while thread_time() - begun < FOR {
            keys.iter().for_each(|k| sum += get(k));
            done += keys.len() as u64;
        }
        assert!(sum > 0);
        row(what, format!("{:.0}", done as f64 / (thread_time() - begun).as_secs_f64()), "");
    };
    let snapshot = store.snapshot();
    measure("get from one snapshot", &|k| snapshot.get(k.as_bytes()).unwrap().value.len());
    measure("take a snapshot, then get", &|k| store.snapshot().get(k.as_bytes()).unwrap().value.len());
    let begun = thread_time();
    let (mut rounds, mut bytes) = (0u64, 0);
    while thread_time() - begun < FOR {
        bytes += snapshot.range(b"/registry/pods/", None).map(|(_, e)| e.value.len()).sum::<usize>();
        rounds += 100_000;
    }
    assert!(bytes > 0);
    row("entries of a range", format!("{:.0}", rounds as f64 / (thread_time() - begun).as_secs_f64()), "");
}

async fn watches() {
    println!("\nevents per second to {WATCHERS} watchers");
    let dir = scratch();
    let store =
        Store::open(&dir.path().join("own"), LogOptions::default(), HistoryLimits::default()).unwrap();
    let store = Arc::new(store);
    const EVENTS: usize = 5000;
    let mut watchers = JoinSet::new();
    for _ in 0..WATCHERS {
        let mut watch = store.watch(b"/registry/pods/", Revision(0)).unwrap();
        watchers.spawn(async move {
            let mut seen = 0;
            while seen < EVENTS {
                seen += watch.next().await.unwrap().len();
            }
        });
    }
    let begun = Instant::now();
    let mut writers = JoinSet::new();
    for writer in 0..50u64 {
        let mut engine = Engine::Own(Arc::clone(&store));
        writers.spawn(async move {
            for n in 0..(EVENTS / 50) as u64 {
                engine.put(0, writer * 100 + n).await;
            }
        });
    }
    writers.join_all().await;
    watchers.join_all().await;
    let own = (EVENTS * WATCHERS) as f64 / begun.elapsed().as_secs_f64();
    row("own log", format!("{own:.0}"), "");

    let Some(etcd) = start_etcd(dir.path()).await else { return };
    const FEWER: usize = 500;
    let streams = channels(&etcd.url, 10).await;
    let mut readers = JoinSet::new();
    for channel in streams {
        let create = WatchCreateRequest {
            key: Bytes::from("/registry/pods/"),
            range_end: Bytes::from("/registry/pods0"),
            ..WatchCreateRequest::default()
        };
        let requests: Vec<_> = (0..WATCHERS / 10)
            .map(|_| WatchRequest { request_union: Some(RequestUnion::CreateRequest(create.clone())) })
            .collect();
        let open = tokio_stream::StreamExt::chain(tokio_stream::iter(requests), tokio_stream::pending());
        let mut client = WatchClient::new(channel).max_decoding_message_size(usize::MAX);
        let mut stream = client.watch(open).await.unwrap().into_inner();
        for _ in 0..WATCHERS / 10 {
            stream.message().await.unwrap().unwrap();
        }
        readers.spawn(async move {
            let _client = client;
            let mut seen = 0;
            while seen < FEWER * WATCHERS / 10 {
                seen += stream.message().await.unwrap().unwrap().events.len();
            }
        });
    }
    let clients: Vec<_> = channels(&etcd.url, 4).await.into_iter().map(KvClient::new).collect();
    let begun = Instant::now();
    let mut writers = JoinSet::new();
    for writer in 0..50u64 {
        let mut engine = Engine::Etcd(clients.clone());
        writers.spawn(async move {
            for n in 0..(FEWER / 50) as u64 {
                engine.put(writer as usize, writer * 100 + n).await;
            }
        });
    }
    writers.join_all().await;
    readers.join_all().await;
    let rate = (FEWER * WATCHERS) as f64 / begun.elapsed().as_secs_f64();
    row(
        "etcd, over the network",
        format!("{rate:.0}"),
        &format!("own log is {:.0} times as fast", own / rate),
    );
}

fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// In a process of its own, so that its memory is the store's.
fn open_and_tell(dir: &Path) {
    let before = memory();
    let begun = Instant::now();
    let store = Store::open(dir, LogOptions::default(), HistoryLimits::default()).unwrap();
    let took = begun.elapsed();
    assert_eq!(store.snapshot().len(), OBJECTS);
    println!("{} {}", took.as_millis(), memory() - before);
}

async fn opening() {
    println!("\n{OBJECTS} objects of {VALUE} bytes");
    let dir = scratch();
    let path = dir.path().join("own");
    let raw: usize = (0..OBJECTS).map(|i| key(i as u64).len() + VALUE).sum();
    {
        let store = Store::open(&path, LogOptions::default(), HistoryLimits::default()).unwrap();
        for chunk in 0..(OBJECTS / 500) as u64 {
            let ops =
                (0..500).map(|i| Op::put(Key::from(&key(chunk * 500 + i)), Bytes::from(vec![1; VALUE])));
            store.commit(ops.fold(Txn::default(), Txn::then)).await.unwrap();
        }
    }
    row("on disk / raw, as written", format!("{:.2}", on_disk(&path) as f64 / raw as f64), "");
    for what in ["log and checkpoint", "checkpoint alone"] {
        let out = Command::new(std::env::current_exe().unwrap()).env(OPENED, &path).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let mut figures = text.split_whitespace().map(|w| w.parse::<u64>().unwrap());
        let (millis, bytes) = (figures.next().unwrap(), figures.next().unwrap());
        row(&format!("open, {what}"), format!("{millis} ms"), "");
        let allowed = raw as f64 * 1.3 + 250.0 * OBJECTS as f64;
        let note = format!(
            "{:.2} of raw, {:.0} bytes each above raw, {:.2} of what is allowed",
            bytes as f64 / raw as f64,
            (bytes as f64 - raw as f64) / OBJECTS as f64,
            bytes as f64 / allowed
        );
        row(&format!("memory, {what}"), format!("{} MiB", bytes >> 20), &note);
        let store = Store::open(&path, LogOptions::default(), HistoryLimits::default()).unwrap();
        store.checkpoint().await.unwrap();
    }
}

/// Total size of the files in a directory. A file that disappears meanwhile counts as nothing.
fn on_disk(path: &Path) -> u64 {
    std::fs::read_dir(path).unwrap().flatten().filter_map(|e| Some(e.metadata().ok()?.len())).sum()
}

/// Durable updates to the same ten thousand keys, and their size on disk as time goes by.
async fn endless() {
    const KEYS: u64 = 10_000;
    const WRITERS: u64 = 50;
    /// Keys written by one transaction.
    const TOGETHER: u64 = 20;
    const ROWS: u64 = 10;
    let updates: u64 = std::env::var("FERRITE_BENCH_UPDATES")
        .ok()
        .map_or(1_000_000, |n| n.replace('_', "").parse().unwrap());
    println!("\n{updates} durable updates to {KEYS} keys of {VALUE} bytes");
    let dir = scratch();
    let path = dir.path().join("own");
    let store = Store::open(&path, LogOptions::default(), HistoryLimits::default()).unwrap();
    let store = Arc::new(store);
    let raw: usize = (0..KEYS).map(|i| key(i).len() + VALUE).sum();
    let left = Arc::new(std::sync::atomic::AtomicI64::new(updates as i64));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (store, left) = (Arc::clone(&store), Arc::clone(&left));
        writers.spawn(async move {
            let value = Bytes::from(vec![b'x'; VALUE]);
            let mut at = writer * (KEYS / WRITERS);
            while left.fetch_sub(TOGETHER as i64, Ordering::Relaxed) > 0 {
                let put = |i| Op::put(Key::from(&key((at + i) % KEYS)), value.clone());
                store.commit((0..TOGETHER).map(put).fold(Txn::default(), Txn::then)).await.unwrap();
                at += TOGETHER;
            }
        });
    }
    let (begun, mut most, mut shown) = (Instant::now(), 0, 0);
    while !writers.is_empty() {
        tokio::select! {
            done = writers.join_next() => done.unwrap().unwrap(),
            () = tokio::time::sleep(Duration::from_millis(50)) => {}
        }
        let size = on_disk(&path);
        most = most.max(size);
        let done = updates - left.load(Ordering::Relaxed).max(0) as u64;
        if done * ROWS / updates > shown {
            shown = done * ROWS / updates;
            let note = format!(
                "{:.1} times the live data; {} MiB resident",
                size as f64 / raw as f64,
                memory() >> 20
            );
            row(
                &format!("{:.0} s, {done} updates", begun.elapsed().as_secs_f64()),
                format!("{} MiB", size >> 20),
                &note,
            );
        }
    }
    row("updates per second", format!("{:.0}", updates as f64 / begun.elapsed().as_secs_f64()), "");
    row(
        "most on disk",
        format!("{} MiB", most >> 20),
        &format!("{:.1} times the live data", most as f64 / raw as f64),
    );
}
