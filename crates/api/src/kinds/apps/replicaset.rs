//! ReplicaSets.

use crate::field::{FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, int, keep};
use crate::kinds::common::check::not_negative;
use crate::kinds::common::row::{NAME, number, shown, wide};
use crate::kinds::common::workload;
use crate::resource::{Column, Strategy};
use crate::table::age;
use ferrite_json::{Value, json};
use jiff::Timestamp;

pub(in crate::kinds) struct ReplicaSets;

impl Strategy for ReplicaSets {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/spec/template/spec")
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_field(spec, "replicas", 1);
        workload::default_template(spec);
        default_field(ensure_object(object, "status"), "replicas", 0);
    }

    fn prepare_create(&self, object: &mut Value) {
        object["status"] = json!({"replicas": 0});
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let spec = &object["spec"];
        let mut errors: FieldErrors =
            ["replicas", "minReadySeconds"].iter().filter_map(|key| not_negative(spec, key, &path)).collect();
        errors.extend(workload::validate_selector_and_template(spec, &path));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        errors.extend(workload::validate_selector_update(new, old));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let counts = [
            "replicas",
            "fullyLabeledReplicas",
            "readyReplicas",
            "availableReplicas",
            "observedGeneration",
            "terminatingReplicas",
        ];
        workload::validate_counts(&new["status"], &counts, &counts[1..4], "readyReplicas")
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
        let mut cells = vec![
            crate::meta::name(object).into(),
            int(spec, "replicas").into(),
            int(status, "replicas").into(),
            int(status, "readyReplicas").into(),
            age(object, now).into(),
        ];
        cells.extend(workload::wide_cells(spec));
        cells
    }
}
