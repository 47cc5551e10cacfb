//! Common parts of kinds that make pods from a template.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, int, list, map, present, text};
use crate::kinds::common::check::{IMMUTABLE, not_negative};
use crate::kinds::core::pod::defaults::default_spec;
use crate::meta_validation::{validate_annotations, validate_labels};
use crate::selector::{LabelSelector, validate_label_selector};
use crate::table::NONE;
use ferrite_json::{Map, Value};

/// Defaults of `spec.template`.
pub fn default_template(spec: &mut Value) {
    let template = ensure_object(spec, "template");
    ensure_object(template, "metadata");
    default_spec(ensure_object(template, "spec"));
}

/// The wide cells: names and images of the containers, and the selector.
pub fn wide_cells(spec: &Value) -> [Value; 3] {
    let containers = list(&spec["template"]["spec"], "containers");
    let join = |key: &str| containers.iter().map(|c| text(c, key)).collect::<Vec<_>>().join(",").into();
    [join("name"), join("image"), selector_cell(&spec["selector"]).into()]
}

/// A label selector in its string form.
pub fn selector_cell(selector: &Value) -> String {
    match LabelSelector::from_value(selector).map(|s| s.to_string()) {
        Ok(text) if text.is_empty() => NONE.to_owned(),
        Ok(text) => text,
        Err(_) => "<error>".to_owned(),
    }
}

/// The checks of selector and template for kinds whose pods are to run for ever.
pub fn validate_selector_and_template(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (selector, selector_path) = (&spec["selector"], path.child("selector"));
    let invalid = |why: &str| {
        FieldError::invalid(&selector_path, selector.clone(), why).rendered_as(render_selector(selector))
    };
    if selector.is_null() {
        errors.push(FieldError::required(&selector_path, ""));
    } else {
        errors.extend(validate_label_selector(selector, &selector_path));
        let empty = map(selector, "matchLabels").is_none_or(Map::is_empty)
            && list(selector, "matchExpressions").is_empty();
        if empty {
            errors.push(invalid("empty selector is invalid for deployment"));
        }
    }
    match LabelSelector::from_value(selector) {
        Err(_) => errors.push(invalid("invalid label selector")),
        Ok(selector) => {
            errors.extend(validate_template(&spec["template"], &selector, &path.child("template")))
        }
    }
    errors
}

fn validate_template(template: &Value, selector: &LabelSelector, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let labels = &template["metadata"]["labels"];
    if !selector.is_empty() && !selector.matches(&labels.as_object()) {
        errors.push(labels_do_not_match(labels, path));
    }
    errors.extend(validate_pod_template(template, path));
    errors.extend(validate_runs_for_ever(template, "ReplicaSet", path));
    errors
}

/// The error of a template whose pods its owner would not find.
pub fn labels_do_not_match(labels: &Value, path: &Path) -> FieldError {
    FieldError::invalid(
        &path.child("metadata").child("labels"),
        labels.clone(),
        "`selector` does not match template `labels`",
    )
}

/// Validates labels and annotations of a template.
pub fn validate_template_marks(template: &Value, path: &Path) -> FieldErrors {
    let (metadata, spec) = (&template["metadata"], &template["spec"]);
    let mut errors = validate_labels(&metadata["labels"], &path.child("labels"));
    errors.extend(validate_annotations(&metadata["annotations"], &path.child("annotations")));
    errors.extend(crate::kinds::core::pod::validate_annotations(
        metadata,
        None,
        spec,
        &path.child("annotations"),
    ));
    errors
}

/// Validates a `PodTemplateSpec` wherever it occurs.
pub fn validate_pod_template(template: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_template_marks(template, path);
    let (metadata, spec) = (&template["metadata"], &template["spec"]);
    let path = path.child("spec");
    errors.extend(crate::kinds::core::pod::validate_spec(spec, None, &path));
    errors.extend(crate::kinds::core::pod::validate_profiles_match(metadata, spec, &path));
    if !list(spec, "ephemeralContainers").is_empty() {
        errors.push(FieldError::forbidden(
            &path.child("ephemeralContainers"),
            "ephemeral containers not allowed in pod template",
        ));
    }
    errors
}

/// A warning about a new workload whose name makes odd names of pods.
pub fn name_warning(object: &Value) -> Option<String> {
    let problems = crate::meta_validation::dns1123_label(crate::meta::name(object));
    (!problems.is_empty()).then(|| {
        format!(
            "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS \
             label is recommended: [{}]",
            problems.join(" ")
        )
    })
}

/// Warnings about the pods a template makes.
pub fn template_warnings(template: &Value, path: &str) -> Vec<String> {
    crate::kinds::core::pod::warnings(template, &Path::new(path))
}

/// Pods that `kind` replaces when they end neither end on their own nor have a deadline.
pub fn validate_runs_for_ever(template: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (spec, path) = (&template["spec"], path.child("spec"));
    let policy = text(spec, "restartPolicy");
    if policy != "Always" && !policy.is_empty() {
        errors.push(FieldError::not_supported(&path.child("restartPolicy"), policy, &["Always"]));
    }
    if present(spec, "activeDeadlineSeconds") {
        errors.push(FieldError::forbidden(
            &path.child("activeDeadlineSeconds"),
            format!("activeDeadlineSeconds in {kind} is not Supported"),
        ));
    }
    errors
}

/// A selector does not change: pods would be lost or taken over.
pub fn validate_selector_update(new: &Value, old: &Value) -> Option<FieldError> {
    let (new, old) = (&new["spec"]["selector"], &old["spec"]["selector"]);
    (new != old).then(|| {
        FieldError::invalid(&Path::new("spec").child("selector"), new.clone(), IMMUTABLE)
            .rendered_as(render_selector(new))
    })
}

/// A selector in the order of its fields' declaration.
pub fn render_selector(selector: &Value) -> String {
    let mut parts = Vec::new();
    if let Some(labels) = map(selector, "matchLabels").filter(|l| !l.is_empty()) {
        parts.push(format!("\"matchLabels\":{}", Value::Object(labels.clone())));
    }
    let expressions = list(selector, "matchExpressions");
    if !expressions.is_empty() {
        parts.push(format!("\"matchExpressions\":{}", Value::Array(expressions.to_vec())));
    }
    if selector.is_null() { "null".to_owned() } else { format!("{{{}}}", parts.join(",")) }
}

/// Counts in a status are not negative, none exceeds the replicas, and not more are available than ready; `ready` is
/// how the kind's complaint names those.
pub fn validate_counts(
    status: &Value,
    counts: &[&str],
    at_most_replicas: &[&str],
    ready: &str,
) -> FieldErrors {
    let path = Path::new("status");
    let mut errors: FieldErrors = counts.iter().filter_map(|key| not_negative(status, key, &path)).collect();
    let replicas = int(status, "replicas");
    for key in at_most_replicas {
        let count = int(status, key);
        if count > replicas {
            errors.push(FieldError::invalid(
                &path.child(key),
                count,
                "cannot be greater than status.replicas",
            ));
        }
    }
    let available = int(status, "availableReplicas");
    if available > int(status, "readyReplicas") {
        errors.push(FieldError::invalid(
            &path.child("availableReplicas"),
            available,
            format!("cannot be greater than {ready}"),
        ));
    }
    errors
}

/// The count of hash collisions only grows.
pub fn validate_collisions(new: &Value, old: &Value) -> Option<FieldError> {
    let before = old["collisionCount"].as_i64()?;
    let count = int(new, "collisionCount");
    (count < before || !present(new, "collisionCount")).then(|| {
        FieldError::invalid(&Path::new("status").child("collisionCount"), count, "cannot be decremented")
    })
}
