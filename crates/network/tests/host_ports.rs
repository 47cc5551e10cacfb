//! Host ports with real sockets, in network namespaces that each test makes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ferrite_netlink::{Address, Route, VethLink};
use ferrite_network::{Bridge, BridgeConfig, HostPort, PodNetwork, PodRef, PortProtocol};
use ferrite_nft::{IpFamily, OwnGenerations, Table};
use support::{TestNs, pod};

const PATIENCE: Duration = Duration::from_secs(10);
/// A packet that is dropped shows in nothing but time.
const DROPPED: Duration = Duration::from_millis(300);
const NODE: &str = "192.0.2.1";

fn config(state: &Path) -> BridgeConfig {
    BridgeConfig {
        name: "ferrite0".into(),
        pod_cidrs: "10.244.1.0/24".parse().unwrap(),
        cluster_cidrs: "10.244.0.0/16".parse().unwrap(),
        service_cidrs: None,
        state: state.join("network"),
        mtu: 1450,
        routed: true,
    }
}

/// A node with an address besides those of loopback and of the bridge.
async fn node() -> TestNs {
    let node = TestNs::new();
    let conn = node.route();
    conn.set_link_up("lo").await.unwrap();
    conn.add_link(VethLink::new("outside", "beyond")).await.unwrap();
    conn.replace_address(Address::new("outside", NODE.parse().unwrap(), 24)).await.unwrap();
    conn.set_link_up("outside").await.unwrap();
    conn.set_link_up("beyond").await.unwrap();
    node
}

fn port(ip: Option<&str>, protocol: PortProtocol) -> HostPort {
    let host_ip = ip.map(|ip| ip.parse().unwrap());
    HostPort { host_ip, host_port: 54323, container_port: 8080, protocol }
}

/// A pod whose servers at port 8080, TCP and UDP, answer with its name and with the client's address.
struct Pod {
    ns: TestNs,
    address: IpAddr,
}

async fn serve(bridge: &Bridge, name: &'static str, ports: Vec<HostPort>) -> Pod {
    let ns = TestNs::new();
    let request = PodRef { host_ports: ports, ..pod(name) };
    let address = bridge.attach(name, &ns.path, &request).await.unwrap().ips[0];
    let (tcp, udp) =
        ns.run(|| (TcpListener::bind("0.0.0.0:8080").unwrap(), UdpSocket::bind("0.0.0.0:8080").unwrap()));
    thread::spawn(move || {
        for stream in tcp.incoming() {
            let mut stream = stream.unwrap();
            let text = format!("{name} {}", stream.peer_addr().unwrap().ip());
            io::Write::write_all(&mut stream, text.as_bytes()).unwrap();
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 16];
        while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(format!("{name} {}", peer.ip()).as_bytes(), peer);
        }
    });
    Pod { ns, address }
}

fn tcp(from: &TestNs, ip: &str, patience: Duration) -> io::Result<String> {
    let target = SocketAddr::new(ip.parse().unwrap(), 54323);
    from.run(|| {
        let mut stream = TcpStream::connect_timeout(&target, patience)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })
}

fn udp(from: &TestNs, ip: &str) -> io::Result<String> {
    let target = SocketAddr::new(ip.parse().unwrap(), 54323);
    from.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(target)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.send(b"?")?;
        let mut buffer = [0; 64];
        let len = socket.recv(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..len]).into_owned())
    })
}

/// Sets if the kernel passes bridged packets to the packet filter, in a namespace that is not the
/// machine's.
fn filter_bridged(node: &TestNs, on: bool) {
    let file = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    if Path::new(file).exists() {
        node.run(|| std::fs::write(file, if on { "1" } else { "0" }).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_port_with_different_addresses_and_protocols() {
    for filtered in [false, true] {
        different_addresses_and_protocols(filtered).await;
    }
}

async fn different_addresses_and_protocols(filtered: bool) {
    let state = tempfile::tempdir().unwrap();
    let node = node().await;
    filter_bridged(&node, filtered);
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let first = serve(&bridge, "pod1", vec![port(Some("127.0.0.1"), PortProtocol::Tcp)]).await;
    let _second = serve(&bridge, "pod2", vec![port(Some(NODE), PortProtocol::Tcp)]).await;
    let _third = serve(&bridge, "pod3", vec![port(Some(NODE), PortProtocol::Udp)]).await;

    assert_eq!(tcp(&node, "127.0.0.1", PATIENCE).unwrap(), "pod1 10.244.1.1", "from loopback to loopback");
    assert_eq!(tcp(&node, NODE, PATIENCE).unwrap(), format!("pod2 {NODE}"));
    assert_eq!(udp(&node, NODE).unwrap(), format!("pod3 {NODE}"));
    // From a pod: its own address arrives, and the answer comes back from where it was asked.
    assert_eq!(tcp(&first.ns, NODE, PATIENCE).unwrap(), format!("pod2 {}", first.address));
    assert_eq!(udp(&first.ns, NODE).unwrap(), format!("pod3 {}", first.address));

    bridge.detach("pod2", Path::new("")).await.unwrap();
    assert_eq!(tcp(&node, NODE, PATIENCE).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(tcp(&node, "127.0.0.1", PATIENCE).unwrap(), "pod1 10.244.1.1", "the others stay");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_at_every_address_of_the_node() {
    let state = tempfile::tempdir().unwrap();
    let node = node().await;
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let every = vec![port(None, PortProtocol::Tcp), port(Some("0.0.0.0"), PortProtocol::Udp)];
    let server = serve(&bridge, "server", every).await;
    let client = serve(&bridge, "client", Vec::new()).await;
    for address in ["127.0.0.1", NODE, "10.244.1.1"] {
        assert!(tcp(&node, address, PATIENCE).unwrap().starts_with("server"), "{address}");
        assert!(udp(&node, address).unwrap().starts_with("server"), "{address}");
    }
    for address in [NODE, "10.244.1.1"] {
        let seen = tcp(&client.ns, address, PATIENCE).unwrap();
        assert_eq!(seen, format!("server {}", client.address), "{address}");
    }
    assert_eq!(tcp(&server.ns, NODE, PATIENCE).unwrap(), "server 10.244.1.1", "a pod reaches itself");
    // Host ports need the node to send from its loopback address by the bridge. Pods must not answer that by a visit to
    // servers of the node's loopback address, not even a pod that may change its own routes.
    let _private = node.run(|| TcpListener::bind("127.0.0.1:54324").unwrap());
    let conn = client.ns.route();
    conn.set_link_down("lo").await.unwrap();
    conn.del_address(Address::new("lo", "127.0.0.1".parse().unwrap(), 8)).await.unwrap();
    client.ns.run(|| std::fs::write("/proc/sys/net/ipv4/conf/eth0/route_localnet", "1").unwrap());
    let way = Route::new("127.0.0.0".parse().unwrap(), 8).gateway("10.244.1.1".parse().unwrap()).dev("eth0");
    conn.add_route(way).await.unwrap();
    let visit = client
        .ns
        .run(|| TcpStream::connect_timeout(&"127.0.0.1:54324".parse().unwrap(), DROPPED).unwrap_err().kind());
    assert_eq!(visit, io::ErrorKind::TimedOut, "packets to the node's loopback address are dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_and_foreign_changes_are_healed() {
    let state = tempfile::tempdir().unwrap();
    let node = node().await;
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let _server = serve(&bridge, "server", vec![port(None, PortProtocol::Tcp)]).await;
    let flush = || {
        let own = OwnGenerations::default();
        Table::open(IpFamily::V4, "ferrite-ports-ferrite0", Some(&node.path), own).unwrap().remove().unwrap();
    };
    assert!(tcp(&node, "127.0.0.1", PATIENCE).is_ok());

    drop(bridge);
    flush();
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    assert!(tcp(&node, "127.0.0.1", PATIENCE).is_ok(), "a restart makes the table again");

    let healing = tokio::spawn(Arc::clone(&bridge).heal());
    // The watch begins in the task; a change before that is healed by nobody, so the change is repeated.
    let deadline = std::time::Instant::now() + PATIENCE;
    flush();
    while tcp(&node, "127.0.0.1", PATIENCE).is_err() {
        assert!(std::time::Instant::now() < deadline, "the table is not made again");
        flush();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    healing.abort();
    let _ = healing.await;
    bridge.remove().await.unwrap();
    let own = OwnGenerations::default();
    let mut table = Table::open(IpFamily::V4, "ferrite-ports-ferrite0", Some(&node.path), own).unwrap();
    assert!(!table.exists().unwrap(), "nothing is left");
}
