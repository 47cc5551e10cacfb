use ferrite_json::{Value, json};

use super::*;

fn class(changes: Value) -> StorageClass {
    let mut whole = json!({
        "metadata": {"name": "local-path"},
        "provisioner": PROVISIONER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Delete",
    });
    whole.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    ferrite_json::from_value(whole).unwrap()
}

fn claim(spec: Value, annotations: Value) -> PersistentVolumeClaim {
    let mut whole = json!({
        "storageClassName": "local-path", "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    });
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    ferrite_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "ns", "uid": "u", "annotations": annotations},
        "spec": whole,
    }))
    .unwrap()
}

fn node(annotations: Value) -> Node {
    ferrite_json::from_value(json!({
        "metadata": {"name": "n", "labels": {HOSTNAME: "host"}, "annotations": annotations},
    }))
    .unwrap()
}

fn handed_over() -> Value {
    json!({STORAGE_PROVISIONER: PROVISIONER, SELECTED_NODE: "n"})
}

#[test]
fn claims() {
    let ready = node(json!({DIRECTORY: "/data/volumes"}));
    let nothing = ClaimStep::Nothing;
    let refuse = ClaimStep::Refuse;
    for (what, spec, annotations, of_class, node, pod, expected) in [
        ("waits for a pod", json!({}), json!({}), json!({}), None, None, nothing.clone()),
        (
            "a pod that no scheduler placed",
            json!({}),
            json!({}),
            json!({}),
            None,
            Some("n"),
            ClaimStep::SelectNode("n".into()),
        ),
        (
            "another provisioner's",
            json!({}),
            handed_over(),
            json!({"provisioner": "x"}),
            Some(&ready),
            None,
            nothing.clone(),
        ),
        ("bound", json!({"volumeName": "v"}), handed_over(), json!({}), Some(&ready), None, nothing.clone()),
        (
            "not handed over",
            json!({}),
            json!({SELECTED_NODE: "n"}),
            json!({}),
            Some(&ready),
            None,
            nothing.clone(),
        ),
        ("the node is gone", json!({}), handed_over(), json!({}), None, None, ClaimStep::Deselect),
        (
            "the node has no place",
            json!({}),
            handed_over(),
            json!({}),
            Some(&node(json!({}))),
            None,
            refuse(Refusal::NoDirectory("n".into())),
        ),
        (
            "a class that does not wait",
            json!({}),
            json!({}),
            json!({"volumeBindingMode": "Immediate"}),
            None,
            None,
            refuse(Refusal::Immediate),
        ),
        (
            "shared between nodes",
            json!({"accessModes": ["ReadWriteMany"]}),
            handed_over(),
            json!({}),
            Some(&ready),
            None,
            refuse(Refusal::AccessMode("ReadWriteMany".into())),
        ),
        (
            "a device",
            json!({"volumeMode": "Block"}),
            handed_over(),
            json!({}),
            Some(&ready),
            None,
            refuse(Refusal::Block),
        ),
        (
            "a selector",
            json!({"selector": {"matchLabels": {"a": "b"}}}),
            handed_over(),
            json!({}),
            Some(&ready),
            None,
            refuse(Refusal::Selector),
        ),
        (
            "a copy",
            json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "x"}}),
            handed_over(),
            json!({}),
            Some(&ready),
            None,
            refuse(Refusal::DataSource),
        ),
        (
            "mount options",
            json!({}),
            handed_over(),
            json!({"mountOptions": ["ro"]}),
            Some(&ready),
            None,
            refuse(Refusal::MountOptions),
        ),
    ] {
        let step = claim_step(&claim(spec, annotations), Some(&class(of_class)), node, pod);
        assert_eq!(step, expected, "{what}");
    }
}

#[test]
fn the_volume_is_a_directory_of_the_selected_node() {
    let (node, class) = (node(json!({DIRECTORY: "/data/volumes/"})), class(json!({})));
    let step = claim_step(&claim(json!({}), handed_over()), Some(&class), Some(&node), None);
    let ClaimStep::Provision(volume) = step else { panic!("{step:?}") };
    assert_eq!(volume.metadata.name.as_deref(), Some("pvc-u"));
    assert_eq!(volume.metadata.finalizers.as_deref(), Some(&[FINALIZER.to_owned()][..]));
    assert_eq!(annotation(&volume.metadata, NODE), Some("n"));
    let spec = volume.spec.unwrap();
    assert_eq!(spec.local.unwrap().path, "/data/volumes/pvc-u");
    assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Delete"));
    assert_eq!(spec.claim_ref.unwrap().uid.as_deref(), Some("u"));
    assert_eq!(spec.capacity.unwrap()["storage"].0, "1Gi");
    let affinity = spec.node_affinity.unwrap().required.unwrap();
    let expression = &affinity.node_selector_terms[0].match_expressions.as_ref().unwrap()[0];
    assert_eq!(expression.values.as_deref(), Some(&["host".to_owned()][..]));
}

#[test]
fn volumes_go_after_their_data() {
    let volume = |phase: &str, policy: &str, deleting: bool, held: bool, by: &str| -> PersistentVolume {
        ferrite_json::from_value(json!({
            "metadata": {
                "name": "v", "annotations": {PROVISIONED_BY: by, NODE: "n"},
                "deletionTimestamp": deleting.then_some("2026-01-01T00:00:00Z"),
                "finalizers": if held { json!([FINALIZER]) } else { json!(["other"]) },
            },
            "spec": {"persistentVolumeReclaimPolicy": policy},
            "status": {"phase": phase},
        }))
        .unwrap()
    };
    let (quiet, asked, done) =
        (node(json!({})), node(json!({REMOVE: "v"})), node(json!({REMOVED: "v", REMOVE: "v"})));
    let ask = VolumeStep::Ask { node: "n".into() };
    for (what, volume, node, expected) in [
        ("bound", volume("Bound", "Delete", false, true, PROVISIONER), None, VolumeStep::Nothing),
        ("released", volume("Released", "Delete", false, true, PROVISIONER), None, VolumeStep::Delete),
        ("retained", volume("Released", "Retain", false, true, PROVISIONER), None, VolumeStep::Nothing),
        ("not ours", volume("Released", "Delete", false, true, "x"), None, VolumeStep::Nothing),
        ("deleted", volume("Released", "Delete", true, true, PROVISIONER), Some(&quiet), ask.clone()),
        (
            "deleted while bound",
            volume("Bound", "Delete", true, true, PROVISIONER),
            Some(&quiet),
            VolumeStep::Nothing,
        ),
        (
            "the node knows",
            volume("Released", "Delete", true, true, PROVISIONER),
            Some(&asked),
            VolumeStep::Nothing,
        ),
        (
            "the node is done",
            volume("Released", "Delete", true, true, PROVISIONER),
            Some(&done),
            VolumeStep::Release,
        ),
        (
            "the node is gone",
            volume("Released", "Delete", true, true, PROVISIONER),
            None,
            VolumeStep::Release,
        ),
        (
            "retained and deleted",
            volume("Released", "Retain", true, true, PROVISIONER),
            Some(&quiet),
            VolumeStep::Release,
        ),
        ("let go", volume("Released", "Delete", true, false, PROVISIONER), Some(&done), VolumeStep::Nothing),
    ] {
        assert_eq!(volume_step(&volume, node), expected, "{what}");
    }
}

#[test]
fn a_nodes_list_forgets_volumes_that_are_gone() {
    let node = node(json!({REMOVE: "a,b"}));
    assert_eq!(node_step(&node, |_| true), None);
    assert_eq!(node_step(&node, |volume| volume == "b"), Some(["b".to_owned()].into()));
}
