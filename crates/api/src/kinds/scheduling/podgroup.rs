//! PodGroups: pods that are scheduled together.

use super::pod_group_parts::{drop_disabled, validate_policy, validate_template_reference};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, default_text, ensure_object, keep, list, present, remove, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::conditions;
use crate::kinds::common::declared::immutable;
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, StatusUse, Strategy, keep_all_but_status};
use crate::table::NONE;
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct PodGroups;

impl Strategy for PodGroups {
    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn default(&self, object: &mut Value) {
        default_text(ensure_object(object, "spec"), "disruptionMode", "Pod");
    }

    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
        drop_disabled(ensure_object(object, "spec"), None);
        // As upstream: the field is dropped, and defaulted again when the stored object is read.
        self.default(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        drop_disabled(ensure_object(new, "spec"), Some(&old["spec"]));
        self.default(new);
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep_all_but_status(new, old);
        if new["status"].is_object() && list(&old["spec"], "resourceClaims").is_empty() {
            remove(&mut new["status"], "resourceClaimStatuses");
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = Vec::new();
        if present(spec, "podGroupTemplateRef") {
            let path = path.child("podGroupTemplateRef");
            errors.extend(validate_template_reference(&spec["podGroupTemplateRef"], &path));
        }
        errors.extend(validate_policy(&spec["schedulingPolicy"], &path.child("schedulingPolicy")));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let changed = |field: &&&str| new["spec"][**field] != old["spec"][**field];
        let mut errors: FieldErrors = ["podGroupTemplateRef", "schedulingPolicy"]
            .iter()
            .filter(changed)
            .map(|field| immutable(&path.child(field)))
            .collect();
        if changed(&&"disruptionMode") {
            errors.push(FieldError::forbidden(&path.child("disruptionMode"), ""));
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        conditions(list(&new["status"], "conditions"), &Path::new("status").child("conditions"))
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Policy"), shown("Workload"), shown("Status"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, given) = (&object["spec"], list(&object["status"], "conditions"));
        let last = |kind: &str| given.iter().rfind(|condition| text(condition, "type") == kind);
        let state = match (last("DisruptionTarget"), last("PodGroupScheduled")) {
            (Some(disrupted), _) => text(disrupted, "reason"),
            (None, Some(scheduled)) if text(scheduled, "status") == "True" => "Scheduled",
            (None, Some(_)) => "Unschedulable",
            (None, None) => "Pending",
        };
        let policy = if present(&spec["schedulingPolicy"], "gang") { "Gang" } else { "Basic" };
        let workload = match present(spec, "podGroupTemplateRef") {
            true => text(&spec["podGroupTemplateRef"]["workload"], "workloadName"),
            false => NONE,
        };
        vec![cell::name(object), policy.into(), workload.into(), state.into(), cell::age(object, now)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_group_has_one_policy() {
        let errors = |spec: Value| texts(PodGroups.validate(&json!({"spec": spec})));
        let reference = |workload: Value| json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": {"workload": workload}});
        for (spec, told) in [
            (json!({"schedulingPolicy": {"gang": {"minCount": 2}}}), vec![]),
            (reference(json!({"workloadName": "w", "podGroupTemplateName": "t"})), vec![]),
            (
                json!({"schedulingPolicy": {}}),
                vec!["spec.schedulingPolicy: Invalid value: \"\": must specify one of: `basic`, `gang`"],
            ),
            (
                json!({"schedulingPolicy": {"gang": {}}}),
                vec!["spec.schedulingPolicy.gang.minCount: Required value"],
            ),
            (
                json!({"schedulingPolicy": {"gang": {"minCount": -1}}}),
                vec![
                    "spec.schedulingPolicy.gang.minCount: Invalid value: -1: must be greater than or equal to 1",
                ],
            ),
            (
                json!({"schedulingPolicy": {"basic": {}}, "podGroupTemplateRef": {}}),
                vec!["spec.podGroupTemplateRef: Invalid value: \"\": must specify one of: `workload`"],
            ),
            (
                reference(json!({})),
                vec![
                    "spec.podGroupTemplateRef.workload.workloadName: Required value",
                    "spec.podGroupTemplateRef.workload.podGroupTemplateName: Required value",
                ],
            ),
        ] {
            assert_eq!(errors(spec.clone()), told, "{spec}");
        }
    }

    #[test]
    fn fields_of_features_that_are_off_are_dropped_and_the_rest_stays() {
        let strategy = PodGroups;
        let spec =
            json!({"schedulingPolicy": {"basic": {}}, "priority": 3, "resourceClaims": [{"name": "a"}]});
        let mut created = json!({"spec": spec, "status": {"conditions": []}});
        strategy.default(&mut created);
        strategy.prepare_create(&mut created);
        assert_eq!(created, json!({"spec": {"schedulingPolicy": {"basic": {}}, "disruptionMode": "Pod"}}));
        let mut changed = created.clone();
        changed["spec"]["disruptionMode"] = "PodGroup".into();
        changed["spec"]["schedulingPolicy"] = json!({"gang": {"minCount": 1}});
        strategy.prepare_update(&mut changed, &created);
        assert_eq!(
            texts(strategy.validate_update(&changed, &created)),
            [
                "spec.schedulingPolicy: Invalid value: null: field is immutable",
                "spec.disruptionMode: Forbidden"
            ]
        );
    }

    #[test]
    fn a_table_shows_the_state_of_a_group() {
        let cells = |conditions: Value| {
            let object = json!({"metadata": {"name": "g"}, "spec": {"schedulingPolicy": {"gang": {"minCount": 1}}},
                "status": {"conditions": conditions}});
            Value::from(PodGroups.cells(&object, Timestamp::UNIX_EPOCH)[1..4].to_vec())
        };
        let scheduled = |status: &str| json!({"type": "PodGroupScheduled", "status": status, "reason": "R"});
        assert_eq!(cells(json!([])), json!(["Gang", "<none>", "Pending"]));
        assert_eq!(cells(json!([scheduled("True")])), json!(["Gang", "<none>", "Scheduled"]));
        assert_eq!(cells(json!([scheduled("False")])), json!(["Gang", "<none>", "Unschedulable"]));
        let disrupted = json!({"type": "DisruptionTarget", "status": "False", "reason": "Preempted"});
        assert_eq!(cells(json!([scheduled("True"), disrupted])), json!(["Gang", "<none>", "Preempted"]));
    }
}
