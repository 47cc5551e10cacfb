//! DaemonSets.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, default_field, default_text, ensure_object, int, keep, list, map, object, object_mut, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{at_most_whole, int_or_percent, not_negative, percent};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, number, shown, wide};
use crate::kinds::common::workload;
use crate::resource::{Column, Strategy};
use crate::selector::{LabelSelector, validate_label_selector};
use ferrite_json::Value;
use jiff::Timestamp;
use std::num::IntErrorKind;

/// Counts the changes of the template, in a place where old clients look for it.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

pub(in crate::kinds) struct DaemonSets;

impl Strategy for DaemonSets {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/template/spec")
    }

    fn conversion_problem(&self, object: &Value) -> Option<String> {
        let text = object["metadata"]["annotations"][TEMPLATE_GENERATION].as_str()?;
        let why = match text.parse::<i64>().err()?.kind() {
            IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        Some(format!("strconv.ParseInt: parsing {text:?}: {why}"))
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        let strategy = ensure_object(spec, "updateStrategy");
        default_text(strategy, "type", "RollingUpdate");
        if text(strategy, "type") == "RollingUpdate" {
            let rolling = ensure_object(strategy, "rollingUpdate");
            default_field(rolling, "maxUnavailable", 1);
            default_field(rolling, "maxSurge", 0);
        }
        // As upstream: both amounts have a value in the internal form, whatever the strategy is.
        if let Some(rolling) = object_mut(ensure_object(spec, "updateStrategy"), "rollingUpdate") {
            default_field(rolling, "maxUnavailable", 0);
            default_field(rolling, "maxSurge", 0);
        }
        default_field(spec, "revisionHistoryLimit", 10);
        workload::default_template(spec);
        default_text(
            ensure_object(ensure_object(object, "metadata"), "annotations"),
            TEMPLATE_GENERATION,
            "0",
        );
    }

    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
        let generation = template_generation(object).max(1);
        set_template_generation(object, generation);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        let changed = new["spec"]["template"] != old["spec"]["template"];
        set_template_generation(new, template_generation(old) + i64::from(changed));
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        // The annotation stands for a field of the spec.
        set_template_generation(new, template_generation(old));
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let (selector, selector_path) = (&spec["selector"], path.child("selector"));
        let mut errors = validate_label_selector(selector, &selector_path);
        let (template, template_path) = (&spec["template"], path.child("template"));
        let labels = &template["metadata"]["labels"];
        if LabelSelector::from_value(selector).is_ok_and(|s| !s.matches(&labels.as_object())) {
            errors.push(workload::labels_do_not_match(labels, &template_path));
        }
        let empty = map(selector, "matchLabels").is_none_or(ferrite_json::Map::is_empty)
            && list(selector, "matchExpressions").is_empty();
        if selector.is_object() && empty {
            errors.push(
                FieldError::invalid(
                    &selector_path,
                    selector.clone(),
                    "empty selector is invalid for daemonset",
                )
                .rendered_as("{}"),
            );
        }
        errors.extend(workload::validate_pod_template(template, &template_path));
        errors.extend(workload::validate_runs_for_ever(template, "DaemonSet", &template_path));
        errors.extend(not_negative(spec, "minReadySeconds", &path));
        errors.extend(validate_strategy(&spec["updateStrategy"], &path.child("updateStrategy")));
        errors.extend(not_negative(spec, "revisionHistoryLimit", &path));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors: FieldErrors = workload::validate_selector_update(new, old).into_iter().collect();
        errors.extend(self.validate(new));
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let (status, path) = (&new["status"], Path::new("status"));
        let mut errors: FieldErrors = [
            "currentNumberScheduled",
            "numberMisscheduled",
            "desiredNumberScheduled",
            "numberReady",
            "observedGeneration",
            "updatedNumberScheduled",
            "numberAvailable",
            "numberUnavailable",
            "collisionCount",
        ]
        .iter()
        .filter_map(|key| not_negative(status, key, &path))
        .collect();
        errors.extend(workload::validate_collisions(status, &old["status"]));
        errors
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        workload::template_warnings(&object["spec"]["template"], "spec.template")
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn hidden_annotations(&self) -> &'static [&'static str] {
        &[TEMPLATE_GENERATION]
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                number("Desired"),
                number("Current"),
                number("Ready"),
                number("Up-to-date"),
                number("Available"),
                shown("Node Selector"),
                shown("Age"),
                wide("Containers"),
                wide("Images"),
                wide("Selector"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let count = |key: &str| int(status, key).into();
        let mut cells = vec![
            cell::name(object),
            count("desiredNumberScheduled"),
            count("currentNumberScheduled"),
            count("numberReady"),
            count("updatedNumberScheduled"),
            count("numberAvailable"),
            cell::labels(map(&spec["template"]["spec"], "nodeSelector")),
            cell::age(object, now),
        ];
        cells.extend(workload::wide_cells(spec));
        cells
    }
}

fn template_generation(set: &Value) -> i64 {
    set["metadata"]["annotations"][TEMPLATE_GENERATION].as_str().and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn set_template_generation(set: &mut Value, generation: i64) {
    ensure_object(ensure_object(set, "metadata"), "annotations")[TEMPLATE_GENERATION] =
        generation.to_string().into();
}

fn validate_strategy(strategy: &Value, path: &Path) -> FieldErrors {
    match text(strategy, "type") {
        "OnDelete" => Vec::new(),
        "RollingUpdate" => {
            let path = path.child("rollingUpdate");
            match object(strategy, "rollingUpdate") {
                Some(rolling) => validate_rolling_update(rolling, &path),
                None => vec![FieldError::required(&path, "")],
            }
        }
        _ => vec![
            FieldError::not_supported(path, strategy.clone(), &["RollingUpdate", "OnDelete"])
                .rendered_as(go::compact("DaemonSetUpdateStrategy", strategy)),
        ],
    }
}

/// Either pods go before their successors come, or the other way round.
fn validate_rolling_update(rolling: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["maxUnavailable", "maxSurge"] {
        errors.extend(int_or_percent(&rolling[key], &path.child(key)));
    }
    for key in ["maxUnavailable", "maxSurge"] {
        errors.extend(at_most_whole(&rolling[key], &path.child(key)));
    }
    // A text that is neither a share nor a number counts as nothing.
    let set = |key: &str| match &rolling[key] {
        Value::String(text) => match percent(text) {
            Some(share) => share != 0,
            None => text.parse::<i64>().is_ok_and(|number| number != 0),
        },
        number => number.as_i64().unwrap_or(0) != 0,
    };
    match (set("maxUnavailable"), set("maxSurge")) {
        (true, true) => errors.push(FieldError::invalid(
            &path.child("maxSurge"),
            rolling["maxSurge"].clone(),
            "may not be set when maxUnavailable is non-zero",
        )),
        (false, false) => {
            errors.push(FieldError::required(&path.child("maxUnavailable"), "cannot be 0 when maxSurge is 0"))
        }
        _ => {}
    }
    errors
}
