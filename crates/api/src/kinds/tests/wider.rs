//! Tests of further kinds: their defaults, errors, kept fields and columns.

use super::*;

#[test]
fn what_they_fill_in() {
    for (kind, object, expected) in [
        (
            "LimitRange",
            json!({"spec": {"limits": [{"type": "Container", "max": {"cpu": "2"}, "min": {"memory": "1Mi"}}]}}),
            json!({"spec": {"limits": [{"type": "Container", "max": {"cpu": "2"}, "min": {"memory": "1Mi"},
                "default": {"cpu": "2"}, "defaultRequest": {"cpu": "2", "memory": "1Mi"}}]}}),
        ),
        (
            "PersistentVolume",
            json!({"spec": {"hostPath": {"path": "/x"}}}),
            json!({"spec": {"persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem", "hostPath": {"type": ""}}}),
        ),
        (
            "ReplicationController",
            json!({"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}),
            json!({"spec": {"replicas": 1, "selector": {"a": "b"}}, "metadata": {"labels": {"a": "b"}}}),
        ),
        (
            "DaemonSet",
            json!({}),
            json!({"spec": {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
                "revisionHistoryLimit": 10}}),
        ),
        (
            "StatefulSet",
            json!({}),
            json!({"spec": {"podManagementPolicy": "OrderedReady", "updateStrategy": {"rollingUpdate": {"partition": 0}},
                "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"}}}),
        ),
        (
            "Job",
            json!({"spec": {"backoffLimitPerIndex": 1, "parallelism": 2}}),
            json!({"spec": {"backoffLimit": 2_147_483_647, "completionMode": "NonIndexed", "suspend": false,
                "podReplacementPolicy": "TerminatingOrFailed"}}),
        ),
        (
            "CronJob",
            json!({}),
            json!({"spec": {"concurrencyPolicy": "Allow", "successfulJobsHistoryLimit": 3, "failedJobsHistoryLimit": 1}}),
        ),
        (
            "HorizontalPodAutoscaler",
            json!({"spec": {"behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 1}]}}}}),
            json!({"spec": {"minReplicas": 1, "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max",
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 1}]},
                "scaleDown": {"selectPolicy": "Max", "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]}}}}),
        ),
        (
            "NetworkPolicy",
            json!({"spec": {"egress": [{"ports": [{"port": 1}]}]}}),
            json!({"spec": {"policyTypes": ["Ingress", "Egress"], "egress": [{"ports": [{"port": 1, "protocol": "TCP"}]}]}}),
        ),
        (
            "RoleBinding",
            json!({"subjects": [{"kind": "User", "name": "u"}, {"kind": "ServiceAccount", "name": "s"}]}),
            json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io"}, "subjects": [
                {"kind": "User", "name": "u", "apiGroup": "rbac.authorization.k8s.io"}, {"kind": "ServiceAccount", "name": "s"}]}),
        ),
        (
            "CustomResourceDefinition",
            json!({"spec": {"names": {"kind": "Wid"}, "versions": [{"name": "v1", "storage": true}]}}),
            json!({"spec": {"names": {"singular": "wid", "listKind": "WidList"}, "conversion": {"strategy": "None"}},
                "status": {"storedVersions": ["v1"]}}),
        ),
        (
            "ResourceClaim",
            json!({"spec": {"devices": {"requests": [{"name": "r", "exactly": {}}, {"name": "f", "firstAvailable": [{"allocationMode": "All"}]}]}}}),
            json!({"spec": {"devices": {"requests": [{"name": "r", "exactly": {"allocationMode": "ExactCount", "count": 1}},
                {"name": "f", "firstAvailable": [{"allocationMode": "All"}]}]}}}),
        ),
        (
            "PriorityLevelConfiguration",
            json!({"spec": {"type": "Limited", "limited": {"limitResponse": {"type": "Queue", "queuing": {}}}}}),
            json!({"spec": {"limited": {"nominalConcurrencyShares": 30, "lendablePercent": 0, "limitResponse": {
                "queuing": {"queues": 64, "handSize": 8, "queueLengthLimit": 50}}}}}),
        ),
        (
            "ValidatingWebhookConfiguration",
            json!({"webhooks": [{"clientConfig": {"service": {}}, "rules": [{}]}]}),
            json!({"webhooks": [{"clientConfig": {"service": {"port": 443}}, "rules": [{"scope": "*"}], "failurePolicy": "Fail",
                "matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}, "timeoutSeconds": 10}]}),
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
fn a_job_is_told_from_others_by_its_uid() {
    let mut job = minimal("Job");
    let strategy = strategy("Job");
    strategy.default(&mut job);
    strategy.prepare_create(&mut job);
    let labels = json!({"batch.kubernetes.io/controller-uid": "u", "batch.kubernetes.io/job-name": "x",
        "controller-uid": "u", "job-name": "x"});
    assert_eq!(job["spec"]["template"]["metadata"]["labels"], labels);
    assert_eq!(job["metadata"]["labels"], labels);
    assert_eq!(job["spec"]["selector"], json!({"matchLabels": {"batch.kubernetes.io/controller-uid": "u"}}));
}

#[test]
fn what_they_refuse() {
    for (kind, changes, messages) in [
        (
            "LimitRange",
            json!({"spec": {"limits": [{"type": "Pod", "max": {"cpu": "1"}, "min": {"cpu": "2"}}]}}),
            vec!["spec.limits[0].min[cpu]: Invalid value: \"2\": min value 2 is greater than max value 1"],
        ),
        (
            "ResourceQuota",
            json!({"spec": {"hard": {"secrets": "1"}, "scopes": ["BestEffort"]}}),
            vec!["spec.scopes: Invalid value: [\"BestEffort\"]: unsupported scope applied to resource"],
        ),
        (
            "PersistentVolumeClaim",
            json!({"spec": {"accessModes": ["ReadWriteOncePod", "ReadOnlyMany"]}}),
            vec!["spec.accessModes: Forbidden: may not use ReadWriteOncePod with other access modes"],
        ),
        (
            "PersistentVolume",
            json!({"spec": {"hostPath": null, "local": {"path": "/x"}}}),
            vec!["spec.nodeAffinity: Required value: Local volume requires node affinity"],
        ),
        (
            "DaemonSet",
            json!({"spec": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}}),
            vec![
                "spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: 1: may not be set when maxUnavailable is non-zero",
            ],
        ),
        (
            "Job",
            json!({"spec": {"completionMode": "Indexed", "completions": null, "parallelism": 1}}),
            vec!["spec.completions: Required value: when completion mode is Indexed"],
        ),
        (
            "Job",
            json!({"spec": {"podFailurePolicy": {"rules": [{"action": "Ignore"}]}}}),
            vec![
                "spec.podFailurePolicy.rules[0]: Invalid value: specifying one of OnExitCodes and OnPodConditions is required",
            ],
        ),
        (
            "CronJob",
            json!({"spec": {"schedule": "TZ=UTC * * * * *", "timeZone": "Nowhere/Land"}}),
            vec![
                "spec.schedule: Invalid value: \"TZ=UTC * * * * *\": cannot use TZ or CRON_TZ in schedule, use timeZone field instead",
                "spec.timeZone: Invalid value: \"Nowhere/Land\": unknown time zone Nowhere/Land",
            ],
        ),
        (
            "HorizontalPodAutoscaler",
            json!({"spec": {"minReplicas": 5, "metrics": [{"type": "Pods", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 1}}}]}}),
            vec![
                "spec.maxReplicas: Invalid value: 3: must be greater than or equal to `minReplicas`",
                "spec.metrics[0].pods: Required value: must populate information for the given metric source",
            ],
        ),
        (
            "Ingress",
            json!({"spec": {"rules": [{"host": "*.a.*", "http": {"paths": [{"path": "x", "pathType": "Exact", "backend": {}}]}}]}}),
            vec![
                "spec.rules[0].host: Invalid value: \"*.a.*\": a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character (e.g. '*.example.com', regex used for validation is '\\*\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
                "spec.rules[0].http.paths[0].path: Invalid value: \"x\": must be an absolute path",
                "spec.rules[0].http.paths[0].backend: Invalid value: \"\": resource or service backend is required",
            ],
        ),
        (
            "FlowSchema",
            json!({"spec": {"rules": [{"subjects": [{"kind": "User"}], "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": ["x"]}]}]}}),
            vec![
                "spec.rules[0].subjects[0].user: Required value: user is required when subject kind is 'User'",
                "spec.rules[0].nonResourceRules[0].nonResourceURLs[0]: Invalid value: \"x\": must start with slash",
            ],
        ),
        (
            "PriorityClass",
            json!({"value": 1_000_000_001}),
            vec!["value: Forbidden: maximum allowed value of a user defined priority is 1000000000"],
        ),
        (
            "Role",
            json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/x"]}]}),
            vec![
                "rules[0].nonResourceURLs: Invalid value: [\"/x\"]: namespaced rules cannot apply to non-resource URLs",
            ],
        ),
        (
            "CSIDriver",
            json!({"spec": {"tokenRequests": [{"audience": "a", "expirationSeconds": 5}, {"audience": "a"}]}}),
            vec![
                "spec.tokenRequests[0].expirationSeconds: Invalid value: 5: may not specify a duration less than 10 minutes",
                "spec.tokenRequests[1].audience: Duplicate value: \"a\"",
            ],
        ),
        (
            "SubjectAccessReview",
            json!({"spec": {"user": ""}}),
            vec!["spec.user: Invalid value: \"\": at least one of user or group must be specified"],
        ),
        (
            "Pod",
            json!({"spec": {"resourceClaims": [{"name": "c"}], "overhead": {"cpu": "-1"},
                "resources": {"requests": {"cpu": "1"}}, "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "2"}}}]}}),
            vec![
                "spec.resourceClaims[0]: Invalid value: {\"Name\":\"c\",\"ResourceClaimName\":null,\"ResourceClaimTemplateName\":null}: must specify one of: `resourceClaimName`, `resourceClaimTemplateName`",
                "spec.resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container requests of 2",
                "spec.overhead.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"volumes": [{"name": "e", "emptyDir": {}}], "containers": [{"name": "c", "image": "i",
                "volumeMounts": [{"name": "e", "mountPath": "/a", "subPath": "/x", "recursiveReadOnly": "Enabled"}],
                "volumeDevices": [{"name": "e", "devicePath": "/dev/../a"}]}]}}),
            vec![
                "spec.containers[0].volumeMounts[0].name: Invalid value: \"e\": must not already exist in volumeDevices",
                "spec.containers[0].volumeMounts.subPath: Invalid value: \"/x\": must be a relative path",
                "spec.containers[0].volumeMounts.recursiveReadOnly: Forbidden: may only be specified when readOnly is true",
                "spec.containers[0].volumeDevices[0].name: Invalid value: \"e\": can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
                "spec.containers[0].volumeDevices[0].devicePath: Invalid value: \"/dev/../a\": can not contain backsteps ('..')",
                "spec.containers[0].volumeDevices[0].name: Invalid value: \"e\": must not already exist in volumeMounts",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"containers": [{"name": "c", "image": "i",
                "lifecycle": {"preStop": {"sleep": {"seconds": 31}}},
                "restartPolicyRules": [{"action": "Stop", "exitCodes": {"operator": "Is", "values": [1]}}]}]}}),
            vec![
                "spec.containers[0].lifecycle.preStop.sleep: Invalid value: 31: must be non-negative and less than terminationGracePeriodSeconds (30)",
                "spec.containers[0].restartPolicy: Required value: must specify restartPolicy when restart rules are used",
                "spec.containers[0].restartPolicyRules[0].action: Unsupported value: \"Stop\": supported values: \"Restart\", \"RestartAllContainers\"",
                "spec.containers[0].restartPolicyRules[0].exitCodes.operator: Unsupported value: \"Is\": supported values: \"In\", \"NotIn\"",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"os": {"name": "windows"}, "hostPID": true, "hostUsers": false, "hostnameOverride": "a_b",
                "securityContext": {"runAsUser": 1}, "containers": [{"name": "c", "image": "i",
                    "securityContext": {"privileged": false}}]}}),
            vec![
                "spec.HostPID: Forbidden: when `hostUsers` is false",
                "spec.hostnameOverride: Invalid value: \"a_b\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
                "spec.hostUsers: Forbidden: cannot be set for a windows pod",
                "spec.hostPID: Forbidden: cannot be set for a windows pod",
                "spec.securityContext.runAsUser: Forbidden: cannot be set for a windows pod",
                "spec.containers[0].securityContext.privileged: Forbidden: cannot be set for a windows pod",
            ],
        ),
        (
            "Service",
            json!({"spec": {"type": "ClusterIP", "sessionAffinity": "None", "loadBalancerSourceRanges": ["10.0.0.0/8"],
                "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]}}),
            vec!["spec.LoadBalancerSourceRanges: Forbidden: may only be used when `type` is 'LoadBalancer'"],
        ),
    ] {
        assert_eq!(errors_with(kind, &changes), messages, "{kind} {changes}");
    }
}

#[test]
fn what_stays_as_it_was() {
    for (kind, changes, messages) in [
        (
            "StatefulSet",
            json!({"spec": {"serviceName": "other"}}),
            vec![
                "spec: Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden",
            ],
        ),
        ("StatefulSet", json!({"spec": {"replicas": 5, "minReadySeconds": 1}}), vec![]),
        (
            "ClusterRoleBinding",
            json!({"roleRef": {"name": "edit"}}),
            vec![
                "roleRef: Invalid value: {\"APIGroup\":\"rbac.authorization.k8s.io\",\"Kind\":\"ClusterRole\",\"Name\":\"edit\"}: cannot change roleRef",
            ],
        ),
        (
            "VolumeAttributesClass",
            json!({"driverName": "e.example"}),
            vec!["driverName: Forbidden: updates to driverName are forbidden."],
        ),
        ("PriorityClass", json!({"value": 9}), vec!["value: Forbidden: may not be changed in an update."]),
        (
            "StorageClass",
            json!({"reclaimPolicy": "Retain"}),
            vec!["reclaimPolicy: Invalid value: \"Retain\": field is immutable"],
        ),
    ] {
        let strategy = strategy(kind);
        let mut old = minimal(kind);
        strategy.default(&mut old);
        let mut new = old.clone();
        overlay(&mut new, &changes);
        strategy.prepare_update(&mut new, &old);
        assert_eq!(texts(strategy.validate_update(&new, &old)), messages, "{kind} {changes}");
    }
}

#[test]
fn subresources_of_pods_touch_their_part() {
    let pods = strategy("Pod");
    let mut old = minimal("Pod");
    old["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}});
    pods.default(&mut old);
    pods.prepare_create(&mut old);
    for (subresource, changes, messages) in [
        (
            "resize",
            json!({"containers": [{"name": "c", "image": "other", "resources": {"requests": {"cpu": "2"}}}]}),
            vec![],
        ),
        (
            "resize",
            json!({"containers": [{"name": "c", "image": "i", "resources": {}}]}),
            vec![
                "spec: Invalid value: \"Burstable\": Pod QOS Class may not change as a result of resizing",
                "spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
            ],
        ),
        (
            "ephemeralcontainers",
            json!({"ephemeralContainers": [{"name": "c", "image": "i", "targetContainerName": "z", "ports": [{"containerPort": 1}]}]}),
            vec![
                "spec.ephemeralContainers[0].name: Duplicate value: \"c\"",
                "spec.ephemeralContainers[0].targetContainerName: Not found: \"z\"",
                "spec.ephemeralContainers[0].ports: Forbidden: cannot be set for an Ephemeral Container",
            ],
        ),
        (
            "ephemeralcontainers",
            json!({"nodeName": "n", "ephemeralContainers": [{"name": "e", "image": "i"}]}),
            vec![],
        ),
    ] {
        let mut new = old.clone();
        overlay(&mut new["spec"], &changes);
        pods.default(&mut new);
        pods.prepare_subresource_update(subresource, &mut new, &old);
        assert_eq!(new["spec"]["containers"][0]["image"], "i", "{subresource} {changes}");
        assert!(new["spec"]["nodeName"].is_null());
        assert_eq!(
            texts(pods.validate_subresource_update(subresource, &new, &old)),
            messages,
            "{subresource} {changes}"
        );
    }
}

#[test]
fn what_they_show() {
    let now = "2026-01-01T00:05:00Z".parse().unwrap();
    let metadata = json!({"name": "x", "creationTimestamp": "2026-01-01T00:00:00Z"});
    for (kind, object, cells) in [
        ("Role", json!({}), json!(["x", "2026-01-01T00:00:00Z"])),
        (
            "Job",
            json!({"spec": {"completions": 4}, "status": {"succeeded": 1, "startTime": "2026-01-01T00:04:00Z",
                "conditions": [{"type": "Suspended", "status": "True"}]}}),
            json!(["x", "Suspended", "1/4", "60s", "5m", "", "", "<none>"]),
        ),
        (
            "HorizontalPodAutoscaler",
            json!({"spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}, "minReplicas": 1, "maxReplicas": 3, "metrics": [
                {"type": "Resource", "resource": {"name": "cpu", "target": {"averageUtilization": 60}}},
                {"type": "External", "external": {"target": {"averageValue": "5"}}}, {"type": "Pods", "pods": {}}]},
                "status": {"currentReplicas": 2, "currentMetrics": [{"resource": {"current": {"averageUtilization": 20}}}]}}),
            json!(["x", "Deployment/d", "cpu: 20%/60%, <unknown>/5 (avg) + 1 more...", "1", 3, 2, "5m"]),
        ),
        (
            "PersistentVolume",
            json!({"spec": {"capacity": {"storage": "5Gi"}, "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Delete", "claimRef": {"namespace": "n", "name": "c"}}, "status": {"phase": "Bound"}}),
            json!(["x", "5Gi", "RWO,RWX", "Delete", "Bound", "n/c", "", "<unset>", "", "5m", "<unset>"]),
        ),
        (
            "ResourceQuota",
            json!({"status": {"hard": {"limits.cpu": "4", "pods": "10", "secrets": "2"}, "used": {"pods": "3"}}}),
            json!(["x", "pods: 3/10, secrets: 0/2", "limits.cpu: 0/4", "5m"]),
        ),
        (
            "Ingress",
            json!({"spec": {"rules": [{"host": "a"}, {"host": "b"}, {"host": "c"}, {"host": "d"}], "tls": [{}]},
                "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}),
            json!(["x", "<none>", "a,b,c + 1 more...", "192.0.2.1", "80, 443", "5m"]),
        ),
        (
            "CertificateSigningRequest",
            json!({"spec": {"signerName": "s", "username": "u"}, "status": {"certificate": "AA==", "conditions": [{"type": "Approved"}]}}),
            json!(["x", "5m", "s", "u", "<none>", "Approved,Issued"]),
        ),
        (
            "PodDisruptionBudget",
            json!({"spec": {"minAvailable": 2}, "status": {"disruptionsAllowed": 1}}),
            json!(["x", "2", "N/A", 1, "5m"]),
        ),
    ] {
        let mut object = object.clone();
        object["metadata"] = metadata.clone();
        assert_eq!(Value::Array(strategy(kind).cells(&object, now)), cells, "{kind}");
    }
}

#[test]
fn versions_that_share_objects_agree_on_them() {
    for resource in built_in().into_iter().filter(|r| r.storage.is_some()) {
        let stored = resource.storage_gvk();
        let target = built_in().into_iter().find(|r| r.gvk() == stored);
        let target = target.unwrap_or_else(|| panic!("{resource:?} is stored as {stored}, which is no row"));
        assert!(target.storage.is_none(), "{resource:?}");
        assert_eq!(target.gvr(), resource.storage_gvr());
        assert_eq!(target.scope, resource.scope);
        let mut object = minimal(&resource.kind);
        object["apiVersion"] = resource.api_version().into();
        resource.strategy.default(&mut object);
        resource.to_storage(&mut object);
        assert_eq!(object["apiVersion"], target.api_version(), "{resource:?}");
        let once = object.clone();
        resource.from_storage(&mut object);
        assert_eq!(object["apiVersion"], resource.api_version(), "{resource:?}");
        resource.to_storage(&mut object);
        assert_eq!(object, once, "{resource:?}");
    }
}

#[test]
fn previews_are_off_and_stable_versions_on() {
    for resource in built_in() {
        assert_eq!(resource.on_by_default, matches!(&*resource.version, "v1" | "v2"), "{resource:?}");
        assert!(
            crate::schema::kind(&resource.group, &resource.version, &resource.kind).is_some(),
            "{resource:?} has no schema"
        );
    }
}

#[test]
fn a_status_changes_no_more_than_upstream_lets_it() {
    let strategy = |group: &str, plural: &str| {
        let all = crate::kinds::built_in();
        all.into_iter().find(|r| r.group == group && r.plural == plural).expect("a resource").strategy
    };
    let metadata = |object: &Value| object["metadata"].clone();
    let old = json!({"metadata": {"name": "x"}, "spec": {"a": 1}});
    let new = json!({"metadata": {"name": "x", "labels": {"k": "v"}}, "spec": {}, "status": {}});
    for (group, plural, keeps_labels) in [
        ("networking.k8s.io", "servicecidrs", false),
        ("apiextensions.k8s.io", "customresourcedefinitions", true),
        ("apps", "replicasets", true),
    ] {
        let mut written = new.clone();
        strategy(group, plural).prepare_status_update(&mut written, &old);
        assert_eq!(written["spec"], old["spec"], "{plural}");
        assert_eq!(metadata(&written) == metadata(&new), keeps_labels, "{plural}");
    }
    let mut daemons = json!({"metadata": {"name": "x"}, "status": {}});
    let annotation = "deprecated.daemonset.template.generation";
    let generation = json!({"metadata": {"annotations": {annotation: "3"}}});
    strategy("apps", "daemonsets").prepare_status_update(&mut daemons, &generation);
    assert_eq!(daemons["metadata"]["annotations"][annotation], "3");
    let mut node = json!({"status": {"config": {}, "phase": "Running"}});
    strategy("", "nodes").prepare_status_update(&mut node, &json!({}));
    assert_eq!(node["status"], json!({"phase": "Running"}));

    let wrong = |group: &str, plural: &str, status: Value| -> Vec<String> {
        let new = json!({"metadata": {"name": "x"}, "status": status});
        let errors = strategy(group, plural).validate_status_update(&new, &json!({}));
        errors.iter().map(ToString::to_string).collect()
    };
    let negative =
        |field: &str| vec![format!("status.{field}: Invalid value: -1: must be greater than or equal to 0")];
    for (plural, field) in [
        ("daemonsets", "collisionCount"),
        ("deployments", "collisionCount"),
        ("deployments", "terminatingReplicas"),
        ("replicasets", "terminatingReplicas"),
    ] {
        assert_eq!(wrong("apps", plural, json!({field: -1})), negative(field), "{plural}");
    }
    let definitions = ("apiextensions.k8s.io", "customresourcedefinitions");
    assert_eq!(wrong(definitions.0, definitions.1, json!({"storedVersions": ["gone"]})), [""; 0]);
    assert_eq!(
        wrong(definitions.0, definitions.1, json!({"acceptedNames": {"kind": "X", "listKind": "X"}})),
        [r#"status.acceptedNames.listKind: Invalid value: "X": kind and listKind may not be the same"#]
    );
    assert_eq!(
        wrong("flowcontrol.apiserver.k8s.io", "flowschemas", json!({"conditions": [{}]})),
        ["status.conditions[0].type: Required value"]
    );
}
