//! PodDisruptionBudgets.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, int, list, present};
use crate::kinds::common::cell;
use crate::kinds::common::check::{at_most_whole, conditions, int_or_percent, not_negative, one_of_if_set};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, number, shown};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use crate::selector::validate_label_selector;
use ferrite_json::Value;
use jiff::Timestamp;

const NOT_APPLICABLE: &str = "N/A";

pub(in crate::kinds) struct PodDisruptionBudgets;

impl Strategy for PodDisruptionBudgets {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn knows_finalizers(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = Vec::new();
        let both = present(spec, "minAvailable") && present(spec, "maxUnavailable");
        if both {
            errors.push(
                FieldError::invalid(
                    &path,
                    spec.clone(),
                    "minAvailable and maxUnavailable cannot be both set",
                )
                .rendered_as(go::compact("PodDisruptionBudgetSpec", spec)),
            );
        }
        for key in ["minAvailable", "maxUnavailable"] {
            errors.extend(int_or_percent(&spec[key], &path.child(key)));
            errors.extend(at_most_whole(&spec[key], &path.child(key)));
        }
        errors.extend(validate_label_selector(&spec["selector"], &path.child("selector")));
        errors.extend(one_of_if_set(
            spec,
            "unhealthyPodEvictionPolicy",
            &path,
            &["AlwaysAllow", "IfHealthyBudget"],
        ));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let (status, path) = (&new["status"], Path::new("status"));
        let mut errors = conditions(list(status, "conditions"), &path.child("conditions"));
        for key in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
            errors.extend(not_negative(status, key, &path));
        }
        errors
    }

    fn validate_name(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Min Available"),
                shown("Max Unavailable"),
                number("Allowed Disruptions"),
                shown("Age"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        vec![
            cell::name(object),
            cell::int_or_string(&spec["minAvailable"], NOT_APPLICABLE),
            cell::int_or_string(&spec["maxUnavailable"], NOT_APPLICABLE),
            int(&object["status"], "disruptionsAllowed").into(),
            cell::age(object, now),
        ]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}
