//! DeviceTaintRules: taints for devices that drivers did not taint themselves.

use super::allocation::validate_pool_name;
use super::resourceslice::{date_taint, default_taint, validate_taint, validate_taint_label};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, keep, list, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, conditions};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::common::volume_source::validate_driver_name;
use crate::meta_validation::dns1123_label;
use crate::resource::{Column, StatusUse, Strategy};
use crate::table::since;
use ferrite_json::Value;
use jiff::Timestamp;

const CONDITIONS_MAX: usize = 8;

pub(in crate::kinds) struct DeviceTaintRules;

impl Strategy for DeviceTaintRules {
    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn default(&self, object: &mut Value) {
        default_taint(ensure_object(ensure_object(object, "spec"), "taint"));
    }

    /// The time is that of the effect: tolerations count from there.
    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        let (is, was) = (&new["spec"]["taint"], &old["spec"]["taint"]);
        if text(is, "effect") != text(was, "effect") && text(is, "timeAdded") == text(was, "timeAdded") {
            date_taint(&mut new["spec"]["taint"]);
        }
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_spec(&object["spec"], None)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        validate_spec(&new["spec"], Some(&old["spec"]))
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let (given, path) = (list(&new["status"], "conditions"), Path::new("status").child("conditions"));
        let mut errors = conditions(given, &path);
        if given.len() > CONDITIONS_MAX {
            errors.push(FieldError::too_many(&path, given.len(), CONDITIONS_MAX));
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Key"), shown("Value"), shown("Effect"), shown("TimeAdded"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let taint = &object["spec"]["taint"];
        let added = match text(taint, "timeAdded") {
            "" => String::new(),
            time => since(time, now),
        };
        let field = |key: &str| text(taint, key).into();
        vec![
            cell::name(object),
            field("key"),
            field("value"),
            field("effect"),
            added.into(),
            cell::age(object, now),
        ]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_spec(spec: &Value, old: Option<&Value>) -> FieldErrors {
    let path = Path::new("spec");
    let (selector, selector_path) = (&spec["deviceSelector"], path.child("deviceSelector"));
    let mut errors = Vec::new();
    if let Some(driver) = selector["driver"].as_str() {
        errors.extend(validate_driver_name(driver, &selector_path.child("driver")));
    }
    if let Some(pool) = selector["pool"].as_str() {
        errors.extend(validate_pool_name(pool, &selector_path.child("pool")));
    }
    if let Some(device) = selector["device"].as_str() {
        errors.extend(complaints(&selector_path.child("device"), device, dns1123_label(device)));
    }
    let (taint, taint_path) = (&spec["taint"], path.child("taint"));
    let kept = old.is_some_and(|old| text(&old["taint"], "effect") == text(taint, "effect"));
    errors.extend(match kept {
        true => validate_taint_label(taint, &taint_path),
        false => validate_taint(taint, &taint_path),
    });
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(|error| error.path.to_string()).collect()
    }

    #[test]
    fn a_rule_selects_devices_and_taints_them() {
        let rule = |selector: Value, key: &str, effect: &str| json!({"spec": {"deviceSelector": selector, "taint": {"key": key, "effect": effect}}});
        let strategy = DeviceTaintRules;
        for (object, paths) in [
            (rule(json!({"driver": "d.example", "pool": "a/b", "device": "c"}), "k", "NoSchedule"), vec![]),
            (rule(json!(null), "x.example/k", "None"), vec![]),
            (
                rule(json!({"driver": "?", "pool": "", "device": "A"}), "k", "None"),
                vec!["spec.deviceSelector.driver", "spec.deviceSelector.pool", "spec.deviceSelector.device"],
            ),
            (rule(json!({}), "a b", "Never"), vec!["spec.taint.key", "spec.taint.effect"]),
        ] {
            assert_eq!(texts(strategy.validate(&object)), paths, "{object}");
        }
        let unknown = rule(json!({}), "k", "Later");
        assert_eq!(texts(strategy.validate_update(&unknown, &unknown)), [""; 0]);
    }

    #[test]
    fn another_effect_has_another_time() {
        let rule = |effect: &str, time: &str| json!({"spec": {"taint": {"key": "k", "effect": effect, "timeAdded": time}}, "status": {"a": 1}});
        let (old, early) = (rule("None", "2026-01-01T00:00:00Z"), "2026-01-01T00:00:00Z");
        for (effect, sent, kept) in
            [("None", early, true), ("NoExecute", early, false), ("NoExecute", "2026-01-02T00:00:00Z", true)]
        {
            let mut new = rule(effect, sent);
            DeviceTaintRules.prepare_update(&mut new, &old);
            assert_eq!(new["spec"]["taint"]["timeAdded"] == sent, kept, "{effect} {sent}");
            assert_eq!(new["status"], old["status"]);
        }
        let mut undated = json!({"spec": {"taint": {"key": "k"}}});
        DeviceTaintRules.default(&mut undated);
        assert!(undated["spec"]["taint"]["timeAdded"].is_string());
    }
}
