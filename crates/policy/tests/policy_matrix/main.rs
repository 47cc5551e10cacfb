//! The table against a plain reading of the policies, over generated policies, pods, namespaces and orders of events.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod kernel;
mod reference;

use std::net::IpAddr;

use ferrite_nft::IpFamily;
use ferrite_policy::engine::Engine;
use ferrite_policy::model::{Labels, Name, PodFacts, Policy};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value as Json, json};

use self::kernel::Kernel;
use self::reference::{Packet, World};

const NAMESPACES: [&str; 3] = ["red", "green", "blue"];

fn labels() -> impl Strategy<Value = Json> {
    (select(vec!["a", "b", "c"]), proptest::option::of(select(vec!["x", "y"]))).prop_map(|(app, tier)| {
        let mut labels = json!({"app": app});
        if let Some(tier) = tier {
            labels["tier"] = tier.into();
        }
        labels
    })
}

fn selector() -> impl Strategy<Value = Json> {
    prop_oneof![
        2 => Just(json!({})),
        3 => select(vec!["a", "b", "c"]).prop_map(|app| json!({"matchLabels": {"app": app}})),
        1 => Just(json!({"matchExpressions": [{"key": "tier", "operator": "Exists"}]})),
        1 => Just(json!({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]})),
        1 => Just(json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["a"]}]})),
        1 => Just(json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["b", "c"]}]})),
    ]
}

fn peer() -> impl Strategy<Value = Json> {
    prop_oneof![
        3 => selector().prop_map(|pods| json!({"podSelector": pods})),
        2 => selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        2 => (selector(), selector())
            .prop_map(|(namespaces, pods)| json!({"namespaceSelector": namespaces, "podSelector": pods})),
        2 => select(vec![
            json!({"ipBlock": {"cidr": "10.244.0.0/16"}}),
            json!({"ipBlock": {"cidr": "10.244.0.0/16", "except": ["10.244.0.0/30", "10.244.1.1/32"]}}),
            json!({"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}),
            json!({"ipBlock": {"cidr": "fd00::/8"}}),
        ]),
    ]
}

fn port() -> impl Strategy<Value = Json> {
    select(vec![
        json!({"port": 80}),
        json!({"port": 80, "protocol": "UDP"}),
        json!({"protocol": "UDP"}),
        json!({"protocol": "SCTP"}),
        json!({"port": 79, "endPort": 8080}),
        json!({"port": "web"}),
        json!({"port": "web", "protocol": "UDP"}),
        json!({"port": "other"}),
    ])
}

fn rules(peers: &'static str) -> impl Strategy<Value = Json> {
    let rule = (vec(peer(), 0..3), vec(port(), 0..3)).prop_map(move |(found, ports)| {
        let mut rule = json!({});
        if !found.is_empty() {
            rule[peers] = found.into();
        }
        if !ports.is_empty() {
            rule["ports"] = ports.into();
        }
        rule
    });
    vec(rule, 0..3).prop_map(Json::from)
}

fn policy() -> impl Strategy<Value = Json> {
    let types = subsequence(vec!["Ingress", "Egress"], 1..=2);
    (select(NAMESPACES.to_vec()), 0..3, selector(), types, rules("from"), rules("to")).prop_map(
        |(namespace, number, pods, types, ingress, egress)| {
            let mut spec = json!({"podSelector": pods, "policyTypes": types});
            if types.contains(&"Ingress") {
                spec["ingress"] = ingress;
            }
            if types.contains(&"Egress") {
                spec["egress"] = egress;
            }
            json!({"metadata": {"namespace": namespace, "name": format!("policy-{number}")}, "spec": spec})
        },
    )
}

/// Pods 0 to 4 are on this node, others elsewhere.
fn pod() -> impl Strategy<Value = Json> {
    let port = select(vec![80, 8080, 9000]);
    (0..8_u8, labels(), port, select(vec!["Running", "Running", "Running", "Succeeded"]), any::<bool>()).prop_map(
        |(number, labels, port, phase, known)| {
            let (node, last) = (number / 5, number % 5);
            let ips = if known { json!([{"ip": format!("10.244.{node}.{last}")}]) } else { json!([]) };
            json!({
                "metadata": {
                    "namespace": NAMESPACES[usize::from(number) % 3], "name": format!("pod-{number}"), "labels": labels,
                },
                "spec": {"containers": [{"name": "c", "ports": [{"name": "web", "containerPort": port}]}]},
                "status": {"phase": phase, "podIPs": ips},
            })
        },
    )
}

#[derive(Debug, Clone)]
enum Event {
    Policy(Json),
    PolicyGone(usize),
    Pod(Json),
    PodGone(usize),
    Namespace(usize, Json),
    NamespaceGone(usize),
    /// The kernel's table was flushed, or the process started again.
    Rebuild,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => policy().prop_map(Event::Policy),
        2 => any::<usize>().prop_map(Event::PolicyGone),
        10 => pod().prop_map(Event::Pod),
        2 => any::<usize>().prop_map(Event::PodGone),
        3 => (0..3_usize, labels()).prop_map(|(index, labels)| Event::Namespace(index, labels)),
        1 => (0..3_usize).prop_map(Event::NamespaceGone),
        1 => Just(Event::Rebuild),
    ]
}

fn name_of(object: &Json) -> Name {
    let text = |key: &str| object["metadata"][key].as_str().unwrap().to_owned();
    Name::new(text("namespace"), text("name"))
}

fn nth<T: Clone>(list: impl Iterator<Item = T>, index: usize) -> Option<T> {
    let all: Vec<T> = list.collect();
    all.get(index.checked_rem(all.len())?).cloned()
}

/// Tells engine and reference alike.
fn tell(engine: &mut Engine, world: &mut World, event: Event) {
    match event {
        Event::Policy(json) => {
            let object = serde_json::from_value(json.clone()).unwrap();
            engine.set_policy(&name_of(&json), Some(Policy::of(&object)));
            world.policies.insert(name_of(&json), object);
        }
        Event::PolicyGone(index) => {
            if let Some(name) = nth(world.policies.keys().cloned(), index) {
                engine.set_policy(&name, None);
                world.policies.remove(&name);
            }
        }
        Event::Pod(json) => {
            let object = serde_json::from_value(json.clone()).unwrap();
            engine.set_pod(&name_of(&json), Some(PodFacts::of(&object)));
            world.pods.insert(name_of(&json), object);
        }
        Event::PodGone(index) => {
            if let Some(name) = nth(world.pods.keys().cloned(), index) {
                engine.set_pod(&name, None);
                world.pods.remove(&name);
            }
        }
        Event::Namespace(index, labels) => {
            let labels: Labels = serde_json::from_value(labels).unwrap();
            engine.set_namespace(NAMESPACES[index], Some(labels.clone()));
            world.namespaces.insert(NAMESPACES[index].into(), labels);
        }
        Event::NamespaceGone(index) => {
            engine.set_namespace(NAMESPACES[index], None);
            world.namespaces.remove(NAMESPACES[index]);
        }
        Event::Rebuild => {}
    }
}

fn packets() -> Vec<Packet> {
    let mut addresses: Vec<String> = (0..5).map(|last| format!("10.244.0.{last}")).collect();
    addresses.extend((0..3).map(|last| format!("10.244.1.{last}")));
    addresses.push("192.0.2.9".into());
    let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
    let mut all = Vec::new();
    for source in &addresses {
        for destination in &addresses {
            for (protocol, port) in [(6, 80), (6, 8080), (6, 9000), (17, 80), (17, 53), (132, 80), (1, 0)] {
                all.push(Packet { source: *source, destination: *destination, protocol, port });
            }
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_table_allows_what_the_policies_allow(events in vec(vec(event(), 1..8), 1..6)) {
        let mut engine = Engine::new(IpFamily::V4, vec!["10.244.0.0/24".parse().unwrap()]);
        let mut kernel = Kernel::default();
        kernel.apply(&engine.rebuild());
        let mut world = World::default();
        for batch in events {
            let rebuild = batch.iter().any(|event| matches!(event, Event::Rebuild));
            for event in batch {
                tell(&mut engine, &mut world, event);
            }
            if rebuild {
                kernel.apply(&engine.rebuild());
            } else {
                kernel.apply(&engine.take_changes());
                engine.take_retired().iter().for_each(|name| kernel.delete_chain(name));
            }
            let wrong: Vec<String> = packets()
                .into_iter()
                .filter(|packet| kernel.allows(packet) != world.allows(packet, |ip| ip.to_string().starts_with("10.244.0.")))
                .map(|packet| format!("{packet:?}: the table says {}", kernel.allows(&packet)))
                .collect();
            prop_assert!(wrong.is_empty(), "{}\n{world:#?}", wrong.join("\n"));
        }
        // Without policies nothing is left.
        for name in world.policies.keys() {
            engine.set_policy(name, None);
        }
        kernel.apply(&engine.take_changes());
        engine.take_retired().iter().for_each(|name| kernel.delete_chain(name));
        prop_assert!(kernel.is_empty(), "{kernel:?}");
    }
}

#[test]
fn a_pod_is_covered_by_its_address_before_its_object_says_it() {
    let mut engine = Engine::new(IpFamily::V4, vec!["10.244.0.0/24".parse().unwrap()]);
    let mut kernel = Kernel::default();
    let deny = json!({"metadata": {"namespace": "red", "name": "deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
    engine.set_policy(&name_of(&deny), Some(Policy::of(&serde_json::from_value(deny.clone()).unwrap())));
    kernel.apply(&engine.rebuild());
    let packet =
        Packet { source: [10, 244, 0, 9].into(), destination: [10, 244, 0, 2].into(), protocol: 6, port: 80 };
    assert!(kernel.allows(&packet));

    // Not even the object is known.
    let new = Name::new("red", "new");
    engine.set_attached(&new, &[packet.destination]);
    let changes = engine.take_changes();
    kernel.apply(&changes);
    assert!(!kernel.allows(&packet));

    // Another pod's object still claims the address: the link decides.
    let late = json!({"metadata": {"namespace": "blue", "name": "old"}, "spec": {"containers": []},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.244.0.2"}]}});
    engine.set_pod(&name_of(&late), Some(PodFacts::of(&serde_json::from_value(late.clone()).unwrap())));
    kernel.apply(&engine.take_changes());
    assert!(!kernel.allows(&packet));

    engine.set_attached(&new, &[]);
    kernel.apply(&engine.take_changes());
    assert!(kernel.allows(&packet));
}

/// Plugins give pods addresses of ranges that the node does not know.
#[test]
fn a_pod_of_another_range_is_judged_on_its_node() {
    let mut kernel = Kernel::default();
    let mut engine =
        Engine::new(IpFamily::V4, vec!["10.244.0.0/24".parse().unwrap()]).of_node(Some("here".into()));
    let deny = json!({"metadata": {"namespace": "red", "name": "deny"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
    engine.set_policy(&name_of(&deny), Some(Policy::of(&serde_json::from_value(deny.clone()).unwrap())));
    kernel.apply(&engine.rebuild());
    let to = |last: u8| Packet {
        source: [10, 244, 0, 9].into(),
        destination: [10, 22, 0, last].into(),
        protocol: 6,
        port: 80,
    };
    // A link that was just made.
    let new = Name::new("red", "new");
    engine.set_attached(&new, &[to(2).destination]);
    // Pods of an earlier process, here and elsewhere.
    for (name, node, last) in [("old", "here", 3), ("far", "there", 4)] {
        let pod = json!({"metadata": {"namespace": "red", "name": name}, "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "podIPs": [{"ip": format!("10.22.0.{last}")}]}});
        engine.set_pod(&name_of(&pod), Some(PodFacts::of(&serde_json::from_value(pod.clone()).unwrap())));
    }
    kernel.apply(&engine.take_changes());
    for (last, allowed) in [(2, false), (3, false), (4, true)] {
        assert_eq!(kernel.allows(&to(last)), allowed, "10.22.0.{last}");
    }
    // A policy that goes takes its rules from all of them.
    engine.set_policy(&name_of(&deny), None);
    kernel.apply(&engine.take_changes());
    assert!(kernel.allows(&to(2)) && kernel.allows(&to(3)));
}

#[test]
fn a_new_pod_costs_its_own_elements() {
    let mut engine = Engine::new(IpFamily::V4, vec!["10.244.0.0/24".parse().unwrap()]);
    for number in 0..100 {
        let policy = json!({"metadata": {"namespace": "red", "name": format!("p{number}")}, "spec": {
            "podSelector": {"matchLabels": {"app": format!("{number}")}}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": format!("{}", number + 1)}}}]}]}});
        engine.set_policy(
            &name_of(&policy),
            Some(Policy::of(&serde_json::from_value(policy.clone()).unwrap())),
        );
    }
    let pod = |name: &str, app: &str, last: u8| {
        let json = json!({"metadata": {"namespace": "red", "name": name, "labels": {"app": app}},
            "spec": {"containers": []}, "status": {"phase": "Running", "podIPs": [{"ip": format!("10.244.0.{last}")}]}});
        (name_of(&json), PodFacts::of(&serde_json::from_value(json.clone()).unwrap()))
    };
    for number in 1..100_u8 {
        let (name, facts) = pod(&format!("pod-{number}"), &number.to_string(), number);
        engine.set_pod(&name, Some(facts));
    }
    engine.rebuild();
    let (name, facts) = pod("another", "50", 200);
    engine.set_pod(&name, Some(facts.clone()));
    let changes = engine.take_changes();
    assert!(changes.chains.is_empty() && changes.delete.is_empty(), "{changes:?}");
    // Its class, itself, and its membership in the one group that rules use.
    assert_eq!(changes.add.len(), 3, "{changes:?}");
    engine.set_pod(&name, Some(facts));
    assert!(engine.take_changes().is_empty());
}
