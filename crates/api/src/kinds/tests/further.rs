//! Tests of errors of other kinds and their words: rules that seldom apply.

use super::pods::with;
use super::*;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

fn update_errors(kind: &str, new: &Value, old: &Value) -> Vec<String> {
    let strategy = strategy(kind);
    let object = |changes: &Value| {
        let mut object = with(minimal(kind), changes.clone());
        strategy.default(&mut object);
        object
    };
    texts(strategy.validate_update(&object(new), &object(old)))
}

fn status_errors(kind: &str, new: &Value) -> Vec<String> {
    let strategy = strategy(kind);
    let old = minimal(kind);
    texts(strategy.validate_status_update(&with(old.clone(), new.clone()), &old))
}

#[test]
fn nodes() {
    let source =
        json!({"spec": {"configSource": {"configMap": {"uid": "u", "namespace": "n", "name": "-"}}}});
    assert_eq!(
        update_errors("Node", &source, &json!({})),
        [
            "spec.configSource.configMap.uid: Forbidden: uid must not be set in spec",
            "spec.configSource.configMap.name: Invalid value: \"-\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
            "spec.configSource.configMap.kubeletConfigKey: Required value",
        ]
    );
    assert_eq!(
        update_errors("Node", &json!({"spec": {"configSource": {}}}), &json!({})),
        [
            "spec.configSource: Invalid value: {\"ConfigMap\":null}: exactly one reference subfield must be non-nil"
        ]
    );
    for (changes, messages) in [
        (
            json!({"metadata": {"annotations": {"scheduler.alpha.kubernetes.io/taints": "{"}}}),
            vec![
                "metadata.annotations: Invalid value: \"scheduler.alpha.kubernetes.io/taints\": unexpected end of JSON input",
            ],
        ),
        (
            json!({"metadata": {"annotations": {"scheduler.alpha.kubernetes.io/taints": r#"[{"key":"k"}]"#}}}),
            vec!["metadata.annotations.scheduler.alpha.kubernetes.io/taints[0].effect: Required value"],
        ),
        (
            json!({"metadata": {"annotations": {"scheduler.alpha.kubernetes.io/preferAvoidPods":
                r#"{"preferAvoidPods":[{"podSignature":{}}]}"#}}}),
            vec![
                "metadata.annotations.scheduler.alpha.kubernetes.io/preferAvoidPods[0].PodSignature: Required value",
            ],
        ),
        (
            json!({"status": {"nodeInfo": {"swap": {"capacity": 0}}}}),
            vec!["metadata.nodeSwapStatus.capacity: Invalid value: 0: must be greater than zero"],
        ),
        (
            json!({"status": {"declaredFeatures": ["B", "A", "A"]}}),
            vec![
                "status.declaredFeatures[1]: Invalid value: \"A\": list must be sorted alphabetically",
                "status.declaredFeatures[2]: Duplicate value: \"A\"",
            ],
        ),
        (
            json!({"status": {"declaredFeatures": ["a"]}}),
            vec![
                "status.declaredFeatures[0]: Invalid value: \"a\": invalid feature name \"a\": must start with an UpperCamelCase segment, with subsequent segments separated by '/' (e.g., MyFeature or MyFeature/mySubFeature), and contain only alphanumeric characters and slashes",
            ],
        ),
        (
            json!({"spec": {"podCIDR": "10.0.0.1/8"}}),
            vec![
                "spec.podCIDRs[0]: Invalid value: \"10.0.0.1/8\": must not have bits set beyond the prefix length",
            ],
        ),
        (
            json!({"spec": {"podCIDR": "010.0.0.0/8"}}),
            vec![
                "spec.podCIDRs[0]: Invalid value: \"010.0.0.0/8\": must not have leading 0s in IP or prefix length",
            ],
        ),
    ] {
        assert_eq!(errors_with("Node", &changes), messages, "{changes}");
    }
}

#[test]
fn flow_control_that_is_always_there() {
    let level = |name: &str, spec: Value| json!({"metadata": {"name": name}, "spec": spec});
    let limited = |shares: i64| json!({"type": "Limited", "limited": {"nominalConcurrencyShares": shares, "limitResponse": {"type": "Reject"}}});
    assert_eq!(errors_with("PriorityLevelConfiguration", &level("catch-all", limited(5))), [""; 0]);
    assert_eq!(
        errors_with("PriorityLevelConfiguration", &level("catch-all", limited(6))),
        [
            "spec: Invalid value: {\"Type\":\"Limited\",\"Limited\":{\"NominalConcurrencyShares\":6,\"LimitResponse\":{\"Type\":\"Reject\",\"Queuing\":null},\"LendablePercent\":0,\"BorrowingLimitPercent\":null},\"Exempt\":null}: spec of 'catch-all' must equal the fixed value"
        ]
    );
    let exempt = json!({"type": "Exempt", "limited": null, "exempt": {"lendablePercent": 50}});
    assert_eq!(errors_with("PriorityLevelConfiguration", &level("exempt", exempt)), [""; 0]);
    assert_eq!(
        errors_with(
            "FlowSchema",
            &json!({"metadata": {"name": "exempt"}, "spec": {"matchingPrecedence": 1,
                "priorityLevelConfiguration": {"name": "exempt"}}})
        ),
        [
            "spec: Invalid value: {\"PriorityLevelConfiguration\":{\"Name\":\"exempt\"},\"MatchingPrecedence\":1,\"DistinguisherMethod\":null,\"Rules\":null}: spec of 'exempt' must equal the fixed value"
        ]
    );
}

#[test]
fn certificates_that_are_none() {
    let certificate = |text: &str| json!({"status": {"certificate": STANDARD.encode(text)}});
    let block = |kind: &str, headers: &str, content: &str| {
        format!("-----BEGIN {kind}-----\n{headers}{content}\n-----END {kind}-----\n")
    };
    for (text, why) in [
        ("x".to_owned(), Some("must contain at least one CERTIFICATE PEM block")),
        (
            block("CERTIFICATE", "", "MAA=") + &block("RSA KEY", "", "MAA="),
            Some("only CERTIFICATE PEM blocks are allowed, found \"RSA KEY\""),
        ),
        (block("CERTIFICATE", "K: v\n\n", "MAA="), Some("no PEM block headers are permitted")),
        (block("CERTIFICATE", "", ""), Some("found CERTIFICATE PEM block containing 0 certificates")),
        (block("CERTIFICATE", "", "AAAA"), Some("x509: malformed certificate")),
        (block("CERTIFICATE", "", "MAA="), None),
    ] {
        let expected: Vec<String> = why
            .into_iter()
            .map(|why| format!("status.certificate: Invalid value: \"<certificate data>\": {why}"))
            .collect();
        assert_eq!(status_errors("CertificateSigningRequest", &certificate(&text)), expected, "{text}");
    }
}

#[test]
fn volumes_and_claims() {
    let iscsi = |fields: Value| json!({"spec": {"hostPath": null, "iscsi": with(json!({"targetPortal": "192.0.2.1:3260", "lun": 0}), fields)}});
    for (changes, messages) in [
        (
            iscsi(json!({"iqn": "x", "secretRef": {}})),
            vec![
                "spec.iscsi.iqn: Invalid value: \"x\": must be valid format".to_owned(),
                "spec.iscsi.secretRef.name: Required value".to_owned(),
            ],
        ),
        (
            with(
                json!({"metadata": {"name": "p".repeat(50)}}),
                iscsi(json!({"iqn": "naa.0123456789abcdef0123456789abcdef", "initiatorName": "eui.0"})),
            ),
            vec![
                "spec.iscsi.targetportal: Invalid value: \"192.0.2.1:3260\": Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.".to_owned(),
                "spec.iscsi.initiatorname: Invalid value: \"eui.0\": must be valid format".to_owned(),
            ],
        ),
    ] {
        assert_eq!(errors_with("PersistentVolume", &changes), messages, "{changes}");
    }
    assert_eq!(
        status_errors(
            "PersistentVolumeClaim",
            &json!({"status": {"allocatedResources": {"cpu": "1"}, "allocatedResourceStatuses": {"memory": "NodeResizePending"}}})
        ),
        [
            "status.allocatedResourceStatuses: Unsupported value: \"memory\": supported values: \"storage\"",
            "status.allocatedResources: Unsupported value: \"cpu\": supported values: \"storage\"",
        ]
    );
    let mut claim = with(
        minimal("PersistentVolumeClaim"),
        json!({"spec": {"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "c", "namespace": "other"}}}),
    );
    strategy("PersistentVolumeClaim").prepare_create(&mut claim);
    assert!(claim["spec"].get("dataSourceRef").is_none());
}

#[test]
fn services() {
    assert_eq!(
        errors_with("Service", &json!({"spec": {"loadBalancerClass": "-"}})),
        ["spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'"]
    );
    let tell = |changes: Value| {
        let mut service = with(minimal("Service"), changes);
        let services = strategy("Service");
        services.default(&mut service);
        services.warnings(&service)
    };
    for (changes, messages) in [
        (
            json!({"metadata": {"annotations": {"service.kubernetes.io/topology-aware-hints": "auto"}}}),
            vec![
                "annotation service.kubernetes.io/topology-aware-hints is deprecated, please use service.kubernetes.io/topology-mode instead",
            ],
        ),
        (
            json!({"spec": {"clusterIP": "None", "externalIPs": ["192.0.2.1"], "sessionAffinity": "ClientIP"}}),
            vec![
                "spec.externalIPs is ignored for headless services",
                "spec.SessionAffinity is ignored for headless services",
            ],
        ),
        (
            json!({"spec": {"type": "ExternalName", "externalIPs": ["192.0.2.1"]}}),
            vec!["spec.externalIPs is ignored when spec.type is \"ExternalName\""],
        ),
        (
            json!({"spec": {"externalName": "a.example"}}),
            vec!["spec.externalName is ignored when spec.type is not \"ExternalName\""],
        ),
        (
            json!({"spec": {"trafficDistribution": "PreferClose"}}),
            vec!["spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\""],
        ),
        (
            json!({"spec": {"loadBalancerIP": "2001:DB8::1"}}),
            vec![
                "spec.loadBalancerIP: IPv6 address \"2001:DB8::1\" should be in RFC 5952 canonical format (\"2001:db8::1\")",
            ],
        ),
    ] {
        assert_eq!(tell(changes.clone()), messages, "{changes}");
    }
}

#[test]
fn workloads_and_networks() {
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let set = |claim: &Value| {
        json!({"spec": {"volumeClaimTemplates": [claim], "template": {"spec": {"hostname": "Not.A.Label",
            "containers": [{"name": "c", "image": "i", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}}}})
    };
    for (kind, changes, messages) in [
        ("StatefulSet", set(&claim), vec![]),
        (
            "StatefulSet",
            set(&with(claim.clone(), json!({"spec": {"accessModes": []}}))),
            vec![
                "spec.volumeClaimTemplates[0].spec.accessModes: Required value: at least 1 access mode is required",
            ],
        ),
        (
            "StatefulSet",
            with(set(&claim), json!({"spec": {"volumeClaimTemplates": []}})),
            vec!["spec.template.spec.containers[0].volumeMounts[0].name: Not found: \"data\""],
        ),
        (
            "NetworkPolicy",
            json!({"spec": {"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.1/8", "except": ["11.0.0.0/16"]}}]}]}}),
            vec![
                "spec.ingress[0].from[0].ipBlock.cidr: Invalid value: \"10.0.0.1/8\": must not have bits set beyond the prefix length",
                "spec.ingress[0].from[0].ipBlock.except[0]: Invalid value: \"11.0.0.0/16\": must be a strict subset of `cidr`",
            ],
        ),
        (
            "RuntimeClass",
            json!({"overhead": {"podFixed": {"example.com/x": "500m"}}}),
            vec!["overhead.limits[example.com/x]: Invalid value: \"500m\": must be an integer"],
        ),
        (
            "Job",
            json!({"spec": {"completionMode": "Indexed", "completions": 100_001, "parallelism": 10_001, "backoffLimitPerIndex": 1}}),
            vec![
                "spec.maxFailedIndexes: Required value: must be specified when completions is above 100000",
                "spec.parallelism: Invalid value: 10001: must be less than or equal to 10000 when completions are above 100000 and used with backoff limit per index",
            ],
        ),
    ] {
        assert_eq!(errors_with(kind, &changes), messages, "{changes}");
    }
    assert_eq!(
        status_errors("VolumeAttachment", &json!({"status": {"attachError": {"errorCode": -1}}})),
        ["status.attachError.errorCode: Invalid value: -1: must be between 0 and 2147483647, inclusive"]
    );
}
