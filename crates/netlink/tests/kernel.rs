//! Requests to a real kernel, in network namespaces that the tests make. They need root.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ferrite_netlink::{
    Address, BridgeLink, Connection, Conntrack, Error, ForwardingEntry, ModuleEvents, Neighbour, Netns,
    NetworkEvent, NetworkEvents, PortFlags, Route, RouteType, Rule, Scope, TokenBucket, VethLink, VxlanLink,
};

/// An empty network namespace.
fn namespace() -> Netns {
    thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("these tests need root");
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[tokio::test]
async fn links_of_all_kinds() {
    let (here, there) = (namespace(), namespace());
    let (near, far) = (Connection::new_in(&here).unwrap(), Connection::new_in(&there).unwrap());
    near.add_link(BridgeLink::new("br0").mtu(1400).address([10, 88, 0, 0, 0, 1])).await.unwrap();
    let pair = VethLink::new("a", "b").mtu(1450).peer_address([10, 88, 0, 0, 0, 2]).peer_netns(&there);
    near.add_link(pair.clone()).await.unwrap();
    assert!(near.add_link(pair).await.unwrap_err().is_already_exists());
    let address = [10, 88, 0, 0, 0, 3];
    let tunnel = VxlanLink { name: "v0", id: 1, local: ip("192.0.2.1"), port: 8472, address, mtu: 1450 };
    near.add_link(tunnel).await.unwrap();

    near.set_link_master("a", "br0").await.unwrap();
    near.set_link_alias("a", "one").await.unwrap();
    let flags = PortFlags { hairpin: Some(true), isolated: Some(true) };
    near.set_bridge_port("a", flags).await.unwrap();
    near.set_bridge_port("a", PortFlags { hairpin: Some(false), isolated: None }).await.unwrap();
    near.pin_bridge_mtu("br0", 1400).await.unwrap();
    near.set_link_up("br0").await.unwrap();
    near.set_link_up("a").await.unwrap();
    far.set_link_up("b").await.unwrap();

    let links = near.get_links().await.unwrap();
    let find = |name: &str| links.iter().find(|link| link.name == name).unwrap();
    let (bridge, a) = (find("br0"), find("a"));
    assert_eq!((bridge.mtu, bridge.is_up, bridge.is_kind("bridge")), (Some(1400), true, true));
    assert_eq!((a.mtu, a.master, a.alias.as_deref()), (Some(1450), Some(bridge.index), Some("one")));
    assert_eq!(a.port, PortFlags { hairpin: Some(false), isolated: Some(true) });
    assert!(find("v0").is_kind("vxlan") && !find("v0").is_up && find("lo").kind.is_none());
    let b = far.get_link_by_name("b").await.unwrap().unwrap();
    assert_eq!((b.peer, b.mtu, b.is_up), (Some(a.index), Some(1450), true));
    assert_eq!(near.get_link_by_index(a.index).await.unwrap().unwrap().name, "a");

    for name in ["c", "", "a name of sixteen", "b"] {
        assert_eq!(near.get_link_by_name(name).await.unwrap(), None, "{name}");
    }
    assert!(near.set_link_up("c").await.unwrap_err().is_not_found());
    assert!(matches!(near.set_link_master("a", "c").await, Err(Error::NoLink(_))));
    assert!(near.del_link_if_exists("a").await.unwrap());
    assert!(!near.del_link_if_exists("a").await.unwrap());
    assert_eq!(far.get_link_by_name("b").await.unwrap(), None, "both ends are gone");
}

#[tokio::test]
async fn addresses_routes_rules_and_neighbours() {
    let here = namespace();
    let conn = Connection::new_in(&here).unwrap();
    conn.add_link(VethLink::new("a", "b")).await.unwrap();
    conn.set_link_up("a").await.unwrap();
    conn.set_link_up("b").await.unwrap();
    let link = conn.get_link_by_name("a").await.unwrap().unwrap().index;

    let v4 = Address::new("a", ip("192.0.2.1"), 24).broadcast(ip("192.0.2.255"));
    let v6 = Address::new("a", ip("2001:db8::1"), 64).without_duplicate_detection();
    conn.add_address(v4).await.unwrap();
    assert!(conn.add_address(v4).await.unwrap_err().is_already_exists());
    conn.replace_address(v4).await.unwrap();
    conn.replace_address(v6.deprecated()).await.unwrap();
    let found = conn.get_addresses().await.unwrap();
    let of = |address: &str| found.iter().find(|entry| entry.address == ip(address)).unwrap();
    assert_eq!((of("192.0.2.1").link, of("192.0.2.1").prefix), (link, 24));
    assert!(of("192.0.2.1").is_scope(Scope::Universe) && !of("192.0.2.1").is_deprecated);
    assert!(of("2001:db8::1").is_deprecated);

    let closed = Route::new(ip("10.0.0.0"), 8).route_type(RouteType::Unreachable).metric(4_000_000_000);
    let via = Route::new(ip("10.1.0.0"), 16).protocol(0xfe).gateway(ip("192.0.2.9")).dev("a").mtu(1400);
    let own = Route::new(ip("10.2.0.0"), 16).dev_index(link).scope(Scope::Link).table(26_213);
    let six = Route::default_by(ip("2001:db8::9"));
    for route in [closed, via, own, six] {
        conn.add_route(route).await.unwrap();
        assert!(conn.add_route(route).await.unwrap_err().is_already_exists(), "{route:?}");
        conn.replace_route(route).await.unwrap();
    }
    let error = conn.add_route(Route::default_by(ip("203.0.113.1"))).await.unwrap_err();
    assert!(error.to_string().contains("gateway"), "the kernel explains it: {error}");
    let routes = conn.get_routes().await.unwrap();
    let of = |text: &str, table| routes.iter().find(|r| r.to_string() == text && r.table == table).unwrap();
    let found = of("10.0.0.0/8", 254);
    assert_eq!((found.route_type, found.metric), (RouteType::Unreachable, Some(4_000_000_000)));
    let found = of("10.1.0.0/16", 254);
    assert_eq!((found.gateway, found.link, found.protocol), (Some(ip("192.0.2.9")), Some(link), 0xfe));
    assert_eq!(of("10.2.0.0/16", 26_213).gateway, None);
    assert!(routes.iter().any(|r| r.is_default() && r.gateway == Some(ip("2001:db8::9"))));
    for route in [closed, via, own, six] {
        assert!(conn.del_route_if_exists(route).await.unwrap(), "{route:?}");
        assert!(!conn.del_route_if_exists(route).await.unwrap(), "{route:?}");
    }

    let before = conn.get_rules().await.unwrap();
    for to in ["10.96.0.0", "fd00::"] {
        let (to, input_link) = (Some((ip(to), 16)), Some("lo".into()));
        let rule = Rule { priority: 32_000, table: 26_213, to, input_link };
        conn.add_rule(&rule).await.unwrap();
        assert!(conn.add_rule(&rule).await.unwrap_err().is_already_exists());
        assert!(conn.get_rules().await.unwrap().contains(&rule));
        assert!(conn.del_rule_if_exists(&rule).await.unwrap());
        assert!(!conn.del_rule_if_exists(&rule).await.unwrap());
    }
    assert_eq!(conn.get_rules().await.unwrap(), before);

    let neighbour = Neighbour { link, address: ip("192.0.2.7"), hardware: [1, 0, 0, 0, 0, 1] };
    for hardware in [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]] {
        conn.replace_neighbour(Neighbour { hardware, ..neighbour }).await.unwrap();
        let found = conn.get_neighbours().await.unwrap();
        let known = found.iter().find(|entry| entry.address == neighbour.address).unwrap();
        assert_eq!(known.hardware.as_deref(), Some(&hardware[..]));
    }
    assert!(conn.del_neighbour_if_exists(link, neighbour.address).await.unwrap());
    assert!(!conn.del_neighbour_if_exists(link, neighbour.address).await.unwrap());

    let address = [2, 0, 0, 0, 0, 9];
    let tunnel = VxlanLink { name: "v0", id: 1, local: ip("192.0.2.1"), port: 8472, address, mtu: 1450 };
    conn.add_link(tunnel).await.unwrap();
    let link = conn.get_link_by_name("v0").await.unwrap().unwrap().index;
    let entry = ForwardingEntry { link, hardware: [2, 0, 0, 0, 0, 5], machine: ip("192.0.2.5") };
    conn.replace_forwarding(entry).await.unwrap();
    conn.replace_forwarding(entry).await.unwrap();
    assert!(conn.del_forwarding_if_exists(link, entry.hardware).await.unwrap());
    assert!(!conn.del_forwarding_if_exists(link, entry.hardware).await.unwrap());
    conn.del_address(v4).await.unwrap();
    assert!(conn.del_address(v4).await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn queues_that_limit() {
    let here = namespace();
    let conn = Connection::new_in(&here).unwrap();
    conn.add_link(VethLink::new("a", "b")).await.unwrap();
    for bytes_per_second in [1, 1_000_000, 125_000_000_000_000] {
        let queue = TokenBucket { bytes_per_second, burst: 32_768, limit: 40_000 };
        conn.replace_queue("a", queue).await.unwrap();
        let found = conn.get_queues("a").await.unwrap();
        assert_eq!(found.iter().map(|queue| queue.kind.as_str()).collect::<Vec<_>>(), ["tbf"]);
    }
    assert!(conn.del_queue("a").await.unwrap());
    assert!(!conn.get_queues("a").await.unwrap().iter().any(|queue| queue.kind == "tbf"));
    assert!(conn.get_queues("c").await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn events_and_lost_events() {
    let here = namespace();
    let conn = Connection::new_in(&here).unwrap();
    let mut events = NetworkEvents::listen(Some(&here), true).unwrap();
    conn.add_link(VethLink::new("a", "b")).await.unwrap();
    conn.set_link_up("a").await.unwrap();
    let address = Address::new("a", ip("192.0.2.1"), 24);
    conn.add_address(address).await.unwrap();
    conn.del_address(address).await.unwrap();
    let gone = async {
        let mut seen = Vec::new();
        loop {
            match events.next().await.unwrap() {
                NetworkEvent::NewLink(link) if link.name == "a" && link.is_up => seen.push("up"),
                NetworkEvent::NewAddress(entry) if entry.address == ip("192.0.2.1") => seen.push("address"),
                NetworkEvent::NewRoute(route) if route.to_string() == "192.0.2.1/32" => seen.push("route"),
                NetworkEvent::DelAddress(entry) if entry.address == ip("192.0.2.1") => break,
                _ => {}
            }
        }
        // The kernel may report a link more than once.
        seen.dedup();
        seen
    };
    let seen = tokio::time::timeout(Duration::from_secs(10), gone).await.unwrap();
    assert_eq!(seen, ["up", "address", "route"]);

    // More than the kernel keeps for a listener that is late.
    for _ in 0..4000 {
        conn.add_address(address).await.unwrap();
        conn.del_address(address).await.unwrap();
    }
    let lost = async { while events.next().await.unwrap() != NetworkEvent::Lost {} };
    tokio::time::timeout(Duration::from_secs(10), lost).await.unwrap();
    // And the listener goes on.
    let mark = async {
        loop {
            if let NetworkEvent::NewLink(link) = events.next().await.unwrap()
                && link.mtu == Some(1234)
            {
                return;
            }
        }
    };
    let marked = async {
        loop {
            conn.set_link_mtu("a", 1300).await.unwrap();
            conn.set_link_mtu("a", 1234).await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    let both = async {
        tokio::select! { () = mark => {}, () = marked => {} }
    };
    tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
}

#[test]
fn settings_and_other_sockets_of_a_namespace() {
    let here = namespace();
    let outside = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap();
    for value in ["1", "0"] {
        here.sysctl().set("net.ipv4.ip_forward", value).unwrap();
        assert_eq!(here.sysctl().get("net/ipv4/ip_forward").unwrap(), value);
    }
    assert_eq!(std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap(), outside);
    assert!(here.sysctl().get("net.ipv4.no_such_setting").unwrap_err().is_not_found());
    assert_eq!(Conntrack::open(Some(&here)).unwrap().udp_flows().unwrap(), []);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { drop(ModuleEvents::listen(Some(&here)).unwrap()) });

    // A namespace that somebody keeps is found by its path.
    let (ready, made) = mpsc::channel();
    let (stop, stopped) = mpsc::channel::<()>();
    let keeper = thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let path = format!("/proc/self/task/{}/ns/net", nix::unistd::gettid());
        ready.send(PathBuf::from(path)).unwrap();
        let _ = stopped.recv();
    });
    let inode = |path: &str| std::fs::read_link(path).unwrap();
    let path = made.recv().unwrap();
    let entered = Netns::from_path(&path).unwrap().run(|| inode("/proc/thread-self/ns/net")).unwrap();
    assert_eq!(entered, inode(path.to_str().unwrap()));
    assert_ne!(entered, inode("/proc/thread-self/ns/net"), "this thread stays where it is");
    drop(stop);
    keeper.join().unwrap();
}
