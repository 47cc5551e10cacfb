//! Watches CronJobs and their Jobs, and carries out the decisions of [`super::decide`].

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, EventType, Informer, ObjectKey, WorkQueue, controller_of, is_already_exists,
    is_namespace_terminating, is_not_found, message_of,
};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{DeleteParams, PostParams};

use super::active;
use super::decide::{self, Run};
use super::measures;
use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{self, BY_CONTROLLER};

const NAME: &str = "cronjob-controller";
/// Delay of the next sync of a CronJob whose last write the informer does not show yet.
const STALE: Duration = Duration::from_secs(1);

struct CronJobController {
    client: Client,
    crons: Informer<CronJob>,
    jobs: Informer<Job>,
    recorder: EventRecorder,
    /// The zone of schedules that name none.
    local: TimeZone,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let controller = Arc::new(CronJobController {
        client: context.client.clone(),
        crons: context.informers.get(),
        jobs: context.informers.get(),
        recorder: context.events.recorder(NAME, None),
        local: TimeZone::system(),
    });
    controller.jobs.add_index(BY_CONTROLLER, pods::controller_index);
    let woken = controller.clone();
    kit.about(&controller.crons)
        .watches(&controller.crons, move |change, queue| woken.cron_changed(change, queue))
        .owns::<CronJob, Job>(&controller.jobs)
        .run_with(controller.clone(), |controller, key| async move { controller.sync(&key).await });
}

impl CronJobController {
    fn cron_changed(&self, change: &Change<CronJob>, queue: &WorkQueue<ObjectKey>) {
        let cron = change.object();
        let key = ObjectKey::of(&**cron);
        if let Change::Updated { old, new } = change {
            let times = |cron: &CronJob| (cron.spec.schedule.clone(), cron.spec.time_zone.clone());
            if times(old) != times(new) {
                // The new times apply from now on: those before are not made up for.
                match decide::next_run(new, Timestamp::now(), &self.local) {
                    Ok(next) => next.into_iter().for_each(|delay| queue.add_after(key.clone(), delay)),
                    Err(_) => {
                        let message = format!("unparseable schedule for cronjob: {}", new.spec.schedule);
                        self.recorder.event_for(
                            &**new,
                            EventType::Warning,
                            "UnParseableCronJobSchedule",
                            message,
                        );
                    }
                }
                return;
            }
        }
        queue.add(key);
    }

    fn api(&self, key: &ObjectKey) -> Api<Job> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }

    fn tell(&self, cron: &CronJob, kind: EventType, reason: &str, message: impl Into<String>) {
        self.recorder.event_for(cron, kind, reason, message);
    }

    async fn sync(&self, key: &ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(cron) = self.crons.get(key) else { return Ok(None) };
        let jobs = self.jobs.by_index(BY_CONTROLLER, cron.metadata.uid.as_deref().unwrap_or_default());
        let mut cron = (*cron).clone();
        let mut status = cron.status.take().unwrap_or_default();
        let before = status.clone();
        for job in active::too_old(&cron, &jobs) {
            let name = job.metadata.name.as_deref().unwrap_or_default();
            // A Job that cannot be deleted now is too old in the next sync, too.
            let _ = self.delete(key, &cron, &mut status, name, job.metadata.uid.as_ref()).await;
        }
        let result = self.run(key, &cron, &mut status, &jobs).await;
        if status != before {
            cron.status = Some(status);
            let api: Api<CronJob> = Api::namespaced(self.client.clone(), &key.namespace);
            api.replace_status(&key.name, &PostParams::default(), &cron)
                .await
                .during(|| format!("update status of {key}"))?;
        }
        result
    }

    async fn run(
        &self,
        key: &ObjectKey,
        cron: &CronJob,
        status: &mut CronJobStatus,
        jobs: &[Arc<Job>],
    ) -> Result<Option<Duration>, SyncError> {
        if self.refresh(key, cron, status, jobs).await? == Freshness::Stale {
            return Ok(Some(STALE));
        }
        if cron.metadata.deletion_timestamp.is_some() {
            return Ok(None);
        }
        let known = CronJob { status: Some(status.clone()), ..cron.clone() };
        let decision = match decide::decide(&known, Timestamp::now(), &self.local) {
            Ok(decision) => decision,
            Err(unusable) => {
                // Until the specification changes there is nothing to do.
                self.tell(cron, EventType::Warning, unusable.reason(), unusable.to_string());
                return Ok(None);
            }
        };
        let schedule = &cron.spec.schedule;
        if schedule.contains("TZ") && decision.run != Run::Suspended {
            let message = format!(
                "CRON_TZ or TZ used in schedule {schedule:?} is not officially supported, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details"
            );
            self.tell(cron, EventType::Warning, "UnsupportedSchedule", message);
        }
        match decision.run {
            Run::Nothing | Run::Suspended | Run::Started => {}
            Run::Forbidden => {
                let message =
                    "Not starting job because prior execution is running and concurrency policy is Forbid";
                self.tell(cron, EventType::Normal, "JobAlreadyActive", message);
            }
            Run::Start { at, replace, many_missed } => {
                if many_missed {
                    let message = "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
                    self.tell(cron, EventType::Warning, "TooManyMissedTimes", message);
                }
                if replace {
                    self.replace_active(key, cron, status).await?;
                }
                if !self.create(key, cron, status, at).await? {
                    return Ok(None);
                }
            }
        }
        Ok(decision.again)
    }

    /// Brings the list of active Jobs up to date.
    async fn refresh(
        &self,
        key: &ObjectKey,
        cron: &CronJob,
        status: &mut CronJobStatus,
        jobs: &[Arc<Job>],
    ) -> Result<Freshness, SyncError> {
        let found = active::refresh(status, jobs);
        if !found.unexpected.is_empty() {
            // Perhaps the CronJob in the cache is older than the Jobs.
            let api: Api<CronJob> = Api::namespaced(self.client.clone(), &key.namespace);
            let live = api.get(&key.name).await.during(|| format!("read {key}"))?;
            let live_status = live.status.unwrap_or_default();
            for name in &found.unexpected {
                if live_status.active.iter().flatten().any(|job| job.name.as_ref() == Some(name)) {
                    return Ok(Freshness::Stale);
                }
                let message = format!("Saw a job that the controller did not create or forgot: {name}");
                self.tell(cron, EventType::Warning, "UnexpectedJob", message);
            }
        }
        for (name, condition) in found.finished {
            let message = format!("Saw completed job: {name}, condition: {condition}");
            self.tell(cron, EventType::Normal, "SawCompletedJob", message);
        }
        let known = |reference: &ObjectReference| jobs.iter().any(|job| job.metadata.uid == reference.uid);
        let missing: Vec<_> = status.active.iter().flatten().filter(|job| !known(job)).cloned().collect();
        for reference in missing {
            let name = reference.name.clone().unwrap_or_default();
            // Not from the cache, which may be late.
            let live = self.api(key).get_opt(&name).await.during(|| format!("read job {name}"))?;
            if live.is_none() {
                self.tell(cron, EventType::Normal, "MissingJob", format!("Active job went missing: {name}"));
                active::remove(status, reference.uid.as_ref());
            }
        }
        Ok(Freshness::Current)
    }

    async fn delete(
        &self,
        key: &ObjectKey,
        cron: &CronJob,
        status: &mut CronJobStatus,
        name: &str,
        uid: Option<&String>,
    ) -> Result<(), SyncError> {
        match self.api(key).delete(name, &DeleteParams::background()).await {
            Ok(()) => {
                active::remove(status, uid);
                self.tell(cron, EventType::Normal, "SuccessfulDelete", format!("Deleted job {name}"));
                Ok(())
            }
            Err(error) => {
                let message = format!("Deleted job: {}", message_of(&error));
                self.tell(cron, EventType::Warning, "FailedDelete", message);
                Err(error).during(|| format!("delete job {name}"))
            }
        }
    }

    async fn replace_active(
        &self,
        key: &ObjectKey,
        cron: &CronJob,
        status: &mut CronJobStatus,
    ) -> Result<(), SyncError> {
        for reference in status.active.clone().into_iter().flatten() {
            let name = reference.name.clone().unwrap_or_default();
            let found = self.api(key).get(&name).await;
            if let Err(error) = &found {
                let message = format!("Get job: {}", message_of(error));
                self.tell(cron, EventType::Warning, "FailedGet", message);
            }
            let job = found.during(|| format!("read job {name}"))?;
            self.delete(key, cron, status, &name, job.metadata.uid.as_ref()).await?;
        }
        Ok(())
    }

    /// Creates the Job of the run at `at`. Returns false if another one has taken its name, or it is recorded already.
    async fn create(
        &self,
        key: &ObjectKey,
        cron: &CronJob,
        status: &mut CronJobStatus,
        at: Timestamp,
    ) -> Result<bool, SyncError> {
        let job = decide::job_for(cron, at);
        let name = job.metadata.name.clone().unwrap_or_default();
        let created = match self.api(key).create(&PostParams::default(), &job).await {
            Ok(created) => {
                measures::created(&created, at);
                self.tell(cron, EventType::Normal, "SuccessfulCreate", format!("Created job {name}"));
                created
            }
            // An earlier sync has created it and could not write the status.
            Err(error) if is_already_exists(&error) => {
                let live = self.api(key).get(&name).await.during(|| format!("read job {name}"))?;
                let is_ours =
                    controller_of(&live.metadata).map(|owner| &owner.uid) == cron.metadata.uid.as_ref();
                if !is_ours || active::is_active(status, live.metadata.uid.as_ref()) {
                    return Ok(false);
                }
                live
            }
            Err(error) => {
                if !is_namespace_terminating(&error) && !is_not_found(&error) {
                    let message = format!("Error creating job: {}", message_of(&error));
                    self.tell(cron, EventType::Warning, "FailedCreate", message);
                }
                return Err(error).during(|| format!("create job {name}"));
            }
        };
        status.active.get_or_insert_default().push(ObjectReference {
            api_version: Some("batch/v1".to_owned()),
            kind: Some("Job".to_owned()),
            name: created.metadata.name,
            namespace: created.metadata.namespace,
            uid: created.metadata.uid,
            resource_version: created.metadata.resource_version,
            ..ObjectReference::default()
        });
        status.last_schedule_time = Some(Time(at));
        Ok(true)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freshness {
    Current,
    /// The server has a newer status than the informer.
    Stale,
}
