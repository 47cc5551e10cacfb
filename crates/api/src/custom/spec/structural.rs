//! Structural schemas: every value has one type, and conditions only restrict described fields.

use crate::custom::regexp;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, list, present, text};
use ferrite_json::{Map, Value, json};

/// A member that structural schemas do not have at all.
pub(super) fn unsupported(schema: &Value) -> Option<String> {
    let map = schema.as_object()?;
    let given = |key: &str| map.get(key).is_some_and(|value| !value.is_null() && *value != "");
    for key in
        ["id", "$schema", "$ref", "patternProperties", "dependencies", "additionalItems", "definitions"]
    {
        if given(key) {
            let name = key.trim_start_matches('$');
            let name = if key == "$ref" { "$ref" } else { name };
            return Some(format!("OpenAPIV3Schema '{name}' is not supported"));
        }
    }
    if map.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(false)) {
        return Some(
            "internal error: 'x-kubernetes-preserve-unknown-fields' must be true or undefined".to_owned(),
        );
    }
    match map.get("items") {
        Some(Value::Array(_)) => {
            return Some("OpenAPIV3Schema 'items' must be a schema, but is an array".to_owned());
        }
        Some(items) => {
            if let Some(why) = unsupported(items) {
                return Some(why);
            }
        }
        None => {}
    }
    let members =
        map.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(_, below)| below);
    let parts = ["allOf", "anyOf", "oneOf"].into_iter().flat_map(|key| list(schema, key));
    let single = ["additionalProperties", "not"].into_iter().filter_map(|key| map.get(key));
    members.chain(parts).chain(single).find_map(unsupported)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Item,
    Field,
}

/// The errors that keep a schema from being structural, sorted by their text.
pub(super) fn validate(schema: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    invariants(schema, Level::Root, path, &mut errors);
    complete_value(schema, Some(schema), path, path, &mut errors);
    errors.sort_by_key(FieldError::to_string);
    errors
}

fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(k, v)| (k.as_str(), v))
}

fn additional(schema: &Value) -> Option<&Value> {
    schema.get("additionalProperties").filter(|value| !value.is_null())
}

fn items(schema: &Value) -> Option<&Value> {
    schema.get("items").filter(|items| items.is_object())
}

fn is_int_or_string(any_of: &[Value]) -> bool {
    any_of == [json!({"type": "integer"}), json!({"type": "string"})]
}

fn invariants(schema: &Value, level: Level, path: &Path, errors: &mut FieldErrors) {
    let type_ = text(schema, "type");
    if type_ == "array" && items(schema).is_none() {
        errors.push(FieldError::required(&path.child("items"), "must be specified"));
    }
    if let Some(items) = items(schema) {
        invariants(items, Level::Item, &path.child("items"), errors);
    }
    for (name, below) in properties(schema) {
        invariants(below, Level::Field, &path.child("properties").key(name), errors);
    }
    if let Some(additional) = additional(schema) {
        let path = path.child("additionalProperties");
        if level == Level::Root {
            errors.push(FieldError::forbidden(&path, "must not be used at the root"));
        }
        if additional.is_object() {
            invariants(additional, Level::Field, &path, errors);
        }
    }
    let (preserve, int_or_string, embedded) = (
        flag(schema, "x-kubernetes-preserve-unknown-fields"),
        flag(schema, "x-kubernetes-int-or-string"),
        flag(schema, "x-kubernetes-embedded-resource"),
    );
    for (set, key) in
        [(preserve, "x-kubernetes-preserve-unknown-fields"), (embedded, "x-kubernetes-embedded-resource")]
    {
        if int_or_string && set {
            let why = "must be false if x-kubernetes-int-or-string is true";
            errors.push(FieldError::invalid(&path.child(key), true, why));
        }
    }
    let skip_any = is_int_or_string(list(schema, "anyOf"));
    let skip_first =
        list(schema, "allOf").first().is_some_and(|first| is_int_or_string(list(first, "anyOf")));
    value_validation(schema, skip_any, skip_first, path, errors);

    let checks_meta = level == Level::Root || embedded;
    if embedded && type_ != "object" {
        let why = "must be object if x-kubernetes-embedded-resource is true";
        let path = path.child("type");
        errors.push(match type_ {
            "" => FieldError::required(&path, why),
            type_ => FieldError::invalid(&path, type_, why),
        });
    } else if type_.is_empty() && !int_or_string && !preserve {
        let why = match level {
            Level::Root => "must not be empty at the root",
            Level::Item => "must not be empty for specified array items",
            Level::Field => "must not be empty for specified object fields",
        };
        errors.push(FieldError::required(&path.child("type"), why));
    }
    if embedded && additional(schema).is_some() {
        let why = "must not be used if x-kubernetes-embedded-resource is set";
        errors.push(FieldError::forbidden(&path.child("additionalProperties"), why));
    }
    if level == Level::Root && !type_.is_empty() && type_ != "object" {
        errors.push(FieldError::invalid(&path.child("type"), type_, "must be object at the root"));
    }
    for (name, below) in properties(schema) {
        let path = path.child("properties").key(name);
        match name {
            "kind" | "apiVersion" if checks_meta && text(below, "type") != "string" => {
                errors.push(FieldError::invalid(&path.child("type"), text(below, "type"), "must be string"));
            }
            "metadata" => metadata(below, checks_meta, level, &path, errors),
            _ => {}
        }
    }
    if embedded && !preserve && properties(schema).next().is_none() {
        let why = "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields";
        errors.push(FieldError::required(&path.child("properties"), why));
    }
}

fn metadata(schema: &Value, checks: bool, level: Level, path: &Path, errors: &mut FieldErrors) {
    if checks && text(schema, "type") != "object" {
        errors.push(FieldError::invalid(&path.child("type"), text(schema, "type"), "must be object"));
    }
    if level != Level::Root {
        return;
    }
    let empty = Map::new();
    let map = schema.as_object().unwrap_or(&empty);
    let names = properties(schema).all(|(name, _)| matches!(name, "name" | "generateName"));
    let others = map.iter().any(|(key, value)| {
        !matches!(key.as_str(), "type" | "properties" | "default") && !value.is_null() && *value != false
    });
    if !names || others {
        let why = "must not specify anything other than name and generateName, but metadata is implicitly specified";
        errors.push(FieldError::forbidden(path, why));
    }
}

fn value_validation(schema: &Value, skip_any: bool, skip_first: bool, path: &Path, errors: &mut FieldErrors) {
    for key in ["anyOf", "allOf", "oneOf"] {
        for (index, part) in list(schema, key).iter().enumerate() {
            let skips = key == "allOf" && skip_first && index == 0;
            if key != "anyOf" || !skip_any {
                nested(part, skips, &path.child(key).index(index), errors);
            }
        }
    }
    if let Some(not) = schema.get("not").filter(|not| not.is_object()) {
        nested(not, false, &path.child("not"), errors);
    }
    let pattern = text(schema, "pattern");
    if !pattern.is_empty()
        && let Some(why) = regexp::problem(pattern)
    {
        let why = format!("must be a valid regular expression, but isn't: {why}");
        errors.push(FieldError::invalid(&path.child("pattern"), pattern, why));
    }
}

/// A part of a condition must not define the type of a value.
fn nested(schema: &Value, skip_any: bool, path: &Path, errors: &mut FieldErrors) {
    value_validation(schema, skip_any, false, path, errors);
    if let Some(items) = items(schema) {
        nested(items, false, &path.child("items"), errors);
    }
    for (name, below) in properties(schema) {
        nested(below, false, &path.child("properties").key(name), errors);
    }
    let mut forbid = |key: &str, set: bool, why: &str| {
        if set {
            errors.push(FieldError::forbidden(&path.child(key), why));
        }
    };
    forbid("type", !text(schema, "type").is_empty(), "must be empty to be structural");
    let restricts = additional(schema).is_some_and(|additional| *additional != false);
    forbid("additionalProperties", restricts, "must be undefined to be structural");
    forbid("default", present(schema, "default"), "must be undefined to be structural");
    forbid("title", !text(schema, "title").is_empty(), "must be empty to be structural");
    forbid("description", !text(schema, "description").is_empty(), "must be empty to be structural");
    for key in [
        "nullable",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-embedded-resource",
        "x-kubernetes-int-or-string",
    ] {
        forbid(key, flag(schema, key), "must be false to be structural");
    }
    let keys = !list(schema, "x-kubernetes-list-map-keys").is_empty();
    forbid("x-kubernetes-list-map-keys", keys, "must be empty to be structural");
    for key in ["x-kubernetes-list-type", "x-kubernetes-map-type"] {
        forbid(key, present(schema, key), "must be undefined to be structural");
    }
    let rules = !list(schema, "x-kubernetes-validations").is_empty();
    forbid("x-kubernetes-validations", rules, "must be empty to be structural");
    if properties(schema).any(|(name, _)| name == "metadata") {
        let path = path.child("properties").key("metadata");
        errors.push(FieldError::forbidden(&path, "must not be specified in a nested context"));
    }
}

/// Conditions may only mention fields that the schema describes outside of them.
fn complete_value(value: &Value, schema: Option<&Value>, at: &Path, path: &Path, errors: &mut FieldErrors) {
    if let Some(not) = value.get("not").filter(|not| not.is_object()) {
        complete(not, schema, at, &path.child("not"), errors);
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        for (index, part) in list(value, key).iter().enumerate() {
            complete(part, schema, at, &path.child(key).index(index), errors);
        }
    }
}

fn complete(value: &Value, schema: Option<&Value>, at: &Path, path: &Path, errors: &mut FieldErrors) {
    let Some(schema) = schema else {
        errors.push(FieldError::required(at, format!("because it is defined in {path}")));
        return;
    };
    complete_value(value, Some(schema), at, path, errors);
    if let Some(below) = items(value) {
        complete(below, items(schema), &at.child("items"), &path.child("items"), errors);
    }
    for (name, below) in properties(value) {
        let (at, path) = (at.child("properties").key(name), path.child("properties").key(name));
        let found = properties(schema).find(|(known, _)| *known == name).map(|(_, schema)| schema);
        complete(below, found, &at, &path, errors);
    }
}
