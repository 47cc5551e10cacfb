//! StorageVersionMigrations: orders to write the objects of a resource in the version in which they are stored now.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{self, IMMUTABLE};
use crate::kinds::common::row::shown;
use crate::meta_validation::{dns1035_label, dns1123_subdomain};
use crate::resource::{Column, StatusUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct StorageVersionMigrations;

const SUCCEEDED: &str = "Succeeded";
const FAILED: &str = "Failed";

impl Strategy for StorageVersionMigrations {
    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        Some(if subresource == Some("status") { &["metadata", "spec"] } else { &["status"] })
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec").child("resource");
        let named = &object["spec"]["resource"];
        let (resource, group) = (text(named, "resource"), text(named, "group"));
        let mut errors = Vec::new();
        let resource_path = path.child("resource");
        if resource.is_empty() {
            errors.push(FieldError::required(&resource_path, "resource is required to be set"));
        } else {
            errors.extend(joined(&resource_path, resource, dns1035_label(resource)));
        }
        if !group.is_empty() {
            errors.extend(joined(&path.child("group"), group, dns1123_subdomain(group)));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        if new["spec"] != old["spec"] {
            errors.push(FieldError::invalid(&Path::new("spec"), new["spec"].clone(), IMMUTABLE));
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("status");
        let (version_path, conditions_path) = (path.child("resourceVersion"), path.child("conditions"));
        let (status, before) = (&new["status"], &old["status"]);
        let (version, was) = (text(status, "resourceVersion"), text(before, "resourceVersion"));
        let mut errors = Vec::new();
        if !version.is_empty() && !is_version(version) {
            let why = format!("resource version is not well formed: {version}");
            errors.push(FieldError::invalid(&version_path, version, why));
        }
        errors.extend(check::conditions(list(status, "conditions"), &conditions_path));
        if !was.is_empty() && was != version {
            errors.push(FieldError::invalid(&version_path, version, IMMUTABLE));
        }
        let has = |kind| cell::has_condition(status, kind);
        let had = |kind| cell::has_condition(before, kind);
        let mut wrong = |why: &str| {
            errors.push(FieldError::invalid(&conditions_path, status["conditions"].clone(), why));
        };
        if has(SUCCEEDED) && has(FAILED) {
            wrong("Both success and failed conditions cannot be true at the same time");
        }
        if had(SUCCEEDED) && !has(SUCCEEDED) {
            wrong("Success condition cannot be set to false once it is true");
        }
        if had(FAILED) && !has(FAILED) {
            wrong("Failed condition cannot be set to false once it is true");
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[shown("Name"), shown("Resource"), shown("Status")] }
    }

    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        let named = &object["spec"]["resource"];
        let (resource, group) = (text(named, "resource"), text(named, "group"));
        let resource = if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") };
        let conditions = list(&object["status"], "conditions");
        let is_known = |kind: &&str| ["Running", FAILED, SUCCEEDED].contains(kind);
        // The last one that holds.
        let mut state = conditions.iter().filter(|c| text(c, "status") == "True").map(|c| text(c, "type"));
        let state = state.rfind(is_known).unwrap_or("Unknown");
        vec![cell::name(object), resource.into(), state.into()]
    }
}

fn joined(path: &Path, value: &str, problems: Vec<String>) -> Option<FieldError> {
    (!problems.is_empty()).then(|| FieldError::invalid(path, value, problems.join(",")))
}

/// A positive number without zeros before it.
fn is_version(text: &str) -> bool {
    !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_resource_is_named_for_good() {
        let migration = |group: &str, resource: &str| json!({"spec": {"resource": {"group": group, "resource": resource}}});
        let strategy = StorageVersionMigrations;
        assert!(strategy.validate(&migration("apps", "deployments")).is_empty());
        assert!(strategy.validate(&migration("", "pods")).is_empty());
        let missing = texts(strategy.validate(&migration("", "")));
        assert_eq!(missing, ["spec.resource.resource: Required value: resource is required to be set"]);
        for (group, resource, path) in
            [("Apps", "deployments", "spec.resource.group"), ("", "1pods", "spec.resource.resource")]
        {
            let errors = texts(strategy.validate(&migration(group, resource)));
            assert!(errors.len() == 1 && errors[0].starts_with(path), "{errors:?}");
        }
        let changed = texts(strategy.validate_update(&migration("", "pods"), &migration("", "secrets")));
        assert!(changed.len() == 1 && changed[0].ends_with("field is immutable"), "{changed:?}");
    }

    #[test]
    fn the_end_of_a_migration_is_final() {
        let condition = |kind: &str, status: &str| {
            json!({"type": kind, "status": status, "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let with = |version: &str, conditions: &[(&str, &str)]| {
            let conditions: Vec<_> =
                conditions.iter().map(|(kind, status)| condition(kind, status)).collect();
            json!({"status": {"resourceVersion": version, "conditions": conditions}})
        };
        for (old, new, problem) in [
            (with("", &[]), with("12", &[("Running", "True")]), None),
            (with("12", &[]), with("12", &[("Succeeded", "True")]), None),
            (with("", &[]), with("012", &[]), Some("resource version is not well formed: 012")),
            (with("", &[]), with("0", &[]), Some("resource version is not well formed: 0")),
            (with("12", &[]), with("13", &[]), Some("field is immutable")),
            (with("", &[]), with("", &[("Succeeded", "True"), ("Failed", "True")]), Some("at the same time")),
            (with("", &[("Succeeded", "True")]), with("", &[]), Some("Success condition cannot be set")),
            (
                with("", &[("Failed", "True")]),
                with("", &[("Failed", "False")]),
                Some("Failed condition cannot"),
            ),
        ] {
            let errors = texts(StorageVersionMigrations.validate_status_update(&new, &old));
            assert_eq!(errors.len(), usize::from(problem.is_some()), "{errors:?}");
            assert!(problem.is_none_or(|problem| errors[0].contains(problem)), "{errors:?}");
        }
    }

    #[test]
    fn a_table_shows_the_last_condition_that_holds() {
        let object = json!({"metadata": {"name": "m"}, "spec": {"resource": {"group": "g.io", "resource": "r"}},
            "status": {"conditions": [{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]}});
        let cells = StorageVersionMigrations.cells(&object, Timestamp::UNIX_EPOCH);
        assert_eq!(cells, [json!("m"), json!("r.g.io"), json!("Succeeded")]);
    }
}
