use super::*;

fn row(object: Value) -> Value {
    let mut object = object;
    Pods.default(&mut object);
    let once = object.clone();
    Pods.default(&mut object);
    assert_eq!(object, once, "defaulting twice changes nothing more");
    object
}

#[test]
fn a_minimal_pod_is_filled() {
    let pod = row(json!({"spec": {"containers": [{"name": "c", "image": "img"}]}}));
    assert_eq!(
        pod["spec"],
        json!({
            "containers": [{
                "name": "c", "image": "img", "resources": {}, "imagePullPolicy": "Always",
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            }],
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "securityContext": {},
            "schedulerName": "default-scheduler",
            "enableServiceLinks": true,
        })
    );
}

#[test]
fn requests_follow_limits() {
    for (resources, requests) in [
        (json!({"limits": {"cpu": "1"}}), json!({"cpu": "1"})),
        (
            json!({"limits": {"cpu": 2, "memory": "1Gi"}, "requests": {"cpu": "0.5"}}),
            json!({"cpu": "500m", "memory": "1Gi"}),
        ),
        (json!({"requests": {"cpu": "1.00001"}}), json!({"cpu": "1001m"})),
        (json!({}), Value::Null),
    ] {
        let pod = row(json!({"spec": {"containers": [{"resources": resources}]}}));
        assert_eq!(pod["spec"]["containers"][0]["resources"]["requests"], requests);
    }
}

#[test]
fn host_ports_on_the_host_network() {
    let ports = json!([{"containerPort": 80}, {"containerPort": 81, "hostPort": 82}]);
    let pod = row(json!({"spec": {"hostNetwork": true, "containers": [{"ports": ports}]}}));
    let ports: Vec<i64> =
        list(&pod["spec"]["containers"][0], "ports").iter().map(|p| int(p, "hostPort")).collect();
    assert_eq!(ports, [80, 82]);
}

#[test]
fn either_name_of_the_service_account_sets_both() {
    for spec in [
        json!({"serviceAccount": "a"}),
        json!({"serviceAccountName": "a"}),
        json!({"serviceAccountName": "a", "serviceAccount": "b"}),
    ] {
        let pod = row(json!({"spec": spec}));
        assert_eq!(
            (text(&pod["spec"], "serviceAccount"), text(&pod["spec"], "serviceAccountName")),
            ("a", "a")
        );
    }
}

#[test]
fn volumes_are_filled() {
    for (volume, filled) in [
        (json!({"name": "v"}), json!({"name": "v", "emptyDir": {}})),
        (json!({"emptyDir": {"sizeLimit": "1024Ki"}}), json!({"emptyDir": {"sizeLimit": "1Mi"}})),
        (json!({"configMap": {"name": "c"}}), json!({"configMap": {"name": "c", "defaultMode": 420}})),
        (
            json!({"secret": {"secretName": "c", "defaultMode": 256}}),
            json!({"secret": {"secretName": "c", "defaultMode": 256}}),
        ),
        (json!({"hostPath": {"path": "/x"}}), json!({"hostPath": {"path": "/x", "type": ""}})),
        (json!({"image": {"reference": "a"}}), json!({"image": {"reference": "a", "pullPolicy": "Always"}})),
        (
            json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
            json!({"projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}}]}}),
        ),
        (
            json!({"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "metadata.labels"}},
                {"path": "b", "resourceFieldRef": {"resource": "limits.cpu"}}]}}),
            json!({"downwardAPI": {"defaultMode": 420, "items": [
                {"path": "a", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels"}},
                {"path": "b", "resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}]}}),
        ),
    ] {
        assert_eq!(row(json!({"spec": {"volumes": [volume]}}))["spec"]["volumes"][0], filled);
    }
}

#[test]
fn probes_are_filled() {
    let pod = row(json!({"spec": {"containers": [{
        "livenessProbe": {"httpGet": {"port": 80}, "periodSeconds": 2},
        "startupProbe": {"grpc": {"port": 9}},
        "lifecycle": {"preStop": {"httpGet": {"port": 80}}},
    }]}}));
    let container = &pod["spec"]["containers"][0];
    assert_eq!(
        container["livenessProbe"],
        json!({"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"}, "periodSeconds": 2, "timeoutSeconds": 1,
            "successThreshold": 1, "failureThreshold": 3})
    );
    assert_eq!(container["startupProbe"]["grpc"], json!({"port": 9, "service": ""}));
    assert_eq!(container["lifecycle"]["preStop"]["httpGet"]["scheme"], "HTTP");
}

#[test]
fn requests_of_the_whole_pod() {
    let spec = |resources: Value| {
        row(json!({"spec": {"resources": resources, "containers": [
            {"resources": {"requests": {"cpu": "1"}}}, {"resources": {"requests": {"cpu": "1"}}}]}}))["spec"]
            ["resources"]
            .clone()
    };
    assert_eq!(
        spec(json!({"limits": {"cpu": "4", "memory": "1Gi"}})),
        json!({"limits": {"cpu": "4", "memory": "1Gi"}, "requests": {"cpu": "2", "memory": "1Gi"}})
    );
    assert_eq!(spec(json!({"requests": {"memory": "1Gi"}})), json!({"requests": {"memory": "1Gi"}}));
}

#[test]
fn a_new_pod_is_pending() {
    let mut pod = json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{}]}, "status": {"phase": "Running", "podIP": "192.0.2.1"}});
    Pods.prepare_create(&mut pod);
    assert_eq!(pod["status"], json!({"phase": "Pending", "qosClass": "BestEffort"}));
    pod["spec"]["schedulingGates"] = json!([{"name": "hold"}]);
    Pods.prepare_create(&mut pod);
    assert_eq!(pod["status"]["conditions"][0]["reason"], "SchedulingGated");
}

#[test]
fn label_keys_become_requirements() {
    let term = json!({"labelSelector": {"matchLabels": {"a": "b"}}, "matchLabelKeys": ["ver", "absent"]});
    let mut pod = json!({"metadata": {"labels": {"ver": "1"}},
        "spec": {"topologySpreadConstraints": [term], "affinity": {"podAffinity":
            {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}});
    Pods.prepare_create(&mut pod);
    let expected = json!([{"key": "ver", "operator": "In", "values": ["1"]}]);
    for place in [
        "/spec/topologySpreadConstraints/0",
        "/spec/affinity/podAffinity/requiredDuringSchedulingIgnoredDuringExecution/0",
    ] {
        assert_eq!(pod.pointer(place).unwrap()["labelSelector"]["matchExpressions"], expected, "{place}");
    }
}

#[test]
fn status_updates_keep_everything_else() {
    let old =
        json!({"metadata": {"ownerReferences": [1]}, "spec": {"a": 1}, "status": {"qosClass": "BestEffort"}});
    let mut new =
        json!({"metadata": {"labels": {"x": "y"}}, "spec": {"a": 2}, "status": {"phase": "Running"}});
    Pods.prepare_status_update(&mut new, &old);
    assert_eq!(
        new,
        json!({"metadata": {"labels": {"x": "y"}, "ownerReferences": [1]}, "spec": {"a": 1},
            "status": {"phase": "Running", "qosClass": "BestEffort"}})
    );
}

#[test]
fn grace_periods() {
    let running = json!({"spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}, "status": {"phase": "Running"}});
    let deleting = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30},
        "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 60}});
    let unscheduled = json!({"spec": {"terminationGracePeriodSeconds": 30}});
    let finished = json!({"spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}, "status": {"phase": "Failed"}});
    let graceful = |seconds| Deletion::Graceful { seconds };
    for (pod, requested, expected) in [
        (&running, None, graceful(30)),
        (&running, Some(5), graceful(5)),
        (&running, Some(90), graceful(90)),
        (&running, Some(0), graceful(0)),
        (&running, Some(-1), graceful(1)),
        (&unscheduled, Some(30), graceful(0)),
        (&finished, None, graceful(0)),
        (&deleting, None, graceful(30)),
        (&deleting, Some(60), graceful(30)),
        (&deleting, Some(10), graceful(10)),
        (&deleting, Some(0), graceful(0)),
    ] {
        assert_eq!(Pods.deletion(pod, requested), expected, "{pod} asked for {requested:?}");
    }
}

/// A body of a request has room for lists of tens of thousands. Nothing is made for each pair of their elements.
#[test]
fn long_lists_cost_no_more_than_their_length() {
    use crate::field::Path;
    let begun = std::time::Instant::now();
    let many = |count: usize, item: &dyn Fn(usize) -> Value| (0..count).map(item).collect::<Vec<_>>();
    let pod = |spec: Value| json!({"metadata": {"name": "p"}, "spec": spec});
    let ports = |count, of: &dyn Fn(usize) -> Value| {
        pod(json!({"containers": [{"name": "c", "image": "i", "ports": many(count, of)}]}))
    };
    let same = ports(20_000, &|_| json!({"containerPort": 80, "protocol": "TCP"}));
    assert_eq!(super::warnings::warnings(&same, &Path::default()).len(), super::warnings::WARNINGS_MAX);
    let distinct = ports(60_000, &|index| json!({"containerPort": index + 1, "protocol": "TCP"}));
    assert!(super::warnings::warnings(&distinct, &Path::default()).is_empty());
    let files = |of: &dyn Fn(usize) -> Value| {
        let volume = json!({"name": "v", "configMap": {"name": "c", "items": many(30_000, of)}});
        pod(json!({"containers": [{"name": "c", "image": "i"}], "volumes": [volume]}))
    };
    let distinct = files(&|index| json!({"key": "k", "path": format!("p{index}/x")}));
    assert!(super::warnings::warnings(&distinct, &Path::default()).is_empty());
    let same = files(&|_| json!({"key": "k", "path": "p"}));
    assert_eq!(super::warnings::warnings(&same, &Path::default()).len(), super::warnings::WARNINGS_MAX);
    let constraints = many(
        60_000,
        &|index| json!({"maxSkew": 1, "topologyKey": format!("k{index}"), "whenUnsatisfiable": "DoNotSchedule"}),
    );
    assert_eq!(super::scheduling::validate_spread(&constraints, &Path::new("spec")), []);
    let took = begun.elapsed();
    assert!(took < std::time::Duration::from_secs(30), "{took:?}");
}
