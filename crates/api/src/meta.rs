//! Reading and writing `metadata` of an object held as a JSON value.

use ferrite_json::{Map, Value};

/// `object.metadata.<key>` as a string; empty when absent or of another type.
pub fn str<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get("metadata").and_then(|m| m.get(key)).and_then(Value::as_str).unwrap_or_default()
}

pub fn name(object: &Value) -> &str {
    str(object, "name")
}

pub fn namespace(object: &Value) -> &str {
    str(object, "namespace")
}

pub fn uid(object: &Value) -> &str {
    str(object, "uid")
}

/// Returns true if deletion has been requested.
pub fn is_deleting(object: &Value) -> bool {
    object.pointer("/metadata/deletionTimestamp").is_some_and(|v| !v.is_null())
}

pub fn labels(object: &Value) -> Option<&Map> {
    object.pointer("/metadata/labels").and_then(Value::as_object)
}

pub fn finalizers(object: &Value) -> impl Iterator<Item = &str> {
    object
        .pointer("/metadata/finalizers")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
        .filter_map(Value::as_str)
}

/// `object.metadata`, made when it is absent. An object whose `metadata` is not an object gets an empty one:
/// the schema has refused such input before anybody writes to it.
pub fn metadata_mut(object: &mut Value) -> &mut Map {
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    let map = object.as_object_mut().expect("made an object above");
    let metadata = map.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    if !metadata.is_object() {
        *metadata = Value::Object(Map::new());
    }
    metadata.as_object_mut().expect("made an object above")
}

/// Sets `object.metadata.<key>`; an empty string removes it.
pub fn set_str(object: &mut Value, key: &str, value: &str) {
    let metadata = metadata_mut(object);
    if value.is_empty() {
        metadata.remove(key);
    } else {
        metadata.insert(key.to_owned(), value.into());
    }
}
