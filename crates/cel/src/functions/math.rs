//! The math extension.

use std::cmp::Ordering;

use super::{Entry, NO_MATCH};
use crate::error::{EvalError, err};
use crate::value::{Value, compare};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

const INT_OVERFLOW: EvalError = EvalError::text("integer overflow");

pub(super) const TABLE: &[Entry] = &[
    ("math.@max", |_, args| extremum(args, "math.@max", Ordering::Greater)),
    ("math.@min", |_, args| extremum(args, "math.@min", Ordering::Less)),
    ("math.ceil", |_, args| double(args, f64::ceil)),
    ("math.floor", |_, args| double(args, f64::floor)),
    ("math.round", |_, args| double(args, f64::round)),
    ("math.trunc", |_, args| double(args, f64::trunc)),
    ("math.isInf", |_, args| test(args, f64::is_infinite)),
    ("math.isNaN", |_, args| test(args, f64::is_nan)),
    ("math.isFinite", |_, args| test(args, f64::is_finite)),
    ("math.abs", |_, args| match args {
        [Value::Int(value)] => value.checked_abs().map(Value::Int).ok_or(INT_OVERFLOW),
        [Value::Uint(value)] => Ok(Value::Uint(*value)),
        [Value::Double(value)] => Ok(Value::Double(value.abs())),
        _ => Err(NO_MATCH),
    }),
    ("math.sign", |_, args| match args {
        [Value::Int(value)] => Ok(Value::Int(value.signum())),
        [Value::Uint(value)] => Ok(Value::Uint((*value).min(1))),
        [Value::Double(value)] if *value == 0.0 || value.is_nan() => Ok(Value::Double(*value)),
        [Value::Double(value)] => Ok(Value::Double(value.signum())),
        _ => Err(NO_MATCH),
    }),
    ("math.sqrt", |_, args| match args {
        [Value::Int(value)] => Ok(Value::Double((*value as f64).sqrt())),
        [Value::Uint(value)] => Ok(Value::Double((*value as f64).sqrt())),
        [Value::Double(value)] => Ok(Value::Double(value.sqrt())),
        _ => Err(NO_MATCH),
    }),
    ("math.bitAnd", |_, args| bits(args, |a, b| a & b)),
    ("math.bitOr", |_, args| bits(args, |a, b| a | b)),
    ("math.bitXor", |_, args| bits(args, |a, b| a ^ b)),
    ("math.bitNot", |_, args| match args {
        [Value::Int(value)] => Ok(Value::Int(!*value)),
        [Value::Uint(value)] => Ok(Value::Uint(!*value)),
        _ => Err(NO_MATCH),
    }),
    ("math.bitShiftLeft", |_, args| shift(args, "math.bitShiftLeft", u64::checked_shl)),
    ("math.bitShiftRight", |_, args| shift(args, "math.bitShiftRight", u64::checked_shr)),
];

fn double<'a>(args: &[Value<'a>], by: fn(f64) -> f64) -> Result<'a> {
    match args {
        [Value::Double(value)] => Ok(Value::Double(by(*value))),
        _ => Err(NO_MATCH),
    }
}

fn test<'a>(args: &[Value<'a>], holds: fn(f64) -> bool) -> Result<'a> {
    match args {
        [Value::Double(value)] => Ok(Value::Bool(holds(*value))),
        _ => Err(NO_MATCH),
    }
}

fn bits<'a>(args: &[Value<'a>], by: fn(u64, u64) -> u64) -> Result<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => Ok(Value::Int(by(*a as u64, *b as u64) as i64)),
        [Value::Uint(a), Value::Uint(b)] => Ok(Value::Uint(by(*a, *b))),
        _ => Err(NO_MATCH),
    }
}

/// Shifts fill with zeros, those of negative numbers, too.
fn shift<'a>(args: &[Value<'a>], name: &str, by: fn(u64, u32) -> Option<u64>) -> Result<'a> {
    let (value, offset) = match args {
        [Value::Int(value), Value::Int(offset)] => (*value as u64, *offset),
        [Value::Uint(value), Value::Int(offset)] => (*value, *offset),
        _ => return Err(NO_MATCH),
    };
    if offset < 0 {
        return Err(err!("{name}() negative offset: {offset}"));
    }
    let shifted = u32::try_from(offset).ok().and_then(|offset| by(value, offset)).unwrap_or(0);
    Ok(match args {
        [Value::Int(_), _] => Value::Int(shifted as i64),
        _ => Value::Uint(shifted),
    })
}

fn extremum<'a>(args: &[Value<'a>], name: &str, wanted: Ordering) -> Result<'a> {
    let items: Vec<Value<'a>> = match args {
        [Value::List(list)] => list.iter().collect(),
        _ => args.to_vec(),
    };
    let mut items = items.into_iter();
    let mut found = items.next().ok_or_else(|| err!("{name}(list) argument must not be empty"))?;
    let number = |value: &Value<'_>| matches!(value, Value::Int(_) | Value::Uint(_) | Value::Double(_));
    if !number(&found) {
        return Err(err!("no such overload: {name}"));
    }
    for item in items {
        if !number(&item) {
            return Err(err!("no such overload: {name}"));
        }
        if compare(&item, &found)? == wanted {
            found = item;
        }
    }
    Ok(found)
}
