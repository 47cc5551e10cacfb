//! Deletes Jobs some time after they have finished, as their `ttlSecondsAfterFinished` says.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, Informer, ObjectKey, is_not_found};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use kube::Client;
use kube::api::{DeleteParams, Preconditions, PropagationPolicy};

use crate::Context;
use crate::error::{During, SyncError};
use crate::job::finished_condition;

const NAME: &str = "ttl-after-finished-controller";

struct TtlController {
    client: Client,
    jobs: Informer<Job>,
}

pub(crate) fn start(context: &Context) {
    let controller =
        Arc::new(TtlController { client: context.client.clone(), jobs: context.informers.get() });
    context
        .controller(NAME)
        .watches(&controller.jobs, |change, queue| {
            if time_left(change.object(), Timestamp::now()).is_some() {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

impl TtlController {
    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(job) = self.jobs.get(&key) else { return Ok(None) };
        match time_left(&job, Timestamp::now()) {
            None => return Ok(None),
            Some(left) if !left.is_zero() => return Ok(Some(left)),
            Some(_) => {}
        }
        // The copy may be old, and the time may have been prolonged since.
        let api: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
        let Some(live) = api.get_opt(&key.name).await.during(|| format!("read {key}"))? else {
            return Ok(None);
        };
        match time_left(&live, Timestamp::now()) {
            None => return Ok(None),
            Some(left) if !left.is_zero() => return Ok(Some(left)),
            Some(_) => {}
        }
        let params = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Foreground),
            preconditions: Some(Preconditions { uid: live.metadata.uid, resource_version: None }),
            ..DeleteParams::default()
        };
        match api.delete(&key.name, &params).await {
            Err(error) if is_not_found(&error) => Ok(None),
            result => result.map(|()| None).during(|| format!("delete {key}")),
        }
    }
}

/// Remaining lifetime of the Job; `None` if it has no limit, has not finished or is being deleted.
fn time_left(job: &Job, now: Timestamp) -> Option<Duration> {
    if job.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let ttl = job.spec.as_ref()?.ttl_seconds_after_finished?;
    let finished = finished_condition(job)?.last_transition_time.as_ref()?.0;
    let left = SignedDuration::from_secs(ttl.into()).saturating_sub(now.duration_since(finished));
    Some(Duration::try_from(left).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn only_finished_jobs_with_a_ttl_expire() {
        let now: Timestamp = "2024-01-01T00:01:00Z".parse().unwrap();
        let ended = |kind: &str| json!({"conditions": [{"type": kind, "status": "True", "lastTransitionTime": "2024-01-01T00:00:00Z"}]});
        for (what, ttl, status, deleting, expected) in [
            ("complete", Some(100), ended("Complete"), false, Some(40)),
            ("failed", Some(100), ended("Failed"), false, Some(40)),
            ("expired", Some(60), ended("Complete"), false, Some(0)),
            ("at once", Some(0), ended("Complete"), false, Some(0)),
            ("no limit", None, ended("Complete"), false, None),
            ("running", Some(0), ended("Suspended"), false, None),
            ("no status", Some(0), Value::Null, false, None),
            ("being deleted", Some(0), ended("Complete"), true, None),
        ] {
            let job: Job = ferrite_json::from_value(json!({
                "metadata": {"deletionTimestamp": deleting.then_some("2024-01-01T00:00:00Z")},
                "spec": {"template": {}, "ttlSecondsAfterFinished": ttl},
                "status": status,
            }))
            .unwrap();
            assert_eq!(time_left(&job, now).map(|left| left.as_secs()), expected, "{what}");
        }
    }
}
