//! Optional values, and base64.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};

use super::{Entry, NO_MATCH};
use crate::error::{EvalError, err};
use crate::value::Value;

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

pub(super) const TABLE: &[Entry] = &[
    ("optional.of", |_, args| match args {
        [value] => Ok(Value::some(value.clone())),
        _ => Err(NO_MATCH),
    }),
    ("optional.ofNonZeroValue", |_, args| match args {
        [value] if is_zero(value) => Ok(Value::NONE),
        [value] => Ok(Value::some(value.clone())),
        _ => Err(NO_MATCH),
    }),
    ("optional.none", |_, _| Ok(Value::NONE)),
    ("value", |_, args| match args {
        [Value::Optional(Some(value))] => Ok((**value).clone()),
        [Value::Optional(None)] => Err(EvalError::text("optional.none() dereference")),
        _ => Err(NO_MATCH),
    }),
    ("hasValue", |_, args| match args {
        [Value::Optional(value)] => Ok(Value::Bool(value.is_some())),
        _ => Err(NO_MATCH),
    }),
    ("optional.unwrap", |_, args| unwrap(args)),
    ("unwrapOpt", |_, args| unwrap(args)),
    ("first", |_, args| match args {
        [Value::List(list)] => Ok(list.get(0).map_or(Value::NONE, Value::some)),
        _ => Err(NO_MATCH),
    }),
    ("last", |_, args| match args {
        [Value::List(list)] => {
            Ok(list.len().checked_sub(1).and_then(|at| list.get(at)).map_or(Value::NONE, Value::some))
        }
        _ => Err(NO_MATCH),
    }),
    ("base64.encode", |memory, args| match args {
        [Value::Bytes(bytes)] => {
            memory.take(2 * bytes.len())?;
            Ok(Value::from(STANDARD.encode(bytes)))
        }
        _ => Err(NO_MATCH),
    }),
    ("base64.decode", |memory, args| match args {
        [Value::String(text)] => {
            memory.take(text.len())?;
            let decoded = STANDARD.decode(&**text).or_else(|_| STANDARD_NO_PAD.decode(&**text));
            decoded.map(Value::bytes).map_err(|error| err!("illegal base64 data: {error}"))
        }
        _ => Err(NO_MATCH),
    }),
];

fn unwrap<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [Value::List(list)] = args else { return Err(NO_MATCH) };
    let mut items = Vec::new();
    for item in list.iter() {
        match item {
            Value::Optional(Some(value)) => items.push((*value).clone()),
            Value::Optional(None) => {}
            other => return Err(err!("value {} is not optional", super::display(&other))),
        }
    }
    Ok(Value::list(items))
}

fn is_zero(value: &Value<'_>) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Int(value) => *value == 0,
        Value::Uint(value) => *value == 0,
        Value::Double(value) => *value == 0.0,
        Value::String(text) => text.is_empty(),
        Value::Bytes(bytes) => bytes.is_empty(),
        Value::List(list) => list.is_empty(),
        Value::Map(map) => map.is_empty(),
        Value::Duration(duration) => duration.nanos == 0,
        Value::Object(object) => object.fields.is_empty(),
        Value::Optional(value) => value.is_none(),
        Value::Timestamp(_) | Value::Type(_) | Value::Opaque(_) | Value::Lazy(_) | Value::Preserved(_) => {
            false
        }
    }
}
