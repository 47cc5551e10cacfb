use std::sync::Arc;

use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};

use super::decide::*;
use ferrite_client::resource_claims::{consumers, entries};

fn pod(changes: Value) -> Pod {
    let mut pod = json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "pod-1"},
        "spec": {"containers": [], "nodeName": "n", "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
        "status": {"phase": "Running"},
    });
    merge(&mut pod, changes);
    ferrite_json::from_value(pod).unwrap()
}

fn claim(changes: Value) -> ResourceClaim {
    let mut claim =
        json!({"metadata": {"name": "c", "namespace": "ns", "uid": "claim-1"}, "spec": {}, "status": {}});
    merge(&mut claim, changes);
    ferrite_json::from_value(claim).unwrap()
}

fn merge(into: &mut Value, from: Value) {
    match (into.as_object_mut(), from) {
        (Some(into), Value::Object(from)) => {
            for (key, value) in from.iter() {
                let mut member = into.get(key.as_str()).cloned().unwrap_or(Value::Null);
                merge(&mut member, value.clone());
                into.insert(key.clone(), member);
            }
        }
        (_, from) => *into = from,
    }
}

fn owned_by(uid: &str) -> Value {
    json!({"metadata": {
        "annotations": {POD_CLAIM: "gpu"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}],
    }})
}

#[test]
fn an_entry_needs_a_claim_until_one_of_its_own_exists() {
    let named = json!({"status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]}});
    let unneeded = json!({"status": {"resourceClaimStatuses": [{"name": "gpu"}]}});
    let made = Need::Claim { template: "t" };
    for (what, pod, claim, expected) in [
        ("new pod", pod(json!({})), None, made),
        ("its claim", pod(named.clone()), Some(claim(owned_by("pod-1"))), Need::Nothing),
        ("deleted by hand", pod(named.clone()), None, Need::Claim { template: "t" }),
        ("another pod's", pod(named), Some(claim(owned_by("pod-2"))), Need::Claim { template: "t" }),
        ("not needed", pod(unneeded), None, Need::Nothing),
        (
            "given by name",
            pod(json!({"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]}})),
            None,
            Need::Nothing,
        ),
        ("odd", pod(json!({"spec": {"resourceClaims": [{"name": "gpu"}]}})), None, Need::Unsupported),
    ] {
        assert_eq!(need(&pod, &entries(&pod)[0], claim.as_ref()), expected, "{what}");
    }
}

#[test]
fn generated_claims_carry_the_template_and_belong_to_their_pod() {
    let pod = pod(json!({}));
    let template: ResourceClaimTemplate = ferrite_json::from_value(json!({
        "metadata": {"name": "t"},
        "spec": {
            "metadata": {"labels": {"l": "1"}, "annotations": {"a": "2"}},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c", "adminAccess": true}}]}},
        },
    }))
    .unwrap();
    let entry = &entries(&pod)[0];
    let claim = claim_for(&pod, entry, &template);
    assert_eq!(claim.metadata.generate_name.as_deref(), Some("p-gpu-"));
    assert_eq!(claim.metadata.labels.as_ref().unwrap()["l"], "1");
    assert_eq!(claim.metadata.annotations.as_ref().unwrap()["a"], "2");
    assert!(is_made_for(&claim, &pod, entry));
    assert_eq!((admin_access(&claim), source(&claim)), ("true", "resource_claim_template"));
}

#[test]
fn long_names_keep_some_of_both_parts() {
    let pod = pod(json!({"metadata": {"name": "a".repeat(100)},
        "spec": {"resourceClaims": [{"name": "b".repeat(50), "resourceClaimTemplateName": "t"}]}}));
    let template =
        ferrite_json::from_value(json!({"metadata": {"name": "t"}, "spec": {"spec": {}}})).unwrap();
    let name = claim_for(&pod, &entries(&pod)[0], &template).metadata.generate_name.unwrap();
    assert_eq!(name, format!("{}-{}", "a".repeat(37), "b".repeat(18)));
}

#[test]
fn reservations_hold_while_their_pod_may_run() {
    let reserved = |group: &str, resource: &str| json!({"status": {"reservedFor": [{"apiGroup": group, "resource": resource, "name": "p", "uid": "pod-1"}]}});
    let deleting = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    let mut never_placed = deleting.clone();
    merge(&mut never_placed, json!({"spec": {"nodeName": ""}}));
    for (what, consumer, pod, expected) in [
        ("runs", reserved("", "pods"), Some(pod(json!({}))), true),
        ("gone", reserved("", "pods"), None, false),
        ("replaced", reserved("", "pods"), Some(pod(json!({"metadata": {"uid": "pod-2"}}))), false),
        ("failed", reserved("", "pods"), Some(pod(json!({"status": {"phase": "Failed"}}))), false),
        ("ends on its node", reserved("", "pods"), Some(pod(deleting)), true),
        ("never placed", reserved("", "pods"), Some(pod(never_placed)), false),
        ("not a pod", reserved("scheduling.k8s.io", "podgroups"), None, true),
    ] {
        let claim = claim(consumer);
        assert_eq!(is_valid(&consumers(&claim)[0], pod.as_ref()), expected, "{what}");
    }
}

#[test]
fn the_last_consumer_takes_the_allocation_with_it() {
    let consumer = |uid: &str| json!({"resource": "pods", "name": uid, "uid": uid});
    let allocated = json!({"metadata": {"finalizers": [FINALIZER]},
        "status": {"allocation": {}, "reservedFor": [consumer("a"), consumer("b")]}});
    let mut foreign = allocated.clone();
    merge(&mut foreign, json!({"metadata": {"finalizers": []}}));
    let mut idle = allocated.clone();
    merge(&mut idle, json!({"status": {"reservedFor": []}}));
    let mut deleted = idle.clone();
    merge(&mut deleted, json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    let mut deleted_in_use = allocated.clone();
    merge(&mut deleted_in_use, json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    for (what, given, remaining, status, finalizer) in [
        ("both stay", &allocated, 2, None, false),
        ("one goes", &allocated, 1, Some((true, 1)), false),
        ("both go", &allocated, 0, Some((false, 0)), true),
        ("allocated by others", &foreign, 0, Some((true, 0)), false),
        ("never used", &idle, 0, None, false),
        ("never used, and deleted", &deleted, 0, Some((false, 0)), true),
        ("deleted while in use", &deleted_in_use, 2, None, false),
    ] {
        let given = claim(given.clone());
        let remaining = consumers(&given)[..remaining].to_vec();
        let plan = release(&given, remaining);
        let found = plan
            .status
            .as_ref()
            .map(|status| (status.allocation.is_some(), status.reserved_for.as_ref().map_or(0, Vec::len)));
        assert_eq!((found, plan.finalizer), (status, finalizer), "{what}");
    }
}

#[test]
fn claims_of_pods_that_are_done_go() {
    for (what, claim_, found, expected) in [
        ("of a running pod", claim(owned_by("pod-1")), Some(pod(json!({}))), false),
        ("of a pod that is not known yet", claim(owned_by("pod-1")), None, false),
        (
            "of a finished pod",
            claim(owned_by("pod-1")),
            Some(pod(json!({"status": {"phase": "Succeeded"}}))),
            true,
        ),
        ("of a pod that was replaced", claim(owned_by("pod-0")), Some(pod(json!({}))), true),
        ("nobody's", claim(json!({})), Some(pod(json!({"status": {"phase": "Succeeded"}}))), false),
    ] {
        assert_eq!(is_left_behind(&claim_, |_| found.map(Arc::new)), expected, "{what}");
    }
    let extended = claim(json!({"metadata": {"annotations": {EXTENDED: "true"}}}));
    assert_eq!(source(&extended), "extended_resource");
}
