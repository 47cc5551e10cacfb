//! Makes the claims of generic ephemeral volumes. A claim belongs to its pod and goes with it.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, EventType, Informer, ObjectKey, controller_of, is_already_exists,
};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Client;
use kube::api::PostParams;

use super::objects::{PODS_BY_CLAIM, claim_index, name, uid};
use crate::Context;
use crate::error::{During, SyncError, is_namespace_terminating};

const NAME: &str = "ephemeral-volume-controller";
/// The source of events, as upstream's.
const SOURCE: &str = "ephemeral_volume";

struct Ephemeral {
    client: Client,
    pods: Informer<Pod>,
    claims: Informer<PersistentVolumeClaim>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(Ephemeral {
        client: context.client.clone(),
        pods: context.informers.get(),
        claims: context.informers.get(),
        recorder: context.events.recorder(SOURCE, None),
    });
    controller.pods.add_index(PODS_BY_CLAIM, claim_index);
    let pods = controller.pods.clone();
    context
        .controller(NAME)
        .watches(&controller.pods, |change, queue| {
            if let Change::Added(pod) = change
                && ephemeral(pod).next().is_some()
                && pod.metadata.deletion_timestamp.is_none()
            {
                queue.add(ObjectKey::of(&**pod));
            }
        })
        // A claim that somebody deleted is made again.
        .watches(&controller.claims, move |change, queue| {
            if let Change::Deleted(claim) = change {
                for pod in pods.by_index(PODS_BY_CLAIM, &ObjectKey::of(&**claim).to_string()) {
                    queue.add(ObjectKey::of(&*pod));
                }
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

fn ephemeral(pod: &Pod) -> impl Iterator<Item = &Volume> {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    volumes.iter().filter(|volume| volume.ephemeral.is_some())
}

impl Ephemeral {
    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(pod) = self.pods.get(&key) else { return Ok(None) };
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(None);
        }
        for volume in ephemeral(&pod) {
            if let Err(error) = self.ensure(&pod, volume).await {
                if matches!(&error, SyncError::Api { error, .. } if is_namespace_terminating(error)) {
                    return Ok(None);
                }
                let message = format!("ephemeral volume {}: {error}", volume.name);
                self.recorder.event_for(&*pod, EventType::Warning, "FailedBinding", message);
                return Err(error);
            }
        }
        Ok(None)
    }

    async fn ensure(&self, pod: &Pod, volume: &Volume) -> Result<(), SyncError> {
        let Some(claim) = claim_for(pod, volume) else { return Ok(()) };
        let key = ObjectKey::of(&claim);
        if let Some(there) = self.claims.get(&key) {
            return check_owner(pod, &there);
        }
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.create(&PostParams::default(), &claim).await {
            Err(error) if is_already_exists(&error) => {
                let there = api.get(&key.name).await.during(|| format!("read claim {key}"))?;
                check_owner(pod, &there)
            }
            result => result.map(drop).during(|| format!("create PVC {}", key.name)),
        }
    }
}

/// Fails when a claim of the right name is not the pod's own.
fn check_owner(pod: &Pod, claim: &PersistentVolumeClaim) -> Result<(), SyncError> {
    let owned = controller_of(&claim.metadata).is_some_and(|owner| owner.uid == uid(&pod.metadata));
    if owned {
        return Ok(());
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let (claim, pod) = (name(&claim.metadata), name(&pod.metadata));
    Err(SyncError::Other(format!(
        "PVC {namespace}/{claim} was not created for pod {namespace}/{pod} (pod is not owner)"
    )))
}

/// The claim of an ephemeral volume.
fn claim_for(pod: &Pod, volume: &Volume) -> Option<PersistentVolumeClaim> {
    let template = volume.ephemeral.as_ref()?.volume_claim_template.as_ref()?;
    let given = template.metadata.clone().unwrap_or_default();
    Some(PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(format!("{}-{}", name(&pod.metadata), volume.name)),
            namespace: pod.metadata.namespace.clone(),
            labels: given.labels,
            annotations: given.annotations,
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Pod".into(),
                name: name(&pod.metadata).into(),
                uid: uid(&pod.metadata).into(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    })
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn claims_carry_the_template_and_belong_to_their_pod() {
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"containers": [], "volumes": [
                {"name": "a", "emptyDir": {}},
                {"name": "b", "ephemeral": {"volumeClaimTemplate": {
                    "metadata": {"labels": {"l": "1"}, "annotations": {"a": "2"}},
                    "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "fast"},
                }}},
            ]},
        }))
        .unwrap();
        let volumes: Vec<&Volume> = ephemeral(&pod).collect();
        assert_eq!(volumes.len(), 1);
        let claim = claim_for(&pod, volumes[0]).unwrap();
        assert_eq!(ObjectKey::of(&claim).to_string(), "ns/p-b");
        assert_eq!(claim.metadata.labels.as_ref().unwrap()["l"], "1");
        assert_eq!(claim.spec.as_ref().unwrap().storage_class_name.as_deref(), Some("fast"));
        assert!(check_owner(&pod, &claim).is_ok());
        let mut stranger = claim.clone();
        stranger.metadata.owner_references = None;
        let refused = check_owner(&pod, &stranger).unwrap_err().to_string();
        assert_eq!(refused, "PVC ns/p-b was not created for pod ns/p (pod is not owner)");
    }
}
