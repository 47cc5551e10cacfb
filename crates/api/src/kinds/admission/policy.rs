//! ValidatingAdmissionPolicies and MutatingAdmissionPolicies.

use super::matching::{FAILURE_POLICIES, default_matching, validate_conditions, validate_match_resources};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{default_field, ensure_object, list, object, object_mut, present, text};
use crate::kinds::cell;
use crate::kinds::check::{complaints, one_of_if_set};
use crate::kinds::row::{NAME, number, shown};
use crate::meta_validation::{dns1035_label, dns1123_subdomain, qualified_name};
use crate::resource::{Column, StatusUse, Strategy};
use ferrite_cel::is_identifier;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

const AUDIT_ANNOTATIONS_MAX: usize = 20;
const VALUE_EXPRESSION_MAX: usize = 5 * 1024;
const NOTHING_TO_CHECK: &str = "validations or auditAnnotations must contain at least one item";

pub(in crate::kinds) struct Policies {
    pub mutating: bool,
}

impl Strategy for Policies {
    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_field(spec, "failurePolicy", "Fail");
        if let Some(matching) = object_mut(spec, "matchConstraints") {
            default_matching(matching, &["resourceRules", "excludeResourceRules"]);
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_common(spec, &path);
        if self.mutating {
            errors.extend(validate_mutations(spec, &path));
        } else {
            errors.extend(validate_validations(object, spec, &path));
        }
        errors
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        if self.mutating {
            const { &[NAME, number("Mutations"), shown("ParamKind"), shown("Age")] }
        } else {
            const { &[NAME, number("Validations"), shown("ParamKind"), shown("Age")] }
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let kind = self::object(spec, "paramKind").map_or_else(
            || "<unset>".to_owned(),
            |kind| format!("{}/{}", text(kind, "apiVersion"), text(kind, "kind")),
        );
        vec![
            cell::name(object),
            cell::count(spec, if self.mutating { "mutations" } else { "validations" }),
            kind.into(),
            cell::age(object, now),
        ]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn validate_common(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if present(spec, "failurePolicy") {
        errors.extend(one_of_if_set(spec, "failurePolicy", path, FAILURE_POLICIES));
    } else {
        errors.push(FieldError::required(&path.child("failurePolicy"), ""));
    }
    if let Some(kind) = object(spec, "paramKind") {
        errors.extend(validate_param_kind(kind, &path.child("paramKind")));
    }
    let matching_path = path.child("matchConstraints");
    match object(spec, "matchConstraints") {
        None => errors.push(FieldError::required(&matching_path, "")),
        Some(matching) => {
            errors.extend(validate_match_resources(matching, &matching_path));
            // Without a rule nothing tells what the expressions are about.
            if list(matching, "resourceRules").is_empty() {
                errors.push(FieldError::required(&matching_path.child("resourceRules"), ""));
            }
        }
    }
    errors.extend(validate_conditions(list(spec, "matchConditions"), &path.child("matchConditions")));
    for (index, variable) in list(spec, "variables").iter().enumerate() {
        let path = path.child("variables").index(index);
        let name = text(variable, "name");
        if name.is_empty() {
            errors.push(FieldError::required(&path.child("name"), "name is not specified"));
        } else if !is_identifier(name) {
            errors.push(FieldError::invalid(&path.child("name"), name, "name is not a valid CEL identifier"));
        }
        if text(variable, "expression").trim().is_empty() {
            errors.push(FieldError::required(&path.child("expression"), "expression is not specified"));
        }
    }
    errors
}

fn validate_param_kind(kind: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let version = text(kind, "apiVersion");
    let at = path.child("apiVersion");
    match (version, version.matches('/').count()) {
        ("", _) => errors.push(FieldError::required(&at, "")),
        (_, 0 | 1) => {
            let (group, version_part) = version.split_once('/').unwrap_or(("", version));
            let mut complain = |value: &str, problems: Vec<String>| {
                if !problems.is_empty() {
                    errors.push(FieldError::invalid(&at, value, problems.join(",")));
                }
            };
            if !group.is_empty() {
                complain(group, dns1123_subdomain(group));
            }
            if version_part.is_empty() {
                complain(version, vec!["version must be specified".to_owned()]);
            } else {
                complain(version_part, dns1035_label(version_part));
            }
        }
        _ => errors.push(FieldError::invalid(
            &at,
            version,
            format!("unexpected GroupVersion string: {version}"),
        )),
    }
    match text(kind, "kind") {
        "" => errors.push(FieldError::required(&path.child("kind"), "")),
        name => {
            let problems = dns1035_label(&name.to_lowercase());
            if !problems.is_empty() {
                errors.push(FieldError::invalid(
                    &path.child("kind"),
                    name,
                    format!("may have mixed case, but should otherwise match: {}", problems.join(",")),
                ));
            }
        }
    }
    errors
}

fn validate_validations(policy: &Value, spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (validations, annotations) = (list(spec, "validations"), list(spec, "auditAnnotations"));
    if validations.is_empty() && annotations.is_empty() {
        for key in ["validations", "auditAnnotations"] {
            errors.push(FieldError::required(&path.child(key), NOTHING_TO_CHECK));
        }
        return errors;
    }
    for (index, validation) in validations.iter().enumerate() {
        errors.extend(validate_validation(validation, &path.child("validations").index(index)));
    }
    let path = path.child("auditAnnotations");
    if annotations.len() > AUDIT_ANNOTATIONS_MAX {
        errors.push(FieldError::invalid(
            &path,
            annotations.to_vec(),
            format!("must not have more than {AUDIT_ANNOTATIONS_MAX} auditAnnotations"),
        ));
    }
    let mut keys = HashSet::new();
    for (index, annotation) in annotations.iter().enumerate() {
        let path = path.index(index);
        let key = text(annotation, "key");
        let full = match crate::meta::name(policy) {
            "" => key.to_owned(),
            name => format!("{name}/{key}"),
        };
        errors.extend(complaints(&path.child("key"), key, qualified_name(&full)));
        match text(annotation, "valueExpression").trim() {
            "" => errors.push(FieldError::required(
                &path.child("valueExpression"),
                "valueExpression is not specified",
            )),
            expression if expression.len() > VALUE_EXPRESSION_MAX => errors
                .push(FieldError::required(&path.child("valueExpression"), "must not exceed 5kb in length")),
            _ => {}
        }
        if !keys.insert(key) {
            errors.push(FieldError::duplicate(&path.child("key"), key));
        }
    }
    errors
}

fn validate_validation(validation: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let expression = text(validation, "expression").trim();
    let message = text(validation, "message");
    let broken = |text: &str| text.contains(['\n', '\r']);
    if expression.is_empty() {
        errors.push(FieldError::required(&path.child("expression"), "expression is not specified"));
    }
    let at = path.child("message");
    if !message.is_empty() && message.trim().is_empty() {
        errors.push(FieldError::invalid(&at, message, "message must be non-empty if specified"));
    } else if broken(message.trim()) {
        errors.push(FieldError::invalid(&at, message, "message must not contain line breaks"));
    } else if broken(expression) && message.trim().is_empty() {
        errors
            .push(FieldError::required(&at, "message must be specified if expression contains line breaks"));
    }
    errors.extend(one_of_if_set(
        validation,
        "reason",
        path,
        &["Forbidden", "Invalid", "RequestEntityTooLarge", "Unauthorized"],
    ));
    errors
}

fn validate_mutations(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mutations = list(spec, "mutations");
    if mutations.is_empty() {
        errors
            .push(FieldError::required(&path.child("mutations"), "mutations must contain at least one item"));
    }
    for (index, mutation) in mutations.iter().enumerate() {
        let path = path.child("mutations").index(index);
        let kind = text(mutation, "patchType");
        let (own, other) = match kind {
            "ApplyConfiguration" => ("applyConfiguration", "jsonPatch"),
            "JSONPatch" => ("jsonPatch", "applyConfiguration"),
            "" => {
                errors.push(FieldError::required(&path.child("patchType"), ""));
                continue;
            }
            unknown => {
                errors.push(FieldError::not_supported(
                    &path.child("patchType"),
                    unknown,
                    &["ApplyConfiguration", "JSONPatch"],
                ));
                continue;
            }
        };
        match object(mutation, own) {
            None => errors.push(FieldError::required(
                &path.child(own),
                format!("must be specified when patchType is {kind}"),
            )),
            Some(patch) if text(patch, "expression").trim().is_empty() => {
                errors.push(FieldError::required(&path.child(own).child("expression"), ""));
            }
            Some(_) => {}
        }
        if present(mutation, other) {
            errors.push(FieldError::invalid(
                &path.child(other),
                "{patchType}",
                format!("must not be specified when patchType is {kind}"),
            ));
        }
    }
    match text(spec, "reinvocationPolicy") {
        "" => errors.push(FieldError::required(&path.child("reinvocationPolicy"), "")),
        _ => errors.extend(one_of_if_set(spec, "reinvocationPolicy", path, &["IfNeeded", "Never"])),
    }
    errors
}
