//! Real etcd members: started, killed, paused, asked for their leader.

use crate::network::Network;
use ferrite_etcd::client::{EtcdOptions, Layout, connect};
use ferrite_etcd::proto::etcdserverpb::StatusRequest;
use ferrite_etcd::proto::etcdserverpb::maintenance_client::MaintenanceClient;
use ferrite_store::{HistoryLimits, Store};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

pub fn require(program: &str) {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
    assert!(found, "{program} is not installed: run `cargo xtask test --install`");
}

/// A member of a cluster, ended with this value.
pub struct Member {
    name: String,
    url: String,
    peer: String,
    child: Option<Child>,
}

pub struct Cluster {
    pub dir: tempfile::TempDir,
    pub members: Vec<Member>,
    extra: Vec<String>,
    /// Where the members live when it is not loopback.
    pub network: Option<Network>,
}

pub fn free_url() -> String {
    format!("http://{}", std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

impl Cluster {
    pub fn start(size: usize, extra: &[&str]) -> Self {
        let members = (0..size)
            .map(|n| Member { name: format!("m{n}"), url: free_url(), peer: free_url(), child: None })
            .collect();
        Self::run_all(members, extra.iter().map(|s| (*s).to_owned()).collect(), None)
    }

    /// Members with an address each, in namespaces of their own.
    pub fn start_in(network: Network) -> Self {
        let url = |n: usize, port: u16| format!("http://{}:{port}", network.address(n));
        let member = |n| Member { name: format!("m{n}"), url: url(n, 2379), peer: url(n, 2380), child: None };
        let members = (0..network.size()).map(member).collect();
        Self::run_all(members, Vec::new(), Some(network))
    }

    fn run_all(members: Vec<Member>, extra: Vec<String>, network: Option<Network>) -> Self {
        let mut cluster = Self { dir: tempfile::tempdir().unwrap(), members, extra, network };
        (0..cluster.members.len()).for_each(|n| cluster.run(n));
        cluster
    }

    pub fn run(&mut self, n: usize) {
        let all: Vec<String> = self.members.iter().map(|m| format!("{}={}", m.name, m.peer)).collect();
        let log = std::fs::File::create(self.dir.path().join(format!("{n}.log"))).unwrap();
        let dir = self.dir.path().join(&self.members[n].name);
        let member = &mut self.members[n];
        let mut command = Command::new("etcd");
        if let Some(network) = &self.network {
            network.enter(n, &mut command);
        }
        let child = command
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

    pub fn kill(&mut self, n: usize) {
        if let Some(mut child) = self.members[n].child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub fn signal(&self, n: usize, signal: i32) {
        let pid = i32::try_from(self.members[n].child.as_ref().unwrap().id()).unwrap();
        // SAFETY: kill takes plain numbers; the process is our own child and has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    fn urls(&self) -> Vec<String> {
        self.members.iter().map(|m| m.url.clone()).collect()
    }

    pub fn options(&self, prefix: &str) -> EtcdOptions {
        EtcdOptions {
            layout: Layout { ours: Vec::new(), theirs: format!("/{prefix}/").into_bytes() },
            compact_every: None,
            timeout: Duration::from_secs(15),
            ..EtcdOptions::new(self.urls())
        }
    }

    pub async fn store(&self, prefix: &str) -> Store {
        connect(self.options(prefix), HistoryLimits::default()).await.unwrap()
    }

    pub fn channel(&self, n: usize) -> Channel {
        Endpoint::from_shared(self.members[n].url.clone()).unwrap().connect_lazy()
    }

    /// The member that leads, as soon as there is one.
    pub async fn leader(&self) -> usize {
        self.leader_but(&[]).await
    }

    /// The same, ignoring the opinion of `others`.
    pub async fn leader_but(&self, others: &[usize]) -> usize {
        for _ in 0..200 {
            for n in
                (0..self.members.len()).filter(|n| self.members[*n].child.is_some() && !others.contains(n))
            {
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

/// The last lines of every member's log.
pub fn logs(dir: &Path) -> String {
    let mut all = String::new();
    for n in 0..3 {
        let text = std::fs::read_to_string(dir.join(format!("{n}.log"))).unwrap_or_default();
        all.extend(text.lines().rev().take(5).map(|l| format!("\n{n}: {l}")));
    }
    all
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|n| self.kill(n));
    }
}
