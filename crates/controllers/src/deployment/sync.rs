//! One step of a rollout: reads the decisions of the pure modules and writes them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, EventType, is_already_exists, is_not_found, message_of};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams, Preconditions};

use super::controller::DeploymentController;
use super::scaling::{self, Share, Size};
use super::{
    DESIRED_REPLICAS, MAX_REPLICAS, REVISION, annotation, available_replicas, bounds, is_rolling_update,
    replicas, revision, rollback, spec_replicas, status,
};
use crate::error::{During, SyncError, is_namespace_terminating};
use crate::pods::is_finished;
use ferrite_client::controller_of;

/// The ReplicaSets of a Deployment, split by whether they carry its present template.
struct Split {
    new: Option<ReplicaSet>,
    /// Oldest first.
    old: Vec<ReplicaSet>,
}

impl Split {
    fn all(&self) -> Vec<ReplicaSet> {
        self.old.iter().chain(&self.new).cloned().collect()
    }

    fn total(&self) -> i32 {
        self.old.iter().chain(&self.new).map(spec_replicas).fold(0, i32::saturating_add)
    }
}

/// A Deployment and its objects, for the length of one sync.
pub(super) struct Rollout<'a> {
    controller: &'a DeploymentController,
    deployment: Deployment,
    sets: Vec<ReplicaSet>,
    /// Pods by the UID of their ReplicaSet.
    pods: HashMap<String, Vec<Arc<Pod>>>,
}

impl<'a> Rollout<'a> {
    pub(super) fn new(
        controller: &'a DeploymentController,
        deployment: Deployment,
        sets: Vec<ReplicaSet>,
        pods: HashMap<String, Vec<Arc<Pod>>>,
    ) -> Self {
        Self { controller, deployment, sets, pods }
    }

    pub(super) async fn run(mut self) -> Result<Option<Duration>, SyncError> {
        if self.deployment.metadata.deletion_timestamp.is_some() {
            // Its ReplicaSets are the garbage collector's business; only the counts are kept true.
            let split = self.split();
            return self.write_counts(&split).await.map(|()| None);
        }
        self.note_pause().await?;
        if !self.is_paused() && rollback::wanted(&self.deployment).is_some() {
            return Box::pin(self.roll_back()).await.map(|()| None);
        }
        if self.is_paused() || self.is_scaling_event() {
            return Box::pin(self.scale()).await.map(|()| None);
        }
        if is_rolling_update(&self.deployment) {
            Box::pin(self.roll()).await
        } else {
            Box::pin(self.recreate()).await
        }
    }

    fn name(&self) -> &str {
        self.deployment.metadata.name.as_deref().unwrap_or_default()
    }

    fn is_paused(&self) -> bool {
        self.deployment.spec.as_ref().and_then(|spec| spec.paused).unwrap_or(false)
    }

    fn sets_api(&self) -> Api<ReplicaSet> {
        Api::namespaced(
            self.controller.client.clone(),
            self.deployment.metadata.namespace.as_deref().unwrap_or_default(),
        )
    }

    fn deployments_api(&self) -> Api<Deployment> {
        Api::namespaced(
            self.controller.client.clone(),
            self.deployment.metadata.namespace.as_deref().unwrap_or_default(),
        )
    }

    fn split(&self) -> Split {
        let new = revision::find_new(&self.deployment, &self.sets);
        let mut old: Vec<_> = self
            .sets
            .iter()
            .enumerate()
            .filter(|(index, _)| Some(*index) != new)
            .map(|(_, set)| set.clone())
            .collect();
        old.sort_by(revision::by_creation);
        Split { new: new.map(|index| self.sets[index].clone()), old }
    }

    /// Returns true if the desired number changed since the active ReplicaSets were last scaled.
    fn is_scaling_event(&self) -> bool {
        let wanted = replicas(&self.deployment);
        self.sets.iter().filter(|set| spec_replicas(set) > 0).any(|set| {
            let desired: Option<i32> =
                annotation(&set.metadata, DESIRED_REPLICAS).and_then(|n| n.parse().ok());
            desired.is_some_and(|desired| desired != wanted)
        })
    }

    /// Time spent paused does not count against the progress deadline: pausing and resuming are both written down.
    async fn note_pause(&mut self) -> Result<(), SyncError> {
        if !status::has_deadline(&self.deployment) {
            return Ok(());
        }
        let mut updated = self.deployment.status.clone().unwrap_or_default();
        let reason = status::condition(&updated, status::PROGRESSING).and_then(|c| c.reason.as_deref());
        if reason == Some(status::TIMED_OUT) {
            return Ok(());
        }
        let (reason, message) = match (self.is_paused(), reason == Some(status::PAUSED)) {
            (true, false) => (status::PAUSED, "Deployment is paused"),
            (false, true) => ("DeploymentResumed", "Deployment is resumed"),
            _ => return Ok(()),
        };
        let condition =
            status::new_condition(status::PROGRESSING, "Unknown", reason, message, Timestamp::now());
        status::set_condition(&mut updated, condition);
        self.write_status(updated).await
    }

    /// The split, with the new ReplicaSet brought up to date, and made if `create` and it is missing.
    async fn split_and_revise(&mut self, create: bool) -> Result<Split, SyncError> {
        let mut split = self.split();
        let next = split.old.iter().map(revision::revision_of).max().unwrap_or(0) + 1;
        let now = Timestamp::now();
        match split.new.take() {
            Some(mut new) => {
                let min_ready = self.deployment.spec.as_ref().and_then(|spec| spec.min_ready_seconds);
                let mut changed = revision::annotate_new(&self.deployment, &mut new, next);
                if let Some(spec) = &mut new.spec
                    && spec.min_ready_seconds.unwrap_or(0) != min_ready.unwrap_or(0)
                {
                    spec.min_ready_seconds = min_ready;
                    changed = true;
                }
                let new = if changed { self.write_set(&new).await? } else { new };
                self.write_revision(&new).await?;
                let mut updated = self.deployment.status.clone().unwrap_or_default();
                if status::has_deadline(&self.deployment)
                    && status::condition(&updated, status::PROGRESSING).is_none()
                {
                    let message = format!(
                        "Found new replica set \"{}\"",
                        new.metadata.name.as_deref().unwrap_or_default()
                    );
                    let condition = status::new_condition(
                        status::PROGRESSING,
                        "True",
                        "FoundNewReplicaSet",
                        message,
                        now,
                    );
                    status::set_condition(&mut updated, condition);
                    self.write_status(updated).await?;
                }
                split.new = Some(new);
            }
            None if create => split.new = self.create_set(&split, next).await?,
            None => {}
        }
        Ok(split)
    }

    async fn create_set(&mut self, split: &Split, revision: i64) -> Result<Option<ReplicaSet>, SyncError> {
        let mut set = revision::new_set(&self.deployment, revision);
        let name = set.metadata.name.clone().unwrap_or_default();
        let wanted = replicas(&self.deployment);
        let limits = bounds(&self.deployment);
        let size = if is_rolling_update(&self.deployment) {
            scaling::grown(wanted, limits, 0, split.total())
        } else {
            wanted
        };
        if let Some(spec) = &mut set.spec {
            spec.replicas = Some(size);
        }
        revision::annotate_sizes(&mut set, wanted, wanted.saturating_add(limits.max_surge));
        let now = Timestamp::now();
        let (created, is_new) = match self.sets_api().create(&PostParams::default(), &set).await {
            Ok(created) => (created, true),
            Err(error) if is_already_exists(&error) => {
                let existing =
                    self.sets_api().get(&name).await.during(|| format!("read replica set {name}"))?;
                let ours = controller_of(&existing.metadata)
                    .is_some_and(|owner| Some(&owner.uid) == self.deployment.metadata.uid.as_ref());
                if !ours || !revision::same_template(&self.deployment, &existing) {
                    // Two templates with one hash: count the collision, which changes the next hash.
                    let mut updated = self.deployment.status.clone().unwrap_or_default();
                    updated.collision_count = Some(updated.collision_count.unwrap_or(0) + 1);
                    self.write_status(updated).await?;
                    return Err(SyncError::Other(format!("replica set name {name} is taken")));
                }
                (existing, false)
            }
            Err(error) if is_namespace_terminating(&error) => return Ok(None),
            Err(error) => {
                let message = format!("Failed to create new replica set \"{name}\": {}", message_of(&error));
                if status::has_deadline(&self.deployment) {
                    let mut updated = self.deployment.status.clone().unwrap_or_default();
                    let condition = status::new_condition(
                        status::PROGRESSING,
                        "False",
                        "ReplicaSetCreateError",
                        &message,
                        now,
                    );
                    status::set_condition(&mut updated, condition);
                    self.write_status(updated).await?;
                }
                self.event(EventType::Warning, "ReplicaSetCreateError", &message);
                return Err(SyncError::Other(message));
            }
        };
        if is_new && size > 0 {
            let message = format!("Scaled up replica set {name} from 0 to {size}");
            self.event(EventType::Normal, "ScalingReplicaSet", &message);
        }
        self.write_revision(&created).await?;
        if is_new && status::has_deadline(&self.deployment) {
            let mut updated = self.deployment.status.clone().unwrap_or_default();
            let message = format!("Created new replica set \"{name}\"");
            let condition =
                status::new_condition(status::PROGRESSING, "True", "NewReplicaSetCreated", message, now);
            status::set_condition(&mut updated, condition);
            self.write_status(updated).await?;
        }
        Ok(Some(created))
    }

    fn event(&self, kind: EventType, reason: &str, message: &str) {
        self.controller.recorder.event_for(&self.deployment, kind, reason, message);
    }

    /// Follows a change of the wanted number, without rolling anything out.
    async fn scale(&mut self) -> Result<(), SyncError> {
        let mut split = Box::pin(self.split_and_revise(false)).await?;
        let wanted = replicas(&self.deployment);
        let active = split.old.iter().chain(&split.new).filter(|set| spec_replicas(set) > 0).count();
        if active <= 1 {
            let target = if active == 1 {
                split.old.iter_mut().chain(&mut split.new).find(|set| spec_replicas(set) > 0)
            } else {
                split.new.as_mut().or(split.old.last_mut())
            };
            if let Some(set) = target
                && spec_replicas(set) != wanted
            {
                *set = self.resize(set.clone(), wanted).await?;
            }
        } else if split.new.as_ref().is_some_and(|new| is_saturated(new, wanted)) {
            for set in split.old.iter_mut().filter(|set| spec_replicas(set) > 0) {
                *set = self.resize(set.clone(), 0).await?;
            }
        } else if is_rolling_update(&self.deployment) {
            self.scale_proportionally(&mut split).await?;
        }
        if self.is_paused() {
            self.clean_up(&split.old).await?;
        }
        self.write_counts(&split).await
    }

    async fn scale_proportionally(&mut self, split: &mut Split) -> Result<(), SyncError> {
        let wanted = replicas(&self.deployment);
        let max_surge = bounds(&self.deployment).max_surge;
        let allowed = if wanted > 0 { wanted.saturating_add(max_surge) } else { 0 };
        let grows = allowed > split.total();
        let mut sets: Vec<&mut ReplicaSet> =
            split.old.iter_mut().chain(&mut split.new).filter(|set| spec_replicas(set) > 0).collect();
        sets.sort_by(|a, b| {
            let age = if grows { revision::by_creation(b, a) } else { revision::by_creation(a, b) };
            Reverse(spec_replicas(a)).cmp(&Reverse(spec_replicas(b))).then(age)
        });
        let shares: Vec<_> = sets
            .iter()
            .map(|set| Share {
                spec: spec_replicas(set),
                max_before: annotation(&set.metadata, MAX_REPLICAS).and_then(|n| n.parse().ok()),
            })
            .collect();
        let current = self.deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0);
        let sizes = scaling::proportional(wanted, max_surge, current, &shares);
        for (set, size) in sets.into_iter().zip(sizes) {
            // Also when the size stays: the annotations must follow, or this counts as a scaling event for ever.
            *set = self.resize(set.clone(), size).await?;
        }
        Ok(())
    }

    /// RollingUpdate: one kind of step per sync, the next one when its effect is seen.
    async fn roll(mut self) -> Result<Option<Duration>, SyncError> {
        let mut split = Box::pin(self.split_and_revise(true)).await?;
        let Some(new) = split.new.clone() else { return Ok(None) };
        let wanted = replicas(&self.deployment);
        let limits = bounds(&self.deployment);

        let grown = scaling::grown(wanted, limits, spec_replicas(&new), split.total());
        if grown != spec_replicas(&new) {
            split.new = Some(self.resize(new, grown).await?);
            return self.write_rollout(&split).await;
        }
        let size = |set: &ReplicaSet| Size { spec: spec_replicas(set), available: available_replicas(set) };
        let old: Vec<_> = split.old.iter().map(size).collect();
        let shrunk = scaling::shrunk(wanted, limits, size(&new), &old);
        let mut stepped = false;
        for (set, to) in split.old.iter_mut().zip(shrunk) {
            if spec_replicas(set) != to {
                *set = self.resize(set.clone(), to).await?;
                stepped = true;
            }
        }
        if !stepped && self.is_complete() {
            self.clean_up(&split.old).await?;
        }
        self.write_rollout(&split).await
    }

    /// Goes back to an earlier revision. The change of the template triggers the sync that rolls it out.
    async fn roll_back(&mut self) -> Result<(), SyncError> {
        let split = Box::pin(self.split_and_revise(true)).await?;
        let Some(rollback) = rollback::decide(&self.deployment, &split.all()) else { return Ok(()) };
        let name = self.name().to_owned();
        self.deployments_api()
            .replace(&name, &PostParams::default(), &rollback.deployment)
            .await
            .during(|| format!("roll deployment {name} back"))?;
        let (kind, reason, message) = rollback.event;
        self.event(kind, reason, &message);
        Ok(())
    }

    /// Recreate: the new pods start when the last old one has ended.
    async fn recreate(mut self) -> Result<Option<Duration>, SyncError> {
        let mut split = Box::pin(self.split_and_revise(false)).await?;
        let mut stepped = false;
        for set in split.old.iter_mut().filter(|set| spec_replicas(set) > 0) {
            *set = self.resize(set.clone(), 0).await?;
            stepped = true;
        }
        if stepped || self.old_pods_run(split.new.as_ref()) {
            return self.write_rollout(&split).await;
        }
        if split.new.is_none() {
            split = Box::pin(self.split_and_revise(true)).await?;
        }
        let wanted = replicas(&self.deployment);
        if let Some(new) = split.new.take() {
            split.new = Some(self.resize(new, wanted).await?);
        }
        if self.is_complete() {
            self.clean_up(&split.old).await?;
        }
        self.write_rollout(&split).await
    }

    fn old_pods_run(&self, new: Option<&ReplicaSet>) -> bool {
        let new = new.and_then(|set| set.metadata.uid.as_deref());
        self.pods
            .iter()
            .filter(|(uid, _)| Some(uid.as_str()) != new)
            .any(|(_, pods)| pods.iter().any(|pod| !is_finished(pod)))
    }

    fn is_complete(&self) -> bool {
        self.deployment.status.as_ref().is_some_and(|current| status::is_complete(&self.deployment, current))
    }

    /// Removes the oldest of the empty ReplicaSets beyond `revisionHistoryLimit`.
    async fn clean_up(&self, old: &[ReplicaSet]) -> Result<(), SyncError> {
        let limit = self.deployment.spec.as_ref().and_then(|spec| spec.revision_history_limit);
        let Some(limit) = limit.filter(|limit| *limit != i32::MAX) else { return Ok(()) };
        let mut kept: Vec<_> = old.iter().filter(|set| set.metadata.deletion_timestamp.is_none()).collect();
        let surplus = kept.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        kept.sort_by_key(|set| revision::revision_of(set));
        for set in kept.into_iter().take(surplus) {
            let current = set.status.as_ref();
            let in_use = spec_replicas(set) != 0
                || current.is_some_and(|status| status.replicas != 0)
                || set.metadata.generation > current.and_then(|status| status.observed_generation);
            if in_use {
                continue;
            }
            let name = set.metadata.name.as_deref().unwrap_or_default();
            let same = Preconditions { uid: set.metadata.uid.clone(), resource_version: None };
            match self.sets_api().delete(name, &DeleteParams::default().preconditions(same)).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => {}
                Err(error) => return Err(error).during(|| format!("delete old replica set {name}")),
            }
        }
        Ok(())
    }

    /// Sets the size of a ReplicaSet and its annotations, if either differs.
    async fn resize(&self, mut set: ReplicaSet, size: i32) -> Result<ReplicaSet, SyncError> {
        let before = spec_replicas(&set);
        let wanted = replicas(&self.deployment);
        let max = wanted.saturating_add(bounds(&self.deployment).max_surge);
        let annotated = revision::annotate_sizes(&mut set, wanted, max);
        if before == size && !annotated {
            return Ok(set);
        }
        if let Some(spec) = &mut set.spec {
            spec.replicas = Some(size);
        }
        let set = self.write_set(&set).await?;
        if before != size {
            let direction = if size > before { "up" } else { "down" };
            let name = set.metadata.name.as_deref().unwrap_or_default();
            let message = format!("Scaled {direction} replica set {name} from {before} to {size}");
            self.event(EventType::Normal, "ScalingReplicaSet", &message);
        }
        Ok(set)
    }

    async fn write_set(&self, set: &ReplicaSet) -> Result<ReplicaSet, SyncError> {
        let name = set.metadata.name.as_deref().unwrap_or_default();
        self.sets_api()
            .replace(name, &PostParams::default(), set)
            .await
            .during(|| format!("update replica set {name}"))
    }

    /// Copies the new ReplicaSet's revision to the Deployment.
    async fn write_revision(&mut self, new: &ReplicaSet) -> Result<(), SyncError> {
        let revision = annotation(&new.metadata, REVISION);
        if revision.is_none() || annotation(&self.deployment.metadata, REVISION) == revision {
            return Ok(());
        }
        // As upstream an update: the controller has no right to patch.
        let mut deployment = self.deployment.clone();
        let annotations = deployment.metadata.annotations.get_or_insert_default();
        annotations.insert(REVISION.into(), revision.unwrap_or_default().into());
        let name = self.name().to_owned();
        let written = self
            .deployments_api()
            .replace(&name, &PostParams::default(), &deployment)
            .await
            .during(|| format!("record revision of deployment {name}"))?;
        self.deployment.metadata = written.metadata;
        Ok(())
    }

    async fn write_counts(&mut self, split: &Split) -> Result<(), SyncError> {
        let updated = status::calculate(&self.deployment, &split.all(), split.new.as_ref(), Timestamp::now());
        self.write_status(updated).await
    }

    async fn write_rollout(&mut self, split: &Split) -> Result<Option<Duration>, SyncError> {
        let updated = status::rollout(&self.deployment, &split.all(), split.new.as_ref(), Timestamp::now());
        self.write_status(updated).await?;
        let current = self.deployment.status.clone().unwrap_or_default();
        Ok(status::deadline_due(&self.deployment, &current, Timestamp::now()))
    }

    async fn write_status(&mut self, updated: DeploymentStatus) -> Result<(), SyncError> {
        if self.deployment.status.as_ref() == Some(&updated) {
            return Ok(());
        }
        let mut deployment = self.deployment.clone();
        deployment.status = Some(updated);
        let name = self.name().to_owned();
        let written = self
            .deployments_api()
            .replace_status(&name, &PostParams::default(), &deployment)
            .await
            .during(|| format!("update status of deployment {name}"))?;
        self.deployment = written;
        Ok(())
    }
}

fn is_saturated(new: &ReplicaSet, wanted: i32) -> bool {
    let desired: Option<i32> = annotation(&new.metadata, DESIRED_REPLICAS).and_then(|n| n.parse().ok());
    spec_replicas(new) == wanted && desired == Some(wanted) && available_replicas(new) == wanted
}
