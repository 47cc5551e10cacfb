//! Leases.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, present, remove, text};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::qualified_name;
use crate::resource::{Column, Strategy};
use crate::table::age;
use ferrite_json::Value;
use jiff::Timestamp;

const COORDINATED: [&str; 2] = ["strategy", "preferredHolder"];

pub(in crate::kinds) struct Leases;

impl Strategy for Leases {
    fn knows_finalizers(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    /// Coordinated leader election is off unless asked for, and with it the fields that belong to it.
    fn prepare_create(&self, object: &mut Value) {
        for key in COORDINATED {
            remove(ensure_object(object, "spec"), key);
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if COORDINATED.iter().all(|key| !present(&old["spec"], key)) {
            self.prepare_create(new);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let spec = &object["spec"];
        let mut errors = Vec::new();
        if let Some(seconds) = spec["leaseDurationSeconds"].as_i64()
            && seconds <= 0
        {
            errors.push(FieldError::invalid(
                &path.child("leaseDurationSeconds"),
                seconds,
                "must be greater than 0",
            ));
        }
        if let Some(transitions) = spec["leaseTransitions"].as_i64()
            && transitions < 0
        {
            errors.push(FieldError::invalid(
                &path.child("leaseTransitions"),
                transitions,
                "must be greater than or equal to 0",
            ));
        }
        if let Some(strategy) = spec["strategy"].as_str()
            && strategy != "OldestEmulationVersion"
        {
            let path = path.child("strategy");
            errors.extend(
                qualified_name(strategy).into_iter().map(|p| FieldError::invalid(&path, strategy, p)),
            );
        }
        if !text(spec, "preferredHolder").is_empty() && text(spec, "strategy").is_empty() {
            errors.push(FieldError::forbidden(
                &path.child("preferredHolder"),
                "may only be specified when `strategy` is defined",
            ));
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Holder"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            crate::meta::name(object).into(),
            text(&object["spec"], "holderIdentity").into(),
            age(object, now).into(),
        ]
    }

    fn create_on_update(&self) -> bool {
        true
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}
