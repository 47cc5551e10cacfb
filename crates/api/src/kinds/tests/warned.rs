//! Warnings about valid objects of other kinds than pods.

use super::*;

/// The warnings about a new object, and about its replacement by an equal one of a later generation.
fn told(kind: &str, changes: &Value) -> (Vec<String>, Vec<String>) {
    let strategy = strategy(kind);
    let mut new = minimal(kind);
    overlay(&mut new, changes);
    strategy.default(&mut new);
    let mut later = new.clone();
    later["metadata"]["generation"] = 2.into();
    (strategy.warnings_on_create(&new), strategy.warnings_on_update(&later, &new))
}

#[test]
fn names_of_new_workloads_make_names_of_pods() {
    let dotted = json!({"metadata": {"name": "a.b"}});
    let warning = "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS \
                   label is recommended: [must not contain dots]";
    for kind in ["Deployment", "ReplicaSet", "ReplicationController", "Job", "CronJob"] {
        assert_eq!(told(kind, &dotted), (vec![warning.to_owned()], Vec::new()), "{kind}");
        assert_eq!(told(kind, &json!({})), (Vec::new(), Vec::new()), "{kind}");
    }
    for kind in ["DaemonSet", "StatefulSet"] {
        assert_eq!(told(kind, &dotted), (Vec::new(), Vec::new()), "{kind}");
    }
}

#[test]
fn other_kinds_have_warnings_of_their_own() {
    let indexed = json!({"completionMode": "Indexed", "completions": 100_001, "parallelism": 10_001});
    let many = "In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, \
                Kubernetes might not be able to track completedIndexes when a big number of indexes fail";
    for (kind, changes, warning, again) in [
        ("Job", json!({"spec": indexed}), format!("spec: {many}"), true),
        (
            "CronJob",
            json!({"spec": {"jobTemplate": {"spec": indexed}}}),
            format!("spec.jobTemplate.spec: {many}"),
            true,
        ),
        (
            "ResourceQuota",
            json!({"spec": {"hard": {"memory": "2Gi", "limits.memory": "1Gi", "requests.cpu": "1", "limits.cpu": "1"}}}),
            "ResourceQuota memory (2Gi) should be less than limits.memory (1Gi)".to_owned(),
            false,
        ),
        (
            "ResourceSlice",
            json!({"spec": {"driver": "Driver.example.com"}}),
            "spec.driver: driver names should be lowercase; \"Driver.example.com\" contains uppercase characters".to_owned(),
            true,
        ),
        (
            "StorageClass",
            json!({"allowedTopologies": [{"matchLabelExpressions": [{"key": "failure-domain.beta.kubernetes.io/zone", "values": ["z"]}]}]}),
            "allowedTopologies[0].matchLabelExpressions[0].key: deprecated since v1.17; use \"topology.kubernetes.io/zone\" instead".to_owned(),
            true,
        ),
        (
            "RuntimeClass",
            json!({"scheduling": {"nodeSelector": {"node-role.kubernetes.io/master": ""}}}),
            "scheduling.nodeSelector: use \"node-role.kubernetes.io/control-plane\" instead".to_owned(),
            true,
        ),
    ] {
        let later = if again { vec![warning.clone()] } else { Vec::new() };
        assert_eq!(told(kind, &changes), (vec![warning], later), "{kind}");
    }
}

#[test]
fn mount_options_of_an_annotation_are_for_some_volumes() {
    let annotated = |source: Value| {
        let mut volume = minimal("PersistentVolume");
        volume["metadata"]["annotations"] = json!({"volume.beta.kubernetes.io/mount-options": "ro"});
        if let Some(spec) = volume["spec"].as_object_mut() {
            spec.remove("hostPath");
        }
        overlay(&mut volume["spec"], &source);
        let strategy = strategy("PersistentVolume");
        strategy.default(&mut volume);
        texts(strategy.validate(&volume))
    };
    let nfs = annotated(json!({"nfs": {"server": "s", "path": "/x"}}));
    assert_eq!(nfs, Vec::<String>::new());
    let refused = annotated(json!({"hostPath": {"path": "/x"}}));
    assert_eq!(
        refused,
        [
            "metadata.annotations.volume.beta.kubernetes.io/mount-options: Forbidden: may not specify mount options for this volume type"
        ]
    );
}
