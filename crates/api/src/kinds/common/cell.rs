//! Cells that tables of many kinds share.

use crate::kinds::common::access::{flag, list, text};
use crate::table::NONE;
use ferrite_json::{Map, Value};
use jiff::Timestamp;

/// The object's name.
pub fn name(object: &Value) -> Value {
    crate::meta::name(object).into()
}

/// The age of the object.
pub fn age(object: &Value, now: Timestamp) -> Value {
    crate::table::age(object, now).into()
}

/// Number of entries in a list.
pub fn count(value: &Value, key: &str) -> Value {
    list(value, key).len().into()
}

/// `a=b,c=d`, or `<none>`.
pub fn labels(labels: Option<&Map>) -> Value {
    let pairs: Vec<String> = labels
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    if pairs.is_empty() { NONE.into() } else { pairs.join(",").into() }
}

/// A text, or the placeholder for none.
pub fn text_or(value: &Value, key: &str, absent: &str) -> Value {
    match text(value, key) {
        "" => absent.into(),
        found => found.into(),
    }
}

/// A count or a percentage, or the placeholder for none.
pub fn int_or_string(value: &Value, absent: &str) -> Value {
    match value {
        Value::Null => absent.into(),
        Value::String(text) => text.as_str().into(),
        other => other.to_string().into(),
    }
}

/// Names and images of the containers of a template, as the wide columns show them.
pub fn containers(template: &Value) -> [Value; 2] {
    let containers = list(&template["spec"], "containers");
    let join = |key: &str| containers.iter().map(|c| text(c, key)).collect::<Vec<_>>().join(",").into();
    [join("name"), join("image")]
}

/// A truth value, false when it is not set.
pub fn boolean(value: &Value, key: &str) -> Value {
    flag(value, key).into()
}

/// Returns true if a status has a condition of this type with status True.
pub fn has_condition(status: &Value, kind: &str) -> bool {
    list(status, "conditions").iter().any(|c| text(c, "type") == kind && text(c, "status") == "True")
}
