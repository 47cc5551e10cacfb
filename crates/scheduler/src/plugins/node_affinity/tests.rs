use ferrite_api::field::Path;
use ferrite_json::{Value, json};

use super::*;
use crate::framework::Plugin;

fn node(name: &str, labels: Value) -> NodeInfo {
    let node = json!({"metadata": {"name": name, "labels": labels}});
    NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()))
}

fn pod(spec: Value) -> PodInfo {
    PodInfo::new(&ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap())
}

fn plugin(args: Value) -> Arc<dyn Plugin> {
    new(&PluginArgs::new(args, Path::new("args")), &Handle::default()).unwrap()
}

fn labelled(key: &str, value: &str) -> Value {
    json!({"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]})
}

fn named(names: &[&str]) -> Value {
    json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": names}]})
}

fn required(terms: Value) -> Value {
    json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}})
}

fn preferred(weight: i32, term: &Value) -> Value {
    json!({"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": weight, "preference": term}]})
}

fn with_affinity(affinity: Value) -> PodInfo {
    pod(json!({"containers": [], "affinity": {"nodeAffinity": affinity}}))
}

#[test]
fn a_pod_that_names_its_nodes_is_tried_on_no_other() {
    let plugin = plugin(json!({}));
    let nodes = |names: &[&str]| {
        Ok(PreFiltered::Nodes(names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>()))
    };
    let both = |names: [&[&str]; 2]| json!({"matchFields": [named(names[0])["matchFields"][0], named(names[1])["matchFields"][0]]});
    for (what, terms, expected) in [
        ("one name", json!([named(&["a"])]), nodes(&["a"])),
        ("either term", json!([named(&["a"]), named(&["b"])]), nodes(&["a", "b"])),
        ("both fields", json!([both([&["a", "b"], &["b"]])]), nodes(&["b"])),
        ("a term without a name", json!([named(&["a"]), labelled("disk", "ssd")]), Ok(PreFiltered::Needed)),
        (
            "fields that contradict each other",
            json!([both([&["a"], &["b"]])]),
            Err(Rejection::unresolvable("pod affinity terms conflict")),
        ),
    ] {
        let pod = with_affinity(required(terms));
        let mut state = CycleState::default();
        let result = plugin.pre_filter().unwrap().pre_filter(&mut state, &pod, &Snapshot::default());
        assert_eq!(result, expected, "{what}");
    }
    let free = pod(json!({"containers": []}));
    let skipped =
        plugin.pre_filter().unwrap().pre_filter(&mut CycleState::default(), &free, &Snapshot::default());
    assert_eq!(skipped, Ok(PreFiltered::Skip));
}

#[test]
fn an_added_affinity_holds_for_every_pod() {
    const OWN: &str = "node(s) didn't match Pod's node affinity/selector";
    const ADDED: &str = "node(s) didn't match scheduler-enforced node affinity";
    let plugin = plugin(json!({"addedAffinity": required(json!([labelled("pool", "batch")]))}));
    let ssd = || with_affinity(required(json!([labelled("disk", "ssd")])));
    let free = || pod(json!({"containers": []}));
    for (what, labels, pod, expected) in [
        ("neither", json!({}), ssd(), ADDED),
        ("the pod's only", json!({"disk": "ssd"}), ssd(), ADDED),
        ("the added one only", json!({"pool": "batch"}), ssd(), OWN),
        ("both", json!({"pool": "batch", "disk": "ssd"}), ssd(), ""),
        ("a pod without affinity", json!({"disk": "ssd"}), free(), ADDED),
        ("a pod without affinity that fits", json!({"pool": "batch"}), free(), ""),
    ] {
        let verdict = plugin.filter().unwrap().filter(&CycleState::default(), &pod, &node("n", labels));
        let text = verdict.map_or_else(|rejection| rejection.to_string(), |()| String::new());
        assert_eq!(text, expected, "{what}");
    }
    let mut state = CycleState::default();
    let result = plugin.pre_filter().unwrap().pre_filter(&mut state, &free(), &Snapshot::default());
    assert_eq!(result, Ok(PreFiltered::Needed), "not skipped for a pod that asks for nothing");
}

#[test]
fn preferences_of_the_pod_and_of_the_configuration_add_up() {
    let ssd = labelled("disk", "ssd");
    let plugin = plugin(json!({"addedAffinity": preferred(10, &labelled("pool", "batch"))}));
    let pod = with_affinity(preferred(30, &ssd));
    let nodes = [
        json!({}),
        json!({"pool": "batch"}),
        json!({"disk": "ssd"}),
        json!({"disk": "ssd", "pool": "batch"}),
    ]
    .map(|labels| Arc::new(node("n", labels)));
    let score = plugin.score().unwrap();
    let state = CycleState::default();
    let mut scores: Vec<i64> = nodes.iter().map(|node| score.score(&state, &pod, node)).collect();
    assert_eq!(scores, [0, 10, 30, 40]);
    score.normalize(&state, &pod, &nodes, &mut scores);
    assert_eq!(scores, [0, 25, 75, 100]);
}

#[test]
fn a_node_helps_when_it_begins_to_match() {
    let plugin = plugin(json!({}));
    let pod = with_affinity(required(json!([labelled("disk", "ssd")])));
    let object = |labels: Value| node("n", labels).node;
    let (plain, ssd) = (object(json!({})), object(json!({"disk": "ssd"})));
    let updated =
        |old: &Arc<Node>, new: &Arc<Node>| ClusterEvent::NodeUpdated { old: old.clone(), new: new.clone() };
    for (what, event, expected) in [
        ("added, and does not match", ClusterEvent::NodeAdded(plain.clone()), false),
        ("added, and matches", ClusterEvent::NodeAdded(ssd.clone()), true),
        ("begins to match", updated(&plain, &ssd), true),
        ("matched before", updated(&ssd, &ssd), false),
        ("matches no more", updated(&ssd, &plain), false),
        ("deleted", ClusterEvent::NodeDeleted(ssd.clone()), false),
    ] {
        assert_eq!(plugin.queueing_hint(&pod, &event), expected, "{what}");
    }
}

#[test]
fn an_affinity_that_cannot_be_parsed_is_refused() {
    let args = |operator: &str| {
        let term = json!({"matchExpressions": [{"key": "disk", "operator": operator}]});
        PluginArgs::new(json!({"addedAffinity": required(json!([term]))}), Path::new("args"))
    };
    assert!(new(&args("Exists"), &Handle::default()).is_ok());
    let Err(error) = new(&args("Near"), &Handle::default()) else { panic!("it is accepted") };
    let path = "args.addedAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]";
    assert!(error.to_string().starts_with(&format!("{path}.matchExpressions[0].operator: ")), "{error}");
}
