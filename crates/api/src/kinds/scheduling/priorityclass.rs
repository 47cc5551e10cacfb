//! PriorityClasses.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, int, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{immutable, one_of};
use crate::kinds::common::row::{NAME, boolean, number, shown};
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

/// Above this, priorities are the system's own.
const USER_MAX: i64 = 1_000_000_000;
const SYSTEM: [(&str, i64); 2] =
    [("system-node-critical", 2_000_001_000), ("system-cluster-critical", 2_000_000_000)];

pub(in crate::kinds) struct PriorityClasses;

impl Strategy for PriorityClasses {
    fn default(&self, object: &mut Value) {
        default_field(object, "preemptionPolicy", "PreemptLowerPriority");
    }

    fn undeletable(&self, name: &str) -> Option<&'static str> {
        let is_system = SYSTEM.iter().any(|(known, _)| *known == name);
        is_system.then_some("this is a system priority class and cannot be deleted")
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (name, value) = (crate::meta::name(object), int(object, "value"));
        let mut errors = Vec::new();
        if name.starts_with("system-") {
            let path = Path::new("metadata").child("name");
            let reserved = |why: String| {
                FieldError::forbidden(
                    &path,
                    format!(
                        "priority class names with 'system-' prefix are reserved for system use only. error: {why}"
                    ),
                )
            };
            match SYSTEM.iter().find(|(known, _)| *known == name) {
                Some((_, fixed)) if *fixed != value => {
                    errors.push(reserved(format!("value of {name} PriorityClass must be {fixed}")));
                }
                Some(_) if object["globalDefault"] == true => {
                    errors.push(reserved(format!("globalDefault of {name} PriorityClass must be false")));
                }
                Some(_) => {}
                None => errors.push(reserved(format!("{name} is not a known system priority class"))),
            }
        } else if value > USER_MAX {
            errors.push(FieldError::forbidden(
                &Path::new("value"),
                format!("maximum allowed value of a user defined priority is {USER_MAX}"),
            ));
        }
        if present(object, "preemptionPolicy") {
            errors.extend(one_of(
                object,
                "preemptionPolicy",
                &Path::default(),
                &["PreemptLowerPriority", "Never"],
            ));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        if int(new, "value") != int(old, "value") {
            errors.push(FieldError::forbidden(&Path::new("value"), "may not be changed in an update."));
        }
        errors.extend(immutable(
            &new["preemptionPolicy"],
            &old["preemptionPolicy"],
            &Path::new("preemptionPolicy"),
        ));
        errors
    }

    /// Its value does not change, so that its generation stays the first.
    fn generation_fields(&self) -> &'static [&'static str] {
        &["value"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, number("Value"), boolean("Global-Default"), shown("Age"), shown("PreemptionPolicy")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            cell::name(object),
            int(object, "value").into(),
            cell::boolean(object, "globalDefault"),
            cell::age(object, now),
            text(object, "preemptionPolicy").into(),
        ]
    }
}
