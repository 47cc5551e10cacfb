//! The changes that a plan asks for, written through the API and reported as events of the set.

use ferrite_client::{Api, EventType, ObjectKey, is_already_exists, is_conflict, is_not_found, message_of};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, PostParams, Preconditions};

use super::claims::{has_other_controller, wanted_owners};
use super::controller::StatefulSetController;
use super::decide::Action;
use super::identity::{
    claim_names, claims, identity_matches, ordinal, storage_matches, update_identity, update_storage,
};
use super::name;
use crate::error::{During, SyncError};

/// The action on a pod or claim; part of the reasons of events.
#[derive(Debug, Clone, Copy)]
enum Verb {
    Create,
    Update,
    Delete,
}

fn pod_name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

impl StatefulSetController {
    fn pods(&self, set: &StatefulSet) -> Api<Pod> {
        Api::namespaced(self.client.clone(), set.metadata.namespace.as_deref().unwrap_or_default())
    }

    fn claims(&self, set: &StatefulSet) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), set.metadata.namespace.as_deref().unwrap_or_default())
    }

    fn record_pod(&self, verb: Verb, set: &StatefulSet, pod: &Pod, error: Option<&str>) {
        let what = format!("{verb:?} Pod {} in StatefulSet {}", pod_name(pod), name(set));
        self.record(verb, set, what, "successful", error);
    }

    fn record(&self, verb: Verb, set: &StatefulSet, what: String, success: &str, error: Option<&str>) {
        let (kind, reason, message) = match error {
            None => (EventType::Normal, format!("Successful{verb:?}"), format!("{what} {success}")),
            Some(error) => {
                (EventType::Warning, format!("Failed{verb:?}"), format!("{what} failed error: {error}"))
            }
        };
        self.recorder.event_for(set, kind, reason, message);
    }

    pub(super) async fn carry_out(&self, set: &StatefulSet, action: &Action) -> Result<(), SyncError> {
        match action {
            Action::Create(pod) => self.create_pod(set, pod).await,
            Action::EnsureClaims(pod) => {
                self.create_claims(set, pod).await?;
                self.retain_claims_of(set, pod).await
            }
            Action::Repair(pod) => self.repair(set, pod).await,
            Action::RetainClaims(pod) => self.set_claim_owners(set, pod).await,
            Action::Delete(pod) => self.delete_pod(set, pod).await,
        }
    }

    async fn create_pod(&self, set: &StatefulSet, pod: &Pod) -> Result<(), SyncError> {
        if let Err(error) = self.create_claims(set, pod).await {
            self.record_pod(Verb::Create, set, pod, Some(&error.to_string()));
            return Err(error);
        }
        match self.pods(set).create(&PostParams::default(), pod).await {
            Ok(_) => {
                self.retain_claims_of(set, pod).await?;
                self.record_pod(Verb::Create, set, pod, None);
                Ok(())
            }
            Err(error) => {
                // The name may be held by a pod that the cache does not show yet: that is no failure to report.
                if !is_already_exists(&error) {
                    self.record_pod(Verb::Create, set, pod, Some(&message_of(&error)));
                }
                Err(error).during(|| format!("create pod {}", pod_name(pod)))
            }
        }
    }

    /// Creates the claims of the pod that do not exist. Fails if one is being deleted: the pod must wait for its
    /// successor.
    async fn create_claims(&self, set: &StatefulSet, pod: &Pod) -> Result<(), SyncError> {
        let Some(ordinal) = ordinal(set, pod) else { return Ok(()) };
        let mut failure = None;
        for claim in claims(set, ordinal) {
            let key = ObjectKey::of(&claim);
            if let Some(known) = self.claims.get(&key) {
                if known.metadata.deletion_timestamp.is_some() {
                    failure.get_or_insert(SyncError::Other(format!("pvc {} is being deleted", key.name)));
                }
                continue;
            }
            let outcome = self.claims(set).create(&PostParams::default(), &claim).await;
            let claim_text = format!("{:?} Claim {}", Verb::Create, key.name);
            let pod_text = format!("Pod {} in StatefulSet {}", pod_name(pod), name(set));
            match outcome {
                Ok(_) => {
                    self.record(Verb::Create, set, format!("{claim_text} {pod_text}"), "success", None);
                }
                Err(error) if is_already_exists(&error) => {}
                Err(error) => {
                    let what = format!("{claim_text} for {pod_text}");
                    self.record(Verb::Create, set, what, "", Some(&message_of(&error)));
                    let action = format!("create PVC {}", key.name);
                    failure.get_or_insert(SyncError::Api { action, error });
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// [`set_claim_owners`](Self::set_claim_owners), with an event for a failure.
    async fn retain_claims_of(&self, set: &StatefulSet, pod: &Pod) -> Result<(), SyncError> {
        let outcome = self.set_claim_owners(set, pod).await;
        if let Err(error) = &outcome {
            self.record_pod(Verb::Update, set, pod, Some(&error.to_string()));
        }
        outcome
    }

    /// Gives the claims of the pod the owners that the retention policy asks for. A claim that the cache does not
    /// show yet is seen to later.
    async fn set_claim_owners(&self, set: &StatefulSet, pod: &Pod) -> Result<(), SyncError> {
        let Some(ordinal) = ordinal(set, pod) else { return Ok(()) };
        for (_, claim_name) in claim_names(set, ordinal) {
            let key = ObjectKey::new(set.metadata.namespace.as_deref().unwrap_or_default(), claim_name);
            let Some(claim) = self.claims.get(&key) else { continue };
            if has_other_controller(set, pod, &claim) {
                let message = format!(
                    "PersistentVolumeClaim {} has a conflicting OwnerReference that acts as a managing controller, \
                     the retention policy is ignored for this claim",
                    key.name
                );
                self.recorder.event_for(set, EventType::Warning, "ConflictingController", message);
            }
            if let Some(owners) = wanted_owners(set, pod, &claim) {
                let mut claim = (*claim).clone();
                claim.metadata.owner_references = (!owners.is_empty()).then_some(owners);
                let updated = self.claims(set).replace(&key.name, &PostParams::default(), &claim).await;
                updated.during(|| format!("update the owners of PVC {}", key.name))?;
            }
        }
        Ok(())
    }

    async fn repair(&self, set: &StatefulSet, pod: &Pod) -> Result<(), SyncError> {
        let Some(ordinal) = ordinal(set, pod) else { return Ok(()) };
        let mut repaired = pod.clone();
        if !identity_matches(set, pod) {
            update_identity(set, &mut repaired, ordinal);
        }
        if !storage_matches(set, pod, ordinal) {
            update_storage(set, &mut repaired, ordinal);
            if let Err(error) = self.create_claims(set, pod).await {
                self.record_pod(Verb::Update, set, pod, Some(&error.to_string()));
                return Err(error);
            }
        }
        self.retain_claims_of(set, pod).await?;
        if repaired == *pod {
            return Ok(());
        }
        match self.pods(set).replace(pod_name(pod), &PostParams::default(), &repaired).await {
            Ok(_) => {
                self.record_pod(Verb::Update, set, pod, None);
                Ok(())
            }
            Err(error) => {
                if !is_conflict(&error) {
                    self.record_pod(Verb::Update, set, pod, Some(&message_of(&error)));
                }
                Err(error).during(|| format!("update pod {}", pod_name(pod)))
            }
        }
    }

    /// Deletes this pod and no successor of the same name. A pod that is gone is as good as deleted.
    async fn delete_pod(&self, set: &StatefulSet, pod: &Pod) -> Result<(), SyncError> {
        let same = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams::default().preconditions(same);
        match self.pods(set).delete(pod_name(pod), &params).await {
            Ok(()) => {}
            Err(error) if is_not_found(&error) => {
                self.sets.expectations.deletion_observed(&ObjectKey::of(set), pod_name(pod));
            }
            Err(error) => {
                self.record_pod(Verb::Delete, set, pod, Some(&message_of(&error)));
                return Err(error).during(|| format!("delete pod {}", pod_name(pod)));
            }
        }
        self.record_pod(Verb::Delete, set, pod, None);
        Ok(())
    }
}
