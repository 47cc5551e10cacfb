//! Parts that PodGroups and the templates of Workloads have in common.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{present, remove, text};
use crate::kinds::common::check::complaints;
use crate::kinds::common::declared::{one_member, required_at_least};
use crate::meta_validation::{long_name, path_segment, short_name};
use ferrite_json::Value;

/// Fields of features that are off: each is dropped unless the former object has it.
const DISABLED: [&str; 5] =
    ["schedulingConstraints", "resourceClaims", "disruptionMode", "priorityClassName", "priority"];

/// Drops the fields of features that are off.
pub(super) fn drop_disabled(group: &mut Value, old: Option<&Value>) {
    if !group.is_object() {
        return;
    }
    for field in DISABLED {
        if old.is_none_or(|old| !present(old, field)) {
            remove(group, field);
        }
    }
}

/// The policy by which the pods of a group are scheduled.
pub(super) fn validate_policy(policy: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = one_member(policy, None, &["basic", "gang"], path).into_iter().collect();
    if present(policy, "gang") {
        errors.extend(required_at_least(&policy["gang"], "minCount", 1, &path.child("gang")));
    }
    errors
}

/// The template of which a group was made.
pub(super) fn validate_template_reference(reference: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = one_member(reference, None, &["workload"], path).into_iter().collect();
    if present(reference, "workload") {
        let (workload, path) = (&reference["workload"], path.child("workload"));
        errors.extend(named(workload, "workloadName", &path, long_name));
        errors.extend(named(workload, "podGroupTemplateName", &path, short_name));
    }
    errors
}

/// The object that made a workload.
pub(super) fn validate_controller(controller: &Value, path: &Path) -> FieldErrors {
    let group = text(controller, "apiGroup");
    let mut errors = Vec::new();
    if !group.is_empty() {
        errors.extend(complaints(&path.child("apiGroup"), group, long_name(group)));
    }
    errors.extend(named(controller, "kind", path, path_segment));
    errors.extend(named(controller, "name", path, path_segment));
    errors
}

/// A name that must be set and have a form.
pub(super) fn named(object: &Value, key: &str, path: &Path, form: fn(&str) -> Vec<String>) -> FieldErrors {
    match text(object, key) {
        "" => vec![FieldError::required(&path.child(key), "")],
        name => complaints(&path.child(key), name, form(name)),
    }
}
