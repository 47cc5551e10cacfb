//! ReplicationControllers.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, int, map, object, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::not_negative;
use crate::kinds::common::row::{NAME, number, shown, wide};
use crate::kinds::common::workload;
use crate::meta_validation::long_name;
use crate::resource::{Column, StatusUse, Strategy};
use ferrite_json::{Text, Value};
use jiff::Timestamp;

pub(in crate::kinds) struct ReplicationControllers;

impl Strategy for ReplicationControllers {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/template/spec")
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_field(spec, "replicas", 1);
        if present(spec, "template") {
            workload::default_template(spec);
        }
        let labels = object.pointer("/spec/template/metadata/labels").cloned();
        if let Some(labels) = labels.filter(|l| l.as_object().is_some_and(|m| !m.is_empty())) {
            let empty = |parent: &Value, key: &str| map(parent, key).is_none_or(ferrite_json::Map::is_empty);
            if empty(&object["spec"], "selector") {
                object["spec"]["selector"] = labels.clone();
            }
            if empty(&object["metadata"], "labels") {
                ensure_object(object, "metadata")["labels"] = labels;
            }
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors: FieldErrors = not_negative(spec, "minReadySeconds", &path).into_iter().collect();
        let selector = map(spec, "selector").filter(|s| !s.is_empty());
        if selector.is_none() {
            errors.push(FieldError::required(&path.child("selector"), ""));
        }
        errors.extend(not_negative(spec, "replicas", &path));
        let path = path.child("template");
        let Some(template) = object_of(spec) else {
            errors.push(FieldError::required(&path, ""));
            return errors;
        };
        let labels = &template["metadata"]["labels"];
        let matches = |(key, value): (&Text, &Value)| labels.get(key) == Some(value);
        if selector.is_some_and(|s| !s.iter().all(matches)) {
            errors.push(workload::labels_do_not_match(labels, &path));
        }
        errors.extend(workload::validate_pod_template(template, &path));
        errors.extend(workload::validate_runs_for_ever(template, "ReplicationController", &path));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let counts =
            ["replicas", "fullyLabeledReplicas", "readyReplicas", "availableReplicas", "observedGeneration"];
        workload::validate_counts(&new["status"], &counts, &counts[1..4], "readyReplicas")
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        long_name(name)
    }

    fn warnings_on_create(&self, object: &Value) -> Vec<String> {
        workload::name_warning(object).into_iter().chain(self.warnings(object)).collect()
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        workload::template_warnings(&object["spec"]["template"], "spec.template")
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["status.replicas"]
    }

    fn selectable_value(&self, object: &Value, _field: &str) -> String {
        int(&object["status"], "replicas").to_string()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                number("Desired"),
                number("Current"),
                number("Ready"),
                shown("Age"),
                wide("Containers"),
                wide("Images"),
                wide("Selector"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let [names, images] = cell::containers(&spec["template"]);
        vec![
            cell::name(object),
            int(spec, "replicas").into(),
            int(status, "replicas").into(),
            int(status, "readyReplicas").into(),
            cell::age(object, now),
            names,
            images,
            cell::labels(map(spec, "selector")),
        ]
    }

    fn orphans_by_default(&self) -> bool {
        true
    }
}

fn object_of(spec: &Value) -> Option<&Value> {
    object(spec, "template")
        .filter(|t| !text(&t["spec"], "restartPolicy").is_empty() || t["spec"].is_object())
}
