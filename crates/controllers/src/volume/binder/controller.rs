//! Triggers the state machines of [`super::decide`] and writes their decisions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, Controller, EventRecorder, EventType, Informer, ObjectKey, RateLimits, WorkQueue,
    is_conflict, is_not_found,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use kube::api::PostParams;

use super::bind;
use super::decide::{
    ClaimStep, ClaimView, Reclaim, VolumeStep, claim_of, claim_step, is_released, volume_step,
};
use crate::Context;
use crate::error::{During, SyncError};
use crate::volume::objects::{
    BIND_COMPLETED, PODS_BY_CLAIM, annotation, claim_class, claim_index, claim_keys, claim_phase, has_class,
    is_terminated, name, volume_class, volume_name, volume_phase,
};

const NAME: &str = "persistentvolume-binder-controller";
/// The source of events, as upstream's.
const SOURCE: &str = "persistentvolume-controller";

/// When a sync that lost against another writer is tried again.
const BEHIND: Duration = Duration::from_millis(20);

/// Index of volumes: those of a claim by its key, free ones by their class.
const VOLUMES: &str = "binding";
/// Index of claims by the volume that they name.
const BY_VOLUME: &str = "volume";
/// Index of claims that are not bound yet by their class.
const UNBOUND: &str = "unbound";

/// An object to sync.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Claim(ObjectKey),
    Volume(String),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Claim(key) => write!(f, "claim {key}"),
            Key::Volume(name) => write!(f, "volume {name}"),
        }
    }
}

fn free(class: &str) -> String {
    format!("free:{class}")
}

fn index_volume(volume: &PersistentVolume) -> Vec<String> {
    vec![claim_of(volume).map_or_else(|| free(volume_class(volume)), |key| key.to_string())]
}

fn index_unbound(claim: &PersistentVolumeClaim) -> Vec<String> {
    match annotation(&claim.metadata, BIND_COMPLETED) {
        Some(_) => Vec::new(),
        None => vec![claim_class(claim).to_owned()],
    }
}

struct Binder {
    client: Client,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<Key>>,
    /// Claims are handed to the provisioners of their classes.
    provisions: bool,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    // One worker, as upstream has one for claims and one for volumes: two claims must not race for one volume.
    let declared: Controller<Key> = context.declared(NAME, 1, RateLimits::default());
    let binder = Arc::new(Binder {
        provisions: context.config.dynamic_provisioning,
        client: context.client.clone(),
        claims: context.informers.get(),
        volumes: context.informers.get(),
        classes: context.informers.get(),
        pods: context.informers.get(),
        queue: declared.queue().clone(),
        recorder: context.events.recorder(SOURCE, None),
    });
    binder.volumes.add_index(VOLUMES, index_volume);
    binder.claims.add_index(BY_VOLUME, |claim| {
        Some(volume_name(claim)).filter(|name| !name.is_empty()).map(str::to_owned).into_iter().collect()
    });
    binder.claims.add_index(UNBOUND, index_unbound);
    binder.pods.add_index(PODS_BY_CLAIM, claim_index);
    let (for_claims, for_volumes, for_classes, for_pods) =
        (binder.clone(), binder.clone(), binder.clone(), binder.clone());
    declared
        .watches(&binder.claims, move |change, _| for_claims.claim_changed(change.object()))
        .watches(&binder.volumes, move |change, _| for_volumes.volume_changed(change))
        .watches(&binder.classes, move |change, _| {
            for_classes.wake_unbound(name(&change.object().metadata));
            for_classes.wake_unbound("");
        })
        .watches(&binder.pods, move |change, _| {
            if let Change::Added(pod) = change {
                for_pods.pod_added(pod);
            }
        })
        .run_with(binder.clone(), |binder, key| async move { binder.sync(key).await });
}

impl Binder {
    fn claim_changed(&self, claim: &PersistentVolumeClaim) {
        let key = ObjectKey::of(claim);
        for volume in self.volumes.by_index(VOLUMES, &key.to_string()) {
            self.queue.add(Key::Volume(name(&volume.metadata).to_owned()));
        }
        let named = volume_name(claim);
        if !named.is_empty() {
            self.queue.add(Key::Volume(named.to_owned()));
        }
        self.queue.add(Key::Claim(key));
    }

    fn volume_changed(&self, change: &Change<PersistentVolume>) {
        let volume = change.object();
        for claim in self.claims.by_index(BY_VOLUME, name(&volume.metadata)) {
            self.queue.add(Key::Claim(ObjectKey::of(&*claim)));
        }
        if let Some(key) = claim_of(volume) {
            self.queue.add(Key::Claim(key));
        } else if !matches!(change, Change::Deleted(_)) && volume_phase(volume) == "Available" {
            self.wake_unbound(volume_class(volume));
        }
        if !matches!(change, Change::Deleted(_)) {
            self.queue.add(Key::Volume(name(&volume.metadata).to_owned()));
        }
    }

    fn wake_unbound(&self, class: &str) {
        for claim in self.claims.by_index(UNBOUND, class) {
            self.queue.add(Key::Claim(ObjectKey::of(&*claim)));
        }
    }

    /// A claim that waits for its first pod says for which.
    fn pod_added(&self, pod: &Pod) {
        for key in claim_keys(pod) {
            if self.claims.get(&key).is_some_and(|claim| claim_phase(&claim) == "Pending") {
                self.queue.add(Key::Claim(key));
            }
        }
    }

    async fn sync(&self, key: Key) -> Result<Option<Duration>, SyncError> {
        let done = match &key {
            Key::Claim(key) => Box::pin(self.sync_claim(key)).await,
            Key::Volume(name) => Box::pin(self.sync_volume(name)).await,
        };
        match done {
            // The informer is behind: its next change wakes the key, and the delay covers a write that it
            // had shown before.
            Err(error) if is_stale(&error) => Ok(Some(BEHIND)),
            done => done.map(|()| None),
        }
    }

    async fn sync_claim(&self, key: &ObjectKey) -> Result<(), SyncError> {
        let Some(claim) = self.claims.get(key) else { return Ok(()) };
        let named = Some(volume_name(&claim)).filter(|name| !name.is_empty());
        let named = named.and_then(|name| self.volumes.get(&ObjectKey::cluster(name)));
        let mut candidates = Vec::new();
        let mut classes = Vec::new();
        if volume_name(&claim).is_empty() {
            candidates = self.volumes.by_index(VOLUMES, &key.to_string());
            candidates.extend(self.volumes.by_index(VOLUMES, &free(claim_class(&claim))));
            classes = match has_class(&claim) {
                true => self.classes.get(&ObjectKey::cluster(claim_class(&claim))).into_iter().collect(),
                false => self.classes.list(),
            };
        }
        let view = ClaimView {
            named: named.as_ref(),
            candidates: &candidates,
            classes: &classes,
            provisions: self.provisions,
        };
        match claim_step(&claim, view) {
            ClaimStep::Bind(volume) => self.bind(&volume, &claim).await,
            ClaimStep::AssignClass(class) => {
                let mut changed = (*claim).clone();
                changed.spec.get_or_insert_default().storage_class_name = Some(class);
                self.write_claim(&changed).await.map(drop)
            }
            ClaimStep::WaitForConsumer => {
                let (reason, message) = self.waiting_for(key);
                self.recorder.event_for(&*claim, EventType::Normal, reason, message);
                self.pending(&claim).await
            }
            ClaimStep::Provision { provisioner } => self.hand_over(&claim, &provisioner).await,
            ClaimStep::CannotProvision(problem) => {
                self.recorder.event_for(&*claim, EventType::Warning, "ProvisioningFailed", problem);
                Ok(())
            }
            ClaimStep::Wait => self.pending(&claim).await,
            ClaimStep::NoVolume => {
                let message = "no persistent volumes available for this claim and no storage class is set";
                self.recorder.event_for(&*claim, EventType::Normal, "FailedBinding", message);
                self.pending(&claim).await
            }
            ClaimStep::Mismatch { volume, mismatch } => {
                let message = format!("Cannot bind to requested volume \"{volume}\": {mismatch}");
                self.recorder.event_for(&*claim, EventType::Warning, "VolumeMismatch", message);
                self.pending(&claim).await
            }
            ClaimStep::Taken { volume, retry } => {
                let message = format!("volume \"{volume}\" already bound to a different claim.");
                self.recorder.event_for(&*claim, EventType::Warning, "FailedBinding", message);
                match retry {
                    false => self.pending(&claim).await,
                    true => Err(SyncError::Other(format!(
                        "invalid binding of claim \"{key}\" to volume \"{volume}\": the volume is another claim's"
                    ))),
                }
            }
            ClaimStep::Lost { reason, message } => {
                if claim_phase(&claim) != "Lost" {
                    self.claim_phase(&claim, "Lost", None).await?;
                    self.recorder.event_for(&*claim, EventType::Warning, reason, message);
                }
                Ok(())
            }
        }
    }

    /// The event of a claim that waits for its first pod.
    fn waiting_for(&self, key: &ObjectKey) -> (&'static str, String) {
        let pods = self.pods.by_index(PODS_BY_CLAIM, &key.to_string());
        let unscheduled = |pod: &Pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
            node.is_empty() && !is_terminated(pod)
        };
        let mut names: Vec<&str> =
            pods.iter().filter(|pod| unscheduled(pod)).map(|pod| name(&pod.metadata)).collect();
        names.sort_unstable();
        match names.as_slice() {
            [] => ("WaitForFirstConsumer", "waiting for first consumer to be created before binding".into()),
            [pod] => ("WaitForPodScheduled", format!("waiting for pod {pod} to be scheduled")),
            pods => ("WaitForPodScheduled", format!("waiting for pods {} to be scheduled", pods.join(","))),
        }
    }

    async fn hand_over(&self, claim: &PersistentVolumeClaim, provisioner: &str) -> Result<(), SyncError> {
        if let Some(changed) = bind::handed_over(claim, provisioner) {
            self.write_claim(&changed).await?;
        }
        let message = format!(
            "Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by the \
             system administrator. If volume creation is delayed, please verify that the provisioner is running and \
             correctly registered."
        );
        self.recorder.event_for(claim, EventType::Normal, "ExternalProvisioning", message);
        Ok(())
    }

    async fn pending(&self, claim: &PersistentVolumeClaim) -> Result<(), SyncError> {
        self.claim_phase(claim, "Pending", None).await.map(drop)
    }

    async fn bind(&self, volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), SyncError> {
        let mut volume = volume.clone();
        if let Some(bound) = bind::volume_for_claim(&volume, claim) {
            volume = self.write_volume(&bound).await?;
        }
        volume = self.volume_phase(&volume, "Bound", "").await?;
        let mut claim = claim.clone();
        if let Some(bound) = bind::claim_for_volume(&claim, &volume) {
            claim = self.write_claim(&bound).await?;
        }
        self.claim_phase(&claim, "Bound", Some(&volume)).await.map(drop)
    }

    async fn sync_volume(&self, volume_name: &str) -> Result<(), SyncError> {
        let Some(volume) = self.volumes.get(&ObjectKey::cluster(volume_name)) else { return Ok(()) };
        let claim = self.current_claim(&volume).await?;
        match volume_step(&volume, claim.as_ref()) {
            VolumeStep::Phase(phase) => self.volume_phase(&volume, phase, "").await.map(drop),
            VolumeStep::WakeClaim => {
                if let Some(key) = claim_of(&volume) {
                    self.queue.add(Key::Claim(key));
                }
                Ok(())
            }
            VolumeStep::ModeMismatch => {
                let claim = claim.unwrap_or_default();
                let message = format!(
                    "Cannot bind PersistentVolume to requested PersistentVolumeClaim \"{}\" due to incompatible volumeMode.",
                    name(&claim.metadata)
                );
                self.recorder.event_for(&*volume, EventType::Warning, "VolumeMismatch", message);
                let message = format!(
                    "Cannot bind PersistentVolume \"{volume_name}\" to requested PersistentVolumeClaim due to incompatible volumeMode."
                );
                self.recorder.event_for(&claim, EventType::Warning, "VolumeMismatch", message);
                Ok(())
            }
            VolumeStep::Unbind => {
                let freed = self.write_volume(&bind::unbound(&volume)).await?;
                self.volume_phase(&freed, "Available", "").await.map(drop)
            }
            VolumeStep::Reclaim(reclaim) => {
                let mut current = (*volume).clone();
                if !is_released(&current) {
                    current = self.volume_phase(&current, "Released", "").await?;
                }
                match reclaim {
                    Reclaim::LeaveAlone => Ok(()),
                    Reclaim::Fail { reason, message } => {
                        if volume_phase(&current) != "Failed" {
                            current = self.volume_phase(&current, "Failed", &message).await?;
                            self.recorder.event_for(&current, EventType::Warning, reason, message);
                        }
                        Ok(())
                    }
                }
            }
        }
    }

    /// The claim of the volume's `claimRef`. One that the informer does not have, or has with another UID, is asked for:
    /// a provisioner or the scheduler may know it before us, and its data must not be reclaimed.
    async fn current_claim(
        &self,
        volume: &PersistentVolume,
    ) -> Result<Option<PersistentVolumeClaim>, SyncError> {
        let Some(reference) = crate::volume::objects::claim_ref(volume) else { return Ok(None) };
        let Some(uid) = reference.uid.as_deref().filter(|uid| !uid.is_empty()) else { return Ok(None) };
        let key = crate::volume::objects::claim_key(reference);
        let known = self.claims.get(&key);
        if let Some(claim) = &known
            && claim.metadata.uid.as_deref() == Some(uid)
        {
            return Ok(Some((**claim).clone()));
        }
        if known.is_none() && is_released(volume) {
            return Ok(None);
        }
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        api.get_opt(&key.name).await.during(|| format!("read claim {key}"))
    }

    async fn volume_phase(
        &self,
        volume: &PersistentVolume,
        phase: &str,
        message: &str,
    ) -> Result<PersistentVolume, SyncError> {
        let Some(changed) = bind::volume_in_phase(volume, phase, message) else { return Ok(volume.clone()) };
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let volume = name(&volume.metadata);
        api.replace_status(volume, &PostParams::default(), &changed)
            .await
            .during(|| format!("write phase {phase} of volume {volume}"))
    }

    async fn claim_phase(
        &self,
        claim: &PersistentVolumeClaim,
        phase: &str,
        volume: Option<&PersistentVolume>,
    ) -> Result<PersistentVolumeClaim, SyncError> {
        let Some(changed) = bind::claim_in_phase(claim, phase, volume) else { return Ok(claim.clone()) };
        let key = ObjectKey::of(claim);
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        api.replace_status(&key.name, &PostParams::default(), &changed)
            .await
            .during(|| format!("write phase {phase} of claim {key}"))
    }

    async fn write_volume(&self, volume: &PersistentVolume) -> Result<PersistentVolume, SyncError> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let volume_name = name(&volume.metadata);
        api.replace(volume_name, &PostParams::default(), volume)
            .await
            .during(|| format!("write volume {volume_name}"))
    }

    async fn write_claim(&self, claim: &PersistentVolumeClaim) -> Result<PersistentVolumeClaim, SyncError> {
        let key = ObjectKey::of(claim);
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        api.replace(&key.name, &PostParams::default(), claim).await.during(|| format!("write claim {key}"))
    }
}

/// Returns true if a sync lost against another writer, whose write wakes the key again.
fn is_stale(error: &SyncError) -> bool {
    matches!(error, SyncError::Api { error, .. } if is_conflict(error) || is_not_found(error))
}
