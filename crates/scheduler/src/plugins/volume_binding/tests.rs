use super::*;
use ferrite_api::field::Path;

const WAITS: &str = "WaitForFirstConsumer";

fn class(name: &str, provisioner: &str, mode: &str) -> StorageClass {
    ferrite_json::from_value(
        json!({"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode}),
    )
    .unwrap()
}

fn claim(name: &str, class: &str, change: impl FnOnce(&mut Value)) -> PersistentVolumeClaim {
    let mut claim = json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1",
            "annotations": {}},
        "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
                 "resources": {"requests": {"storage": "5Gi"}}}, "status": {"phase": "Pending"}});
    change(&mut claim);
    ferrite_json::from_value(claim).unwrap()
}

fn volume(
    name: &str,
    class: &str,
    size: &str,
    node: &str,
    change: impl FnOnce(&mut Value),
) -> PersistentVolume {
    let mut volume = json!({"metadata": {"name": name, "resourceVersion": "1"},
        "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"], "capacity": {"storage": size},
                 "local": {"path": "/x"},
                 "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                     {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]}}},
        "status": {"phase": "Available"}});
    change(&mut volume);
    ferrite_json::from_value(volume).unwrap()
}

fn node(name: &str) -> NodeInfo {
    let node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}});
    NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()))
}

fn pod(claims: &[&str]) -> PodInfo {
    let volumes: Vec<_> = claims
        .iter()
        .map(|name| json!({"name": *name, "persistentVolumeClaim": {"claimName": *name}}))
        .collect();
    let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "p"},
        "spec": {"containers": [], "volumes": volumes}});
    PodInfo::new(&ferrite_json::from_value(pod).unwrap())
}

fn bound(volume: &'static str) -> impl FnOnce(&mut Value) {
    move |claim| {
        claim["spec"]["volumeName"] = volume.into();
        claim["metadata"]["annotations"] = json!({"pv.kubernetes.io/bind-completed": "yes"});
    }
}

fn plugin(handle: &Handle) -> Arc<dyn Plugin> {
    new(&PluginArgs::default(), handle).unwrap()
}

/// The verdict on nodes "a" and "b": the reason, or nothing.
fn verdicts(handle: &Handle, pod: &PodInfo) -> Vec<String> {
    let plugin = plugin(handle);
    let mut state = CycleState::default();
    match plugin.pre_filter().unwrap().pre_filter(&mut state, pod, &Snapshot::default()) {
        Err(rejection) => vec![rejection.to_string()],
        Ok(PreFiltered::Skip) => vec!["skip".to_owned()],
        Ok(_) => ["a", "b"]
            .iter()
            .map(|name| {
                let verdict = plugin.filter().unwrap().filter(&state, pod, &node(name));
                verdict.map_or_else(|rejection| rejection.to_string(), |()| String::new())
            })
            .collect(),
    }
}

#[test]
fn claims_decide_where_a_pod_fits() {
    const CONFLICT: &str = "node(s) didn't find available persistent volumes to bind";
    const UNREACHABLE: &str = "node(s) didn't match PersistentVolume's node affinity";
    let local = || class("local", NO_PROVISIONER, WAITS);
    let same = |_: &mut Value| {};
    let handle = || {
        Handle::default().with_objects([
            local(),
            class("now", "x", "Immediate"),
            class("csi", "csi.x", WAITS),
        ])
    };
    for (what, handle, pod, expected) in [
        ("no claim", handle(), pod(&[]), vec!["skip"]),
        ("a claim that does not exist", handle(), pod(&["c"]), vec!["persistentvolumeclaim \"c\" not found"]),
        (
            "an immediate claim without a volume",
            handle().with_objects([claim("c", "now", same)]),
            pod(&["c"]),
            vec!["pod has unbound immediate PersistentVolumeClaims"],
        ),
        (
            "a claim that is being deleted",
            handle().with_objects([claim("c", "now", |c| {
                c["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z".into();
            })]),
            pod(&["c"]),
            vec!["persistentvolumeclaim \"c\" is being deleted"],
        ),
        (
            "a bound claim holds the pod to its volume",
            handle()
                .with_objects([claim("c", "local", bound("v"))])
                .with_objects([volume("v", "local", "9Gi", "a", same)]),
            pod(&["c"]),
            vec!["", UNREACHABLE],
        ),
        (
            "a bound claim whose volume is gone",
            handle().with_objects([claim("c", "local", bound("v"))]),
            pod(&["c"]),
            vec!["node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"; 2],
        ),
        (
            "a volume that waits on one node",
            handle()
                .with_objects([claim("c", "local", same)])
                .with_objects([volume("v", "local", "9Gi", "b", same)]),
            pod(&["c"]),
            vec![CONFLICT, ""],
        ),
        (
            "one volume does not serve two claims",
            handle()
                .with_objects([claim("c", "local", same), claim("d", "local", same)])
                .with_objects([volume("v", "local", "9Gi", "a", same)]),
            pod(&["c", "d"]),
            vec![CONFLICT, CONFLICT],
        ),
        (
            "too small, taken or not available",
            handle().with_objects([claim("c", "local", same)]).with_objects([
                volume("v", "local", "1Gi", "a", same),
                volume("w", "local", "9Gi", "a", |v| v["status"]["phase"] = "Released".into()),
                volume("x", "local", "9Gi", "a", |v| {
                    v["spec"]["claimRef"] = json!({"name": "other", "namespace": "ns"});
                }),
            ]),
            pod(&["c"]),
            vec![CONFLICT, CONFLICT],
        ),
        (
            "a volume made for the claim",
            handle().with_objects([claim("c", "local", same)]).with_objects([
                volume("v", "local", "9Gi", "a", |v| v["spec"]["claimRef"] = json!({"name": "c", "namespace": "ns"})),
                volume("w", "local", "5Gi", "b", same),
            ]),
            pod(&["c"]),
            vec!["", CONFLICT],
        ),
        ("room can be made everywhere", handle().with_objects([claim("c", "csi", same)]), pod(&["c"]), vec!["", ""]),
        (
            "a node was selected before",
            handle().with_objects([claim("c", "csi", |c| {
                c["metadata"]["annotations"] = json!({(SELECTED_NODE): "b"});
            })]),
            pod(&["c"]),
            vec![CONFLICT, ""],
        ),
        (
            "the storage has room on one node",
            handle()
                .with_objects([claim("c", "csi", same)])
                .with_objects([ferrite_json::from_value::<CSIDriver>(
                    json!({"metadata": {"name": "csi.x"}, "spec": {"storageCapacity": true}}),
                )
                .unwrap()])
                .with_objects([("a", "9Gi"), ("b", "1Gi")].map(|(node, size)| {
                    ferrite_json::from_value::<CSIStorageCapacity>(json!({
                        "metadata": {"name": node, "namespace": "ns"}, "storageClassName": "csi", "capacity": size,
                        "nodeTopology": {"matchLabels": {"kubernetes.io/hostname": node}}}))
                    .unwrap()
                })),
            pod(&["c"]),
            vec!["", "node(s) did not have enough free storage"],
        ),
    ] {
        assert_eq!(verdicts(&handle, &pod), expected, "{what}");
    }
}

#[test]
fn a_volume_that_is_promised_is_not_given_away() {
    let same = |_: &mut Value| {};
    let handle = Handle::default()
        .with_objects([class("local", NO_PROVISIONER, WAITS)])
        .with_objects([claim("c", "local", same), claim("d", "local", same)])
        .with_objects([
            volume("small", "local", "6Gi", "a", same),
            volume("large", "local", "9Gi", "a", same),
        ]);
    let plugin = plugin(&handle);
    let choose = |pod: &PodInfo| -> (CycleState, Option<String>) {
        let mut state = CycleState::default();
        plugin.pre_filter().unwrap().pre_filter(&mut state, pod, &Snapshot::default()).unwrap();
        let fits = plugin.filter().unwrap().filter(&state, pod, &node("a")).is_ok();
        let choice = state.get::<PodClaims>().and_then(|claims| claims.choice("a")).filter(|_| fits);
        let name = choice.map(|choice| name_of(&choice.bindings[0].0.metadata.name));
        (state, name)
    };
    let (first, second) = (pod(&["c"]), pod(&["d"]));
    let (mut state, name) = choose(&first);
    assert_eq!(name.as_deref(), Some("small"), "the smallest that suits");
    plugin.reserve().unwrap().reserve(&mut state, &first, "a").unwrap();
    assert!(plugin.pre_bind().unwrap().is_needed(&state, &first, "a"));
    assert_eq!(choose(&second).1.as_deref(), Some("large"), "the small one is promised");
    plugin.reserve().unwrap().unreserve(&mut state, &first, "a");
    assert_eq!(choose(&second).1.as_deref(), Some("small"));
}

#[test]
fn hints_tell_helpful_changes() {
    let plugin = plugin(&Handle::default());
    let pod = pod(&["c"]);
    let event =
        |event: crate::framework::ObjectEvent| plugin.queueing_hint(&pod, &ClusterEvent::Object(event));
    use crate::framework::ObjectEvent as Event;
    let same = |_: &mut Value| {};
    assert!(event(Event::new(Action::Added, Arc::new(claim("c", "x", same)), None)));
    assert!(!event(Event::new(Action::Added, Arc::new(claim("other", "x", same)), None)));
    assert!(event(Event::new(Action::Added, Arc::new(volume("v", "x", "1Gi", "a", same)), None)));
    assert!(!event(Event::new(Action::Deleted, Arc::new(volume("v", "x", "1Gi", "a", same)), None)));
    let old = Arc::new(class("x", "p", WAITS));
    assert!(!event(Event::new(Action::Updated, Arc::new(class("x", "p", WAITS)), Some(old))));
}

#[test]
fn a_shape_is_refused() {
    let args = PluginArgs::new(json!({"shape": []}), Path::new("args"));
    assert!(new(&args, &Handle::default()).is_err());
}
