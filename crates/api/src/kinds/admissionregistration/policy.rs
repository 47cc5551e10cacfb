//! ValidatingAdmissionPolicies and MutatingAdmissionPolicies.

use super::matching::{
    FAILURE_POLICIES, default_matching, validate_conditions, validate_match_resources, validate_mutable,
};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, list, object, object_mut, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, conditions, one_of_if_set};
use crate::kinds::common::row::{NAME, number, shown};
use crate::meta_validation::{dns1035_label, dns1123_subdomain, qualified_name};
use crate::policy::{self, Compiler, ExpressionError, MAX_VARIABLE_LEVELS, Use};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
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
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn knows_finalizers(&self) -> bool {
        false
    }

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
        self.validate_change(object, None)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        self.validate_change(new, Some(old))
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate_status(&new["status"], &Path::new("status"))
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

impl Policies {
    fn validate_change(&self, object: &Value, old: Option<&Value>) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let (mut errors, mut compiler) =
            validate_common(spec, old.map(|old| &old["spec"]), self.mutating, &path);
        errors.extend(match self.mutating {
            true => validate_mutations(spec, &mut compiler, &path),
            false => validate_validations(object, spec, &mut compiler, &path),
        });
        errors
    }
}

/// `old` is the stored object, if there is one.
fn validate_common(
    spec: &Value,
    old: Option<&Value>,
    mutating: bool,
    path: &Path,
) -> (FieldErrors, Compiler) {
    let mut errors = Vec::new();
    if present(spec, "failurePolicy") {
        errors.extend(one_of_if_set(spec, "failurePolicy", path, FAILURE_POLICIES));
    } else {
        errors.push(FieldError::required(&path.child("failurePolicy"), ""));
    }
    let kind = object(spec, "paramKind");
    if let Some(kind) = kind {
        errors.extend(validate_param_kind(kind, &path.child("paramKind")));
    }
    let matching_path = path.child("matchConstraints");
    match object(spec, "matchConstraints") {
        None => errors.push(FieldError::required(&matching_path, "")),
        Some(matching) => {
            errors.extend(validate_match_resources(matching, &matching_path));
            // Without a rule the type of the expressions' objects is unknown.
            if list(matching, "resourceRules").is_empty() {
                errors.push(FieldError::required(&matching_path.child("resourceRules"), ""));
            }
            if mutating {
                errors.extend(validate_mutable(matching, &matching_path));
            }
        }
    }
    // As upstream: unchanged conditions are not validated again.
    let same = |key: &str| old.is_some_and(|old| old.get(key) == spec.get(key));
    if !(same("paramKind") && same("matchConditions")) {
        let at = path.child("matchConditions");
        errors.extend(validate_conditions(list(spec, "matchConditions"), kind.is_some(), &at));
    }
    let variables = list(spec, "variables");
    let mut compiler = match mutating || !variables.is_empty() {
        true => Compiler::composed(kind.is_some()),
        false => Compiler::plain(kind.is_some()),
    };
    let mut programs = Vec::new();
    for (index, variable) in variables.iter().enumerate() {
        let path = path.child("variables").index(index);
        let (name, expression) = (text(variable, "name"), text(variable, "expression"));
        if name.trim().is_empty() {
            errors.push(FieldError::required(&path.child("name"), "name is not specified"));
        } else if !is_identifier(name) {
            errors.push(FieldError::invalid(&path.child("name"), name, "must be a valid CEL identifier"));
        }
        let at = path.child("expression");
        if expression.trim().is_empty() {
            errors.push(FieldError::required(&at, "expression is not specified"));
            continue;
        }
        match compiler.add_variable(name, expression) {
            Ok(program) => programs.push((name, program)),
            Err(error) => errors.push(fault(&at, expression, error)),
        }
    }
    if policy::nesting(programs.iter().map(|(name, program)| (*name, Some(program)))) > MAX_VARIABLE_LEVELS {
        errors.push(FieldError::forbidden(&path.child("variables"), "variables read one another too deeply"));
    }
    (errors, compiler)
}

/// The fault of an expression that stands at `path`.
pub(super) fn fault(path: &Path, expression: &str, error: ExpressionError) -> FieldError {
    match error {
        ExpressionError::Invalid(detail) => FieldError::invalid(path, expression, detail),
        ExpressionError::Internal(detail) => FieldError::internal(path, detail),
    }
}

/// Compiles `expression`, only to see whether it can be.
fn compiles(
    compiler: &mut Compiler,
    of: Use,
    expression: &str,
    shown: &str,
    path: &Path,
) -> Option<FieldError> {
    compiler.compile(of, expression).err().map(|error| fault(path, shown, error))
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

fn validate_validations(policy: &Value, spec: &Value, compiler: &mut Compiler, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (validations, annotations) = (list(spec, "validations"), list(spec, "auditAnnotations"));
    if validations.is_empty() && annotations.is_empty() {
        for key in ["validations", "auditAnnotations"] {
            errors.push(FieldError::required(&path.child(key), NOTHING_TO_CHECK));
        }
        return errors;
    }
    for (index, validation) in validations.iter().enumerate() {
        errors.extend(validate_validation(validation, compiler, &path.child("validations").index(index)));
    }
    let path = path.child("auditAnnotations");
    if annotations.len() > AUDIT_ANNOTATIONS_MAX {
        let why = format!("must not have more than {AUDIT_ANNOTATIONS_MAX} auditAnnotations");
        let shown = annotations.iter().map(|annotation| {
            let [key, value] = ["key", "valueExpression"].map(|field| Value::from(text(annotation, field)));
            format!("{{\"Key\":{key},\"ValueExpression\":{value}}}")
        });
        let shown = format!("[{}]", shown.collect::<Vec<_>>().join(","));
        errors.push(FieldError::invalid(&path, annotations.to_vec(), why).rendered_as(shown));
    }
    let mut keys = HashSet::new();
    for (index, annotation) in annotations.iter().enumerate() {
        let path = path.index(index);
        let key = text(annotation, "key");
        match crate::meta::name(policy) {
            "" => errors.push(FieldError::invalid(
                &path.child("key"),
                key,
                "requires metadata.name be non-empty",
            )),
            name => {
                let full = format!("{name}/{key}");
                errors.extend(complaints(&path.child("key"), &full, qualified_name(&full)));
            }
        }
        let at = path.child("valueExpression");
        let expression = text(annotation, "valueExpression");
        match expression.trim() {
            "" => errors.push(FieldError::required(&at, "valueExpression is not specified")),
            trimmed if trimmed.len() > VALUE_EXPRESSION_MAX => errors.push(FieldError::required(
                &at,
                format!("must not exceed {VALUE_EXPRESSION_MAX} bytes in length"),
            )),
            trimmed => errors.extend(compiles(compiler, Use::AuditAnnotation, trimmed, expression, &at)),
        }
        if !keys.insert(key) {
            errors.push(FieldError::duplicate(&path.child("key"), key));
        }
    }
    errors
}

fn validate_validation(validation: &Value, compiler: &mut Compiler, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (expression, at) = (text(validation, "expression"), path.child("expression"));
    match expression.trim() {
        "" => errors.push(FieldError::required(&at, "expression is not specified")),
        _ => errors.extend(compiles(compiler, Use::Validation, expression, expression, &at)),
    }
    let (expression, at) = (text(validation, "messageExpression"), path.child("messageExpression"));
    if !expression.trim().is_empty() {
        errors.extend(compiles(compiler, Use::Message, expression, expression, &at));
    } else if !expression.is_empty() {
        errors.push(FieldError::invalid(&at, expression, "must be non-empty if specified"));
    }
    let (message, at) = (text(validation, "message"), path.child("message"));
    if !message.is_empty() && message.trim().is_empty() {
        errors.push(FieldError::invalid(&at, message, "must be non-empty if specified"));
    } else if message.trim().contains(['\n', '\r']) {
        errors.push(FieldError::invalid(&at, message, "must not contain line breaks"));
    }
    errors.extend(one_of_if_set(
        validation,
        "reason",
        path,
        &["Forbidden", "Invalid", "RequestEntityTooLarge"],
    ));
    errors
}

fn validate_mutations(spec: &Value, compiler: &mut Compiler, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mutations = list(spec, "mutations");
    if mutations.is_empty() {
        errors
            .push(FieldError::required(&path.child("mutations"), "mutations must contain at least one item"));
    }
    for (index, mutation) in mutations.iter().enumerate() {
        let path = path.child("mutations").index(index);
        let kind = text(mutation, "patchType");
        let (own, other, of) = match kind {
            "ApplyConfiguration" => ("applyConfiguration", "jsonPatch", Use::ApplyConfiguration),
            "JSONPatch" => ("jsonPatch", "applyConfiguration", Use::JsonPatch),
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
        let at = path.child(own).child("expression");
        match object(mutation, own).map(|patch| text(patch, "expression").trim()) {
            None => errors.push(FieldError::required(
                &path.child(own),
                format!("must be specified when patchType is {kind}"),
            )),
            Some("") => errors.push(FieldError::required(&at, "")),
            Some(expression) => errors.extend(compiles(compiler, of, expression, expression, &at)),
        }
        if present(mutation, other) {
            errors.push(FieldError::invalid(
                &path.child(other),
                format!("{{{other}}}"),
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

fn validate_status(status: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let conditions_path = path.child("conditions");
    let path = path.child("typeChecking").child("expressionWarnings");
    for (index, warning) in list(&status["typeChecking"], "expressionWarnings").iter().enumerate() {
        let path = path.index(index);
        if text(warning, "warning").is_empty() {
            errors.push(FieldError::required(&path.child("warning"), ""));
        }
        if text(warning, "fieldRef").trim().is_empty() {
            errors.push(FieldError::required(&path.child("fieldRef"), ""));
        }
    }
    errors.extend(conditions(list(status, "conditions"), &conditions_path));
    errors
}
