//! The controllers' part: makes, attaches, grows and removes volumes as objects of the API ask for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Controller, Informer, ListSelector, ObjectKey, Scope, is_already_exists, is_not_found,
};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};

use crate::volumes::Volumes;
use crate::{NAME, TOPOLOGY};

const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// Keeps an attachment until the volume is detached.
const FINALIZER: &str = "external-attacher/hostpath-csi-ferrite-io";

#[derive(Debug, thiserror::Error)]
enum DriverError {
    #[error("{}", ferrite_client::message_of(.0))]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Object(#[from] ferrite_json::Error),
}

type Outcome = Result<Option<Duration>, DriverError>;

struct Driver {
    client: Client,
    node: String,
    store: Arc<Volumes>,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    attachments: Informer<VolumeAttachment>,
}

pub fn start(client: &Client, store: &Arc<Volumes>, node: &str, scope: &Scope) {
    let everything = ListSelector::everything;
    let driver = Arc::new(Driver {
        client: client.clone(),
        node: node.to_owned(),
        store: store.clone(),
        claims: Informer::start(Api::all(client.clone()), everything(), scope),
        volumes: Informer::start(Api::all(client.clone()), everything(), scope),
        classes: Informer::start(Api::all(client.clone()), everything(), scope),
        attachments: Informer::start(Api::all(client.clone()), everything(), scope),
    });
    Controller::new("claims", 2, scope)
        .reconciles(&driver.claims)
        .watches(&driver.volumes, |change, queue| {
            let spec = change.object().spec.as_ref();
            if let Some(claim) = spec.and_then(|spec| spec.claim_ref.as_ref()) {
                let text = |part: &Option<String>| part.clone().unwrap_or_default();
                queue.add(ObjectKey::new(text(&claim.namespace), text(&claim.name)));
            }
        })
        .reads(&driver.classes)
        .run_with(driver.clone(), |driver, key| async move { driver.claim(&key).await });
    Controller::new("volumes", 2, scope)
        .reconciles(&driver.volumes)
        .watches(&driver.attachments, |change, queue| {
            if let Some(volume) = &change.object().spec.source.persistent_volume_name {
                queue.add(ObjectKey::cluster(volume));
            }
        })
        .run_with(driver.clone(), |driver, key| async move { driver.volume(&key).await });
    Controller::new("attachments", 2, scope)
        .reconciles(&driver.attachments)
        .run_with(driver.clone(), |driver, key| async move { driver.attachment(&key).await });
}

fn size(amounts: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>) -> i64 {
    let text = amounts.and_then(|amounts| amounts.get("storage")).map_or("0", |amount| &amount.0);
    ferrite_api::quantity::Quantity::parse(text).map_or(0, |size| size.value())
}

fn ours(volume: &PersistentVolume) -> Option<&str> {
    let source = volume.spec.as_ref()?.csi.as_ref()?;
    (source.driver == NAME).then_some(source.volume_handle.as_str())
}

impl Driver {
    /// Makes the volume that a claim waits for, or grows the one that it has.
    async fn claim(&self, key: &ObjectKey) -> Outcome {
        let Some(claim) = self.claims.get(key) else { return Ok(None) };
        let Some(spec) = &claim.spec else { return Ok(None) };
        let wanted = size(spec.resources.as_ref().and_then(|resources| resources.requests.as_ref()));
        if let Some(name) = spec.volume_name.as_deref().filter(|name| !name.is_empty()) {
            return self.grow(&claim, name, wanted).await;
        }
        let annotations = claim.metadata.annotations.clone().unwrap_or_default();
        if annotations.get(PROVISIONER).is_none_or(|provisioner| provisioner != NAME) {
            return Ok(None);
        }
        let class = spec.storage_class_name.as_deref().unwrap_or_default();
        let Some(class) = self.classes.get(&ObjectKey::cluster(class)) else { return Ok(None) };
        let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        if waits && annotations.get(SELECTED_NODE).is_none_or(|node| *node != self.node) {
            return Ok(None);
        }
        let id = format!("pvc-{}", claim.metadata.uid.as_deref().unwrap_or_default());
        self.store.create(&id, wanted)?;
        let volumes = Api::<PersistentVolume>::all(self.client.clone());
        let made: PersistentVolume =
            ferrite_json::from_value(volume_object(&id, &claim, &class, wanted, &self.node))?;
        match volumes.create(&PostParams::default(), &made).await {
            Err(e) if !is_already_exists(&e) => Err(e.into()),
            _ => Ok(None),
        }
    }

    async fn grow(&self, claim: &PersistentVolumeClaim, name: &str, wanted: i64) -> Outcome {
        let Some(volume) = self.volumes.get(&ObjectKey::cluster(name)) else { return Ok(None) };
        let Some(id) = ours(&volume) else { return Ok(None) };
        let status = claim.status.as_ref();
        let has = size(status.and_then(|status| status.capacity.as_ref()));
        let offered = size(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()));
        if status.and_then(|status| status.phase.as_deref()) != Some("Bound") || wanted <= has {
            return Ok(None);
        }
        if offered < wanted {
            self.store.resize(id, wanted)?;
            let volumes = Api::<PersistentVolume>::all(self.client.clone());
            let patch = json!({"spec": {"capacity": {"storage": wanted.to_string()}}});
            volumes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        }
        let told = status.iter().flat_map(|status| status.conditions.iter().flatten());
        if told.into_iter().any(|condition| condition.type_ == "FileSystemResizePending") {
            return Ok(None);
        }
        // The node does the rest at its next sync of the pod.
        let key = ObjectKey::of(claim);
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), &key.namespace);
        let condition = json!({
            "type": "FileSystemResizePending",
            "status": "True",
            "message": "Waiting for user to (re-)start a pod to finish file system resize of volume on node.",
        });
        let patch = json!({"status": {"conditions": [condition]}});
        claims.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(None)
    }

    /// Removes a volume whose claim is gone.
    async fn volume(&self, key: &ObjectKey) -> Outcome {
        let Some(volume) = self.volumes.get(key) else { return Ok(None) };
        let Some(id) = ours(&volume) else { return Ok(None) };
        let annotations = volume.metadata.annotations.as_ref();
        let made_by_us = annotations.is_some_and(|all| all.get(PROVISIONED_BY).is_some_and(|by| by == NAME));
        let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        let attached = self
            .attachments
            .list()
            .iter()
            .any(|one| one.spec.source.persistent_volume_name.as_deref() == Some(key.name.as_str()));
        if !made_by_us || policy != Some("Delete") || phase != Some("Released") || attached {
            return Ok(None);
        }
        self.store.remove(id)?;
        let volumes = Api::<PersistentVolume>::all(self.client.clone());
        match volumes.delete(&key.name, &DeleteParams::default()).await {
            Err(e) if !is_not_found(&e) => Err(e.into()),
            _ => Ok(None),
        }
    }

    /// Attaches and detaches: a directory of the node needs nothing but a word about it.
    async fn attachment(&self, key: &ObjectKey) -> Outcome {
        let Some(one) = self.attachments.get(key).filter(|one| one.spec.attacher == NAME) else {
            return Ok(None);
        };
        let attachments = Api::<VolumeAttachment>::all(self.client.clone());
        let finalizers = one.metadata.finalizers.clone().unwrap_or_default();
        let held = finalizers.iter().any(|finalizer| finalizer == FINALIZER);
        let attached = one.status.as_ref().is_some_and(|status| status.attached);
        let change = |finalizers: Vec<String>| {
            Patch::Merge(json!({"metadata": {
                "finalizers": finalizers, "resourceVersion": one.metadata.resource_version}}))
        };
        let params = PatchParams::default();
        if one.metadata.deletion_timestamp.is_some() {
            if held {
                let rest = finalizers.into_iter().filter(|finalizer| finalizer != FINALIZER).collect();
                attachments.patch(&key.name, &params, &change(rest)).await?;
            }
        } else if !held {
            let all = finalizers.into_iter().chain([FINALIZER.to_owned()]).collect();
            attachments.patch(&key.name, &params, &change(all)).await?;
        } else if !attached {
            let status = match one.spec.node_name == self.node {
                true => json!({"attached": true, "attachmentMetadata": {"attached": self.node}}),
                false => {
                    json!({"attached": false, "attachError": {"message": "the volume is on another node"}})
                }
            };
            attachments.patch_status(&key.name, &params, &Patch::Merge(json!({"status": status}))).await?;
        }
        Ok(None)
    }
}

fn volume_object(
    id: &str,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    size: i64,
    node: &str,
) -> Value {
    let spec = claim.spec.as_ref();
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": id, "annotations": {PROVISIONED_BY: NAME}},
        "spec": {
            "accessModes": spec.and_then(|spec| spec.access_modes.clone()),
            "capacity": {"storage": size.to_string()},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": claim.metadata.namespace,
                "name": claim.metadata.name,
                "uid": claim.metadata.uid,
            },
            "csi": {"driver": NAME, "volumeHandle": id},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": TOPOLOGY, "operator": "In", "values": [node]}]}]}},
            "persistentVolumeReclaimPolicy": class.reclaim_policy.as_deref().unwrap_or("Delete"),
            "storageClassName": class.metadata.name,
            "volumeMode": spec.and_then(|spec| spec.volume_mode.clone()),
        },
    })
}
