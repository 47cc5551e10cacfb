use std::sync::Arc;

use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;

use super::*;
use crate::cycle::{FitError, Placement, ScheduleError, Search, schedule};
use crate::framework::{CycleState, Framework, Registry};
use crate::profile::Profile;
use crate::snapshot::{NodeInfo, Snapshot};

fn object<T: DeserializeOwned>(value: Value) -> T {
    ferrite_json::from_value(value).unwrap()
}

fn claim(name: &str, count: i64, status: Value) -> ResourceClaim {
    let exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": count});
    object(json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}}, "status": status}))
}

fn allocated(device: &str, reserved: &[&str], node: &str) -> Value {
    let reserved: Vec<Value> =
        reserved.iter().map(|uid| json!({"resource": "pods", "name": uid, "uid": uid})).collect();
    let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    json!({"reservedFor": reserved, "allocation": {
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        "devices": {"results": [{"request": "r", "driver": "d.example", "pool": node, "device": device}]}}})
}

fn slice(node: &str, devices: usize) -> ResourceSlice {
    let devices: Vec<Value> = (0..devices).map(|index| json!({"name": format!("dev-{index}")})).collect();
    object(
        json!({"metadata": {"name": format!("slice-{node}")}, "spec": {"driver": "d.example", "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}, "devices": devices}}),
    )
}

fn class() -> DeviceClass {
    object(json!({"metadata": {"name": "gpu"}, "spec": {"extendedResourceName": "example.com/gpu"}}))
}

fn pod(name: &str, spec: Value) -> Pod {
    let mut spec = spec;
    if spec["containers"].is_null() {
        spec["containers"] = json!([{"name": "c"}]);
    }
    object(json!({"metadata": {"name": name, "namespace": "ns", "uid": name}, "spec": spec}))
}

fn with_claim(name: &str, claim: &str) -> Pod {
    pod(name, json!({"resourceClaims": [{"name": "x", "resourceClaimName": claim}]}))
}

fn node(name: &str, more: Value) -> Arc<NodeInfo> {
    let mut allocatable = json!({"cpu": "4", "memory": "4Gi", "pods": "10"});
    for (key, value) in more.as_object().unwrap().iter() {
        allocatable[key.as_str()] = value.clone();
    }
    let node: Node = object(json!({"metadata": {"name": name}, "status": {"allocatable": allocatable}}));
    Arc::new(NodeInfo::new(Arc::new(node)))
}

struct World {
    framework: Framework,
    handle: Handle,
}

fn world(claims: Vec<ResourceClaim>, slices: Vec<ResourceSlice>, pods: Vec<Pod>) -> World {
    let handle = Handle::default()
        .with_objects(claims)
        .with_objects(slices)
        .with_objects(pods)
        .with_objects([class()]);
    let framework = Framework::new(&Profile::default(), &Registry::default(), &handle).unwrap();
    World { framework, handle }
}

impl World {
    fn schedule(&self, pod: &Pod, nodes: &[Arc<NodeInfo>]) -> Result<Placement, FitError> {
        let snapshot = Snapshot::new(nodes.iter().cloned());
        let info = PodInfo::new(pod);
        let mut search = Search::default();
        let run = schedule(&self.framework, &snapshot, &[], &info, &mut search, |_| 0);
        match futures_util::FutureExt::now_or_never(run).unwrap() {
            Ok(placement) => Ok(placement),
            Err(ScheduleError::Unschedulable(error)) => Err(*error),
            Err(ScheduleError::Plugin(error)) => panic!("{error}"),
        }
    }

    fn plugin(&self) -> Arc<dyn Plugin> {
        let mut plugins = self.framework.at(crate::profile::ExtensionPoint::Filter).iter();
        plugins.find(|plugin| plugin.name() == NAME).unwrap().clone()
    }

    fn reserve(&self, pod: &Pod, placement: &mut Placement) {
        let (plugin, node) = (self.plugin(), placement.node.clone());
        plugin.reserve().unwrap().reserve(&mut placement.state, &PodInfo::new(pod), &node).unwrap();
    }

    fn unreserve(&self, pod: &Pod, state: &mut CycleState, node: &str) {
        self.plugin().reserve().unwrap().unreserve(state, &PodInfo::new(pod), node);
    }
}

#[test]
fn a_pod_waits_for_its_claims() {
    let mut deleted = claim("deleted", 1, json!({}));
    deleted.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")));
    let mut foreign = claim("foreign", 1, json!({}));
    foreign.metadata.owner_references = object(json!([
        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "another", "controller": true}]));
    let world = world(vec![claim("there", 1, json!({})), deleted, foreign], vec![], vec![]);
    let template = |statuses: Value| {
        let mut pod = pod("p", json!({"resourceClaims": [{"name": "x", "resourceClaimTemplateName": "t"}]}));
        pod.status = object(json!({"resourceClaimStatuses": statuses}));
        pod
    };
    let rows = [
        (with_claim("p", "there"), ""),
        (with_claim("p", "absent"), "could not find ResourceClaim \"ns/absent\""),
        (with_claim("p", "deleted"), "resourceclaim \"deleted\" is being deleted"),
        (template(json!([])), "pod \"ns/p\": ResourceClaim not created yet"),
        (template(json!([{"name": "x"}])), ""),
        (
            template(json!([{"name": "x", "resourceClaimName": "foreign"}])),
            "ResourceClaim ns/foreign was not created for Pod ns/p (Pod is not owner)",
        ),
        (
            pod("p", json!({"resourceClaims": [{"name": "x"}]})),
            "pod \"ns/p\", spec.resourceClaim \"x\": none of the supported fields are set",
        ),
    ];
    for (pod, expected) in rows {
        let answer = world.plugin().pre_enqueue().unwrap().pre_enqueue(&PodInfo::new(&pod));
        let told = answer.err().map(|rejection| rejection.to_string()).unwrap_or_default();
        assert_eq!(told, expected);
    }
}

#[test]
fn devices_decide_about_nodes() {
    let nodes = [node("a", json!({})), node("b", json!({}))];
    let world = world(
        vec![
            claim("two", 2, json!({})),
            claim("three", 3, json!({})),
            claim("on-a", 1, allocated("dev-0", &["other"], "a")),
        ],
        vec![slice("a", 1), slice("b", 2)],
        vec![],
    );
    assert_eq!(world.schedule(&with_claim("p", "two"), &nodes).unwrap().node, "b");
    // Any number of pods may share a claim that is allocated.
    assert_eq!(world.schedule(&with_claim("p", "on-a"), &nodes).unwrap().node, "a");
    let error = world.schedule(&with_claim("p", "three"), &nodes).unwrap_err();
    assert_eq!(
        error.to_string(),
        "0/2 nodes are available: 2 cannot allocate all claims. still not schedulable, preemption: \
         0/2 nodes are available: 2 Preemption is not helpful for scheduling."
    );
    assert_eq!(error.rejected_by, [NAME]);
    let error = world.schedule(&with_claim("p", "on-a"), &nodes[1..]).unwrap_err();
    assert!(error.to_string().contains("1 resourceclaim not available on the node. still not"), "{error}");
}

#[test]
fn devices_of_a_pod_on_its_way_are_taken() {
    let nodes = [node("n", json!({}))];
    let world =
        world(vec![claim("first", 1, json!({})), claim("second", 1, json!({}))], vec![slice("n", 1)], vec![]);
    let (first, second) = (with_claim("first", "first"), with_claim("second", "second"));
    let mut placement = world.schedule(&first, &nodes).unwrap();
    world.reserve(&first, &mut placement);
    let error = world.schedule(&second, &nodes).unwrap_err();
    assert!(error.to_string().contains("1 cannot allocate all claims"), "{error}");
    // Another pod that shares the claim waits for the outcome.
    let error = world.schedule(&with_claim("third", "first"), &nodes).unwrap_err();
    assert!(
        error.to_string().contains("resource claim ns/first is in the process of being allocated"),
        "{error}"
    );
    world.unreserve(&first, &mut placement.state, "n");
    assert_eq!(world.schedule(&second, &nodes).unwrap().node, "n");
    let freed = ClusterEvent::AssignedPodDeleted(Arc::new(PodInfo::new(&first)));
    assert!(world.plugin().queueing_hint(&PodInfo::new(&second), &freed));
}

#[test]
fn a_written_allocation_counts_before_it_is_seen() {
    let nodes = [node("n", json!({}))];
    let world =
        world(vec![claim("first", 1, json!({})), claim("second", 1, json!({}))], vec![slice("n", 1)], vec![]);
    let mut written = claim("first", 1, allocated("dev-0", &["first"], "n"));
    written.metadata.resource_version = Some("2".to_owned());
    world.handle.devices().written(Arc::new(written));
    assert!(world.schedule(&with_claim("second", "second"), &nodes).is_err());
    assert_eq!(world.schedule(&with_claim("third", "first"), &nodes).unwrap().node, "n", "shared");
}

#[test]
fn extended_resources_come_from_devices() {
    let wants = |name: &str, count: &str| {
        let resources = json!({"requests": {"example.com/gpu": count}, "limits": {"example.com/gpu": count}});
        pod(name, json!({"containers": [{"name": "c", "resources": resources}]}))
    };
    let (one, two) = (wants("one", "1"), wants("two", "2"));
    let world = world(vec![], vec![slice("a", 1)], vec![one.clone(), two.clone()]);
    let dynamic = [node("a", json!({})), node("bare", json!({}))];
    assert_eq!(world.schedule(&one, &dynamic).unwrap().node, "a");
    let error = world.schedule(&two, &dynamic).unwrap_err();
    assert!(error.to_string().contains("2 cannot allocate all claims"), "{error}");
    // A node with a device plugin has them without a claim.
    let plugin = [node("plugin", json!({"example.com/gpu": "2"}))];
    let mut placement = world.schedule(&two, &plugin).unwrap();
    world.reserve(&two, &mut placement);
    let needed =
        world.plugin().pre_bind().unwrap().is_needed(&placement.state, &PodInfo::new(&two), "plugin");
    assert!(!needed);
    let mut placement = world.schedule(&one, &dynamic).unwrap();
    world.reserve(&one, &mut placement);
    assert!(world.plugin().pre_bind().unwrap().is_needed(&placement.state, &PodInfo::new(&one), "a"));
}

#[test]
fn arguments_are_checked() {
    let make = |args: Value| new(&PluginArgs::new(args, Path::new("args")), &Handle::default()).map(drop);
    assert!(make(json!({"filterTimeout": "0s", "bindingTimeout": "1s"})).is_ok());
    let error = make(json!({"bindingTimeout": "500ms"})).unwrap_err().to_string();
    assert!(error.contains("args.bindingTimeout") && error.contains("must be at least 1 second"), "{error}");
    assert!(make(json!({"filterTimeout": "-1s"})).is_err());
}

#[test]
fn changes_of_claims_help_those_they_concern() {
    let world = world(vec![claim("mine", 1, json!({})), claim("other", 1, json!({}))], vec![], vec![]);
    let event = |action, new: ResourceClaim, old: Option<ResourceClaim>| {
        let old = old.map(|old| Arc::new(old) as Arc<dyn std::any::Any + Send + Sync>);
        ClusterEvent::Object(ObjectEvent::new(action, Arc::new(new), old))
    };
    let free = |name: &str| claim(name, 1, json!({}));
    let taken = |name: &str| claim(name, 1, allocated("dev-0", &[], "n"));
    let rows = [
        ("its own claim is made", event(Action::Added, free("mine"), None), true),
        ("another claim is made", event(Action::Added, free("other"), None), false),
        (
            "another claim gives devices back",
            event(Action::Updated, free("other"), Some(taken("other"))),
            true,
        ),
        ("another claim gets devices", event(Action::Updated, taken("other"), Some(free("other"))), false),
        ("its own claim gets devices", event(Action::Updated, taken("mine"), Some(free("mine"))), true),
        ("nothing changed", event(Action::Updated, free("mine"), Some(free("mine"))), false),
    ];
    let pod = PodInfo::new(&with_claim("p", "mine"));
    for (what, event, expected) in rows {
        assert_eq!(world.plugin().queueing_hint(&pod, &event), expected, "{what}");
    }
}

#[test]
fn earlier_subrequests_score_higher() {
    let sub = |name: &str| json!({"name": name, "deviceClassName": "gpu"});
    let claim: ResourceClaim = object(json!({"metadata": {}, "spec": {"devices": {"requests": [
        {"name": "r", "firstAvailable": [sub("best"), sub("good")]}]}}}));
    let with = |request: &str| {
        object(
            json!({"devices": {"results": [{"request": request, "driver": "d", "pool": "p", "device": "x"}]}}),
        )
    };
    assert_eq!(filter::score(&claim, &with("r/best")), 8);
    assert_eq!(filter::score(&claim, &with("r/good")), 7);
}

#[test]
fn devices_that_were_given_away_since_the_search_are_not_given_again() {
    let claims = ["one", "two", "three"].map(|name| claim(name, 1, json!({})));
    let world = world(claims.to_vec(), vec![slice("a", 2), slice("b", 1)], vec![]);
    let nodes = [node("a", json!({}))];
    let snapshot = Snapshot::new(nodes.iter().cloned());
    let (first, second) = (with_claim("p1", "one"), with_claim("p2", "two"));
    assert!(world.framework.is_costly(&PodInfo::new(&first)));
    assert!(!world.framework.is_costly(&PodInfo::new(&pod("p", json!({})))));
    let mut at_first = world.schedule(&first, &nodes).unwrap();
    let mut at_second = world.schedule(&second, &nodes).unwrap();
    let confirm = |pod: &Pod, placement: &mut Placement| {
        let result = crate::cycle::confirm(&world.framework, &snapshot, &PodInfo::new(pod), placement);
        result.map_err(|by| by.rejection.to_string())
    };
    assert_eq!(confirm(&first, &mut at_first), Ok(()));
    world.reserve(&first, &mut at_first);
    let problem = "other claims got devices of the same pools";
    assert_eq!(confirm(&second, &mut at_second), Err(problem.to_owned()));
    // A new search sees the devices that are taken.
    let mut again = world.schedule(&second, &nodes).unwrap();
    assert_eq!(confirm(&second, &mut again), Ok(()));
    // Devices that came back, and devices of other pools, are no obstacle.
    world.unreserve(&first, &mut at_first.state, "a");
    assert_eq!(confirm(&second, &mut again), Ok(()));
    let mut elsewhere = world.schedule(&with_claim("p3", "three"), &[node("b", json!({}))]).unwrap();
    world.reserve(&with_claim("p3", "three"), &mut elsewhere);
    assert_eq!(confirm(&second, &mut again), Ok(()));
    // A claim that is on its way to another pod cannot be taken.
    world.reserve(&second, &mut again);
    assert_eq!(confirm(&second, &mut again), Err("claims of the pod have changed".to_owned()));
}
