//! The table in real network namespaces, with real sockets. Every test makes its own namespaces, the node's included,
//! and none has a way out.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod world;

use std::collections::BTreeMap;
use std::io::ErrorKind;

use ferrite_nft::{IpFamily, OwnGenerations, Protocol, Table};
use ferrite_proxy::conntrack;
use ferrite_proxy::layout::{LocalTraffic, NodePortAddresses, SetName};
use ferrite_proxy::model::EndpointAddress;
use ferrite_proxy::view::{TableView, Way};
use serde_json::json;
use world::{Answer, World};

#[tokio::test]
async fn cluster_ip_reaches_all_endpoints() {
    let mut world = World::new(4).await;
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80, "targetPort": 8080}]}));
    world.endpoints("web", &[1, 2, 3]);
    let synced = world.sync();
    assert!(synced.rebuilt);
    let mut seen = BTreeMap::new();
    for _ in 0..60 {
        let answer = world.tcp(0, "10.96.0.10:80").unwrap();
        assert_eq!(answer.client, world.ip(0), "nothing masquerades traffic of pods to a ClusterIP");
        *seen.entry(answer.server).or_insert(0) += 1;
    }
    assert_eq!(seen.len(), 3, "every endpoint has its share: {seen:?}");
    // The node's own processes reach it, too.
    assert!(world.tcp_from_node("10.96.0.10:80").is_ok());
    // Other ports of the address are refused, addresses without a Service are not answered.
    assert_eq!(world.tcp(0, "10.96.0.10:81").unwrap_err(), ErrorKind::ConnectionRefused);
    assert_eq!(world.tcp_from_node("10.96.0.10:81").unwrap_err(), ErrorKind::ConnectionRefused);
    assert!(world.dropped(0, "10.96.0.11:80"));
}

#[tokio::test]
async fn udp_and_a_pod_that_meets_itself() {
    let mut world = World::new(2).await;
    let ports = json!([{"name": "t", "port": 80}, {"name": "u", "port": 80, "protocol": "UDP"}]);
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": ports}));
    world.endpoints("web", &[0]);
    world.sync();
    let answer = world.udp(1, "10.96.0.10:80").unwrap();
    assert_eq!(answer, Answer { client: world.ip(1), server: world.ip(0) });
    let answer = world.tcp(0, "10.96.0.10:80").unwrap();
    assert_eq!(answer.server, world.ip(0));
    assert_ne!(answer.client, world.ip(0), "the pod would answer itself without the node");
    assert_eq!(world.udp(0, "10.96.0.10:80").unwrap().server, world.ip(0));
}

#[tokio::test]
async fn without_endpoints_connections_are_refused() {
    let mut world = World::new(1).await;
    let spec =
        json!({"type": "NodePort", "clusterIP": "10.96.0.10", "ports": [{"port": 80, "nodePort": 30080}]});
    world.service("web", spec);
    world.sync();
    assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap_err(), ErrorKind::ConnectionRefused);
    assert_eq!(world.tcp_from_node("10.96.0.10:80").unwrap_err(), ErrorKind::ConnectionRefused);
    assert_eq!(world.tcp(0, "10.244.1.1:30080").unwrap_err(), ErrorKind::ConnectionRefused);
    assert_eq!(world.udp(0, "10.96.0.10:80").unwrap_err(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn node_ports_masquerade_with_policy_cluster_only() {
    let mut world = World::new(2).await;
    let spec = |policy: &str| {
        json!({"type": "NodePort", "clusterIP": "10.96.0.10", "externalTrafficPolicy": policy,
            "ports": [{"port": 80, "nodePort": 30080}]})
    };
    world.service("web", spec("Cluster"));
    world.endpoints("web", &[0]);
    world.sync();
    let outside = world.outside().await;
    assert_eq!(
        outside.tcp("192.0.2.1:30080").unwrap(),
        Answer { client: "10.244.1.1".parse().unwrap(), server: world.ip(0) }
    );
    assert!(world.tcp_from_node("192.0.2.1:30080").is_ok());
    assert!(world.tcp(1, "192.0.2.1:30080").is_ok());

    world.service("web", spec("Local"));
    world.sync();
    let answer = outside.tcp("192.0.2.1:30080").unwrap();
    assert_eq!(
        answer,
        Answer { client: "192.0.2.2".parse().unwrap(), server: world.ip(0) },
        "the client's address stays"
    );
    assert!(world.tcp_from_node("192.0.2.1:30080").is_ok());

    // The endpoint is on another node now: traffic from outside is dropped, the node's own and its pods' is not.
    world.endpoints_on("web", "other", &[0]);
    world.sync();
    assert!(outside.dropped(None, "192.0.2.1:30080"));
    assert!(world.tcp_from_node("192.0.2.1:30080").is_ok());
    assert!(world.tcp(1, "192.0.2.1:30080").is_ok());
}

#[tokio::test]
async fn node_ports_answer_at_the_chosen_addresses_only() {
    let mut world = World::with(1, |config| {
        config.node_port_addresses = NodePortAddresses::Only(vec!["10.244.1.1".parse().unwrap()]);
    })
    .await;
    let spec =
        json!({"type": "NodePort", "clusterIP": "10.96.0.10", "ports": [{"port": 80, "nodePort": 30080}]});
    world.service("web", spec);
    world.endpoints("web", &[0]);
    world.sync();
    let outside = world.outside().await;
    assert!(world.tcp_from_node("10.244.1.1:30080").is_ok());
    assert_eq!(outside.tcp("192.0.2.1:30080").unwrap_err(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn internal_policy_local_drops_without_a_local_endpoint() {
    let mut world = World::new(2).await;
    let spec = json!({"clusterIP": "10.96.0.10", "internalTrafficPolicy": "Local", "ports": [{"port": 80}]});
    world.service("web", spec);
    world.endpoints("web", &[0]);
    world.sync();
    assert!(world.tcp(1, "10.96.0.10:80").is_ok());
    world.endpoints_on("web", "other", &[0]);
    world.sync();
    assert!(world.dropped(1, "10.96.0.10:80"));
}

#[tokio::test]
async fn affinity_keeps_a_client_at_its_endpoint_while_it_lasts() {
    let mut world = World::new(4).await;
    let spec = json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}], "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}});
    world.service("web", spec);
    world.endpoints("web", &[1, 2, 3]);
    world.sync();
    let first = world.tcp(0, "10.96.0.10:80").unwrap().server;
    for _ in 0..20 {
        assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap().server, first);
    }
    // It outlives a table that is made anew.
    world.restart();
    world.sync();
    for _ in 0..20 {
        assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap().server, first);
    }
    // Its endpoint goes: the client gets another one and keeps that.
    let rest: Vec<usize> = (1..4).filter(|pod| world.ip(*pod) != first).collect();
    world.endpoints("web", &rest);
    world.sync();
    let second = world.tcp(0, "10.96.0.10:80").unwrap().server;
    assert_ne!(second, first);
    for _ in 0..20 {
        assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap().server, second);
    }
    // The first comes back; the client stays where it is.
    world.endpoints("web", &[1, 2, 3]);
    world.sync();
    for _ in 0..20 {
        assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap().server, second);
    }
}

#[tokio::test]
async fn an_update_costs_what_changed_and_keeps_flows() {
    let mut world = World::new(4).await;
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
    world.endpoints("web", &[1]);
    world.sync();
    let mut open = world.connect(0, "10.96.0.10:80");
    open.ping().unwrap();
    world.endpoints("web", &[1, 2]);
    let synced = world.sync();
    assert!(!synced.rebuilt);
    // The endpoint, its hairpin, the class of two with its chain, and the Service's element.
    assert_eq!((synced.deleted, synced.added, synced.chains), (1, 4, 1));
    open.ping().unwrap();
    world.endpoints("web", &[2]);
    world.sync();
    open.ping().expect("a flow stays with its endpoint");
    for _ in 0..5 {
        assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap().server, world.ip(2));
    }
    // The chain for two endpoints is there already.
    world.endpoints("web", &[2, 3]);
    let synced = world.sync();
    assert_eq!((synced.deleted, synced.added, synced.chains), (1, 3, 0));
    assert_eq!(world.sync(), ferrite_proxy::sync::Synced::default());
}

#[tokio::test]
async fn load_balancer_addresses_and_their_sources() {
    let mut world = World::new(1).await;
    let spec = json!({"type": "LoadBalancer", "clusterIP": "10.96.0.10", "externalIPs": ["203.0.113.7"],
        "ports": [{"port": 80, "nodePort": 30080}],
        "loadBalancerSourceRanges": ["192.0.2.0/30", "192.0.2.2/32", "10.244.0.0/16"]});
    let ingress = json!([{"ip": "203.0.113.5"}, {"ip": "203.0.113.6", "ipMode": "Proxy"}]);
    world.service_with_status("web", spec, json!({"loadBalancer": {"ingress": ingress}}));
    world.endpoints("web", &[0]);
    world.sync();
    let outside = world.outside().await;
    outside.route_to_node("203.0.113.0/24").await;
    assert!(outside.tcp("203.0.113.5:80").is_ok(), "192.0.2.2 is in the ranges");
    assert!(outside.tcp("203.0.113.7:80").is_ok());
    assert!(outside.tcp("203.0.113.6:80").is_err(), "an address of a proxying balancer is not ours");
    outside.add_address("192.0.2.9/24").await;
    assert!(outside.dropped(Some("192.0.2.9"), "203.0.113.5:80"), "not in the ranges");
    assert!(outside.tcp_as("192.0.2.9", "203.0.113.7:80").is_ok(), "ranges are for load balancers only");

    let view = TableView::read(IpFamily::V4, world::TABLE, Some(&world.node.path)).unwrap().unwrap();
    let sources = |ip: &str| {
        let sources = view.sources(ip.parse().unwrap(), Protocol::Tcp, 80)?;
        Some(sources.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    // The node may have the address itself, and is then the source of its own requests.
    let own = vec!["10.244.0.0/16".into(), "192.0.2.0/30".into(), "203.0.113.5/32".into()];
    assert_eq!(sources("203.0.113.5"), Some(own));
    assert_eq!(sources("203.0.113.7"), None);
}

#[tokio::test]
async fn the_view_tells_packets_from_inside_and_outside_apart() {
    let mut world = World::new(2).await;
    let spec = json!({"type": "NodePort", "clusterIP": "10.96.0.10", "externalIPs": ["203.0.113.7"],
        "externalTrafficPolicy": "Local", "ports": [{"port": 80, "nodePort": 30080}]});
    world.service("web", spec);
    let of = |world: &World, local: &[usize], ip: &str| {
        let view = TableView::read(IpFamily::V4, world::TABLE, Some(&world.node.path)).unwrap().unwrap();
        let ips = |list: &[EndpointAddress]| list.iter().map(|end| end.ip).collect::<Vec<_>>();
        match view.service(ip.parse().unwrap(), Protocol::Tcp, 80) {
            Way::Endpoints { endpoints, .. } => (ips(&endpoints), None),
            Way::Split { inside, outside, .. } => {
                assert_eq!(ips(&outside), local.iter().map(|pod| world.ip(*pod)).collect::<Vec<_>>());
                (ips(&inside), Some(outside.len()))
            }
            way => panic!("{way:?}"),
        }
    };
    world.endpoints_on("web", "other", &[0, 1]);
    world.sync();
    let all = vec![world.ip(0), world.ip(1)];
    assert_eq!(of(&world, &[], "203.0.113.7"), (all.clone(), Some(0)), "none on this node");
    assert_eq!(of(&world, &[], "10.96.0.10"), (all.clone(), None), "a ClusterIP is not from outside");
    world.endpoints("web", &[0, 1]);
    world.sync();
    assert_eq!(of(&world, &[0, 1], "203.0.113.7"), (all, Some(2)));
}

#[tokio::test]
async fn pods_can_be_told_by_their_interface() {
    let mut world =
        World::with(2, |config| config.local_traffic = LocalTraffic::Interface("ferrite0".into())).await;
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
    world.endpoints("web", &[0]);
    world.sync();
    assert_eq!(world.tcp(1, "10.96.0.10:80").unwrap().client, world.ip(1));
    let outside = world.outside().await;
    outside.route_to_node("10.96.0.0/16").await;
    assert_eq!(
        outside.tcp("10.96.0.10:80").unwrap().client.to_string(),
        "10.244.1.1",
        "others are masqueraded"
    );
}

#[tokio::test]
async fn pods_of_a_bridge_that_is_not_tracked() {
    let mut world =
        World::with(2, |config| config.untracked_bridge = Some("10.244.1.0/24".parse().unwrap())).await;
    world.node.run(|| std::fs::write("/proc/sys/net/bridge/bridge-nf-call-iptables", "0").unwrap());
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
    world.endpoints("web", &[0]);
    world.sync();
    assert_eq!(world.tcp(1, "10.96.0.10:80").unwrap().client.to_string(), "10.244.1.1");
    assert_eq!(world.tcp(0, "10.96.0.10:80").unwrap().client.to_string(), "10.244.1.1");
    assert_eq!(world.tcp(1, "10.96.0.10:81").unwrap_err(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn masquerade_all() {
    let mut world = World::with(2, |config| config.masquerade_all = true).await;
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
    world.endpoints("web", &[0]);
    world.sync();
    assert_eq!(world.tcp(1, "10.96.0.10:80").unwrap().client.to_string(), "10.244.1.1");
}

#[tokio::test]
async fn foreign_changes_are_noticed_and_healed() {
    let mut world = World::new(2).await;
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
    world.endpoints("web", &[0]);
    let mut monitor = world.monitor();
    world.sync();
    world.endpoints("web", &[0, 1]);
    world.sync();
    let mut changed = Box::pin(monitor.changed());
    assert!(!world.notices(&mut changed).await, "our own changes are not foreign");
    world.foreign_table("other");
    assert!(!world.notices(&mut changed).await, "other tables are none of our business");

    world.flush_ruleset();
    assert_eq!(changed.await, ferrite_nft::Change::Foreign);
    assert!(!world.proxy.table_is_ours().unwrap());
    world.proxy.invalidate();
    assert!(world.sync().rebuilt);
    assert!(world.tcp(1, "10.96.0.10:80").is_ok());

    // Without the monitor, the next change heals.
    world.flush_ruleset();
    world.endpoints("web", &[0]);
    assert!(world.sync().rebuilt);
    assert!(world.tcp(1, "10.96.0.10:80").is_ok());
}

#[tokio::test]
async fn a_large_table_is_whole() {
    let mut world = World::new(2).await;
    for number in 0..1000 {
        let address = std::net::Ipv4Addr::from_bits(0x0a60_0100 + number);
        let name = format!("s{number}");
        world.service(&name, json!({"clusterIP": address, "ports": [{"port": 80}]}));
        world.endpoints(&name, &[1]);
    }
    let mut monitor = world.monitor();
    // Made where there is none, in parts; made again where there is one, at once; and where somebody left another one.
    for leftover in [false, false, true] {
        if leftover {
            world.flush_ruleset();
            assert_eq!(monitor.changed().await, ferrite_nft::Change::Foreign);
            world.foreign_table(world::TABLE);
            assert_eq!(monitor.changed().await, ferrite_nft::Change::Foreign);
        }
        world.proxy.invalidate();
        let synced = world.sync();
        assert!(synced.rebuilt && synced.added > 3000, "{synced:?}");
        let mut table =
            Table::open(IpFamily::V4, world::TABLE, Some(&world.node.path), OwnGenerations::default())
                .unwrap();
        assert_eq!(table.elements(SetName::ServiceIps).unwrap().len(), 1000);
        assert_eq!(table.elements(SetName::Endpoints).unwrap().len(), 1000);
        assert!(world.proxy.table_is_ours().unwrap());
        for service in ["10.96.1.0:80", "10.96.4.231:80"] {
            assert_eq!(world.tcp(0, service).unwrap().server, world.ip(1));
        }
        assert_eq!(world.tcp(0, "10.96.1.0:81").unwrap_err(), ErrorKind::ConnectionRefused);
        let mut changed = Box::pin(monitor.changed());
        assert!(!world.notices(&mut changed).await, "our own changes are not foreign: {leftover}");
    }
}

#[tokio::test]
async fn removal_leaves_nothing() {
    let mut world = World::new(1).await;
    let before = world.tables();
    world.service("web", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}));
    world.endpoints("web", &[0]);
    world.sync();
    assert_ne!(world.tables(), before);
    world.proxy.remove().unwrap();
    world.proxy.remove().unwrap();
    assert_eq!(world.tables(), before);
}

#[tokio::test]
async fn ipv6() {
    let mut world = World::six(3).await;
    let spec = json!({"type": "NodePort", "clusterIP": "fd96::10", "clusterIPs": ["fd96::10"], "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
        "ports": [{"port": 80, "nodePort": 30080}]});
    world.service("web", spec);
    world.endpoints("web", &[1, 2]);
    world.service("none", json!({"clusterIPs": ["fd96::11"], "ports": [{"port": 80}]}));
    world.sync();
    let first = world.tcp(0, "[fd96::10]:80").unwrap();
    for _ in 0..10 {
        assert_eq!(world.tcp(0, "[fd96::10]:80").unwrap().server, first.server);
    }
    assert!(world.tcp(1, "[fd96::10]:80").is_ok());
    assert!(world.tcp(0, "[fd44::1]:30080").is_ok());
    assert_eq!(world.tcp(0, "[fd96::11]:80").unwrap_err(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn stale_udp_flows_are_removed() {
    let mut world = World::new(3).await;
    world.service("dns", json!({"clusterIP": "10.96.0.10", "ports": [{"port": 53, "protocol": "UDP"}]}));
    world.endpoints("dns", &[1]);
    world.sync();
    // A client that keeps its socket keeps its flow.
    let flow = world.udp_flow(0, "10.96.0.10:53");
    assert_eq!(flow.ask().unwrap().server, world.ip(1));
    world.endpoints("dns", &[2]);
    world.sync();
    assert_eq!(flow.ask().unwrap().server, world.ip(1), "connection tracking still leads there");
    let removed = conntrack::remove_stale(world.served("dns").iter(), Some(&world.node.path)).unwrap();
    assert_eq!(removed, 1);
    assert_eq!(flow.ask().unwrap().server, world.ip(2));
    let removed = conntrack::remove_stale(world.served("dns").iter(), Some(&world.node.path)).unwrap();
    assert_eq!(removed, 0);
}
