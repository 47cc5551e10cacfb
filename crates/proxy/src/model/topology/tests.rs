//! The table reads like the rules of traffic policies, hints and terminating endpoints.

use super::super::{Cidr, Protocol};
use super::*;

/// Which policies a service port has and how it is reached.
#[derive(Clone, Copy)]
enum Kind {
    ClusterIp,
    InternalLocal,
    ExternalLocal,
    BothLocal,
}

fn port(kind: Kind) -> ServicePort {
    let external = matches!(kind, Kind::ExternalLocal | Kind::BothLocal);
    ServicePort {
        seniority: Arc::default(),
        cluster_ip: "10.96.0.9".parse().unwrap(),
        port: 80,
        protocol: Protocol::Tcp,
        node_port: external.then_some(30080),
        external_ips: Vec::new(),
        load_balancer_vips: Vec::new(),
        source_ranges: Vec::<Cidr>::new(),
        affinity_timeout: None,
        internal_policy_local: matches!(kind, Kind::InternalLocal | Kind::BothLocal),
        external_policy_local: external,
        health_check_node_port: None,
    }
}

/// An endpoint from words: `1 ready local zone=a node=here`. The number is the last octet.
fn endpoint(words: &str) -> Endpoint {
    let mut words = words.split_whitespace();
    let octet: u8 = words.next().unwrap().parse().unwrap();
    let ip = std::net::IpAddr::from([10, 0, 0, octet]);
    let mut made = Endpoint {
        address: EndpointAddress { ip, port: 80 },
        local: false,
        ready: false,
        serving: false,
        terminating: false,
        zone_hints: Vec::new(),
        node_hints: Vec::new(),
    };
    for word in words {
        match word.split_once('=') {
            Some(("zone", zone)) => made.zone_hints.push(zone.into()),
            Some(("node", node)) => made.node_hints.push(node.into()),
            _ if word == "ready" => (made.ready, made.serving) = (true, true),
            _ if word == "draining" => (made.serving, made.terminating) = (true, true),
            _ if word == "dying" => made.terminating = true,
            _ if word == "unready" => {}
            _ if word == "local" => made.local = true,
            _ => panic!("{word}"),
        }
    }
    made
}

#[test]
fn choices() {
    use Kind::*;
    // name, kind of port, endpoints, octets for Cluster, octets for Local, whether there is any
    type Row<'a> = (&'a str, Kind, &'a [&'a str], &'a [u8], &'a [u8], bool);
    let rows: &[Row] = &[
        ("no endpoints", ClusterIp, &[], &[], &[], false),
        (
            "ready ones of all nodes",
            ClusterIp,
            &["1 ready", "2 ready local", "3 unready"],
            &[1, 2],
            &[],
            true,
        ),
        (
            "zone hints",
            ClusterIp,
            &["1 ready zone=a", "2 ready zone=b", "3 ready zone=a zone=b"],
            &[1, 3],
            &[],
            true,
        ),
        ("no hint for this zone", ClusterIp, &["1 ready zone=b", "2 ready zone=c"], &[1, 2], &[], true),
        ("one lacks a zone hint", ClusterIp, &["1 ready zone=a", "2 ready"], &[1, 2], &[], true),
        (
            "an unready one may lack it",
            ClusterIp,
            &["1 ready zone=a", "2 ready zone=b", "3 unready"],
            &[1],
            &[],
            true,
        ),
        ("an unready hint is no hint", ClusterIp, &["1 ready zone=b", "2 unready zone=a"], &[1], &[], true),
        (
            "node hints before zone hints",
            ClusterIp,
            &["1 ready zone=a node=there", "2 ready zone=a node=here"],
            &[2],
            &[],
            true,
        ),
        (
            "zone hints if no node hint is for this node",
            ClusterIp,
            &["1 ready zone=a node=there", "2 ready zone=b node=there"],
            &[1],
            &[],
            true,
        ),
        ("node hint missing on one", ClusterIp, &["1 ready node=here", "2 ready"], &[1, 2], &[], true),
        (
            "draining ones if none is ready",
            ClusterIp,
            &["1 draining", "2 dying", "3 unready"],
            &[1],
            &[],
            true,
        ),
        ("draining ones only then", ClusterIp, &["1 draining", "2 ready"], &[2], &[], true),
        ("hints do not count for draining ones", ClusterIp, &["1 draining zone=b"], &[1], &[], true),
        ("internal Local", InternalLocal, &["1 ready", "2 ready local"], &[], &[2], true),
        ("internal Local without a local one", InternalLocal, &["1 ready"], &[], &[], true),
        ("internal Local ignores hints", InternalLocal, &["1 ready local zone=b"], &[], &[1], true),
        ("internal Local, draining", InternalLocal, &["1 ready", "2 draining local"], &[], &[2], true),
        (
            "internal Local, local ready first",
            InternalLocal,
            &["1 ready local", "2 draining local"],
            &[],
            &[1],
            true,
        ),
        ("internal Local, nothing usable", InternalLocal, &["1 unready", "2 dying local"], &[], &[], false),
        ("external Local has both", ExternalLocal, &["1 ready", "2 ready local"], &[1, 2], &[2], true),
        ("external Local, none here", ExternalLocal, &["1 ready"], &[1], &[], true),
        (
            "external Local, this node drains, others are ready",
            ExternalLocal,
            &["1 ready", "2 draining local"],
            &[1],
            &[2],
            true,
        ),
        (
            "external Local with hints",
            ExternalLocal,
            &["1 ready zone=a", "2 ready local zone=b"],
            &[1],
            &[2],
            true,
        ),
        (
            "both Local still keep Cluster for short cuts",
            BothLocal,
            &["1 ready", "2 ready local"],
            &[1, 2],
            &[2],
            true,
        ),
    ];
    let node = NodeFacts { name: "here".into(), zone: "a".into() };
    for (name, kind, endpoints, cluster, local, any) in rows {
        let endpoints: Vec<Endpoint> = endpoints.iter().map(|words| endpoint(words)).collect();
        let chosen = choose(&port(*kind), &endpoints, &node);
        let octets = |list: &[EndpointAddress]| -> Vec<u8> {
            list.iter()
                .map(|address| match address.ip {
                    std::net::IpAddr::V4(v4) => v4.octets()[3],
                    std::net::IpAddr::V6(_) => unreachable!("the table is IPv4"),
                })
                .collect()
        };
        assert_eq!(octets(&chosen.cluster), *cluster, "{name}: cluster");
        assert_eq!(octets(&chosen.local), *local, "{name}: local");
        assert_eq!(chosen.any, *any, "{name}: any");
        let here: BTreeSet<_> = endpoints.iter().filter(|e| e.local).map(|e| e.address).collect();
        let used: BTreeSet<_> = chosen.cluster.iter().chain(chosen.local.iter()).copied().collect();
        assert_eq!(chosen.on_this_node, used.intersection(&here).copied().collect(), "{name}: on this node");
    }
}

#[test]
fn a_node_without_a_zone_ignores_zone_hints() {
    let endpoints: Vec<Endpoint> = ["1 ready zone=a", "2 ready zone=b"].map(endpoint).into();
    let node = NodeFacts { name: "here".into(), zone: String::new() };
    assert_eq!(choose(&port(Kind::ClusterIp), &endpoints, &node).cluster.len(), 2);
}
