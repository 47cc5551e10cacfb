use super::*;

#[test]
fn names_are_parsed_from_the_right() {
    use Request::*;
    for (name, want) in [
        ("", Apex),
        ("svc", Apex),
        ("pod", Apex),
        ("a.svc", Namespace("a")),
        ("a.pod", Namespace("a")),
        ("b.a.svc", Service { namespace: "a", service: "b", part: Part::Whole }),
        ("1-2-3-4.a.pod", Pod { namespace: "a", address: "1-2-3-4" }),
        ("c.b.a.svc", Service { namespace: "a", service: "b", part: Part::Endpoint("c") }),
        (
            "_c._tcp.b.a.svc",
            Service { namespace: "a", service: "b", part: Part::Port { port: "c", protocol: "tcp" } },
        ),
        ("e.d.c.b.a.svc", Invalid),
        ("c.b.a.pod", Invalid),
        ("a.other", Invalid),
        ("other", Invalid),
    ] {
        let labels: Vec<&str> = name.split('.').filter(|label| !label.is_empty()).collect();
        assert_eq!(Request::parse(&labels), want, "{name}");
    }
}

#[test]
fn labels_of_addresses() {
    for (ip, label) in [
        ("10.0.0.1", "10-0-0-1"),
        ("fd00::1", "fd00--1"),
        ("fd00::", "fd00--0"),
        ("::1", "0--1"),
        ("::", "0--0"),
    ] {
        let ip: IpAddr = ip.parse().unwrap();
        assert_eq!(dashed(ip), label);
        assert_eq!(pod_address(label), Some(ip), "{label}");
    }
    for label in ["", "x", "1-2-3", "1-2-3-4-5", "300-1-1-1", "---"] {
        assert_eq!(pod_address(label), None, "{label}");
    }
}

#[test]
fn nothing_is_left_of_objects_that_are_gone() {
    let mut index = Index::default();
    let service: core::Service = ferrite_json::from_value(ferrite_json::json!({
        "metadata": {"namespace": "a", "name": "b"}, "spec": {"clusterIP": "10.0.0.1", "ports": [{"port": 1}]}}))
    .unwrap();
    let slice: discovery::EndpointSlice = ferrite_json::from_value(ferrite_json::json!({
        "metadata": {"namespace": "a", "name": "b-1", "labels": {"kubernetes.io/service-name": "b"}},
        "addressType": "IPv4", "endpoints": [{"addresses": ["10.1.0.1"], "hostname": "h"}]}))
    .unwrap();
    index.apply_slice(&slice);
    index.apply_service(&service);
    index.apply_namespace("a");
    assert_eq!(index.names_of("10.1.0.1".parse().unwrap()).len(), 1);
    index.remove_namespace("a");
    index.remove_service(&service);
    index.remove_slice(&slice);
    assert!(index.namespaces.is_empty() && index.cluster_ips.is_empty() && index.endpoint_ips.is_empty());
}

#[test]
fn ports_and_endpoints_do_not_multiply() {
    let mut index = Index::default();
    let service: core::Service = ferrite_json::from_value(ferrite_json::json!({
        "metadata": {"namespace": "a", "name": "b"}, "spec": {"clusterIP": "None"}}))
    .unwrap();
    let ports: Vec<_> = (1..=20_000)
        .map(|port| ferrite_json::json!({"name": format!("p{port}"), "port": port, "protocol": "TCP"}))
        .collect();
    let endpoints: Vec<_> = (0..1000u32)
        .map(|number| {
            let address = std::net::Ipv4Addr::from(0x0a01_0000 + number).to_string();
            ferrite_json::json!({ "addresses": [address] })
        })
        .collect();
    let slice: discovery::EndpointSlice = ferrite_json::from_value(ferrite_json::json!({
        "metadata": {"namespace": "a", "name": "b-1", "labels": {"kubernetes.io/service-name": "b"}},
        "addressType": "IPv4", "ports": ports, "endpoints": endpoints}))
    .unwrap();
    index.apply_namespace("a");
    index.apply_service(&service);
    index.apply_slice(&slice);
    let count =
        |part, wanted| match index.find(Request::Service { namespace: "a", service: "b", part }, wanted) {
            Ok(Found::Items(items)) => items.len(),
            other => panic!("{other:?}"),
        };
    let port = Part::Port { port: "p7", protocol: "tcp" };
    assert_eq!(count(Part::Whole, Wanted::Addresses), 1000, "each address once");
    assert_eq!(count(port, Wanted::Addresses), 1000);
    assert_eq!(count(port, Wanted::Ports), 1000);
    assert_eq!(count(Part::Whole, Wanted::Ports), PORT_ITEMS, "no more than a reply has room for");
}
