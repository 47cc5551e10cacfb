//! Validation of a job's status: counts that only grow, and conditions that agree with each other.

use super::job_rules::count_indexes;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, int, list, object, present, strings, text};
use crate::kinds::common::cell::has_condition;
use crate::kinds::common::check::not_negative;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

/// The parts of a status that an update changes.
///
/// A rule about a part is enforced only when that part changes: a new specification may break it, and the controller
/// must be able to write the other parts until it has caught up.
struct Changed<'a> {
    is: &'a Value,
    was: &'a Value,
}

impl Changed<'_> {
    fn any(&self, keys: &[&str]) -> bool {
        let value = |status: &Value, key: &str| status.get(key).filter(|value| !value.is_null()).cloned();
        keys.iter().any(|key| value(self.is, key) != value(self.was, key))
    }

    fn condition(&self, kinds: &[&str]) -> bool {
        kinds.iter().any(|kind| has_condition(self.is, kind) != has_condition(self.was, kind))
    }

    fn finished(&self) -> bool {
        is_finished(self.is) != is_finished(self.was)
    }
}

pub(super) fn validate(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("status");
    let (spec, is, was) = (&new["spec"], &new["status"], &old["status"]);
    let changed = Changed { is, was };
    let mut errors: FieldErrors = ["active", "succeeded", "failed", "ready", "terminating"]
        .iter()
        .filter_map(|key| not_negative(is, key, &path))
        .collect();
    errors.extend(validate_uncounted(is, &path.child("uncountedTerminatedPods")));
    errors.extend(validate_conditions(spec, is, &changed, &path));
    errors.extend(validate_indexes(spec, is, &changed, &path));
    if int(is, "terminating") > 0 && is_finished(is) && (changed.finished() || changed.any(&["terminating"]))
    {
        errors.push(FieldError::invalid(
            &path.child("terminating"),
            int(is, "terminating"),
            "terminating>0 is invalid for finished job",
        ));
    }
    if present(is, "ready")
        && int(is, "ready") > int(is, "active")
        && (changed.any(&["ready"]) || int(is, "active") != int(was, "active"))
    {
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

fn validate_conditions(spec: &Value, status: &Value, changed: &Changed<'_>, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let has = |kind: &str| has_condition(status, kind);
    let complete = has("Complete");
    for other in ["Failed", "FailureTarget"] {
        if complete && has(other) && changed.condition(&["Complete", other]) {
            errors.push(wrong_conditions(
                path,
                format!("cannot set Complete=True and {other}=true conditions"),
            ));
        }
    }
    let time = |key: &str| text(status, key).parse::<Timestamp>().ok();
    let ended = path.child("completionTime");
    let end_changed = changed.condition(&["Complete"]) || changed.any(&["completionTime"]);
    match (time("completionTime"), complete) {
        _ if !end_changed => {}
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
        && changed.any(&["startTime", "completionTime"])
    {
        errors.push(FieldError::invalid(
            &ended,
            status["completionTime"].clone(),
            "must be equal to or after `startTime`",
        ));
    }
    let failure_changed = changed.condition(&["Failed"]) || changed.any(&["failedIndexes"]);
    if has("Failed") && !has("FailureTarget") && failure_changed {
        errors.push(wrong_conditions(
            path,
            "cannot set Failed=True condition without the FailureTarget=true condition",
        ));
    }
    if complete && !has("SuccessCriteriaMet") && changed.condition(&["Complete", "SuccessCriteriaMet"]) {
        errors.push(wrong_conditions(
            path,
            "cannot set Complete=True condition without the SuccessCriteriaMet=true condition",
        ));
    }
    if !is_finished(status) {
        return errors;
    }
    let finished = changed.finished();
    if int(status, "active") > 0 && (finished || int(status, "active") != int(changed.was, "active")) {
        errors.push(FieldError::invalid(
            &path.child("active"),
            int(status, "active"),
            "active>0 is invalid for finished job",
        ));
    }
    // A job of no completions is complete although it is suspended and never started.
    let never_starts = flag(spec, "suspend") && spec["completions"].as_i64() == Some(0);
    if !present(status, "startTime") && !never_starts && (finished || changed.any(&["startTime"])) {
        errors.push(FieldError::required(&path.child("startTime"), "startTime is required for finished job"));
    }
    if let Some(uncounted) = object(status, "uncountedTerminatedPods")
        && ["failed", "succeeded"].iter().any(|key| !list(uncounted, key).is_empty())
        && (finished || changed.any(&["uncountedTerminatedPods"]))
    {
        errors.push(FieldError::invalid(
            &path.child("uncountedTerminatedPods"),
            uncounted.clone(),
            "uncountedTerminatedPods needs to be empty for finished job",
        ));
    }
    errors
}

fn validate_indexes(spec: &Value, status: &Value, changed: &Changed<'_>, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (done, failed) = (text(status, "completedIndexes"), status["failedIndexes"].as_str());
    let per_index = present(spec, "backoffLimitPerIndex");
    if let Some(completions) = spec["completions"].as_i64() {
        let checked = [("completedIndexes", Some(done)), ("failedIndexes", failed.filter(|_| per_index))];
        for (key, indexes) in checked {
            if let Some(indexes) = indexes
                && changed.any(&[key])
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
    if !done.is_empty() && text(spec, "completionMode") != "Indexed" && changed.any(&["completedIndexes"]) {
        errors.push(FieldError::invalid(
            &path.child("completedIndexes"),
            done,
            "cannot set non-empty completedIndexes when non-indexed completion mode",
        ));
    }
    if let Some(failed) = failed.filter(|_| !per_index && changed.any(&["failedIndexes"])) {
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

/// Conditions that were true of a job stay so.
fn validate_change(spec: &Value, is: &Value, was: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let lost = |kind: &str| has_condition(was, kind) && !has_condition(is, kind);
    for kind in ["Failed", "Complete", "FailureTarget"] {
        if lost(kind) {
            errors.push(wrong_conditions(path, format!("cannot disable the terminal {kind}=True condition")));
        }
    }
    // A job of as many completions as pods can be scaled down, and then no longer counts the indexes beyond.
    let elastic = text(spec, "completionMode") == "Indexed" && spec["completions"] == spec["parallelism"];
    for key in ["failed", "succeeded"] {
        if int(is, key) < int(was, key) && !(elastic && key == "succeeded") {
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
        errors.push(FieldError::invalid(&path.child("completionTime"), now, "field is immutable"));
    }
    let resumes = has_condition(was, "Suspended")
        && list(is, "conditions")
            .iter()
            .any(|condition| text(condition, "type") == "Suspended" && text(condition, "status") == "False");
    if !flag(spec, "suspend")
        && !resumes
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

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    /// The controller must be able to write the status that follows from a changed specification.
    #[test]
    fn a_rule_holds_only_for_parts_that_change() {
        let started = "2024-01-01T00:00:00Z";
        let suspended = |status: &str| json!([{"type": "Suspended", "status": status}]);
        for (what, spec, was, is, wrong) in [
            (
                "an elastic job scaled down counts fewer",
                json!({"completionMode": "Indexed", "completions": 2, "parallelism": 2}),
                json!({"succeeded": 3, "completedIndexes": "0-2"}),
                json!({"succeeded": 2, "completedIndexes": "0,1"}),
                0,
            ),
            (
                "another job never does",
                json!({"completionMode": "Indexed", "completions": 3, "parallelism": 2}),
                json!({"succeeded": 3, "completedIndexes": "0-2"}),
                json!({"succeeded": 2, "completedIndexes": "0,1"}),
                1,
            ),
            (
                "indexes beyond the completions may stay for now",
                json!({"completionMode": "Indexed", "completions": 1, "parallelism": 1}),
                json!({"completedIndexes": "0-2"}),
                json!({"completedIndexes": "0-2", "active": 1}),
                0,
            ),
            (
                "a job that resumes starts anew",
                json!({"suspend": false}),
                json!({"startTime": started, "conditions": suspended("True")}),
                json!({"startTime": "2024-01-02T00:00:00Z", "conditions": suspended("False")}),
                0,
            ),
            (
                "a job that runs does not",
                json!({"suspend": false}),
                json!({"startTime": started}),
                json!({"startTime": "2024-01-02T00:00:00Z"}),
                1,
            ),
            (
                "ready pods that were too many already",
                json!({}),
                json!({"ready": 2, "active": 1}),
                json!({"ready": 2, "active": 1, "failed": 1}),
                0,
            ),
        ] {
            let new = json!({"spec": spec, "status": is});
            let old = json!({"spec": spec, "status": was});
            assert_eq!(validate(&new, &old).len(), wrong, "{what}: {:?}", validate(&new, &old));
        }
    }
}
