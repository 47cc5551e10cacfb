//! Brings values under a type. Most of them obey it already: they are stored objects with a small change.

use super::super::{DecodeError, Decoded, MAX_DEPTH};
use super::super::{scalar, time};
use super::decode;
use crate::schema::{Kind, TypeRef};
use ferrite_json::{Map, Value};

/// Brings a value (the outcome of a patch, say) under `type_`: the same checks as [`decode`].
pub fn conform(type_: TypeRef, value: &Value) -> Result<Decoded, DecodeError> {
    let Some(form) = form_of(type_, value) else { return decode(type_, value.to_string().as_bytes()) };
    let mut value = value.clone();
    form.complete(type_, &mut value);
    Ok(Decoded { value, strict: Vec::new() })
}

/// As [`conform`], without a copy of the value. Returns the complaints of strict validation. A value that is refused
/// stays as it was.
pub fn conform_in_place(type_: TypeRef, value: &mut Value) -> Result<Vec<String>, DecodeError> {
    let Some(form) = form_of(type_, value) else {
        let decoded = decode(type_, value.to_string().as_bytes())?;
        *value = decoded.value;
        return Ok(decoded.strict);
    };
    form.complete(type_, value);
    Ok(Vec::new())
}

/// The form of a value that a decoder would leave as it is, but for members that are null.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Whole,
    HasNulls,
}

impl Form {
    /// Gives the value the form that it has after decoding.
    fn complete(self, type_: TypeRef, value: &mut Value) {
        if self == Self::HasNulls
            && let Value::Object(map) = value
        {
            drop_nulls_of_object(type_, map);
        }
    }
}

/// The form of a value that obeys its type. None if only the decoder can tell: it has an unknown field, a value of
/// another type or one that is written differently.
fn form_of(type_: TypeRef, value: &Value) -> Option<Form> {
    let mut check = Check { has_nulls: false };
    let obeys = matches!(value, Value::Object(map) if check.object(type_, map, 0));
    obeys.then_some(if check.has_nulls { Form::HasNulls } else { Form::Whole })
}

struct Check {
    /// A member of a struct is null.
    has_nulls: bool,
}

impl Check {
    fn object(&mut self, type_: TypeRef, map: &Map, depth: usize) -> bool {
        map.iter().all(|(name, value)| match (type_.field(name), value) {
            (None, _) => false,
            (Some(_), Value::Null) => {
                self.has_nulls = true;
                depth < MAX_DEPTH
            }
            (Some(field), value) => self.value(&field.kind, value, depth + 1),
        })
    }

    fn value(&mut self, kind: &Kind, value: &Value, depth: usize) -> bool {
        if depth > MAX_DEPTH {
            return false;
        }
        match (kind, value) {
            (Kind::Struct(type_), Value::Object(map)) => self.object(type_, map, depth),
            (Kind::List(item), Value::Array(list)) => {
                list.iter().all(|value| self.value(item, value, depth + 1))
            }
            (Kind::Map(item), Value::Object(map)) => {
                map.values().all(|value| self.value(item, value, depth + 1))
            }
            (Kind::Strings, Value::Array(list)) => depth < MAX_DEPTH && list.iter().all(Value::is_string),
            (Kind::Raw, value) => is_plain(value, depth),
            (Kind::Bool, Value::Bool(_)) => true,
            (Kind::Int32 | Kind::IntOrString, Value::Number(number)) => {
                number.as_i64().is_some_and(|number| i32::try_from(number).is_ok())
            }
            (Kind::Int64, Value::Number(number)) => number.is_i64(),
            (Kind::Double, Value::Number(number)) => {
                number.as_i64().is_some_and(|number| i32::try_from(number).is_ok())
            }
            (Kind::String | Kind::Duration | Kind::IntOrString, Value::String(_)) => true,
            (Kind::Bytes, Value::String(text)) => {
                scalar::decode_base64(text).is_ok_and(|bytes| scalar::encode_base64(&bytes) == text.as_str())
            }
            (Kind::Quantity, Value::String(text)) => {
                scalar::canonical_quantity(text).is_ok_and(|canonical| canonical == *text)
            }
            (Kind::Time, Value::String(text)) => {
                scalar::is_canonical_time(text) && time::parse_time(text).is_ok()
            }
            (Kind::MicroTime, Value::String(text)) => time::parse_micro_time(text)
                .is_ok_and(|time| scalar::format_micro_time(time) == text.as_str()),
            _ => false,
        }
    }
}

/// Returns true if any JSON stays what it is when it is written and read again: numbers with a fraction may not.
fn is_plain(value: &Value, depth: usize) -> bool {
    if depth > MAX_DEPTH {
        return false;
    }
    match value {
        Value::Number(number) => !number.is_f64(),
        Value::Array(list) => list.iter().all(|value| is_plain(value, depth + 1)),
        Value::Object(map) => map.values().all(|value| is_plain(value, depth + 1)),
        Value::Null | Value::Bool(_) | Value::String(_) => true,
    }
}

fn drop_nulls_of_object(type_: TypeRef, map: &mut Map) {
    map.retain(|name, value| {
        if let Some(field) = type_.field(name) {
            drop_nulls(&field.kind, value);
        }
        !value.is_null()
    });
}

/// Removes members of structs that are null: absent and null are the same there.
fn drop_nulls(kind: &Kind, value: &mut Value) {
    match (kind, value) {
        (Kind::Struct(type_), Value::Object(map)) => drop_nulls_of_object(type_, map),
        (Kind::List(item), Value::Array(list)) => list.iter_mut().for_each(|value| drop_nulls(item, value)),
        (Kind::Map(item), Value::Object(map)) => map.values_mut().for_each(|value| drop_nulls(item, value)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;
    use ferrite_json::json;

    fn pods() -> TypeRef {
        schema::kind("", "v1", "Pod").expect("pods are known")
    }

    #[test]
    fn stored_objects_are_not_decoded_again() {
        let pod = json!({"kind": "Pod", "apiVersion": "v1",
            "metadata": {"name": "a", "generation": 1, "creationTimestamp": "2026-01-02T03:04:05Z",
                "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {"k:{\"name\":\"c\"}": {".": {}}}}}]},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "900m"}}}]},
            "status": {"conditions": [{"type": "T", "status": "True", "lastProbeTime": null}]}});
        assert_eq!(form_of(pods(), &pod), Some(Form::HasNulls));
        let conformed = conform(pods(), &pod).expect("a pod");
        assert_eq!(conformed.value["status"]["conditions"], json!([{"type": "T", "status": "True"}]));
    }

    #[test]
    fn what_only_the_decoder_can_read_is_left_to_it() {
        for (part, why) in [
            (json!({"hostname": 7}), "another type"),
            (json!({"unknown": 7}), "an unknown field"),
            (json!({"priority": 1.0}), "a fraction"),
            (json!({"priority": 1_i64 << 40}), "out of range"),
            (json!({"overhead": {"cpu": "1000m"}}), "not canonical"),
            (json!({"overhead": {"cpu": null}}), "null stands for a value in a map"),
            (json!({"containers": [null]}), "null stands for a value in a list"),
        ] {
            assert_eq!(form_of(pods(), &json!({"spec": part})), None, "{why}");
        }
        assert_eq!(form_of(pods(), &json!([])), None);
        for (time, form) in [("2026-01-02T03:04:05Z", Some(Form::Whole)), ("2026-01-02T03:04:05+01:00", None)]
        {
            assert_eq!(form_of(pods(), &json!({"metadata": {"creationTimestamp": time}})), form);
        }
    }

    #[test]
    fn a_refused_value_stays_as_it_was() {
        let mut pod = json!({"metadata": {"name": null}, "spec": {"priority": "x"}});
        let before = pod.clone();
        assert!(conform_in_place(pods(), &mut pod).is_err());
        assert_eq!(pod, before);
    }
}
