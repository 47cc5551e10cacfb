//! Odd values, compared with upstream's server: what it refuses, drops, warns of and shows.

use super::{errors_with, minimal, overlay, strategy, texts};
use crate::resource::Strategy;
use ferrite_json::{Value, json};
use jiff::Timestamp;

fn prepared(strategy: &dyn Strategy, kind: &str, changes: &Value) -> Value {
    let mut object = minimal(kind);
    overlay(&mut object, changes);
    strategy.default(&mut object);
    strategy.prepare_create(&mut object);
    object
}

#[test]
fn of_new_objects() {
    for (kind, changes, messages) in [
        (
            "Node",
            json!({"spec": {"podCIDRs": ["192.0.2.0/24", "x"]}}),
            vec![
                "spec.podCIDRs[1]: Invalid value: \"x\": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)",
                "spec.podCIDRs: Internal error: invalid PodCIDRs. failed to check with dual stack with error:invalid CIDR[1]: <nil> (invalid CIDR address: x)",
                "spec.podCIDRs: Invalid value: [\"192.0.2.0/24\",\"x\"]: may specify no more than one CIDR for each IP family",
            ],
        ),
        (
            "CSIDriver",
            json!({"spec": {"serviceAccountTokenInSecrets": true}}),
            vec![
                "spec.serviceAccountTokenInSecrets: Invalid value: true: serviceAccountTokenInSecrets is set but no tokenRequests are specified",
            ],
        ),
        (
            "DeviceClass",
            json!({"spec": {"extendedResourceName": "cpu"}}),
            vec!["spec.extendedResourceName: Invalid value: \"cpu\": must be a valid extended resource name"],
        ),
        ("DeviceClass", json!({"spec": {"extendedResourceName": "example.com/gpu"}}), vec![]),
        (
            "CronJob",
            json!({"spec": {"timeZone": "europe/berlin"}}),
            vec!["spec.timeZone: Invalid value: \"europe/berlin\": unknown time zone europe/berlin"],
        ),
        ("CronJob", json!({"spec": {"timeZone": "Europe/Berlin"}}), vec![]),
        (
            "CertificateSigningRequest",
            json!({"spec": {"request": null}}),
            vec!["spec.request: Invalid value: null: PEM block type must be CERTIFICATE REQUEST"],
        ),
        (
            "Pod",
            json!({"spec": {"securityContext": {"seLinuxChangePolicy": "MountOption"}}}),
            vec![
                "spec.securityContext.seLinuxChangePolicy: Unsupported value: \"MountOption\": supported values: \"Recursive\"",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"resources": {"requests": {"x": "1"}}}}),
            vec![
                "spec.resources.requests[x]: Invalid value: \"x\": must be a standard resource type or fully qualified",
            ],
        ),
        (
            "Pod",
            json!({"spec": {"resources": {"requests": {"ephemeral-storage": "1"}}}}),
            vec![
                "spec.resources.requests[ephemeral-storage]: Unsupported value: \"ephemeral-storage\": supported values: \"cpu\", \"hugepages-\", \"memory\"",
            ],
        ),
        (
            "ResourceClaimTemplate",
            json!({"spec": {"metadata": {"name": "x", "ownerReferences": [{}]}}}),
            vec![
                "spec.metadata.name: Forbidden: cannot be set",
                "spec.metadata.ownerReferences: Forbidden: cannot be set",
            ],
        ),
        (
            "Deployment",
            json!({"spec": {"strategy": {"type": "x", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": "30%"}}}}),
            vec![
                "spec.strategy: Unsupported value: {\"Type\":\"x\",\"RollingUpdate\":{\"MaxUnavailable\":\"30%\",\"MaxSurge\":1}}: supported values: \"Recreate\", \"RollingUpdate\"",
            ],
        ),
        (
            "HorizontalPodAutoscaler",
            json!({"spec": {"metrics": [{"type": "ContainerResource", "containerResource": {"name": "a b",
                "container": "C", "target": {"type": "Utilization", "averageUtilization": 1}}}]}}),
            vec![
                "spec.metrics[0].containerResource.name: Invalid value: \"a b\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
                "spec.metrics[0].containerResource.name: Invalid value: \"a b\": must be a standard resource for containers",
                "spec.metrics[0].containerResource.container: Invalid value: \"C\": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')",
            ],
        ),
        (
            "EndpointSlice",
            json!({"addressType": "x", "endpoints": [{"addresses": ["nowhere"], "deprecatedTopology": {"a b": "c"}}],
                "ports": [{"protocol": "x"}]}),
            vec![
                "addressType: Unsupported value: \"x\": supported values: \"FQDN\", \"IPv4\", \"IPv6\"",
                "ports[0].protocol: Unsupported value: \"x\": supported values: \"SCTP\", \"TCP\", \"UDP\"",
            ],
        ),
        (
            "Ingress",
            json!({"spec": {"defaultBackend": null, "rules": []}}),
            vec!["spec: Invalid value: []: either `defaultBackend` or `rules` must be specified"],
        ),
        (
            "PersistentVolumeClaim",
            json!({"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "a"},
                "dataSourceRef": {"kind": "PersistentVolumeClaim", "name": "b"}}}),
            vec!["spec: Invalid value: {}: must match dataSourceRef"],
        ),
    ] {
        assert_eq!(errors_with(kind, &changes), messages, "{kind} {changes}");
    }
}

#[test]
fn of_reviews() {
    let strategy = strategy("SubjectAccessReview");
    let review = json!({"spec": {"user": "u", "resourceAttributes": {"labelSelector": {"requirements": [
        {"key": "", "operator": "Exists"}, {"key": "a", "operator": "In", "values": ["-"]}]}}}});
    let found = texts(strategy.validate(&review));
    let fields: Vec<&str> = found.iter().filter_map(|text| text.split(':').next()).collect();
    let place = "spec.resourceAttributes.labelSelector.requirements";
    assert_eq!(fields.len(), 3, "{found:?}");
    assert!(fields[..2].iter().all(|field| *field == format!("{place}[0].key")), "{found:?}");
    assert_eq!(fields[2], format!("{place}[1].values[0]"), "{found:?}");
}

#[test]
fn of_fields_that_are_dropped() {
    for (kind, changes, pointer) in [
        ("Node", json!({"spec": {"configSource": {}}}), "/spec/configSource"),
        (
            "CSIDriver",
            json!({"spec": {"preventPodSchedulingIfMissing": true}}),
            "/spec/preventPodSchedulingIfMissing",
        ),
        (
            "EndpointSlice",
            json!({"endpoints": [{"addresses": ["192.0.2.1"], "deprecatedTopology": {"a": "b"}}]}),
            "/endpoints/0/deprecatedTopology",
        ),
    ] {
        let object = prepared(&*strategy(kind), kind, &changes);
        assert_eq!(object.pointer(pointer), None, "{kind}");
    }
    let pod = prepared(&*strategy("Pod"), "Pod", &json!({"status": {"qosClass": "Guaranteed"}}));
    assert_eq!(pod["status"]["qosClass"], "Guaranteed");
}

#[test]
fn of_warnings() {
    let account = json!({"metadata": {"annotations": {"kubernetes.io/enforce-mountable-secrets": "true"}}});
    let accounts = strategy("ServiceAccount");
    assert_eq!(
        accounts.warnings(&account),
        [
            "metadata.annotations[kubernetes.io/enforce-mountable-secrets]: deprecated in v1.32+; prefer separate namespaces to isolate access to mounted secrets"
        ]
    );
    assert_eq!(accounts.warnings_on_update(&account, &account), [""; 0]);
    assert_eq!(
        strategy("Node").warnings(&json!({"spec": {"externalID": "x"}})),
        ["spec.externalID: this field is deprecated, and is unused by Kubernetes"]
    );
}

#[test]
fn of_a_nodes_kernel() {
    let nodes = strategy("Node");
    for (info, cell) in [
        (json!({"kernelVersion": "k", "architecture": "amd64"}), "k (amd64)"),
        (json!({"kernelVersion": "k"}), "k"),
        (json!({"architecture": "amd64"}), "<unknown> (amd64)"),
    ] {
        let node = json!({"metadata": {"name": "n"}, "status": {"nodeInfo": info}});
        assert_eq!(nodes.cells(&node, Timestamp::UNIX_EPOCH)[8], cell);
    }
}

#[test]
fn of_a_suspended_jobs_template() {
    let jobs = strategy("Job");
    let mut old = minimal("Job");
    overlay(&mut old, &json!({"spec": {"suspend": true, "template": {"metadata": {"labels": {"l": "1"}}}}}));
    jobs.default(&mut old);
    let errors = |old: &Value, changes: &Value| {
        let mut new = old.clone();
        overlay(&mut new, changes);
        let found = texts(jobs.validate_update(&new, old));
        found.into_iter().filter(|text| text.contains("immutable")).collect::<Vec<_>>()
    };
    let container = |changes: Value| {
        let mut containers = old["spec"]["template"]["spec"]["containers"].clone();
        overlay(&mut containers[0], &changes);
        json!({"spec": {"template": {"spec": {"containers": containers}}}})
    };
    let resources = container(json!({"resources": {"requests": {"cpu": "1"}}}));
    let image = container(json!({"image": "other"}));
    assert_eq!(errors(&old, &resources), [""; 0]);
    let refused = errors(&old, &image);
    assert!(refused[0].starts_with("spec.template.spec: Invalid value: {\"Volumes\":null"), "{refused:?}");
    let mut running = old.clone();
    overlay(&mut running, &json!({"status": {"active": 1}}));
    let refused = errors(&running, &resources);
    assert!(refused.iter().any(|text| text.starts_with("spec.template: Invalid value: {")), "{refused:?}");
}

#[test]
fn of_data_that_a_controller_revision_loses() {
    let revisions = strategy("ControllerRevision");
    let old = json!({"data": {"a": 1}, "revision": 1});
    assert_eq!(
        texts(revisions.validate_update(&json!({"revision": 1}), &old)),
        ["data: Invalid value: null: field is immutable"]
    );
}
