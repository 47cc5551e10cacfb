use ferrite_json::{Value, json};

use super::*;
use crate::framework::ObjectEvent;

const ELSEWHERE: &str = "node(s) had no available volume zone";

fn claim(spec: Value) -> PersistentVolumeClaim {
    ferrite_json::from_value(json!({"metadata": {"name": "c", "namespace": "ns"}, "spec": spec})).unwrap()
}

fn volume(labels: Value) -> PersistentVolume {
    ferrite_json::from_value(json!({"metadata": {"name": "v", "labels": labels}, "spec": {}})).unwrap()
}

fn class(mode: Option<&str>) -> StorageClass {
    let class = json!({"metadata": {"name": "s"}, "provisioner": "x", "volumeBindingMode": mode});
    ferrite_json::from_value(class).unwrap()
}

fn pod() -> PodInfo {
    let volumes = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
    let pod =
        json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": {"containers": [], "volumes": volumes}});
    PodInfo::new(&ferrite_json::from_value(pod).unwrap())
}

/// The verdict on a node with these labels: the reason, `skip`, or nothing.
fn verdict(handle: &Handle, labels: Value) -> String {
    let plugin = new(&PluginArgs::default(), handle).unwrap();
    let mut state = CycleState::default();
    match plugin.pre_filter().unwrap().pre_filter(&mut state, &pod(), &Snapshot::default()) {
        Err(rejection) => return rejection.to_string(),
        Ok(PreFiltered::Skip) => return "skip".to_owned(),
        Ok(_) => {}
    }
    let node = json!({"metadata": {"name": "n", "labels": labels}});
    let node = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    let verdict = plugin.filter().unwrap().filter(&state, &pod(), &node);
    verdict.map_or_else(|rejection| rejection.to_string(), |()| String::new())
}

#[test]
fn a_node_is_in_the_zone_and_region_of_the_volume() {
    let zone = |zone: &str| json!({(ZONE): zone});
    let both = |zone: &str, region: &str| json!({(ZONE): zone, (REGION): region});
    for (what, of_volume, of_node, expected) in [
        ("the same zone", zone("a"), zone("a"), ""),
        ("another zone", zone("a"), zone("b"), ELSEWHERE),
        ("one of several zones", zone("a__b"), zone("b"), ""),
        ("none of several zones", zone("a__b"), zone("c"), ELSEWHERE),
        ("another region", both("a", "r"), both("a", "s"), ELSEWHERE),
        ("zone and region", both("a", "r"), both("a", "r"), ""),
        ("a node without any zone", zone("a"), json!({}), ""),
        ("a node with a region only", zone("a"), json!({(REGION): "r"}), ELSEWHERE),
        ("the former label on the volume", json!({(BETA_ZONE): "a"}), zone("a"), ""),
        ("the former label, another zone", json!({(BETA_ZONE): "a"}), zone("b"), ELSEWHERE),
        ("the former label on both", json!({(BETA_REGION): "r"}), json!({(BETA_REGION): "r"}), ""),
        ("a volume without a zone", json!({}), zone("a"), "skip"),
    ] {
        let claims = [claim(json!({"volumeName": "v"}))];
        let handle = Handle::default().with_objects(claims).with_objects([volume(of_volume)]);
        assert_eq!(verdict(&handle, of_node), expected, "{what}");
    }
}

#[test]
fn a_claim_without_a_volume_has_a_class_that_waits() {
    let of_class = || claim(json!({"storageClassName": "s"}));
    let with = |claim: PersistentVolumeClaim| Handle::default().with_objects([claim]);
    let in_class = |mode: Option<&str>| with(of_class()).with_objects([class(mode)]);
    for (what, handle, expected) in [
        ("no claim", Handle::default(), "persistentvolumeclaim \"c\" not found"),
        ("no volume", with(claim(json!({"volumeName": "v"}))), "persistentvolume \"v\" not found"),
        ("no class", with(claim(json!({}))), "PersistentVolumeClaim had no pv name and storageClass name"),
        ("a missing class", with(of_class()), "storageclass.storage.k8s.io \"s\" not found"),
        ("it waits for the pod", in_class(Some("WaitForFirstConsumer")), "skip"),
        ("it does not wait", in_class(Some("Immediate")), "PersistentVolume had no name"),
        ("no mode", in_class(None), "VolumeBindingMode not set for StorageClass \"s\""),
    ] {
        assert_eq!(verdict(&handle, json!({(ZONE): "a"})), expected, "{what}");
    }
}

#[test]
fn hints() {
    let plugin = new(&PluginArgs::default(), &Handle::default()).unwrap();
    fn object<K: std::any::Any + Send + Sync>(action: Action, object: K) -> ClusterEvent {
        ClusterEvent::Object(ObjectEvent::new(action, Arc::new(object), None))
    }
    let mut elsewhere = claim(json!({}));
    elsewhere.metadata.namespace = Some("other".to_owned());
    for (what, event, expected) in [
        ("a class came", object(Action::Added, class(None)), true),
        ("a class changed", object(Action::Updated, class(None)), false),
        ("a volume changed", object(Action::Updated, volume(json!({}))), true),
        ("a volume went", object(Action::Deleted, volume(json!({}))), false),
        ("the claim changed", object(Action::Updated, claim(json!({}))), true),
        ("a claim of another namespace changed", object(Action::Updated, elsewhere), false),
        ("a node went", ClusterEvent::NodeDeleted(Arc::default()), false),
    ] {
        assert_eq!(plugin.queueing_hint(&pod(), &event), expected, "{what}");
    }
}
