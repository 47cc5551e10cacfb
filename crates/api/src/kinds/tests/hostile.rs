//! No shape of object, however wrong, makes a kind panic: types are checked before, but not by the kinds.

use crate::kinds::built_in;
use crate::meta_validation::{validate_metadata, validate_metadata_update};
use crate::resource::Resource;
use ferrite_json::{Value, json};
use proptest::prelude::*;

const KEYS: &[&str] = &[
    "metadata",
    "spec",
    "status",
    "name",
    "labels",
    "template",
    "selector",
    "matchLabels",
    "matchExpressions",
    "containers",
    "initContainers",
    "ports",
    "port",
    "protocol",
    "nodePort",
    "targetPort",
    "env",
    "valueFrom",
    "fieldRef",
    "resources",
    "limits",
    "requests",
    "cpu",
    "volumes",
    "emptyDir",
    "projected",
    "sources",
    "hostPath",
    "affinity",
    "podAffinity",
    "requiredDuringSchedulingIgnoredDuringExecution",
    "labelSelector",
    "matchLabelKeys",
    "tolerations",
    "schedulingGates",
    "type",
    "clusterIP",
    "clusterIPs",
    "externalIPs",
    "data",
    "stringData",
    "subsets",
    "addresses",
    "endpoints",
    "finalizers",
    "ownerReferences",
    "strategy",
    "rollingUpdate",
    "conditions",
    "podIPs",
    "podIP",
    "podCIDR",
    "podCIDRs",
    "taints",
    "capacity",
    "containerStatuses",
    "state",
    "terminated",
    "loadBalancer",
    "ingress",
    "livenessProbe",
    "httpGet",
    "securityContext",
    "seccompProfile",
    "topologySpreadConstraints",
    "involvedObject",
    "eventTime",
    "series",
    "secrets",
    "securityContext",
];

fn anything() -> impl proptest::strategy::Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop_oneof![
            Just("LoadBalancer"),
            Just("NodePort"),
            Just("None"),
            Just("1"),
            Just("a"),
            Just("RollingUpdate")
        ]
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(7, 200, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(prop::sample::select(KEYS), inner, 0..8)
                .prop_map(|map| map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Value>()),
        ]
    })
}

/// Everything a kind does with an object.
fn exercise(resource: &Resource, new: &mut Value, old: &mut Value) {
    let now = "2026-01-01T00:00:00Z".parse().unwrap();
    let strategy = &resource.strategy;
    for defaulted in [false, true] {
        if defaulted {
            strategy.default(new);
            strategy.default(old);
        }
        let (mut created, mut updated, mut reported) = (new.clone(), new.clone(), new.clone());
        if defaulted {
            strategy.prepare_create(&mut created);
            strategy.prepare_update(&mut updated, old);
            strategy.prepare_status_update(&mut reported, old);
        }
        strategy.validate(&created);
        strategy.validate_update(&updated, old);
        strategy.validate_status_update(&reported, old);
        strategy.warnings(new);
        strategy.cells(new, now);
        strategy.deletion(new, None);
        for field in strategy.selectable_fields() {
            strategy.selectable_value(new, field);
        }
    }
    validate_metadata(new, true, |name| strategy.validate_name(name));
    validate_metadata_update(new, old);
}

/// Every place in an object, as a JSON pointer.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(map) => map.iter().for_each(|(key, v)| places(v, &format!("{at}/{key}"), found)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, v)| places(v, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

#[test]
fn a_wrong_type_in_any_place_is_survived() {
    let term = json!({"labelSelector": {"matchLabels": {"a": "b"}, "matchExpressions": []}, "matchLabelKeys": ["l"],
        "topologyKey": "z"});
    let pod = json!({
        "containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 80, "hostPort": 80}],
            "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}, "resourceFieldRef": {"resource": "limits.cpu"}}}],
            "resources": {"limits": {"cpu": "1"}}, "livenessProbe": {"httpGet": {"port": 80}},
            "volumeMounts": [{"name": "v", "mountPath": "/v"}], "securityContext": {"seccompProfile": {"type": "Localhost"}}}],
        "initContainers": [{"name": "i", "image": "i"}],
        "volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "p"}}]}},
            {"name": "e", "ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Gi"}}}}}}],
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": term}]}},
        "topologySpreadConstraints": [term], "tolerations": [{"key": "a"}], "schedulingGates": [{"name": "g"}],
        "resources": {"limits": {"cpu": "1"}}, "hostNetwork": true, "nodeSelector": {"a": "b"},
    });
    for (kind, object) in [
        (
            "Pod",
            json!({"metadata": {"name": "x", "labels": {"l": "1"}}, "spec": pod, "status": {"podIP": "192.0.2.1",
            "podIPs": [{"ip": "192.0.2.1"}], "conditions": [{"type": "Ready"}], "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 1}}}]}}),
        ),
        (
            "Deployment",
            json!({"spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}),
        ),
        (
            "Service",
            json!({"spec": {"type": "NodePort", "clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}, "ports": [{"port": 80, "protocol": "TCP", "nodePort": 30000}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}),
        ),
        (
            "Namespace",
            json!({"metadata": {"name": "x", "labels": {"a": "b"}}, "spec": {"finalizers": ["kubernetes"]}}),
        ),
        (
            "Node",
            json!({"spec": {"podCIDRs": ["10.0.0.0/24"], "taints": [{"key": "a"}]}, "status": {"capacity": {"cpu": "1"}, "addresses": [{"type": "x"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}, "nodeInfo": {}}}),
        ),
        ("Secret", json!({"type": "Opaque", "data": {"a": "AA=="}, "stringData": {"a": "b"}})),
        ("ServiceAccount", json!({"secrets": [{"name": "a"}]})),
        (
            "EndpointSlice",
            json!({"addressType": "IPv4", "endpoints": [{"addresses": ["192.0.2.1"], "hints": {"forZones": [{"name": "z"}]}}], "ports": [{"port": 80}]}),
        ),
        ("Endpoints", json!({"subsets": [{"addresses": [{"ip": "192.0.2.1"}], "ports": [{"port": 80}]}]})),
        (
            "Event",
            json!({"involvedObject": {"name": "p"}, "series": {"count": 2}, "source": {"component": "c"}}),
        ),
        ("Lease", json!({"spec": {"leaseDurationSeconds": 5}})),
    ] {
        let resource = built_in().into_iter().find(|r| r.kind == kind).unwrap();
        let mut all = Vec::new();
        places(&object, "", &mut all);
        for place in all {
            for wrong in [Value::Null, json!("x"), json!([1]), json!({"a": 1})] {
                let mut changed = object.clone();
                *changed.pointer_mut(&place).unwrap() = wrong;
                exercise(&resource, &mut changed, &mut object.clone());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_shape_makes_a_kind_panic(mut new in anything(), mut old in anything()) {
        for resource in built_in() {
            exercise(&resource, &mut new, &mut old);
        }
    }
}
