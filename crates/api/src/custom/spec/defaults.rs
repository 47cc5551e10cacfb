//! Defaults of a schema fit it.

use crate::custom::rules::RuleSet;
use crate::custom::schema::Schema;
use crate::custom::{metadata, prune, validate as values};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::flag;
use ferrite_json::Value;

/// The errors in the defaults of a structural schema.
pub(super) fn validate(schema: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    walk(schema, true, false, path, &mut errors);
    errors
}

/// `root`: the schema is of a resource, whose kind, version and metadata have rules of their own (`in_meta`).
fn walk(openapi: &Value, root: bool, in_meta: bool, path: &Path, errors: &mut FieldErrors) {
    let embedded = root || flag(openapi, "x-kubernetes-embedded-resource");
    let in_meta = in_meta && !embedded;
    if let Some(default) = openapi.get("default").filter(|default| !default.is_null()) {
        let path = path.child("default");
        let schema = Schema::compile(openapi);
        if !in_meta {
            let mut pruned = default.clone();
            prune::prune_part(&mut pruned, &schema);
            if pruned != *default {
                errors.push(FieldError::invalid(&path, default.clone(), "must not have unknown fields"));
            }
        }
        errors.extend(check(default, openapi, &schema, &path));
    }
    if let Some(items) = openapi.get("items").filter(|items| items.is_object()) {
        walk(items, false, in_meta, &path.child("items"), errors);
    }
    for (name, below) in openapi.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let meta = in_meta || embedded && matches!(name.as_str(), "metadata" | "apiVersion" | "kind");
        walk(below, false, meta, &path.child("properties").key(name), errors);
    }
}

fn check(default: &Value, openapi: &Value, schema: &Schema, path: &Path) -> FieldErrors {
    let mut coerced = default.clone();
    let mut unknown = Vec::new();
    if let Err(error) = metadata::coerce_embedded(&mut coerced, schema, path.as_str(), &mut unknown) {
        return vec![FieldError::invalid(path, default.clone(), error.to_string())];
    }
    let mut errors = Vec::new();
    metadata::validate_embedded(default, schema, path, &mut errors);
    if errors.is_empty() {
        errors = values::value(default, None, schema, path);
    }
    if errors.is_empty()
        && let Some(rules) = RuleSet::compile(openapi, schema.embedded)
    {
        errors = rules.validate(default, None, path.as_str()).0;
    }
    errors
}
