//! Validity of a definition's schema: upstream's rules in upstream's words.

mod defaults;
mod expressions;
mod field_path;
mod openapi;
mod structural;

pub use field_path::{PathProblem, validate_selectable};

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, text};
use ferrite_json::Value;

/// Members that a root schema may have beside a status endpoint, as upstream lists them.
const AT_ROOT: &str = "[Description Type Format Title Maximum ExclusiveMaximum Minimum ExclusiveMinimum MaxLength MinLength Pattern MaxItems MinItems UniqueItems MultipleOf Required Items Properties ExternalDocs Example XPreserveUnknownFields XValidations]";
const ROOT_MEMBERS: &[&str] = &[
    "description",
    "type",
    "format",
    "title",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "multipleOf",
    "required",
    "items",
    "properties",
    "externalDocs",
    "example",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
];

/// The errors of a schema. `path` ends in `openAPIV3Schema`; `unchanged` schemas keep rules that cost too
/// much.
pub fn validate_schema(schema: &Value, path: &Path, has_status: bool, unchanged: bool) -> FieldErrors {
    let mut errors = Vec::new();
    if has_status {
        errors.extend(check_root(schema, path));
    }
    if flag(schema, "nullable") {
        errors.push(FieldError::forbidden(&path.child("nullable"), "nullable cannot be true at the root"));
    }
    let unsupported = structural::unsupported(schema);
    let mut compiles = false;
    if unsupported.is_none() {
        let found = structural::validate(schema, path);
        let found = if found.is_empty() { defaults::validate(schema, path) } else { found };
        compiles = found.is_empty();
        errors.extend(found);
    }
    let mut total = compiles.then(expressions::TotalCost::default);
    let root = openapi::Context::root(unchanged);
    let found = openapi::validate(schema, path, &root, total.as_mut());
    errors.extend(found.schema);
    errors.extend(found.rules);
    if errors.is_empty()
        && let Some(why) = unsupported
    {
        errors.push(FieldError::invalid(path, "", why));
    }
    if let Some(total) = total {
        errors.extend(total.errors(path));
    }
    errors
}

fn check_root(schema: &Value, path: &Path) -> Option<FieldError> {
    let type_ = text(schema, "type");
    for (key, value) in schema.as_object()? {
        if value.is_null() || *value == false {
            continue;
        }
        if key == "type" {
            if type_ != "object" {
                let why = "only \"object\" is allowed as the type at the root of the schema if the status subresource is enabled";
                return Some(FieldError::invalid(&path.child("type"), type_, why));
            }
        } else if !ROOT_MEMBERS.contains(&key.as_str()) {
            let why = format!(
                "only {AT_ROOT} fields are allowed at the root of the schema if the status subresource is enabled"
            );
            return Some(FieldError::invalid(path, schema.clone(), why));
        }
    }
    None
}

/// Formats that upstream does not know and so ignores, for a warning: each with the version that has it.
pub fn unknown_formats(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    formats(schema, &mut found);
    found.sort();
    found.dedup();
    found
}

fn formats(schema: &Value, found: &mut Vec<String>) {
    let format = text(schema, "format");
    if !format.is_empty() && !super::format::is_known(text(schema, "type"), format) {
        found.push(format.to_owned());
    }
    for (_, below) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        formats(below, found);
    }
    for key in ["items", "additionalProperties", "not"] {
        if let Some(below) = schema.get(key).filter(|below| below.is_object()) {
            formats(below, found);
        }
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        schema
            .get(key)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .for_each(|below| formats(below, found));
    }
}
