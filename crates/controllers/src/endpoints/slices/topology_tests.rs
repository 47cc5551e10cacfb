use ferrite_json::{Value, json};

use super::*;

fn node(zone: &str, cpu: &str, ready: &str, label: &str) -> Node {
    let mut labels = json!({label: ""});
    if !zone.is_empty() {
        labels["topology.kubernetes.io/zone"] = json!(zone);
    }
    ferrite_json::from_value(json!({"metadata": {"labels": labels}, "status": {"allocatable": {"cpu": cpu},
        "conditions": [{"type": "Ready", "status": ready}]}}))
    .unwrap()
}

fn zones<T: Copy>(all: &[(&str, T)]) -> Zones<T> {
    all.iter().map(|(zone, value)| ((*zone).to_owned(), *value)).collect()
}

/// A slice of endpoints: the zone of each, the zone of its hint, and if it is ready.
fn slice(all: &[(&str, &str, bool)]) -> EndpointSlice {
    let endpoint = |(zone, hint, ready): &(&str, &str, bool)| -> Value {
        let hints = (!hint.is_empty()).then(|| json!({"forZones": [{"name": *hint}]}));
        let zone = (!zone.is_empty()).then_some(*zone);
        json!({"addresses": ["192.0.2.1"], "zone": zone, "hints": hints, "conditions": {"ready": *ready}})
    };
    let endpoints: Vec<Value> = all.iter().map(endpoint).collect();
    ferrite_json::from_value(json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints})).unwrap()
}

fn hints(slices: &[EndpointSlice]) -> Vec<String> {
    let endpoints = slices.iter().flat_map(endpoints);
    let hint = |endpoint: &Endpoint| {
        let zones = endpoint.hints.as_ref().and_then(|hints| hints.for_zones.clone());
        zones.unwrap_or_default().first().map_or(String::new(), |zone| zone.name.clone())
    };
    endpoints.map(hint).collect()
}

#[test]
fn services_ask_by_annotation() {
    for (annotations, expected) in [
        (json!({}), false),
        (json!({"service.kubernetes.io/topology-mode": "Auto"}), true),
        (json!({"service.kubernetes.io/topology-mode": "Disabled"}), false),
        (json!({"service.kubernetes.io/topology-aware-hints": "auto"}), true),
        (
            json!({"service.kubernetes.io/topology-aware-hints": "x", "service.kubernetes.io/topology-mode": "Auto"}),
            false,
        ),
    ] {
        let service = json!({"metadata": {"annotations": annotations}});
        assert_eq!(is_auto(&ferrite_json::from_value(service.clone()).unwrap()), expected, "{service}");
    }
}

#[test]
fn zones_share_by_their_cpus() {
    let plain = |zone: &str, cpu: &str| node(zone, cpu, "True", "x");
    for (case, nodes, expected) in [
        (
            "two zones",
            vec![plain("a", "3"), plain("b", "500m"), plain("b", "500m")],
            Some(zones(&[("a", 0.75), ("b", 0.25)])),
        ),
        ("one zone", vec![plain("a", "3")], None),
        ("a node without a zone", vec![plain("a", "1"), plain("b", "1"), plain("", "1")], None),
        ("a node without CPUs", vec![plain("a", "1"), plain("b", "0")], None),
        (
            "nodes that do not count",
            vec![
                plain("a", "1"),
                plain("b", "1"),
                node("", "1", "False", "x"),
                node("c", "1", "True", "node-role.kubernetes.io/control-plane"),
            ],
            Some(zones(&[("a", 0.5), ("b", 0.5)])),
        ),
    ] {
        assert_eq!(ratios(nodes.iter()), expected, "{case}");
    }
    assert!(
        differs(&plain("a", "1"), &plain("b", "1"))
            && differs(&plain("a", "1"), &node("a", "1", "False", "x"))
    );
    assert!(!differs(&plain("a", "1"), &node("a", "1", "True", "y")));
}

#[test]
fn endpoints_serve_their_own_zone_and_help_out_elsewhere() {
    let ratios = zones(&[("a", 0.5), ("b", 0.5)]);
    for (case, all, expected, counts) in [
        (
            "even",
            vec![("a", "", true), ("b", "", true), ("b", "", false)],
            vec!["a", "b", ""],
            zones(&[("a", 1), ("b", 1)]),
        ),
        (
            "uneven",
            vec![("a", "", true), ("a", "", true), ("a", "", true), ("a", "", true)],
            vec!["b", "b", "a", "a"],
            zones(&[("a", 2), ("b", 2)]),
        ),
        (
            "a zone without nodes",
            vec![("a", "", true), ("b", "", true), ("c", "", true), ("c", "", true)],
            vec!["a", "b", "c", "c"],
            zones(&[("a", 1), ("b", 1), ("c", 2)]),
        ),
    ] {
        let mut slices = Slices { create: vec![slice(&all)], ..Slices::default() };
        assert_eq!(slices.add_hints(Some(&ratios)), Ok(counts), "{case}");
        assert_eq!(hints(&slices.create), expected, "{case}");
    }
}

#[test]
fn slices_with_good_hints_stay() {
    let ratios = zones(&[("a", 0.5), ("b", 0.5)]);
    let good = slice(&[("a", "a", true), ("b", "b", true), ("b", "", false)]);
    let bad = slice(&[("a", "c", true), ("b", "b", true)]);
    let mut slices = Slices { unchanged: vec![good.clone(), bad], ..Slices::default() };
    assert_eq!(slices.add_hints(Some(&ratios)), Ok(zones(&[("a", 2), ("b", 2)])));
    assert_eq!(slices.unchanged, std::slice::from_ref(&good));
    assert_eq!(hints(&slices.update), ["a", "b"]);
    // Too many hints for one zone.
    let full = slice(&[("a", "a", true), ("a", "a", true), ("b", "a", true), ("b", "a", true)]);
    let mut slices = Slices { unchanged: vec![full], ..Slices::default() };
    assert_eq!(slices.add_hints(Some(&ratios)), Ok(zones(&[("a", 2), ("b", 2)])));
    assert_eq!(hints(&slices.update), ["a", "a", "b", "b"]);
}

#[test]
fn hints_go_where_they_would_do_harm() {
    let even = zones(&[("a", 0.5), ("b", 0.5)]);
    let skewed = zones(&[("a", 0.01), ("b", 0.01), ("c", 0.98)]);
    let one = [("a", "a", true)];
    let three = [("a", "a", true), ("b", "b", true), ("c", "c", true)];
    for (all, ratios, expected) in [
        (&one[..], Some(&even), "Insufficient number of endpoints (1 endpoints, 2 zones)"),
        (
            &three[..],
            Some(&skewed),
            "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold (3 endpoints, 3 zones)",
        ),
        (
            &three[..],
            None,
            "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes",
        ),
    ] {
        let mut slices =
            Slices { unchanged: vec![slice(all), slice(&[("a", "", false)])], ..Slices::default() };
        assert_eq!(slices.add_hints(ratios).unwrap_err().to_string(), expected);
        assert!(hints(&slices.update).iter().all(String::is_empty));
        assert_eq!((slices.update.len(), slices.unchanged.len()), (1, 1), "only slices with hints change");
    }
    let mut slices = Slices { create: vec![slice(&[("a", "", true), ("", "", true)])], ..Slices::default() };
    assert_eq!(slices.add_hints(Some(&even)), Err(Refusal::NoZone));
    assert_eq!(hints(&slices.create), ["", ""]);
}

#[test]
fn a_change_of_the_zones_wakes_the_services_that_suffer() {
    let topology = Topology::default();
    let (even, other) = (ObjectKey::new("ns", "even"), ObjectKey::new("ns", "other"));
    let halves = || Some(zones(&[("a", 0.5), ("b", 0.5)]));
    assert_eq!(topology.ratios(halves), halves());
    assert_eq!(topology.ratios(|| None), halves(), "known");
    assert!(topology.changed(|| unreachable!("nobody has hints")).is_empty());
    assert_eq!(topology.ratios(|| None), None);
    assert!(topology.set_hints(&even, "IPv4", zones(&[("a", 4), ("b", 4)])));
    assert!(!topology.set_hints(&even, "IPv6", zones(&[("a", 4), ("b", 4)])));
    assert!(topology.set_hints(&other, "IPv4", zones(&[("a", 1), ("b", 8)])));
    assert!(topology.changed(|| Some(zones(&[("a", 0.1), ("b", 0.9)]))).contains(&even));
    assert_eq!(topology.changed(halves), std::slice::from_ref(&other));
    assert_eq!(topology.changed(|| None).len(), 2);
    assert!(topology.remove_hints(&even, "IPv4") && topology.remove_hints(&even, "IPv6"));
    assert!(!topology.remove_hints(&even, "IPv4"));
    topology.forget(&other);
    assert!(topology.changed(halves).is_empty());
}
