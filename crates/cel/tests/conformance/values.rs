//! Values as the data writes them.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferrite_cel::{
    Activation, AuthorizationDecision, Authorizer, AuthorizerValue, Check, EvalError, Limits, Map, Type,
    Value,
};
use ferrite_json::Value as Json;

fn member(json: &Json) -> (&str, &Json) {
    let (kind, value) =
        json.as_object().and_then(|members| members.iter().next()).expect("a value has a type");
    (kind.as_str(), value)
}

fn text(json: &Json) -> &str {
    json.as_str().expect("a string")
}

fn double(json: &Json) -> f64 {
    match json {
        Json::String(name) => match name.as_str() {
            "NaN" => f64::NAN,
            "Infinity" => f64::INFINITY,
            "-Infinity" => f64::NEG_INFINITY,
            other => other.parse().expect("a double"),
        },
        other => other.as_f64().expect("a double"),
    }
}

/// The value of a constant expression.
fn constant(expression: &str) -> Value<'static> {
    let program = ferrite_cel::Environment::kubernetes(36).compile(expression).expect("a constant compiles");
    program
        .evaluate(&Activation::new(), Limits::default())
        .result
        .expect("a constant has a value")
        .into_owned()
}

pub fn value(json: &Json) -> Result<Value<'static>, EvalError> {
    let (kind, inner) = member(json);
    Ok(match kind {
        "int64" => Value::Int(text(inner).parse().expect("an integer")),
        "uint64" => Value::Uint(text(inner).parse().expect("an integer")),
        "double" => Value::Double(double(inner)),
        "string" => Value::string(text(inner)),
        "bytes" => Value::bytes(STANDARD.decode(text(inner)).expect("base64")),
        "bool" => Value::Bool(inner.as_bool().expect("a bool")),
        "null" => Value::Null,
        "list" => Value::list(inner.as_array().expect("a list").iter().map(value).collect::<Result<_, _>>()?),
        "map" => {
            let entries = inner
                .as_array()
                .expect("entries")
                .iter()
                .map(|entry| Ok((value(&entry[0])?, value(&entry[1])?)));
            Value::Map(Map::new(entries.collect::<Result<Vec<_>, EvalError>>()?))
        }
        "type" => Value::Type(Type::parse(text(inner)).expect("a type")),
        "timestamp" => constant(&format!("timestamp('{}')", text(inner))),
        "duration" => constant(&format!("duration('{}')", text(inner))),
        "optional" if inner.is_null() => Value::NONE,
        "optional" => Value::some(value(inner)?),
        "error" => return Err(EvalError::new("an error")),
        other => panic!("unknown kind of value {other}"),
    })
}

/// Is `actual` the value that `expected` describes? NaN is NaN here.
pub fn same(expected: &Json, actual: &Value<'_>) -> bool {
    let (kind, inner) = member(expected);
    match (kind, actual) {
        ("double", Value::Double(actual)) => {
            let expected = double(inner);
            expected == *actual || expected.is_nan() && actual.is_nan()
        }
        ("list", Value::List(list)) => {
            let items = inner.as_array().expect("a list");
            items.len() == list.len() && items.iter().zip(list.iter()).all(|(item, own)| same(item, &own))
        }
        ("map", Value::Map(map)) => {
            let entries = inner.as_array().expect("entries");
            entries.len() == map.len()
                && entries.iter().all(|entry| {
                    map.entries().iter().any(|(key, own)| same(&entry[0], key) && same(&entry[1], own))
                })
        }
        ("optional", Value::Optional(actual)) => match actual {
            None => inner.is_null(),
            Some(actual) => !inner.is_null() && same(inner, actual),
        },
        ("opaque", Value::Opaque(actual)) => {
            inner["type"] == actual.type_name() && inner["text"] == actual.text().as_str()
        }
        ("type", Value::Type(actual)) => {
            let name = text(inner);
            Value::Type(actual.clone()).type_of() == Type::Type(None)
                && (format!("{actual}") == name
                    || name == "list" && matches!(actual, Type::List(_))
                    || name == "map" && matches!(actual, Type::Map(_))
                    || name == "null_type" && *actual == Type::Null
                    || name == "optional_type" && format!("{actual}").starts_with("optional_type")
                    || name == "google.protobuf.Timestamp" && *actual == Type::Timestamp
                    || name == "google.protobuf.Duration" && *actual == Type::Duration)
        }
        ("opaque" | "list" | "map" | "optional" | "type" | "double", _) => false,
        _ => value(expected).is_ok_and(|expected| format!("{expected:?}") == format!("{actual:?}")),
    }
}

struct AllowAll;

impl Authorizer for AllowAll {
    fn authorize(&self, _: &Check) -> AuthorizationDecision {
        AuthorizationDecision { allowed: true, ..AuthorizationDecision::default() }
    }
}

pub fn authorizer() -> Value<'static> {
    AuthorizerValue::authorizer(Arc::new(AllowAll))
}
