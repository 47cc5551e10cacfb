use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::Node;

use super::*;
use crate::framework::ObjectEvent;

const FULL: &str = "node(s) exceed max volume count";

fn claim(name: &str, spec: Value, owner: Option<&str>) -> PersistentVolumeClaim {
    let owners: Vec<Value> = owner
        .map(|uid| json!({"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": uid, "controller": true}))
        .into_iter()
        .collect();
    let metadata = json!({"name": name, "namespace": "ns", "ownerReferences": owners});
    ferrite_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn volume(name: &str, driver: &str) -> PersistentVolume {
    let csi = json!({"driver": driver, "volumeHandle": name});
    ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": {"csi": csi}})).unwrap()
}

fn csi_node(limit: i32) -> CSINode {
    let driver = json!({"name": "d", "nodeID": "n", "allocatable": {"count": limit}});
    ferrite_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"drivers": [driver]}})).unwrap()
}

fn attachment(volume: &str, node: &str) -> VolumeAttachment {
    let spec = json!({"attacher": "d", "nodeName": node, "source": {"persistentVolumeName": volume}});
    ferrite_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap()
}

fn pod(name: &str, volumes: Value) -> PodInfo {
    let pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": name},
        "spec": {"containers": [], "volumes": volumes}});
    PodInfo::new(&ferrite_json::from_value(pod).unwrap())
}

fn with_claims(name: &str, claims: &[&str]) -> PodInfo {
    let volumes =
        claims.iter().map(|name| json!({"name": *name, "persistentVolumeClaim": {"claimName": *name}}));
    pod(name, volumes.collect::<Vec<_>>().into())
}

fn ephemeral(name: &str) -> PodInfo {
    pod(name, json!([{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]))
}

/// Claims `c1` to `c3` with volumes of the driver, `other` with one of another driver, and `later` without a volume yet.
fn handle(limit: i32) -> Handle {
    let claims =
        ["c1", "c2", "c3", "other"].map(|name| claim(name, json!({"volumeName": format!("v-{name}")}), None));
    let later = claim("later", json!({"storageClassName": "s"}), None);
    let volumes = ["c1", "c2", "c3"].map(|name| volume(&format!("v-{name}"), "d"));
    let class = json!({"metadata": {"name": "s"}, "provisioner": "d"});
    Handle::default()
        .with_objects(claims.into_iter().chain([later]))
        .with_objects(volumes.into_iter().chain([volume("v-other", "e")]))
        .with_objects([ferrite_json::from_value::<StorageClass>(class).unwrap()])
        .with_objects([csi_node(limit)])
}

fn verdict(handle: &Handle, incoming: &PodInfo, present: &[PodInfo]) -> String {
    let plugin = new(&PluginArgs::default(), handle).unwrap();
    let mut state = CycleState::default();
    match plugin.pre_filter().unwrap().pre_filter(&mut state, incoming, &Snapshot::default()) {
        Err(rejection) => return format!("refused: {rejection}"),
        Ok(PreFiltered::Skip) => return "skip".to_owned(),
        Ok(_) => {}
    }
    let node: Node = ferrite_json::from_value(json!({"metadata": {"name": "n"}})).unwrap();
    let mut node = NodeInfo::new(Arc::new(node));
    present.iter().for_each(|pod| node.add_pod(Arc::new(pod.clone())));
    let verdict = plugin.filter().unwrap().filter(&state, incoming, &node);
    verdict.map_or_else(|rejection| rejection.to_string(), |()| String::new())
}

#[test]
fn volumes_of_a_driver_stay_within_its_limit() {
    let attached = |node: &str| handle(1).with_objects([attachment("v-c2", node)]);
    for (what, handle, incoming, present, expected) in [
        ("no claim", handle(1), with_claims("p", &[]), vec![], "skip"),
        ("the first", handle(1), with_claims("p", &["c1"]), vec![], ""),
        ("one too many", handle(1), with_claims("p", &["c1", "c2"]), vec![], FULL),
        ("beside another", handle(2), with_claims("p", &["c1"]), vec![with_claims("q", &["c2"])], ""),
        (
            "one too many beside another",
            handle(1),
            with_claims("p", &["c1"]),
            vec![with_claims("q", &["c2"])],
            FULL,
        ),
        ("the same volume", handle(1), with_claims("p", &["c1"]), vec![with_claims("q", &["c1"])], ""),
        ("another driver", handle(1), with_claims("p", &["other"]), vec![with_claims("q", &["c1"])], ""),
        (
            "a volume yet to be made",
            handle(1),
            with_claims("p", &["later"]),
            vec![with_claims("q", &["c1"])],
            FULL,
        ),
        ("a volume that is still attached", attached("n"), with_claims("p", &["c1"]), vec![], FULL),
        ("a volume attached elsewhere", attached("m"), with_claims("p", &["c1"]), vec![], ""),
        (
            "a present pod's claim is gone",
            handle(1),
            with_claims("p", &["c1"]),
            vec![with_claims("q", &["gone"])],
            "",
        ),
    ] {
        assert_eq!(verdict(&handle, &incoming, &present), expected, "{what}");
    }
}

#[test]
fn missing_claims_are_the_filters_matter() {
    assert_eq!(
        verdict(&handle(1), &with_claims("p", &["gone"]), &[]),
        "looking up PVC ns/gone: persistentvolumeclaim \"gone\" not found"
    );
    assert_eq!(
        verdict(&handle(1), &ephemeral("p"), &[]),
        "looking up PVC ns/p-scratch: persistentvolumeclaim \"p-scratch\" not found"
    );
}

#[test]
fn a_claim_of_another_owner_fails_the_new_pod_and_does_not_count_for_a_present_one() {
    let owned_by = |owner: Option<&str>| {
        let claims =
            ["p", "q"].map(|pod| claim(&format!("{pod}-scratch"), json!({"storageClassName": "s"}), owner));
        let class = json!({"metadata": {"name": "s"}, "provisioner": "d"});
        Handle::default()
            .with_objects(claims.into_iter().chain([claim("c", json!({"storageClassName": "s"}), None)]))
            .with_objects([ferrite_json::from_value::<StorageClass>(class).unwrap()])
            .with_objects([csi_node(1)])
    };
    assert_eq!(verdict(&owned_by(Some("p")), &ephemeral("p"), &[]), "");
    let problem = verdict(&owned_by(None), &ephemeral("p"), &[]);
    assert!(
        problem.ends_with("PVC ns/p-scratch was not created for pod ns/p (pod is not owner)"),
        "{problem}"
    );
    let incoming = with_claims("p", &["c"]);
    assert_eq!(verdict(&owned_by(Some("q")), &incoming, &[ephemeral("q")]), FULL);
    assert_eq!(verdict(&owned_by(None), &incoming, &[ephemeral("q")]), "");
}

#[test]
fn hints() {
    let plugin = new(&PluginArgs::default(), &handle(1)).unwrap();
    let incoming = with_claims("p", &["c1"]);
    let limits = |old: Option<i32>, new: i32| {
        let old = old.map(|old| Arc::new(csi_node(old)) as Arc<dyn std::any::Any + Send + Sync>);
        let action = if old.is_some() { Action::Updated } else { Action::Added };
        ClusterEvent::Object(ObjectEvent::new(action, Arc::new(csi_node(new)), old))
    };
    let deleted = |pod: PodInfo| ClusterEvent::AssignedPodDeleted(Arc::new(pod));
    let detached = |action: Action| {
        ClusterEvent::Object(ObjectEvent::new(action, Arc::new(attachment("v-c1", "n")), None))
    };
    for (what, event, expected) in [
        ("a higher limit", limits(Some(1), 2), true),
        ("a lower limit", limits(Some(2), 1), false),
        ("a limit for the first time", limits(None, 1), true),
        ("a pod with a claim is gone", deleted(with_claims("q", &["c2"])), true),
        ("a pod without claims is gone", deleted(with_claims("q", &[])), false),
        ("a volume was detached", detached(Action::Deleted), true),
        ("a volume was attached", detached(Action::Added), false),
    ] {
        assert_eq!(plugin.queueing_hint(&incoming, &event), expected, "{what}");
    }
}
