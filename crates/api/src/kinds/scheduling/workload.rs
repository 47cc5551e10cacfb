//! Workloads: groups of pods that belong together, as templates.

use super::pod_group_parts::{drop_disabled, named, validate_controller, validate_policy};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, list_mut, present};
use crate::kinds::common::cell;
use crate::kinds::common::declared::{immutable, unique};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::short_name;
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

const TEMPLATES: &str = "podGroupTemplates";
const TEMPLATES_MAX: usize = 8;

pub(in crate::kinds) struct Workloads;

impl Strategy for Workloads {
    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn prepare_create(&self, object: &mut Value) {
        list_mut(&mut object["spec"], TEMPLATES).for_each(|template| drop_disabled(template, None));
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        let mut before = list(&old["spec"], TEMPLATES).iter();
        for template in list_mut(&mut new["spec"], TEMPLATES) {
            drop_disabled(template, before.next());
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = Vec::new();
        if present(spec, "controllerRef") {
            errors.extend(validate_controller(&spec["controllerRef"], &path.child("controllerRef")));
        }
        let (templates, path) = (list(spec, TEMPLATES), path.child(TEMPLATES));
        let count = validate_count(templates, &path);
        if count.is_some() {
            errors.extend(count);
            return errors;
        }
        // The order in which upstream declares them.
        errors.extend(unique(
            templates,
            "name",
            &["name", "schedulingPolicy", "schedulingConstraints!"],
            &path,
        ));
        for (index, template) in templates.iter().enumerate() {
            let path = path.index(index);
            errors.extend(named(template, "name", &path, short_name));
            errors.extend(validate_policy(&template["schedulingPolicy"], &path.child("schedulingPolicy")));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let changed = |field: &str| new["spec"][field] != old["spec"][field];
        let mut errors = Vec::new();
        if changed("controllerRef") {
            errors.push(immutable(&path.child("controllerRef")));
        }
        if changed(TEMPLATES) {
            let path = path.child(TEMPLATES);
            errors.push(immutable(&path));
            errors.extend(validate_count(list(&new["spec"], TEMPLATES), &path));
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), cell::age(object, now)]
    }
}

fn validate_count(templates: &[Value], path: &Path) -> Option<FieldError> {
    match templates.len() {
        0 => Some(FieldError::required(path, "")),
        1..=TEMPLATES_MAX => None,
        count => Some(FieldError::too_many(path, count, TEMPLATES_MAX)),
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
    fn a_workload_has_templates_with_names() {
        let template = |name: &str| json!({"name": name, "schedulingPolicy": {"basic": {}}});
        let errors = |templates: Value| texts(Workloads.validate(&json!({"spec": {TEMPLATES: templates}})));
        assert_eq!(errors(json!([template("a"), template("b")])), [""; 0]);
        assert_eq!(errors(json!([])), ["spec.podGroupTemplates: Required value"]);
        assert_eq!(
            errors(vec![template("a"); 9].into()),
            ["spec.podGroupTemplates: Too many: 9: must have at most 8 items"]
        );
        assert_eq!(
            errors(json!([template("a"), template("a")])),
            [
                r#"spec.podGroupTemplates[1]: Duplicate value: {"name":"a","schedulingPolicy":{"basic":{}},"schedulingConstraints":null}"#
            ]
        );
        assert_eq!(
            errors(json!([{}])),
            [
                "spec.podGroupTemplates[0].name: Required value",
                "spec.podGroupTemplates[0].schedulingPolicy: Invalid value: \"\": must specify one of: `basic`, `gang`",
            ]
        );
        let controller =
            json!({"spec": {TEMPLATES: [template("a")], "controllerRef": {"apiGroup": "A", "kind": "a/b"}}});
        let paths: Vec<String> =
            Workloads.validate(&controller).iter().map(|error| error.path.to_string()).collect();
        assert_eq!(
            paths,
            ["spec.controllerRef.apiGroup", "spec.controllerRef.kind", "spec.controllerRef.name"]
        );
    }

    #[test]
    fn a_workload_stays_as_it_is() {
        let workload = |name: &str| json!({"spec": {TEMPLATES: [{"name": name, "priority": 1}]}});
        let mut created = workload("a");
        Workloads.prepare_create(&mut created);
        assert_eq!(created["spec"][TEMPLATES], json!([{"name": "a"}]));
        assert_eq!(texts(Workloads.validate_update(&created, &created)), [""; 0]);
        let mut changed = workload("b");
        Workloads.prepare_update(&mut changed, &created);
        assert_eq!(
            texts(Workloads.validate_update(&changed, &created)),
            ["spec.podGroupTemplates: Invalid value: null: field is immutable"]
        );
    }
}
