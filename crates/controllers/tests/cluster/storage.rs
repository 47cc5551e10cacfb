//! Stands in for provisioners: every claim gets a volume of its own at once.

use std::sync::Arc;

use ferrite_client::{Api, Informer, Informers, ObjectKey, Scope, WorkQueue, run_workers};
use ferrite_json::json;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};

pub fn start(client: &Client, informers: &Informers, scope: &Scope) {
    let claims: Informer<PersistentVolumeClaim> = informers.get();
    let queue = Arc::new(WorkQueue::new());
    let watching = queue.clone();
    claims.subscribe(move |change| watching.add(ObjectKey::of(&**change.object())));
    let client = client.clone();
    let inner = scope.clone();
    scope.spawn(async move {
        run_workers("provisioner", queue, 2, inner, |key: ObjectKey| {
            let claim = claims.get(&key);
            let client = client.clone();
            async move {
                let is_bound = |claim: &PersistentVolumeClaim| {
                    claim.spec.as_ref().is_some_and(|spec| spec.volume_name.is_some())
                };
                let Some(claim) =
                    claim.filter(|claim| !is_bound(claim) && claim.metadata.deletion_timestamp.is_none())
                else {
                    return Ok::<_, kube::Error>(None);
                };
                let name = format!("pv-{}", claim.metadata.uid.as_deref().unwrap_or_default());
                let volume = json!({"metadata": {"name": name}, "spec": {
                    "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"},
                    "claimRef": {"namespace": key.namespace.as_str(), "name": key.name.as_str(),
                                 "uid": claim.metadata.uid}}});
                let volume = ferrite_json::from_value(volume).unwrap();
                let volumes: Api<PersistentVolume> = Api::all(client.clone());
                match volumes.create(&PostParams::default(), &volume).await {
                    Err(error) if !ferrite_client::is_already_exists(&error) => return Err(error),
                    _ => {}
                }
                let api: Api<PersistentVolumeClaim> = Api::namespaced(client, &key.namespace);
                let bound = json!({"spec": {"volumeName": name},
                    "metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}});
                match api.patch(&key.name, &PatchParams::default(), &Patch::Merge(bound)).await {
                    Err(error) if !ferrite_client::is_not_found(&error) => Err(error),
                    _ => Ok(None),
                }
            }
        })
        .await;
    });
}
