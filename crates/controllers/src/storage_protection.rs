//! Lets claims, volumes and classes of their attributes go that are being deleted, once nobody uses them.

use std::time::Duration;

use ferrite_client::{Api, Change, Informer, ObjectKey, is_conflict, is_not_found};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{ListParams, PostParams};

use crate::Context;
use crate::error::{During, SyncError};
use crate::volume::objects::{PODS_BY_CLAIM, claim_index, claim_keys, claims_of};

const CLAIMS: &str = "persistentvolumeclaim-protection-controller";
const VOLUMES: &str = "persistentvolume-protection-controller";
const CLAIM_FINALIZER: &str = "kubernetes.io/pvc-protection";
const CLASSES: &str = "volumeattributesclass-protection-controller";
const CLASS_FINALIZER: &str = "kubernetes.io/vac-protection";
const VOLUME_FINALIZER: &str = "kubernetes.io/pv-protection";

/// Index of claims and volumes by the classes of attributes they use.
const BY_CLASS: &str = "attributes class";

/// The action for an object's finalizer.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// It is not protected yet: made before there was admission for it.
    Hold,
    Release,
}

fn decide(metadata: &ObjectMeta, finalizer: &str, in_use: bool) -> Step {
    let held = metadata.finalizers.iter().flatten().any(|f| f == finalizer);
    match (metadata.deletion_timestamp.is_some(), held) {
        (true, true) if !in_use => Step::Release,
        (false, false) => Step::Hold,
        _ => Step::Nothing,
    }
}

/// The metadata after a step.
fn after(mut metadata: ObjectMeta, finalizer: &str, step: &Step) -> ObjectMeta {
    let finalizers = metadata.finalizers.get_or_insert_default();
    finalizers.retain(|f| f != finalizer);
    if *step == Step::Hold {
        finalizers.push(finalizer.to_owned());
    }
    metadata
}

/// A pod that has ended, or never started, on no node uses nothing.
fn uses(pod: &Pod, claim: &str) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let scheduled = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()).is_some_and(|n| !n.is_empty());
    scheduled && !matches!(phase, Some("Succeeded" | "Failed")) && claims_of(pod).iter().any(|c| c == claim)
}

pub(crate) fn start_claims(context: &Context) {
    let claims: Informer<PersistentVolumeClaim> = context.informers.get();
    let pods: Informer<Pod> = context.informers.get();
    pods.add_index(PODS_BY_CLAIM, claim_index);
    let client = context.client.clone();
    context
        .controller(CLAIMS)
        .reconciles(&claims)
        .watches(&pods, |change, queue| {
            if !matches!(change, Change::Added(_)) {
                claim_keys(change.object()).into_iter().for_each(|key| queue.add(key));
            }
        })
        .run(move |key| {
            let claim = claims.get(&key);
            let in_use =
                || pods.by_index(PODS_BY_CLAIM, &key.to_string()).iter().any(|pod| uses(pod, &key.name));
            let step = claim.as_ref().map(|c| decide(&c.metadata, CLAIM_FINALIZER, in_use()));
            let client = client.clone();
            async move {
                let (Some(claim), Some(step @ (Step::Hold | Step::Release))) = (claim, step) else {
                    return Ok(None);
                };
                if step == Step::Release && is_used_now(&client, &key).await? {
                    // The watch of pods is behind that of claims; the end of the pod wakes this claim again.
                    return Ok(None);
                }
                let api: Api<PersistentVolumeClaim> = Api::namespaced(client, &key.namespace);
                let mut claim = (*claim).clone();
                claim.metadata = after(claim.metadata, CLAIM_FINALIZER, &step);
                settled(api.replace(&key.name, &PostParams::default(), &claim).await, &key)
            }
        });
}

/// Asks the server for the pods of the claim's namespace.
async fn is_used_now(client: &Client, claim: &ObjectKey) -> Result<bool, SyncError> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &claim.namespace);
    let pods = api.list(&ListParams::default()).await;
    let pods = pods.during(|| format!("list the pods that may use claim {claim}"))?;
    Ok(pods.items.iter().any(|pod| uses(pod, &claim.name)))
}

pub(crate) fn start_volumes(context: &Context) {
    let volumes: Informer<PersistentVolume> = context.informers.get();
    let client = context.client.clone();
    context.controller(VOLUMES).reconciles(&volumes).run(move |key| {
        let volume = volumes.get(&key);
        let step = volume.as_ref().map(|volume| {
            let phase = volume.status.as_ref().and_then(|s| s.phase.as_deref());
            decide(&volume.metadata, VOLUME_FINALIZER, phase == Some("Bound"))
        });
        let client = client.clone();
        async move {
            let (Some(volume), Some(step @ (Step::Hold | Step::Release))) = (volume, step) else {
                return Ok(None);
            };
            let api: Api<PersistentVolume> = Api::all(client);
            let mut volume = (*volume).clone();
            volume.metadata = after(volume.metadata, VOLUME_FINALIZER, &step);
            settled(api.replace(&key.name, &PostParams::default(), &volume).await, &key)
        }
    });
}

/// The classes a claim uses: the one it wants, the one it has, and the one it is on its way to.
fn classes_of(claim: &PersistentVolumeClaim) -> Vec<String> {
    let status = claim.status.as_ref();
    let wanted = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.clone());
    let has = status.and_then(|status| status.current_volume_attributes_class_name.clone());
    let target = status
        .and_then(|status| status.modify_volume_status.as_ref()?.target_volume_attributes_class_name.clone());
    let mut classes: Vec<String> =
        [wanted, has, target].into_iter().flatten().filter(|c| !c.is_empty()).collect();
    classes.dedup();
    classes
}

/// The class a volume has.
fn class_of(volume: &PersistentVolume) -> Option<String> {
    volume.spec.as_ref()?.volume_attributes_class_name.clone().filter(|class| !class.is_empty())
}

pub(crate) fn start_classes(context: &Context) {
    let classes: Informer<VolumeAttributesClass> = context.informers.get();
    let claims: Informer<PersistentVolumeClaim> = context.informers.get();
    let volumes: Informer<PersistentVolume> = context.informers.get();
    claims.add_index(BY_CLASS, classes_of);
    volumes.add_index(BY_CLASS, |volume| class_of(volume).into_iter().collect());
    let client = context.client.clone();
    context
        .controller(CLASSES)
        .reconciles(&classes)
        // A claim or volume that moves to another class no longer uses the one it had, which only the old state names.
        .watches(&claims, |change, queue| {
            if let Change::Updated { old, .. } = change {
                classes_of(old).into_iter().for_each(|class| queue.add(ObjectKey::cluster(class)));
            }
            if !matches!(change, Change::Added(_)) {
                classes_of(change.object())
                    .into_iter()
                    .for_each(|class| queue.add(ObjectKey::cluster(class)));
            }
        })
        .watches(&volumes, |change, queue| {
            if let Change::Updated { old, .. } = change {
                class_of(old).into_iter().for_each(|class| queue.add(ObjectKey::cluster(class)));
            }
            if !matches!(change, Change::Added(_)) {
                class_of(change.object()).into_iter().for_each(|class| queue.add(ObjectKey::cluster(class)));
            }
        })
        .run(move |key| {
            let class = classes.get(&key);
            let in_use = || {
                !claims.by_index(BY_CLASS, &key.name).is_empty()
                    || !volumes.by_index(BY_CLASS, &key.name).is_empty()
            };
            let step = class.as_ref().map(|class| decide(&class.metadata, CLASS_FINALIZER, in_use()));
            let client = client.clone();
            async move {
                let (Some(class), Some(step @ (Step::Hold | Step::Release))) = (class, step) else {
                    return Ok(None);
                };
                let api: Api<VolumeAttributesClass> = Api::all(client);
                let mut class = (*class).clone();
                class.metadata = after(class.metadata, CLASS_FINALIZER, &step);
                settled(api.replace(&key.name, &PostParams::default(), &class).await, &key)
            }
        });
}

/// Somebody else's write wakes us again.
pub(crate) fn settled<T>(
    result: Result<T, kube::Error>,
    key: &ObjectKey,
) -> Result<Option<Duration>, SyncError> {
    match result {
        Ok(_) => Ok(None),
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("write finalizers of {key}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};
    use kube::client::Body;
    use std::convert::Infallible;

    /// A pod that mounts the claim `disk`.
    fn pod(phase: &str, node: &str) -> Value {
        json!({
            "metadata": {"name": "p"},
            "spec": {"nodeName": node, "containers": [], "volumes": [
                {"name": "a", "persistentVolumeClaim": {"claimName": "disk"}},
                {"name": "b", "ephemeral": {}},
            ]},
            "status": {"phase": phase},
        })
    }

    #[tokio::test]
    async fn a_pod_that_no_watch_shows_yet_uses_its_claim() {
        for (phase, expected) in [("Running", true), ("Succeeded", false)] {
            let service = tower::service_fn(move |request: http::Request<Body>| async move {
                assert_eq!(request.uri().path(), "/api/v1/namespaces/ns/pods");
                let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod(phase, "n")]});
                let bytes = ferrite_json::to_vec(&list).expect("a list");
                Ok::<_, Infallible>(http::Response::new(Body::from(bytes)))
            });
            let client = Client::new(service, "default");
            let used = is_used_now(&client, &ObjectKey::new("ns", "disk")).await.unwrap();
            assert_eq!(used, expected, "{phase}");
        }
    }

    #[test]
    fn what_is_used_stays() {
        let metadata = |deleting: bool, held: bool| -> ObjectMeta {
            ferrite_json::from_value(json!({
                "deletionTimestamp": deleting.then_some("2026-01-01T00:00:00Z"),
                "finalizers": if held { json!(["other", CLAIM_FINALIZER]) } else { json!(["other"]) },
            }))
            .unwrap()
        };
        for (deleting, held, in_use, expected) in [
            (true, true, false, Step::Release),
            (true, true, true, Step::Nothing),
            (false, false, false, Step::Hold),
            (false, true, false, Step::Nothing),
            (true, false, false, Step::Nothing),
        ] {
            assert_eq!(decide(&metadata(deleting, held), CLAIM_FINALIZER, in_use), expected);
        }
        let released = after(metadata(true, true), CLAIM_FINALIZER, &Step::Release);
        assert_eq!(released.finalizers.unwrap(), ["other"]);
    }

    #[test]
    fn a_claim_uses_the_classes_it_wants_has_and_moves_to() {
        let claim: PersistentVolumeClaim = ferrite_json::from_value(json!({
            "metadata": {"name": "c"},
            "spec": {"volumeAttributesClassName": "gold"},
            "status": {
                "currentVolumeAttributesClassName": "silver",
                "modifyVolumeStatus": {"status": "InProgress", "targetVolumeAttributesClassName": "bronze"},
            },
        }))
        .unwrap();
        assert_eq!(classes_of(&claim), ["gold", "silver", "bronze"]);
        assert!(classes_of(&PersistentVolumeClaim::default()).is_empty());
        let volume: PersistentVolume =
            ferrite_json::from_value(json!({"metadata": {}, "spec": {"volumeAttributesClassName": "gold"}}))
                .unwrap();
        assert_eq!(class_of(&volume).as_deref(), Some("gold"));
    }

    #[test]
    fn a_pod_uses_what_it_names_and_what_was_made_for_it() {
        let pod = |phase: &str, node: &str| -> Pod { ferrite_json::from_value(pod(phase, node)).unwrap() };
        assert!(uses(&pod("Running", "n"), "disk") && uses(&pod("Running", "n"), "p-b"));
        assert!(!uses(&pod("Succeeded", "n"), "disk"));
        assert!(!uses(&pod("Pending", ""), "disk"));
    }
}
