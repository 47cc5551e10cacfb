//! Everything of the network that somebody else removes comes back. Real namespaces; the node is one of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use ferrite_netlink::Route;
use ferrite_network::{
    Bridge, BridgeConfig, Changes, Encapsulation, Isolation, NetworkError, Peer, PodGuard, PodNetwork,
    PodRef, Router, RouterConfig,
};
use ferrite_nft::{BaseChain, Hook, TableFamily};
use support::{TestNs, attach, echo, pod};

const PATIENCE: Duration = Duration::from_secs(60);

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

/// Routes that matter, rules of tables, and rules of routing, in comparable form.
async fn inventory(ns: &TestNs) -> Vec<String> {
    let conn = ns.route();
    let mut seen = Vec::new();
    for route in conn.get_routes().await.unwrap() {
        let ours = route.destination.to_string();
        if ours.starts_with("10.96.") || ours.starts_with("10.244.") {
            seen.push(format!("route {route} {:?} in {}", route.route_type, route.table));
        }
    }
    for rule in conn.get_rules().await.unwrap().into_iter().filter(|rule| rule.priority == 32_000) {
        seen.push(format!("{rule:?}"));
    }
    for address in conn.get_addresses().await.unwrap().iter().filter(|a| a.address.is_ipv4()) {
        seen.push(format!("address {}", address.address));
    }
    let mut ruleset = ns.ruleset();
    for table in ruleset.tables().unwrap() {
        for rule in ruleset.rules(table.family, &table.name).unwrap() {
            seen.push(format!("rule of {} {} {}", table.family, table.name, rule.chain));
        }
    }
    seen.sort();
    seen
}

/// Waits until the namespace has what it had.
async fn comes_back(node: &TestNs, before: &[String], what: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = inventory(node).await;
        if now == before {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {now:#?} instead of {before:#?}");
        tokio::task::yield_now().await;
    }
}

fn flush(node: &TestNs) {
    let mut ruleset = node.ruleset();
    for table in ruleset.tables().unwrap() {
        ruleset.delete_table(table.family, &table.name).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_of_the_bridge_comes_back() {
    let state = tempfile::tempdir().unwrap();
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    node.route().set_link_up("lo").await.unwrap();
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    bridge.route_services().await.unwrap();
    bridge.isolate(Isolation::Internal).await.unwrap();
    bridge.add_node_address("10.96.0.10".parse().unwrap()).await.unwrap();
    attach(&bridge, "sandbox-a", &a).await;
    let address = attach(&bridge, "sandbox-b", &b).await;
    let before = inventory(&node).await;
    // What was removed before the watch began is found at its beginning.
    flush(&node);
    let healing = tokio::spawn(Arc::clone(&bridge).heal());
    comes_back(&node, &before, "tables that were flushed before the start").await;

    flush(&node);
    comes_back(&node, &before, "all tables").await;
    let conn = node.route();
    let unreachable = Route::new("10.96.0.0".parse().unwrap(), 16)
        .route_type(ferrite_netlink::RouteType::Unreachable)
        .metric(4_000_000_000);
    assert!(conn.del_route_if_exists(unreachable).await.unwrap());
    comes_back(&node, &before, "the route that closes the range of Services").await;
    let rule = conn.get_rules().await.unwrap().into_iter().find(|rule| rule.priority == 32_000).unwrap();
    assert!(conn.del_rule_if_exists(&rule).await.unwrap());
    comes_back(&node, &before, "the rule for Services").await;
    conn.set_link_down("ferrite0").await.unwrap();
    comes_back(&node, &before, "the bridge that was set down").await;
    assert!(conn.del_link_if_exists("ferrite0").await.unwrap());
    comes_back(&node, &before, "the bridge").await;
    // The last step of the reconciler may come after the addresses.
    let joined = || async {
        let links = node.route().get_links().await.unwrap();
        let bridge = links.iter().find(|link| link.name == "ferrite0").map(|link| link.index);
        links.iter().filter(|link| bridge.is_some() && link.master == bridge).count() == 2
    };
    let deadline = Instant::now() + PATIENCE;
    while !joined().await {
        assert!(Instant::now() < deadline, "pods are not joined to the new bridge");
        tokio::task::yield_now().await;
    }
    node.route().settle_link("ferrite0").await.unwrap();
    assert!(echo(&a, &b, address).starts_with("ping"));

    bridge.remove().await.unwrap();
    healing.abort();
    let _ = healing.await;
    assert_eq!(inventory(&node).await, ["address 127.0.0.1"], "nothing comes back after the network");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_around_the_tunnel_come_back() {
    let (state, node) = (tempfile::tempdir().unwrap(), TestNs::new());
    node.route().set_link_up("lo").await.unwrap();
    let own: IpAddr = "192.0.2.1".parse().unwrap();
    let conn = node.route();
    conn.add_link(ferrite_netlink::VethLink::new("uplink", "far")).await.unwrap();
    conn.add_address(ferrite_netlink::Address::new("uplink", own, 24)).await.unwrap();
    conn.set_link_up("uplink").await.unwrap();
    conn.set_link_up("far").await.unwrap();
    let _bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    let closed = || {
        let mut ruleset = node.ruleset();
        let mut batch = ruleset.batch(TableFamily::Ipv4, "filter");
        batch.add_table();
        batch.add_chain("FORWARD", &BaseChain::filter(Hook::Forward).dropping());
        ruleset.commit(batch).unwrap();
    };
    closed();
    let router = RouterConfig {
        bridge: "ferrite0".into(),
        node_ips: ferrite_network::Addresses::single(own),
        pod_cidrs: Some("10.244.1.0/24".parse().unwrap()),
        cluster_cidrs: "10.244.0.0/16".parse().unwrap(),
        service_cidrs: Some("10.96.0.0/16".parse().unwrap()),
        encapsulation: Encapsulation::Always,
    };
    let mut changes = Changes::watch_in(&node.path, router.cluster_cidrs, "ferrite0").unwrap();
    let mut router = Router::open_in(&node.path, router).await.unwrap();
    let peers = [Peer {
        name: "other".into(),
        addresses: vec!["192.0.2.2".parse().unwrap()],
        pod_cidrs: vec!["10.244.2.0/24".parse().unwrap()],
    }];
    router.apply(&peers).await.unwrap();
    let rules = |name: &str| node.ruleset().rules(TableFamily::Ipv4, name).unwrap().len();
    let (tunnel, forward) = (rules("ferrite-tunnel-ferrite0"), rules("filter"));
    assert!(tunnel >= 3 && forward >= 2, "{tunnel} {forward}");
    for remove in ["ferrite-tunnel-ferrite0", "filter"] {
        node.ruleset().delete_table(TableFamily::Ipv4, remove).unwrap();
        if remove == "filter" {
            closed();
        }
        let whole = async {
            while rules("ferrite-tunnel-ferrite0") != tunnel || rules("filter") != forward {
                changes.next().await.unwrap();
                router.apply(&peers).await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, whole).await.unwrap_or_else(|_| panic!("{remove} does not come back"));
    }
}

/// Covers everybody.
#[derive(Default)]
struct Anybody(AtomicBool);

#[async_trait]
impl PodGuard for Anybody {
    async fn cover(&self, _: &str, _: &PodRef, _: &[IpAddr]) -> Result<(), NetworkError> {
        self.0.store(true, Ordering::SeqCst);
        Ok(())
    }

    async fn uncover(&self, _: &str) {}
}

#[tokio::test]
async fn a_network_that_requires_a_guard_takes_no_pod_without_one() {
    let state = tempfile::tempdir().unwrap();
    let (node, a) = (TestNs::new(), TestNs::new());
    let bridge = Bridge::open_in(&node.path, config(state.path())).await.unwrap();
    bridge.require_guard();
    assert!(bridge.ready().unwrap_err().to_string().contains("network policies"));
    let refused = bridge.attach("sandbox-a", &a.path, &pod("a")).await;
    assert!(matches!(refused, Err(NetworkError::Guard { .. })), "{refused:?}");
    assert!(a.route().get_links().await.unwrap().iter().all(|link| link.name != "eth0"));
    let guard = Arc::new(Anybody::default());
    bridge.set_guard(guard.clone());
    bridge.ready().unwrap();
    attach(&bridge, "sandbox-a", &a).await;
    assert!(guard.0.load(Ordering::SeqCst));
}
