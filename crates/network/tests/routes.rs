//! Routes between nodes on real kernel objects: nodes, pods and the router between segments are network namespaces of the
//! test, and captures show how packets travel.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ferrite_netlink::{Address, Netns, Route, Scope, VethLink};
use ferrite_network::{
    Addresses, Bridge, BridgeConfig, Cidr, Cidrs, Encapsulation, Peer, Router, RouterConfig,
};
use ferrite_nft::{BaseChain, Hook, TableFamily};
use support::{TestNs, attach, connect_error, echo};

/// A node with one pod.
struct Node {
    ns: TestNs,
    pod: TestNs,
    pod_ip: IpAddr,
    peer: Peer,
    bridge: Arc<Bridge>,
    router: Router,
    _state: tempfile::TempDir,
}

/// The ranges of the families that a node has.
fn cluster(peer: &Peer) -> Cidrs {
    let range = |cidr: &Cidr| if cidr.network().is_ipv4() { "10.244.0.0/16" } else { "fd00:244::/56" };
    Cidrs::new(peer.pod_cidrs.iter().map(|cidr| range(cidr).parse().unwrap())).unwrap()
}

fn list<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> Vec<T> {
    text.split(',').map(|part| part.parse().unwrap()).collect()
}

fn router_config(peer: &Peer, encapsulation: Encapsulation) -> RouterConfig {
    RouterConfig {
        bridge: "ferrite0".into(),
        node_ips: Addresses::new(peer.addresses.clone()).unwrap(),
        pod_cidrs: Some(Cidrs::new(peer.pod_cidrs.clone()).unwrap()),
        cluster_cidrs: cluster(peer),
        service_cidrs: Some("10.96.0.0/16,fd00:96::/108".parse().unwrap()),
        encapsulation,
    }
}

impl Node {
    /// A node in a namespace that is connected already.
    async fn new(ns: TestNs, name: &str, address: &str, pods: &str, how: Encapsulation, mtu: u32) -> Self {
        let state = tempfile::tempdir().unwrap();
        let peer = Peer { name: name.into(), addresses: list(address), pod_cidrs: list(pods) };
        let bridge = Bridge::open_in(
            &ns.path,
            BridgeConfig {
                name: "ferrite0".into(),
                pod_cidrs: Cidrs::new(peer.pod_cidrs.clone()).unwrap(),
                cluster_cidrs: cluster(&peer),
                service_cidrs: Some("10.96.0.0/16,fd00:96::/108".parse().unwrap()),
                state: state.path().join("network"),
                mtu,
                routed: true,
            },
        )
        .await
        .unwrap();
        let router = Router::open_in(&ns.path, router_config(&peer, how)).await.unwrap();
        let pod = TestNs::new();
        let pod_ip = attach(&bridge, &format!("pod-{name}"), &pod).await;
        Self { ns, pod, pod_ip, peer, bridge, router, _state: state }
    }

    async fn apply(&mut self, others: &[&Peer]) {
        let peers: Vec<Peer> = others.iter().map(|peer| (*peer).clone()).collect();
        self.router.apply(&peers).await.unwrap();
    }

    async fn routes(&self) -> Vec<String> {
        let routes = self.ns.route().get_routes().await.unwrap();
        let pods = |text: &String| text.starts_with("10.244.") || text.starts_with("fd00:244:");
        let mut found: Vec<String> = routes.iter().map(|r| r.to_string()).filter(pods).collect();
        found.sort();
        found.dedup();
        found
    }
}

/// Connects two namespaces.
async fn connect(a: (&TestNs, &str, &str), b: (&TestNs, &str, &str)) {
    let other = Netns::from_path(&b.0.path).unwrap();
    a.0.route().add_link(VethLink::new(a.1, b.1).peer_netns(&other)).await.unwrap();
    for (ns, link, address) in [a, b] {
        let conn = ns.route();
        conn.replace_address(Address::new(link, address.parse().unwrap(), 24)).await.unwrap();
        conn.set_link_up("lo").await.unwrap();
        conn.set_link_up(link).await.unwrap();
    }
}

async fn default_route(ns: &TestNs, gateway: &str) {
    ns.route().replace_route(Route::default_by(gateway.parse().unwrap())).await.unwrap();
}

/// Reads every frame that passes in a namespace.
struct Capture(OwnedFd);

impl Capture {
    fn start(ns: &TestNs) -> Self {
        let fd = ns.run(|| {
            let every = i32::from((nix::libc::ETH_P_ALL as u16).to_be());
            // SAFETY: a plain call; the result is checked below.
            unsafe {
                nix::libc::socket(nix::libc::AF_PACKET, nix::libc::SOCK_RAW | nix::libc::SOCK_NONBLOCK, every)
            }
        });
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the descriptor was just made and is nobody else's.
        Self(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Source and destination of the packets of IPv4 so far, and the port of those in UDP.
    fn packets(&self) -> Vec<(Ipv4Addr, Ipv4Addr, Option<u16>)> {
        let mut seen = Vec::new();
        let mut frame = [0u8; 65_536];
        loop {
            // SAFETY: the buffer is valid for its length.
            let read =
                unsafe { nix::libc::recv(self.0.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) };
            let Ok(read) = usize::try_from(read) else { return seen };
            let packet = &frame[..read];
            if read < 42 || packet[12..14] != [8, 0] {
                continue;
            }
            let address = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
            let port = (packet[23] == 17).then(|| u16::from_be_bytes([packet[36], packet[37]]));
            seen.push((address(26), address(30), port));
        }
    }
}

/// Sends a mebibyte, which fits into no single packet.
fn bulk(from: &TestNs, to: &TestNs, address: IpAddr) {
    let listener = to.run(|| TcpListener::bind((address, 0)).unwrap());
    let target = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        all.len()
    });
    let mut stream = from.run(|| TcpStream::connect_timeout(&target, Duration::from_secs(10)).unwrap());
    stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&vec![7; 1 << 20]).unwrap();
    drop(stream);
    assert_eq!(server.join().unwrap(), 1 << 20);
}

#[tokio::test]
async fn pods_of_nodes_on_one_segment_reach_each_other_as_they_are() {
    let (ns_a, ns_b) = (TestNs::new(), TestNs::new());
    connect((&ns_a, "eth0", "192.0.2.1"), (&ns_b, "eth0", "192.0.2.2")).await;
    let mut a = Node::new(ns_a, "a", "192.0.2.1", "10.244.1.0/24", Encapsulation::Auto, 1500).await;
    let mut b = Node::new(ns_b, "b", "192.0.2.2", "10.244.2.0/24", Encapsulation::Auto, 1500).await;
    assert_eq!(connect_error(&a.pod, "10.244.2.2:1"), std::io::ErrorKind::HostUnreachable);
    a.apply(&[&b.peer]).await;
    b.apply(&[&a.peer]).await;
    let capture = Capture::start(&b.ns);
    assert_eq!(echo(&a.pod, &b.pod, b.pod_ip), format!("ping from {}", a.pod_ip), "the source is the pod");
    assert_eq!(echo(&b.pod, &a.pod, a.pod_ip), format!("ping from {}", b.pod_ip));
    assert_eq!(echo(&a.ns, &b.pod, b.pod_ip), "ping from 192.0.2.1", "nodes reach pods of other nodes");
    assert!(capture.packets().iter().all(|(_, _, port)| *port != Some(8472)), "nothing is encapsulated");
    assert!(a.ns.route().get_link_by_name("vferrite0").await.unwrap().is_none());
    // Packets that leave the cluster have the node's address.
    assert_eq!(echo(&a.pod, &b.ns, "192.0.2.2".parse().unwrap()), "ping from 192.0.2.1");

    // Somebody removes the route: the next look puts it back.
    let ours = Route::new("10.244.2.0".parse().unwrap(), 24).protocol(0xfe).scope(Scope::Universe);
    a.ns.route().del_route(ours).await.unwrap();
    a.apply(&[&b.peer]).await;
    echo(&a.pod, &b.pod, b.pod_ip);
    // Claims of nodes that cannot be true change nothing.
    let liar = |pods: &str| Peer { name: "liar".into(), pod_cidrs: list(pods), ..b.peer.clone() };
    let lies = [liar("0.0.0.0/0"), liar("10.244.1.0/24"), liar("10.244.2.0/25"), liar("10.96.0.0/24")];
    let mut peers = vec![&b.peer];
    peers.extend(&lies);
    a.apply(&peers).await;
    assert_eq!(
        a.routes().await,
        ["10.244.0.0/16", "10.244.1.0/24", "10.244.1.1/32", "10.244.1.255/32", "10.244.2.0/24"]
    );
    // The node is gone: so is its route, and packets to its pods end here.
    a.apply(&[]).await;
    assert!(!a.routes().await.contains(&"10.244.2.0/24".to_owned()));
    assert_eq!(connect_error(&a.pod, "10.244.2.2:1"), std::io::ErrorKind::HostUnreachable);
    // Removing the network removes the routes, too.
    a.apply(&[&b.peer]).await;
    a.bridge.remove().await.unwrap();
    assert_eq!(a.routes().await, Vec::<String>::new());
}

#[tokio::test]
async fn nodes_beyond_a_router_are_reached_through_a_tunnel() {
    let (ns_a, ns_b, ns_c, between) = (TestNs::new(), TestNs::new(), TestNs::new(), TestNs::new());
    // a and b share a segment through the router's bridge-less links: a–router and a–b; c is on another segment.
    connect((&ns_a, "eth0", "192.0.2.1"), (&ns_b, "eth0", "192.0.2.2")).await;
    connect((&ns_a, "eth1", "198.51.100.1"), (&between, "left", "198.51.100.254")).await;
    connect((&ns_c, "eth0", "203.0.113.3"), (&between, "right", "203.0.113.254")).await;
    between.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    default_route(&ns_a, "198.51.100.254").await;
    default_route(&ns_c, "203.0.113.254").await;
    let how = Encapsulation::Auto;
    let mut a = Node::new(ns_a, "a", "198.51.100.1", "10.244.1.0/24", how, 1450).await;
    let b = Node::new(ns_b, "b", "192.0.2.2", "10.244.2.0/24", how, 1450).await;
    let mut c = Node::new(ns_c, "c", "203.0.113.3", "10.244.3.0/24", how, 1450).await;
    a.apply(&[&b.peer, &c.peer]).await;
    c.apply(&[&a.peer]).await;
    let capture = Capture::start(&between);
    assert_eq!(echo(&a.pod, &c.pod, c.pod_ip), format!("ping from {}", a.pod_ip), "the source is the pod");
    assert_eq!(echo(&c.pod, &a.pod, a.pod_ip), format!("ping from {}", c.pod_ip));
    echo(&a.ns, &c.pod, c.pod_ip);
    bulk(&a.pod, &c.pod, c.pod_ip);
    let nodes = ["198.51.100.1".parse().unwrap(), "203.0.113.3".parse().unwrap()];
    let packets = capture.packets();
    assert!(!packets.is_empty());
    for (from, to, port) in packets {
        assert!(nodes.contains(&from) && nodes.contains(&to), "{from} to {to} is not encapsulated");
        assert_eq!(port, Some(8472));
    }
    let tunnel = a.ns.route().get_link_by_name("vferrite0").await.unwrap().unwrap();
    assert_eq!(tunnel.mtu, Some(1450), "room for the outer packet");

    // The node moves: its tunnel follows.
    c.ns.route().replace_address(Address::new("eth0", "203.0.113.9".parse().unwrap(), 24)).await.unwrap();
    c.peer.addresses = list("203.0.113.9");
    c.router = Router::open_in(&c.ns.path, router_config(&c.peer, how)).await.unwrap();
    c.apply(&[&a.peer]).await;
    a.apply(&[&b.peer, &c.peer]).await;
    assert_eq!(echo(&a.pod, &c.pod, c.pod_ip), format!("ping from {}", a.pod_ip));
    assert!(capture.packets().iter().all(|(from, to, _)| ![*from, *to].contains(&nodes[1])));

    // No node needs it any more: the tunnel goes.
    a.apply(&[&b.peer]).await;
    assert!(a.ns.route().get_link_by_name("vferrite0").await.unwrap().is_none());
    assert_eq!(connect_error(&a.pod, "10.244.3.2:1"), std::io::ErrorKind::HostUnreachable);
    let left = capture.packets();
    assert!(
        left.iter().all(|(_, to, _)| !to.octets().starts_with(&[10, 244])),
        "a packet of a pod has left: {left:?}"
    );
}

#[tokio::test]
async fn tunnels_between_neighbours_when_asked_for() {
    let (ns_a, ns_b) = (TestNs::new(), TestNs::new());
    connect((&ns_a, "eth0", "192.0.2.1"), (&ns_b, "eth0", "192.0.2.2")).await;
    let how = Encapsulation::Always;
    let mut a = Node::new(ns_a, "a", "192.0.2.1", "10.244.1.0/24", how, 1450).await;
    let mut b = Node::new(ns_b, "b", "192.0.2.2", "10.244.2.0/24", how, 1450).await;
    a.apply(&[&b.peer]).await;
    b.apply(&[&a.peer]).await;
    let capture = Capture::start(&b.ns);
    assert_eq!(echo(&a.pod, &b.pod, b.pod_ip), format!("ping from {}", a.pod_ip));
    assert!(capture.packets().iter().any(|(_, _, port)| *port == Some(8472)));
}

#[tokio::test]
async fn pod_mtu_leaves_room_for_the_tunnel() {
    let (ns_a, ns_b) = (TestNs::new(), TestNs::new());
    connect((&ns_a, "eth0", "192.0.2.1"), (&ns_b, "eth0", "192.0.2.2")).await;
    let of = |path: &Path, how| {
        let path = path.to_owned();
        async move { ferrite_network::pod_mtu_in(&path, "192.0.2.1".parse().unwrap(), how).await.unwrap() }
    };
    assert_eq!(of(&ns_a.path, Encapsulation::Never).await, 1500);
    assert_eq!(of(&ns_a.path, Encapsulation::Auto).await, 1450);
    ns_a.route().set_link_mtu("eth0", 9000).await.unwrap();
    assert_eq!(of(&ns_a.path, Encapsulation::Always).await, 8950);
}

#[tokio::test]
async fn pods_pass_a_firewall_that_drops_by_default() {
    let (ns_a, ns_b) = (TestNs::new(), TestNs::new());
    connect((&ns_a, "eth0", "192.0.2.1"), (&ns_b, "eth0", "192.0.2.2")).await;
    let how = Encapsulation::Auto;
    let mut a = Node::new(ns_a, "a", "192.0.2.1", "10.244.1.0/24", how, 1500).await;
    let mut b = Node::new(ns_b, "b", "192.0.2.2", "10.244.2.0/24", how, 1500).await;
    let mut nft = b.ns.ruleset();
    const FAMILIES: [TableFamily; 2] = [TableFamily::Ipv4, TableFamily::Inet];
    for family in FAMILIES {
        let mut batch = nft.batch(family, "filter");
        batch.add_table();
        batch.add_chain("FORWARD", &BaseChain::filter(Hook::Forward).dropping());
        nft.commit(batch).unwrap();
    }
    let mut rules =
        || FAMILIES.iter().map(|family| nft.rules(*family, "filter").unwrap().len()).sum::<usize>();
    a.apply(&[&b.peer]).await;
    b.apply(&[&a.peer]).await;
    b.apply(&[&a.peer]).await;
    assert_eq!(rules(), 4, "two in each chain, also after a second look");
    assert_eq!(echo(&a.pod, &b.pod, b.pod_ip), format!("ping from {}", a.pod_ip));
    b.bridge.remove().await.unwrap();
    assert_eq!(rules(), 0);
}

/// A datagram from `source` to `target` as it is inside of the tunnel to the node at `node`.
fn encapsulated(node: Ipv4Addr, source: Ipv4Addr, target: (Ipv4Addr, u16), text: &[u8]) -> Vec<u8> {
    let length = |bytes: usize| u16::try_from(bytes).unwrap().to_be_bytes();
    let mut ip = vec![0x45, 0];
    ip.extend(length(28 + text.len()));
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    ip.extend(source.octets());
    ip.extend(target.0.octets());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let [a, b, c, d] = node.octets();
    let header = [8, 0, 0, 0, 0, 0, 1, 0];
    let frame = [0x0a, 0x59, a, b, c, d, 0x0a, 0x59, 1, 2, 3, 4, 8, 0];
    let port = target.1.to_be_bytes();
    let datagram = [&[0x12, 0x34], &port[..], &length(8 + text.len()), &[0, 0]].concat();
    [&header[..], &frame, &ip, &datagram, text].concat()
}

#[tokio::test]
async fn a_pod_puts_nothing_into_the_tunnel_of_nodes() {
    let (ns_a, ns_c, between) = (TestNs::new(), TestNs::new(), TestNs::new());
    connect((&ns_a, "eth0", "198.51.100.1"), (&between, "left", "198.51.100.254")).await;
    connect((&ns_c, "eth0", "203.0.113.3"), (&between, "right", "203.0.113.254")).await;
    between.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    default_route(&ns_a, "198.51.100.254").await;
    default_route(&ns_c, "203.0.113.254").await;
    // An address that the node does not report.
    ns_c.route().replace_address(Address::new("eth0", "203.0.113.77".parse().unwrap(), 24)).await.unwrap();
    let how = Encapsulation::Auto;
    let mut a = Node::new(ns_a, "a", "198.51.100.1", "10.244.1.0/24", how, 1450).await;
    let mut c = Node::new(ns_c, "c", "203.0.113.3", "10.244.3.0/24", how, 1450).await;
    a.apply(&[&c.peer]).await;
    c.apply(&[&a.peer]).await;
    let IpAddr::V4(victim) = c.pod_ip else { panic!("an address of IPv4") };
    let heard = c.pod.run(|| UdpSocket::bind((victim, 0)).unwrap());
    heard.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let port = heard.local_addr().unwrap().port();
    // Through the node's address, through one that it does not report and through that of its bridge; from a pod of
    // another node and from one of the same node.
    let forged = encapsulated(
        "203.0.113.3".parse().unwrap(),
        "10.244.1.99".parse().unwrap(),
        (victim, port),
        b"forged",
    );
    for from in [&a.pod, &c.pod] {
        let socket = from.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        for node in ["203.0.113.3", "203.0.113.77", "10.244.3.1"] {
            // A refusal is as good as silence.
            let _ = socket.send_to(&forged, (node, 8472));
        }
        // Packets of one pod to another come in order.
        socket.send_to(b"honest", (victim, port)).unwrap();
        let mut text = [0; 64];
        let (count, _) = heard.recv_from(&mut text).unwrap();
        assert_eq!(&text[..count], b"honest");
    }
    assert_eq!(echo(&a.pod, &c.pod, c.pod_ip), format!("ping from {}", a.pod_ip), "nodes use the tunnel");
    // The port is not closed to others, nor for pods among themselves.
    let other = between.run(|| UdpSocket::bind("198.51.100.254:8472").unwrap());
    let pod = c.pod.run(|| UdpSocket::bind((victim, 8472)).unwrap());
    let socket = a.pod.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    for (to, address) in [(&other, "198.51.100.254".to_owned()), (&pod, victim.to_string())] {
        to.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket.send_to(b"honest", (address.as_str(), 8472)).unwrap();
        let mut text = [0; 64];
        assert_eq!(to.recv_from(&mut text).unwrap().0, 6);
    }
    c.bridge.remove().await.unwrap();
    let left = c.ns.ruleset().tables().unwrap();
    assert!(left.iter().all(|table| !table.name.contains("tunnel")), "{left:?}");
}
