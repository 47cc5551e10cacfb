//! Policies with real sockets, in network namespaces that each test makes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use ferrite_network::testing::TestNs;
use ferrite_network::{Bridge, BridgeConfig, NetworkError, PodGuard, PodNetwork, PodRef};
use ferrite_nft::{IpFamily, OwnGenerations, Table};
use ferrite_policy::engine::Engine;
use ferrite_policy::model::{Name, PodFacts, Policy};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(20);
/// A packet that is dropped shows in nothing but time.
const DROPPED: Duration = Duration::from_millis(300);

/// The engine and its table, as a guard of the bridge.
struct Guard(Mutex<(Engine, Table)>);

impl Guard {
    fn change(&self, change: impl FnOnce(&mut Engine)) {
        let mut guard = self.0.lock().unwrap();
        let (engine, table) = &mut *guard;
        change(engine);
        table.apply(&engine.take_changes()).unwrap();
        let retired = engine.take_retired();
        if !retired.is_empty() {
            table.delete_chains(&retired).unwrap();
        }
    }

    fn policy(&self, name: &str, spec: Option<Value>) {
        let object = spec.map(|spec| json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec}));
        let policy = object.map(|json| Policy::of(&serde_json::from_value(json).unwrap()));
        self.change(|engine| engine.set_policy(&Name::new("ns", name), policy));
    }

    fn rebuild(&self) {
        let mut guard = self.0.lock().unwrap();
        let (engine, table) = &mut *guard;
        table.apply(&engine.rebuild()).unwrap();
    }
}

#[async_trait]
impl PodGuard for Guard {
    async fn cover(&self, _: &str, pod: &PodRef, addresses: &[IpAddr]) -> Result<(), NetworkError> {
        self.change(|engine| engine.set_attached(&Name::new("ns", pod.name.as_str()), addresses));
        Ok(())
    }

    async fn uncover(&self, _: &str) {}
}

struct World {
    node: TestNs,
    bridge: Arc<Bridge>,
    guard: Arc<Guard>,
    _state: tempfile::TempDir,
}

impl World {
    /// `filtered`: whether the kernel passes bridged packets to the packet filter.
    async fn new(family: IpFamily, filtered: bool) -> Self {
        let node = TestNs::new();
        let (file, pods, cluster) = match family {
            IpFamily::V4 => ("bridge-nf-call-iptables", "10.244.1.0/24", "10.244.0.0/16"),
            IpFamily::V6 => ("bridge-nf-call-ip6tables", "fd00:244:0:1::/64", "fd00:244::/56"),
        };
        let file = format!("/proc/sys/net/bridge/{file}");
        let file = file.as_str();
        if Path::new(file).exists() {
            node.run(|| std::fs::write(file, if filtered { "1" } else { "0" }).unwrap());
        }
        let state = tempfile::tempdir().unwrap();
        let config = BridgeConfig {
            name: "ferrite0".into(),
            pod_cidrs: pods.parse().unwrap(),
            cluster_cidrs: cluster.parse().unwrap(),
            service_cidrs: None,
            state: state.path().join("network"),
            mtu: 1450,
            routed: true,
        };
        let bridge = Bridge::open_in(&node.path, config).await.unwrap();
        let own = OwnGenerations::default();
        let table = Table::open(family, "ferrite-policy-test", Some(&node.path), own).unwrap();
        let engine = Engine::new(family, vec![pods.parse().unwrap()]);
        let guard = Arc::new(Guard(Mutex::new((engine, table))));
        guard.rebuild();
        bridge.set_guard(guard.clone());
        Self { node, bridge, guard, _state: state }
    }

    /// A pod with servers at ports 80, 81 and 8080 of TCP and 80 of UDP, which answer anything with the same.
    async fn pod(&self, name: &'static str, app: &str) -> Server {
        let ns = TestNs::new();
        let json = json!({
            "metadata": {"namespace": "ns", "name": name, "labels": {"app": app}},
            "spec": {"containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 80}]}]},
        });
        let facts = PodFacts::of(&serde_json::from_value(json).unwrap());
        self.guard.change(|engine| engine.set_pod(&Name::new("ns", name), Some(facts)));
        let pod = PodRef { namespace: "ns".into(), name: name.into(), ..PodRef::default() };
        let address = self.bridge.attach(name, &ns.path, &pod).await.unwrap().ips[0];
        // The kernel activates a link a moment later, and what it drops until then is repeated after a second.
        let gateway = SocketAddr::new(*self.bridge.gateways().primary(), 1);
        let refused = ns.run(|| TcpStream::connect_timeout(&gateway, PATIENCE).unwrap_err().kind());
        assert_eq!(refused, io::ErrorKind::ConnectionRefused);
        for port in [80, 81, 8080] {
            let listener = ns.run(|| TcpListener::bind((anywhere(address), port)).unwrap());
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let stream = stream.unwrap();
                    thread::spawn(move || io::copy(&mut &stream, &mut &stream));
                }
            });
        }
        let socket = ns.run(|| UdpSocket::bind((anywhere(address), 80)).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 16];
            while let Ok((len, peer)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..len], peer);
            }
        });
        Server { ns, address }
    }
}

/// All addresses of the family of one.
fn anywhere(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    }
}

struct Server {
    ns: TestNs,
    address: IpAddr,
}

/// Packets of a pod.
trait Traffic {
    fn connect(&self, to: &Server, port: u16) -> io::Result<TcpStream>;
    fn reaches(&self, to: &Server, port: u16) -> bool;
    fn reaches_by_udp(&self, to: &Server) -> bool;
}

impl Traffic for TestNs {
    fn connect(&self, to: &Server, port: u16) -> io::Result<TcpStream> {
        let target = SocketAddr::new(to.address, port);
        self.run(|| {
            let stream = TcpStream::connect_timeout(&target, DROPPED)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            Ok(stream)
        })
    }

    fn reaches(&self, to: &Server, port: u16) -> bool {
        self.connect(to, port).is_ok_and(|stream| answers(&stream))
    }

    fn reaches_by_udp(&self, to: &Server) -> bool {
        let target = SocketAddr::new(to.address, 80);
        self.run(|| {
            let socket = UdpSocket::bind((anywhere(target.ip()), 0)).unwrap();
            socket.set_read_timeout(Some(DROPPED)).unwrap();
            socket.send_to(b"ping", target).unwrap();
            socket.recv(&mut [0; 16]).is_ok()
        })
    }
}

fn answers(mut stream: &TcpStream) -> bool {
    use io::{Read, Write};
    let mut buffer = [0; 4];
    stream.write_all(b"ping").is_ok() && stream.read_exact(&mut buffer).is_ok() && buffer == *b"ping"
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_hold_on_a_bridge_that_the_kernel_filters() {
    policies_hold(IpFamily::V4, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_hold_for_ipv6() {
    policies_hold(IpFamily::V6, true).await;
    policies_hold(IpFamily::V6, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_hold_on_a_bridge_that_the_kernel_does_not_filter() {
    policies_hold(IpFamily::V4, false).await;
}

async fn policies_hold(family: IpFamily, filtered: bool) {
    let world = World::new(family, filtered).await;
    let (server, friend, stranger) = (
        world.pod("server", "server").await,
        world.pod("friend", "friend").await,
        world.pod("stranger", "x").await,
    );
    assert!(stranger.ns.reaches(&server, 81), "without a policy everything is allowed");
    let before = stranger.ns.connect(&server, 81).unwrap();
    assert!(answers(&before));

    world.guard.policy(
        "server",
        Some(json!({
            "podSelector": {"matchLabels": {"app": "server"}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                // Enough of both that ports and peers have chains of their own.
                {"from": [
                    {"podSelector": {"matchLabels": {"app": "friend"}}},
                    {"podSelector": {"matchLabels": {"app": "nobody"}}},
                    {"podSelector": {"matchLabels": {"app": "nobody-else"}}},
                ], "ports": [{"port": "web"}, {"port": "other"}, {"port": "another"}]},
                {"from": [{"ipBlock": {"cidr": format!("{}/{}", stranger.address, family.bits())}}], "ports": [{"port": 8000, "endPort": 8100}]},
                {"ports": [{"protocol": "UDP", "port": 80}]},
            ],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}],
        })),
    );
    assert!(answers(&before), "connections that are open go on");
    let rows = [
        ("a named port", friend.ns.reaches(&server, 80), true),
        ("another port", friend.ns.reaches(&server, 81), false),
        ("a range of ports", stranger.ns.reaches(&server, 8080), true),
        ("outside the range", stranger.ns.reaches(&server, 80), false),
        ("a block without the peer", friend.ns.reaches(&server, 8080), false),
        ("everybody by UDP", stranger.ns.reaches_by_udp(&server), true),
        ("the node", world.node.reaches(&server, 81), true),
        ("egress to a friend", server.ns.reaches(&friend, 81), true),
        ("egress to others", server.ns.reaches(&stranger, 80), false),
        ("egress to others by UDP", server.ns.reaches_by_udp(&stranger), false),
        ("itself", server.ns.reaches(&server, 81), true),
        ("pods that nothing selects", friend.ns.reaches(&stranger, 81), true),
    ];
    for (name, seen, want) in rows {
        assert_eq!(seen, want, "{name}, {family:?}, filtered: {filtered}");
    }

    // A pod that comes later is covered before it has a link, and known to others at once.
    let late = world.pod("late", "server").await;
    assert!(friend.ns.reaches(&late, 80) && !friend.ns.reaches(&late, 81), "the new pod is covered");
    let new_friend = world.pod("new-friend", "friend").await;
    assert!(new_friend.ns.reaches(&server, 80) && !new_friend.ns.reaches(&server, 81));

    world.guard.policy("server", None);
    assert!(stranger.ns.reaches(&server, 81), "without the policy everything is allowed again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_can_be_made_again_under_traffic() {
    let world = World::new(IpFamily::V4, true).await;
    let (server, friend) = (world.pod("server", "server").await, world.pod("friend", "friend").await);
    world.guard.policy("deny", Some(json!({"podSelector": {}, "policyTypes": ["Ingress"]})));
    assert!(!friend.ns.reaches(&server, 80));
    world.guard.policy(
        "allow",
        Some(json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"ports": [{"port": 80}]}]})),
    );
    let open = friend.ns.connect(&server, 80).unwrap();
    for _ in 0..20 {
        world.guard.rebuild();
        assert!(answers(&open));
    }
    assert!(friend.ns.reaches(&server, 80) && !friend.ns.reaches(&server, 81));
}
