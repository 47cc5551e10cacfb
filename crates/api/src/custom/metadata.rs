//! Metadata of custom objects: it has a type though the object has none of the table's.

use super::schema::Schema;
use crate::codec::{DecodeError, json};
use crate::field::{FieldError, FieldErrors, Path};
use crate::meta_validation::{path_segment, validate_metadata};
use crate::schema::named;
use ferrite_json::{Map, Value};

/// Brings `metadata` of an object under its type and answers the names of unknown fields.
pub(super) fn coerce(object: &mut Map, path: &str) -> Result<Vec<String>, DecodeError> {
    let Some(metadata) = object.get_mut("metadata") else { return Ok(Vec::new()) };
    let Some(type_) = named("meta.v1.ObjectMeta") else { return Ok(Vec::new()) };
    if metadata.is_null() {
        object.remove("metadata");
        return Ok(Vec::new());
    }
    let decoded = json::conform(type_, metadata)?;
    *metadata = decoded.value;
    tidy(metadata);
    let unknown = decoded.strict.iter().filter_map(|complaint| {
        complaint.strip_prefix("unknown field \"").and_then(|rest| rest.strip_suffix('"'))
    });
    let dot = if path.is_empty() { "" } else { "." };
    Ok(unknown.map(|name| format!("{path}{dot}metadata.{name}")).collect())
}

/// Gives the metadata of an object the form that it has in an answer: as upstream, without empty maps and lists.
pub fn normalise_metadata(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata") {
        tidy(metadata);
    }
}

fn tidy(metadata: &mut Value) {
    let Some(type_) = named("meta.v1.ObjectMeta") else { return };
    crate::codec::normalise(type_, metadata);
    // A type that is written by itself has a time even when it has none.
    if let Some(map) = metadata.as_object_mut()
        && map.get("creationTimestamp").is_some_and(Value::is_null)
    {
        map.remove("creationTimestamp");
    }
}

/// As [`coerce`], for the resources embedded in an object.
pub(super) fn coerce_embedded(
    value: &mut Value,
    schema: &Schema,
    path: &str,
    unknown: &mut Vec<String>,
) -> Result<(), DecodeError> {
    match value {
        Value::Object(map) => {
            if schema.embedded {
                for key in ["apiVersion", "kind"] {
                    if let Some(value) = map.get(key).filter(|value| !value.is_string()) {
                        let path = Path::new(path).child(key);
                        let error = FieldError::invalid(&path, value.clone(), "must be a string");
                        return Err(DecodeError::Text(error.to_string()));
                    }
                }
                let shown = map.get("metadata").cloned().unwrap_or_default();
                let found = coerce(map, path).map_err(|error| {
                    let path = Path::new(path).child("metadata");
                    DecodeError::Text(FieldError::invalid(&path, shown, error.to_string()).to_string())
                })?;
                unknown.extend(found);
            }
            for (key, value) in map.iter_mut() {
                let Some(below) = schema.member(key) else { continue };
                let dot = if path.is_empty() { "" } else { "." };
                coerce_embedded(value, below, &format!("{path}{dot}{key}"), unknown)?;
            }
        }
        Value::Array(list) => {
            let Some(items) = &schema.items else { return Ok(()) };
            for (index, value) in list.iter_mut().enumerate() {
                coerce_embedded(value, items, &format!("{path}[{index}]"), unknown)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// The errors of the resources embedded in a value.
pub(super) fn validate_embedded(value: &Value, schema: &Schema, path: &Path, errors: &mut FieldErrors) {
    match value {
        Value::Object(map) => {
            if schema.embedded {
                validate_one(value, path, errors);
            }
            for (key, value) in map {
                match (schema.property(key), schema.additional_schema()) {
                    (Some(below), _) => validate_embedded(value, below, &path.child(key), errors),
                    (None, Some(below)) => validate_embedded(value, below, &path.key(key), errors),
                    (None, None) => {}
                }
            }
        }
        Value::Array(list) => {
            let Some(items) = &schema.items else { return };
            for (index, value) in list.iter().enumerate() {
                validate_embedded(value, items, &path.index(index), errors);
            }
        }
        _ => {}
    }
}

fn validate_one(value: &Value, path: &Path, errors: &mut FieldErrors) {
    for key in ["apiVersion", "kind"] {
        let path = path.child(key);
        match value.get(key) {
            None => errors.push(FieldError::required(&path, "")),
            Some(Value::String(text)) if text.is_empty() => {
                errors.push(FieldError::invalid(&path, "", "must not be empty"));
            }
            Some(Value::String(text)) if key == "apiVersion" && text.matches('/').count() > 1 => {
                let why = format!("unexpected GroupVersion string: {text}");
                errors.push(FieldError::invalid(&path, text.as_str(), why));
            }
            Some(Value::String(text)) if key == "kind" => {
                let problems = crate::meta_validation::dns1035_label(&text.to_lowercase());
                if !problems.is_empty() {
                    let why =
                        "may have mixed case, but should otherwise match: ".to_owned() + &problems.join(",");
                    errors.push(FieldError::invalid(&path, text.as_str(), why));
                }
            }
            Some(Value::String(_)) => {}
            Some(other) => errors.push(FieldError::invalid(&path, other.clone(), "must be a string")),
        }
    }
    if value.get("metadata").is_none() {
        return;
    }
    let namespaced = !crate::meta::namespace(value).is_empty();
    let prefix = path.as_str();
    for mut error in validate_metadata(value, namespaced, path_segment) {
        // A resource that is part of another need not have a name.
        if error.path.as_str() == "metadata.name" && matches!(error.problem, crate::field::Problem::Required)
        {
            continue;
        }
        error.path = Path::new(&format!("{prefix}.{}", error.path.as_str()));
        errors.push(error);
    }
}
