//! The metric of CronJobs, with upstream's name.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_component::metrics::{Family, Histogram, registry};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;

/// Doubling from a second, ten times.
const DELAYS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

static SKEW: LazyLock<Arc<Family<Histogram>>> = LazyLock::new(|| {
    registry().histogram(
        "cronjob_controller_job_creation_skew_duration_seconds",
        "Time between the time of a run and the creation of its Job.",
        &[],
        DELAYS,
    )
});

pub(super) fn created(job: &Job, at: Timestamp) {
    SKEW.with(&[]).observe(skew(job, at));
}

fn skew(job: &Job, at: Timestamp) -> Duration {
    let created = job.metadata.creation_timestamp.as_ref().map_or(at, |created| created.0);
    Duration::try_from(created.duration_since(at)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_job_is_late_by_its_creation() {
        let job: Job =
            ferrite_json::from_value(json!({"metadata": {"creationTimestamp": "2026-01-01T00:01:03Z"}}))
                .unwrap();
        let skew_from = |at: &str| skew(&job, at.parse().unwrap()).as_secs();
        assert_eq!((skew_from("2026-01-01T00:01:00Z"), skew_from("2026-01-01T00:01:09Z")), (3, 0));
        let before = SKEW.with(&[]).count();
        created(&job, "2026-01-01T00:01:00Z".parse().unwrap());
        assert!(SKEW.with(&[]).count() > before);
    }
}
