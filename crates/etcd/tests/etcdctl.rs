//! etcd's own command line against our API.
#![allow(clippy::unwrap_used)]

use ferrite_etcd::server::Service;
use ferrite_store::{HistoryLimits, LogOptions, Store};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, UnixStream};
use tokio::process::Command;
use tokio::task::JoinSet;

struct Served {
    service: Service,
    store: Arc<Store>,
    endpoint: String,
    dir: tempfile::TempDir,
    tasks: JoinSet<()>,
}

fn require(program: &str) {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
    assert!(found, "{program} is not installed: run `cargo xtask test --install`");
}

/// Serves a fresh store on a unix socket and on loopback.
async fn serve() -> Served {
    let dir = tempfile::tempdir().unwrap();
    let files = dir.path().join("store");
    let store = Arc::new(Store::open(&files, LogOptions::default(), HistoryLimits::default()).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = dir.path().join("etcd.sock");
    let urls = vec![format!("http://{}", listener.local_addr().unwrap())];
    // Without a scheme: `endpoint status` would send it as part of the authority, which HTTP/2 does not allow.
    let endpoint = listener.local_addr().unwrap().to_string();
    let service = Service::new(Arc::clone(&store), Some(files), urls);
    let mut tasks = JoinSet::new();
    let (tcp, unix, expiry) = (service.clone(), service.clone(), service.clone());
    let path = socket.clone();
    tasks.spawn(async move { tcp.serve_tcp(listener, None).await.unwrap() });
    tasks.spawn(async move { unix.serve_unix(&path).await.unwrap() });
    tasks.spawn(async move { expiry.expire_leases().await });
    while UnixStream::connect(&socket).await.is_err() {
        tokio::task::yield_now().await;
    }
    Served { service, store, endpoint, dir, tasks }
}

impl Served {
    fn socket(&self) -> PathBuf {
        self.dir.path().join("etcd.sock")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints={}", self.endpoint)).args(args);
        command.kill_on_drop(true);
        command
    }

    async fn raw(&self, args: &[&str]) -> Output {
        self.command(args).output().await.unwrap()
    }

    async fn ok(&self, args: &[&str]) -> String {
        let output = self.raw(args).await;
        let (out, err) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "etcdctl {args:?}: {out}{err}");
        out
    }

    async fn json(&self, args: &[&str]) -> Value {
        let out = self.ok(&[args, &["-w", "json"]].concat()).await;
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out}"))
    }

    async fn fails(&self, args: &[&str]) -> String {
        let output = self.raw(args).await;
        assert!(!output.status.success(), "etcdctl {args:?} should have failed");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Sends lines to an interactive command.
    async fn typed(&self, args: &[&str], input: &str) -> String {
        let mut child = self.command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
        let output = child.wait_with_output().await.unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    async fn stop(mut self) {
        self.service.stop().await;
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
    }
}

#[tokio::test]
async fn put_get_and_del() {
    require("etcdctl");
    let etcd = serve().await;
    for (key, value) in [("/a/1", "one"), ("/a/2", "two"), ("/a/3", "three"), ("/b", "b")] {
        assert_eq!(etcd.ok(&["put", key, value]).await, "OK\n");
    }
    assert_eq!(etcd.ok(&["get", "/a/1"]).await, "/a/1\none\n");
    let keys = |out: &str| out.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let listed = etcd.ok(&["get", "/a/", "--prefix", "--keys-only"]).await;
    assert_eq!(listed, "/a/1\n\n/a/2\n\n/a/3\n\n");
    // The arguments, and the keys in the order of the response.
    let rows: [(&[&str], &[&str]); 8] = [
        (&["/a/", "--prefix", "--limit=2"], &["/a/1", "/a/2"]),
        (&["/a/", "--prefix", "--sort-by=KEY", "--order=DESCEND"], &["/a/3", "/a/2", "/a/1"]),
        (&["/a/", "--prefix", "--sort-by=VALUE"], &["/a/1", "/a/3", "/a/2"]),
        (&["/a/", "--prefix", "--sort-by=MODIFY", "--order=DESCEND", "--limit=1"], &["/a/3"]),
        (&["/a/1", "/a/3"], &["/a/1", "/a/2"]),
        (&["/a/3", "--from-key"], &["/a/3", "/b"]),
        (&["/a/", "--prefix", "--rev=2"], &["/a/1", "/a/2"]),
        (&["/nothing"], &[]),
    ];
    for (args, expected) in rows {
        let out = etcd.ok(&[&["get", "--keys-only"], args].concat()).await;
        assert_eq!(keys(&out), expected, "{args:?}");
    }
    let json = etcd.json(&["get", "/a/", "--prefix", "--limit=1"]).await;
    assert_eq!((json["count"].as_i64(), json["more"].as_bool()), (Some(3), Some(true)));
    assert_eq!(json["header"]["revision"], 4);
    assert_eq!(json["kvs"][0]["key"], "L2EvMQ==");
    assert_eq!(json["kvs"][0]["version"], 1);
    assert_eq!(etcd.ok(&["put", "/a/1", "uno", "--prev-kv"]).await, "OK\n/a/1\none\n");
    assert_eq!(etcd.ok(&["put", "/a/1", "--ignore-lease", "eins"]).await, "OK\n");
    assert!(etcd.fails(&["put", "/c", "--ignore-lease", "x"]).await.contains("key not found"));
    assert_eq!(
        etcd.ok(&["del", "/a/", "--prefix", "--prev-kv"]).await,
        "3\n/a/1\neins\n/a/2\ntwo\n/a/3\nthree\n"
    );
    assert_eq!(etcd.ok(&["del", "/a/", "--prefix"]).await, "0\n");
    assert_eq!(etcd.ok(&["get", "/a/2", "--rev=6", "--print-value-only"]).await, "two\n");
    etcd.stop().await;
}

#[tokio::test]
async fn transactions() {
    require("etcdctl");
    let etcd = serve().await;
    etcd.ok(&["put", "a", "1"]).await;
    let rows = [
        ("value(\"a\") = \"1\"\nmod(\"b\") = \"0\"\n\nput b x\nget a\n\n\n\n", "SUCCESS"),
        ("value(\"a\") = \"2\"\n\nput c x\n\nget b\ndel b\n\n", "FAILURE"),
        ("version(\"a\") > \"0\"\nversion(\"a\") < \"9\"\ncreate(\"a\") = \"1\"\n\nget a\n\n\n\n", "SUCCESS"),
        ("value(\"zzz\") = \"1\"\n\nput d x\n\nget a\n\n", "FAILURE"),
        ("value(\"zzz\") = \"\"\n\nput d x\n\nget a\n\n", "FAILURE"),
    ];
    for (input, expected) in rows {
        let out = etcd.typed(&["txn"], input).await;
        assert!(out.starts_with(expected), "{input}: {out}");
    }
    assert_eq!(etcd.ok(&["get", "", "--prefix", "--keys-only"]).await, "a\n\n");
    let out = etcd.typed(&["txn"], "\nput a 1\nput a 2\n\n\n\n").await;
    assert!(!out.starts_with("SUCCESS"), "a key twice in one transaction");
    etcd.stop().await;
}

#[tokio::test]
async fn watches_and_compaction() {
    require("etcdctl");
    let etcd = serve().await;
    for i in 1..=4 {
        etcd.ok(&["put", "/w/a", &i.to_string()]).await;
    }
    let mut child = etcd
        .command(&["watch", "/w/", "--prefix", "--rev=3", "--prev-kv"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut read = async |count: usize| {
        let mut read = Vec::new();
        for _ in 0..count {
            read.push(lines.next_line().await.unwrap().unwrap());
        }
        read.join(" ")
    };
    assert_eq!(read(10).await, "PUT /w/a 2 /w/a 3 PUT /w/a 3 /w/a 4");
    etcd.ok(&["put", "/elsewhere", "x"]).await;
    etcd.ok(&["del", "/w/a"]).await;
    assert_eq!(read(5).await, "DELETE /w/a 4 /w/a ");
    child.kill().await.unwrap();

    assert_eq!(etcd.ok(&["compaction", "4"]).await, "compacted revision 4\n");
    assert!(etcd.fails(&["compaction", "4"]).await.contains("required revision has been compacted"));
    assert!(etcd.fails(&["compaction", "99"]).await.contains("required revision is a future revision"));
    assert!(etcd.fails(&["get", "/w/a", "--rev=3"]).await.contains("required revision has been compacted"));
    assert!(
        etcd.fails(&["get", "/w/a", "--rev=99"]).await.contains("required revision is a future revision")
    );
    assert_eq!(etcd.ok(&["get", "/w/a", "--rev=4", "--print-value-only"]).await, "4\n");
    let gone = etcd.fails(&["watch", "/w/", "--prefix", "--rev=2"]).await;
    assert!(gone.contains("required revision has been compacted"), "{gone}");
    etcd.stop().await;
}

#[tokio::test]
async fn leases() {
    require("etcdctl");
    let etcd = serve().await;
    let granted = etcd.ok(&["lease", "grant", "600"]).await;
    let id = granted.split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(granted, format!("lease {id} granted with TTL(600s)\n"));
    etcd.ok(&["put", "/l", "x", &format!("--lease={id}")]).await;
    let left = etcd.ok(&["lease", "timetolive", &id, "--keys"]).await;
    assert!(left.contains("granted with TTL(600s)") && left.contains("attached keys([/l])"), "{left}");
    let renewed = etcd.ok(&["lease", "keep-alive", "--once", &id]).await;
    assert!(renewed.contains("keepalived with TTL(600)"), "{renewed}");
    assert!(etcd.ok(&["lease", "list"]).await.contains(&id));
    assert!(etcd.fails(&["put", "/m", "x", "--lease=7777"]).await.contains("requested lease not found"));
    assert_eq!(etcd.ok(&["lease", "revoke", &id]).await, format!("lease {id} revoked\n"));
    assert_eq!(etcd.ok(&["get", "/l"]).await, "");
    assert!(etcd.ok(&["lease", "timetolive", &id]).await.contains("already expired"));

    // A lease that nobody renews takes its key along.
    let short = etcd.ok(&["lease", "grant", "2"]).await;
    let short = short.split_whitespace().nth(1).unwrap();
    let mut watch = etcd.store.watch(b"/short", etcd.store.snapshot().revision()).unwrap();
    etcd.ok(&["put", "/short", "x", &format!("--lease={short}")]).await;
    let mut seen = Vec::new();
    while seen.len() < 2 {
        seen.extend(watch.next().await.unwrap());
    }
    assert!(seen[1].entry.is_none());
    etcd.stop().await;
}

#[tokio::test]
async fn snapshots_are_real_databases() {
    require("etcdctl");
    let etcd = serve().await;
    for round in 0..3 {
        for i in 0..400 {
            use ferrite_store::{Key, Op, Txn};
            // Small ones, some larger than a page, several at one revision.
            let op = |n: usize| {
                let size = if i % 50 == 7 { 9000 } else { 20 + (i * 7) % 300 };
                Op::put(Key::from(&format!("/registry/{i}/{n}")), vec![round; size].into())
            };
            etcd.store.commit(Txn::default().then(op(0)).then(op(1))).await.unwrap();
        }
    }
    let file = etcd.dir.path().join("snapshot.db");
    let path = file.to_str().unwrap();
    etcd.ok(&["snapshot", "save", path]).await;
    let status = etcd.json(&["snapshot", "status", path]).await;
    assert_eq!(status["revision"], 1200);
    // The keys, and the other entries of the database about itself.
    assert_eq!(status["totalKey"], 803);
    let restored = etcd.dir.path().join("restored");
    etcd.ok(&["snapshot", "restore", path, "--data-dir", restored.to_str().unwrap()]).await;
    require("etcd");
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (client, peer) = (free(), free());
    let (client, peer) = (format!("http://{client}"), format!("http://{peer}"));
    let _real = Command::new("etcd")
        .args(["--data-dir", restored.to_str().unwrap(), "--log-level", "error", "--logger", "zap"])
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let args = ["--endpoints", &client, "--dial-timeout=20s", "--command-timeout=20s"];
    let get = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(args)
        .args(["get", "/registry/", "--prefix", "--limit=1", "--write-out=fields"])
        .output()
        .await
        .unwrap();
    let out = String::from_utf8_lossy(&get.stdout).into_owned();
    assert!(out.contains("\"Count\" : 800"), "{out}{}", String::from_utf8_lossy(&get.stderr));
    assert!(out.contains("\"Revision\" : 1200"), "{out}");
    etcd.stop().await;
}

#[tokio::test]
async fn the_rest_of_the_tools() {
    require("etcdctl");
    let etcd = serve().await;
    etcd.ok(&["put", "a", "1"]).await;
    let status = etcd.json(&["endpoint", "status"]).await;
    assert_eq!(status[0]["Status"]["header"]["revision"], 1);
    assert_eq!(status[0]["Status"]["leader"], status[0]["Status"]["header"]["member_id"]);
    let health = etcd.raw(&["endpoint", "health"]).await;
    assert!(health.status.success(), "{}", String::from_utf8_lossy(&health.stderr));
    assert!(etcd.ok(&["endpoint", "hashkv"]).await.contains(&etcd.endpoint));
    assert!(etcd.ok(&["member", "list"]).await.contains("started, ferrite"));
    assert_eq!(etcd.ok(&["alarm", "list"]).await, "");
    etcd.ok(&["defrag"]).await;
    assert!(etcd.fails(&["user", "list"]).await.contains("not offered"));

    use std::os::unix::fs::PermissionsExt;
    let socket = etcd.socket();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    for (args, expected) in [(["get", "a"], "a\n1\n"), (["member", "list"], "ferrite")] {
        let out = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            // This version sends the path as the authority, where HTTP/2 allows no slash.
            .current_dir(etcd.dir.path())
            .arg("--endpoints=unix://etcd.sock")
            .args(args)
            .output()
            .await
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.contains(expected), "{args:?}: {out}{err}");
    }
    etcd.stop().await;
    assert!(!socket.exists());
}
