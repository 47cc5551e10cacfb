//! Triggers the decisions of [`super::decide`] and writes them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::local_path::{DIRECTORY, FINALIZER, NODE, PROVISIONER, REMOVE, REMOVED, list, names};
use ferrite_client::{
    Api, Change, Controller, EventRecorder, EventType, Informer, ObjectKey, RateLimits, WorkQueue,
    is_already_exists, is_conflict, is_not_found,
};
use ferrite_json::json;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};

use super::decide::{ClaimStep, VolumeStep, claim_step, node_step, volume_step};
use crate::error::{During, SyncError};
use crate::volume::objects::{
    PODS_BY_CLAIM, PROVISIONED_BY, SELECTED_NODE, annotation, claim_class, claim_index, claim_keys,
    is_terminated, name, remove_annotation, set_annotation, volume_name,
};
use crate::{Context, Identity};

/// The service account that the provisioner acts as.
pub const ACCOUNT: &str = "local-path-provisioner";
const NAME: &str = "local-path-provisioner";

/// When a write that lost against another writer is tried again.
const BEHIND: Duration = Duration::from_millis(20);

/// Index of volumes that are being deleted by their node.
const DELETING: &str = "local volumes being deleted";
/// Index of claims without a volume by the node that was selected for them.
const SELECTED: &str = "selected node";

/// An object to sync.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Claim(ObjectKey),
    Volume(String),
    Node(String),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Claim(key) => write!(f, "claim {key}"),
            Key::Volume(name) => write!(f, "volume {name}"),
            Key::Node(name) => write!(f, "node {name}"),
        }
    }
}

struct Provisioner {
    client: Client,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    recorder: EventRecorder,
}

fn index_deleting(volume: &PersistentVolume) -> Vec<String> {
    let ours = annotation(&volume.metadata, PROVISIONED_BY) == Some(PROVISIONER);
    let node = annotation(&volume.metadata, NODE).unwrap_or_default();
    match ours && volume.metadata.deletion_timestamp.is_some() {
        true => vec![node.to_owned()],
        false => Vec::new(),
    }
}

fn index_selected(claim: &PersistentVolumeClaim) -> Vec<String> {
    let node = annotation(&claim.metadata, SELECTED_NODE).filter(|_| volume_name(claim).is_empty());
    node.map(str::to_owned).into_iter().collect()
}

/// Starts the provisioner of class `local-path`. It acts as a service account of its own.
pub fn start(context: &Context) {
    let context = context.acting_as(Identity::ServiceAccount(ACCOUNT));
    let declared: Controller<Key> = Controller::with_limits(NAME, 1, &context.scope, RateLimits::default());
    let provisioner = Arc::new(Provisioner {
        client: context.client.clone(),
        claims: context.informers.get(),
        volumes: context.informers.get(),
        classes: context.informers.get(),
        nodes: context.informers.get(),
        pods: context.informers.get(),
        recorder: context.events.recorder(PROVISIONER, None),
    });
    provisioner.volumes.add_index(DELETING, index_deleting);
    provisioner.claims.add_index(SELECTED, index_selected);
    provisioner.pods.add_index(PODS_BY_CLAIM, claim_index);
    let by_node = provisioner.clone();
    declared
        .watches(&provisioner.claims, |change, queue| {
            if !matches!(change, Change::Deleted(_)) && volume_name(change.object()).is_empty() {
                queue.add(Key::Claim(ObjectKey::of(&**change.object())));
            }
        })
        .watches(&provisioner.volumes, volume_changed)
        .watches(&provisioner.nodes, move |change, queue| by_node.node_changed(change, queue))
        .watches(&provisioner.pods, |change, queue| {
            let before = matches!(change, Change::Updated { old, .. } if !node_of(old).is_empty());
            if !before && !matches!(change, Change::Deleted(_)) && !node_of(change.object()).is_empty() {
                claim_keys(change.object()).into_iter().for_each(|key| queue.add(Key::Claim(key)));
            }
        })
        .reads(&provisioner.classes)
        .run_with(provisioner.clone(), |provisioner, key| async move { provisioner.sync(key).await });
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn volume_changed(change: &Change<PersistentVolume>, queue: &WorkQueue<Key>) {
    let volume = change.object();
    if annotation(&volume.metadata, PROVISIONED_BY) != Some(PROVISIONER) {
        return;
    }
    match change {
        Change::Deleted(_) => {
            let node = annotation(&volume.metadata, NODE).unwrap_or_default();
            queue.add(Key::Node(node.to_owned()));
        }
        _ => queue.add(Key::Volume(name(&volume.metadata).to_owned())),
    }
}

impl Provisioner {
    /// Only a node whose part of the conversation changed is of interest: nodes report often.
    fn node_changed(&self, change: &Change<Node>, queue: &WorkQueue<Key>) {
        let said = |node: &Node| {
            [DIRECTORY, REMOVE, REMOVED]
                .map(|key| ferrite_client::local_path::annotation(node, key).map(str::to_owned))
        };
        if let Change::Updated { old, new } = change
            && said(old) == said(new)
        {
            return;
        }
        let node = name(&change.object().metadata);
        for volume in self.volumes.by_index(DELETING, node) {
            queue.add(Key::Volume(name(&volume.metadata).to_owned()));
        }
        for claim in self.claims.by_index(SELECTED, node) {
            queue.add(Key::Claim(ObjectKey::of(&*claim)));
        }
        queue.add(Key::Node(node.to_owned()));
    }

    async fn sync(&self, key: Key) -> Result<Option<Duration>, SyncError> {
        let done = match &key {
            Key::Claim(key) => self.sync_claim(key).await,
            Key::Volume(name) => self.sync_volume(name).await,
            Key::Node(name) => self.sync_node(name).await,
        };
        match done {
            Err(SyncError::Api { error, .. }) if is_conflict(&error) => Ok(Some(BEHIND)),
            Err(SyncError::Api { error, .. }) if is_not_found(&error) => Ok(None),
            done => done.map(|()| None),
        }
    }

    async fn sync_claim(&self, key: &ObjectKey) -> Result<(), SyncError> {
        let Some(claim) = self.claims.get(key) else { return Ok(()) };
        let class = self.classes.get(&ObjectKey::cluster(claim_class(&claim)));
        let node = match annotation(&claim.metadata, SELECTED_NODE) {
            Some(node) => self.node(node).await?,
            None => None,
        };
        let pods = self.pods.by_index(PODS_BY_CLAIM, &key.to_string());
        let placed = pods.iter().find(|pod| {
            !node_of(pod).is_empty() && !is_terminated(pod) && pod.metadata.deletion_timestamp.is_none()
        });
        let pod_node = placed.map(|pod| node_of(pod));
        match claim_step(&claim, class.as_deref(), node.as_ref(), pod_node) {
            ClaimStep::Nothing => Ok(()),
            ClaimStep::SelectNode(node) => {
                let mut changed = (*claim).clone();
                set_annotation(&mut changed.metadata, SELECTED_NODE, &node);
                self.write_claim(&changed).await
            }
            ClaimStep::Deselect => {
                let message = "the selected node is gone; waiting for another one";
                self.recorder.event_for(&*claim, EventType::Warning, "ProvisioningFailed", message);
                let mut changed = (*claim).clone();
                remove_annotation(&mut changed.metadata, SELECTED_NODE);
                self.write_claim(&changed).await
            }
            ClaimStep::Refuse(refusal) => {
                let message = format!("failed to provision volume: {refusal}");
                self.recorder.event_for(&*claim, EventType::Warning, "ProvisioningFailed", message);
                Ok(())
            }
            ClaimStep::Provision(volume) => {
                let api: Api<PersistentVolume> = Api::all(self.client.clone());
                match api.create(&PostParams::default(), &volume).await {
                    Err(error) if is_already_exists(&error) => return Ok(()),
                    made => made.map(drop).during(|| format!("create a volume for claim {key}"))?,
                }
                let message = format!("Successfully provisioned volume {}", name(&volume.metadata));
                self.recorder.event_for(&*claim, EventType::Normal, "ProvisioningSucceeded", message);
                Ok(())
            }
        }
    }

    async fn sync_volume(&self, volume_name: &str) -> Result<(), SyncError> {
        let Some(volume) = self.volumes.get(&ObjectKey::cluster(volume_name)) else { return Ok(()) };
        let node = match annotation(&volume.metadata, NODE) {
            Some(node) if volume.metadata.deletion_timestamp.is_some() => self.node(node).await?,
            _ => None,
        };
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        match volume_step(&volume, node.as_ref()) {
            VolumeStep::Nothing => Ok(()),
            VolumeStep::Delete => {
                // Exactly the object that was seen without a claim: it may have got another one.
                let seen = Preconditions {
                    uid: volume.metadata.uid.clone(),
                    resource_version: volume.metadata.resource_version.clone(),
                };
                let params = DeleteParams { preconditions: Some(seen), ..DeleteParams::default() };
                api.delete(volume_name, &params).await.during(|| format!("delete volume {volume_name}"))
            }
            VolumeStep::Ask { node } => {
                let Some(node) = self.nodes.get(&ObjectKey::cluster(&*node)) else { return Ok(()) };
                let mut asked = names(&node, REMOVE);
                asked.insert(volume_name.to_owned());
                self.ask(&node, &asked).await
            }
            VolumeStep::Release => {
                let mut released = (*volume).clone();
                if let Some(finalizers) = &mut released.metadata.finalizers {
                    finalizers.retain(|finalizer| finalizer != FINALIZER);
                }
                let written = api.replace(volume_name, &PostParams::default(), &released).await;
                written.map(drop).during(|| format!("release volume {volume_name}"))
            }
        }
    }

    async fn sync_node(&self, node_name: &str) -> Result<(), SyncError> {
        let Some(node) = self.nodes.get(&ObjectKey::cluster(node_name)) else { return Ok(()) };
        let exists = |volume: &str| self.volumes.get(&ObjectKey::cluster(volume)).is_some();
        match node_step(&node, exists) {
            Some(left) => self.ask(&node, &left).await,
            None => Ok(()),
        }
    }

    /// The node; one that the informer does not have is asked for, because a volume of a node that is gone is given up.
    async fn node(&self, node: &str) -> Result<Option<Node>, SyncError> {
        if let Some(known) = self.nodes.get(&ObjectKey::cluster(node)) {
            return Ok(Some((*known).clone()));
        }
        let api: Api<Node> = Api::all(self.client.clone());
        api.get_opt(node).await.during(|| format!("read node {node}"))
    }

    /// Writes the list of volumes that the node shall remove.
    async fn ask(&self, node: &Node, volumes: &BTreeSet<String>) -> Result<(), SyncError> {
        let patch = json!({"metadata": {
            "resourceVersion": node.metadata.resource_version,
            "annotations": {REMOVE: list(volumes)},
        }});
        let api: Api<Node> = Api::all(self.client.clone());
        let node = name(&node.metadata);
        let written = api.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await;
        written.map(drop).during(|| format!("ask node {node} to remove volumes"))
    }

    async fn write_claim(&self, claim: &PersistentVolumeClaim) -> Result<(), SyncError> {
        let key = ObjectKey::of(claim);
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        let written = api.replace(&key.name, &PostParams::default(), claim).await;
        written.map(drop).during(|| format!("write claim {key}"))
    }
}
