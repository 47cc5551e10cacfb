//! Deployments.

use super::access::{default_field, default_text, ensure_object, int, keep, keep_metadata, text};
use super::{NAME, shown, wide, workload};
use crate::resource::{Column, Strategy};
use crate::table::age;
use jiff::Timestamp;
use serde_json::{Value, json};

pub(super) struct Deployments;

impl Strategy for Deployments {
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

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
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
