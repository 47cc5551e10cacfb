//! Tests of each kind's errors and their words.

use super::*;

#[test]
fn what_is_wrong_with_a_pod() {
    let container = |fields: Value| {
        let mut container = json!({"name": "c", "image": "i"});
        overlay(&mut container, &fields);
        json!({"spec": {"containers": [container]}})
    };
    for (changes, messages) in [
        (json!({"spec": {"containers": []}}), vec!["spec.containers: Required value"]),
        (
            container(json!({"name": "", "image": ""})),
            vec!["spec.containers[0].name: Required value", "spec.containers[0].image: Required value"],
        ),
        (
            container(json!({"image": " i"})),
            vec![
                "spec.containers[0].image: Invalid value: \" i\": must not have leading or trailing whitespace",
            ],
        ),
        (
            container(json!({"ports": [{"containerPort": 0}]})),
            vec!["spec.containers[0].ports[0].containerPort: Required value"],
        ),
        (
            container(
                json!({"ports": [{"containerPort": 80, "hostPort": 80}, {"containerPort": 81, "hostPort": 80}]}),
            ),
            vec!["spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//80\""],
        ),
        (
            container(json!({"env": [{"name": "a=b"}]})),
            vec![
                "spec.containers[0].env[0].name: Invalid value: \"a=b\": a valid environment variable name must consist only of printable ASCII characters other than '='",
            ],
        ),
        (
            container(json!({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]})),
            vec![
                "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: \"spec.x\": error converting fieldPath: field label not supported: spec.x",
            ],
        ),
        (
            container(
                json!({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}}]}),
            ),
            vec![],
        ),
        (
            container(json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]})),
            vec!["spec.containers[0].volumeMounts[0].name: Not found: \"v\""],
        ),
        (
            container(json!({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}})),
            vec![
                "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
            ],
        ),
        (
            container(json!({"resources": {"requests": {"example.com/gpu": "1"}}})),
            vec![
                "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
            ],
        ),
        (
            container(json!({"livenessProbe": {}})),
            vec!["spec.containers[0].livenessProbe: Required value: must specify a handler type"],
        ),
        (
            container(json!({"livenessProbe": {"exec": {"command": ["x"]}, "successThreshold": 2}})),
            vec!["spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1"],
        ),
        (
            container(json!({"readinessProbe": {"httpGet": {"port": 0}}})),
            vec![
                "spec.containers[0].readinessProbe.httpGet.port: Invalid value: 0: must be between 1 and 65535, inclusive",
            ],
        ),
        (
            container(json!({"imagePullPolicy": "Maybe"})),
            vec![
                "spec.containers[0].imagePullPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
            ],
        ),
        (
            json!({"spec": {"initContainers": [{"name": "c", "image": "i"}]}}),
            vec!["spec.initContainers[0].name: Duplicate value: \"c\""],
        ),
        (
            json!({"spec": {"initContainers": [{"name": "i", "image": "i", "readinessProbe": {"exec": {"command": ["x"]}}}]}}),
            vec![
                "spec.initContainers[0].readinessProbe: Forbidden: may not be set for init containers without restartPolicy=Always",
            ],
        ),
        (
            json!({"spec": {"volumes": [{"name": "v"}, {"name": "v"}]}}),
            vec!["spec.volumes[1].name: Duplicate value: \"v\""],
        ),
        (
            json!({"spec": {"volumes": [{"name": "v", "hostPath": {"path": ""}}]}}),
            vec!["spec.volumes[0].hostPath.path: Required value"],
        ),
        (
            json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]}}),
            vec!["spec.volumes[0].secret: Forbidden: may not specify more than 1 volume type"],
        ),
        (
            json!({"spec": {"volumes": [{"name": "v", "configMap": {"name": "c", "defaultMode": 4096}}]}}),
            vec![
                "spec.volumes[0].configMap.defaultMode: Invalid value: 4096: must be a number between 0 and 0777 (octal), both inclusive",
            ],
        ),
        (
            json!({"spec": {"restartPolicy": "Sometimes"}}),
            vec![
                "spec.restartPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"OnFailure\", \"Never\"",
            ],
        ),
        (
            json!({"spec": {"dnsPolicy": "None"}}),
            vec!["spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"],
        ),
        (
            json!({"spec": {"activeDeadlineSeconds": 0}}),
            vec!["spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive"],
        ),
        (
            json!({"spec": {"securityContext": {"runAsUser": -1}}}),
            vec![
                "spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
            ],
        ),
        (
            json!({"spec": {"hostPID": true, "shareProcessNamespace": true}}),
            vec![
                "spec.securityContext.shareProcessNamespace: Invalid value: true: ShareProcessNamespace and HostPID cannot both be enabled",
            ],
        ),
        (
            json!({"spec": {"tolerations": [{"operator": "Equal", "value": "x"}]}}),
            vec![
                "spec.tolerations[0].operator: Invalid value: \"Equal\": operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            ],
        ),
        (
            json!({"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}}}),
            vec![
                "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms: Required value: must have at least one node selector term",
            ],
        ),
        (
            json!({"spec": {"topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}]}}),
            vec!["spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero"],
        ),
        (
            json!({"spec": {"schedulingGates": [{"name": "g"}], "nodeName": "n"}}),
            vec!["spec.nodeName: Forbidden: cannot be set until all schedulingGates have been cleared"],
        ),
        (
            json!({"spec": {"ephemeralContainers": [{"name": "e", "image": "i"}]}}),
            vec!["spec.ephemeralContainers: Forbidden: cannot be set on create"],
        ),
    ] {
        assert_eq!(errors_with("Pod", &changes), messages, "{changes}");
    }
}

#[test]
fn what_is_wrong_with_other_kinds() {
    for (kind, changes, messages) in [
        (
            "Deployment",
            json!({"spec": {"selector": {"matchLabels": {"app": "b"}}}}),
            vec![
                "spec.template.metadata.labels: Invalid value: {\"app\":\"a\"}: `selector` does not match template `labels`",
            ],
        ),
        (
            "Deployment",
            json!({"spec": {"selector": null}}),
            vec![
                "spec.selector: Required value",
                "spec.template.metadata.labels: Invalid value: {\"app\":\"a\"}: `selector` does not match template `labels`",
            ],
        ),
        (
            "Deployment",
            json!({"spec": {"replicas": -1}}),
            vec!["spec.replicas: Invalid value: -1: must be greater than or equal to 0"],
        ),
        (
            "Deployment",
            json!({"spec": {"strategy": {"type": "Bogus"}}}),
            vec![
                "spec.strategy: Unsupported value: {\"Type\":\"Bogus\",\"RollingUpdate\":null}: supported values: \"Recreate\", \"RollingUpdate\"",
            ],
        ),
        (
            "Deployment",
            json!({"spec": {"strategy": {"rollingUpdate": {"maxUnavailable": "0%", "maxSurge": 0}}}}),
            vec![
                "spec.strategy.rollingUpdate.maxUnavailable: Invalid value: \"0%\": may not be 0 when `maxSurge` is 0",
            ],
        ),
        (
            "Deployment",
            json!({"spec": {"minReadySeconds": 600}}),
            vec!["spec.progressDeadlineSeconds: Invalid value: 600: must be greater than minReadySeconds"],
        ),
        (
            "ReplicaSet",
            json!({"spec": {"template": {"spec": {"restartPolicy": "Never"}}}}),
            vec![
                "spec.template.spec.restartPolicy: Unsupported value: \"Never\": supported values: \"Always\"",
            ],
        ),
        (
            "ReplicaSet",
            json!({"spec": {"selector": {"matchExpressions": [{"operator": "In", "key": "a"}]}}}),
            vec![
                "spec.selector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'",
                "spec.selector: Invalid value: {\"matchLabels\":{\"app\":\"a\"},\"matchExpressions\":[{\"key\":\"a\",\"operator\":\"In\"}]}: invalid label selector",
            ],
        ),
        ("Service", json!({"spec": {"ports": []}}), vec!["spec.ports: Required value"]),
        ("Service", json!({"spec": {"ports": [], "clusterIP": "None"}}), vec![]),
        (
            "Service",
            json!({"spec": {"ports": [{"port": 80}, {"port": 81}]}}),
            vec!["spec.ports[0].name: Required value", "spec.ports[1].name: Required value"],
        ),
        (
            "Service",
            json!({"spec": {"ports": [{"port": 80, "nodePort": 30000}]}}),
            vec!["spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"],
        ),
        (
            "Service",
            json!({"spec": {"type": "Bogus"}}),
            vec![
                "spec.type: Unsupported value: \"Bogus\": supported values: \"ClusterIP\", \"ExternalName\", \"LoadBalancer\", \"NodePort\"",
            ],
        ),
        (
            "Service",
            json!({"spec": {"type": "ExternalName", "ports": []}}),
            vec!["spec.externalName: Required value"],
        ),
        (
            "Service",
            json!({"spec": {"type": "NodePort", "clusterIP": "None"}}),
            vec![
                "spec.clusterIPs[0]: Invalid value: \"None\": may not be set to 'None' for NodePort services",
            ],
        ),
        (
            "Service",
            json!({"spec": {"externalTrafficPolicy": "Local"}}),
            vec![
                "spec.externalTrafficPolicy: Invalid value: \"Local\": may only be set for externally-accessible services",
            ],
        ),
        (
            "ConfigMap",
            json!({"data": {"a/b": "x"}}),
            vec![
                "data[a/b]: Invalid value: \"a/b\": a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')",
            ],
        ),
        (
            "ConfigMap",
            json!({"data": {"a": "x"}, "binaryData": {"a": "AA=="}}),
            vec!["data[a]: Invalid value: \"a\": duplicate of key present in binaryData"],
        ),
        (
            "ConfigMap",
            json!({"data": {"a": "x".repeat(1024 * 1024 + 1)}}),
            vec!["[]: Too long: may not be more than 1048576 bytes"],
        ),
        (
            "Secret",
            json!({"type": "kubernetes.io/tls"}),
            vec!["data[tls.crt]: Required value", "data[tls.key]: Required value"],
        ),
        ("Secret", json!({"type": "kubernetes.io/basic-auth", "stringData": {"username": "u"}}), vec![]),
        (
            "Secret",
            json!({"type": "kubernetes.io/dockerconfigjson"}),
            vec!["data[.dockerconfigjson]: Required value"],
        ),
        (
            "Lease",
            json!({"spec": {"leaseDurationSeconds": 0}}),
            vec!["spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0"],
        ),
        (
            "Event",
            json!({"involvedObject": {"namespace": "other"}}),
            vec!["involvedObject.namespace: Invalid value: \"other\": does not match event.namespace"],
        ),
        (
            "EndpointSlice",
            json!({"addressType": "IPv6"}),
            vec!["endpoints[0].addresses: Invalid value: \"192.0.2.1\": must be an IPv6 address"],
        ),
        (
            "EndpointSlice",
            json!({"endpoints": [{"addresses": ["127.0.0.1"]}]}),
            vec![
                "endpoints[0].addresses[0]: Invalid value: \"127.0.0.1\": may not be in the loopback range (127.0.0.0/8, ::1/128)",
            ],
        ),
        (
            "Endpoints",
            json!({"subsets": [{"ports": [{"port": 80}]}]}),
            vec!["subsets[0]: Required value: must specify `addresses` or `notReadyAddresses`"],
        ),
        (
            "Node",
            json!({"spec": {"taints": [{"key": "a", "effect": "Bad"}]}}),
            vec![
                "metadata.taints[0].effect: Unsupported value: \"Bad\": supported values: \"NoSchedule\", \"PreferNoSchedule\", \"NoExecute\"",
            ],
        ),
        (
            "Node",
            json!({"spec": {"podCIDRs": ["10.0.0.0/24", "10.1.0.0/24"]}}),
            vec![
                "spec.podCIDRs: Invalid value: [\"10.0.0.0/24\",\"10.1.0.0/24\"]: may specify no more than one CIDR for each IP family",
            ],
        ),
        (
            "Namespace",
            json!({"spec": {"finalizers": ["bad"]}}),
            vec![
                "spec.finalizers: Invalid value: \"bad\": name is neither a standard finalizer name nor is it fully qualified",
            ],
        ),
        ("Binding", json!({"target": {"name": ""}}), vec!["target.name: Required value"]),
    ] {
        assert_eq!(errors_with(kind, &changes), messages, "{kind} {changes}");
    }
}

#[test]
fn what_may_not_change() {
    const POD: &str = "spec: Forbidden: pod updates may not change fields other than";
    for (kind, start, changes, beginnings) in [
        ("Pod", json!({}), json!({"spec": {"containers": [{"name": "c", "image": "other"}]}}), vec![]),
        ("Pod", json!({}), json!({"spec": {"containers": [{"name": "d", "image": "i"}]}}), vec![POD]),
        ("Pod", json!({}), json!({"spec": {"nodeName": "n"}}), vec![POD]),
        ("Pod", json!({}), json!({"spec": {"activeDeadlineSeconds": 5}}), vec![]),
        (
            "Pod",
            json!({"spec": {"activeDeadlineSeconds": 5}}),
            json!({"spec": {"activeDeadlineSeconds": 6}}),
            vec![
                "spec.activeDeadlineSeconds: Invalid value: 6: must be less than or equal to previous value",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"terminationGracePeriodSeconds": -1}}),
            json!({"spec": {"terminationGracePeriodSeconds": 1}}),
            vec![],
        ),
        ("Pod", json!({}), json!({"spec": {"terminationGracePeriodSeconds": 1}}), vec![POD]),
        ("Pod", json!({}), json!({"spec": {"tolerations": [{"operator": "Exists"}]}}), vec![]),
        (
            "Pod",
            json!({"spec": {"tolerations": [{"operator": "Exists"}]}}),
            json!({"spec": {"tolerations": []}}),
            vec![
                "spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"schedulingGates": [{"name": "a"}]}}),
            json!({"spec": {"schedulingGates": []}}),
            vec![],
        ),
        (
            "Pod",
            json!({}),
            json!({"spec": {"schedulingGates": [{"name": "a"}]}}),
            vec![
                "spec.schedulingGates[0].name: Forbidden: only deletion is allowed, but found new scheduling gate 'a'",
            ],
        ),
        (
            "Pod",
            json!({}),
            json!({"spec": {"containers": [{"name": "c", "image": "i"}, {"name": "d", "image": "i"}]}}),
            vec!["spec.containers: Forbidden: pod updates may not add or remove containers"],
        ),
        ("Deployment", json!({}), json!({"spec": {"replicas": 5}}), vec![]),
        (
            "Deployment",
            json!({}),
            json!({"spec": {"selector": {"matchLabels": {"b": "c"}}, "template": {"metadata": {"labels": {"b": "c"}}}}}),
            vec![
                "spec.selector: Invalid value: {\"matchLabels\":{\"app\":\"a\",\"b\":\"c\"}}: field is immutable",
            ],
        ),
        (
            "Service",
            json!({"spec": {"clusterIP": "10.0.0.5"}}),
            json!({"spec": {"clusterIP": "10.0.0.6"}}),
            vec!["spec.clusterIPs[0]: Invalid value: [\"10.0.0.6\"]: may not change once set"],
        ),
        (
            "ConfigMap",
            json!({"data": {"a": "1"}, "immutable": true}),
            json!({"data": {"a": "2"}}),
            vec!["data: Forbidden: field is immutable when `immutable` is set"],
        ),
        (
            "ConfigMap",
            json!({"data": {"a": "1"}, "immutable": true}),
            json!({"immutable": false}),
            vec!["immutable: Forbidden: field is immutable when `immutable` is set"],
        ),
        (
            "Secret",
            json!({}),
            json!({"type": "other"}),
            vec!["type: Invalid value: \"other\": field is immutable"],
        ),
        (
            "EndpointSlice",
            json!({"endpoints": []}),
            json!({"addressType": "IPv6"}),
            vec!["addressType: Invalid value: \"IPv6\": field is immutable"],
        ),
        (
            "Node",
            json!({"spec": {"podCIDRs": ["10.0.0.0/24"]}}),
            json!({"spec": {"podCIDR": "10.0.1.0/24"}}),
            vec!["spec.podCIDRs: Forbidden: node updates may not change podCIDR except from \"\" to valid"],
        ),
    ] {
        let strategy = strategy(kind);
        let mut old = minimal(kind);
        overlay(&mut old, &start);
        strategy.default(&mut old);
        strategy.prepare_create(&mut old);
        let mut new = old.clone();
        overlay(&mut new, &changes);
        strategy.default(&mut new);
        strategy.prepare_update(&mut new, &old);
        let found = texts(strategy.validate_update(&new, &old));
        assert_eq!(found.len(), beginnings.len(), "{kind} {changes}: {found:?}");
        for (found, beginning) in found.iter().zip(beginnings) {
            assert!(found.starts_with(beginning), "{kind} {changes}: {found}");
        }
    }
}
