//! Reading and defaulting fields of JSON objects the way Go's zero values make upstream do it.

use ferrite_json::{Map, Value};

/// A field as a string; empty when absent.
pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// A field as an integer; zero when absent.
pub fn int(value: &Value, key: &str) -> i64 {
    value.get(key).and_then(Value::as_i64).unwrap_or(0)
}

/// A field as a boolean; false when absent.
pub fn flag(value: &Value, key: &str) -> bool {
    value.get(key).and_then(Value::as_bool).unwrap_or(false)
}

/// A field as a list; empty when absent.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// The strings of a list.
pub fn strings<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
    list(value, key).iter().filter_map(Value::as_str).collect()
}

/// A field as a map, if it is there.
pub fn map<'a>(value: &'a Value, key: &str) -> Option<&'a Map> {
    value.get(key).and_then(Value::as_object)
}

/// Returns true if a field is there and not null: a set pointer in upstream's types.
pub fn present(value: &Value, key: &str) -> bool {
    value.get(key).is_some_and(|v| !v.is_null())
}

/// The elements of a list, to be changed.
pub fn list_mut<'a>(value: &'a mut Value, key: &str) -> impl Iterator<Item = &'a mut Value> {
    value.get_mut(key).and_then(Value::as_array_mut).into_iter().flatten()
}

/// A field that is an object, to be changed; `None` when it is absent or null.
pub fn object_mut<'a>(value: &'a mut Value, key: &str) -> Option<&'a mut Value> {
    value.get_mut(key).filter(|v| v.is_object())
}

/// A field that is an object, made when it is absent.
///
/// Types have been checked before anybody writes here; a value that still is no object is replaced.
pub fn ensure_object<'a>(value: &'a mut Value, key: &str) -> &'a mut Value {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let field = &mut value[key];
    if !field.is_object() {
        *field = Value::Object(Map::new());
    }
    field
}

/// Sets a pointer field that is nil.
pub fn default_field(value: &mut Value, key: &str, default: impl Into<Value>) {
    if !present(value, key)
        && let Some(map) = value.as_object_mut()
    {
        map.insert(key.to_owned(), default.into());
    }
}

/// Sets a string field that is empty.
pub fn default_text(value: &mut Value, key: &str, default: &str) {
    if text(value, key).is_empty()
        && let Some(map) = value.as_object_mut()
    {
        map.insert(key.to_owned(), default.into());
    }
}

/// Sets an integer field that is zero.
pub fn default_int(value: &mut Value, key: &str, default: i64) {
    if int(value, key) == 0
        && let Some(map) = value.as_object_mut()
    {
        map.insert(key.to_owned(), default.into());
    }
}

/// Sets or removes a top-level field so that it is as in `old`.
pub fn keep(new: &mut Value, old: &Value, key: &str) {
    if let Some(map) = new.as_object_mut() {
        keep_member(map, old.get(key), key);
    }
}

/// Sets or removes a field of metadata so that it is as in `old`.
pub fn keep_metadata(new: &mut Value, old: &Value, key: &str) {
    let metadata = crate::meta::metadata_mut(new);
    keep_member(metadata, old.pointer("/metadata").and_then(|m| m.get(key)), key);
}

/// Sets or removes a member so that it is `old`. Mostly it is already: comparing costs less than copying.
fn keep_member(map: &mut Map, old: Option<&Value>, key: &str) {
    match old {
        Some(value) if map.get(key) != Some(value) => drop(map.insert(key.to_owned(), value.clone())),
        Some(_) => {}
        None => drop(map.remove(key)),
    }
}

/// Removes a field of an object.
pub fn remove(value: &mut Value, key: &str) -> Option<Value> {
    value.as_object_mut()?.remove(key)
}

/// A field that is an object, to be read; `None` when it is absent, null or of another type.
pub fn object<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    value.get(key).filter(|v| v.is_object())
}

/// Puts `status` back to nothing, as creation does.
pub fn clear_status(object: &mut Value) {
    remove(object, "status");
}
