//! The bridge network on real kernel objects. Every test makes its own network namespaces, the node's
//! included, so nothing touches the machine's interfaces.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferrite_netlink::{Address, Connection, Netns, NetworkEvents, Route, VethLink};
use ferrite_network::{Bandwidth, Bridge, BridgeConfig, Isolation, NetworkError, PodNetwork, PodRef, Port};
use ferrite_nft::TableFamily;
use support::{TestNs, attach, connect_error, echo, pod};

fn config(state: &Path) -> BridgeConfig {
    BridgeConfig {
        name: "ferrite0".into(),
        pod_cidrs: "10.244.1.0/24".parse().unwrap(),
        cluster_cidrs: "10.244.0.0/16".parse().unwrap(),
        service_cidrs: Some("10.96.0.0/16".parse().unwrap()),
        state: state.join("network"),
        mtu: 1450,
        routed: true,
    }
}

/// The contents of a namespace: links, addresses, routes and nftables tables, in comparable form.
async fn inventory(ns: &TestNs) -> Vec<String> {
    let conn = ns.route();
    let mut seen = Vec::new();
    for link in conn.get_links().await.unwrap() {
        seen.push(format!("link {} {:?}", link.name, link.kind));
    }
    // IPv6 link-local addresses come and go by themselves when a bridge gets its first carrier.
    for address in conn.get_addresses().await.unwrap().iter().filter(|a| a.address.is_ipv4()) {
        seen.push(format!("address {}", address.address));
    }
    for route in conn.get_routes().await.unwrap().iter().filter(|r| r.destination.is_ipv4()) {
        seen.push(format!("route {route} {:?}", route.route_type));
    }
    for table in ns.ruleset().tables().unwrap() {
        seen.push(format!("table {}", table.name));
    }
    seen.sort();
    seen
}

#[tokio::test]
async fn pods_talk_through_the_bridge() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    bridge.ready().unwrap();
    let ip_a = attach(&bridge, "sandbox-a", &a).await;
    let ip_b = attach(&bridge, "sandbox-b", &b).await;
    assert_eq!((ip_a.to_string(), ip_b.to_string()), ("10.244.1.2".into(), "10.244.1.3".into()));

    assert_eq!(echo(&a, &b, ip_b), format!("ping from {ip_a}"));
    assert_eq!(echo(&b, &a, ip_a), format!("ping from {ip_b}"));
    assert_eq!(echo(&node, &a, ip_a), "ping from 10.244.1.1", "the node reaches pods");
    assert_eq!(
        echo(&a, &node, *bridge.gateways().primary()),
        format!("ping from {ip_a}"),
        "pods reach the node"
    );
    assert_eq!(echo(&a, &a, "127.0.0.1".parse().unwrap()), "ping from 127.0.0.1", "loopback is up");

    let link = a.route().get_link_by_name("eth0").await.unwrap().unwrap();
    assert_eq!(link.mtu, Some(1450));
    assert_eq!(node.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap()), "1\n");
    let port = node
        .route()
        .get_links()
        .await
        .unwrap()
        .into_iter()
        .find(|l| l.alias.as_deref() == Some("sandbox-a"))
        .unwrap();
    assert_eq!(port.port.hairpin, Some(true), "the port reflects a pod's own frames");
}

#[tokio::test]
async fn attach_is_idempotent_and_survives_restart() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b, c) = (TestNs::new(), TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let ip_a = attach(&bridge, "a", &a).await;
    assert_eq!(attach(&bridge, "a", &a).await, ip_a);
    let before = inventory(&node).await;

    let locked = Bridge::open_in(&node.path, config(state.path())).await.err().unwrap();
    assert!(matches!(locked, NetworkError::Locked(_)), "{locked}");

    drop(bridge);
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    assert_eq!(inventory(&node).await, before, "opening again changes nothing");
    assert_eq!(attach(&bridge, "a", &a).await, ip_a);
    let ip_b = attach(&bridge, "b", &b).await;
    assert_ne!(ip_b, ip_a);
    assert_eq!(echo(&a, &b, ip_b), format!("ping from {ip_a}"));

    // The sandbox's namespace was lost and made anew: same address, new pair.
    assert_eq!(attach(&bridge, "a", &c).await, ip_a);
    assert_eq!(echo(&c, &b, ip_b), format!("ping from {ip_a}"));
}

#[tokio::test]
async fn detach_frees_and_reconcile_reclaims() {
    let state = tempfile::tempdir().unwrap();
    let node = TestNs::new();
    let small = BridgeConfig { pod_cidrs: "10.244.1.0/30".parse().unwrap(), ..config(state.path()) };
    let bridge = Bridge::open_in(&node.path, small).await.unwrap();
    let empty = inventory(&node).await;
    let a = TestNs::new();
    let ip = attach(&bridge, "a", &a).await;
    let full = bridge.attach("b", &TestNs::new().path, &pod("b")).await.unwrap_err();
    assert!(full.to_string().contains("no free address in 10.244.1.0/30"), "{full}");

    let gone = a.path.clone();
    drop(a);
    bridge.detach("a", &gone).await.unwrap();
    bridge.detach("a", &gone).await.unwrap();
    bridge.detach("never-attached", Path::new("/nonexistent")).await.unwrap();
    assert_eq!(inventory(&node).await, empty);

    let b = TestNs::new();
    assert_eq!(attach(&bridge, "b", &b).await, ip, "the freed address is the only one left");
    bridge.reconcile(&["b".into()]).await.unwrap();
    assert_eq!(attach(&bridge, "b", &b).await, ip, "a live sandbox keeps its address");
    bridge.reconcile(&[]).await.unwrap();
    assert_eq!(inventory(&node).await, empty);
    assert_eq!(attach(&bridge, "c", &TestNs::new()).await, ip);
}

#[tokio::test]
async fn addresses_nobody_owns_die_on_the_node() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, outside) = (TestNs::new(), TestNs::new(), TestNs::new());
    // A default route, as a real machine has: the packet must not take it.
    let conn = node.route();
    let peer = Netns::from_path(&outside.path).unwrap();
    conn.add_link(VethLink::new("up0", "peer0").peer_netns(&peer)).await.unwrap();
    conn.replace_address(Address::new("up0", [192, 0, 2, 1].into(), 24)).await.unwrap();
    conn.set_link_up("up0").await.unwrap();
    let mut events = NetworkEvents::listen(Some(&node.netns()), false).unwrap();
    let out = outside.route();
    out.replace_address(Address::new("peer0", [192, 0, 2, 9].into(), 24)).await.unwrap();
    out.set_link_up("peer0").await.unwrap();
    let carrier = async {
        while !conn.get_link_by_name("up0").await.unwrap().unwrap().has_carrier {
            events.next().await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(10), carrier).await.unwrap();
    let default = Route::default_by([192, 0, 2, 9].into());
    conn.add_route(default).await.unwrap();

    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    attach(&bridge, "a", &a).await;
    for target in ["10.96.0.1:443", "10.244.200.7:80"] {
        for (who, from) in [("pod", &a), ("node", &node)] {
            let kind = connect_error(from, target);
            assert!(
                matches!(kind, io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable),
                "{who} to {target}: {kind:?}"
            );
        }
    }
    // Beyond the cluster a pod goes out with the node's address.
    assert_eq!(echo(&a, &outside, "192.0.2.9".parse().unwrap()), "ping from 192.0.2.1");
}

#[tokio::test]
async fn pods_reach_the_node_by_an_address_it_was_given() {
    let state = tempfile::tempdir().unwrap();
    let (node, a) = (TestNs::new(), TestNs::new());
    let before = inventory(&node).await;
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let pod = attach(&bridge, "a", &a).await;
    let address = "10.96.0.10".parse().unwrap();
    assert_ne!(connect_error(&a, "10.96.0.10:53"), io::ErrorKind::ConnectionRefused, "nobody has it yet");
    bridge.add_node_address(address).await.unwrap();
    bridge.add_node_address(address).await.unwrap();
    assert_eq!(echo(&a, &node, address), format!("ping from {pod}"));
    assert_eq!(echo(&node, &a, pod), "ping from 10.244.1.1", "it is no source for other destinations");
    bridge.remove().await.unwrap();
    assert_eq!(inventory(&node).await, before);
}

#[tokio::test]
async fn remove_leaves_the_node_as_it_was() {
    let state = tempfile::tempdir().unwrap();
    let (node, a) = (TestNs::new(), TestNs::new());
    node.run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap());
    let before = inventory(&node).await;
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    attach(&bridge, "a", &a).await;
    assert_ne!(inventory(&node).await, before);
    bridge.remove().await.unwrap();
    bridge.remove().await.unwrap();
    assert_eq!(inventory(&node).await, before);
    assert_eq!(node.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap()), "0\n");
    assert!(bridge.ready().unwrap_err().to_string().contains("removed"));
    assert!(a.route().get_link_by_name("eth0").await.unwrap().is_none());

    // After a crash: nobody has it open, and only the state directory is left.
    drop(bridge);
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    attach(&bridge, "a", &a).await;
    drop(bridge);
    let path = config(state.path()).state;
    Bridge::purge_in(&node.path, &path).await.unwrap();
    Bridge::purge_in(&node.path, &path).await.unwrap();
    assert_eq!(inventory(&node).await, before);
    Bridge::purge_in(&node.path, &state.path().join("never")).await.unwrap();
}

#[tokio::test]
async fn a_changed_range_replaces_the_old_network() {
    let state = tempfile::tempdir().unwrap();
    let (node, a) = (TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    attach(&bridge, "a", &a).await;
    drop(bridge);
    let moved = BridgeConfig {
        pod_cidrs: "10.245.7.0/24".parse().unwrap(),
        cluster_cidrs: "10.245.0.0/16".parse().unwrap(),
        ..config(state.path())
    };
    let bridge = Bridge::open_in(&node.path, moved).await.unwrap();
    let seen = inventory(&node).await.join("\n");
    assert!(!seen.contains("10.244."), "{seen}");
    assert_eq!(attach(&bridge, "a", &a).await.to_string(), "10.245.7.2");
}

#[tokio::test]
async fn a_foreign_link_of_that_name_is_left_alone() {
    let state = tempfile::tempdir().unwrap();
    let node = TestNs::new();
    node.route().add_link(VethLink::new("ferrite0", "other0")).await.unwrap();
    let error = Bridge::open_in(&node.path, config(state.path())).await.err().unwrap();
    assert!(error.to_string().contains("not a bridge"), "{error}");
    Bridge::purge_in(&node.path, &config(state.path()).state).await.unwrap();
    assert!(node.route().get_link_by_name("ferrite0").await.unwrap().is_some());
}

#[tokio::test]
async fn attach_refuses_what_is_no_network_namespace() {
    let state = tempfile::tempdir().unwrap();
    let node = TestNs::new();
    let bridge: Arc<Bridge> = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let file = tempfile::tempfile().unwrap();
    let not_a_netns = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    for path in [Path::new("/nonexistent"), &not_a_netns, Path::new("/proc/self/ns/mnt")] {
        let error = bridge.attach("x", path, &pod("x")).await.unwrap_err();
        assert!(matches!(error, NetworkError::Netns { .. }), "{path:?}: {error}");
    }
}

#[test]
fn the_node_address_is_the_default_routes() {
    let (node, peer) = (TestNs::new(), TestNs::new());
    let far_end = Netns::from_path(&peer.path).unwrap();
    let seen = node.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut seen = vec![ferrite_network::node_address().await.unwrap()];
            let conn = Connection::new().unwrap();
            for (name, address) in [("up0", [192, 0, 2, 1]), ("up1", [198, 51, 100, 1])] {
                let peer_name = format!("{name}p");
                let veth = VethLink::new(name, &peer_name).peer_netns(&far_end);
                conn.add_link(veth).await.unwrap();
                let address = Address::new(name, address.into(), 24);
                conn.replace_address(address).await.unwrap();
                conn.set_link_up(name).await.unwrap();
            }
            seen.push(ferrite_network::node_address().await.unwrap());
            let route = Route::default_by([198, 51, 100, 9].into());
            conn.add_route(route).await.unwrap();
            seen.push(ferrite_network::node_address().await.unwrap());
            seen
        })
    });
    let seen: Vec<_> = seen.iter().map(|address| address.map(|a| a.to_string())).collect();
    assert_eq!(seen, [None, Some("192.0.2.1".into()), Some("198.51.100.1".into())]);
}

#[tokio::test]
async fn a_sandbox_on_two_networks_and_one_that_is_apart() {
    let state = tempfile::tempdir().unwrap();
    let (node, both, far) = (TestNs::new(), TestNs::new(), TestNs::new());
    let before = inventory(&node).await;
    let other = |name: &str, range: &str| BridgeConfig {
        name: name.into(),
        pod_cidrs: range.parse().unwrap(),
        cluster_cidrs: range.parse().unwrap(),
        service_cidrs: None,
        state: state.path().join(name),
        mtu: 1500,
        routed: true,
    };
    let one = Bridge::open_in(&node.path, other("one", "10.20.0.0/24")).await.unwrap();
    let two = Bridge::open_in(&node.path, other("two", "10.30.0.0/24")).await.unwrap();
    one.isolate(Isolation::Incoming).await.unwrap();
    two.isolate(Isolation::Internal).await.unwrap();
    two.isolate(Isolation::Internal).await.unwrap();

    let port =
        Port { link: "eth1".into(), address: Some("10.30.0.9".parse().unwrap()), default_route: false };
    let first = one.attach_port("both.one", &both.path, &pod("both"), &Port::default()).await.unwrap();
    let second = two.attach_port("both.two", &both.path, &pod("both"), &port).await.unwrap();
    assert_eq!((first.to_string(), second.to_string()), ("10.20.0.2".into(), "10.30.0.9".into()));
    assert_eq!(two.attach_port("both.two", &both.path, &pod("both"), &port).await.unwrap(), second);
    let far_ip = two.attach_port("far", &far.path, &pod("far"), &Port::default()).await.unwrap();

    let (first, second, far_ip) = (*first.primary(), *second.primary(), *far_ip.primary());
    assert_eq!(echo(&far, &both, second), "ping from 10.30.0.2");
    assert_eq!(echo(&both, &far, far_ip), "ping from 10.30.0.9");
    // Without the other network in between there is no way from one to the other.
    two.detach("both.two", &both.path).await.unwrap();
    let soon = |from: &TestNs, address: IpAddr| {
        let target: SocketAddr = (address, 9).into();
        from.run(|| TcpStream::connect_timeout(&target, Duration::from_millis(500)).unwrap_err().kind())
    };
    assert_eq!(soon(&far, first), io::ErrorKind::TimedOut, "nobody begins a connection into it");
    assert_eq!(soon(&both, far_ip), io::ErrorKind::TimedOut, "nor out of an internal one");
    one.detach("both.one", &both.path).await.unwrap();
    let port = Port { default_route: true, ..port };
    two.attach_port("both.two", &both.path, &pod("both"), &port).await.unwrap();
    two.route_out(&both.path, "eth1").await.unwrap();

    // Forwarding is the first one's to turn off again, but not while the other needs it.
    one.remove().await.unwrap();
    let forwarding = || node.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap());
    assert_eq!(forwarding().trim(), "1");
    two.remove().await.unwrap();
    assert_eq!(inventory(&node).await, before);
}

/// The routing rules of a namespace, in comparable form.
async fn routing_rules(ns: &TestNs) -> Vec<String> {
    let rules = ns.route().get_rules().await.unwrap();
    rules.iter().map(|rule| format!("{rule:?}")).collect()
}

#[tokio::test]
async fn services_have_a_route_for_the_node_and_it_goes_with_the_network() {
    let state = tempfile::tempdir().unwrap();
    let (node, a) = (TestNs::new(), TestNs::new());
    let before = (inventory(&node).await, routing_rules(&node).await);
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    attach(&bridge, "sandbox-a", &a).await;
    assert_eq!(connect_error(&node, "10.96.0.10:80"), io::ErrorKind::HostUnreachable, "nobody takes it");
    bridge.route_services().await.unwrap();
    bridge.route_services().await.unwrap();
    assert_eq!(routing_rules(&node).await.len(), before.1.len() + 1);
    // The kernel finds a route for the node's own packets, which a proxy may now rewrite; a pod's packet that no
    // proxy has rewritten is still refused.
    let target: SocketAddr = "10.96.0.10:80".parse().unwrap();
    node.run(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", target).unwrap());
    assert_eq!(connect_error(&a, "10.96.0.10:80"), io::ErrorKind::HostUnreachable);
    bridge.remove().await.unwrap();
    assert_eq!((inventory(&node).await, routing_rules(&node).await), before);
}

#[tokio::test]
async fn a_pod_with_limits_has_queues_at_both_ends() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let bandwidth = Bandwidth { ingress: Some(80_000_000), egress: Some(40_000_000) };
    let limited = PodRef { bandwidth, ..pod("a") };
    for _ in 0..2 {
        bridge.attach("a", &a.path, &limited).await.unwrap();
    }
    let ip_b = attach(&bridge, "b", &b).await;
    let (outside, inside) = (node.route(), a.route());
    let links = outside.get_links().await.unwrap();
    let link = |sandbox: &str| {
        links
            .iter()
            .find(|link| link.alias.as_deref() == Some(sandbox))
            .map(|link| link.name.clone())
            .unwrap()
    };
    let kinds = async |conn: &Connection, link: &str| -> Vec<String> {
        let found = conn.get_queues(link).await.unwrap();
        found.into_iter().map(|queue| queue.kind).collect()
    };
    assert_eq!(kinds(&outside, &link("a")).await, ["tbf"]);
    assert_eq!(kinds(&inside, "eth0").await, ["tbf"]);
    assert!(!kinds(&outside, &link("b")).await.contains(&"tbf".to_owned()));
    assert!(echo(&a, &b, ip_b).starts_with("ping"));
}

/// Sends one UDP packet with a source of choice, as a process with `NET_RAW` can.
fn send_forged(from: &TestNs, source: [u8; 4], target: [u8; 4], port: u16) {
    from.run(|| {
        // SAFETY: a socket, one packet in a buffer that outlives the call, and the socket is closed.
        unsafe {
            let socket = nix::libc::socket(nix::libc::AF_INET, nix::libc::SOCK_RAW, nix::libc::IPPROTO_RAW);
            assert!(socket >= 0, "raw sockets need root");
            let mut packet = vec![0x45, 0, 0, 33, 0, 1, 0, 0, 64, 17, 0, 0];
            packet.extend(source);
            packet.extend(target);
            // The checksum of UDP may be left out.
            packet.extend([0x30, 0x39, (port >> 8) as u8, port as u8, 0, 13, 0, 0]);
            packet.extend(*b"hello");
            let mut to: nix::libc::sockaddr_in = std::mem::zeroed();
            to.sin_family = nix::libc::AF_INET as nix::libc::sa_family_t;
            to.sin_addr.s_addr = u32::from_ne_bytes(target);
            let size = size_of::<nix::libc::sockaddr_in>() as nix::libc::socklen_t;
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

#[tokio::test]
async fn a_pod_sends_from_its_own_address_only() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let (IpAddr::V4(ip_a), IpAddr::V4(ip_b)) =
        (attach(&bridge, "a", &a).await, attach(&bridge, "b", &b).await)
    else {
        panic!("pods have IPv4 addresses");
    };
    let heard = b.run(|| std::net::UdpSocket::bind((ip_b, 0)).unwrap());
    heard.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let port = heard.local_addr().unwrap().port();
    // Forged packets never arrive; the genuine packet is sent last and arrives first.
    for forged in [[10, 244, 1, 77], [10, 244, 1, 1], [192, 0, 2, 1]] {
        send_forged(&a, forged, ip_b.octets(), port);
    }
    send_forged(&a, ip_a.octets(), ip_b.octets(), port);
    let mut word = [0; 16];
    let (size, from) = heard.recv_from(&mut word).unwrap();
    assert_eq!((&word[..size], from.ip()), (&b"hello"[..], IpAddr::V4(ip_a)));

    // A pod that gives itself the address of another, or of the node, gets nothing with it.
    let conn = a.route();
    let stolen = Address::new("eth0", [10, 244, 1, 78].into(), 24);
    conn.add_address(stolen).await.unwrap();
    a.run(|| {
        let socket = std::net::UdpSocket::bind(("10.244.1.78", 0)).unwrap();
        socket.send_to(b"stolen", (ip_b, port)).unwrap();
        std::net::UdpSocket::bind((ip_a, 0)).unwrap().send_to(b"own", (ip_b, port)).unwrap();
    });
    let (size, from) = heard.recv_from(&mut word).unwrap();
    assert_eq!((&word[..size], from.ip()), (&b"own"[..], IpAddr::V4(ip_a)));

    // The rules outlive the process, and are made again where they are missing.
    drop(bridge);
    let mut nft = node.ruleset();
    nft.delete_table(TableFamily::Netdev, "ferrite-senders-ferrite0").unwrap();
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    send_forged(&a, [192, 0, 2, 1], ip_b.octets(), port);
    send_forged(&a, ip_a.octets(), ip_b.octets(), port);
    let (_, from) = heard.recv_from(&mut word).unwrap();
    assert_eq!(from.ip(), IpAddr::V4(ip_a));
    bridge.detach("a", &a.path).await.unwrap();
    bridge.detach("b", &b.path).await.unwrap();
    assert_eq!(nft.chains().unwrap().iter().filter(|c| c.table.contains("senders")).count(), 0);
    bridge.remove().await.unwrap();
    assert!(!inventory(&node).await.iter().any(|line| line.contains("senders")));
}

/// A pod with `NET_ADMIN` removes the queue that holds it back.
#[tokio::test]
async fn a_limit_of_what_a_pod_sends_is_not_its_to_remove() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let bandwidth = Bandwidth { ingress: None, egress: Some(8_000) };
    let limited = PodRef { bandwidth, ..pod("a") };
    bridge.attach("a", &a.path, &limited).await.unwrap();
    let to = attach(&bridge, "b", &b).await;
    assert!(a.route().del_queue("eth0").await.unwrap());
    // The kernel activates a link a moment later, and drops packets until then.
    echo(&a, &b, to);
    let heard = b.run(|| std::net::UdpSocket::bind((to, 0)).unwrap());
    nix::sys::socket::setsockopt(&heard, nix::sys::socket::sockopt::RcvBufForce, &(8 << 20)).unwrap();
    let target = heard.local_addr().unwrap();
    a.run(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        for _ in 0..400 {
            socket.send_to(&[0; 1000], target).unwrap();
        }
    });
    // A machine with much to do delivers packets later. Those of a burst come in any case.
    let mut buffer = [0; 2000];
    heard.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let burst = (0..30).take_while(|_| heard.recv(&mut buffer).is_ok()).count();
    heard.set_nonblocking(true).unwrap();
    let passed = burst + std::iter::from_fn(|| heard.recv(&mut buffer).ok()).count();
    // Two bursts of 32 KiB at once, and a packet in each second.
    assert!((30..120).contains(&passed), "{passed} of 400 packets passed");
}

#[tokio::test]
async fn two_networks_of_one_node_have_different_addresses() {
    let state = tempfile::tempdir().unwrap();
    let node = TestNs::new();
    let first = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let before = inventory(&node).await;
    let other = |pods: &str, cluster: &str, services: &str| BridgeConfig {
        name: "ferrite1".into(),
        pod_cidrs: pods.parse().unwrap(),
        cluster_cidrs: cluster.parse().unwrap(),
        service_cidrs: Some(services.parse().unwrap()),
        state: state.path().join("other"),
        ..config(state.path())
    };
    for same in [
        other("10.244.1.0/24", "10.244.0.0/16", "10.97.0.0/16"),
        other("10.244.2.0/24", "10.244.0.0/16", "10.97.0.0/16"),
        other("10.245.0.0/24", "10.245.0.0/16", "10.96.0.0/16"),
    ] {
        let refused = Bridge::open_in(&node.path, same).await.err().unwrap();
        assert!(refused.to_string().contains("overlaps with"), "{refused}");
        assert_eq!(inventory(&node).await, before, "nothing was made");
    }
    let second =
        Bridge::open_in(&node.path, other("10.245.0.0/24", "10.245.0.0/16", "10.97.0.0/16")).await.unwrap();
    let (a, b) = (TestNs::new(), TestNs::new());
    attach(&first, "a", &a).await;
    let ip = attach(&second, "b", &b).await;
    assert!(echo(&node, &b, ip).starts_with("ping"));
    second.remove().await.unwrap();
}
