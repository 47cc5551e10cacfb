//! When a CronJob runs next, as a function of the time.

use std::time::Duration;

use ferrite_api::cron::{Schedule, ScheduleError};
use ferrite_client::controller_reference;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, Job};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const SCHEDULED_AT: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// A sync comes a little later than the time it is for: clocks differ.
const DELTA: Duration = Duration::from_millis(100);
/// More missed runs than this are reported.
const MANY_MISSED: i64 = 100;

/// A CronJob that cannot be run as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    #[error("invalid timeZone: {zone:?}: unknown time zone {zone}")]
    Zone { zone: String },
    #[error("unparseable schedule: {schedule:?} : {error}")]
    Schedule { schedule: String, error: ScheduleError },
    /// No time satisfies the schedule, as for February 31.
    #[error("invalid schedule: {schedule} : time difference between two schedules is less than 1 second")]
    Never { schedule: String },
}

impl Unusable {
    /// The reason of the event.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Zone { .. } => "UnknownTimeZone",
            Self::Schedule { .. } => "UnparseableSchedule",
            Self::Never { .. } => "InvalidSchedule",
        }
    }
}

/// The run that is due at one time, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Run {
    /// Nothing is due.
    Nothing,
    /// The CronJob is suspended: nothing is due until that changes.
    Suspended,
    /// The run has its Job.
    Started,
    /// Another run is active and the policy forbids a second.
    Forbidden,
    Start {
        at: Timestamp,
        /// True if active Jobs are deleted first.
        replace: bool,
        /// True if very many earlier runs were missed.
        many_missed: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) run: Run,
    /// When to decide again.
    pub(super) again: Option<Duration>,
}

/// The times of a CronJob.
struct Timing<'a> {
    spec: &'a CronJobSpec,
    schedule: Schedule,
    local: &'a TimeZone,
    /// The last run, or the creation.
    since: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missed {
    None,
    Few,
    Many,
}

struct Recent {
    earliest: Timestamp,
    /// The most recent time at which a Job should have been created.
    latest: Option<Timestamp>,
    missed: Missed,
}

impl<'a> Timing<'a> {
    fn of(cron: &'a CronJob, local: &'a TimeZone) -> Result<Self, Unusable> {
        let spec = &cron.spec;
        let zone = zone_of(spec)?;
        let text = &spec.schedule;
        let parsed =
            Schedule::parse(text).map_err(|error| Unusable::Schedule { schedule: text.clone(), error })?;
        // A zone in the schedule itself wins.
        let schedule = match zone {
            Some(zone) if !text.contains("TZ") => parsed.in_zone(zone),
            _ => parsed,
        };
        let last = cron.status.as_ref().and_then(|status| status.last_schedule_time.as_ref());
        let since = last.or(cron.metadata.creation_timestamp.as_ref());
        Ok(Self { spec, schedule, local, since: since.map_or(Timestamp::UNIX_EPOCH, |time| time.0) })
    }

    fn next(&self, after: Timestamp) -> Option<Timestamp> {
        self.schedule.next(after, self.local)
    }

    /// `None` if no time satisfies the schedule.
    fn recent(&self, now: Timestamp, with_deadline: bool) -> Option<Recent> {
        let mut earliest = self.since;
        if with_deadline && let Some(seconds) = self.spec.starting_deadline_seconds {
            // Nothing before this time would be started.
            let deadline = now.checked_sub(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN);
            earliest = earliest.max(deadline);
        }
        let recent = |latest, missed| Some(Recent { earliest, latest, missed });
        let first = self.next(earliest)?;
        if now < first {
            return recent(None, Missed::None);
        }
        let second = self.next(first)?;
        if now < second {
            return recent(Some(first), Missed::None);
        }
        let interval = second.duration_since(first).as_secs();
        if interval < 1 {
            return None;
        }
        // An estimate: the times need not be equally far apart. The search starts two intervals early for that.
        let missed = now.duration_since(first).as_secs() / interval + 1;
        let back = SignedDuration::from_secs((missed - 2).saturating_mul(interval));
        let mut at = first.checked_add(back).ok()?;
        let mut latest = None;
        while let Some(next) = self.next(at).filter(|next| *next <= now) {
            latest = Some(next);
            at = next;
        }
        recent(latest, if missed > MANY_MISSED { Missed::Many } else { Missed::Few })
    }

    /// Time until the next run.
    fn again(&self, now: Timestamp) -> Option<Duration> {
        let after = match self.recent(now, false) {
            None => now,
            Some(Recent { latest: Some(latest), .. }) => latest,
            Some(Recent { earliest, missed: Missed::None, .. }) => earliest,
            Some(_) => now,
        };
        let next = self.next(after)?;
        Some(Duration::try_from(next.duration_since(now)).unwrap_or_default() + DELTA)
    }
}

fn zone_of(spec: &CronJobSpec) -> Result<Option<TimeZone>, Unusable> {
    let Some(name) = &spec.time_zone else { return Ok(None) };
    let zone = TimeZone::get(name).map_err(|_| Unusable::Zone { zone: name.clone() })?;
    Ok(Some(zone))
}

/// Time until the next run of a CronJob whose schedule has changed: the new schedule applies from now on.
pub(super) fn next_run(
    cron: &CronJob,
    now: Timestamp,
    local: &TimeZone,
) -> Result<Option<Duration>, Unusable> {
    Ok(Timing::of(cron, local)?.again(now))
}

/// Decides which run is due at `now`. The status of the CronJob must name the active Jobs.
pub(super) fn decide(cron: &CronJob, now: Timestamp, local: &TimeZone) -> Result<Decision, Unusable> {
    let spec = &cron.spec;
    zone_of(spec)?;
    if spec.suspend == Some(true) {
        return Ok(Decision { run: Run::Suspended, again: None });
    }
    let timing = Timing::of(cron, local)?;
    let recent =
        timing.recent(now, true).ok_or_else(|| Unusable::Never { schedule: spec.schedule.clone() })?;
    let run = match recent.latest {
        None => Run::Nothing,
        Some(at) => run_at(cron, spec, at, recent.missed == Missed::Many),
    };
    // After a start the next time counts from it.
    let again = match &run {
        Run::Start { at, .. } => {
            let started = Timing { since: *at, schedule: timing.schedule.clone(), ..timing };
            started.again(now)
        }
        _ => timing.again(now),
    };
    Ok(Decision { run, again })
}

fn run_at(cron: &CronJob, spec: &CronJobSpec, at: Timestamp, many_missed: bool) -> Run {
    let status = cron.status.as_ref();
    let active = status.and_then(|status| status.active.as_deref()).unwrap_or_default();
    let name = job_name(cron, at);
    let last = status.and_then(|status| status.last_schedule_time.as_ref()).map(|time| time.0);
    if last == Some(at) || active.iter().any(|job| job.name.as_ref() == Some(&name)) {
        return Run::Started;
    }
    let policy = spec.concurrency_policy.as_deref();
    if policy == Some("Forbid") && !active.is_empty() {
        return Run::Forbidden;
    }
    Run::Start { at, replace: policy == Some("Replace"), many_missed }
}

/// The same for the same time: a Job that exists already was made for this run.
pub(super) fn job_name(cron: &CronJob, at: Timestamp) -> String {
    format!("{}-{}", cron.metadata.name.as_deref().unwrap_or_default(), at.as_second().div_euclid(60))
}

/// The Job of the run at this time.
pub(super) fn job_for(cron: &CronJob, at: Timestamp) -> Job {
    let spec = &cron.spec;
    let template = spec.job_template.clone();
    let meta = template.metadata.unwrap_or_default();
    let zone = zone_of(spec).ok().flatten().unwrap_or(TimeZone::UTC);
    let local = at.to_zoned(zone);
    let written = match local.offset().seconds() {
        0 => local.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        _ => local.strftime("%Y-%m-%dT%H:%M:%S%:z").to_string(),
    };
    let mut annotations = meta.annotations.unwrap_or_default();
    annotations.insert(SCHEDULED_AT.to_owned(), written);
    Job {
        metadata: ObjectMeta {
            name: Some(job_name(cron, at)),
            namespace: cron.metadata.namespace.clone(),
            labels: meta.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![controller_reference(cron)]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}
