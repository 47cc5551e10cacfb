//! Validation of autoscalers.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, object, present, text};
use crate::kinds::common::check::{complaints, one_of_if_set};
use crate::kinds::core::pod::resources::validate_container_resource_name;
use crate::meta_validation::{dns1123_label, path_segment};
use crate::quantity::Quantity;
use ferrite_json::Value;

const WINDOW_MAX: i64 = 3600;
const PERIOD_MAX: i64 = 1800;
/// Field and type of every source of metrics, in the order in which they are checked.
const SOURCES: [(&str, &str); 5] = [
    ("object", "Object"),
    ("external", "External"),
    ("pods", "Pods"),
    ("resource", "Resource"),
    ("containerResource", "ContainerResource"),
];

/// Validates a specification that is new, or comes after `old`.
pub(super) fn validate_spec(spec: &Value, old: Option<&Value>, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (min, max) = (spec["minReplicas"].as_i64(), int(spec, "maxReplicas"));
    if let Some(min) = min.filter(|m| *m < 1) {
        errors.push(FieldError::invalid(
            &path.child("minReplicas"),
            min,
            "must be greater than or equal to 1",
        ));
    }
    match max {
        0 => errors.push(FieldError::required(&path.child("maxReplicas"), "must be set and greater than 0")),
        ..0 => errors.push(FieldError::invalid(
            &path.child("maxReplicas"),
            max,
            "must be greater than or equal to 1",
        )),
        _ => {}
    }
    if min.is_some_and(|min| max < min) {
        errors.push(FieldError::invalid(
            &path.child("maxReplicas"),
            max,
            "must be greater than or equal to `minReplicas`",
        ));
    }
    errors.extend(validate_target_reference(
        &spec["scaleTargetRef"],
        old.map(|old| &old["scaleTargetRef"]),
        &path.child("scaleTargetRef"),
    ));
    let metrics = list(spec, "metrics");
    for (index, metric) in metrics.iter().enumerate() {
        errors.extend(validate_metric(metric, &path.child("metrics").index(index)));
    }
    // Only these metrics can show that there is work again.
    if min == Some(0) && !metrics.iter().any(|metric| matches!(text(metric, "type"), "Object" | "External")) {
        errors.push(FieldError::forbidden(
            &path.child("metrics"),
            "must specify at least one Object or External metric to support scaling to zero replicas",
        ));
    }
    for direction in ["scaleUp", "scaleDown"] {
        if let Some(rules) = object(&spec["behavior"], direction) {
            errors.extend(validate_rules(rules, &path.child("behavior").child(direction)));
        }
    }
    errors
}

/// The scaled object must have a group, unless it is of the only scalable kind of the core group. An
/// unchanged reference may lack it.
fn validate_target_reference(reference: &Value, old: Option<&Value>, path: &Path) -> FieldErrors {
    let mut errors = validate_reference(reference, path);
    let version = text(reference, "apiVersion");
    let stays = old.is_some_and(|old| text(old, "apiVersion") == version && old["kind"] == reference["kind"]);
    if !stays {
        let core = text(reference, "kind") == "ReplicationController";
        let why = version_problem(version)
            .or_else(|| (!core && !version.contains('/')).then(|| NO_GROUP.to_owned()));
        errors.extend(why.map(|why| FieldError::invalid(&path.child("apiVersion"), version, why)));
    }
    errors
}

const NO_GROUP: &str = "apiVersion must specify API group";

/// Why a text is no version of a group.
fn version_problem(version: &str) -> Option<String> {
    (version.matches('/').count() > 1).then(|| format!("unexpected GroupVersion string: {version}"))
}

fn validate_reference(reference: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["kind", "name"] {
        match text(reference, key) {
            "" => errors.push(FieldError::required(&path.child(key), "")),
            value => errors.extend(complaints(&path.child(key), value, path_segment(value))),
        }
    }
    errors
}

fn validate_metric(metric: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let kind = text(metric, "type");
    if kind.is_empty() {
        errors.push(FieldError::required(&path.child("type"), "must specify a metric source type"));
    }
    let expected = SOURCES.iter().find(|(_, name)| *name == kind).map(|(field, _)| *field);
    // As upstream: an unknown type is reported before its source is validated, and again after.
    let unknown = expected.is_none().then(|| {
        let known = &["ContainerResource", "External", "Object", "Pods", "Resource"];
        FieldError::not_supported(&path.child("type"), kind, known)
    });
    errors.extend(unknown.clone());
    let given: Vec<&str> =
        SOURCES.iter().map(|(field, _)| *field).filter(|field| present(metric, field)).collect();
    if let Some(first) = given.first() {
        errors.extend(validate_source(first, &metric[*first], &path.child(first)));
    }
    errors.extend(unknown);
    if let Some(expected) = expected.filter(|e| !given.contains(e)) {
        errors.push(FieldError::required(
            &path.child(expected),
            "must populate information for the given metric source",
        ));
    }
    if given.len() != 1 {
        let mut others: Vec<&&str> = given.iter().filter(|g| Some(**g) != expected).collect();
        others.sort_unstable();
        for other in others {
            errors.push(FieldError::forbidden(
                &path.child(other),
                "must populate the given metric source only",
            ));
        }
    }
    errors
}

fn validate_source(kind: &str, source: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let target = &source["target"];
    let target_path = path.child("target");
    if kind == "object" {
        let (about, path) = (&source["describedObject"], path.child("describedObject"));
        errors.extend(validate_reference(about, &path));
        let version = text(about, "apiVersion");
        let why = version_problem(version);
        errors.extend(why.map(|why| FieldError::invalid(&path.child("apiVersion"), version, why)));
    }
    if matches!(kind, "object" | "external" | "pods") {
        let path = path.child("metric").child("name");
        match text(&source["metric"], "name") {
            "" => errors.push(FieldError::required(&path, "must specify a metric name")),
            name => errors.extend(complaints(&path, name, path_segment(name))),
        }
    }
    if matches!(kind, "resource" | "containerResource") {
        match text(source, "name") {
            "" => errors.push(FieldError::required(&path.child("name"), "must specify a resource name")),
            name if kind == "containerResource" => {
                errors.extend(validate_container_resource_name(name, &path.child("name")));
            }
            _ => {}
        }
    }
    if kind == "containerResource" {
        match text(source, "container") {
            "" => errors.push(FieldError::required(&path.child("container"), "must specify a container")),
            name => errors.extend(complaints(&path.child("container"), name, dns1123_label(name))),
        }
    }
    errors.extend(validate_target(target, &target_path));
    let (value, average) = (present(target, "value"), present(target, "averageValue"));
    let share = present(target, "averageUtilization");
    match kind {
        "object" if !value && !average => errors.push(FieldError::required(
            &target_path.child("averageValue"),
            "must set either a target value or averageValue",
        )),
        "external" if !value && !average => errors.push(FieldError::required(
            &target_path.child("averageValue"),
            "must set either a target value for metric or a per-pod target",
        )),
        "external" if value && average => errors.push(FieldError::forbidden(
            &target_path.child("value"),
            "may not set both a target value for metric and a per-pod target",
        )),
        "pods" if !average => errors.push(FieldError::required(
            &target_path.child("averageValue"),
            "must specify a positive target averageValue",
        )),
        "resource" | "containerResource" if !share && !average => errors.push(FieldError::required(
            &target_path.child("averageUtilization"),
            "must set either a target raw value or a target utilization",
        )),
        "resource" | "containerResource" if share && average => errors.push(FieldError::forbidden(
            &target_path.child("averageValue"),
            "may not set both a target raw value and a target utilization",
        )),
        _ => {}
    }
    errors
}

fn validate_target(target: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let kind = text(target, "type");
    if kind.is_empty() {
        errors.push(FieldError::required(&path.child("type"), "must specify a metric target type"));
    }
    if !matches!(kind, "Utilization" | "Value" | "AverageValue") {
        errors.push(FieldError::invalid(
            &path.child("type"),
            kind,
            "must be either Utilization, Value, or AverageValue",
        ));
    }
    for key in ["value", "averageValue"] {
        let amount = target[key].as_str().and_then(|a| Quantity::parse(a).ok());
        if let Some(amount) = amount.filter(|a| a.is_zero() || a.is_negative()) {
            errors.push(FieldError::invalid(&path.child(key), amount.to_string(), "must be positive"));
        }
    }
    if let Some(share) = target["averageUtilization"].as_i64().filter(|s| *s < 1) {
        errors.push(FieldError::invalid(&path.child("averageUtilization"), share, "must be greater than 0"));
    }
    errors
}

fn validate_rules(rules: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if let Some(window) = rules["stabilizationWindowSeconds"].as_i64() {
        let path = path.child("stabilizationWindowSeconds");
        if window < 0 {
            errors.push(FieldError::invalid(&path, window, "must be greater than or equal to zero"));
        }
        if window > WINDOW_MAX {
            errors.push(FieldError::invalid(
                &path,
                window,
                format!("must be less than or equal to {WINDOW_MAX}"),
            ));
        }
    }
    errors.extend(one_of_if_set(rules, "selectPolicy", path, &["Disabled", "Max", "Min"]));
    let policies = list(rules, "policies");
    if policies.is_empty() {
        errors.push(FieldError::required(&path.child("policies"), "must specify at least one Policy"));
    }
    for (index, policy) in policies.iter().enumerate() {
        let path = path.child("policies").index(index);
        let kind = text(policy, "type");
        if !matches!(kind, "Percent" | "Pods") {
            errors.push(FieldError::not_supported(&path.child("type"), kind, &["Percent", "Pods"]));
        }
        for key in ["value", "periodSeconds"] {
            if int(policy, key) <= 0 {
                errors.push(FieldError::invalid(
                    &path.child(key),
                    int(policy, key),
                    "must be greater than zero",
                ));
            }
        }
        if int(policy, "periodSeconds") > PERIOD_MAX {
            errors.push(FieldError::invalid(
                &path.child("periodSeconds"),
                int(policy, "periodSeconds"),
                format!("must be less than or equal to {PERIOD_MAX}"),
            ));
        }
    }
    let tolerance = rules["tolerance"].as_str().and_then(|t| Quantity::parse(t).ok());
    if let Some(tolerance) = tolerance.filter(Quantity::is_negative) {
        errors.push(FieldError::invalid(
            &path.child("tolerance"),
            tolerance.to_string(),
            "must be greater than or equal to 0",
        ));
    }
    errors
}
