//! Servers as processes.

use crate::client::Client;
use ferrite_apiserver::{ApiServer, Config};
use ferrite_pki::{ClusterPki, Identity, Purpose, Subject};
use ferrite_store::{HistoryLimits, LogOptions, Store};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio_rustls::TlsConnector;

/// Set for the process that is the server: where its files are.
pub const SERVER: &str = "FERRITE_BENCH_SERVER";

/// The server's side: the work of `ferrite kube-apiserver`, without its command line.
pub async fn serve(dir: &Path) {
    let store = Store::open(&dir.join("store"), LogOptions::default(), HistoryLimits::default()).unwrap();
    let pki = ClusterPki::open(&dir.join("pki")).unwrap();
    let (serving, _) = identities(&pki);
    let tls = ferrite_pki::server_config(&serving, pki.ca(), &["h2", "http/1.1"]).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let config =
        Config { service_account_key: Some(pki.service_account_key().unwrap()), ..Config::new(address) };
    let server = ApiServer::start(Arc::new(store), config).await.unwrap();
    println!("{address}");
    server.serve(listener, tls).await;
}

/// The certificates of a server and of its administrator.
pub fn identities(pki: &ClusterPki) -> (Identity, Identity) {
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let subject = Subject { common_name: "kube-apiserver".into(), organization: None, names };
    let serving = pki.ensure("apiserver", &subject, Purpose::Server).unwrap();
    let subject = Subject::client("admin", Some("system:masters"));
    (serving, pki.ensure("admin", &subject, Purpose::Client).unwrap())
}

/// A server in processes of its own, ended when it is dropped.
pub struct Server {
    /// The server itself, then the processes that it needs.
    pub children: Vec<Child>,
    pub address: SocketAddr,
    pub tls: TlsConnector,
    pub ready: Duration,
    pub _dir: Arc<tempfile::TempDir>,
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Server {
    /// Starts ours.
    pub fn start(dir: &Arc<tempfile::TempDir>) -> Self {
        let started = Instant::now();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(SERVER, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready = started.elapsed();
        let pki = ClusterPki::open(&dir.path().join("pki")).unwrap();
        Self {
            children: vec![child],
            address: line.trim().parse().unwrap(),
            tls: connector(&pki),
            ready,
            _dir: Arc::clone(dir),
        }
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.address, &self.tls).await.unwrap()
    }

    pub fn id(&self) -> u32 {
        self.children[0].id()
    }

    pub fn kib(&self, file: &str, key: &str) -> u64 {
        let text = proc(self.id(), file);
        let line = text.lines().find(|l| l.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    pub fn pss(&self) -> u64 {
        self.kib("smaps_rollup", "Pss:")
    }

    /// Processor time used so far, in seconds.
    pub fn processor(&self) -> f64 {
        let used = |child: &Child| {
            let stat = proc(child.id(), "stat");
            let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
            (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
        };
        self.children.iter().map(used).sum()
    }
}

fn proc(id: u32, file: &str) -> String {
    std::fs::read_to_string(format!("/proc/{id}/{file}")).unwrap()
}

/// The administrator's TLS connector.
pub fn connector(pki: &ClusterPki) -> TlsConnector {
    let (_, admin) = identities(pki);
    let mut tls = ferrite_pki::client_config(pki.ca(), Some(&admin)).unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    TlsConnector::from(Arc::new(tls))
}
