use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::Node;

use super::*;
use crate::framework::{Action, ObjectEvent};

const TAKEN: &str = "node(s) had no available disk";
const IN_USE: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by \
                      another pod";

fn pod(namespace: &str, volumes: Value) -> PodInfo {
    let pod = json!({"metadata": {"name": "p", "namespace": namespace}, "spec": {"containers": [], "volumes": volumes}});
    PodInfo::new(&ferrite_json::from_value(pod).unwrap())
}

fn with_claim(namespace: &str, name: &str) -> PodInfo {
    pod(namespace, json!([{"name": "v", "persistentVolumeClaim": {"claimName": name}}]))
}

fn claim(name: &str, mode: &str) -> PersistentVolumeClaim {
    let claim = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"accessModes": [mode]}});
    ferrite_json::from_value(claim).unwrap()
}

fn plugin() -> Arc<dyn Plugin> {
    let claims = [claim("single", "ReadWriteOncePod"), claim("shared", "ReadWriteOnce")];
    new(&PluginArgs::default(), &Handle::default().with_objects(claims)).unwrap()
}

fn node(present: &PodInfo) -> NodeInfo {
    let mut node = NodeInfo::new(Arc::new(Node::default()));
    node.add_pod(Arc::new(present.clone()));
    node
}

/// The verdict on a node with one pod: the reason, `skip`, or nothing.
fn verdict(incoming: &PodInfo, present: &PodInfo) -> String {
    let (plugin, node) = (plugin(), node(present));
    let snapshot = Snapshot::new([Arc::new(node.clone())]);
    let mut state = CycleState::default();
    match plugin.pre_filter().unwrap().pre_filter(&mut state, incoming, &snapshot) {
        Err(rejection) => return rejection.to_string(),
        Ok(PreFiltered::Skip) => return "skip".to_owned(),
        Ok(_) => {}
    }
    let verdict = plugin.filter().unwrap().filter(&state, incoming, &node);
    verdict.map_or_else(|rejection| rejection.to_string(), |()| String::new())
}

#[test]
fn disks_are_shared_as_their_kind_allows() {
    let volume = |kind: &str, source: Value| json!([{"name": "v", (kind): source}]);
    let gce = |read_only: bool| volume("gcePersistentDisk", json!({"pdName": "d", "readOnly": read_only}));
    let aws =
        |read_only: bool| volume("awsElasticBlockStore", json!({"volumeID": "d", "readOnly": read_only}));
    let iscsi = |iqn: &str, read_only: bool| {
        volume("iscsi", json!({"targetPortal": "t", "iqn": iqn, "lun": 0, "readOnly": read_only}))
    };
    let rbd = |monitors: &[&str], read_only: bool| {
        volume("rbd", json!({"monitors": monitors, "image": "i", "pool": "rbd", "readOnly": read_only}))
    };
    for (what, incoming, present, expected) in [
        ("GCE, both write", gce(false), gce(false), TAKEN),
        ("GCE, one writes", gce(true), gce(false), TAKEN),
        ("GCE, both read", gce(true), gce(true), ""),
        ("AWS, both read", aws(true), aws(true), TAKEN),
        ("iSCSI, both write", iscsi("q", false), iscsi("q", false), TAKEN),
        ("iSCSI, both read", iscsi("q", true), iscsi("q", true), ""),
        ("iSCSI, another target", iscsi("q", false), iscsi("r", false), ""),
        ("RBD, a common monitor", rbd(&["a", "b"], false), rbd(&["b", "c"], false), TAKEN),
        ("RBD, no common monitor", rbd(&["a"], false), rbd(&["b"], false), ""),
        ("RBD, both read", rbd(&["a"], true), rbd(&["a"], true), ""),
        ("another kind of disk", gce(false), aws(false), ""),
        ("no disk", json!([]), gce(false), "skip"),
    ] {
        assert_eq!(verdict(&pod("ns", incoming), &pod("ns", present)), expected, "{what}");
    }
}

#[test]
fn a_claim_for_one_pod_is_in_use_wherever_that_pod_is() {
    for (what, incoming, present, expected) in [
        ("in use", with_claim("ns", "single"), with_claim("ns", "single"), IN_USE),
        ("not in use", with_claim("ns", "single"), with_claim("ns", "shared"), "skip"),
        ("another namespace", with_claim("ns", "single"), with_claim("other", "single"), "skip"),
        ("shared", with_claim("ns", "shared"), with_claim("ns", "shared"), "skip"),
        (
            "missing",
            with_claim("ns", "none"),
            with_claim("ns", "single"),
            "persistentvolumeclaim \"none\" not found",
        ),
    ] {
        assert_eq!(verdict(&incoming, &present), expected, "{what}");
    }
}

#[test]
fn preemption_takes_the_user_of_a_claim_away() {
    let (plugin, incoming) = (plugin(), with_claim("ns", "single"));
    let node = node(&incoming);
    let snapshot = Snapshot::new([Arc::new(node.clone())]);
    let mut state = CycleState::default();
    let point = plugin.pre_filter().unwrap();
    point.pre_filter(&mut state, &incoming, &snapshot).unwrap();
    let empty = NodeInfo::new(Arc::new(Node::default()));
    let fits = |state: &CycleState| plugin.filter().unwrap().filter(state, &incoming, &empty).is_ok();
    assert!(!fits(&state));
    point.remove_pod(&mut state, &incoming, &incoming, &empty);
    assert!(fits(&state));
    point.add_pod(&mut state, &incoming, &incoming, &node);
    assert!(!fits(&state));
}

#[test]
fn hints() {
    let plugin = plugin();
    let incoming = with_claim("ns", "single");
    let deleted = |pod: PodInfo| ClusterEvent::AssignedPodDeleted(Arc::new(pod));
    let changed = |name: &str| {
        let object = Arc::new(claim(name, "ReadWriteOnce"));
        ClusterEvent::Object(ObjectEvent::new(Action::Updated, object, None))
    };
    for (what, event, expected) in [
        ("a user of the claim is gone", deleted(with_claim("ns", "single")), true),
        ("a user of another claim is gone", deleted(with_claim("ns", "shared")), false),
        ("a user in another namespace is gone", deleted(with_claim("other", "single")), false),
        ("the claim changed", changed("single"), true),
        ("another claim changed", changed("shared"), false),
        ("a node came", ClusterEvent::NodeAdded(Arc::default()), true),
        ("a node went", ClusterEvent::NodeDeleted(Arc::default()), false),
    ] {
        assert_eq!(plugin.queueing_hint(&incoming, &event), expected, "{what}");
    }
}
