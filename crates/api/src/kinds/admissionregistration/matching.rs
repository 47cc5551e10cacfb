//! Which requests a webhook or a policy is about.

use super::policy::fault;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, list, list_mut, present, strings, text};
use crate::kinds::common::check::{complaints, one_of_if_set, repeated};
use crate::meta_validation::{path_segment, qualified_name};
use crate::policy::{Compiler, Use};
use crate::selector::validate_label_selector;
use ferrite_json::Value;
use std::collections::HashSet;

const CONDITIONS_MAX: usize = 64;
const OPERATIONS: &[&str] = &["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
/// Operations with an object that a policy can change.
const MUTABLE: &[&str] = &["*", "CONNECT", "CREATE", "UPDATE"];
pub(super) const FAILURE_POLICIES: &[&str] = &["Fail", "Ignore"];
pub(super) const MATCH_POLICIES: &[&str] = &["Equivalent", "Exact"];

/// Defaults of selectors and scopes, for webhooks and for the match rules of policies alike.
pub(super) fn default_matching(object: &mut Value, rules: &[&str]) {
    default_field(object, "matchPolicy", "Equivalent");
    for key in ["namespaceSelector", "objectSelector"] {
        if !present(object, key) {
            ensure_object(object, key);
        }
    }
    for key in rules {
        for rule in list_mut(object, key) {
            default_field(rule, "scope", "*");
        }
    }
}

/// Validates the match rules of a policy or its binding.
pub(super) fn validate_match_resources(matching: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    match matching["matchPolicy"].as_str() {
        None => errors.push(FieldError::required(&path.child("matchPolicy"), "")),
        Some(_) => errors.extend(one_of_if_set(matching, "matchPolicy", path, MATCH_POLICIES)),
    }
    for key in ["namespaceSelector", "objectSelector"] {
        if present(matching, key) {
            errors.extend(validate_label_selector(&matching[key], &path.child(key)));
        } else {
            errors.push(FieldError::required(&path.child(key), ""));
        }
    }
    for key in ["resourceRules", "excludeResourceRules"] {
        for (index, rule) in list(matching, key).iter().enumerate() {
            let path = path.child(key).index(index);
            let names = strings(rule, "resourceNames");
            let again = repeated(names.iter());
            for (index, name) in names.iter().enumerate() {
                let path = path.child("resourceNames").index(index);
                errors.extend(complaints(&path, name, path_segment(name)));
                if again[index] {
                    errors.push(FieldError::duplicate(&path, *name));
                }
            }
            errors.extend(validate_rule(rule, &path));
        }
    }
    errors
}

/// Validates operations on resources.
pub(super) fn validate_rule(rule: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let alone = |key: &str, what: &str| -> Option<FieldError> {
        let values = strings(rule, key);
        if values.is_empty() {
            return Some(FieldError::required(&path.child(key), ""));
        }
        (values.len() > 1 && values.contains(&"*")).then(|| {
            FieldError::invalid(
                &path.child(key),
                values,
                format!("if '*' is present, must not specify other {what}"),
            )
        })
    };
    errors.extend(alone("operations", "operations"));
    for (index, operation) in strings(rule, "operations").into_iter().enumerate() {
        if !OPERATIONS.contains(&operation) {
            errors.push(FieldError::not_supported(
                &path.child("operations").index(index),
                operation,
                OPERATIONS,
            ));
        }
    }
    errors.extend(alone("apiGroups", "API groups"));
    errors.extend(alone("apiVersions", "API versions"));
    for (index, version) in strings(rule, "apiVersions").into_iter().enumerate() {
        if version.is_empty() {
            errors.push(FieldError::required(&path.child("apiVersions").index(index), ""));
        }
    }
    errors.extend(validate_resources(&strings(rule, "resources"), &path.child("resources")));
    errors.extend(one_of_if_set(rule, "scope", path, &["*", "Cluster", "Namespaced"]));
    errors
}

fn validate_resources(resources: &[&str], path: &Path) -> FieldErrors {
    if resources.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let mut errors = Vec::new();
    let (mut all_of, mut in_all) = (HashSet::new(), HashSet::new());
    let mut plain = false;
    for (index, resource) in resources.iter().enumerate() {
        let at = path.index(index);
        if resource.is_empty() {
            errors.push(FieldError::required(&at, ""));
        }
        if matches!(*resource, "" | "*") {
            continue;
        }
        let Some((name, sub)) = resource.split_once('/') else {
            plain = true;
            continue;
        };
        if all_of.contains(name) {
            errors.push(FieldError::invalid(
                &at,
                *resource,
                format!("if '{name}/*' is present, must not specify {resource}"),
            ));
        }
        if in_all.contains(sub) {
            errors.push(FieldError::invalid(
                &at,
                *resource,
                format!("if '*/{sub}' is present, must not specify {resource}"),
            ));
        }
        if sub == "*" {
            all_of.insert(name);
        }
        if name == "*" {
            in_all.insert(sub);
        }
    }
    if resources.len() > 1 && resources.contains(&"*/*") {
        errors.push(FieldError::invalid(
            path,
            resources.to_vec(),
            "if '*/*' is present, must not specify other resources",
        ));
    }
    if plain && resources.contains(&"*") {
        errors.push(FieldError::invalid(
            path,
            resources.to_vec(),
            "if '*' is present, must not specify other resources without subresources",
        ));
    }
    errors
}

/// Refuses rules of operations that have no object to change.
pub(super) fn validate_mutable(matching: &Value, path: &Path) -> FieldErrors {
    let path = path.child("resourceRules").child("operations");
    let operations = list(matching, "resourceRules").iter().flat_map(|rule| strings(rule, "operations"));
    let refused = operations.filter(|operation| !MUTABLE.contains(operation));
    refused.map(|operation| FieldError::not_supported(&path, operation, MUTABLE)).collect()
}

/// Validates the conditions of a webhook or a policy. With `params`, expressions may read parameters.
pub(super) fn validate_conditions(conditions: &[Value], params: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if conditions.len() > CONDITIONS_MAX {
        errors.push(FieldError::too_many(path, conditions.len(), CONDITIONS_MAX));
    }
    let mut names = HashSet::new();
    for (index, condition) in conditions.iter().enumerate() {
        let path = path.index(index);
        let at = path.child("expression");
        match text(condition, "expression").trim() {
            "" => errors.push(FieldError::required(&at, "")),
            expression => {
                let compiled = Compiler::plain(params).compile(Use::MatchCondition, expression);
                errors.extend(compiled.err().map(|error| fault(&at, expression, error)));
            }
        }
        let name = text(condition, "name");
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
            continue;
        }
        errors.extend(complaints(&path.child("name"), name, qualified_name(name)));
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path.child("name"), name));
        }
    }
    errors
}
