//! Rows that read like the Kubernetes DNS specification, schema version 1.1.

use super::*;
use crate::wire::{Edns, encode};
use ferrite_json::{Value, from_value, json};
use hickory_proto::op::Message;

fn service(name: &str, spec: Value) -> k8s_openapi::api::core::v1::Service {
    from_value(json!({"metadata": {"namespace": "ns", "name": name}, "spec": spec})).unwrap()
}

fn slice(
    name: &str,
    service: &str,
    ports: Value,
    endpoints: Value,
) -> k8s_openapi::api::discovery::v1::EndpointSlice {
    from_value(json!({
        "metadata": {"namespace": "ns", "name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4", "ports": ports, "endpoints": endpoints,
    }))
    .unwrap()
}

fn index() -> Index {
    let mut index = Index::default();
    for namespace in ["ns", "empty", "kube-system"] {
        index.apply_namespace(namespace);
    }
    index.apply_service(&service(
        "web",
        json!({"clusterIP": "10.96.0.20", "clusterIPs": ["10.96.0.20", "fd00::20"], "ports": [
            {"name": "http", "protocol": "TCP", "port": 80}, {"name": "dns", "protocol": "UDP", "port": 53}]}),
    ));
    index.apply_service(&service("bare", json!({"clusterIP": "10.96.0.21", "ports": [{"port": 8080}]})));
    index.apply_service(&service(
        "set",
        json!({"clusterIP": "None", "ports": [{"name": "db", "port": 5432}]}),
    ));
    index.apply_service(&service("noports", json!({"clusterIP": "None"})));
    index.apply_service(&service("unready", json!({"clusterIP": "None"})));
    index.apply_service(&service("out", json!({"type": "ExternalName", "externalName": "www.Example.com"})));
    index.apply_service(&service(
        "in",
        json!({"type": "ExternalName", "externalName": "web.ns.svc.cluster.local"}),
    ));
    index.apply_service(&service(
        "far",
        json!({"type": "ExternalName", "externalName": "in.ns.svc.cluster.local."}),
    ));
    index.apply_service(&service(
        "lost",
        json!({"type": "ExternalName", "externalName": "no.ns.svc.cluster.local"}),
    ));
    index.apply_service(&service(
        "loop1",
        json!({"type": "ExternalName", "externalName": "loop2.ns.svc.cluster.local"}),
    ));
    index.apply_service(&service(
        "loop2",
        json!({"type": "ExternalName", "externalName": "loop1.ns.svc.cluster.local"}),
    ));
    index.apply_service(&service("ipname", json!({"type": "ExternalName", "externalName": "192.0.2.1"})));
    let port = json!([{"name": "db", "protocol": "TCP", "port": 5432}]);
    index.apply_slice(&slice(
        "set-1",
        "set",
        port.clone(),
        json!([
            {"addresses": ["10.244.0.5"], "hostname": "set-0", "conditions": {"ready": true}},
            {"addresses": ["10.244.0.6"], "conditions": {}},
            {"addresses": ["10.244.0.7"], "hostname": "set-2", "conditions": {"ready": false}},
        ]),
    ));
    index.apply_slice(&slice(
        "set-2",
        "set",
        port.clone(),
        json!([{"addresses": ["fd00:1::5"], "hostname": "set-0"}]),
    ));
    index.apply_slice(&slice("set-3", "set", port.clone(), json!([{"addresses": ["::1:0"]}])));
    index.apply_slice(&slice("web-1", "web", port, json!([{"addresses": ["10.244.0.8"]}])));
    index.apply_slice(&slice("noports-1", "noports", json!([]), json!([{"addresses": ["10.244.0.9"]}])));
    index.apply_slice(&slice(
        "unready-1",
        "unready",
        json!([]),
        json!([{"addresses": ["10.244.0.9"], "conditions": {"ready": false}}]),
    ));
    index
}

fn query(name: &str, kind: &str) -> Query {
    let mut name = Name::from_labels(name.split('.').filter(|l| !l.is_empty()).map(str::as_bytes)).unwrap();
    name.set_fqdn(true);
    let kind: RecordType = kind.parse().unwrap();
    Query {
        id: 7,
        name,
        kind,
        recursion_desired: true,
        checking_disabled: false,
        authentic_data: false,
        edns: Some(Edns { size: 1232, dnssec_ok: false }),
    }
}

fn answer_with(index: &Index, synced: bool, query: &Query) -> Answer {
    let zone = Zone::new("cluster.local", vec!["10.244.0.1".parse().unwrap()]).unwrap();
    Context { zone: &zone, index, synced, serial: 42, turn: 0 }.answer(query)
}

/// One line: the code, the answers' data, and the additional records after a `+`.
fn show(answer: &Answer) -> String {
    let data = |records: &[Record]| {
        let mut lines: Vec<String> =
            records.iter().map(|r| format!("{} {}", r.record_type(), r.data)).collect();
        lines.sort();
        lines.join(", ")
    };
    match answer {
        Answer::Forward => "forward".into(),
        Answer::Alias { records, target } => format!("{} -> {target}", data(records)),
        Answer::Local(response) => {
            assert!(response.authoritative);
            let mut text = match response.code {
                ResponseCode::NXDomain => "NXDOMAIN".to_owned(),
                ResponseCode::NoError if response.answers.is_empty() => "NODATA".to_owned(),
                ResponseCode::NoError => data(&response.answers),
                other => format!("{other:?}"),
            };
            if response.answers.is_empty() {
                assert_eq!(response.authorities[0].record_type(), RecordType::SOA, "{text}");
            }
            if !response.additionals.is_empty() {
                text.push_str(&format!(" + {}", data(&response.additionals)));
            }
            text
        }
    }
}

#[test]
fn the_specification() {
    let index = index();
    for (name, kind, want) in [
        // 2.2
        ("dns-version.cluster.local", "TXT", "TXT 1.1.0"),
        ("dns-version.cluster.local", "A", "NODATA"),
        // 2.3: services with a ClusterIP
        ("web.ns.svc.cluster.local", "A", "A 10.96.0.20"),
        ("web.ns.svc.cluster.local", "AAAA", "AAAA fd00::20"),
        ("WEB.Ns.sVc.CLUSTER.local", "A", "A 10.96.0.20"),
        ("bare.ns.svc.cluster.local", "AAAA", "NODATA"),
        ("web.ns.svc.cluster.local", "MX", "NODATA"),
        ("web.ns.svc.cluster.local", "TXT", "NODATA"),
        ("web.ns.svc.cluster.local", "CNAME", "NODATA"),
        ("web.ns.svc.cluster.local", "ANY", "NODATA"),
        (
            "_http._tcp.web.ns.svc.cluster.local",
            "SRV",
            "SRV 0 50 80 web.ns.svc.cluster.local. + A 10.96.0.20, AAAA fd00::20",
        ),
        (
            "_dns._udp.web.ns.svc.cluster.local",
            "SRV",
            "SRV 0 50 53 web.ns.svc.cluster.local. + A 10.96.0.20, AAAA fd00::20",
        ),
        ("_dns._tcp.web.ns.svc.cluster.local", "SRV", "NXDOMAIN"),
        ("_nope._tcp.web.ns.svc.cluster.local", "SRV", "NXDOMAIN"),
        ("bare.ns.svc.cluster.local", "SRV", "SRV 0 100 8080 bare.ns.svc.cluster.local. + A 10.96.0.21"),
        // 2.4: headless services
        ("set.ns.svc.cluster.local", "A", "A 10.244.0.5, A 10.244.0.6"),
        ("set.ns.svc.cluster.local", "AAAA", "AAAA ::1:0, AAAA fd00:1::5"),
        ("set-0.set.ns.svc.cluster.local", "A", "A 10.244.0.5"),
        ("set-0.set.ns.svc.cluster.local", "AAAA", "AAAA fd00:1::5"),
        ("10-244-0-6.set.ns.svc.cluster.local", "A", "A 10.244.0.6"),
        ("set-2.set.ns.svc.cluster.local", "A", "NXDOMAIN"),
        ("10-244-0-8.web.ns.svc.cluster.local", "A", "A 10.244.0.8"),
        (
            "_db._tcp.set.ns.svc.cluster.local",
            "SRV",
            "SRV 0 25 5432 0--1-0.set.ns.svc.cluster.local., SRV 0 25 5432 10-244-0-6.set.ns.svc.cluster.local., SRV 0 25 5432 set-0.set.ns.svc.cluster.local. + A 10.244.0.5, A 10.244.0.6, AAAA ::1:0, AAAA fd00:1::5",
        ),
        ("noports.ns.svc.cluster.local", "A", "A 10.244.0.9"),
        ("noports.ns.svc.cluster.local", "SRV", "NODATA"),
        ("unready.ns.svc.cluster.local", "A", "NXDOMAIN"),
        // 2.5: external names
        ("out.ns.svc.cluster.local", "A", "CNAME www.example.com. -> www.example.com."),
        ("out.ns.svc.cluster.local", "CNAME", "CNAME www.example.com."),
        ("out.ns.svc.cluster.local", "SRV", "NODATA"),
        ("x.out.ns.svc.cluster.local", "A", "NXDOMAIN"),
        ("in.ns.svc.cluster.local", "A", "A 10.96.0.20, CNAME web.ns.svc.cluster.local."),
        (
            "far.ns.svc.cluster.local",
            "AAAA",
            "AAAA fd00::20, CNAME in.ns.svc.cluster.local., CNAME web.ns.svc.cluster.local.",
        ),
        ("lost.ns.svc.cluster.local", "A", "NODATA"),
        ("loop1.ns.svc.cluster.local", "A", "NODATA"),
        ("ipname.ns.svc.cluster.local", "A", "NXDOMAIN"),
        // Pods
        ("10-244-0-200.ns.pod.cluster.local", "A", "A 10.244.0.200"),
        ("10-244-0-200.ns.pod.cluster.local", "AAAA", "NODATA"),
        ("fd00-1--5.ns.pod.cluster.local", "AAAA", "AAAA fd00:1::5"),
        ("10-244-0-200.nowhere.pod.cluster.local", "A", "NXDOMAIN"),
        ("nonsense.ns.pod.cluster.local", "A", "NXDOMAIN"),
        // Names that exist without records, and names that do not
        ("cluster.local", "A", "NODATA"),
        ("svc.cluster.local", "A", "NODATA"),
        ("pod.cluster.local", "TXT", "NODATA"),
        ("ns.svc.cluster.local", "A", "NODATA"),
        ("empty.svc.cluster.local", "A", "NODATA"),
        ("nowhere.svc.cluster.local", "A", "NXDOMAIN"),
        ("x.empty.svc.cluster.local", "A", "NXDOMAIN"),
        ("other.cluster.local", "A", "NXDOMAIN"),
        ("a.b.c.web.ns.svc.cluster.local", "A", "NXDOMAIN"),
        // Wildcards are names like others
        ("*.ns.svc.cluster.local", "A", "NXDOMAIN"),
        ("web.*.svc.cluster.local", "A", "NXDOMAIN"),
        ("*.set.ns.svc.cluster.local", "A", "NXDOMAIN"),
        ("_*._tcp.web.ns.svc.cluster.local", "SRV", "NXDOMAIN"),
        // The zone
        ("cluster.local", "SOA", "SOA ns.dns.cluster.local. hostmaster.cluster.local. 42 7200 1800 86400 30"),
        ("web.ns.svc.cluster.local", "SOA", "NODATA"),
        ("cluster.local", "NS", "NS ns.dns.cluster.local. + A 10.244.0.1"),
        ("ns.dns.cluster.local", "A", "A 10.244.0.1"),
        // Addresses
        ("20.0.96.10.in-addr.arpa", "PTR", "PTR web.ns.svc.cluster.local."),
        ("5.0.244.10.in-addr.arpa", "PTR", "PTR set-0.set.ns.svc.cluster.local."),
        ("6.0.244.10.in-addr.arpa", "PTR", "forward"),
        ("0.96.10.in-addr.arpa", "PTR", "forward"),
        (
            "0.2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa",
            "PTR",
            "PTR web.ns.svc.cluster.local.",
        ),
        // Other names
        ("example.com", "A", "forward"),
        ("notcluster.local", "A", "forward"),
        ("web.ns.svc", "A", "forward"),
        (".", "NS", "forward"),
    ] {
        assert_eq!(show(&answer_with(&index, true, &query(name, kind))), want, "{name} {kind}");
    }
}

#[test]
fn the_servers_own_service_is_the_name_server() {
    let mut index = index();
    let own = json!({"metadata": {"namespace": "kube-system", "name": "kube-dns"},
        "spec": {"clusterIPs": ["10.96.0.10"], "ports": [{"port": 53}]}});
    index.apply_service(&from_value(own).unwrap());
    let show = |name, kind| show(&answer_with(&index, true, &query(name, kind)));
    assert_eq!(show("cluster.local", "NS"), "NS kube-dns.kube-system.svc.cluster.local. + A 10.96.0.10");
    assert_eq!(show("ns.dns.cluster.local", "A"), "A 10.96.0.10");
    assert_eq!(show("ns.dns.cluster.local", "AAAA"), "NODATA");
}

#[test]
fn changes_take_effect_one_by_one() {
    let mut index = index();
    let a = |index: &Index, name: &str| show(&answer_with(index, true, &query(name, "A")));
    let name = "web.ns.svc.cluster.local";
    index.apply_service(&service("web", json!({"clusterIP": "10.96.0.99", "ports": [{"port": 80}]})));
    assert_eq!(a(&index, name), "A 10.96.0.99");
    let ptr = |index: &Index, name: &str| show(&answer_with(index, true, &query(name, "PTR")));
    assert_eq!(ptr(&index, "20.0.96.10.in-addr.arpa"), "forward");
    assert_eq!(ptr(&index, "99.0.96.10.in-addr.arpa"), "PTR web.ns.svc.cluster.local.");
    index.remove_service(&service("web", json!({})));
    assert_eq!(a(&index, name), "NXDOMAIN");
    assert_eq!(ptr(&index, "99.0.96.10.in-addr.arpa"), "forward");

    let moved =
        slice("set-1", "set", json!([]), json!([{"addresses": ["10.244.0.50"], "hostname": "set-9"}]));
    index.apply_slice(&moved);
    assert_eq!(a(&index, "set.ns.svc.cluster.local"), "A 10.244.0.50");
    assert_eq!(ptr(&index, "5.0.244.10.in-addr.arpa"), "forward");
    index.remove_slice(&moved);
    assert_eq!(a(&index, "set-9.set.ns.svc.cluster.local"), "NXDOMAIN");
    // Only the two IPv6 slices are left.
    assert_eq!(a(&index, "set.ns.svc.cluster.local"), "NODATA");
    index.remove_namespace("ns");
    assert_eq!(a(&index, "set.ns.svc.cluster.local"), "NXDOMAIN");
    assert_eq!(a(&index, "1-2-3-4.ns.pod.cluster.local"), "NXDOMAIN");
}

#[test]
fn before_everything_is_known_nothing_is_denied() {
    let index = Index::default();
    assert_eq!(show(&answer_with(&index, false, &query("web.ns.svc.cluster.local", "A"))), "ServFail");
    assert_eq!(show(&answer_with(&index, false, &query("svc.cluster.local", "A"))), "NODATA");
}

#[test]
fn addresses_take_turns() {
    let mut index = Index::default();
    index.apply_namespace("ns");
    index.apply_service(&service("set", json!({"clusterIP": "None"})));
    let endpoints =
        json!([{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}, {"addresses": ["10.0.0.3"]}]);
    index.apply_slice(&slice("s", "set", json!([]), endpoints));
    let zone = Zone::new("cluster.local.", Vec::new()).unwrap();
    let first = |turn| {
        let context = Context { zone: &zone, index: &index, synced: true, serial: 1, turn };
        match context.answer(&query("set.ns.svc.cluster.local", "A")) {
            Answer::Local(response) => response.answers[0].data.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!([first(0), first(1), first(2), first(3)], ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]);
}

#[test]
fn answers_keep_the_case_of_the_query_and_have_the_ttl_of_the_corefile() {
    let query = query("WeB.nS.svc.ClusteR.Local", "A");
    let Answer::Local(response) = answer_with(&index(), true, &query) else { panic!() };
    let message = Message::from_vec(&encode(&query, &response, 512)).unwrap();
    assert_eq!(message.answers[0].name.to_string(), "WeB.nS.svc.ClusteR.Local.");
    assert_eq!(message.answers[0].ttl, 30);
    assert!(message.metadata.authoritative && message.metadata.recursion_desired);
    let Answer::Local(denied) = answer_with(&index(), true, &self::query("No.ns.svc.Cluster.LOCAL", "A"))
    else {
        panic!()
    };
    let soa = &denied.authorities[0];
    assert_eq!((soa.name.to_string().as_str(), soa.ttl), ("Cluster.LOCAL.", 30));
}

#[test]
fn large_answers_are_cut_and_say_so() {
    let mut index = Index::default();
    index.apply_namespace("ns");
    index.apply_service(&service("set", json!({"clusterIP": "None"})));
    let endpoints: Vec<Value> = (1..=200).map(|n| json!({"addresses": [format!("10.0.0.{n}")]})).collect();
    index.apply_slice(&slice("s", "set", json!([{"name": "p", "port": 1}]), json!(endpoints)));
    for (edns, kind) in [(None, "A"), (Some(Edns { size: 1232, dnssec_ok: true }), "A"), (None, "SRV")] {
        let query = Query { edns, ..query("set.ns.svc.cluster.local", kind) };
        let Answer::Local(response) = answer_with(&index, true, &query) else { panic!() };
        let limit = query.udp_limit();
        let bytes = encode(&query, &response, limit);
        assert!(bytes.len() <= usize::from(limit), "{}", bytes.len());
        let message = Message::from_vec(&bytes).unwrap();
        assert!(message.metadata.truncation && !message.answers.is_empty());
        let flags = message.edns.as_ref().map(|e| (e.flags().dnssec_ok, e.max_payload()));
        assert_eq!(flags, edns.map(|e| (e.dnssec_ok, e.size)));
        let whole = Message::from_vec(&encode(&query, &response, u16::MAX)).unwrap();
        assert!(!whole.metadata.truncation);
        assert_eq!(whole.answers.len(), 200);
    }
}
