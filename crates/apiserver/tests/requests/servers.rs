//! Two servers on one etcd. Skipped where `etcd` is not installed.

use crate::world::*;
use ferrite_apiserver::Serving;
use ferrite_etcd::client::{EtcdOptions, connect};
use ferrite_json::{Value, json};
use ferrite_store::{HistoryLimits, Store};
use http_body_util::BodyExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// One member on loopback, ended with this value.
struct Etcd {
    child: Child,
    url: String,
    _dir: tempfile::TempDir,
}

impl Etcd {
    fn start() -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let free = || {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            format!("http://{}", listener.local_addr().expect("an address"))
        };
        let (url, peer) = (free(), free());
        let started = Command::new("etcd")
            .arg("--data-dir")
            .arg(dir.path())
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match started {
            Ok(child) => Some(Self { child, url, _dir: dir }),
            Err(_) => {
                eprintln!("skipped: etcd is not installed");
                None
            }
        }
    }

    async fn store(&self) -> Store {
        let options =
            EtcdOptions { timeout: Duration::from_secs(15), ..EtcdOptions::new(vec![self.url.clone()]) };
        connect(options, HistoryLimits::default()).await.expect("etcd answers")
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_server_acknowledged_is_seen_by_the_next_request_to_another() {
    let Some(etcd) = Etcd::start() else { return };
    let servers = [
        World::start_on(etcd.store().await, Serving::default()).await,
        World::start_on(etcd.store().await, Serving::default()).await,
    ];
    let names = |list: &Value| list["items"].as_array().map_or(0, Vec::len);
    let version = servers[0].get(MAPS).await.at("/metadata/resourceVersion");
    let from = format!("{MAPS}?watch=1&resourceVersion={}", version.as_str().unwrap());
    let mut watches = Vec::new();
    for server in &servers {
        watches.push(server.open(&from).await.into_body());
    }

    const ROUNDS: usize = 25;
    for round in 0..ROUNDS {
        let (writer, reader) = (&servers[round % 2], &servers[(round + 1) % 2]);
        let path = format!("{MAPS}/m{round}");
        let made = writer.post(MAPS, &config_map(&format!("m{round}"), json!({"n": "1"}))).await;
        assert_eq!(made.code, 201, "{:?}", made.json());
        assert_eq!(reader.get(&path).await.code, 200, "a read without a version is of now");
        let version = made.at("/metadata/resourceVersion");
        let listed = reader.get(&format!("{MAPS}?resourceVersion={}", version.as_str().unwrap())).await;
        assert_eq!(names(&listed.json()), round + 1, "one at least as new as a version waits for it");

        // A change at the other server is applied to the first one's write.
        let patched = reader.patch("merge", &path, &json!({"data": {"n": "2"}})).await;
        assert_eq!(patched.code, 200);
        assert_eq!(writer.get(&path).await.at("/data/n"), "2");
        let old = format!("{MAPS}/m{}", round.saturating_sub(1));
        let stale = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata":
            {"name": format!("m{round}"), "resourceVersion": version}, "data": {"n": "lost"}});
        assert_eq!(writer.put(&path, &stale).await.code, 409, "nobody overwrites what he has not seen");
        assert_eq!(names(&writer.get(MAPS).await.json()), round + 1);
        assert_eq!(reader.get(&old).await.code, 200);
    }

    // Both watches have sent the same events, all of them, in order.
    let mut told = Vec::new();
    for mut body in watches {
        let (mut text, mut seen) = (Vec::new(), Vec::new());
        while seen.len() < 2 * ROUNDS {
            let frame = tokio::time::timeout(Duration::from_secs(20), body.frame()).await;
            let frame = frame.expect("an event in time").expect("the watch goes on").unwrap();
            text.extend_from_slice(&frame.into_data().unwrap());
            let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
            for line in
                text.drain(..whole).collect::<Vec<u8>>().split(|b| *b == b'\n').filter(|l| !l.is_empty())
            {
                let event: Value = ferrite_json::from_slice(line).unwrap();
                let text = |pointer: &str| event.pointer(pointer).unwrap().as_str().unwrap().to_owned();
                let version: u64 = text("/object/metadata/resourceVersion").parse().unwrap();
                seen.push((version, text("/type"), text("/object/metadata/name"), text("/object/data/n")));
            }
        }
        assert!(seen.is_sorted_by(|a, b| a.0 < b.0));
        told.push(seen);
    }
    assert_eq!(told[0], told[1]);
    let expected: Vec<_> = (0..ROUNDS)
        .flat_map(|n| [("ADDED", format!("m{n}"), "1"), ("MODIFIED", format!("m{n}"), "2")])
        .collect();
    let seen: Vec<_> = told[0].iter().map(|(_, t, n, d)| (t.as_str(), n.clone(), d.as_str())).collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn a_client_that_leads_no_more_writes_nothing() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tower::Service;
    let world = World::start().await;
    let leads = Arc::new(AtomicBool::new(true));
    let guard = Arc::clone(&leads);
    let user = ferrite_apiserver::User::new("kubernetes-admin", ["system:masters"]);
    let client =
        world.server().in_process_client(user).guarded(Arc::new(move || guard.load(Ordering::SeqCst)));
    let ask = |method: &'static str, path: String, body: Option<Value>| {
        let mut client = client.clone();
        async move {
            let body = body.map(|body| body.to_string()).unwrap_or_default();
            let body = http_body_util::Full::new(bytes::Bytes::from(body));
            let request = http::Request::builder().method(method).uri(path);
            let request = request.header("content-type", "application/json").body(body).unwrap();
            client.call(request).await.unwrap().status().as_u16()
        }
    };
    assert_eq!(ask("POST", MAPS.into(), Some(config_map("first", json!({})))).await, 201);
    leads.store(false, Ordering::SeqCst);
    assert_eq!(ask("POST", MAPS.into(), Some(config_map("second", json!({})))).await, 503);
    assert_eq!(ask("DELETE", format!("{MAPS}/first"), None).await, 503);
    assert_eq!(ask("GET", format!("{MAPS}/first"), None).await, 200, "reading changes nothing");
    assert_eq!(world.get(&format!("{MAPS}/second")).await.code, 404);
}
