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

    /// A Lease that changes hands is durable, or two could believe that they hold it after a crash; so is all else but the
    /// time of the renewal.
    fn is_heartbeat(&self, new: &Value, old: &Value) -> bool {
        let (Some(new), Some(old)) = (new.as_object(), old.as_object()) else { return false };
        new.len() == old.len()
            && new.iter().all(|(key, new)| {
                let Some(old) = old.get(key) else { return false };
                match key.as_str() {
                    "metadata" => same_but(new, old, &["managedFields", "resourceVersion"]),
                    "spec" => same_but(new, old, &["renewTime"]),
                    _ => new == old,
                }
            })
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

/// Returns true if two objects have the same members except some.
fn same_but(new: &Value, old: &Value, ignored: &[&str]) -> bool {
    let (Some(new), Some(old)) = (new.as_object(), old.as_object()) else { return new == old };
    let counts = |key: &str| !ignored.contains(&key);
    new.iter().filter(|(key, _)| counts(key)).all(|(key, value)| old.get(key) == Some(value))
        && old.iter().filter(|(key, _)| counts(key)).all(|(key, _)| new.contains_key(key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn only_renewals_are_heartbeats() {
        let lease = |metadata: Value, spec: Value| {
            let mut all = json!({"kind": "Lease", "metadata": {"name": "a"}, "spec": {"holderIdentity": "h", "renewTime": "1"}});
            for (part, changes) in [("metadata", metadata), ("spec", spec)] {
                for (key, value) in changes.as_object().into_iter().flatten() {
                    all[part][key.as_str()] = value.clone();
                }
            }
            all
        };
        let old = lease(json!({"resourceVersion": "1", "managedFields": [1]}), json!({}));
        for (metadata, spec, expected) in [
            (json!({}), json!({}), true),
            (json!({"resourceVersion": "2", "managedFields": [2]}), json!({"renewTime": "2"}), true),
            (json!({"labels": {"a": "b"}}), json!({"renewTime": "2"}), false),
            (json!({"finalizers": ["a/b"]}), json!({"renewTime": "2"}), false),
            (json!({}), json!({"holderIdentity": "other"}), false),
            (json!({}), json!({"leaseDurationSeconds": 5}), false),
        ] {
            let new = lease(metadata, spec);
            assert_eq!(Leases.is_heartbeat(&new, &old), expected, "{new}");
            assert_eq!(Leases.is_heartbeat(&old, &new), expected, "back from {new}");
        }
    }
}
