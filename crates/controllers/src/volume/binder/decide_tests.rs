use ferrite_json::{Value, json};

use super::super::bind;
use super::*;

fn volume(spec: Value, annotations: Value, phase: &str) -> PersistentVolume {
    let mut whole = json!({"capacity": {"storage": "5Gi"}, "accessModes": ["ReadWriteOnce"]});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    ferrite_json::from_value(json!({
        "metadata": {"name": "v", "annotations": annotations},
        "spec": whole,
        "status": {"phase": phase},
    }))
    .unwrap()
}

fn claim(spec: Value, annotations: Value) -> PersistentVolumeClaim {
    let mut whole = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    ferrite_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "ns", "uid": "u", "annotations": annotations},
        "spec": whole,
    }))
    .unwrap()
}

fn class(name: &str, provisioner: &str, delayed: bool, default: bool, made: &str) -> Arc<StorageClass> {
    let mode = if delayed { "WaitForFirstConsumer" } else { "Immediate" };
    let annotations = json!({"storageclass.kubernetes.io/is-default-class": default.to_string()});
    let class = json!({
        "metadata": {"name": name, "annotations": annotations, "creationTimestamp": made},
        "provisioner": provisioner,
        "volumeBindingMode": mode,
    });
    Arc::new(ferrite_json::from_value(class).unwrap())
}

fn bound_to(uid: &str) -> Value {
    json!({"claimRef": {"namespace": "ns", "name": "c", "uid": uid}})
}

const OLD: &str = "2026-01-01T00:00:00Z";
const NEW: &str = "2026-02-01T00:00:00Z";

#[test]
fn claims_that_are_not_bound() {
    let free = Arc::new(volume(json!({}), json!({}), "Available"));
    let of_class = |name: &str| json!({"storageClassName": name});
    let fast = || vec![class("fast", "example.com/disk", false, false, OLD)];
    let late = || vec![class("late", "example.com/disk", true, false, OLD)];
    let none = json!({});
    for (what, spec, annotations, candidates, classes, expected) in [
        (
            "a free volume",
            none.clone(),
            none.clone(),
            vec![free.clone()],
            vec![],
            ClaimStep::Bind(free.clone()),
        ),
        ("nothing", none.clone(), none.clone(), vec![], vec![], ClaimStep::NoVolume),
        (
            "the newest default class",
            none.clone(),
            none.clone(),
            vec![],
            vec![
                class("a", "x", false, true, OLD),
                class("b", "x", false, true, NEW),
                class("c", "x", false, false, NEW),
            ],
            ClaimStep::AssignClass("b".into()),
        ),
        (
            "a volume before the default class",
            none.clone(),
            none.clone(),
            vec![free.clone()],
            vec![class("a", "x", false, true, OLD)],
            ClaimStep::Bind(free.clone()),
        ),
        (
            "no class on purpose",
            of_class(""),
            none.clone(),
            vec![],
            vec![class("a", "x", false, true, OLD)],
            ClaimStep::NoVolume,
        ),
        (
            "a provisioner",
            of_class("fast"),
            none.clone(),
            vec![],
            fast(),
            ClaimStep::Provision { provisioner: "example.com/disk".into() },
        ),
        ("a class that waits", of_class("late"), none.clone(), vec![], late(), ClaimStep::WaitForConsumer),
        (
            "a class that waited",
            of_class("late"),
            json!({"volume.kubernetes.io/selected-node": "n"}),
            vec![],
            late(),
            ClaimStep::Provision { provisioner: "example.com/disk".into() },
        ),
        (
            "a class that is not there",
            of_class("gone"),
            none.clone(),
            vec![],
            vec![],
            ClaimStep::CannotProvision("storageclass.storage.k8s.io \"gone\" not found".into()),
        ),
        (
            "a provisioner that nobody is",
            of_class("static"),
            none.clone(),
            vec![],
            vec![class("static", "kubernetes.io/no-provisioner", false, false, OLD)],
            ClaimStep::CannotProvision("no volume plugin matched".into()),
        ),
    ] {
        let view = ClaimView { named: None, candidates: &candidates, classes: &classes, provisions: true };
        assert_eq!(claim_step(&claim(spec, annotations), view), expected, "{what}");
    }
}

#[test]
fn claims_that_name_a_volume() {
    let by_name = json!({"volumeName": "v"});
    let bound = json!({BIND_COMPLETED: "yes"});
    let lost = |reason, message| ClaimStep::Lost { reason, message };
    let v = |spec: Value| Arc::new(volume(spec, json!({}), "Available"));
    let other = json!({"claimRef": {"namespace": "ns", "name": "other", "uid": "o"}});
    for (what, spec, annotations, named, expected) in [
        ("not there yet", by_name.clone(), json!({}), None, ClaimStep::Wait),
        ("free", by_name.clone(), json!({}), Some(v(json!({}))), ClaimStep::Bind(v(json!({})))),
        ("reserved", by_name.clone(), json!({}), Some(v(bound_to(""))), ClaimStep::Bind(v(bound_to("")))),
        (
            "too small",
            by_name.clone(),
            json!({}),
            Some(v(json!({"capacity": {"storage": "1Gi"}}))),
            ClaimStep::Mismatch { volume: "v".into(), mismatch: Mismatch::TooSmall },
        ),
        (
            "taken",
            by_name.clone(),
            json!({}),
            Some(v(other.clone())),
            ClaimStep::Taken { volume: "v".into(), retry: false },
        ),
        (
            "taken though we chose it",
            by_name.clone(),
            json!({BOUND_BY_CONTROLLER: "yes"}),
            Some(v(other.clone())),
            ClaimStep::Taken { volume: "v".into(), retry: true },
        ),
        ("bound", by_name.clone(), bound.clone(), Some(v(bound_to("u"))), ClaimStep::Bind(v(bound_to("u")))),
        (
            "bound to a volume that was freed",
            by_name.clone(),
            bound.clone(),
            Some(v(json!({}))),
            ClaimStep::Bind(v(json!({}))),
        ),
        (
            "bound, and the volume is gone",
            by_name.clone(),
            bound.clone(),
            None,
            lost("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!"),
        ),
        (
            "bound, and the name is gone",
            json!({}),
            bound.clone(),
            None,
            lost(
                "ClaimLost",
                "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!",
            ),
        ),
        (
            "bound to another's volume",
            by_name.clone(),
            bound.clone(),
            Some(v(other.clone())),
            lost("ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly"),
        ),
    ] {
        let view = ClaimView { named: named.as_ref(), candidates: &[], classes: &[], provisions: true };
        assert_eq!(claim_step(&claim(spec, annotations), view), expected, "{what}");
    }
}

#[test]
fn volumes() {
    let here = claim(json!({"volumeName": "v"}), json!({}));
    let elsewhere = claim(json!({"volumeName": "w"}), json!({}));
    let unbound = claim(json!({}), json!({}));
    let leave = VolumeStep::Reclaim(Reclaim::LeaveAlone);
    let fail = |reason, message: &str| VolumeStep::Reclaim(Reclaim::Fail { reason, message: message.into() });
    let with = |policy: &str| {
        let mut spec = bound_to("u");
        spec["persistentVolumeReclaimPolicy"] = json!(policy);
        spec
    };
    let made = json!({PROVISIONED_BY: "example.com/disk"});
    let none = json!({});
    let no_deleter =
        "error getting deleter volume plugin for volume \"v\": no deletable volume plugin matched";
    for (what, spec, annotations, claim, expected) in [
        ("free", json!({}), none.clone(), None, VolumeStep::Phase("Available")),
        ("reserved", bound_to(""), none.clone(), Some(&here), VolumeStep::Phase("Available")),
        ("bound", bound_to("u"), none.clone(), Some(&here), VolumeStep::Phase("Bound")),
        ("half bound", bound_to("u"), none.clone(), Some(&unbound), VolumeStep::WakeClaim),
        (
            "half bound, another mode",
            json!({"claimRef": bound_to("u")["claimRef"], "volumeMode": "Block"}),
            none.clone(),
            Some(&unbound),
            VolumeStep::ModeMismatch,
        ),
        ("the claim went elsewhere", bound_to("u"), none.clone(), Some(&elsewhere), VolumeStep::Unbind),
        (
            "made for a claim that went elsewhere",
            with("Delete"),
            made.clone(),
            Some(&elsewhere),
            leave.clone(),
        ),
        ("the claim is gone: kept", with("Retain"), none.clone(), None, leave.clone()),
        ("another claim of that name", bound_to("older"), none.clone(), Some(&here), leave.clone()),
        ("deleted by its provisioner", with("Delete"), made.clone(), None, leave.clone()),
        ("nobody deletes it", with("Delete"), none.clone(), None, fail("VolumeFailedDelete", no_deleter)),
        (
            "nobody recycles it",
            with("Recycle"),
            none.clone(),
            None,
            fail("VolumeFailedRecycle", "No recycler plugin found for the volume!"),
        ),
        (
            "no such policy",
            with("Burn"),
            none.clone(),
            None,
            fail("VolumeUnknownReclaimPolicy", "Volume has unrecognized PersistentVolumeReclaimPolicy"),
        ),
    ] {
        assert_eq!(volume_step(&volume(spec, annotations, "Bound"), claim), expected, "{what}");
    }
}

/// However often a binding is interrupted, the rest is written next time, and nothing after that.
#[test]
fn a_binding_is_four_writes_and_then_none() {
    let (start_volume, start_claim) =
        (volume(json!({}), json!({}), "Available"), claim(json!({}), json!({})));
    let one = bind::volume_for_claim(&start_volume, &start_claim).unwrap();
    assert_eq!(annotation(&one.metadata, BOUND_BY_CONTROLLER), Some("yes"));
    assert!(is_bound_to(&one, &start_claim));
    assert_eq!(bind::volume_for_claim(&one, &start_claim), None);
    let two = bind::volume_in_phase(&one, "Bound", "").unwrap();
    assert_eq!(bind::volume_in_phase(&two, "Bound", ""), None);
    let three = bind::claim_for_volume(&start_claim, &two).unwrap();
    assert_eq!(volume_name(&three), "v");
    assert_eq!(annotation(&three.metadata, BIND_COMPLETED), Some("yes"));
    assert_eq!(annotation(&three.metadata, BOUND_BY_CONTROLLER), Some("yes"));
    assert_eq!(bind::claim_for_volume(&three, &two), None);
    let four = bind::claim_in_phase(&three, "Bound", Some(&two)).unwrap();
    let status = four.status.clone().unwrap();
    assert_eq!(status.capacity.unwrap()["storage"].0, "5Gi");
    assert_eq!(status.access_modes.unwrap(), ["ReadWriteOnce"]);
    assert_eq!(bind::claim_in_phase(&four, "Bound", Some(&two)), None);
}

#[test]
fn users_reservations_survive_an_unbinding() {
    let by_us = volume(bound_to("u"), json!({BOUND_BY_CONTROLLER: "yes"}), "Bound");
    let freed = bind::unbound(&by_us);
    assert!(claim_ref(&freed).is_none() && freed.metadata.annotations.is_none());
    let by_user = bind::unbound(&volume(bound_to("u"), json!({}), "Bound"));
    let reference = claim_ref(&by_user).unwrap();
    assert_eq!((reference.name.as_deref(), reference.uid.as_deref()), (Some("c"), None));
    // A claim that a user wrote into a volume is no choice of ours.
    let reserved = volume(bound_to(""), json!({}), "Available");
    let bound = bind::volume_for_claim(&reserved, &claim(json!({}), json!({}))).unwrap();
    assert_eq!(annotation(&bound.metadata, BOUND_BY_CONTROLLER), None);
}
