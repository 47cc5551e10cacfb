//! Networks with IPv6, alone or beside IPv4, on real kernel objects in namespaces of their own.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_netlink::{Address, Netns, Route, VethLink};
use ferrite_network::{
    Addresses, Bridge, BridgeConfig, Cidrs, Encapsulation, HostPort, Peer, PodNetwork, PodRef, PortProtocol,
    Router, RouterConfig,
};
use ferrite_nft::TableFamily;
use support::{TestNs, connect_error, echo, pod};

const BOTH: &str = "10.244.1.0/24,fd00:244:0:1::/64";
const SIX: &str = "fd00:244:0:1::/64";

/// The cluster's ranges of the families of a node's pods.
fn cluster(pods: Cidrs) -> Cidrs {
    let range = |cidr: &ferrite_network::Cidr| match cidr.network().is_ipv4() {
        true => "10.244.0.0/16".parse().ok(),
        false => "fd00:244::/56".parse().ok(),
    };
    pods.try_map(range).unwrap()
}

fn config(state: &Path, pods: &str) -> BridgeConfig {
    let pods: Cidrs = pods.parse().unwrap();
    BridgeConfig {
        name: "ferrite0".into(),
        pod_cidrs: pods,
        cluster_cidrs: cluster(pods),
        service_cidrs: Some("10.96.0.0/16,fd00:96::/108".parse().unwrap()),
        state: state.join("network"),
        mtu: 1430,
        routed: true,
    }
}

async fn attach(bridge: &Bridge, sandbox: &str, ns: &TestNs) -> Vec<IpAddr> {
    bridge.attach(sandbox, &ns.path, &pod(sandbox)).await.unwrap().ips
}

fn v6(addresses: &[IpAddr]) -> Ipv6Addr {
    let six = addresses.iter().find_map(|address| match address {
        IpAddr::V6(v6) => Some(*v6),
        IpAddr::V4(_) => None,
    });
    six.unwrap()
}

fn read(ns: &TestNs, file: &str) -> String {
    ns.run(|| std::fs::read_to_string(format!("/proc/sys/net/{file}")).unwrap().trim().to_owned())
}

/// Addresses, routes and tables of IPv6, without what the kernel makes by itself.
async fn inventory(ns: &TestNs) -> Vec<String> {
    let conn = ns.route();
    let mut seen = Vec::new();
    let local = |text: &str| text.starts_with("fe80") || text.starts_with("ff00") || text.starts_with("::1");
    for address in conn.get_addresses().await.unwrap() {
        seen.push(format!("{}", address.address));
    }
    seen.extend(conn.get_routes().await.unwrap().iter().map(|route| route.to_string()));
    seen.retain(|text| !local(text));
    seen.extend(ns.ruleset().tables().unwrap().iter().map(|table| format!("table {}", table.name)));
    seen.sort();
    seen
}

/// Addresses beyond the link that cannot be used until the kernel has looked for duplicates.
fn tentative(ns: &TestNs) -> Vec<String> {
    let text = ns.run(|| std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap());
    let flag = |text: &str| u8::from_str_radix(text, 16).unwrap() & 0x40 != 0;
    let lines = text.lines().filter(|line| {
        // Address, index, length of the prefix, scope, flags, link.
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields[3] == "00" && flag(fields[4])
    });
    lines.map(str::to_owned).collect()
}

#[tokio::test]
async fn pods_with_both_families_talk_at_once() {
    for (pods, wanted) in [(BOTH, "10.244.1.2 fd00:244:0:1::2"), (SIX, "fd00:244:0:1::2")] {
        let state = tempfile::tempdir().unwrap();
        let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
        let bridge = Bridge::open_in(&node.path, config(state.path(), pods)).await.unwrap();
        let (ips_a, ips_b) = (attach(&bridge, "a", &a).await, attach(&bridge, "b", &b).await);
        let text: Vec<String> = ips_a.iter().map(ToString::to_string).collect();
        assert_eq!(text.join(" "), wanted);
        // Nothing waits for the detection of duplicates, which takes a second.
        for ns in [&node, &a, &b] {
            assert_eq!(tentative(ns), [""; 0]);
        }
        let target = SocketAddr::new(v6(&ips_b).into(), 9);
        let refused = a.run(|| TcpStream::connect_timeout(&target, Duration::from_secs(10)).unwrap_err());
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        for (from, to) in ips_a.iter().zip(&ips_b) {
            assert_eq!(echo(&a, &b, *to), format!("ping from {from}"));
            assert_eq!(echo(&b, &a, *from), format!("ping from {to}"));
        }
        for gateway in bridge.gateways().iter() {
            let own = ips_a.iter().find(|ip| ip.is_ipv4() == gateway.is_ipv4()).unwrap();
            assert_eq!(echo(&a, &node, *gateway), format!("ping from {own}"), "pods reach the node");
            assert_eq!(echo(&node, &a, *own), format!("ping from {gateway}"), "the node reaches pods");
        }
        assert_eq!(echo(&a, &a, Ipv6Addr::LOCALHOST.into()), "ping from ::1");
        // A service address of the node, as the DNS server has one.
        let service: IpAddr = "fd00:96::a".parse().unwrap();
        bridge.add_node_address(service).await.unwrap();
        assert_eq!(echo(&a, &node, service), format!("ping from {}", v6(&ips_a)));
        assert_eq!(
            echo(&node, &a, v6(&ips_a).into()),
            "ping from fd00:244:0:1::1",
            "it is no source elsewhere"
        );
    }
}

#[tokio::test]
async fn a_network_goes_without_a_trace_and_comes_back_as_it_was() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, outside) = (TestNs::new(), TestNs::new(), TestNs::new());
    connect((&node, "eth0", &["2001:db8::1/64"]), (&outside, "eth0", &["2001:db8::2/64"])).await;
    let before = inventory(&node).await;
    assert_eq!(read(&node, "ipv6/conf/all/forwarding"), "0");
    assert_eq!(read(&node, "ipv6/conf/eth0/accept_ra"), "1");
    let bridge = Bridge::open_in(&node.path, config(state.path(), BOTH)).await.unwrap();
    let ips = attach(&bridge, "a", &a).await;
    assert_eq!(read(&node, "ipv6/conf/all/forwarding"), "1");
    assert_eq!(read(&node, "ipv6/conf/eth0/accept_ra"), "2", "routes that routers advertise stay");
    let made = inventory(&node).await;
    drop(bridge);
    let bridge = Bridge::open_in(&node.path, config(state.path(), BOTH)).await.unwrap();
    assert_eq!(inventory(&node).await, made);
    assert_eq!(attach(&bridge, "a", &a).await, ips);
    bridge.remove().await.unwrap();
    assert_eq!(inventory(&node).await, before);
    assert_eq!(read(&node, "ipv6/conf/all/forwarding"), "0");
    assert_eq!(read(&node, "ipv6/conf/eth0/accept_ra"), "1");
}

#[tokio::test]
async fn no_packet_to_an_address_of_the_cluster_leaves_the_machine() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, outside) = (TestNs::new(), TestNs::new(), TestNs::new());
    connect((&node, "eth0", &["2001:db8::1/64"]), (&outside, "eth0", &["2001:db8::2/64"])).await;
    let default = Route::default_by("2001:db8::2".parse().unwrap());
    node.route().replace_route(default).await.unwrap();
    // The neighbour would take whatever comes.
    let all = Route::new("fd00::".parse().unwrap(), 8).dev("eth0");
    outside.route().replace_route(all).await.unwrap();
    let bridge = Bridge::open_in(&node.path, config(state.path(), BOTH)).await.unwrap();
    let ips = attach(&bridge, "a", &a).await;
    for nobody in ["[fd00:244:0:9::2]:80", "[fd00:96::1]:80"] {
        assert_eq!(connect_error(&a, nobody), io::ErrorKind::NetworkUnreachable, "{nobody}");
    }
    // The world has the node's address as the source; the cluster has the pod's.
    assert_eq!(echo(&a, &outside, "2001:db8::2".parse().unwrap()), "ping from 2001:db8::1");
    let back = Route::new("fd00:244::".parse().unwrap(), 56).gateway("2001:db8::1".parse().unwrap());
    outside.route().replace_route(back).await.unwrap();
    assert!(echo(&outside, &a, v6(&ips).into()).ends_with("from 2001:db8::2"));
}

/// Sends a packet of IPv6 with a source of choice, as a process with `NET_RAW` can.
fn send_raw(from: &TestNs, source: Ipv6Addr, target: Ipv6Addr, protocol: u8, payload: &[u8]) {
    from.run(|| {
        // SAFETY: a socket, one packet in a buffer that outlives the call, and the socket is closed.
        unsafe {
            let socket = nix::libc::socket(nix::libc::AF_INET6, nix::libc::SOCK_RAW, nix::libc::IPPROTO_RAW);
            assert!(socket >= 0, "raw sockets need root");
            let mut packet = vec![0x60, 0, 0, 0];
            packet.extend((payload.len() as u16).to_be_bytes());
            packet.extend([protocol, 255]);
            packet.extend(source.octets());
            packet.extend(target.octets());
            packet.extend(payload);
            let mut to: nix::libc::sockaddr_in6 = std::mem::zeroed();
            to.sin6_family = nix::libc::AF_INET6 as nix::libc::sa_family_t;
            to.sin6_addr.s6_addr = target.octets();
            to.sin6_scope_id = nix::libc::if_nametoindex(c"eth0".as_ptr());
            let size = size_of::<nix::libc::sockaddr_in6>() as nix::libc::socklen_t;
            let sent = nix::libc::sendto(
                socket,
                packet.as_ptr().cast(),
                packet.len(),
                0,
                (&raw const to).cast(),
                size,
            );
            assert_eq!(sent, packet.len() as isize, "{}", io::Error::last_os_error());
            nix::libc::close(socket);
        }
    });
}

/// The checksum of a packet's transport header.
fn checksum(source: Ipv6Addr, target: Ipv6Addr, protocol: u8, payload: &[u8]) -> [u8; 2] {
    let mut bytes = [source.octets(), target.octets()].concat();
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend([0, 0, 0, protocol]);
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(2), 0);
    let sum: u32 = bytes.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    (!((folded & 0xffff) + (folded >> 16)) as u16).to_be_bytes()
}

fn send_udp(from: &TestNs, source: Ipv6Addr, target: Ipv6Addr, port: u16) {
    let mut payload = [&[0x30, 0x39][..], &port.to_be_bytes(), &[0, 13, 0, 0], b"hello"].concat();
    let sum = checksum(source, target, 17, &payload);
    payload[6..8].copy_from_slice(&sum);
    send_raw(from, source, target, 17, &payload);
}

/// A message of neighbour discovery: type, then what follows the checksum.
fn send_discovery(from: &TestNs, source: Ipv6Addr, target: Ipv6Addr, kind: u8, rest: &[u8]) {
    let mut payload = [&[kind, 0, 0, 0][..], rest].concat();
    let sum = checksum(source, target, 58, &payload);
    payload[2..4].copy_from_slice(&sum);
    send_raw(from, source, target, 58, &payload);
}

fn link_local(ns: &TestNs) -> Ipv6Addr {
    let text = ns.run(|| std::fs::read_to_string("/proc/net/if_inet6").unwrap());
    let line = text.lines().find(|line| line.starts_with("fe80") && line.ends_with("eth0")).unwrap();
    Ipv6Addr::from(u128::from_str_radix(&line[..32], 16).unwrap())
}

#[tokio::test]
async fn a_pod_sends_from_its_own_addresses_only() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path(), BOTH)).await.unwrap();
    let (ip_a, ip_b) = (v6(&attach(&bridge, "a", &a).await), v6(&attach(&bridge, "b", &b).await));
    let heard = b.run(|| UdpSocket::bind((ip_b, 0)).unwrap());
    heard.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let port = heard.local_addr().unwrap().port();
    let first_heard = |forged: &[&str]| {
        // Forged packets never come; a true one is sent after them, and is the first to be received.
        for source in forged {
            send_udp(&a, source.parse().unwrap(), ip_b, port);
        }
        send_udp(&a, ip_a, ip_b, port);
        heard.recv_from(&mut [0; 16]).unwrap().1.ip()
    };
    let forged = ["fd00:244:0:1::77", "fd00:244:0:1::1", "2001:db8::7", "fe80::1", "::"];
    assert_eq!(first_heard(&forged), IpAddr::V6(ip_a));

    // The table is removed, and a chain of the next is emptied: both are made again.
    let healing = tokio::spawn(Arc::clone(&bridge).heal());
    // Its monitor listens from its first turn on.
    tokio::task::yield_now().await;
    let table = "ferrite-senders-ferrite0";
    let rules = || node.ruleset().rules(TableFamily::Netdev, table).map(|rules| rules.len()).unwrap_or(0);
    let whole = rules();
    for attempt in ["the table", "a chain"] {
        if attempt == "the table" {
            node.ruleset().delete_table(TableFamily::Netdev, table).unwrap();
        } else {
            let mut nft = node.ruleset();
            let chain = nft.chains().unwrap().into_iter().find(|chain| chain.table == table).unwrap();
            let mut flush = nft.batch(TableFamily::Netdev, table);
            flush.flush_chain(&chain.name);
            nft.commit(flush).unwrap();
        }
        let healed = async {
            while rules() != whole {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), healed).await.expect(attempt);
        assert_eq!(first_heard(&forged), IpAddr::V6(ip_a), "{attempt}");
    }
    healing.abort();
}

#[tokio::test]
async fn a_pod_is_no_router_and_answers_for_itself_only() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path(), BOTH)).await.unwrap();
    let (ips_a, ips_b) = (attach(&bridge, "a", &a).await, attach(&bridge, "b", &b).await);
    let (ip_a, ip_b) = (v6(&ips_a), v6(&ips_b));
    echo(&node, &b, ip_b.into());
    let hardware = async |ip: Ipv6Addr| {
        let neighbours = node.route().get_neighbours().await.unwrap();
        neighbours.into_iter().find(|n| n.address == IpAddr::V6(ip)).and_then(|n| n.hardware)
    };
    let own = hardware(ip_b).await.unwrap();
    // "The address of b is at another place", to the node, with the flags that override what it knows.
    let mut claim = vec![0x60, 0, 0, 0];
    claim.extend(ip_b.octets());
    claim.extend([2, 1, 0x0a, 0x58, 0xba, 0xad, 0, 1]);
    let gateway: Ipv6Addr = "fd00:244:0:1::1".parse().unwrap();
    send_discovery(&a, ip_a, gateway, 136, &claim);
    // A router advertisement for everybody, from the pod's own link-local address.
    let mut advertisement = vec![64, 0, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0];
    advertisement.extend([3, 4, 64, 0xc0, 0, 1, 0x51, 0x80, 0, 0, 0x38, 0x40, 0, 0, 0, 0]);
    advertisement.extend("2001:db8:bad::".parse::<Ipv6Addr>().unwrap().octets());
    node.run(|| std::fs::write("/proc/sys/net/ipv6/conf/ferrite0/accept_ra", "2").unwrap());
    send_discovery(&a, link_local(&a), "ff02::1".parse().unwrap(), 134, &advertisement);
    // The packet that comes after them has passed the same way.
    echo(&a, &node, gateway.into());
    assert_eq!(hardware(ip_b).await.unwrap(), own);
    let seen = inventory(&node).await.join(" ");
    assert!(!seen.contains("2001:db8:bad"), "{seen}");
    assert!(echo(&a, &b, ip_b.into()).starts_with("ping"));
}

/// Connects two namespaces, each with addresses.
async fn connect(a: (&TestNs, &str, &[&str]), b: (&TestNs, &str, &[&str])) {
    let other = Netns::from_path(&b.0.path).unwrap();
    a.0.route().add_link(VethLink::new(a.1, b.1).peer_netns(&other)).await.unwrap();
    for (ns, link, addresses) in [a, b] {
        let conn = ns.route();
        for address in addresses {
            let (ip, prefix) = address.split_once('/').unwrap();
            let prefix = prefix.parse().unwrap();
            let address = Address::new(link, ip.parse().unwrap(), prefix);
            conn.replace_address(address.without_duplicate_detection()).await.unwrap();
        }
        conn.set_link_up("lo").await.unwrap();
        conn.set_link_up(link).await.unwrap();
    }
}

/// A node with one pod.
struct Node {
    ns: TestNs,
    pod: TestNs,
    ips: Vec<IpAddr>,
    peer: Peer,
    bridge: Arc<Bridge>,
    router: Router,
    _state: tempfile::TempDir,
}

impl Node {
    async fn new(ns: TestNs, name: &str, addresses: &str, pods: &str, how: Encapsulation) -> Self {
        let state = tempfile::tempdir().unwrap();
        let (node_ips, pod_cidrs): (Addresses, Cidrs) = (addresses.parse().unwrap(), pods.parse().unwrap());
        let bridge = Bridge::open_in(&ns.path, config(state.path(), pods)).await.unwrap();
        let router = RouterConfig {
            bridge: "ferrite0".into(),
            node_ips,
            pod_cidrs: Some(pod_cidrs),
            cluster_cidrs: cluster(pod_cidrs),
            service_cidrs: Some("10.96.0.0/16,fd00:96::/108".parse().unwrap()),
            encapsulation: how,
        };
        let router = Router::open_in(&ns.path, router).await.unwrap();
        let pod = TestNs::new();
        let ips = attach(&bridge, &format!("pod-{name}"), &pod).await;
        let peer = Peer {
            name: name.into(),
            addresses: node_ips.iter().copied().collect(),
            pod_cidrs: pod_cidrs.iter().copied().collect(),
        };
        Self { ns, pod, ips, peer, bridge, router, _state: state }
    }
}

#[tokio::test]
async fn pods_of_two_nodes_reach_each_other_by_both_families() {
    use Encapsulation::{Always, Auto};
    let both = ["192.0.2.1/24", "2001:db8::1/64"];
    let other = ["192.0.2.2/24", "2001:db8::2/64"];
    for (what, how, addresses, nodes, pods, tunnel) in [
        (
            "as they are",
            Auto,
            (&both[..], &other[..]),
            ("192.0.2.1,2001:db8::1", "192.0.2.2,2001:db8::2"),
            "both",
            false,
        ),
        (
            "in a tunnel",
            Always,
            (&both[..], &other[..]),
            ("192.0.2.1,2001:db8::1", "192.0.2.2,2001:db8::2"),
            "both",
            true,
        ),
        (
            "IPv6 in a tunnel of IPv4",
            Auto,
            (&both[..1], &other[..1]),
            ("192.0.2.1", "192.0.2.2"),
            "both",
            true,
        ),
        ("IPv6 alone", Auto, (&both[1..], &other[1..]), ("2001:db8::1", "2001:db8::2"), "six", false),
        (
            "IPv6 in a tunnel of IPv6",
            Always,
            (&both[1..], &other[1..]),
            ("2001:db8::1", "2001:db8::2"),
            "six",
            true,
        ),
    ] {
        let (ns_a, ns_b) = (TestNs::new(), TestNs::new());
        connect((&ns_a, "eth0", addresses.0), (&ns_b, "eth0", addresses.1)).await;
        let (pods_a, pods_b) = match pods {
            "both" => ("10.244.1.0/24,fd00:244:0:1::/64", "10.244.2.0/24,fd00:244:0:2::/64"),
            _ => ("fd00:244:0:1::/64", "fd00:244:0:2::/64"),
        };
        let mut a = Node::new(ns_a, "a", nodes.0, pods_a, how).await;
        let mut b = Node::new(ns_b, "b", nodes.1, pods_b, how).await;
        assert_eq!(connect_error(&a.pod, "[fd00:244:0:2::2]:1"), io::ErrorKind::NetworkUnreachable, "{what}");
        a.router.apply(std::slice::from_ref(&b.peer)).await.unwrap();
        b.router.apply(std::slice::from_ref(&a.peer)).await.unwrap();
        for (from, to) in a.ips.iter().zip(&b.ips) {
            assert_eq!(
                echo(&a.pod, &b.pod, *to),
                format!("ping from {from}"),
                "{what}: the source is the pod"
            );
            assert_eq!(echo(&b.pod, &a.pod, *from), format!("ping from {to}"), "{what}");
            echo(&a.ns, &b.pod, *to);
        }
        let link = a.ns.route().get_link_by_name("vferrite0").await.unwrap();
        assert_eq!(link.is_some(), tunnel, "{what}");
        // The other way, and back: the routes follow.
        a.router.apply(&[]).await.unwrap();
        assert_eq!(connect_error(&a.pod, "[fd00:244:0:2::2]:1"), io::ErrorKind::NetworkUnreachable, "{what}");
        a.router.apply(std::slice::from_ref(&b.peer)).await.unwrap();
        echo(&a.pod, &b.pod, v6(&b.ips).into());
        a.bridge.remove().await.unwrap();
        let left = inventory(&a.ns).await;
        assert!(
            !left.iter().any(|line| line.starts_with("fd00") || line.contains("ferrite")),
            "{what}: {left:?}"
        );
    }
}

#[tokio::test]
async fn host_ports_at_addresses_of_ipv6() {
    let state = tempfile::tempdir().unwrap();
    let (node, outside, web) = (TestNs::new(), TestNs::new(), TestNs::new());
    let addresses = ["192.0.2.1/24", "2001:db8::1/64", "2001:db8::5/64"];
    connect((&node, "eth0", &addresses), (&outside, "eth0", &["192.0.2.9/24", "2001:db8::9/64"])).await;
    let bridge = Bridge::open_in(&node.path, config(state.path(), BOTH)).await.unwrap();
    let port = |ip: Option<&str>, host_port| HostPort {
        host_ip: ip.map(|ip| ip.parse().unwrap()),
        host_port,
        container_port: 8080,
        protocol: PortProtocol::Tcp,
    };
    let ports =
        vec![port(None, 80), port(Some("2001:db8::5"), 81), port(Some("::"), 82), port(Some("0.0.0.0"), 83)];
    let pod = PodRef { host_ports: ports, ..pod("web") };
    let ips = bridge.attach("web", &web.path, &pod).await.unwrap().ips;
    let listeners: Vec<std::net::TcpListener> =
        ips.iter().map(|ip| web.run(|| std::net::TcpListener::bind((*ip, 8080)).unwrap())).collect();
    let reach = |from: &TestNs, target: &str| {
        let target: SocketAddr = target.parse().unwrap();
        from.run(|| TcpStream::connect_timeout(&target, Duration::from_secs(5))).is_ok()
    };
    for (from, target, want) in [
        (&outside, "192.0.2.1:80", true),
        (&outside, "[2001:db8::1]:80", true),
        (&outside, "[2001:db8::5]:81", true),
        (&outside, "[2001:db8::1]:81", false),
        (&outside, "[2001:db8::1]:82", true),
        (&outside, "192.0.2.1:82", false),
        (&outside, "[2001:db8::1]:83", false),
        (&outside, "192.0.2.1:83", true),
        (&node, "[2001:db8::1]:80", true),
        (&node, "127.0.0.1:80", true),
        (&node, "[::1]:80", false),
        (&web, "[2001:db8::1]:80", true),
    ] {
        assert_eq!(reach(from, target), want, "{target}");
    }
    let published = ferrite_network::published_ports("ferrite0", Some(&node.path), v6(&ips).into()).unwrap();
    assert_eq!(published.len(), 3);
    bridge.detach("web", &web.path).await.unwrap();
    assert!(!reach(&outside, "[2001:db8::1]:80"));
    drop(listeners);
}
