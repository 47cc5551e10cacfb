//! What may be reported of a job: counts that only grow, and conditions that agree with each other.

use super::job_rules::count_indexes;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{flag, int, list, object, present, strings, text};
use crate::kinds::cell::has_condition;
use crate::kinds::check::not_negative;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

pub(super) fn validate(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("status");
    let (spec, is, was) = (&new["spec"], &new["status"], &old["status"]);
    let mut errors: FieldErrors = ["active", "succeeded", "failed", "ready", "terminating"]
        .iter()
        .filter_map(|key| not_negative(is, key, &path))
        .collect();
    errors.extend(validate_uncounted(is, &path.child("uncountedTerminatedPods")));
    errors.extend(validate_conditions(is, &path));
    errors.extend(validate_indexes(spec, is, &path));
    if int(is, "terminating") > 0 && is_finished(is) {
        errors.push(FieldError::invalid(
            &path.child("terminating"),
            int(is, "terminating"),
            "terminating>0 is invalid for finished job",
        ));
    }
    if present(is, "ready") && int(is, "ready") > int(is, "active") {
        errors.push(FieldError::invalid(
            &path.child("ready"),
            int(is, "ready"),
            "cannot set more ready pods than active",
        ));
    }
    errors.extend(validate_criteria(spec, is, &path));
    errors.extend(validate_change(spec, is, was, &path));
    errors
}

fn is_finished(status: &Value) -> bool {
    has_condition(status, "Complete") || has_condition(status, "Failed")
}

fn wrong_conditions(path: &Path, why: impl Into<String>) -> FieldError {
    FieldError::invalid(&path.child("conditions"), Value::Null, why).rendered_as("")
}

/// Pods are counted once.
fn validate_uncounted(status: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for key in ["succeeded", "failed"] {
        for (index, uid) in strings(&status["uncountedTerminatedPods"], key).into_iter().enumerate() {
            let path = path.child(key).index(index);
            if uid.is_empty() {
                errors.push(FieldError::invalid(&path, uid, "must not be empty"));
            } else if !seen.insert(uid) {
                errors.push(FieldError::duplicate(&path, uid));
            }
        }
    }
    errors
}

fn validate_conditions(status: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let has = |kind: &str| has_condition(status, kind);
    let complete = has("Complete");
    for other in ["Failed", "FailureTarget"] {
        if complete && has(other) {
            errors.push(wrong_conditions(
                path,
                format!("cannot set Complete=True and {other}=true conditions"),
            ));
        }
    }
    let time = |key: &str| text(status, key).parse::<Timestamp>().ok();
    let ended = path.child("completionTime");
    match (time("completionTime"), complete) {
        (Some(_), false) => errors.push(FieldError::invalid(
            &ended,
            status["completionTime"].clone(),
            "cannot set completionTime when there is no Complete=True condition",
        )),
        (None, true) => {
            errors.push(FieldError::required(&ended, "completionTime is required for Complete jobs"));
        }
        _ => {}
    }
    if let (Some(start), Some(end)) = (time("startTime"), time("completionTime"))
        && end < start
    {
        errors.push(FieldError::invalid(
            &ended,
            status["completionTime"].clone(),
            "completionTime cannot be set before startTime",
        ));
    }
    if has("Failed") && !has("FailureTarget") {
        errors.push(wrong_conditions(
            path,
            "cannot set Failed=True condition without the FailureTarget=true condition",
        ));
    }
    if complete && !has("SuccessCriteriaMet") {
        errors.push(wrong_conditions(
            path,
            "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
        ));
    }
    if !is_finished(status) {
        return errors;
    }
    if int(status, "active") > 0 {
        errors.push(FieldError::invalid(
            &path.child("active"),
            int(status, "active"),
            "active>0 is invalid for finished job",
        ));
    }
    if !present(status, "startTime") {
        errors.push(FieldError::required(&path.child("startTime"), "startTime is required for finished job"));
    }
    if let Some(uncounted) = object(status, "uncountedTerminatedPods")
        && ["failed", "succeeded"].iter().any(|key| !list(uncounted, key).is_empty())
    {
        errors.push(FieldError::invalid(
            &path.child("uncountedTerminatedPods"),
            uncounted.clone(),
            "uncountedTerminatedPods needs to be empty for finished job",
        ));
    }
    errors
}

fn validate_indexes(spec: &Value, status: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (done, failed) = (text(status, "completedIndexes"), status["failedIndexes"].as_str());
    let per_index = present(spec, "backoffLimitPerIndex");
    if let Some(completions) = spec["completions"].as_i64() {
        let checked = [("completedIndexes", Some(done)), ("failedIndexes", failed.filter(|_| per_index))];
        for (key, indexes) in checked {
            if let Some(indexes) = indexes
                && let Err(why) = count_indexes(indexes, completions)
            {
                errors.push(FieldError::invalid(
                    &path.child(key),
                    indexes,
                    format!("error parsing {key}: {why}"),
                ));
            }
        }
    }
    if !done.is_empty() && text(spec, "completionMode") != "Indexed" {
        errors.push(FieldError::invalid(
            &path.child("completedIndexes"),
            done,
            "cannot set non-empty completedIndexes when non-indexed completion mode",
        ));
    }
    if let Some(failed) = failed.filter(|_| !per_index) {
        errors.push(FieldError::invalid(
            &path.child("failedIndexes"),
            failed,
            "cannot set non-null failedIndexes when backoffLimitPerIndex is null",
        ));
    }
    errors
}

fn validate_criteria(spec: &Value, status: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let has = |kind: &str| has_condition(status, kind);
    for other in ["Failed", "FailureTarget"] {
        if has("SuccessCriteriaMet") && has(other) {
            errors.push(wrong_conditions(
                path,
                format!("cannot set SuccessCriteriaMet=True and {other}=true conditions"),
            ));
        }
    }
    if present(spec, "successPolicy") && !has("SuccessCriteriaMet") && has("Complete") {
        errors.push(wrong_conditions(
            path,
            "cannot set Complete=True for Job with SuccessPolicy unless SuccessCriteriaMet=True",
        ));
    }
    errors
}

/// What was true of a job stays so.
fn validate_change(spec: &Value, is: &Value, was: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let lost = |kind: &str| has_condition(was, kind) && !has_condition(is, kind);
    for kind in ["Failed", "Complete", "FailureTarget"] {
        if lost(kind) {
            errors.push(wrong_conditions(path, format!("cannot disable the terminal {kind}=True condition")));
        }
    }
    for key in ["failed", "succeeded"] {
        if int(is, key) < int(was, key) {
            errors.push(FieldError::invalid(
                &path.child(key),
                int(is, key),
                format!("cannot decrease the {key} counter"),
            ));
        }
    }
    let time = |status: &Value, key: &str| status.get(key).filter(|t| !t.is_null()).cloned();
    if let (Some(now), Some(before)) = (time(is, "completionTime"), time(was, "completionTime"))
        && now != before
    {
        errors.push(FieldError::invalid(
            &path.child("completionTime"),
            now,
            "completionTime cannot be mutated",
        ));
    }
    if !flag(spec, "suspend")
        && time(was, "startTime").is_some()
        && time(is, "startTime") != time(was, "startTime")
    {
        errors.push(FieldError::invalid(
            &path.child("startTime"),
            is["startTime"].clone(),
            "field is immutable for unsuspended job once set",
        ));
    }
    if lost("SuccessCriteriaMet") {
        errors.push(wrong_conditions(path, "cannot disable the SuccessCriteriaMet=True condition"));
    }
    if has_condition(was, "Complete")
        && !has_condition(was, "SuccessCriteriaMet")
        && has_condition(is, "SuccessCriteriaMet")
    {
        errors.push(wrong_conditions(
            path,
            "cannot set SuccessCriteriaMet=True for Job already has Complete=true conditions",
        ));
    }
    errors
}
