//! CronJobs on a clock that is moved.

use std::sync::Arc;

use ferrite_json::{Value, json};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::active;
use super::decide::{Run, decide, job_for, job_name, next_run};

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// A CronJob created at ten o'clock.
fn cron(spec: Value, status: Value) -> CronJob {
    let mut whole = json!({"schedule": "0 * * * *", "jobTemplate": {"metadata": {"labels": {"a": "b"},
        "annotations": {"c": "d"}}, "spec": {"template": {}}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    ferrite_json::from_value(json!({"metadata": {"name": "hourly", "namespace": "ns", "uid": "cron",
        "creationTimestamp": "2024-01-01T10:00:00Z"}, "spec": whole, "status": status}))
    .unwrap()
}

fn start(at: &str) -> Run {
    Run::Start { at: time(at), replace: false, many_missed: false }
}

#[test]
fn what_is_due() {
    let ran_at_11 = json!({"lastScheduleTime": "2024-01-01T11:00:00Z"});
    let active = |name: &str| json!({"lastScheduleTime": "2024-01-01T11:00:00Z", "active": [{"name": name, "namespace": "ns", "uid": "x"}]});
    let none = json!({});
    for (what, spec, status, now, run, again) in [
        ("before the first time", json!({}), &none, "2024-01-01T10:59:59Z", Run::Nothing, Some(1)),
        (
            "at the first time",
            json!({}),
            &none,
            "2024-01-01T11:00:00Z",
            start("2024-01-01T11:00:00Z"),
            Some(3600),
        ),
        (
            "a little later",
            json!({}),
            &none,
            "2024-01-01T11:10:00Z",
            start("2024-01-01T11:00:00Z"),
            Some(3000),
        ),
        ("after it ran", json!({}), &ran_at_11, "2024-01-01T11:10:00Z", Run::Nothing, Some(3000)),
        (
            "several were missed",
            json!({}),
            &none,
            "2024-01-01T15:10:00Z",
            start("2024-01-01T15:00:00Z"),
            Some(3000),
        ),
        (
            "very many were missed",
            json!({}),
            &none,
            "2024-01-08T15:10:00Z",
            Run::Start { at: time("2024-01-08T15:00:00Z"), replace: false, many_missed: true },
            Some(3000),
        ),
        (
            "a deadline bounds how many count",
            json!({"startingDeadlineSeconds": 7200}),
            &none,
            "2024-01-08T15:10:00Z",
            start("2024-01-08T15:00:00Z"),
            Some(3000),
        ),
        (
            "the deadline is over",
            json!({"startingDeadlineSeconds": 60}),
            &none,
            "2024-01-01T11:10:00Z",
            Run::Nothing,
            Some(3000),
        ),
        (
            "within the deadline",
            json!({"startingDeadlineSeconds": 600}),
            &none,
            "2024-01-01T11:09:59Z",
            start("2024-01-01T11:00:00Z"),
            Some(3001),
        ),
        ("suspended", json!({"suspend": true}), &none, "2024-01-01T11:10:00Z", Run::Suspended, None),
        (
            "jobs may overlap",
            json!({"concurrencyPolicy": "Allow"}),
            &active("hourly-1"),
            "2024-01-01T12:00:00Z",
            start("2024-01-01T12:00:00Z"),
            Some(3600),
        ),
        (
            "or not",
            json!({"concurrencyPolicy": "Forbid"}),
            &active("hourly-1"),
            "2024-01-01T12:00:00Z",
            Run::Forbidden,
            Some(3600),
        ),
        (
            "or the new one replaces the old",
            json!({"concurrencyPolicy": "Replace"}),
            &active("hourly-1"),
            "2024-01-01T12:00:00Z",
            Run::Start { at: time("2024-01-01T12:00:00Z"), replace: true, many_missed: false },
            Some(3600),
        ),
        (
            "the job of this time is active",
            json!({}),
            &active("hourly-28401840"),
            "2024-01-01T12:00:00Z",
            Run::Started,
            Some(3600),
        ),
        (
            "a time zone",
            json!({"schedule": "30 20 * * *", "timeZone": "Asia/Tokyo"}),
            &none,
            "2024-01-01T11:30:00Z",
            start("2024-01-01T11:30:00Z"),
            Some(24 * 3600),
        ),
        (
            "weekdays are not equally far apart",
            json!({"schedule": "30 6-16/4 * * 1-5"}),
            &json!({"lastScheduleTime": "2024-01-05T14:30:00Z"}),
            "2024-01-08T11:00:00Z",
            start("2024-01-08T10:30:00Z"),
            Some(3 * 3600 + 1800),
        ),
        (
            "an interval counts from the last run",
            json!({"schedule": "@every 1h"}),
            &json!({"lastScheduleTime": "2024-01-01T10:20:00Z"}),
            "2024-01-01T13:30:00Z",
            start("2024-01-01T13:20:00Z"),
            Some(50 * 60),
        ),
    ] {
        let decision = decide(&cron(spec, status.clone()), time(now), &TimeZone::UTC).unwrap();
        assert_eq!(decision.run, run, "{what}");
        assert_eq!(decision.again.map(|delay| delay.as_secs()), again, "{what}");
    }
    assert_eq!(job_name(&cron(json!({}), none), time("2024-01-01T12:00:00Z")), "hourly-28401840");
}

#[test]
fn some_specifications_cannot_be_run() {
    for (spec, reason, message) in [
        (json!({"timeZone": "No/Where"}), "UnknownTimeZone", "invalid timeZone: \"No/Where\""),
        (
            json!({"schedule": "x"}),
            "UnparseableSchedule",
            "unparseable schedule: \"x\" : expected exactly 5 fields",
        ),
        (json!({"schedule": "59 23 31 2 *"}), "InvalidSchedule", "invalid schedule: 59 23 31 2 *"),
    ] {
        let error = decide(&cron(spec, json!({})), time("2024-01-02T00:00:00Z"), &TimeZone::UTC).unwrap_err();
        assert_eq!(error.reason(), reason);
        assert!(error.to_string().starts_with(message), "{error}");
    }
}

#[test]
fn a_changed_schedule_starts_nothing_before_its_next_time() {
    let changed =
        cron(json!({"schedule": "*/5 * * * *"}), json!({"lastScheduleTime": "2024-01-01T11:00:00Z"}));
    let delay = next_run(&changed, time("2024-01-01T11:32:00Z"), &TimeZone::UTC).unwrap().unwrap();
    assert_eq!(delay.as_secs(), 180);
}

#[test]
fn jobs_carry_the_template_and_the_time() {
    let job = job_for(&cron(json!({"timeZone": "Asia/Tokyo"}), json!({})), time("2024-01-01T12:00:00Z"));
    let meta = &job.metadata;
    assert_eq!(meta.name.as_deref(), Some("hourly-28401840"));
    assert_eq!(meta.labels.as_ref().unwrap()["a"], "b");
    let annotations = meta.annotations.as_ref().unwrap();
    assert_eq!(annotations["c"], "d");
    assert_eq!(annotations["batch.kubernetes.io/cronjob-scheduled-timestamp"], "2024-01-01T21:00:00+09:00");
    let owner = &meta.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), ("CronJob", "cron", Some(true)));
    let utc = job_for(&cron(json!({}), json!({})), time("2024-01-01T12:00:00Z"));
    let written = &utc.metadata.annotations.unwrap()["batch.kubernetes.io/cronjob-scheduled-timestamp"];
    assert_eq!(written, "2024-01-01T12:00:00Z");
}

/// Follows the decisions over several days, with the clock at the times that they ask for.
#[test]
fn a_moved_clock_starts_every_run_once() {
    let zone = "America/New_York";
    let mut cron = cron(json!({"schedule": "30 */6 * * *", "timeZone": zone}), json!({}));
    cron.metadata.creation_timestamp = Some(Time(time("2024-03-09T12:00:00Z")));
    let mut now = time("2024-03-09T12:00:00Z");
    let mut started = Vec::new();
    while now < time("2024-03-12T00:00:00Z") {
        let decision = decide(&cron, now, &TimeZone::UTC).unwrap();
        if let Run::Start { at, .. } = decision.run {
            assert!(now.duration_since(at) < SignedDuration::from_secs(1), "in time");
            started.push(at.in_tz(zone).unwrap().strftime("%d %H:%M").to_string());
            cron.status.get_or_insert_default().last_schedule_time = Some(Time(at));
        }
        // Another sync at the same time starts nothing more.
        let repeated = decide(&cron, now, &TimeZone::UTC).unwrap();
        assert!(matches!(repeated.run, Run::Nothing | Run::Started), "{:?}", repeated.run);
        now += SignedDuration::try_from(decision.again.unwrap()).unwrap();
    }
    // The clock is put forward on the tenth.
    let expected =
        "09 12:30,09 18:30,10 00:30,10 06:30,10 12:30,10 18:30,11 00:30,11 06:30,11 12:30,11 18:30";
    assert_eq!(started.join(","), expected);
}

fn job(name: &str, start: Option<&str>, end: Option<(&str, &str)>) -> Arc<Job> {
    let conditions = end.map(|(kind, _)| json!([{"type": kind, "status": "True"}]));
    let completed = end.filter(|(kind, _)| *kind == "Complete").map(|(_, at)| at);
    Arc::new(
        ferrite_json::from_value(json!({"metadata": {"name": name, "uid": name}, "status": {
            "startTime": start, "completionTime": completed, "conditions": conditions}}))
        .unwrap(),
    )
}

#[test]
fn the_oldest_finished_jobs_go() {
    let jobs = [
        job("c", Some("2024-01-01T03:00:00Z"), Some(("Complete", "2024-01-01T03:01:00Z"))),
        job("a", Some("2024-01-01T01:00:00Z"), Some(("Complete", "2024-01-01T01:01:00Z"))),
        job("b", Some("2024-01-01T02:00:00Z"), Some(("Complete", "2024-01-01T02:01:00Z"))),
        job("f2", Some("2024-01-01T05:00:00Z"), Some(("Failed", ""))),
        job("f1", Some("2024-01-01T05:00:00Z"), Some(("Failed", ""))),
        job("f3", None, Some(("Failed", ""))),
        job("running", Some("2024-01-01T00:00:00Z"), None),
    ];
    for (what, limits, expected) in [
        ("both", json!({"successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 1}), "a b f1 f2"),
        (
            "none kept",
            json!({"successfulJobsHistoryLimit": 0, "failedJobsHistoryLimit": 0}),
            "a b c f1 f2 f3",
        ),
        ("only successes", json!({"successfulJobsHistoryLimit": 2}), "a"),
        ("no limits", json!({}), ""),
    ] {
        let names: Vec<_> = active::too_old(&cron(limits, json!({})), &jobs)
            .iter()
            .filter_map(|job| job.metadata.name.clone())
            .collect();
        assert_eq!(names.join(" "), expected, "{what}");
    }
}

#[test]
fn finished_jobs_leave_the_active_list() {
    let reference = |name: &str| ObjectReference {
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..ObjectReference::default()
    };
    let mut status = CronJobStatus {
        active: Some(vec![reference("done"), reference("runs")]),
        ..CronJobStatus::default()
    };
    let jobs = [
        job("done", None, Some(("Complete", "2024-01-01T03:01:00Z"))),
        job("earlier", None, Some(("Complete", "2024-01-01T02:01:00Z"))),
        job("failed", None, Some(("Failed", ""))),
        job("runs", None, None),
        job("strange", None, None),
    ];
    let found = active::refresh(&mut status, &jobs);
    assert_eq!(found.finished, [("done".to_owned(), "Complete".to_owned())]);
    assert_eq!(found.unexpected, ["strange"]);
    assert!(found.changed);
    assert_eq!(status.active, Some(vec![reference("runs")]));
    assert_eq!(status.last_successful_time, Some(Time(time("2024-01-01T03:01:00Z"))));
    assert!(!active::refresh(&mut status, &jobs).changed, "nothing new");
}
