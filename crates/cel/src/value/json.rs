//! Values from JSON and back.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferrite_json::{Map as JsonMap, Number, Value as Json};

use super::{List, Map, Value};
use crate::error::{EvalError, err};
use crate::schema::{Kind, Schema};
use crate::time;

/// Levels of a value that can be made JSON.
const MAX_JSON_DEPTH: usize = 100;
/// Bytes of a value that can be made JSON. A list can hold one long string many times.
const MAX_JSON_SIZE: usize = 64 * 1024 * 1024;

fn go_type(json: &Json) -> &'static str {
    match json {
        Json::Null => "<nil>",
        Json::Bool(_) => "bool",
        Json::Number(number) if number.is_f64() => "float64",
        Json::Number(_) => "int64",
        Json::String(_) => "string",
        Json::Array(_) => "[]interface {}",
        Json::Object(_) => "map[string]interface {}",
    }
}

impl<'a> Value<'a> {
    /// The value of `json`: without a schema by JSON's own types, with one by the schema's.
    pub fn from_json(json: &'a Json, schema: Option<&'a Schema>) -> Result<Self, EvalError> {
        match schema {
            Some(schema) => typed(json, schema),
            None => Ok(untyped(json)),
        }
    }

    /// As [`Value::from_json`], where an item that does not fit its schema is null.
    pub(crate) fn from_json_or_null(json: &'a Json, schema: Option<&'a Schema>) -> Self {
        Self::from_json(json, schema).unwrap_or(Self::Null)
    }

    /// The value as JSON, for the configuration of an admission policy or for a message.
    pub fn to_json(&self) -> Result<Json, EvalError> {
        to_json(self, MAX_JSON_DEPTH, &mut { MAX_JSON_SIZE })
    }

    /// The value without anything borrowed. Each string that is borrowed is copied, each time that it occurs.
    pub fn into_owned(self) -> Value<'static> {
        match self {
            Self::Null => Value::Null,
            Self::Bool(value) => Value::Bool(value),
            Self::Int(value) => Value::Int(value),
            Self::Uint(value) => Value::Uint(value),
            Self::Double(value) => Value::Double(value),
            Self::String(text) => Value::String(text.into_owned()),
            Self::Bytes(bytes) => Value::Bytes(bytes),
            Self::Timestamp(time) => Value::Timestamp(time),
            Self::Duration(duration) => Value::Duration(duration),
            Self::List(list) => Value::list(list.iter().map(Value::into_owned).collect()),
            Self::Map(map) => Value::Map(Map::new(
                map.entries().into_iter().map(|(key, value)| (key.into_owned(), value.into_owned())),
            )),
            Self::Object(object) => Value::Object(Arc::new(super::Object {
                type_name: object.type_name.clone(),
                fields: object
                    .fields
                    .iter()
                    .map(|(name, value)| (name.clone(), value.clone().into_owned()))
                    .collect(),
            })),
            Self::Type(of) => Value::Type(of),
            Self::Optional(value) => {
                Value::Optional(value.map(|value| Arc::new((*value).clone().into_owned())))
            }
            Self::Opaque(value) => Value::Opaque(value),
            Self::Lazy(_) | Self::Preserved(_) => Value::Null,
        }
    }
}

fn untyped(json: &Json) -> Value<'_> {
    match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => number_value(number),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::List(List::from_json(items, None)),
        Json::Object(members) => Value::Map(Map::Json { members, schema: None }),
    }
}

fn number_value(number: &Number) -> Value<'static> {
    match number.as_i64() {
        Some(value) => Value::Int(value),
        None => Value::Double(number.as_f64().unwrap_or(f64::NAN)),
    }
}

fn typed<'a>(json: &'a Json, schema: &'a Schema) -> Result<Value<'a>, EvalError> {
    if json.is_null() {
        return match schema.nullable {
            true => Ok(Value::Null),
            false => Err(EvalError::text("invalid data, got null for schema with nullable=false")),
        };
    }
    if schema.int_or_string {
        return match json {
            Json::String(text) => Ok(Value::from(text.as_str())),
            Json::Number(number) if number.as_i64().is_some() => Ok(number_value(number)),
            _ => Err(EvalError::text(
                "invalid data, expected XIntOrString value to be either a string or integer",
            )),
        };
    }
    match (schema.kind, json) {
        (Kind::Object, Json::Object(members)) => Ok(Value::Map(Map::Json { members, schema: Some(schema) })),
        (Kind::Object, _) => {
            Err(EvalError::text("invalid data, expected a map for the provided schema with type=object"))
        }
        (Kind::Array, Json::Array(items)) => match schema.items {
            Some(_) => Ok(Value::List(List::from_json(items, Some(schema)))),
            None => Err(EvalError::text("invalid array type, expected Items with a non-empty Schema")),
        },
        (Kind::Array, _) => {
            Err(EvalError::text("invalid data, expected an array for the provided schema with type=array"))
        }
        (Kind::String, Json::String(text)) => typed_string(text, &schema.format),
        (Kind::String, _) => Err(err!("invalid data, expected string, got {}", go_type(json))),
        (Kind::Number, Json::Number(number)) => Ok(Value::Double(number.as_f64().unwrap_or(f64::NAN))),
        (Kind::Number, _) => Err(err!("invalid data, expected float, got {}", go_type(json))),
        (Kind::Integer, Json::Number(number)) if number.as_i64().is_some() => Ok(number_value(number)),
        (Kind::Integer, _) => Err(err!("invalid data, expected int, got {}", go_type(json))),
        (Kind::Boolean, Json::Bool(value)) => Ok(Value::Bool(*value)),
        (Kind::Boolean, _) => Err(err!("invalid data, expected bool, got {}", go_type(json))),
        (Kind::None, _) if schema.preserve_unknown => Ok(Value::Preserved(json)),
        (Kind::None, _) => Err(EvalError::text(
            "invalid type, expected object, array, number, integer, boolean or string, or no type with \
             x-kubernetes-int-or-string or x-kubernetes-preserve-unknown-fields is true, got ",
        )),
    }
}

fn typed_string<'a>(text: &'a str, format: &str) -> Result<Value<'a>, EvalError> {
    match format {
        "duration" => match time::parse_openapi_duration(text) {
            Some(duration) => Ok(Value::Duration(duration)),
            None => Err(err!("Invalid duration {text}: unable to parse")),
        },
        "date" => match time::parse_date(text) {
            Some(time) => Ok(Value::Timestamp(time)),
            None => Err(err!("Invalid date formatted string {text}: unable to parse")),
        },
        "date-time" => match time::parse_openapi_time(text) {
            Some(time) => Ok(Value::Timestamp(time)),
            None => Err(err!("Invalid date-time formatted string {text}: unable to parse")),
        },
        "byte" => match STANDARD.decode(text) {
            Ok(bytes) => Ok(Value::bytes(bytes)),
            Err(error) => Err(err!("Invalid byte formatted string {text}: {error}")),
        },
        _ => Ok(Value::from(text)),
    }
}

fn to_json(value: &Value<'_>, levels: usize, room: &mut usize) -> Result<Json, EvalError> {
    let Some(levels) = levels.checked_sub(1) else {
        return Err(EvalError::text("value is nested too deeply"));
    };
    let size = match value {
        Value::String(text) => text.len(),
        Value::Bytes(bytes) => bytes.len() * 2,
        _ => 0,
    };
    *room = room.checked_sub(size + size_of::<Json>()).ok_or(EvalError::text("value is too large"))?;
    Ok(match value {
        Value::Null | Value::Optional(None) => Json::Null,
        Value::Bool(value) => Json::Bool(*value),
        Value::Int(value) => Json::Number((*value).into()),
        Value::Uint(value) => Json::Number((*value).into()),
        Value::Double(value) => {
            Number::from_f64(*value).map(Json::Number).ok_or_else(|| err!("unsupported value: {value}"))?
        }
        Value::String(text) => Json::String((&**text).into()),
        Value::Bytes(bytes) => Json::String(STANDARD.encode(bytes).into()),
        Value::Timestamp(time) => Json::String(time.to_string().into()),
        Value::Duration(duration) => Json::String(duration.to_string().into()),
        Value::List(list) => {
            Json::Array(list.iter().map(|item| to_json(&item, levels, room)).collect::<Result<_, _>>()?)
        }
        Value::Map(Map::Json { members, .. }) => Json::Object((*members).clone()),
        Value::Map(map) => {
            let mut members = JsonMap::with_capacity(map.len());
            for (key, value) in map.entries() {
                let Value::String(key) = &key else {
                    return Err(err!("unsupported map key type: {}", key.type_name()));
                };
                members.insert(&**key, to_json(&value, levels, room)?);
            }
            Json::Object(members)
        }
        Value::Object(object) => {
            let mut members = JsonMap::with_capacity(object.fields.len());
            for (name, value) in &object.fields {
                members.insert(&**name, to_json(value, levels, room)?);
            }
            Json::Object(members)
        }
        Value::Optional(Some(value)) => to_json(value, levels, room)?,
        Value::Type(of) => Json::String(of.runtime_name().into()),
        Value::Opaque(value) => Json::String(value.text().into()),
        Value::Preserved(json) => (*json).clone(),
        Value::Lazy(_) => return Err(EvalError::text("a lazy object has no JSON")),
    })
}
