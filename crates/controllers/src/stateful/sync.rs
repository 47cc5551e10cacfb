//! Brings a StatefulSet in line with its specification.

use std::collections::HashSet;
use std::time::Duration;

use ferrite_client::{Api, ObjectKey, is_conflict, is_not_found};
use ferrite_json::Value;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet, StatefulSetStatus};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use kube::api::PostParams;

use super::controller::StatefulSetController;
use super::decide::{Action, Plan, Revision, View, Work};
use super::identity::{ordinal, revision};
use super::status::differs;
use super::{is_parallel, min_ready_seconds};
use crate::error::{During, SyncError};
use crate::history::{self, Created};
use crate::pod_control::{in_parallel, slow_start};
use crate::pod_owners::PodOwner;

/// Pods of a parallel set that are worked on at once.
const BATCH: usize = 500;
/// Revisions kept if the set does not say.
const HISTORY_LIMIT: i32 = 10;
/// Names tried for a revision in one sync.
const MOST_COLLISIONS: i32 = 50;
/// Interval between checks for a claim that must be deleted first.
const CLAIM_CHECK: Duration = Duration::from_secs(1);

/// The revisions of a set that matter now.
struct Revisions {
    /// All of them before this sync, sorted.
    known: Vec<ControllerRevision>,
    current: Revision,
    update: Revision,
    collisions: i32,
}

impl StatefulSetController {
    pub(super) async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(set) = self.sets.owners.get(&key) else {
            self.sets.expectations.forget(&key);
            return Ok(None);
        };
        let Some(selector) = PodOwner::selector(&*set) else {
            return Err(SyncError::Other(format!("{key} has a selector that cannot be understood")));
        };
        // A pod that this controller created or deleted and does not see yet would be created or deleted again. Its
        // event wakes the set.
        if !self.sets.expectations.satisfied(&key) {
            return Ok(None);
        }
        let known = self.history.claim(&*set, &selector).await?;
        let is_member = |pod: &Pod| ordinal(&set, pod).is_some();
        let pods = self.sets.claim(&self.client, &set, &selector, is_member).await?;
        let revisions = self.revisions(&set, known).await?;
        let claim = |name: &str| self.claims.get(&ObjectKey::new(key.namespace.clone(), name));
        let view = View::new(&set, (&revisions.current, &revisions.update), &pods, &claim, Timestamp::now());

        let plan = view.plan();
        let outcome = self.execute(&key, &set, &plan).await;
        let status = view.status(revisions.collisions, plan.replaces_pod && outcome.is_ok());
        let waiting = status.ready_replicas.unwrap_or(0) != status.available_replicas.unwrap_or(0);
        let written = self.write_status(&key, &set, status).await;
        let in_use: HashSet<&str> = pods.iter().map(|pod| revision(pod)).collect();
        let truncated = self.truncate_history(&set, &revisions, &in_use).await;
        outcome.and(written).and(truncated)?;

        let seconds = Duration::from_secs(min_ready_seconds(&set).unsigned_abs().into());
        let availability = (waiting && !seconds.is_zero()).then(|| view.next_available().unwrap_or(seconds));
        let claim_check = plan.waits_for_claim.then_some(CLAIM_CHECK);
        Ok(availability.into_iter().chain(claim_check).min())
    }

    /// Carries out the stages of the plan until one fails.
    async fn execute(&self, key: &ObjectKey, set: &StatefulSet, plan: &Plan) -> Result<(), SyncError> {
        let actions = || plan.stages.iter().flatten().flatten();
        let creations = actions().filter(|action| matches!(action, Action::Create(_))).count();
        let deletions: Vec<_> = actions()
            .filter_map(|action| match action {
                Action::Delete(pod) => pod.metadata.name.clone(),
                _ => None,
            })
            .collect();
        if creations > 0 || !deletions.is_empty() {
            self.sets.expectations.expect(key, creations, deletions);
        }
        for stage in &plan.stages {
            if let Err(error) = self.execute_stage(set, stage).await {
                // It is not known how many of the changes were made: nothing is expected, the retry will see.
                self.sets.expectations.forget(key);
                return Err(error);
            }
        }
        Ok(())
    }

    async fn execute_stage(&self, set: &StatefulSet, stage: &[Work]) -> Result<(), SyncError> {
        let mut left = stage;
        let batches: Box<dyn Iterator<Item = usize> + Send> = if is_parallel(set) {
            Box::new(slow_start(stage.len()))
        } else {
            Box::new(std::iter::repeat_n(1, stage.len()))
        };
        for batch in batches {
            let (works, rest) = left.split_at(batch);
            left = rest;
            for works in works.chunks(BATCH) {
                let done = works.iter().map(|work| async move {
                    for action in work {
                        self.carry_out(set, action).await?;
                    }
                    Ok::<_, SyncError>(())
                });
                in_parallel(done).await.into_iter().collect::<Result<(), _>>()?;
            }
        }
        Ok(())
    }

    /// The revision of the present template, made or renumbered as needed, and the one that pods are updated from.
    async fn revisions(
        &self,
        set: &StatefulSet,
        known: Vec<ControllerRevision>,
    ) -> Result<Revisions, SyncError> {
        let status = set.status.clone().unwrap_or_default();
        let template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
        let data = history::data_of(&template)?;
        let mut collisions = status.collision_count.unwrap_or(0);
        let newest = known.last();
        let update = match known.iter().rfind(|revision| revision.data.as_ref() == Some(&data)) {
            Some(same) if newest.is_some_and(|newest| newest.data == same.data) => same.clone(),
            // A roll-back: the revision becomes the newest again.
            Some(same) => {
                let renumbered =
                    ControllerRevision { revision: history::next_number(&known), ..same.clone() };
                self.history.update(&renumbered).await?
            }
            None if newest.is_some_and(|newest| restores(set, newest, &template)) => {
                newest.cloned().unwrap_or_default()
            }
            None => {
                let labels = template.metadata.as_ref().and_then(|meta| meta.labels.as_ref());
                let number = history::next_number(&known);
                let last = collisions.saturating_add(MOST_COLLISIONS);
                loop {
                    let hash = history::data_hash(&data, Some(collisions));
                    let revision = history::revision(set, labels, data.clone(), number, &hash);
                    match self.history.create(&revision).await? {
                        Created::Revision(revision) => break *revision,
                        Created::Collision if collisions < last => collisions += 1,
                        Created::Collision => {
                            return Err(SyncError::Other(format!(
                                "no free name for a revision of {}",
                                ObjectKey::of(set)
                            )));
                        }
                    }
                }
            }
        };
        let current = known
            .iter()
            .find(|revision| status.current_revision.as_deref() == Some(history::name_of(revision)))
            .unwrap_or(&update);
        let named = |revision: &ControllerRevision| {
            let name = history::name_of(revision).to_owned();
            let template = history::template_of(revision);
            template
                .map(|template| Revision { name: name.clone(), template })
                .ok_or_else(|| SyncError::Other(format!("revision {name} holds no pod template")))
        };
        Ok(Revisions { current: named(current)?, update: named(&update)?, known, collisions })
    }

    async fn truncate_history(
        &self,
        set: &StatefulSet,
        revisions: &Revisions,
        in_use: &HashSet<&str>,
    ) -> Result<(), SyncError> {
        let limit = set.spec.as_ref().and_then(|spec| spec.revision_history_limit).unwrap_or(HISTORY_LIMIT);
        // A negative limit keeps all.
        let Ok(limit) = usize::try_from(limit) else { return Ok(()) };
        let is_live = |revision: &ControllerRevision| {
            let name = history::name_of(revision);
            name == revisions.current.name || name == revisions.update.name || in_use.contains(name)
        };
        let idle: Vec<_> = revisions.known.iter().filter(|revision| !is_live(revision)).cloned().collect();
        for revision in history::surplus(&idle, limit, |_| false) {
            self.history.delete(revision).await?;
        }
        Ok(())
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        set: &StatefulSet,
        status: StatefulSetStatus,
    ) -> Result<(), SyncError> {
        if !differs(set, &status) {
            return Ok(());
        }
        let api: Api<StatefulSet> = Api::namespaced(self.client.clone(), &key.namespace);
        let updated = StatefulSet { status: Some(status.clone()), ..set.clone() };
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
        let updated = StatefulSet { status: Some(status), ..live };
        api.replace_status(&key.name, &PostParams::default(), &updated)
            .await
            .map(|_| ())
            .during(|| format!("update status of {key}"))
    }
}

/// Returns true if the template of `revision` equals `template` once the server has filled in defaults. A
/// revision stored before a field had a default is not a change of the template.
fn restores(set: &StatefulSet, revision: &ControllerRevision, template: &PodTemplateSpec) -> bool {
    let Some(stored) = history::template_of(revision) else { return false };
    let mut restored = set.clone();
    restored.spec.get_or_insert_default().template = stored;
    let resources = ferrite_api::kinds::built_in();
    let resource =
        resources.iter().find(|resource| resource.group == "apps" && resource.plural == "statefulsets");
    let (Some(resource), Ok(mut value)) = (resource, ferrite_json::to_value(&restored)) else { return false };
    resource.strategy.default(&mut value);
    let wanted: Option<Value> = ferrite_json::to_value(template).ok();
    wanted.is_some_and(|wanted| value["spec"]["template"] == wanted)
}
