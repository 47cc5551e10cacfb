//! Decision tables, and random lives of a set.

use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_json::{Value, json};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodTemplateSpec};
use proptest::prelude::*;

use super::decide::{Action, Plan, Revision, View};

const NOW: &str = "2024-01-01T01:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn set(spec: Value) -> StatefulSet {
    let mut whole = json!({"replicas": 3, "selector": {"matchLabels": {"app": "w"}}, "template": {},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    ferrite_json::from_value(
        json!({"metadata": {"name": "w", "namespace": "ns", "uid": "u", "generation": 4},
        "spec": whole}),
    )
    .unwrap()
}

fn revision(name: &str) -> Revision {
    Revision { name: name.to_owned(), template: PodTemplateSpec::default() }
}

/// A pod written as `ordinal revision state…`. States: ready, failed, succeeded, running (not ready), deleting, bare
/// (without the labels of its identity) and `age=` in seconds since it is ready. A pod without a state is pending.
fn pod(text: &str) -> Arc<Pod> {
    let mut words = text.split(' ');
    let (ordinal, revision) = (words.next().unwrap(), words.next().unwrap());
    let states: Vec<&str> = words.collect();
    let is = |state: &str| states.contains(&state);
    let age =
        states.iter().find_map(|state| state.strip_prefix("age=")).map_or(60, |age| age.parse().unwrap());
    let phase = match () {
        () if is("failed") => "Failed",
        () if is("succeeded") => "Succeeded",
        () if is("ready") || is("running") => "Running",
        () => "Pending",
    };
    let name = format!("w-{ordinal}");
    let mut labels = json!({"controller-revision-hash": revision, "app": "w"});
    if !is("bare") {
        labels["statefulset.kubernetes.io/pod-name"] = name.as_str().into();
    }
    Arc::new(
        ferrite_json::from_value(json!({
            "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": labels,
                         "deletionTimestamp": is("deleting").then_some(NOW)},
            "spec": {"containers": [], "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": format!("data-w-{ordinal}")}}]},
            "status": {"phase": phase, "conditions": [
                {"type": "Ready", "status": if is("ready") { "True" } else { "False" },
                 "lastTransitionTime": now() - jiff::SignedDuration::from_secs(age)}]},
        }))
        .unwrap(),
    )
}

/// The plan as text: `+ordinal@revision` for a creation, `-ordinal` for a deletion, `~ordinal` for a repair,
/// `c`/`r` for claims that are created or get owners.
fn text(plan: &Plan) -> String {
    let ordinal = |pod: &Pod| pod.metadata.name.as_deref().unwrap()[2..].to_owned();
    let words = plan.stages.iter().flatten().flatten().map(|action| match action {
        Action::Create(pod) => format!("+{}@{}", ordinal(pod), super::identity::revision(pod)),
        Action::Delete(pod) => format!("-{}", ordinal(pod)),
        Action::Repair(pod) => format!("~{}", ordinal(pod)),
        Action::EnsureClaims(pod) => format!("c{}", ordinal(pod)),
        Action::RetainClaims(pod) => format!("r{}", ordinal(pod)),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn plan(set: &StatefulSet, pods: &[&str], claims: &[PersistentVolumeClaim]) -> Plan {
    let pods: Vec<_> = pods.iter().map(|text| pod(text)).collect();
    let find = |name: &str| {
        let found = claims.iter().find(|claim| claim.metadata.name.as_deref() == Some(name));
        found.cloned().map(Arc::new)
    };
    View::new(set, (&revision("old"), &revision("new")), &pods, &find, now()).plan()
}

#[test]
fn ordered_sets_take_one_step_at_a_time() {
    for (what, spec, pods, expected) in [
        ("the first pod", json!({}), &[][..], "+0@new"),
        ("the next waits", json!({}), &["0 new"], ""),
        ("the next comes", json!({}), &["0 new ready"], "+1@new"),
        ("the next waits until the first is available", json!({"minReadySeconds": 90}), &["0 new ready"], ""),
        ("a gap is closed first", json!({}), &["0 new ready", "2 new ready"], "+1@new"),
        ("a pod that is going is waited for", json!({}), &["0 new ready deleting"], ""),
        ("a failed pod goes", json!({}), &["0 new failed", "1 new ready"], "-0"),
        ("a pod that ended goes", json!({}), &["0 new succeeded"], "-0"),
        ("a failed pod that is going is waited for", json!({}), &["0 new failed deleting"], ""),
        ("none is wanted", json!({"replicas": 0}), &[], ""),
        ("other ordinals", json!({"ordinals": {"start": 5}, "replicas": 1}), &[], "+5@new"),
        (
            "other ordinals, then the old ones go",
            json!({"ordinals": {"start": 5}, "replicas": 1}),
            &["0 new ready", "1 new ready", "5 new ready"],
            "-1",
        ),
        (
            "the highest goes first",
            json!({"replicas": 1}),
            &["0 new ready", "1 new ready", "2 new ready"],
            "-2",
        ),
        (
            "one goes, another waits",
            json!({"replicas": 1}),
            &["0 new ready", "1 new ready", "2 new ready deleting"],
            "",
        ),
        (
            "none goes while a wanted one is unhealthy",
            json!({"replicas": 1}),
            &["0 new running", "1 new ready"],
            "",
        ),
        (
            "none goes while one below it is unhealthy, not even an unhealthy one",
            json!({"replicas": 1}),
            &["0 new ready", "1 new running", "2 new running"],
            "",
        ),
        (
            "the only unhealthy one goes",
            json!({"replicas": 1}),
            &["0 new ready", "1 new ready", "2 new running"],
            "-2",
        ),
        (
            "pods that ended go in order",
            json!({"replicas": 1}),
            &["0 new ready", "1 new failed", "2 new failed"],
            "-2",
        ),
        ("an adopted pod is labelled", json!({}), &["0 new ready bare", "1 new ready"], "~0 +2@new"),
        ("the update starts at the top", json!({}), &["0 old ready", "1 old ready", "2 old ready"], "-2"),
        ("it waits for the new pod", json!({}), &["0 old ready", "1 old ready", "2 new"], ""),
        ("it goes on", json!({}), &["0 old ready", "1 old ready", "2 new ready"], "-1"),
        (
            "it stops at the partition",
            json!({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}}),
            &["0 old ready", "1 new ready", "2 new ready"],
            "",
        ),
        (
            "a pod below the partition keeps its revision",
            json!({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}}),
            &["1 new ready", "2 new ready"],
            "+0@old",
        ),
        ("no update while one is unhealthy", json!({}), &["0 old running", "1 old ready", "2 old ready"], ""),
        (
            "scaling goes before the update",
            json!({"replicas": 2}),
            &["0 old ready", "1 old ready", "2 old ready"],
            "-2",
        ),
        (
            "OnDelete",
            json!({"updateStrategy": {"type": "OnDelete"}}),
            &["0 old ready", "1 old ready", "2 old ready"],
            "",
        ),
        ("OnDelete makes new ones", json!({"updateStrategy": {"type": "OnDelete"}}), &[], "+0@new"),
        (
            "maxUnavailable is not in force",
            json!({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0, "maxUnavailable": 2}}}),
            &["0 old ready", "1 old ready", "2 old ready"],
            "-2",
        ),
    ] {
        assert_eq!(text(&plan(&set(spec), pods, &[])), expected, "{what}");
    }
    let mut going = set(json!({}));
    going.metadata.deletion_timestamp = Some(ferrite_json::from_value(json!(NOW)).unwrap());
    assert_eq!(text(&plan(&going, &["0 old ready"], &[])), "", "a set that is being deleted");
}

#[test]
fn parallel_sets_do_all_at_once_but_update_in_order() {
    for (what, replicas, pods, expected) in [
        ("all come", 3, &[][..], "+0@new +1@new +2@new"),
        ("beside unhealthy ones", 3, &["0 new", "1 new failed"], "-1 +2@new"),
        ("all go", 0, &["0 new ready", "1 new", "2 new ready deleting"], "-1 -0"),
        ("one is updated", 3, &["0 old ready", "1 old ready", "2 old ready"], "-2"),
        ("an unhealthy one is updated too", 3, &["0 old running", "1 old running", "2 new ready"], "-1"),
        ("the new one is waited for", 3, &["0 old ready", "1 old ready", "2 new"], ""),
    ] {
        let set = set(json!({"podManagementPolicy": "Parallel", "replicas": replicas}));
        assert_eq!(text(&plan(&set, pods, &[])), expected, "{what}");
    }
}

#[test]
fn claims_are_made_kept_and_given_away() {
    let claim = |ordinal: i32, owner: Value| -> PersistentVolumeClaim {
        ferrite_json::from_value(json!({"metadata": {"name": format!("data-w-{ordinal}"), "namespace": "ns",
            "ownerReferences": owner}}))
        .unwrap()
    };
    let of_set = || json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "w", "uid": "u", "controller": true}]);
    let of_pod = |uid: &str| json!([{"apiVersion": "v1", "kind": "Pod", "name": "w-0", "uid": uid, "controller": true}]);
    let spec = |replicas: i32, scaled: &str, deleted: &str| {
        set(json!({"replicas": replicas, "volumeClaimTemplates": [{"metadata": {"name": "data"}}],
            "persistentVolumeClaimRetentionPolicy": {"whenScaled": scaled, "whenDeleted": deleted}}))
    };
    let none = || Value::Null;
    for (what, set, pods, claims, expected, waits) in [
        ("a pending pod gets its claim", spec(1, "Retain", "Retain"), &["0 new"][..], vec![], "c0", false),
        ("it has it", spec(1, "Retain", "Retain"), &["0 new"], vec![claim(0, none())], "", false),
        (
            "it belongs to the set",
            spec(1, "Retain", "Delete"),
            &["0 new ready"],
            vec![claim(0, none())],
            "~0",
            false,
        ),
        (
            "it does already",
            spec(1, "Retain", "Delete"),
            &["0 new ready"],
            vec![claim(0, of_set())],
            "",
            false,
        ),
        (
            "it goes with its pod",
            spec(0, "Delete", "Delete"),
            &["0 new ready"],
            vec![claim(0, of_set())],
            "r0 -0",
            false,
        ),
        (
            "it goes",
            spec(0, "Delete", "Delete"),
            &["0 new ready"],
            vec![claim(0, of_pod("w-0"))],
            "-0",
            false,
        ),
        (
            "a new pod waits until it is gone",
            spec(1, "Delete", "Delete"),
            &[],
            vec![claim(0, of_pod("w-0"))],
            "",
            true,
        ),
    ] {
        let made = plan(&set, pods, &claims);
        assert_eq!(text(&made), expected, "{what}");
        assert_eq!(made.waits_for_claim, waits, "{what}");
    }
}

fn status(set: &StatefulSet, pods: &[&str], replaced: bool) -> StatefulSetStatus {
    let pods: Vec<_> = pods.iter().map(|text| pod(text)).collect();
    View::new(set, (&revision("old"), &revision("new")), &pods, &|_| None, now()).status(2, replaced)
}

#[test]
fn status_counts_pods_and_completes_the_update() {
    let set = set(json!({"minReadySeconds": 30}));
    let some = |status: &StatefulSetStatus| {
        let StatefulSetStatus {
            ready_replicas, available_replicas, current_replicas, updated_replicas, ..
        } = status;
        [*ready_replicas, *available_replicas, *current_replicas, *updated_replicas]
            .map(Option::unwrap_or_default)
    };
    let midway =
        status(&set, &["0 old ready", "1 old ready age=10", "2 new", "7 old running deleting"], false);
    assert_eq!((midway.replicas, some(&midway)), (4, [2, 1, 2, 1]));
    assert_eq!(midway.current_revision.as_deref(), Some("old"));
    assert_eq!(midway.update_revision.as_deref(), Some("new"));
    assert_eq!((midway.collision_count, midway.observed_generation), (Some(2), Some(4)));
    let one_less = status(&set, &["0 old ready", "1 old ready", "2 old ready"], true);
    assert_eq!(some(&one_less), [3, 3, 2, 0], "the pod that was just deleted");
    let done = status(&set, &["0 new ready", "1 new ready", "2 new ready"], false);
    assert_eq!(some(&done), [3, 3, 3, 3]);
    assert_eq!(done.current_revision.as_deref(), Some("new"));
}

#[test]
fn the_next_look_is_when_the_next_pod_becomes_available() {
    let set = set(json!({"minReadySeconds": 30}));
    let (old, new) = (revision("old"), revision("new"));
    let next = |pods: &[&str]| {
        let pods: Vec<_> = pods.iter().map(|text| pod(text)).collect();
        View::new(&set, (&old, &new), &pods, &|_| None, now()).next_available().map(|wait| wait.as_secs())
    };
    assert_eq!(next(&["0 new ready age=10", "1 new ready age=25", "2 new ready age=40"]), Some(5));
    assert_eq!(next(&["0 new ready age=40", "1 new"]), None);
}

/// A pod of the model, which kubelets act on.
#[derive(Debug, Clone)]
struct ModelPod {
    ordinal: i32,
    new: bool,
    ready: bool,
    failed: bool,
    deleting: bool,
}

impl ModelPod {
    fn object(&self) -> Arc<Pod> {
        let mut words = vec![self.ordinal.to_string(), if self.new { "new" } else { "old" }.to_owned()];
        for (state, word) in [(self.ready, "ready"), (self.failed, "failed"), (self.deleting, "deleting")] {
            words.extend(state.then(|| word.to_owned()));
        }
        pod(&words.join(" "))
    }

    fn serves(&self) -> bool {
        self.ready && !self.deleting && !self.failed
    }
}

fn any_pods() -> impl Strategy<Value = Vec<ModelPod>> {
    let any_pod = (any::<bool>(), 0..8_u8).prop_map(|(new, state)| ModelPod {
        ordinal: 0,
        new,
        ready: state < 5,
        failed: state == 5,
        deleting: state == 6,
    });
    prop::collection::vec(prop::option::of(any_pod), 0..8).prop_map(|pods| {
        let numbered =
            pods.into_iter().zip(0..).filter_map(|(pod, ordinal)| pod.map(|pod| ModelPod { ordinal, ..pod }));
        numbered.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// From any state the set ends with its pods at the update revision. No two pods have one ordinal, and an update
    /// takes at most one pod that serves.
    #[test]
    fn any_state_reaches_the_goal(
        start in any_pods(),
        replicas in 0..6_i32,
        first in 0..3_i32,
        parallel in any::<bool>(),
        order in prop::collection::vec((any::<prop::sample::Index>(), 0..10_u8), 600),
    ) {
        let policy = if parallel { "Parallel" } else { "OrderedReady" };
        let set = set(json!({"replicas": replicas, "podManagementPolicy": policy, "ordinals": {"start": first}}));
        let (old, new) = (revision("old"), revision("new"));
        let mut pods = start;
        let mut settled = false;
        for (at, (step, luck)) in order.into_iter().enumerate() {
            let objects: Vec<_> = pods.iter().map(ModelPod::object).collect();
            let plan = View::new(&set, (&old, &new), &objects, &|_| None, now()).plan();
            let mut idle = true;
            let before = pods.iter().filter(|pod| pod.serves()).count();
            for action in plan.stages.iter().flatten().flatten() {
                idle = false;
                match action {
                    Action::Create(made) => {
                        let ordinal = made.metadata.name.as_deref().unwrap()[2..].parse().unwrap();
                        prop_assert!(pods.iter().all(|pod| pod.ordinal != ordinal), "two pods {ordinal}");
                        pods.push(ModelPod { ordinal, new: true, ready: false, failed: false, deleting: false });
                    }
                    Action::Delete(gone) => {
                        let ordinal: i32 = gone.metadata.name.as_deref().unwrap()[2..].parse().unwrap();
                        let pod = pods.iter_mut().find(|pod| pod.ordinal == ordinal).unwrap();
                        prop_assert!(!pod.deleting, "{ordinal} is deleted twice");
                        pod.deleting = true;
                    }
                    other => prop_assert!(false, "{other:?}"),
                }
            }
            let ordinals: BTreeSet<i32> = pods.iter().map(|pod| pod.ordinal).collect();
            prop_assert_eq!(ordinals.len(), pods.len());
            if plan.replaces_pod {
                let scaled = pods.iter().filter(|pod| pod.ordinal < first || pod.ordinal >= first + replicas).count();
                prop_assert!(parallel || scaled == 0, "scaling goes first");
                let after = pods.iter().filter(|pod| pod.serves()).count();
                prop_assert!(before - after <= 1 + scaled, "{before} served, then {after}");
            }
            let moving: Vec<_> = (0..pods.len()).filter(|at| pods[*at].deleting || !pods[*at].ready).collect();
            if moving.is_empty() {
                if idle {
                    settled = true;
                    break;
                }
                continue;
            }
            let which = moving[step.index(moving.len())];
            if pods[which].deleting {
                pods.remove(which);
            } else if luck == 0 && at < 300 {
                pods[which].failed = true;
            } else if !pods[which].failed {
                pods[which].ready = true;
            }
        }
        prop_assert!(settled, "still at it: {pods:?}");
        let mut ordinals: Vec<_> = pods.iter().map(|pod| pod.ordinal).collect();
        ordinals.sort_unstable();
        prop_assert_eq!(ordinals, (first..first + replicas).collect::<Vec<_>>());
        prop_assert!(pods.iter().all(|pod| pod.new && pod.ready));
    }
}
