//! Tests of each kind's defaults, kept fields and columns.

use super::*;

#[test]
fn defaults_of_other_kinds() {
    for (kind, object, expected) in [
        (
            "Deployment",
            json!({}),
            json!({"spec": {"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}}}, "status": {}}),
        ),
        (
            "Deployment",
            json!({"spec": {"replicas": 0, "strategy": {"type": "Recreate"}}}),
            json!({"spec": {"replicas": 0, "strategy": {"type": "Recreate"}}}),
        ),
        ("ReplicaSet", json!({}), json!({"spec": {"replicas": 1}, "status": {"replicas": 0}})),
        (
            "Service",
            json!({"spec": {"ports": [{"port": 80}, {"port": 81, "targetPort": "web"}]}}),
            json!({"spec": {
            "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}, {"port": 81, "protocol": "TCP", "targetPort": "web"}]}}),
        ),
        (
            "Service",
            json!({"spec": {"type": "LoadBalancer"}}),
            json!({"spec": {"externalTrafficPolicy": "Cluster", "allocateLoadBalancerNodePorts": true}}),
        ),
        (
            "Service",
            json!({"spec": {"sessionAffinity": "ClientIP"}}),
            json!({"spec": {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}}}}),
        ),
        (
            "Secret",
            json!({"stringData": {"a": "b"}, "data": {"a": "eA=="}}),
            json!({"type": "Opaque", "data": {"a": "Yg=="}}),
        ),
        (
            "Namespace",
            json!({"metadata": {"name": "x"}}),
            json!({"metadata": {"labels": {"kubernetes.io/metadata.name": "x"}}, "status": {"phase": "Active"}}),
        ),
        (
            "Node",
            json!({"status": {"capacity": {"cpu": "2000m"}}}),
            json!({"status": {"capacity": {"cpu": "2"}, "allocatable": {"cpu": "2"}, "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}}}}),
        ),
        ("Node", json!({"spec": {"podCIDR": "10.0.0.0/24"}}), json!({"spec": {"podCIDRs": ["10.0.0.0/24"]}})),
        (
            "EndpointSlice",
            json!({"ports": [{"port": 80}], "endpoints": [{}]}),
            json!({"ports": [{"port": 80, "name": "", "protocol": "TCP"}], "endpoints": [{"conditions": {}}]}),
        ),
        (
            "Endpoints",
            json!({"subsets": [{"ports": [{"port": 80}]}]}),
            json!({"subsets": [{"ports": [{"port": 80, "protocol": "TCP"}]}]}),
        ),
    ] {
        let mut filled = object.clone();
        strategy(kind).default(&mut filled);
        let mut overlaid = filled.clone();
        overlay(&mut overlaid, &expected);
        assert_eq!(filled, overlaid, "{kind} {object}");
    }
}

#[test]
fn preparing_drops_what_clients_may_not_set() {
    for (kind, status) in [
        ("Deployment", json!({})),
        ("ReplicaSet", json!({"replicas": 0})),
        ("Service", json!({"loadBalancer": {}})),
        ("Namespace", json!({"phase": "Active"})),
    ] {
        let strategy = strategy(kind);
        let mut object = json!({"metadata": {}, "status": {"x": 1}, "spec": {"finalizers": ["a/b"]}});
        strategy.prepare_create(&mut object);
        assert_eq!(object["status"], status, "{kind}");
        let old = json!({"metadata": {"labels": {"a": "b"}}, "status": {"old": 1}, "spec": {"old": 1}});
        let mut new = json!({"metadata": {"labels": {"c": "d"}}, "status": {"new": 1}, "spec": {"new": 1}});
        strategy.prepare_update(&mut new, &old);
        assert_eq!(new["status"], old["status"], "{kind}");
        let mut new = json!({"metadata": {"labels": {"c": "d"}}, "status": {"new": 1}, "spec": {"new": 1}});
        strategy.prepare_status_update(&mut new, &old);
        assert_eq!((&new["status"], &new["spec"]), (&json!({"new": 1}), &old["spec"]), "{kind}");
    }
    let mut namespace = json!({"spec": {"finalizers": ["a/b"]}});
    strategy("Namespace").prepare_create(&mut namespace);
    assert_eq!(namespace["spec"]["finalizers"], json!(["a/b", "kubernetes"]));
}

#[test]
fn cells_of_other_kinds() {
    let now = "2026-01-01T00:05:00Z".parse().unwrap();
    let metadata = json!({"name": "x", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"node-role.kubernetes.io/worker": ""}});
    for (kind, object, cells) in [
        (
            "Service",
            json!({"spec": {"type": "NodePort", "clusterIPs": ["10.0.0.5"], "selector": {"a": "b", "c": "d"}, "ports": [
            {"port": 80, "nodePort": 30080, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]}}),
            json!(["x", "NodePort", "10.0.0.5", "<none>", "80:30080/TCP,53/UDP", "5m", "a=b,c=d"]),
        ),
        (
            "Service",
            json!({"spec": {"type": "LoadBalancer"}}),
            json!(["x", "LoadBalancer", "<none>", "<pending>", "<none>", "5m", "<none>"]),
        ),
        (
            "Service",
            json!({"spec": {"type": "LoadBalancer", "externalIPs": ["192.0.2.9"]}, "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}),
            json!(["x", "LoadBalancer", "<none>", "192.0.2.1,192.0.2.9", "<none>", "5m", "<none>"]),
        ),
        (
            "Service",
            json!({"spec": {"type": "ExternalName", "externalName": "a.example"}}),
            json!(["x", "ExternalName", "<none>", "a.example", "<none>", "5m", "<none>"]),
        ),
        (
            "Node",
            json!({"spec": {"unschedulable": true}, "status": {"conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}], "nodeInfo": {"kubeletVersion": "v1.36.0", "osImage": "Debian"}}}),
            json!([
                "x",
                "Ready,SchedulingDisabled",
                "worker",
                "5m",
                "v1.36.0",
                "192.0.2.1",
                "<none>",
                "Debian",
                "<unknown>",
                "<unknown>"
            ]),
        ),
        (
            "Deployment",
            json!({"spec": {"replicas": 3, "selector": {"matchLabels": {"a": "b"}}, "template": {"spec": {"containers": [
            {"name": "c", "image": "i"}, {"name": "d", "image": "j"}]}}}, "status": {"readyReplicas": 2, "updatedReplicas": 3, "availableReplicas": 1}}),
            json!(["x", "2/3", 3, 1, "5m", "c,d", "i,j", "a=b"]),
        ),
        (
            "ReplicaSet",
            json!({"spec": {"replicas": 3}, "status": {"replicas": 2, "readyReplicas": 1}}),
            json!(["x", 3, 2, 1, "5m", "", "", "<none>"]),
        ),
        (
            "Event",
            json!({"lastTimestamp": "2026-01-01T00:04:00Z", "type": "Normal", "reason": "R", "message": " m\n",
            "involvedObject": {"kind": "Pod", "name": "p", "fieldPath": "f"}, "source": {"component": "c", "host": "h"}, "count": 4}),
            json!(["60s", "Normal", "R", "pod/p", "f", "c, h", "m", "<unknown>", 4, "x"]),
        ),
        (
            "Endpoints",
            json!({"subsets": [{"addresses": [{"ip": "192.0.2.1"}, {"ip": "2001:db8::1"}], "ports": [{"port": 1}, {"port": 2}]}]}),
            json!(["x", "192.0.2.1:1,[2001:db8::1]:1,192.0.2.1:2 + 1 more...", "5m"]),
        ),
        (
            "EndpointSlice",
            json!({"addressType": "IPv4", "endpoints": [], "ports": [{"port": 80}, {"name": "n"}]}),
            json!(["x", "IPv4", "80,n", "<unset>", "5m"]),
        ),
        ("ConfigMap", json!({"data": {"a": "b"}, "binaryData": {"c": "AA=="}}), json!(["x", 2, "5m"])),
    ] {
        let mut object = object.clone();
        object["metadata"] = metadata.clone();
        assert_eq!(Value::Array(strategy(kind).cells(&object, now)), cells, "{kind}");
    }
}

#[test]
fn an_api_service_without_a_service_is_available_at_once() {
    let strategy = strategy("APIService");
    let mut local =
        json!({"spec": {"group": "g.example", "version": "v1"}, "status": {"conditions": [{"type": "Odd"}]}});
    let mut remote = local.clone();
    remote["spec"]["service"] = json!({"name": "s", "namespace": "n"});
    strategy.prepare_create(&mut local);
    strategy.prepare_create(&mut remote);
    let conditions = local["status"]["conditions"].as_array().unwrap();
    assert_eq!(conditions.len(), 1, "{local}");
    assert_eq!((&conditions[0]["type"], &conditions[0]["reason"]), (&json!("Available"), &json!("Local")));
    assert!(
        remote["status"]["conditions"].as_array().is_none_or(|conditions| conditions.is_empty()),
        "{remote}"
    );
}

#[test]
fn text_fields_have_the_value_of_the_text_at_their_path() {
    for kind in built_in() {
        for field in kind.strategy.text_fields() {
            let selectable = kind.strategy.selectable_fields();
            assert!(selectable.contains(field), "{field} of {} is not selectable", kind.plural);
            for (value, text) in [(json!("some text"), "some text"), (Value::Null, "")] {
                let object = field.rsplit('.').fold(value, |value, part| {
                    let mut parent = ferrite_json::Map::new();
                    parent.insert(part, value);
                    parent.into()
                });
                assert_eq!(
                    kind.strategy.selectable_value(&object, field),
                    text,
                    "{field} of {}",
                    kind.plural
                );
            }
        }
    }
}
