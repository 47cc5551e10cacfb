//! Answers that were compared with upstream's server: a row for each cause that once differed.

use super::{errors_with, minimal, overlay, strategy, texts};
use ferrite_json::{Value, json};

#[test]
fn of_new_objects() {
    for (kind, changes, messages) in [
        (
            "HorizontalPodAutoscaler",
            json!({"spec": {"scaleTargetRef": {"apiVersion": "v1"}, "maxReplicas": 0}}),
            vec![
                "spec.maxReplicas: Required value: must be set and greater than 0",
                "spec.maxReplicas: Invalid value: 0: must be greater than or equal to `minReplicas`",
                "spec.scaleTargetRef.apiVersion: Invalid value: \"v1\": apiVersion must specify API group",
            ],
        ),
        (
            "PriorityClass",
            json!({"preemptionPolicy": "x"}),
            vec![
                "preemptionPolicy: Unsupported value: \"x\": supported values: \"PreemptLowerPriority\", \"Never\"",
            ],
        ),
        ("PriorityClass", json!({"preemptionPolicy": ""}), vec!["preemptionPolicy: Required value"]),
        (
            "StorageClass",
            json!({"volumeBindingMode": ""}),
            vec![
                "volumeBindingMode: Unsupported value: \"\": supported values: \"Immediate\", \"WaitForFirstConsumer\"",
            ],
        ),
        (
            "DaemonSet",
            json!({"spec": {"updateStrategy": {"type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "x"}}}}),
            vec![
                "spec.updateStrategy.rollingUpdate.maxSurge: Invalid value: \"x\": a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')",
                "spec.updateStrategy.rollingUpdate.maxUnavailable: Required value: cannot be 0 when maxSurge is 0",
            ],
        ),
        (
            "PriorityLevelConfiguration",
            json!({"spec": {"limited": {"limitResponse": {"type": ""}}}}),
            vec!["spec.limited.limitResponse.type: Required value"],
        ),
        (
            "ResourceSlice",
            json!({"spec": {"allNodes": false}}),
            vec![
                "spec.allNodes: Invalid value: false: must be either unset or set to true",
                "spec: Required value: exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required",
            ],
        ),
        (
            "MutatingWebhookConfiguration",
            json!({"webhooks": [{"name": "w.example.com", "clientConfig": {"service": {"name": "s"}},
                "sideEffects": "None", "admissionReviewVersions": ["v1", "v1"]}]}),
            vec![
                "webhooks[0].clientConfig.service.name: Required value",
                "webhooks[0].admissionReviewVersions[1]: Invalid value: \"v1\": duplicate version",
            ],
        ),
        (
            "StatefulSet",
            json!({"spec": {"template": {"metadata": {"labels": {"b": "a b"}}}}}),
            vec![
                "spec.template.labels: Invalid value: \"a b\": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
                2
            ],
        ),
        (
            "CustomResourceDefinition",
            json!({"spec": {"conversion": {"strategy": ""}}}),
            vec!["spec.conversion.strategy: Required value"],
        ),
        (
            "CustomResourceDefinition",
            json!({"spec": {"conversion": {"strategy": "Webhook", "webhook": {}}}}),
            vec![
                "spec.conversion.webhookClientConfig: Required value: required when strategy is set to Webhook",
                "spec.conversion.conversionReviewVersions: Required value",
            ],
        ),
        (
            "CustomResourceDefinition",
            json!({"spec": {"conversion": {"webhook": {"clientConfig": {"url": "https://192.0.2.1/"},
                "conversionReviewVersions": ["v1"]}}}}),
            vec![
                "spec.conversion.strategy: Required value",
                "spec.conversion.webhookClientConfig: Forbidden: should not be set when strategy is not set to Webhook",
                "spec.conversion.conversionReviewVersions: Forbidden: should not be set when strategy is not set to Webhook",
            ],
        ),
        (
            "EndpointSlice",
            json!({"endpoints": [{"addresses": ["192.0.2.1"], "hints": {"forNodes": [{"name": "n"}, {"name": "n"}]}}],
                "ports": [{"port": 0}]}),
            vec!["endpoints[0].hints.forNodes[1].name: Duplicate value: \"n\""],
        ),
        (
            "EndpointSlice",
            json!({"addressType": "IPv6", "endpoints": [{"addresses": ["2001:DB8::1", "2001:db8::1"]}]}),
            vec![
                "endpoints[0].addresses[0]: Invalid value: \"2001:DB8::1\": must be in canonical form (\"2001:db8::1\")",
            ],
        ),
        (
            "PriorityLevelConfiguration",
            json!({"spec": {"limited": {"lendablePercent": 101, "borrowingLimitPercent": -1, "limitResponse": {"type": "Odd"}}}}),
            vec![
                "spec.limited.limitResponse.type: Unsupported value: \"Odd\": supported values: \"Queue\", \"Reject\"",
                "spec.limited.lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive",
                "spec.limited.borrowingLimitPercent: Invalid value: -1: if specified, must be a non-negative integer",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"a b": "1"}}}]}}),
            vec![
                "spec.containers[0].resources.requests[a b]: Invalid value: \"a b\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
                "spec.containers[0].resources.requests[a b]: Invalid value: \"a b\": must be a standard resource for containers",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"volumes": [{"name": "v", "projected": {"sources": [
                {"secret": {"name": "s", "items": [{"key": "k", "path": "p"}]}},
                {"downwardAPI": {"items": [{"path": "p", "fieldRef": {"fieldPath": "metadata.name"}}, {"path": "q"}]}},
            ]}}]}}),
            vec![
                "spec.volumes[0].projected: Invalid value: \"p\": conflicting duplicate paths",
                "spec.volumes[0].projected.sources[1].downwardAPI: Required value: one of fieldRef and resourceFieldRef is required",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"containers": [{"name": "c", "image": "i", "securityContext": {
                "privileged": true, "allowPrivilegeEscalation": false, "seLinuxOptions": {}}}]}}),
            vec![
                "spec.containers[0].securityContext: Invalid value: {\"Capabilities\":null,\"Privileged\":true,\"SELinuxOptions\":{\"User\":\"\",\"Role\":\"\",\"Type\":\"\",\"Level\":\"\"},\"WindowsOptions\":null,\"RunAsUser\":null,\"RunAsGroup\":null,\"RunAsNonRoot\":null,\"ReadOnlyRootFilesystem\":null,\"AllowPrivilegeEscalation\":false,\"ProcMount\":null,\"SeccompProfile\":null,\"AppArmorProfile\":null}: cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
            ],
        ),
    ] {
        assert_eq!(errors_with(kind, &changes), messages, "{kind} {changes}");
    }
}

/// Errors of a change to a minimal object, both defaulted as the server would.
fn change_errors(kind: &str, changes: &Value) -> Vec<String> {
    let strategy = strategy(kind);
    let (mut old, mut new) = (minimal(kind), minimal(kind));
    overlay(&mut new, changes);
    for object in [&mut old, &mut new] {
        strategy.default(object);
        strategy.prepare_create(object);
    }
    texts(strategy.validate_update(&new, &old))
}

#[test]
fn of_changes() {
    for (kind, changes, messages) in [
        (
            "StorageClass",
            json!({"provisioner": ""}),
            vec!["provisioner: Required value", "provisioner: Invalid value: \"\": field is immutable"],
        ),
        (
            "IngressClass",
            json!({"spec": {"controller": null}}),
            vec![
                "spec.controller: Invalid value: \"\": field is immutable",
                "spec.controller: Required value",
            ],
        ),
        (
            "IPAddress",
            json!({"spec": {"parentRef": {"name": ""}}}),
            vec![
                "spec.parentRef.name: Required value",
                "spec.parentRef: Invalid value: {\"Group\":\"\",\"Resource\":\"services\",\"Namespace\":\"\",\"Name\":\"\"}: field is immutable",
            ],
        ),
        (
            "PersistentVolume",
            json!({"spec": {"accessModes": []}}),
            vec!["spec.accessModes: Required value", "spec.accessModes: Required value"],
        ),
        (
            "ResourceSlice",
            json!({"spec": {"driver": "e.example", "allNodes": null, "nodeName": "n"}}),
            vec![
                "spec.driver: Invalid value: \"e.example\": field is immutable",
                "spec.nodeName: Invalid value: \"n\": field is immutable",
            ],
        ),
        (
            "RuntimeClass",
            json!({"handler": ""}),
            vec!["handler: Required value", "handler: Invalid value: \"\": field is immutable"],
        ),
        (
            "CSIStorageCapacity",
            json!({"storageClassName": "B"}),
            vec![
                "storageClassName: Invalid value: \"B\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
                "storageClassName: Invalid value: \"B\": field is immutable",
            ],
        ),
        (
            "PersistentVolumeClaim",
            json!({"spec": {"resources": {"requests": {"storage": "0"}}}}),
            vec!["spec.resources.requests.storage: Forbidden: field can not be less than status.capacity"],
        ),
        (
            "Job",
            json!({"spec": {"successPolicy": {"rules": [{"succeededCount": 1}]}}}),
            vec![
                "spec.successPolicy: Invalid value: {\"Rules\":[{\"SucceededIndexes\":null,\"SucceededCount\":1}]}: field is immutable",
            ],
        ),
    ] {
        let told = change_errors(kind, &changes);
        let told: Vec<&str> =
            told.iter().map(String::as_str).filter(|told| messages.contains(told)).collect();
        assert_eq!(told, messages, "{kind} {changes}");
    }
}

#[test]
fn of_labels_that_a_job_has_by_default() {
    let strategy = strategy("Job");
    let mut job = minimal("Job");
    overlay(
        &mut job,
        &json!({"metadata": {"uid": "u"}, "spec": {"template": {"metadata": {"labels": {"a": "b"}}}}}),
    );
    strategy.default(&mut job);
    strategy.prepare_create(&mut job);
    assert_eq!(job["metadata"]["labels"], json!({"a": "b"}));
    strategy.complete_default_labels(&mut job);
    assert_eq!(job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]);
    assert_eq!(job["metadata"]["labels"]["controller-uid"], "u");
}

#[test]
fn of_warnings_about_a_change() {
    let strategy = strategy("CSIDriver");
    let driver = |audience: &str| json!({"spec": {"tokenRequests": [{"audience": audience}]}});
    assert_eq!(strategy.warnings_on_update(&driver("a"), &driver("a")), [""; 0]);
    assert_eq!(strategy.warnings_on_update(&driver("b"), &driver("a")).len(), 1);
}
