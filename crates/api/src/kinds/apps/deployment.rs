//! Deployments.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, default_text, ensure_object, int, keep, keep_metadata, text,
};
use crate::kinds::common::check::{at_most_whole, int_or_percent, is_zero_share, not_negative};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::kinds::common::workload;
use crate::resource::{Column, Strategy};
use crate::table::age;
use ferrite_json::{Value, json};
use jiff::Timestamp;

pub(in crate::kinds) struct Deployments;

impl Strategy for Deployments {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/template/spec")
    }

    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        (subresource == Some("status")).then_some(&["spec", "metadata.labels"])
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_field(spec, "replicas", 1);
        default_field(spec, "revisionHistoryLimit", 10);
        default_field(spec, "progressDeadlineSeconds", 600);
        let strategy = ensure_object(spec, "strategy");
        default_text(strategy, "type", "RollingUpdate");
        if text(strategy, "type") == "RollingUpdate" {
            let rolling = ensure_object(strategy, "rollingUpdate");
            default_field(rolling, "maxUnavailable", "25%");
            default_field(rolling, "maxSurge", "25%");
        }
        workload::default_template(spec);
        ensure_object(object, "status");
    }

    fn prepare_create(&self, object: &mut Value) {
        object["status"] = json!({});
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        keep_metadata(new, old, "labels");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let spec = &object["spec"];
        let mut errors: FieldErrors = not_negative(spec, "replicas", &path).into_iter().collect();
        errors.extend(workload::validate_selector_and_template(spec, &path));
        errors.extend(validate_strategy(&spec["strategy"], &path.child("strategy")));
        errors.extend(not_negative(spec, "minReadySeconds", &path));
        errors.extend(not_negative(spec, "revisionHistoryLimit", &path));
        errors.extend(not_negative(spec, "progressDeadlineSeconds", &path));
        if let Some(deadline) = spec["progressDeadlineSeconds"].as_i64()
            && deadline <= int(spec, "minReadySeconds")
        {
            errors.push(FieldError::invalid(
                &path.child("progressDeadlineSeconds"),
                deadline,
                "must be greater than minReadySeconds",
            ));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        errors.extend(workload::validate_selector_update(new, old));
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let counts = [
            "observedGeneration",
            "replicas",
            "updatedReplicas",
            "readyReplicas",
            "availableReplicas",
            "unavailableReplicas",
            "terminatingReplicas",
            "collisionCount",
        ];
        let mut errors = workload::validate_counts(&new["status"], &counts, &counts[2..5], "readyReplicas");
        errors.extend(workload::validate_collisions(&new["status"], &old["status"]));
        errors
    }

    fn warnings_on_create(&self, object: &Value) -> Vec<String> {
        workload::name_warning(object).into_iter().chain(self.warnings(object)).collect()
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        workload::template_warnings(&object["spec"]["template"], "spec.template")
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec", "metadata.annotations"]
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Ready"),
                shown("Up-to-date"),
                shown("Available"),
                shown("Age"),
                wide("Containers"),
                wide("Images"),
                wide("Selector"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let mut cells = vec![
            crate::meta::name(object).into(),
            format!("{}/{}", int(status, "readyReplicas"), int(spec, "replicas")).into(),
            int(status, "updatedReplicas").into(),
            int(status, "availableReplicas").into(),
            age(object, now).into(),
        ];
        cells.extend(workload::wide_cells(spec));
        cells
    }
}

fn validate_strategy(strategy: &Value, path: &Path) -> FieldErrors {
    let rolling = strategy.get("rollingUpdate").filter(|r| r.is_object());
    let path_of_rolling = path.child("rollingUpdate");
    match text(strategy, "type") {
        "Recreate" => rolling
            .map(|_| {
                FieldError::forbidden(
                    &path_of_rolling,
                    "may not be specified when strategy `type` is 'Recreate'",
                )
            })
            .into_iter()
            .collect(),
        "RollingUpdate" => rolling.map_or_else(Vec::new, |r| validate_rolling_update(r, &path_of_rolling)),
        kind => vec![
            FieldError::not_supported(path, strategy.clone(), &["Recreate", "RollingUpdate"]).rendered_as(
                format!(
                    "{{\"Type\":{kind:?},\"RollingUpdate\":{}}}",
                    rolling.map_or_else(|| "null".to_owned(), |r| go::compact("RollingUpdateDeployment", r))
                ),
            ),
        ],
    }
}

fn validate_rolling_update(rolling: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["maxUnavailable", "maxSurge"] {
        errors.extend(int_or_percent(&rolling[key], &path.child(key)));
    }
    let unavailable = &rolling["maxUnavailable"];
    let path = path.child("maxUnavailable");
    if is_zero_share(unavailable) && is_zero_share(&rolling["maxSurge"]) {
        errors.push(FieldError::invalid(&path, unavailable.clone(), "may not be 0 when `maxSurge` is 0"));
    }
    errors.extend(at_most_whole(unavailable, &path));
    errors
}
