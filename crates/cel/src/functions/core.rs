//! Operators, conversions, sizes.

use super::{Entry, Memory, NO_MATCH, go_float};
use crate::error::{EvalError, NO_SUCH_OVERLOAD, err};
use crate::time::{self, Duration, Timestamp};
use crate::types::Type;
use crate::value::{Map, Value, code_points, compare};
use std::cmp::Ordering;

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

const INT_OVERFLOW: EvalError = EvalError::text("integer overflow");
const UINT_OVERFLOW: EvalError = EvalError::text("unsigned integer overflow");
const DURATION_OVERFLOW: EvalError = EvalError::text("duration overflow");

pub(super) const TABLE: &[Entry] = &[
    ("_+_", add),
    ("_-_", |_, args| subtract(args)),
    ("_*_", |_, args| arithmetic("_*_", args, i64::checked_mul, u64::checked_mul, Some(|a, b| a * b))),
    ("_/_", |_, args| divide(args)),
    ("_%_", |_, args| modulo(args)),
    ("-_", |_, args| negate(args)),
    ("!_", |_, args| match args {
        [Value::Bool(value)] => Ok(Value::Bool(!*value)),
        [Value::Int(_) | Value::Double(_) | Value::Duration(_)] => Err(NO_SUCH_OVERLOAD),
        [_] => Err(EvalError::text("no such overload: !_")),
        _ => Err(NO_MATCH),
    }),
    ("_<_", |_, args| order("_<_", args, Ordering::is_lt)),
    ("_<=_", |_, args| order("_<=_", args, Ordering::is_le)),
    ("_>_", |_, args| order("_>_", args, Ordering::is_gt)),
    ("_>=_", |_, args| order("_>=_", args, Ordering::is_ge)),
    ("@in", |_, args| is_in(args)),
    ("size", |_, args| size(args)),
    ("dyn", |_, args| single(args)),
    ("type", |_, args| Ok(Value::Type(single(args)?.type_of()))),
    ("bool", |_, args| to_bool(args)),
    ("int", |_, args| to_int(args)),
    ("uint", |_, args| to_uint(args)),
    ("double", |_, args| to_double(args)),
    ("string", to_string),
    ("bytes", to_bytes),
    ("timestamp", |_, args| to_timestamp(args)),
    ("duration", |_, args| to_duration(args)),
    ("cel.@mapInsert", map_insert),
];

fn single<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [value] => Ok(value.clone()),
        _ => Err(NO_MATCH),
    }
}

/// The error of an operator: its left side does not have it, or it does not go with the right side.
fn mismatch(operator: &str, supported: bool) -> EvalError {
    if supported { NO_SUCH_OVERLOAD } else { err!("no such overload: {operator}") }
}

fn add<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [left, right] = args else { return Err(NO_MATCH) };
    Ok(match (&mut *left, &*right) {
        (Value::Int(a), Value::Int(b)) => Value::Int(a.checked_add(*b).ok_or(INT_OVERFLOW)?),
        (Value::Uint(a), Value::Uint(b)) => Value::Uint(a.checked_add(*b).ok_or(UINT_OVERFLOW)?),
        (Value::Double(a), Value::Double(b)) => Value::Double(*a + *b),
        (Value::String(a), Value::String(b)) => {
            memory.take(a.len() + b.len())?;
            Value::string([&**a, &**b].concat())
        }
        (Value::Bytes(a), Value::Bytes(b)) => {
            memory.take(a.len() + b.len())?;
            Value::bytes([&**a, &**b].concat())
        }
        (Value::List(_), Value::List(b)) => {
            let Value::List(a) = std::mem::replace(left, Value::Null) else { return Err(NO_MATCH) };
            memory.take_values(b.len())?;
            Value::List(a.concat(b))
        }
        (Value::Timestamp(time), Value::Duration(duration)) => Value::Timestamp(time.plus(*duration)?),
        (Value::Duration(duration), Value::Timestamp(time)) => Value::Timestamp(time.plus(*duration)?),
        (Value::Duration(a), Value::Duration(b)) => {
            Value::Duration(Duration { nanos: a.nanos.checked_add(b.nanos).ok_or(DURATION_OVERFLOW)? })
        }
        (left, _) => {
            let supported = matches!(
                left,
                Value::Int(_)
                    | Value::Uint(_)
                    | Value::Double(_)
                    | Value::String(_)
                    | Value::Bytes(_)
                    | Value::List(_)
                    | Value::Timestamp(_)
                    | Value::Duration(_)
            );
            return Err(mismatch("_+_", supported));
        }
    })
}

fn subtract<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [Value::Timestamp(a), Value::Timestamp(b)] => Ok(Value::Duration(a.minus(b)?)),
        [Value::Timestamp(a), Value::Duration(b)] => {
            let back = b.nanos.checked_neg().ok_or(DURATION_OVERFLOW)?;
            Ok(Value::Timestamp(a.plus(Duration { nanos: back })?))
        }
        [Value::Duration(a), Value::Duration(b)] => {
            let nanos = a.nanos.checked_sub(b.nanos).ok_or(DURATION_OVERFLOW)?;
            Ok(Value::Duration(Duration { nanos }))
        }
        [Value::Timestamp(_) | Value::Duration(_), _] => Err(NO_SUCH_OVERLOAD),
        _ => arithmetic("_-_", args, i64::checked_sub, u64::checked_sub, Some(|a, b| a - b)),
    }
}

fn arithmetic<'a>(
    operator: &str,
    args: &[Value<'a>],
    ints: fn(i64, i64) -> Option<i64>,
    uints: fn(u64, u64) -> Option<u64>,
    doubles: Option<fn(f64, f64) -> f64>,
) -> Result<'a> {
    match (args, doubles) {
        ([Value::Int(a), Value::Int(b)], _) => ints(*a, *b).map(Value::Int).ok_or(INT_OVERFLOW),
        ([Value::Uint(a), Value::Uint(b)], _) => uints(*a, *b).map(Value::Uint).ok_or(UINT_OVERFLOW),
        ([Value::Double(a), Value::Double(b)], Some(doubles)) => Ok(Value::Double(doubles(*a, *b))),
        ([left, _], _) => {
            let supported = matches!(left, Value::Int(_) | Value::Uint(_))
                || doubles.is_some() && matches!(left, Value::Double(_));
            Err(mismatch(operator, supported))
        }
        _ => Err(NO_MATCH),
    }
}

fn divide<'a>(args: &[Value<'a>]) -> Result<'a> {
    if let [Value::Int(_), Value::Int(0)] | [Value::Uint(_), Value::Uint(0)] = args {
        return Err(EvalError::text("division by zero"));
    }
    arithmetic("_/_", args, i64::checked_div, u64::checked_div, Some(|a, b| a / b))
}

fn modulo<'a>(args: &[Value<'a>]) -> Result<'a> {
    if let [Value::Int(_), Value::Int(0)] | [Value::Uint(_), Value::Uint(0)] = args {
        return Err(EvalError::text("modulus by zero"));
    }
    arithmetic("_%_", args, i64::checked_rem, u64::checked_rem, None)
}

fn negate<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [Value::Int(value)] => value.checked_neg().map(Value::Int).ok_or(INT_OVERFLOW),
        [Value::Double(value)] => Ok(Value::Double(-value)),
        [Value::Duration(value)] => {
            let nanos = value.nanos.checked_neg().ok_or(DURATION_OVERFLOW)?;
            Ok(Value::Duration(Duration { nanos }))
        }
        [Value::Bool(_)] => Err(NO_SUCH_OVERLOAD),
        _ => Err(EvalError::text("no such overload: -_")),
    }
}

fn order<'a>(operator: &str, args: &[Value<'a>], holds: fn(Ordering) -> bool) -> Result<'a> {
    let [left, right] = args else { return Err(NO_MATCH) };
    let supported = matches!(
        left,
        Value::Bool(_)
            | Value::Int(_)
            | Value::Uint(_)
            | Value::Double(_)
            | Value::String(_)
            | Value::Bytes(_)
            | Value::Timestamp(_)
            | Value::Duration(_)
    );
    if !supported {
        return Err(mismatch(operator, false));
    }
    compare(left, right).map(|ordering| Value::Bool(holds(ordering)))
}

fn is_in<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [value, Value::List(list)] => list.contains(value).map(Value::Bool),
        [key, Value::Map(map)] => Ok(Value::Bool(map.get(key)?.is_some())),
        _ => Err(NO_SUCH_OVERLOAD),
    }
}

fn size<'a>(args: &[Value<'a>]) -> Result<'a> {
    let size = match args {
        [Value::String(text)] => code_points(text),
        [Value::Bytes(bytes)] => bytes.len() as u64,
        [Value::List(list)] => list.len() as u64,
        [Value::Map(map)] => map.len() as u64,
        _ => return Err(EvalError::text("no such overload: size")),
    };
    Ok(Value::Int(size as i64))
}

fn conversion_error(value: &Value<'_>, to: &Type) -> EvalError {
    err!("type conversion error from '{}' to '{}'", value.type_name(), to.runtime_name())
}

fn to_bool<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [value @ Value::Bool(_)] => Ok(value.clone()),
        [value @ Value::String(text)] => match &**text {
            "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(Value::Bool(true)),
            "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(Value::Bool(false)),
            _ => Err(conversion_error(value, &Type::Bool)),
        },
        _ => Err(NO_MATCH),
    }
}

fn to_int<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    Ok(Value::Int(match value {
        Value::Int(value) => *value,
        Value::Uint(value) => i64::try_from(*value).map_err(|_| INT_OVERFLOW)?,
        // As upstream: the bounds themselves are out of range, as they are not exact.
        Value::Double(value)
            if *value > -9_223_372_036_854_775_808.0 && *value < 9_223_372_036_854_775_807.0 =>
        {
            *value as i64
        }
        Value::Double(_) => return Err(INT_OVERFLOW),
        Value::String(text) if is_integer(text) => {
            text.parse().map_err(|_| conversion_error(value, &Type::Int))?
        }
        Value::String(_) => return Err(conversion_error(value, &Type::Int)),
        Value::Timestamp(time) => time.unix_seconds(),
        Value::Duration(duration) => duration.nanos,
        _ => return Err(NO_MATCH),
    }))
}

/// Only digits after a sign.
fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

fn to_uint<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    Ok(Value::Uint(match value {
        Value::Uint(value) => *value,
        Value::Int(value) => u64::try_from(*value).map_err(|_| UINT_OVERFLOW)?,
        Value::Double(value) if *value >= 0.0 && *value < 18_446_744_073_709_551_615.0 => *value as u64,
        Value::Double(_) => return Err(UINT_OVERFLOW),
        Value::String(text) if text.bytes().all(|b| b.is_ascii_digit()) => {
            text.parse().map_err(|_| conversion_error(value, &Type::Uint))?
        }
        Value::String(_) => return Err(conversion_error(value, &Type::Uint)),
        _ => return Err(NO_MATCH),
    }))
}

fn to_double<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    Ok(Value::Double(match value {
        Value::Double(value) => *value,
        Value::Int(value) => *value as f64,
        Value::Uint(value) => *value as f64,
        Value::String(text) => parse_double(text).ok_or_else(|| conversion_error(value, &Type::Double))?,
        _ => return Err(NO_MATCH),
    }))
}

/// A double as Go reads it. A number out of range is an error.
fn parse_double(text: &str) -> Option<f64> {
    let bare = text.strip_prefix(['+', '-']).unwrap_or(text);
    let named = ["inf", "infinity", "nan"].iter().any(|name| bare.eq_ignore_ascii_case(name));
    let numeric = bare.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    if !named && !numeric {
        return None;
    }
    let value: f64 = text.parse().ok()?;
    (named || value.is_finite()).then_some(value)
}

fn to_string<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    Ok(match value {
        Value::String(_) => value.clone(),
        Value::Bool(value) => Value::from(value.to_string()),
        Value::Int(value) => Value::from(value.to_string()),
        Value::Uint(value) => Value::from(value.to_string()),
        Value::Double(value) => Value::from(go_float(*value)),
        Value::Bytes(bytes) => {
            memory.take(bytes.len())?;
            match std::str::from_utf8(bytes) {
                Ok(text) => Value::string(text),
                Err(_) => return Err(EvalError::text("invalid UTF-8 in bytes, cannot convert to string")),
            }
        }
        Value::Timestamp(time) => Value::from(time.to_string()),
        Value::Duration(duration) => Value::from(duration.to_string()),
        Value::Opaque(opaque) if matches!(opaque.type_name(), "net.IP" | "net.CIDR") => {
            Value::from(opaque.text())
        }
        _ => return Err(NO_MATCH),
    })
}

fn to_bytes<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    match args {
        [value @ Value::Bytes(_)] => Ok(value.clone()),
        [Value::String(text)] => {
            memory.take(text.len())?;
            Ok(Value::bytes(text.as_bytes()))
        }
        _ => Err(NO_MATCH),
    }
}

fn to_timestamp<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [value @ Value::Timestamp(_)] => Ok(value.clone()),
        [Value::Int(seconds)] => Timestamp::from_unix(*seconds, 0)
            .map(Value::Timestamp)
            .ok_or(EvalError::text("timestamp overflow")),
        [value @ Value::String(text)] => match time::parse_timestamp(text) {
            Some(time) => time.map(Value::Timestamp),
            None => Err(conversion_error(value, &Type::Timestamp)),
        },
        _ => Err(NO_MATCH),
    }
}

fn to_duration<'a>(args: &[Value<'a>]) -> Result<'a> {
    match args {
        [value @ Value::Duration(_)] => Ok(value.clone()),
        [Value::Int(nanos)] => Ok(Value::Duration(Duration { nanos: *nanos })),
        [value @ Value::String(text)] => match time::parse_duration(text) {
            Some(duration) => Ok(Value::Duration(duration)),
            None => Err(conversion_error(value, &Type::Duration)),
        },
        _ => Err(NO_MATCH),
    }
}

fn map_insert<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let Some((first, rest)) = args.split_first_mut() else { return Err(NO_MATCH) };
    let added = match &*rest {
        [key, value] => vec![(key.clone(), value.clone())],
        [Value::Map(map)] => map.entries(),
        _ => return Err(NO_MATCH),
    };
    let Value::Map(map) = std::mem::replace(first, Value::Null) else { return Err(NO_MATCH) };
    memory.take_values(added.len() * 2)?;
    let mut entries = map.into_entries();
    for (key, value) in added {
        let shown = super::display(&key);
        if !entries.insert(key, value) {
            return Err(err!("insert failed: key {shown} already exists"));
        }
    }
    Ok(Value::Map(Map::from_entries(entries)))
}

/// The cost of walking through a value once.
pub(crate) fn traversal(value: &Value<'_>) -> u64 {
    match value {
        Value::String(text) => (text.len() / 10) as u64,
        Value::Bytes(bytes) => (bytes.len() / 10) as u64,
        Value::List(list) => list.iter().map(|item| traversal(&item)).sum(),
        Value::Map(map) => map.entries().iter().map(|(key, value)| traversal(key) + traversal(value)).sum(),
        _ => 1,
    }
}
