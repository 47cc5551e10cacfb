//! CronJobs.

use super::job::{self, default_job_template};
use super::job_rules::validate_job_template;
use crate::cron::Schedule;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, default_text, ensure_object, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{not_negative, one_of};
use crate::kinds::common::row::{NAME, boolean, number, shown, wide};
use crate::kinds::common::workload;
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use crate::table::{NONE, since};
use ferrite_json::Value;
use jiff::Timestamp;

/// Jobs are named after their CronJob, with eleven characters more.
const NAME_MAX: usize = 52;

pub(in crate::kinds) struct CronJobs;

impl Strategy for CronJobs {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/jobTemplate/spec/template/spec")
    }

    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_text(spec, "concurrencyPolicy", "Allow");
        default_field(spec, "suspend", false);
        default_field(spec, "successfulJobsHistoryLimit", 3);
        default_field(spec, "failedJobsHistoryLimit", 1);
        default_job_template(ensure_object(ensure_object(spec, "jobTemplate"), "spec"));
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        let name = crate::meta::name(object);
        let (spec, path) = (&object["spec"], Path::new("spec"));
        errors.extend(validate_schedule(spec, false, &path.child("schedule")));
        errors.extend(not_negative(spec, "startingDeadlineSeconds", &path));
        errors.extend(validate_time_zone(spec, &path.child("timeZone")));
        errors.extend(one_of(spec, "concurrencyPolicy", &path, &["Allow", "Forbid", "Replace"]));
        errors.extend(validate_job_template(&spec["jobTemplate"], &path.child("jobTemplate")));
        errors.extend(not_negative(spec, "successfulJobsHistoryLimit", &path));
        errors.extend(not_negative(spec, "failedJobsHistoryLimit", &path));
        if name.len() > NAME_MAX {
            errors.push(FieldError::invalid(
                &Path::new("metadata").child("name"),
                name,
                format!("must be no more than {NAME_MAX} characters"),
            ));
        }
        errors
    }

    /// Values that are stored already are accepted: a long name, a zone in its schedule.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        errors.retain(|e| e.path != Path::new("metadata").child("name"));
        if text(&old["spec"], "schedule").contains("TZ") {
            let path = Path::new("spec").child("schedule");
            errors.retain(|e| e.path != path);
            errors.extend(validate_schedule(&new["spec"], true, &path));
        }
        errors
    }

    fn warnings_on_create(&self, object: &Value) -> Vec<String> {
        workload::name_warning(object).into_iter().chain(self.warnings(object)).collect()
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        let mut warnings = job::warnings_of(&object["spec"]["jobTemplate"]["spec"], "spec.jobTemplate.spec");
        if text(&object["spec"], "schedule").contains("TZ") {
            warnings.push(
                "CRON_TZ or TZ used in spec.schedule is not officially supported, see \
                 https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details"
                    .to_owned(),
            );
        }
        warnings
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Schedule"),
                shown("Timezone"),
                boolean("Suspend"),
                number("Active"),
                shown("Last Schedule"),
                shown("Age"),
                wide("Containers"),
                wide("Images"),
                wide("Selector"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let last = match text(status, "lastScheduleTime") {
            "" => NONE.to_owned(),
            time => since(time, now),
        };
        let suspended = match spec["suspend"].as_bool() {
            None => "<unset>",
            Some(true) => "True",
            Some(false) => "False",
        };
        let mut cells = vec![
            cell::name(object),
            text(spec, "schedule").into(),
            cell::text_or(spec, "timeZone", NONE),
            suspended.into(),
            cell::count(status, "active"),
            last.into(),
            cell::age(object, now),
        ];
        cells.extend(workload::wide_cells(&spec["jobTemplate"]["spec"]));
        cells
    }
}

fn validate_schedule(spec: &Value, may_name_zone: bool, path: &Path) -> FieldErrors {
    let schedule = text(spec, "schedule");
    if schedule.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let mut errors = Vec::new();
    if let Err(problem) = Schedule::parse(schedule) {
        errors.push(FieldError::invalid(path, schedule, problem.to_string()));
    }
    if schedule.contains("TZ") {
        let why = match (may_name_zone, present(spec, "timeZone")) {
            (false, _) => "cannot use TZ or CRON_TZ in schedule, use timeZone field instead",
            (true, true) => "cannot use both timeZone field and TZ or CRON_TZ in schedule",
            (true, false) => return errors,
        };
        errors.push(FieldError::invalid(path, schedule, why));
    }
    errors
}

fn validate_time_zone(spec: &Value, path: &Path) -> Option<FieldError> {
    let zone = spec["timeZone"].as_str()?;
    if zone.is_empty() {
        return Some(FieldError::invalid(path, zone, "timeZone must be nil or non-empty string"));
    }
    let plain = |part: &str| {
        !part.is_empty()
            && part.len() <= 14
            && !matches!(part, "." | "..")
            && !part.starts_with('-')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._+-".contains(c))
    };
    if !zone.split('/').all(plain) {
        return Some(FieldError::invalid(path, zone, format!("unknown time zone {zone}")));
    }
    if zone.eq_ignore_ascii_case("Local") {
        return Some(FieldError::invalid(
            path,
            zone,
            "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones",
        ));
    }
    // As upstream: names are files, and so their case matters.
    let known = jiff::tz::TimeZone::get(zone).is_ok_and(|found| found.iana_name() == Some(zone));
    (!known).then(|| FieldError::invalid(path, zone, format!("unknown time zone {zone}")))
}
