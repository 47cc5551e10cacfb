//! Changes of objects, and their representations, compared with upstream's server.

use super::{minimal, overlay, strategy, texts};
use crate::kinds::built_in;
use crate::resource::MetadataUse;
use ferrite_json::{Value, json};

fn with(mut object: Value, changes: &Value) -> Value {
    overlay(&mut object, changes);
    object
}

/// An object with its defaults, as it is stored.
fn stored(kind: &str, changes: &Value) -> Value {
    let strategy = strategy(kind);
    let mut object = with(minimal(kind), changes);
    strategy.default(&mut object);
    strategy.prepare_create(&mut object);
    object
}

#[test]
fn kinds_without_a_table_of_their_status() {
    let without: Vec<String> = built_in()
        .iter()
        .filter(|resource| !resource.strategy.status_has_table())
        .map(|resource| format!("{}/{}", resource.version, resource.plural))
        .collect();
    for name in ["v1/customresourcedefinitions", "v1/apiservices", "v1/resourceclaims"] {
        assert!(without.iter().any(|other| other == name), "{name} {without:?}");
    }
    assert!(!without.iter().any(|name| name == "v1/pods"), "{without:?}");
}

#[test]
fn events_own_nothing() {
    let childless: Vec<_> =
        built_in().into_iter().filter(|resource| !resource.strategy.has_dependents()).collect();
    assert_eq!(childless.iter().map(|resource| &*resource.kind).collect::<Vec<_>>(), ["Event", "Event"]);
}

#[test]
fn annotations_that_stand_for_fields_are_hidden() {
    let hidden = |kind: &str, version: &str| {
        let resources = built_in();
        let resource = resources.iter().find(|r| r.kind == kind && r.version == version).unwrap();
        resource.strategy.hidden_annotations().to_vec()
    };
    assert_eq!(hidden("DaemonSet", "v1"), ["deprecated.daemonset.template.generation"]);
    assert_eq!(
        hidden("HorizontalPodAutoscaler", "v1"),
        ["metrics", "current-metrics", "conditions", "behavior"]
            .map(|part| format!("autoscaling.alpha.kubernetes.io/{part}"))
    );
    assert_eq!(hidden("HorizontalPodAutoscaler", "v2"), [""; 0]);
}

#[test]
fn a_claim_gets_its_class_once() {
    const ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
    let claims = strategy("PersistentVolumeClaim");
    let named = |class: Value| json!({"spec": {"storageClassName": class}});
    let annotated = |class: Value| json!({"metadata": {"annotations": {ANNOTATION: class}}});
    let moved = |class: &str| with(annotated(Value::Null), &named(json!(class)));
    let immutable = |value: &str| {
        format!("metadata.annotations.{ANNOTATION}: Invalid value: {value:?}: field is immutable")
    };
    for (old, new, expected) in [
        (json!({}), named(json!("a")), vec![]),
        (named(json!("a")), named(json!("b")), vec!["spec: Forbidden".to_owned()]),
        (annotated(json!("a")), moved("a"), vec![]),
        (annotated(json!("a")), moved("b"), vec![immutable(""), "spec: Forbidden".to_owned()]),
        (annotated(json!("a")), annotated(json!("b")), vec![immutable("b")]),
        (json!({}), annotated(json!("b")), vec![immutable("b")]),
        (json!({}), annotated(json!("")), vec![]),
    ] {
        let old = stored("PersistentVolumeClaim", &old);
        let new = with(old.clone(), &new);
        let found = texts(claims.validate_update(&new, &old));
        assert_eq!(found.len(), expected.len(), "{found:?}");
        assert!(found.iter().zip(&expected).all(|(found, start)| found.starts_with(start)), "{found:?}");
    }
}

#[test]
fn sources_of_a_claim() {
    let claims = strategy("PersistentVolumeClaim");
    let source = json!({"kind": "Bucket", "name": "b"});
    let known = json!({"kind": "PersistentVolumeClaim", "name": "p"});
    let unknown = "must be 'PersistentVolumeClaim' when referencing the default apiGroup";
    for (spec, expected) in [
        // A source that the older field does not know is ignored, unless the newer field is set, too.
        (json!({"dataSource": source}), vec![]),
        (json!({"dataSource": {"name": "b"}}), vec![]),
        (
            json!({"dataSource": source, "dataSourceRef": known}),
            vec![
                format!("spec.dataSource: Invalid value: \"Bucket\": {unknown}"),
                "spec: Invalid value: {}: must match dataSourceRef".to_owned(),
            ],
        ),
        (
            json!({"dataSourceRef": {"name": "b"}}),
            ["dataSource", "dataSourceRef"]
                .iter()
                .flat_map(|field| {
                    [
                        format!("spec.{field}.kind: Required value"),
                        format!("spec.{field}: Invalid value: \"\": {unknown}"),
                    ]
                })
                .collect(),
        ),
        (
            json!({"dataSource": with(known.clone(), &json!({"apiGroup": ""})), "dataSourceRef": known}),
            vec!["spec: Invalid value: {}: must match dataSourceRef".to_owned()],
        ),
    ] {
        let claim = stored("PersistentVolumeClaim", &json!({"spec": spec}));
        assert_eq!(texts(claims.validate(&claim)), expected, "{spec}");
    }
    // An object with a source keeps it, whichever field a client leaves out.
    let old = stored(
        "PersistentVolumeClaim",
        &json!({"spec": {"dataSourceRef": {"apiGroup": "a.example", "kind": "Bucket", "name": "b"}}}),
    );
    for left_out in ["dataSource", "dataSourceRef"] {
        let mut new = old.clone();
        new["spec"].as_object_mut().unwrap().remove(left_out);
        claims.prepare_update(&mut new, &old);
        assert_eq!(new["spec"], old["spec"], "{left_out}");
    }
}

#[test]
fn an_ephemeral_container_stays_as_it_is() {
    let container = |image: &str| json!({"spec": {"ephemeralContainers": [{"name": "e", "image": image}]}});
    let (old, new) = (stored("Pod", &container("i")), stored("Pod", &container("j")));
    let found = texts(strategy("Pod").validate_subresource_update("ephemeralcontainers", &new, &old));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("existing ephemeral containers \"e\" may not be changed\n"), "{found:?}");
    assert!(found[0].contains("\"i\"") && found[0].contains("\"j\""), "the difference is shown: {found:?}");
}

#[test]
fn fields_that_an_update_may_not_bring_back() {
    let topology = json!({"endpoints": [{"addresses": ["192.0.2.1"], "deprecatedTopology": {"a": "b"}}]});
    for (kind, old, new, pointer, kept) in [
        ("EndpointSlice", &json!({}), &topology, "/endpoints/0/deprecatedTopology", false),
        ("EndpointSlice", &topology, &topology, "/endpoints/0/deprecatedTopology", true),
        ("Node", &json!({}), &json!({"spec": {"configSource": {"a": 1}}}), "/spec/configSource", false),
        (
            "Node",
            &json!({"spec": {"configSource": {"a": 1}}}),
            &json!({"spec": {"configSource": {"a": 1}}}),
            "/spec/configSource",
            true,
        ),
        (
            "CSIDriver",
            &json!({}),
            &json!({"spec": {"preventPodSchedulingIfMissing": true}}),
            "/spec/preventPodSchedulingIfMissing",
            false,
        ),
    ] {
        let (old, mut new) = (with(minimal(kind), old), with(minimal(kind), new));
        strategy(kind).prepare_update(&mut new, &old);
        assert_eq!(new.pointer(pointer).is_some(), kept, "{kind} {pointer}");
    }
    assert_eq!(
        strategy("Node").warnings(&json!({"spec": {"configSource": {}}})),
        ["spec.configSource: the feature is removed"]
    );
}

#[test]
fn a_job_that_was_stopped_may_change_what_its_pods_ask_for() {
    let jobs = strategy("Job");
    let old = stored("Job", &json!({"spec": {"suspend": true}}));
    let larger = |part: &str| {
        let containers = json!([{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}]);
        json!({"spec": {"template": {"spec": {part: containers}}}})
    };
    let started = json!({"status": {"startTime": "2026-01-01T00:00:00Z"}});
    let stopped =
        with(started.clone(), &json!({"status": {"conditions": [{"type": "Suspended", "status": "True"}]}}));
    for (status, part, mutable) in [
        (&json!({}), "containers", true),
        (&started, "containers", false),
        (&stopped, "containers", true),
        // A container that is added is no other size.
        (&stopped, "initContainers", false),
    ] {
        let old = with(old.clone(), status);
        let mut new = with(old.clone(), &larger(part));
        jobs.default(&mut new);
        let refused = texts(jobs.validate_update(&new, &old)).iter().any(|text| text.contains("immutable"));
        assert_eq!(refused, !mutable, "{status} {part}");
    }
}

#[test]
fn an_address_gets_its_mode_by_the_type_in_the_request() {
    let services = strategy("Service");
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}});
    let typed = |kind: &str| json!({"spec": {"type": kind}});
    let stored = with(stored("Service", &typed("LoadBalancer")), &status);
    for (kind, mode, errors) in [
        ("LoadBalancer", json!("VIP"), vec![]),
        (
            "ClusterIP",
            json!(null),
            vec!["status.loadBalancer.ingress[0].ipMode: Required value: must be specified when `ip` is set"],
        ),
    ] {
        let mut sent = with(with(minimal("Service"), &typed(kind)), &status);
        services.default(&mut sent);
        assert_eq!(sent["status"]["loadBalancer"]["ingress"][0]["ipMode"], mode, "{kind}");
        services.prepare_status_update(&mut sent, &stored);
        assert_eq!(texts(services.validate_status_update(&sent, &stored)), errors, "{kind}");
    }
}

#[test]
fn how_often_a_kind_validates_metadata() {
    use MetadataUse::{Change, Content, ContentTwice, Everything, Nothing};
    for (kind, on_update, on_status, knows_finalizers) in [
        ("ConfigMap", Everything, Change, true),
        ("Secret", Everything, Change, true),
        ("Endpoints", Everything, Change, true),
        ("Ingress", Everything, Change, true),
        ("PersistentVolumeClaim", Everything, Change, true),
        ("CSIStorageCapacity", Everything, Change, true),
        ("VolumeAttributesClass", Everything, Change, true),
        ("ControllerRevision", Everything, Change, true),
        ("CertificateSigningRequest", Everything, Everything, true),
        ("RuntimeClass", Everything, Change, false),
        ("APIService", Everything, Change, false),
        ("Deployment", Change, Change, true),
        ("CronJob", Change, Nothing, true),
        ("Lease", Change, Change, false),
        ("CustomResourceDefinition", Change, Change, false),
        ("LimitRange", Content, Change, true),
        ("CSINode", Content, Change, true),
        ("EndpointSlice", Content, Change, true),
        ("FlowSchema", Content, Change, true),
        ("PriorityLevelConfiguration", Content, Change, true),
        ("VolumeAttachment", Content, Nothing, true),
        ("ValidatingAdmissionPolicy", Content, Nothing, false),
        ("ValidatingAdmissionPolicyBinding", Content, Change, false),
        ("MutatingWebhookConfiguration", Content, Change, false),
        ("PersistentVolume", ContentTwice, Change, true),
        ("PodDisruptionBudget", Nothing, Nothing, false),
        ("Event", Nothing, Change, false),
    ] {
        let strategy = strategy(kind);
        let found = (strategy.metadata_use(), strategy.status_metadata_use(), strategy.knows_finalizers());
        assert_eq!(found, (on_update, on_status, knows_finalizers), "{kind}");
    }
}

#[test]
fn metadata_that_a_status_leaves_as_they_were_sent() {
    let old = json!({"metadata": {"name": "a", "uid": "u", "labels": {"l": "1"}}, "spec": {"a": 1}, "status": {"s": 1}});
    let mut new = json!({"metadata": {"name": "a", "uid": "x", "labels": {"l": "2"}, "deletionGracePeriodSeconds": 4,
        "deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"a": 2}, "status": {"s": 2}});
    crate::resource::keep_all_but_status(&mut new, &old);
    assert_eq!(
        new,
        json!({"metadata": {"name": "a", "uid": "x", "labels": {"l": "1"}, "deletionGracePeriodSeconds": 4},
            "spec": {"a": 1}, "status": {"s": 2}})
    );
}

#[test]
fn conditions_of_a_status() {
    let condition = json!({"type": "", "status": "x", "lastTransitionTime": null});
    for kind in ["PodDisruptionBudget", "ValidatingAdmissionPolicy"] {
        let new = with(minimal(kind), &json!({"status": {"conditions": [condition]}}));
        let found = texts(strategy(kind).validate_status_update(&new, &minimal(kind)));
        let fields: Vec<&str> = found.iter().filter_map(|text| text.split(": ").next()).collect();
        let place = |field: &str| format!("status.conditions[0].{field}");
        assert_eq!(
            fields,
            ["type", "type", "status", "lastTransitionTime", "reason"].map(place),
            "{kind} {found:?}"
        );
    }
}

#[test]
fn policies_that_were_sent_empty_are_no_policies() {
    let scalers = strategy("HorizontalPodAutoscaler");
    let errors = |policies: Value| {
        let mut scaler = with(
            minimal("HorizontalPodAutoscaler"),
            &json!({"spec": {"behavior": {"scaleUp": {"policies": policies}}}}),
        );
        scalers.mark_sent_empty(&mut scaler);
        scalers.default(&mut scaler);
        texts(scalers.validate(&scaler))
    };
    assert_eq!(errors(json!(null)), [""; 0]);
    assert_eq!(
        errors(json!([])),
        ["spec.behavior.scaleUp.policies: Required value: must specify at least one Policy"]
    );
}

#[test]
fn daemon_sets_in_their_internal_form() {
    let sets = strategy("DaemonSet");
    let annotated = |value: &str| json!({"metadata": {"annotations": {"deprecated.daemonset.template.generation": value}}});
    for (value, problem) in [
        ("5", None),
        ("x", Some("strconv.ParseInt: parsing \"x\": invalid syntax")),
        (
            "99999999999999999999",
            Some("strconv.ParseInt: parsing \"99999999999999999999\": value out of range"),
        ),
    ] {
        assert_eq!(sets.conversion_problem(&annotated(value)).as_deref(), problem, "{value}");
    }
    for (strategy, rolling) in [
        (
            json!({"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 1}}),
            json!({"maxUnavailable": 1, "maxSurge": 0}),
        ),
        (json!({"type": "OnDelete"}), json!(null)),
        (json!({}), json!({"maxUnavailable": 1, "maxSurge": 0})),
    ] {
        let mut set = with(minimal("DaemonSet"), &json!({"spec": {"updateStrategy": strategy}}));
        sets.default(&mut set);
        assert_eq!(set["spec"]["updateStrategy"]["rollingUpdate"], rolling, "{strategy}");
    }
}

#[test]
fn a_status_of_flow_control_brings_no_metadata() {
    for kind in ["FlowSchema", "PriorityLevelConfiguration"] {
        let old = json!({"metadata": {"name": "a", "uid": "u"}});
        let mut new = json!({"metadata": {"name": "a", "uid": "x", "deletionGracePeriodSeconds": 4, "labels": {"a": "b"}}});
        strategy(kind).prepare_status_update(&mut new, &old);
        assert_eq!(new["metadata"], old["metadata"], "{kind}");
    }
}

#[test]
fn further_words() {
    let node =
        with(minimal("CSINode"), &json!({"spec": {"drivers": [{"name": "a", "nodeID": "n".repeat(257)}]}}));
    let found = texts(strategy("CSINode").validate(&node));
    assert!(found.iter().any(|text| text.ends_with("must be 256 characters or less")), "{found:?}");
    let level = with(minimal("PriorityLevelConfiguration"), &json!({"spec": {"type": "Exempt"}}));
    let found = texts(strategy("PriorityLevelConfiguration").validate(&level));
    assert!(found[0].ends_with("must be 'Exempt' if and only if `name` is 'exempt'"), "{found:?}");
    let old = stored("Job", &json!({}));
    let status =
        json!({"status": {"startTime": "2026-01-02T00:00:00Z", "completionTime": "2026-01-01T00:00:00Z"}});
    let found = texts(strategy("Job").validate_status_update(&with(old.clone(), &status), &old));
    assert!(found.iter().any(|text| text.ends_with("must be equal to or after `startTime`")), "{found:?}");
    let mut pod = with(
        minimal("Pod"),
        &json!({"spec": {"containers": [{"name": "c", "lifecycle": {"stopSignal": "SIGTERM"}}]}}),
    );
    strategy("Pod").default(&mut pod);
    assert!(pod["spec"]["containers"][0]["lifecycle"].is_null());
}
