//! Values of other types as values of ours, and back.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Map, Value};

impl From<serde_json::Value> for Value {
    fn from(value: serde_json::Value) -> Self {
        match value {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(truth) => Self::Bool(truth),
            serde_json::Value::Number(number) => Self::Number(number),
            serde_json::Value::String(text) => Self::String(text.into()),
            serde_json::Value::Array(items) => items.into_iter().collect(),
            serde_json::Value::Object(map) => map.into_iter().collect(),
        }
    }
}

impl From<Value> for serde_json::Value {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(truth) => Self::Bool(truth),
            Value::Number(number) => Self::Number(number),
            Value::String(text) => Self::String(text.into()),
            Value::Array(items) => items.into_iter().map(Self::from).collect(),
            Value::Object(map) => {
                map.into_iter().map(|(key, value)| (String::from(key), Self::from(value))).collect()
            }
        }
    }
}

impl From<serde_json::Map<String, serde_json::Value>> for Map {
    fn from(map: serde_json::Map<String, serde_json::Value>) -> Self {
        map.into_iter().map(|(key, value)| (key, Value::from(value))).collect()
    }
}

/// What a value of any type is in JSON.
pub fn to_value<T: Serialize>(value: T) -> Result<Value, Error> {
    serde_json::to_value(value).map(Value::from)
}

/// A value of any type out of its JSON.
pub fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, Error> {
    serde_json::from_value(value.into())
}
