//! ReplicaSets.

use super::access::{default_field, ensure_object, int, keep};
use super::{NAME, number, shown, wide, workload};
use crate::resource::{Column, Strategy};
use crate::table::age;
use jiff::Timestamp;
use serde_json::{Value, json};

pub(super) struct ReplicaSets;

impl Strategy for ReplicaSets {
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
