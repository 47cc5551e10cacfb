//! Upstream's server with its etcd, to run beside ours.

use crate::client::Client;
use crate::process::{Server, connector, identities};
use ferrite_pki::ClusterPki;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names the binary.
const UPSTREAM: &str = "FERRITE_BENCH_UPSTREAM";
const PATIENCE: Duration = Duration::from_secs(120);

/// Starts both, if they are available.
pub async fn start(dir: &Arc<tempfile::TempDir>) -> Option<Server> {
    let binary = std::env::var_os(UPSTREAM)?;
    let started = Instant::now();
    let (client, peer) = (free_port(), free_port());
    let (url, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let mut etcd = Command::new("etcd");
    etcd.arg("--data-dir")
        .arg(dir.path().join("etcd"))
        .args(["--quota-backend-bytes", "8589934592"])
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap", "--log-level", "error"]);
    let Some(etcd) = quiet(&mut etcd) else {
        eprintln!("{UPSTREAM} is set, but etcd cannot be run");
        return None;
    };
    let pki_dir = dir.path().join("pki");
    let pki = ClusterPki::open(&pki_dir).unwrap();
    identities(&pki);
    pki.service_account_key().unwrap();
    let file = |name: &str| pki_dir.join(name).to_str().unwrap().to_owned();
    let port = free_port();
    let mut kube = Command::new(binary);
    kube.args(["--etcd-servers", &url, "--bind-address", "127.0.0.1", "--secure-port", &port.to_string()])
        .args(["--cert-dir", dir.path().to_str().unwrap()])
        .args(["--tls-cert-file", &file("apiserver.crt"), "--tls-private-key-file", &file("apiserver.key")])
        .args(["--client-ca-file", &file("ca.crt"), "--authorization-mode", "Node,RBAC"])
        .args(["--service-account-issuer", "https://kubernetes.default.svc"])
        .args(["--service-account-key-file", &file("sa.pub")])
        .args(["--service-account-signing-key-file", &file("sa.key")])
        .args(["--service-cluster-ip-range", "10.0.0.0/16"]);
    let kube = quiet(&mut kube).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut server = Server {
        children: vec![kube, etcd],
        address,
        tls: connector(&pki),
        ready: Duration::ZERO,
        _dir: Arc::clone(dir),
    };
    while !is_ready(&server).await {
        assert!(started.elapsed() < PATIENCE, "upstream's server did not become ready");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server.ready = started.elapsed();
    Some(server)
}

fn quiet(command: &mut Command) -> Option<Child> {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// Ready, and the namespace is there that the benchmark uses.
async fn is_ready(server: &Server) -> bool {
    let Ok(client) = Client::connect(server.address, &server.tls).await else { return false };
    for path in ["/readyz", "/api/v1/namespaces/default"] {
        if client.whole("GET", path, "").await.0 != 200 {
            return false;
        }
    }
    true
}
