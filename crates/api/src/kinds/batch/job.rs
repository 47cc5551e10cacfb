//! Jobs.

use super::job_rules::validate_job_spec;
use super::job_status;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, default_field, default_text, ensure_object, flag, int, keep, list, list_mut, map,
    object_mut, present, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, immutable};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::kinds::common::workload;
use crate::meta_validation::{dns1123_label, validate_labels};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::selector::{LabelSelector, validate_label_selector};
use crate::table::duration;
use ferrite_json::{Map, Value, json};
use jiff::Timestamp;

const UID_LABELS: [&str; 2] = ["batch.kubernetes.io/controller-uid", "controller-uid"];
const NAME_LABELS: [&str; 2] = ["batch.kubernetes.io/job-name", "job-name"];

pub(in crate::kinds) struct Jobs;

/// A job without labels has those of its template.
fn default_labels(object: &mut Value) {
    let labels = object.pointer("/spec/template/metadata/labels").cloned();
    // Errors in the template's labels are reported there, once.
    let usable = |l: &Value| {
        l.as_object().is_some_and(|m| !m.is_empty()) && validate_labels(l, &Path::default()).is_empty()
    };
    if let Some(labels) = labels.filter(usable)
        && map(&object["metadata"], "labels").is_none_or(Map::is_empty)
    {
        ensure_object(object, "metadata")["labels"] = labels;
    }
}

/// Indexes of an indexed Job, and pods of it at once, from which its status may not keep track of failures.
const MANY_COMPLETIONS: i64 = 100_000;
const MANY_PODS: i64 = 10_000;

/// Warnings about the specification of a Job, which may be the one that a CronJob makes.
pub(super) fn warnings_of(spec: &Value, path: &str) -> Vec<String> {
    let mut warnings = Vec::new();
    let more = |key: &str, than: i64| spec[key].as_i64().is_some_and(|number| number > than);
    if text(spec, "completionMode") == "Indexed"
        && more("completions", MANY_COMPLETIONS)
        && more("parallelism", MANY_PODS)
    {
        warnings.push(format!(
            "{path}: In Indexed Jobs with a number of completions higher than 10^5 and a parallelism higher than 10^4, \
             Kubernetes might not be able to track completedIndexes when a big number of indexes fail"
        ));
    }
    warnings.extend(workload::template_warnings(&spec["template"], &format!("{path}.template")));
    warnings
}

impl Strategy for Jobs {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/template/spec")
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_job_template(spec);
        if !present(spec, "completions") && !present(spec, "parallelism") {
            spec["completions"] = 1.into();
        }
        default_field(spec, "parallelism", 1);
        let limit = if present(spec, "backoffLimitPerIndex") { i32::MAX } else { 6 };
        default_field(spec, "backoffLimit", limit);
        default_field(spec, "completionMode", "NonIndexed");
        default_field(spec, "suspend", false);
        default_field(spec, "manualSelector", false);
        let replacement = if present(spec, "podFailurePolicy") { "Failed" } else { "TerminatingOrFailed" };
        default_field(spec, "podReplacementPolicy", replacement);
        default_labels(object);
    }

    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
        if !flag(&object["spec"], "manualSelector") {
            generate_selector(object);
            // The labels of the template, now that it has them, are the job's unless it brought some.
            default_labels(object);
        }
    }

    fn complete_default_labels(&self, object: &mut Value) {
        // As upstream: labels that were defaulted are the template's, and what is generated there is the job's, too.
        let labels = &object["spec"]["template"]["metadata"]["labels"];
        if map(&object["metadata"], "labels").is_some_and(|own| !own.is_empty())
            && labels.is_object()
            && !flag(&object["spec"], "manualSelector")
        {
            object["metadata"]["labels"] = labels.clone();
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        default_labels(new);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_generated_selector(object);
        errors.extend(validate_spec(spec, &path));
        if text(spec, "completionMode") == "Indexed" && int(spec, "completions") > 0 {
            let name = crate::meta::name(object);
            let hostname = format!("{name}-{}", int(spec, "completions") - 1);
            if !dns1123_label(&hostname).is_empty() {
                errors.push(FieldError::invalid(
                    &Path::new("metadata").child("name"),
                    name,
                    format!("will not able to create pod with invalid DNS label: {hostname}"),
                ));
            }
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let (is, was) = (&new["spec"], &old["spec"]);
        // As upstream: the specification is checked as that of a new job, and again as one that changes.
        let mut errors = self.validate(new);
        errors.extend(validate_spec(is, &path));
        errors.extend(validate_completions(is, was, &path));
        if is["selector"] != was["selector"] {
            errors.push(
                FieldError::invalid(&path.child("selector"), is["selector"].clone(), IMMUTABLE)
                    .rendered_as(workload::render_selector(&is["selector"])),
            );
        }
        let mutable = template_is_mutable(old);
        let template = match mutable {
            true => with_mutable_fields_of(&was["template"], &is["template"]),
            false => was["template"].clone(),
        };
        if mutable && is["template"]["spec"] != template["spec"] {
            errors.push(
                FieldError::invalid(&path.child("template.spec"), Value::Null, IMMUTABLE)
                    .rendered_as(go::pod_spec_in_line(&is["template"]["spec"])),
            );
        } else if !mutable && is["template"] != template {
            errors.push(
                FieldError::invalid(&path.child("template"), Value::Null, IMMUTABLE)
                    .rendered_as(go::pod_template(&is["template"])),
            );
        }
        for (key, layout) in [
            ("completionMode", ""),
            ("podFailurePolicy", "PodFailurePolicy"),
            ("backoffLimitPerIndex", ""),
            ("managedBy", ""),
            ("successPolicy", "SuccessPolicy"),
        ] {
            let changed = immutable(&is[key], &was[key], &path.child(key));
            errors.extend(changed.map(|error| match is[key].is_object() {
                true => error.rendered_as(go::compact(layout, &is[key])),
                false => error,
            }));
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        job_status::validate(new, old)
    }

    fn warnings_on_create(&self, object: &Value) -> Vec<String> {
        workload::name_warning(object).into_iter().chain(self.warnings(object)).collect()
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        warnings_of(&object["spec"], "spec")
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["status.successful"]
    }

    fn selectable_value(&self, object: &Value, _field: &str) -> String {
        int(&object["status"], "succeeded").to_string()
    }

    fn unknown_field(&self, field: &str) -> String {
        format!("field label {field:?} not supported for Job")
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Status"),
                shown("Completions"),
                shown("Duration"),
                shown("Age"),
                wide("Containers"),
                wide("Images"),
                wide("Selector"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let done = int(status, "succeeded");
        let completions = match spec["completions"].as_i64() {
            Some(wanted) => format!("{done}/{wanted}"),
            None if int(spec, "parallelism") > 1 => format!("{done}/1 of {}", int(spec, "parallelism")),
            None => format!("{done}/1"),
        };
        let time = |key: &str| text(status, key).parse::<Timestamp>().ok();
        let took = time("startTime").map_or(String::new(), |start| {
            duration(time("completionTime").unwrap_or(now).as_second() - start.as_second())
        });
        let mut cells = vec![
            cell::name(object),
            word(object).into(),
            completions.into(),
            took.into(),
            cell::age(object, now),
        ];
        cells.extend(workload::wide_cells(spec));
        cells
    }

    fn orphans_by_default(&self) -> bool {
        true
    }

    fn deletion_warning(&self) -> Option<&'static str> {
        Some(
            "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to \
             remove them or set propagationPolicy=Orphan to suppress this warning",
        )
    }
}

/// Defaults of a job's specification that its templates have too.
pub(super) fn default_job_template(spec: &mut Value) {
    workload::default_template(spec);
    if let Some(policy) = object_mut(spec, "podFailurePolicy") {
        for rule in list_mut(policy, "rules") {
            for condition in list_mut(rule, "onPodConditions") {
                default_text(condition, "status", "True");
            }
        }
    }
}

/// In one word how the job does.
fn word(job: &Value) -> &'static str {
    let has = |kind: &str| cell::has_condition(&job["status"], kind);
    if has("Complete") {
        "Complete"
    } else if has("Failed") {
        "Failed"
    } else if crate::meta::is_deleting(job) {
        "Terminating"
    } else if has("Suspended") {
        "Suspended"
    } else if has("FailureTarget") {
        "FailureTarget"
    } else if has("SuccessCriteriaMet") {
        "SuccessCriteriaMet"
    } else {
        "Running"
    }
}

/// The job's uid identifies its pods: the template carries it, and the selector asks for it.
fn generate_selector(job: &mut Value) {
    let (uid, name) = (crate::meta::uid(job).to_owned(), crate::meta::name(job).to_owned());
    let spec = ensure_object(job, "spec");
    let labels = ensure_object(ensure_object(ensure_object(spec, "template"), "metadata"), "labels");
    for (keys, value) in [(NAME_LABELS, &name), (UID_LABELS, &uid)] {
        for key in keys {
            default_field(labels, key, value.as_str());
        }
    }
    default_field(ensure_object(ensure_object(spec, "selector"), "matchLabels"), UID_LABELS[0], uid);
}

/// The generated selector may meet labels that the client has set: then they must agree.
fn validate_generated_selector(job: &Value) -> FieldErrors {
    let spec = &job["spec"];
    let mut errors = Vec::new();
    if flag(spec, "manualSelector") || spec["selector"].is_null() {
        return errors;
    }
    let (uid, name) = (crate::meta::uid(job), crate::meta::name(job));
    if uid.is_empty() {
        errors.push(FieldError::required(&Path::new("metadata").child("uid"), ""));
    }
    let labels = &spec["template"]["metadata"]["labels"];
    let path = Path::new("spec").child("template").child("metadata").child("labels");
    let expected =
        [(UID_LABELS[1], uid), (NAME_LABELS[1], name), (UID_LABELS[0], uid), (NAME_LABELS[0], name)];
    for (key, value) in expected {
        match labels[key].as_str() {
            None => errors.push(FieldError::required(&path.key(key), format!("must be '{value}'"))),
            Some(found) if found != value => {
                errors.push(FieldError::invalid(
                    &path.key(key),
                    labels.clone(),
                    format!("must be '{value}'"),
                ));
            }
            Some(_) => {}
        }
    }
    let expected: Value =
        json!(expected.iter().map(|(k, v)| ((*k).to_owned(), (*v).into())).collect::<Map>());
    if LabelSelector::from_value(&spec["selector"]).is_ok_and(|s| !s.matches(&expected.as_object())) {
        errors.push(
            FieldError::invalid(
                &Path::new("spec").child("selector"),
                spec["selector"].clone(),
                "`selector` not auto-generated",
            )
            .rendered_as(workload::render_selector(&spec["selector"])),
        );
    }
    errors
}

fn validate_spec(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_job_spec(spec, path);
    let selector = &spec["selector"];
    if selector.is_null() {
        errors.push(FieldError::required(&path.child("selector"), ""));
    } else {
        errors.extend(validate_label_selector(selector, &path.child("selector")));
    }
    let labels = &spec["template"]["metadata"]["labels"];
    if LabelSelector::from_value(selector).is_ok_and(|s| !s.matches(&labels.as_object())) {
        errors.push(workload::labels_do_not_match(labels, &path.child("template")));
    }
    errors
}

/// An indexed job may grow and shrink, if it runs all its indexes at once.
fn validate_completions(new: &Value, old: &Value, path: &Path) -> Option<FieldError> {
    if text(new, "completionMode") != "Indexed" {
        return immutable(&new["completions"], &old["completions"], &path.child("completions"));
    }
    let wanted = new["completions"].as_i64().filter(|_| new["completions"] != old["completions"])?;
    (wanted != int(new, "parallelism")).then(|| {
        FieldError::invalid(
            &path.child("completions"),
            wanted,
            format!("can only be modified in tandem with {}", path.child("parallelism")),
        )
    })
}

/// A template may change in part while the job is suspended and none of its pods runs.
fn template_is_mutable(job: &Value) -> bool {
    let status = &job["status"];
    let stopped = list(status, "conditions")
        .iter()
        .any(|c| text(c, "type") == "Suspended" && text(c, "status") == "True");
    flag(&job["spec"], "suspend") && (!present(status, "startTime") || stopped) && int(status, "active") == 0
}

/// The old template with those fields of the new one that may change: where pods are scheduled, and what their
/// containers ask for.
fn with_mutable_fields_of(old: &Value, new: &Value) -> Value {
    let mut template = old.clone();
    for key in ["annotations", "labels"] {
        keep(ensure_object(&mut template, "metadata"), &new["metadata"], key);
    }
    let pod = ensure_object(&mut template, "spec");
    for key in ["nodeSelector", "tolerations", "schedulingGates"] {
        keep(pod, &new["spec"], key);
    }
    for key in ["containers", "initContainers"] {
        let given = list(&new["spec"], key);
        if list(pod, key).len() != given.len() {
            continue;
        }
        for (container, given) in list_mut(pod, key).zip(given) {
            if container["name"] == given["name"] {
                keep(container, given, "resources");
            }
        }
    }
    let affinity = new["spec"]["affinity"]["nodeAffinity"].clone();
    if affinity.is_object() || pod["affinity"]["nodeAffinity"].is_object() {
        let of_pod = ensure_object(pod, "affinity");
        if affinity.is_object() {
            of_pod["nodeAffinity"] = affinity;
        } else {
            crate::kinds::common::access::remove(of_pod, "nodeAffinity");
        }
        if of_pod.as_object().is_some_and(Map::is_empty) && !new["spec"]["affinity"].is_object() {
            crate::kinds::common::access::remove(pod, "affinity");
        }
    }
    template
}
