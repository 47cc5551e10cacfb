//! Carries out the decisions of [`super::decide`] and [`super::rollout`].

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, EventType, ObjectKey, is_conflict, is_namespace_terminating, is_not_found};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::Selector;

use super::controller::DaemonSetController;
use super::decide::{Plan, Reason, View};
use super::failed_pods::FailureKey;
use super::placement::PodMaker;
use super::{is_rolling_update, min_ready_seconds};
use crate::error::{During, SyncError};
use crate::hash::template_hash;
use crate::history::{self, Created, HASH};
use crate::pod_control;
use crate::pod_owners::PodOwner;

/// Pods created, and pods deleted, in one sync at most.
const BURST: usize = 250;
/// Revisions kept if the set does not say.
const HISTORY_LIMIT: i32 = 10;

/// The revision in force and those before it.
struct Revisions {
    current: ControllerRevision,
    old: Vec<ControllerRevision>,
}

impl DaemonSetController {
    pub(super) async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(set) = self.sets.owners.get(&key) else {
            self.sets.expectations.forget(&key);
            return Ok(None);
        };
        if set.spec.as_ref().is_none_or(|spec| spec.selector == LabelSelector::default()) {
            let message = "This daemon set is selecting all pods. A non-empty selector is required.";
            self.recorder.event_for(&*set, EventType::Warning, "SelectingAll", message);
            return Ok(None);
        }
        if set.metadata.deletion_timestamp.is_some() {
            return Ok(None);
        }
        let Some(selector) = PodOwner::selector(&*set) else {
            return Err(SyncError::Other(format!("{key} has a selector that cannot be understood")));
        };
        // Before looking at the pods: the other way round, a pod that arrives in between would be made twice.
        let may_act = self.sets.expectations.satisfied(&key);
        let pods = self.sets.claim(&self.client, &set, &selector, |_| true).await?;
        let revisions = self.revisions(&key, &set, &selector, &pods).await?;
        let hash = history::hash_of(&revisions.current).to_owned();
        let nodes = self.placements.of(&set, || self.nodes.list());
        let view = View::new(&set, &hash, &nodes, &pods, Timestamp::now());

        let mut again = None;
        let mut outcome = Ok(());
        if may_act {
            outcome = self.act(&key, &view, &mut again).await;
            if outcome.is_ok() {
                outcome = self.truncate_history(&set, &pods, &revisions.old).await;
            }
        }
        let status = view.status(may_act);
        let waiting = status.number_ready != status.number_available.unwrap_or(0);
        let written = self.write_status(&key, &set, status).await;
        outcome?;
        written?;
        let seconds = min_ready_seconds(&set);
        if seconds > 0 && waiting {
            let wait = Duration::from_secs(seconds.unsigned_abs().into());
            again = Some(again.map_or(wait, |delay: Duration| delay.min(wait)));
        }
        Ok(again)
    }

    /// First each node gets the pods it should have; when there is nothing to do about that, pods are updated.
    async fn act(
        &self,
        key: &ObjectKey,
        view: &View<'_>,
        again: &mut Option<Duration>,
    ) -> Result<(), SyncError> {
        let mut plan = view.manage();
        plan.delete.retain(|doomed| {
            let (kind, reason, text) = match doomed.reason {
                Reason::Unwanted => return true,
                Reason::Failed => {
                    let failure = FailureKey {
                        set: view.set.metadata.uid.clone().unwrap_or_default(),
                        generation: view.set.status.as_ref().and_then(|s| s.observed_generation).unwrap_or(0),
                        node: doomed.node.clone(),
                    };
                    if let Err(delay) = self.failed.delete_now(failure) {
                        *again = Some(again.map_or(delay, |known| known.min(delay)));
                        return false;
                    }
                    (EventType::Warning, "FailedDaemonPod", "failed daemon pod")
                }
                Reason::Succeeded => (EventType::Normal, "SucceededDaemonPod", "succeeded daemon pod"),
            };
            let end = if doomed.reason == Reason::Failed { "kill" } else { "delete" };
            let message = format!(
                "Found {text} {} on node {}, will try to {end} it",
                ObjectKey::of(&*doomed.pod),
                doomed.node
            );
            self.recorder.event_for(view.set, kind, reason, message);
            true
        });
        if !plan.create.is_empty() || !plan.delete.is_empty() {
            return self.carry_out(key, view, plan).await;
        }
        if is_rolling_update(view.set) {
            return self.carry_out(key, view, view.rolling_update()).await;
        }
        Ok(())
    }

    /// Creates pods in growing batches until one batch has a failure, then deletes; the first error is returned.
    async fn carry_out(&self, key: &ObjectKey, view: &View<'_>, mut plan: Plan) -> Result<(), SyncError> {
        if plan.create.is_empty() && plan.delete.is_empty() {
            return Ok(());
        }
        plan.create.truncate(BURST);
        plan.delete.truncate(BURST);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let name_of = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
        let expectations = &self.sets.expectations;
        expectations.expect(key, plan.create.len(), plan.delete.iter().map(|doomed| name_of(&doomed.pod)));

        let mut failure = None;
        let maker = PodMaker::new(view.set, view.hash);
        let mut left = plan.create.as_slice();
        for batch in pod_control::slow_start(left.len()) {
            let (nodes, rest) = left.split_at(batch);
            left = rest;
            let creations = nodes.iter().map(|node| async {
                let pod = maker.pod_for(node);
                pod_control::create(&api, &self.recorder, view.set, &pod).await
            });
            let mut failed = 0;
            for error in pod_control::in_parallel(creations).await.into_iter().filter_map(Result::err) {
                failed += 1;
                if !is_namespace_terminating(&error) {
                    failure.get_or_insert(SyncError::Api { action: format!("create a pod of {key}"), error });
                }
            }
            if failed > 0 {
                // No watch event will come for these, nor for those not tried.
                expectations.creations_observed(key, failed + left.len());
                break;
            }
        }

        let deletions = plan.delete.iter().map(|doomed| async {
            let error = pod_control::delete(&api, &self.recorder, view.set, &doomed.pod).await.err()?;
            expectations.deletion_observed(key, &name_of(&doomed.pod));
            (!is_not_found(&error))
                .then(|| SyncError::Api { action: format!("delete a pod of {key}"), error })
        });
        let failed_deletion = pod_control::in_parallel(deletions).await.into_iter().flatten().next();
        failure.or(failed_deletion).map_or(Ok(()), Err)
    }

    /// The revision of the present template, made or renumbered as needed, and the others.
    async fn revisions(
        &self,
        key: &ObjectKey,
        set: &DaemonSet,
        selector: &Selector,
        pods: &[Arc<Pod>],
    ) -> Result<Revisions, SyncError> {
        let template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
        let data = history::data_of(&template)?;
        let (mut same, mut old) = (Vec::new(), Vec::new());
        for mut revision in self.history.claim(set, selector).await? {
            if history::hash_of(&revision).is_empty() {
                // The name in place of a hash cannot collide with another revision's.
                let name = history::name_of(&revision).to_owned();
                revision.metadata.labels.get_or_insert_default().insert(HASH.to_owned(), name);
                revision = self.history.update(&revision).await?;
            }
            if revision.data.as_ref() == Some(&data) { same.push(revision) } else { old.push(revision) }
        }
        let number = history::next_number(&old);
        let current = match same.pop() {
            None => {
                let collisions = set.status.as_ref().and_then(|status| status.collision_count);
                let hash = template_hash(&template, collisions);
                let labels = template.metadata.as_ref().and_then(|meta| meta.labels.as_ref());
                match self.history.create(&history::revision(set, labels, data, number, &hash)).await? {
                    Created::Revision(revision) => *revision,
                    Created::Collision => {
                        self.count_collision(key, set).await?;
                        return Err(SyncError::Other(format!(
                            "another revision of {key} has the name {hash}"
                        )));
                    }
                }
            }
            // The list is sorted: the last has the highest number.
            Some(mut kept) => {
                self.merge(key, &kept, &same, pods).await?;
                if kept.revision < number {
                    kept.revision = number;
                    kept = self.history.update(&kept).await?;
                }
                kept
            }
        };
        Ok(Revisions { current, old })
    }

    /// Makes one of several revisions with the same data: their pods get the label of the one that is kept.
    async fn merge(
        &self,
        key: &ObjectKey,
        kept: &ControllerRevision,
        duplicates: &[ControllerRevision],
        pods: &[Arc<Pod>],
    ) -> Result<(), SyncError> {
        if duplicates.is_empty() {
            return Ok(());
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let hash = history::hash_of(kept);
        let label = |pod: &Pod| pod.metadata.labels.as_ref().and_then(|labels| labels.get(HASH)).cloned();
        let hashes: HashSet<&str> = duplicates.iter().map(history::hash_of).collect();
        for pod in pods.iter().filter(|pod| label(pod).is_some_and(|hash| hashes.contains(hash.as_str()))) {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let patch = Patch::Merge(json!({"metadata": {"labels": {HASH: hash}}}));
            match api.patch(name, &PatchParams::default(), &patch).await {
                Err(error) if !is_not_found(&error) => {
                    return Err(error).during(|| format!("label a pod of {key}"));
                }
                _ => {}
            }
        }
        for duplicate in duplicates {
            self.history.delete(duplicate).await?;
        }
        Ok(())
    }

    /// Counts a collision in the status, unless it was counted since the set was read.
    async fn count_collision(&self, key: &ObjectKey, set: &DaemonSet) -> Result<(), SyncError> {
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut live = api.get(&key.name).await.during(|| format!("read {key}"))?;
        let known = set.status.as_ref().and_then(|status| status.collision_count);
        let status = live.status.get_or_insert_default();
        if status.collision_count == known {
            status.collision_count = Some(known.unwrap_or(0) + 1);
            api.replace_status(&key.name, &PostParams::default(), &live)
                .await
                .during(|| format!("update status of {key}"))?;
        }
        Ok(())
    }

    async fn truncate_history(
        &self,
        set: &DaemonSet,
        pods: &[Arc<Pod>],
        old: &[ControllerRevision],
    ) -> Result<(), SyncError> {
        let limit = set.spec.as_ref().and_then(|spec| spec.revision_history_limit).unwrap_or(HISTORY_LIMIT);
        let hashes: HashSet<&str> = pods
            .iter()
            .filter_map(|pod| pod.metadata.labels.as_ref()?.get(HASH).map(String::as_str))
            .collect();
        let in_use = |revision: &ControllerRevision| hashes.contains(history::hash_of(revision));
        for revision in history::surplus(old, usize::try_from(limit).unwrap_or(0), in_use) {
            self.history.delete(revision).await?;
        }
        Ok(())
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        set: &DaemonSet,
        status: DaemonSetStatus,
    ) -> Result<(), SyncError> {
        if set.status.as_ref() == Some(&status) {
            return Ok(());
        }
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), &key.namespace);
        let updated = DaemonSet { status: Some(status.clone()), ..set.clone() };
        match api.replace_status(&key.name, &PostParams::default(), &updated).await {
            Ok(_) => return Ok(()),
            Err(error) if is_not_found(&error) => return Ok(()),
            Err(error) if is_conflict(&error) => {}
            Err(error) => return Err(error).during(|| format!("update status of {key}")),
        }
        let live = api.get(&key.name).await.during(|| format!("read {key}"))?;
        if live.metadata.uid != set.metadata.uid {
            return Ok(());
        }
        let collision_count = live.status.as_ref().and_then(|status| status.collision_count);
        let updated = DaemonSet { status: Some(DaemonSetStatus { collision_count, ..status }), ..live };
        api.replace_status(&key.name, &PostParams::default(), &updated)
            .await
            .map(|_| ())
            .during(|| format!("update status of {key}"))
    }
}
