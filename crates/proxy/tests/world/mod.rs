//! A node with a bridge and pods, each in a network namespace of its own, and a machine outside.
#![allow(dead_code, reason = "not every test uses everything")]

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ferrite_netlink::{Address, Route, VethLink};
use ferrite_network::testing::TestNs;
use ferrite_network::{Bridge, BridgeConfig, PodNetwork, PodRef};
use ferrite_nft::{Change, Monitor, OwnGenerations, Table, TableFamily};
use ferrite_proxy::layout::{LayoutConfig, LocalTraffic, NodePortAddresses};
use ferrite_proxy::model::{IpFamily, NodeFacts};
use ferrite_proxy::sync::{FamilyProxy, ServedPort, Synced, served_ports};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};

pub const TABLE: &str = "kube-proxy-test";
const PORT: u16 = 8080;
/// Long enough for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// A connection that is dropped shows in nothing but time.
const DROPPED: Duration = Duration::from_millis(400);

/// Connections of a namespace's processes.
trait Traffic {
    /// Connects and reads which address the server saw and which server it is.
    fn tcp_as(&self, source: Option<IpAddr>, target: &str, patience: Duration) -> Result<Answer, ErrorKind>;
    fn udp(&self, target: &str) -> Result<Answer, ErrorKind>;
}

impl Traffic for TestNs {
    fn tcp_as(&self, source: Option<IpAddr>, target: &str, patience: Duration) -> Result<Answer, ErrorKind> {
        let target: SocketAddr = target.parse().unwrap();
        self.run(move || {
            let mut stream = match source {
                None => TcpStream::connect_timeout(&target, patience)?,
                Some(source) => connect_from(source, target, patience)?,
            };
            stream.set_read_timeout(Some(PATIENCE))?;
            Answer::read(&mut stream)
        })
        .map_err(|error: io::Error| error.kind())
    }

    fn udp(&self, target: &str) -> Result<Answer, ErrorKind> {
        let target: SocketAddr = target.parse().unwrap();
        let any: IpAddr = if target.is_ipv4() { [0, 0, 0, 0].into() } else { Ipv6Addr::UNSPECIFIED.into() };
        self.run(move || {
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(target)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            socket.send(b"?")?;
            let mut buffer = [0; 256];
            let len = socket.recv(&mut buffer)?;
            Answer::parse(&buffer[..len])
        })
        .map_err(|error: io::Error| error.kind())
    }
}

fn connect_from(source: IpAddr, target: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(source, 0))?;
        let stream = tokio::time::timeout(patience, socket.connect(target)).await??.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    })
}

/// A server's answer: the client as the server saw it, and the server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Answer {
    pub client: IpAddr,
    pub server: IpAddr,
}

impl Answer {
    fn read(stream: &mut TcpStream) -> io::Result<Self> {
        stream.write_all(b"?")?;
        let mut buffer = [0; 256];
        let len = stream.read(&mut buffer)?;
        Self::parse(&buffer[..len])
    }

    fn parse(bytes: &[u8]) -> io::Result<Self> {
        let text = String::from_utf8_lossy(bytes);
        let (client, server) = text.split_once(' ').ok_or(ErrorKind::InvalidData)?;
        Ok(Self { client: plain(client.parse().unwrap()), server: plain(server.parse().unwrap()) })
    }
}

fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// A connection that stays open.
pub struct Open(TcpStream);

impl Open {
    pub fn ping(&mut self) -> io::Result<()> {
        Answer::read(&mut self.0).map(drop)
    }
}

/// A UDP socket with one peer.
pub struct UdpFlow(UdpSocket);

impl UdpFlow {
    pub fn ask(&self) -> io::Result<Answer> {
        self.0.send(b"?")?;
        let mut buffer = [0; 256];
        let len = self.0.recv(&mut buffer)?;
        Answer::parse(&buffer[..len])
    }
}

/// Serves TCP and UDP in a namespace, until the test's process ends.
fn serve(ns: &TestNs, own: IpAddr) {
    let (listener, socket) = ns.run(|| {
        let any = (Ipv6Addr::UNSPECIFIED, PORT);
        (TcpListener::bind(any).unwrap(), UdpSocket::bind(SocketAddr::new(own, PORT)).unwrap())
    });
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let Ok(peer) = stream.peer_addr() else { continue };
            thread::spawn(move || {
                let mut byte = [0];
                while stream.read_exact(&mut byte).is_ok() {
                    let _ = stream.write_all(format!("{} {own}", peer.ip()).as_bytes());
                }
            });
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 16];
        while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(format!("{} {own}", peer.ip()).as_bytes(), peer);
        }
    });
}

pub struct World {
    pub node: TestNs,
    pub proxy: FamilyProxy,
    pub own: OwnGenerations,
    config: LayoutConfig,
    pods: Vec<(TestNs, IpAddr)>,
    services: BTreeMap<String, Service>,
    slices: BTreeMap<String, EndpointSlice>,
    bridge: Arc<Bridge>,
    _state: tempfile::TempDir,
}

impl World {
    pub async fn new(pods: usize) -> Self {
        Self::with(pods, |_| {}).await
    }

    pub async fn six(pods: usize) -> Self {
        let mut world = Self::with(pods, |config| {
            config.family = IpFamily::V6;
            config.local_traffic = LocalTraffic::Cidrs(vec!["fd44::/64".parse().unwrap()]);
            config.service_cidrs = vec!["fd96::/112".parse().unwrap()];
        })
        .await;
        // The network has no addresses of IPv6 for pods, and lets none out; these pods get theirs by hand.
        world.node.ruleset().delete_table(TableFamily::Netdev, "ferrite-senders-ferrite0").unwrap();
        world.node.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap());
        let gateway: IpAddr = "fd44::1".parse().unwrap();
        let address = Address::new("ferrite0", gateway, 64).without_duplicate_detection();
        world.node.route().add_address(address).await.unwrap();
        let route = Route::new("fd96::".parse().unwrap(), 112).dev("ferrite0");
        world.node.route().add_route(route).await.unwrap();
        for (index, (ns, ip)) in world.pods.iter_mut().enumerate() {
            *ip = format!("fd44::{:x}", index + 2).parse().unwrap();
            let address = Address::new("eth0", *ip, 64).without_duplicate_detection();
            ns.route().add_address(address).await.unwrap();
            ns.route().add_route(Route::default_by(gateway).dev("eth0")).await.unwrap();
        }
        world.serve();
        world
    }

    pub async fn with(pods: usize, change: impl FnOnce(&mut LayoutConfig)) -> Self {
        let state = tempfile::tempdir().unwrap();
        let node = TestNs::new();
        let config = BridgeConfig {
            name: "ferrite0".into(),
            pod_cidrs: "10.244.1.0/24".parse().unwrap(),
            cluster_cidrs: "10.244.0.0/16".parse().unwrap(),
            service_cidrs: Some("10.96.0.0/16".parse().unwrap()),
            state: state.path().join("network"),
            mtu: 1450,
            routed: false,
        };
        let bridge = Bridge::open_in(&node.path, config).await.unwrap();
        bridge.route_services().await.unwrap();
        node.route().set_link_up("lo").await.unwrap();
        let mut made = Vec::new();
        for index in 0..pods {
            let ns = TestNs::new();
            let pod = PodRef {
                namespace: "ns".into(),
                name: format!("pod-{index}"),
                uid: format!("uid-{index}"),
                ..PodRef::default()
            };
            let ip = bridge.attach(&format!("sandbox-{index}"), &ns.path, &pod).await.unwrap().ips[0];
            made.push((ns, ip));
        }
        let mut config = LayoutConfig {
            family: IpFamily::V4,
            masquerade_mark: 1 << 14,
            masquerade_all: false,
            local_traffic: LocalTraffic::Cidrs(vec!["10.244.0.0/16".parse().unwrap()]),
            node_ip: Some("10.244.1.1".parse().unwrap()),
            node_port_addresses: NodePortAddresses::All,
            untracked_bridge: None,
            service_cidrs: vec!["10.96.0.0/16".parse().unwrap()],
        };
        change(&mut config);
        let own = OwnGenerations::default();
        let table = Table::open(config.family, TABLE, Some(&node.path), own.clone()).unwrap();
        let proxy = FamilyProxy::new(config.clone(), table);
        let mut world = Self {
            node,
            proxy,
            own,
            config,
            pods: made,
            services: BTreeMap::new(),
            slices: BTreeMap::new(),
            bridge,
            _state: state,
        };
        if world.config.family == IpFamily::V4 {
            world.serve();
        }
        world
    }

    /// Starts the pods' servers; with addresses of the family under test.
    fn serve(&mut self) {
        for (ns, ip) in &self.pods {
            serve(ns, *ip);
        }
    }

    pub fn ip(&self, pod: usize) -> IpAddr {
        self.pods[pod].1
    }

    /// Runs `work` in a pod's network namespace.
    pub fn in_pod<T: Send>(&self, pod: usize, work: impl FnOnce() -> T + Send) -> T {
        self.pods[pod].0.run(work)
    }

    pub fn service(&mut self, name: &str, spec: Value) {
        self.service_with_status(name, spec, json!({}));
    }

    pub fn service_with_status(&mut self, name: &str, spec: Value, status: Value) {
        let metadata = json!({"namespace": "ns", "name": name});
        let service = json!({"metadata": metadata, "spec": spec, "status": status});
        self.services.insert(name.to_owned(), serde_json::from_value(service).unwrap());
        self.update(name);
    }

    pub fn endpoints(&mut self, name: &str, pods: &[usize]) {
        self.endpoints_on(name, "node", pods);
    }

    /// Says that `node` runs the pods, wherever they really are.
    pub fn endpoints_on(&mut self, name: &str, node: &str, pods: &[usize]) {
        let spec = self.services[name].spec.clone().unwrap();
        let ports: Vec<Value> = spec
            .ports
            .unwrap()
            .iter()
            .map(|port| json!({"name": port.name.clone().unwrap_or_default(), "port": PORT, "protocol": port.protocol}))
            .collect();
        let endpoints: Vec<Value> =
            pods.iter().map(|pod| json!({"addresses": [self.ip(*pod)], "nodeName": node})).collect();
        let slice = json!({"metadata": {"namespace": "ns", "name": name}, "addressType": self.config.family.api_name(),
            "ports": ports, "endpoints": endpoints});
        self.slices.insert(name.to_owned(), serde_json::from_value(slice).unwrap());
        self.update(name);
    }

    fn update(&mut self, name: &str) {
        let ports = self.served(name);
        self.proxy.update("ns", name, &ports);
    }

    pub fn served(&self, name: &str) -> Vec<ServedPort> {
        let node = NodeFacts { name: "node".into(), zone: String::new() };
        let slices = self.slices.get(name);
        served_ports(&self.services[name], slices.into_iter(), self.config.family, &node)
    }

    pub fn sync(&mut self) -> Synced {
        self.proxy.sync().unwrap_or_else(|error| panic!("{error}: {:?}", std::error::Error::source(&error)))
    }

    /// A new process: it knows nothing, and the table of the old one is there.
    pub fn restart(&mut self) {
        let table = Table::open(self.config.family, TABLE, Some(&self.node.path), self.own.clone()).unwrap();
        self.proxy = FamilyProxy::new(self.config.clone(), table);
        let names: Vec<String> = self.services.keys().cloned().collect();
        names.iter().for_each(|name| self.update(name));
    }

    pub fn tcp(&self, pod: usize, target: &str) -> Result<Answer, ErrorKind> {
        self.pods[pod].0.tcp_as(None, target, PATIENCE)
    }

    pub fn udp(&self, pod: usize, target: &str) -> Result<Answer, ErrorKind> {
        self.pods[pod].0.udp(target)
    }

    /// A UDP socket that stays open.
    pub fn udp_flow(&self, pod: usize, target: &str) -> UdpFlow {
        let target: SocketAddr = target.parse().unwrap();
        let socket = self.pods[pod].0.run(|| UdpSocket::bind(("0.0.0.0", 0)).unwrap());
        socket.connect(target).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        UdpFlow(socket)
    }

    pub fn tcp_from_node(&self, target: &str) -> Result<Answer, ErrorKind> {
        self.node.tcp_as(None, target, PATIENCE)
    }

    /// Returns true if nobody answers, not even with a refusal.
    pub fn dropped(&self, pod: usize, target: &str) -> bool {
        self.pods[pod].0.tcp_as(None, target, DROPPED) == Err(ErrorKind::TimedOut)
    }

    pub fn connect(&self, pod: usize, target: &str) -> Open {
        let target: SocketAddr = target.parse().unwrap();
        let stream = self.pods[pod].0.run(|| TcpStream::connect_timeout(&target, PATIENCE).unwrap());
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Open(stream)
    }

    /// A machine on a segment that the node has an address on.
    pub async fn outside(&self) -> Outside {
        let ns = TestNs::new();
        let inner = ns.netns();
        let node = self.node.route();
        node.add_link(VethLink::new("uplink", "eth0").peer_netns(&inner)).await.unwrap();
        let address = |link: &'static str, octet: u8| Address::new(link, [192, 0, 2, octet].into(), 24);
        node.add_address(address("uplink", 1)).await.unwrap();
        node.set_link_up("uplink").await.unwrap();
        let conn = ns.route();
        conn.add_address(address("eth0", 2)).await.unwrap();
        conn.set_link_up("eth0").await.unwrap();
        let pods = Route::new([10, 244, 0, 0].into(), 16).gateway([192, 0, 2, 1].into());
        conn.add_route(pods).await.unwrap();
        Outside(ns)
    }

    pub fn monitor(&self) -> Monitor {
        Monitor::open(TABLE, Some(&self.node.path), self.own.clone()).unwrap()
    }

    /// Returns true if the monitor reports an earlier change.
    pub async fn notices(&self, changed: &mut (impl Future<Output = Change> + Unpin)) -> bool {
        tokio::time::timeout(DROPPED, changed).await.is_ok()
    }

    pub fn foreign_table(&self, name: &str) {
        let mut ruleset = self.node.ruleset();
        let mut batch = ruleset.batch(TableFamily::Ipv4, name);
        batch.add_table();
        ruleset.commit(batch).unwrap();
    }

    pub fn flush_ruleset(&self) {
        let mut ruleset = self.node.ruleset();
        for table in ruleset.tables().unwrap() {
            ruleset.delete_table(table.family, &table.name).unwrap();
        }
    }

    pub fn tables(&self) -> Vec<String> {
        let tables = self.node.ruleset().tables().unwrap();
        tables.iter().map(|table| format!("{} {}", table.family, table.name)).collect()
    }
}

pub struct Outside(TestNs);

impl Outside {
    pub fn tcp(&self, target: &str) -> Result<Answer, ErrorKind> {
        self.0.tcp_as(None, target, PATIENCE)
    }

    pub fn tcp_as(&self, source: &str, target: &str) -> Result<Answer, ErrorKind> {
        self.0.tcp_as(Some(source.parse().unwrap()), target, PATIENCE)
    }

    pub fn dropped(&self, source: Option<&str>, target: &str) -> bool {
        let source = source.map(|source| source.parse().unwrap());
        self.0.tcp_as(source, target, DROPPED) == Err(ErrorKind::TimedOut)
    }

    pub async fn route_to_node(&self, range: &str) {
        let (network, prefix) = range.split_once('/').unwrap();
        let route =
            Route::new(network.parse().unwrap(), prefix.parse().unwrap()).gateway([192, 0, 2, 1].into());
        self.0.route().add_route(route).await.unwrap();
    }

    pub async fn add_address(&self, address: &str) {
        let (address, prefix) = address.split_once('/').unwrap();
        let address = Address::new("eth0", address.parse().unwrap(), prefix.parse().unwrap());
        self.0.route().add_address(address).await.unwrap();
    }
}
