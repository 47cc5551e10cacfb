//! Validation of a job's specification, its own or a CronJob's template.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, object, present, text};
use crate::kinds::common::check::{complaints, not_negative, repeated};
use crate::kinds::common::workload;
use crate::kinds::networking::domain_prefixed_path;
use crate::meta_validation::qualified_name;
use ferrite_json::Value;
use std::collections::HashSet;

const MANAGED_BY_MAX: usize = 63;
const RULES_MAX: usize = 20;
const EXIT_CODES_MAX: usize = 255;
const INDEXES_TEXT_MAX: usize = 65_536;
const INDEXED_PARALLELISM_MAX: i64 = 100_000;
const FAILED_INDEXES_MAX: i64 = 100_000;
const MANY_COMPLETIONS: i64 = 100_000;
const PARALLELISM_OF_MANY_MAX: i64 = 10_000;
const INDEXED: &str = "requires indexed completion mode";

pub(super) fn validate_job_spec(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ]
    .iter()
    .filter_map(|key| not_negative(spec, key, path))
    .collect();
    if present(spec, "maxFailedIndexes") && !present(spec, "backoffLimitPerIndex") {
        errors.push(FieldError::required(
            &path.child("backoffLimitPerIndex"),
            "when maxFailedIndexes is specified",
        ));
    }
    if let Some(manager) = spec["managedBy"].as_str() {
        let path = path.child("managedBy");
        errors.extend(domain_prefixed_path(manager, &path));
        if manager.len() > MANAGED_BY_MAX {
            errors.push(FieldError::too_long(&path, MANAGED_BY_MAX));
        }
    }
    errors.extend(validate_completion_mode(spec, path));
    if let Some(policy) = object(spec, "podFailurePolicy") {
        errors.extend(validate_failure_policy(policy, spec, &path.child("podFailurePolicy")));
    }
    if let Some(policy) = object(spec, "successPolicy") {
        let path = path.child("successPolicy");
        if text(spec, "completionMode") == "Indexed" {
            errors.extend(validate_success_policy(policy, spec, &path));
        } else {
            errors.push(
                FieldError::invalid(&path, policy.clone(), INDEXED)
                    .rendered_as(crate::kinds::common::go::compact("SuccessPolicy", policy)),
            );
        }
    }
    errors.extend(validate_replacement(spec, &path.child("podReplacementPolicy")));
    let template = path.child("template");
    errors.extend(workload::validate_pod_template(&spec["template"], &template));
    errors.extend(validate_restart_policy(spec, &template.child("spec").child("restartPolicy")));
    errors
}

/// A job's pods end: `Always`, which is also the default, is not allowed.
fn validate_restart_policy(spec: &Value, path: &Path) -> Option<FieldError> {
    match text(&spec["template"]["spec"], "restartPolicy") {
        "" | "Always" => Some(FieldError::required(path, "valid values: \"OnFailure\", \"Never\"")),
        "OnFailure" if present(spec, "podFailurePolicy") => Some(FieldError::invalid(
            path,
            "OnFailure",
            "only \"Never\" is supported when podFailurePolicy is specified",
        )),
        "OnFailure" | "Never" => None,
        other => Some(FieldError::not_supported(path, other, &["OnFailure", "Never"])),
    }
}

fn validate_completion_mode(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mode = spec["completionMode"].as_str().unwrap_or("NonIndexed");
    let number = |key: &str| spec[key].as_i64();
    let mut complain = |key: &str, value: i64, why: String| {
        errors.push(FieldError::invalid(&path.child(key), value, why));
    };
    match mode {
        "NonIndexed" => {
            for key in ["backoffLimitPerIndex", "maxFailedIndexes"] {
                if let Some(value) = number(key) {
                    complain(key, value, INDEXED.to_owned());
                }
            }
        }
        "Indexed" => {
            if let Some(parallelism) = number("parallelism").filter(|p| *p > INDEXED_PARALLELISM_MAX) {
                complain(
                    "parallelism",
                    parallelism,
                    format!(
                        "must be less than or equal to {INDEXED_PARALLELISM_MAX} when completion mode is Indexed"
                    ),
                );
            }
            let failed = number("maxFailedIndexes");
            match (number("completions"), failed) {
                (Some(completions), Some(failed)) if failed > completions => {
                    complain(
                        "maxFailedIndexes",
                        failed,
                        "must be less than or equal to completions".to_owned(),
                    );
                }
                _ => {}
            }
            if let Some(failed) = failed.filter(|f| *f > FAILED_INDEXES_MAX) {
                complain(
                    "maxFailedIndexes",
                    failed,
                    format!("must be less than or equal to {FAILED_INDEXES_MAX}"),
                );
            }
            let many = number("completions").is_some_and(|c| c > MANY_COMPLETIONS);
            if many && present(spec, "backoffLimitPerIndex") {
                if failed.is_none() {
                    errors.push(FieldError::required(
                        &path.child("maxFailedIndexes"),
                        format!("must be specified when completions is above {MANY_COMPLETIONS}"),
                    ));
                }
                let mut complain = |key: &str, value: i64, why: String| {
                    errors.push(FieldError::invalid(&path.child(key), value, why));
                };
                for (key, value) in [("parallelism", number("parallelism")), ("maxFailedIndexes", failed)] {
                    if let Some(value) = value.filter(|v| *v > PARALLELISM_OF_MANY_MAX) {
                        complain(
                            key,
                            value,
                            format!(
                                "must be less than or equal to {PARALLELISM_OF_MANY_MAX} when completions are above \
                                 {MANY_COMPLETIONS} and used with backoff limit per index"
                            ),
                        );
                    }
                }
            }
            if number("completions").is_none() {
                errors.insert(
                    0,
                    FieldError::required(&path.child("completions"), "when completion mode is Indexed"),
                );
            }
        }
        other => {
            errors.push(FieldError::not_supported(
                &path.child("completionMode"),
                other,
                &["NonIndexed", "Indexed"],
            ));
        }
    }
    errors
}

fn validate_failure_policy(policy: &Value, spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let path = path.child("rules");
    let rules = list(policy, "rules");
    if rules.len() > RULES_MAX {
        errors.push(FieldError::too_many(&path, rules.len(), RULES_MAX));
    }
    let pod = &spec["template"]["spec"];
    let containers: HashSet<&str> =
        ["containers", "initContainers"].iter().flat_map(|k| list(pod, k)).map(|c| text(c, "name")).collect();
    for (index, rule) in rules.iter().enumerate() {
        let path = path.index(index);
        const ACTIONS: &[&str] = &["Count", "FailIndex", "FailJob", "Ignore"];
        match text(rule, "action") {
            "" => errors.push(FieldError::required(
                &path.child("action"),
                "valid values: [\"Count\" \"FailIndex\" \"FailJob\" \"Ignore\"]",
            )),
            "FailIndex" if !present(spec, "backoffLimitPerIndex") => errors.push(FieldError::invalid(
                &path.child("action"),
                "FailIndex",
                "requires the backoffLimitPerIndex to be set",
            )),
            action if !ACTIONS.contains(&action) => {
                errors.push(FieldError::not_supported(&path.child("action"), action, ACTIONS));
            }
            _ => {}
        }
        let codes = object(rule, "onExitCodes");
        if let Some(codes) = codes {
            errors.extend(validate_exit_codes(codes, &containers, &path.child("onExitCodes")));
        }
        let conditions = list(rule, "onPodConditions");
        errors.extend(validate_pod_conditions(conditions, &path.child("onPodConditions")));
        let mut whole = |why: &str| errors.push(FieldError::invalid(&path, Value::Null, why).rendered_as(""));
        match (codes.is_some(), conditions.is_empty()) {
            (true, false) => whole("specifying both OnExitCodes and OnPodConditions is not supported"),
            (false, true) => whole("specifying one of OnExitCodes and OnPodConditions is required"),
            _ => {}
        }
    }
    errors
}

fn validate_exit_codes(codes: &Value, containers: &HashSet<&str>, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let operator = text(codes, "operator");
    match operator {
        "" => errors.push(FieldError::required(&path.child("operator"), "valid values: [\"In\" \"NotIn\"]")),
        "In" | "NotIn" => {}
        other => errors.push(FieldError::not_supported(&path.child("operator"), other, &["In", "NotIn"])),
    }
    if let Some(name) = codes["containerName"].as_str().filter(|n| !containers.contains(n)) {
        errors.push(FieldError::invalid(
            &path.child("containerName"),
            name,
            "must be one of the container or initContainer names in the pod template",
        ));
    }
    let (path, values) = (path.child("values"), list(codes, "values"));
    if values.is_empty() {
        errors.push(FieldError::invalid(&path, codes["values"].clone(), "at least one value is required"));
    } else if values.len() > EXIT_CODES_MAX {
        errors.push(FieldError::too_many(&path, values.len(), EXIT_CODES_MAX));
    }
    let numbers: Vec<i64> = values.iter().map(|v| v.as_i64().unwrap_or(0)).collect();
    let again = repeated(numbers.iter());
    for (index, number) in numbers.iter().enumerate() {
        if operator == "In" && *number == 0 {
            errors.push(FieldError::invalid(&path.index(index), 0, "must not be 0 for the In operator"));
        }
        if again[index] {
            errors.push(FieldError::duplicate(&path.index(index), *number));
        }
    }
    if !numbers.is_sorted() {
        errors.push(FieldError::invalid(&path, values.to_vec(), "must be ordered"));
    }
    errors
}

fn validate_pod_conditions(conditions: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if conditions.len() > RULES_MAX {
        errors.push(FieldError::too_many(path, conditions.len(), RULES_MAX));
    }
    for (index, condition) in conditions.iter().enumerate() {
        let path = path.index(index);
        let kind = text(condition, "type");
        errors.extend(complaints(&path.child("type"), kind, qualified_name(kind)));
        match text(condition, "status") {
            "" => errors.push(FieldError::required(
                &path.child("status"),
                "valid values: [\"False\" \"True\" \"Unknown\"]",
            )),
            "False" | "True" | "Unknown" => {}
            other => errors.push(FieldError::not_supported(
                &path.child("status"),
                other,
                &["False", "True", "Unknown"],
            )),
        }
    }
    errors
}

fn validate_success_policy(policy: &Value, spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let path = path.child("rules");
    let rules = list(policy, "rules");
    if rules.is_empty() {
        errors.push(FieldError::required(
            &path,
            "at least one rules must be specified when the successPolicy is specified",
        ));
    }
    if rules.len() > RULES_MAX {
        errors.push(FieldError::too_many(&path, rules.len(), RULES_MAX));
    }
    let completions = int(spec, "completions");
    for (index, rule) in rules.iter().enumerate() {
        let path = path.index(index);
        let (count, indexes) = (rule["succeededCount"].as_i64(), rule["succeededIndexes"].as_str());
        if count.is_none() && indexes.is_none() {
            errors.push(FieldError::required(
                &path,
                "at least one of succeededCount or succeededIndexes must be specified",
            ));
        }
        let mut total = 0;
        if let Some(indexes) = indexes {
            let path = path.child("succeededIndexes");
            if indexes.len() > INDEXES_TEXT_MAX {
                errors.push(FieldError::too_long(&path, INDEXES_TEXT_MAX));
            }
            match count_indexes(indexes, completions) {
                Ok(count) => total = count,
                Err(why) => errors.push(FieldError::invalid(
                    &path,
                    indexes,
                    format!("error parsing succeededIndexes: {why}"),
                )),
            }
        }
        if let Some(count) = count {
            errors.extend(not_negative(rule, "succeededCount", &path));
            let path = path.child("succeededCount");
            if count > completions {
                errors.push(FieldError::invalid(
                    &path,
                    count,
                    format!(
                        "must be less than or equal to {completions} (the number of specified completions)"
                    ),
                ));
            }
            if indexes.is_some() && count > total {
                errors.push(FieldError::invalid(
                    &path,
                    count,
                    format!(
                        "must be less than or equal to {total} (the number of indexes in the specified \
                         succeededIndexes field)"
                    ),
                ));
            }
        }
    }
    errors
}

/// Number of indexes in a text like `1,3-5`: in order, apart from each other, below the completions.
pub(super) fn count_indexes(indexes: &str, completions: i64) -> Result<i64, String> {
    if indexes.is_empty() {
        return Ok(0);
    }
    let mut total = 0;
    let mut last: Option<i64> = None;
    for interval in indexes.split(',') {
        let parts: Vec<&str> = interval.split('-').collect();
        if parts.len() > 2 {
            return Err(format!(
                "the fragment {interval:?} violates the requirement that an index interval can have at most two \
                 parts separated by '-'"
            ));
        }
        let read = |text: &str| -> Result<i64, String> {
            let number: i64 =
                text.parse().map_err(|_| format!("cannot convert string to integer for index: {text:?}"))?;
            if number >= completions { Err(format!("too large index: {text:?}")) } else { Ok(number) }
        };
        let first = read(parts[0])?;
        let end = match parts.get(1) {
            Some(text) => read(text)?,
            None => first,
        };
        if last.is_some_and(|last| last >= first) {
            return Err(format!("non-increasing order, previous: {}, current: {first}", last.unwrap_or(0)));
        }
        if parts.len() == 2 && end <= first {
            return Err(format!("non-increasing order, previous: {first}, current: {end}"));
        }
        total += end - first + 1;
        last = Some(end);
    }
    Ok(total)
}

fn validate_replacement(spec: &Value, path: &Path) -> Option<FieldError> {
    let policy = spec["podReplacementPolicy"].as_str()?;
    let allowed: &[&str] =
        if present(spec, "podFailurePolicy") { &["Failed"] } else { &["Failed", "TerminatingOrFailed"] };
    (!allowed.contains(&policy)).then(|| FieldError::not_supported(path, policy, allowed))
}

/// Validates a CronJob's template of jobs, for which selectors are made when the jobs are.
pub(super) fn validate_job_template(template: &Value, path: &Path) -> FieldErrors {
    let (spec, path) = (&template["spec"], path.child("spec"));
    let mut errors = validate_job_spec(spec, &path);
    if present(spec, "selector") {
        errors.push(
            FieldError::invalid(
                &path.child("selector"),
                spec["selector"].clone(),
                "`selector` will be auto-generated",
            )
            .rendered_as(workload::render_selector(&spec["selector"])),
        );
    }
    if spec["manualSelector"] == true {
        errors.push(FieldError::not_supported(&path.child("manualSelector"), true, &["nil", "false"]));
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::count_indexes;

    #[test]
    fn intervals_of_indexes() {
        for (text, answer) in [
            ("", Ok(0)),
            ("0", Ok(1)),
            ("0-2,4", Ok(4)),
            ("2-1", Err("non-increasing order, previous: 2, current: 1")),
            ("1,1", Err("non-increasing order, previous: 1, current: 1")),
            ("9", Err("too large index: \"9\"")),
            ("a", Err("cannot convert string to integer for index: \"a\"")),
        ] {
            assert_eq!(count_indexes(text, 5), answer.map_err(str::to_owned), "{text}");
        }
    }
}
