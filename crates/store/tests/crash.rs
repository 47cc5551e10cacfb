//! A process under load is killed at random points, again and again, on the same store.
#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use ferrite_store::{HistoryLimits, Key, LogOptions, Op, Revision, Snapshot, Store, Txn, WatchEnd};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DIR: &str = "FERRITE_CRASH_TEST_DIR";
const HEARTBEATS: &str = "FERRITE_CRASH_TEST_HEARTBEATS";
const WRITERS: usize = 12;
const ROUNDS: usize = 250;
/// The test stops early on a slow machine rather than take longer.
const BUDGET: Duration = Duration::from_secs(35);

/// Every second round writes heartbeats and makes a checkpoint every few dozen batches, so that the kill hits all
/// of its steps. The others keep their history, so that watches can resume.
fn open(dir: &Path, heartbeats: bool) -> Store {
    let min_log = if heartbeats { 24 << 10 } else { 1 << 20 };
    let options =
        LogOptions { min_log, max_ratio: 1, relaxed_window: Duration::from_millis(20), ahead: 10_000 };
    Store::open(dir, options, HistoryLimits::default()).unwrap()
}

/// The process that is killed. Does nothing when run as a test of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let heartbeats = std::env::var_os(HEARTBEATS).is_some();
    let store = Arc::new(open(Path::new(&dir), heartbeats));
    let say = |line: String| std::io::stdout().write_all(line.as_bytes()).unwrap();
    let start = store.snapshot();
    let mut watch = store.watch(b"", start.revision()).unwrap();
    say(format!("\nopened {}\n", start.revision()));
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = Arc::clone(&store);
        let mut count = counter(&start, &format!("a/{writer}")).unwrap_or(0);
        tasks.spawn(async move {
            loop {
                count += 1;
                // The last one is a heartbeat: acknowledged before it is written.
                let relaxed = heartbeats && writer == WRITERS - 1;
                let value = Bytes::from(format!("{count:0>200}"));
                let mut txn = Txn::default();
                for half in ["a", "b"] {
                    txn = txn.then(Op::put(Key::from(&format!("{half}/{writer}")), value.clone()));
                }
                let txn = if relaxed { txn.relaxed() } else { txn };
                let revision = store.commit(txn).await.unwrap().revision();
                say(format!("ack {writer} {count} {revision}\n"));
                if relaxed {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        });
    }
    tasks.spawn(async move {
        loop {
            let changes = watch.next().await.unwrap();
            let revisions: Vec<String> = changes.iter().map(|c| c.revision.to_string()).collect();
            say(format!("saw {} {}\n", watch.position(), revisions.join(" ")));
        }
    });
    tasks.join_next().await;
}

fn counter(snapshot: &Snapshot, key: &str) -> Option<u64> {
    let entry = snapshot.get(key.as_bytes())?;
    std::str::from_utf8(&entry.value).unwrap().parse().ok()
}

/// The messages that the parent received from one child.
#[derive(Debug, Default)]
struct Heard {
    opened: u64,
    acknowledged: BTreeMap<usize, (u64, u64)>,
    highest: u64,
    position: u64,
    seen: Vec<u64>,
}

impl Heard {
    fn line(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("opened") => self.opened = words.next().unwrap().parse().unwrap(),
            Some("ack") => {
                let numbers: Vec<u64> = words.map(|w| w.parse().unwrap()).collect();
                self.acknowledged.insert(numbers[0] as usize, (numbers[1], numbers[2]));
                self.highest = self.highest.max(numbers[2]);
            }
            Some("saw") => {
                let mut numbers = words.map(|w| w.parse::<u64>().unwrap());
                self.position = numbers.next().unwrap();
                self.seen.extend(numbers);
            }
            _ => {}
        }
    }
}

fn run_and_kill(dir: &Path, after: usize, heartbeats: bool) -> Heard {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if heartbeats {
        command.env(HEARTBEATS, "1");
    }
    let mut child = command
        .args(["--exact", "child", "--nocapture"])
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut heard = Heard::default();
    let mut line = String::new();
    let mut acknowledgements = 0;
    while acknowledgements < after {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "the child ended by itself");
        acknowledgements += usize::from(line.starts_with("ack"));
        heard.line(&line);
    }
    child.kill().unwrap();
    // Lines that the child printed before it died count as well; a line without an end does not.
    loop {
        line.clear();
        if out.read_line(&mut line).unwrap() == 0 {
            break;
        }
        if line.ends_with('\n') {
            heard.line(&line);
        }
    }
    child.wait().unwrap();
    heard
}

#[tokio::test]
async fn nothing_acknowledged_is_lost_whenever_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let (mut rounds, mut resumed, mut acknowledged) = (0, 0, 0);
    // A fixed sequence of points, different in each round.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    while rounds < ROUNDS && begun.elapsed() < BUDGET {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let after = 1 + (seed >> 33) as usize % 120;
        let heartbeats = rounds % 2 == 1;
        let heard = run_and_kill(dir.path(), after, heartbeats);
        let store = open(dir.path(), heartbeats);
        let now = store.snapshot();
        assert!(now.revision().0 >= heard.highest, "round {rounds}: a revision would be used twice");
        for (writer, (count, revision)) in &heard.acknowledged {
            let (a, b) = (counter(&now, &format!("a/{writer}")), counter(&now, &format!("b/{writer}")));
            assert_eq!(a, b, "round {rounds}: half a transaction of {writer}");
            acknowledged += 1;
            if !heartbeats || *writer != WRITERS - 1 {
                assert!(
                    a >= Some(*count),
                    "round {rounds}: {writer} had {count} at {revision}, there is {a:?}"
                );
            }
        }
        let mut seen = heard.seen.clone();
        match store.watch(b"", Revision(heard.position.max(heard.opened))) {
            Ok(mut watch) => loop {
                let more = watch.ready().unwrap();
                if more.is_empty() {
                    resumed += 1;
                    // Two changes for each revision since it was opened, none left out, none twice.
                    let expected: Vec<u64> =
                        (heard.opened + 1..=now.revision().0).flat_map(|r| [r, r]).collect();
                    assert_eq!(seen, expected, "round {rounds}");
                    break;
                }
                seen.extend(more.iter().map(|c| c.revision.0));
            },
            // The history did not survive: the watcher gets an error, and never just misses something.
            Err(end) => assert!(matches!(end, WatchEnd::Compacted { .. })),
        }
        drop(store);
        rounds += 1;
    }
    println!(
        "{rounds} kills, {acknowledged} writers checked, {resumed} watches resumed in {:?}",
        begun.elapsed()
    );
    assert!(resumed * 4 >= rounds, "watches resumed in {resumed} of {rounds} rounds only");
    assert!(rounds >= 50, "only {rounds} rounds in {BUDGET:?}");
}
