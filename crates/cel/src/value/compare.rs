//! Equality and order.

use std::cmp::Ordering;
use std::collections::HashMap;

use super::{List, Map, Value};
use crate::error::{EvalError, NO_SUCH_OVERLOAD};
use crate::schema::ListType;

/// `a == b`, as upstream's `Equal` of the left value decides it.
pub(crate) fn equals(a: &Value<'_>, b: &Value<'_>) -> Result<bool, EvalError> {
    use Value::*;
    Ok(match (a, b) {
        (Null, Null) => true,
        (Null, _) | (_, Null) => false,
        (Bool(a), Bool(b)) => a == b,
        (Int(a), Int(b)) => a == b,
        (Uint(a), Uint(b)) => a == b,
        (Double(a), Double(b)) => a == b,
        (Int(_) | Uint(_) | Double(_), Int(_) | Uint(_) | Double(_)) => {
            compare_numbers(a, b) == Some(Ordering::Equal)
        }
        // One string many times is compared by its place.
        (String(a), String(b)) => a.len() == b.len() && (a.as_ptr() == b.as_ptr() || **a == **b),
        (Bytes(a), Bytes(b)) => a == b,
        (Timestamp(a), Timestamp(b)) => a.cmp(b) == Ordering::Equal,
        (Duration(a), Duration(b)) => a == b,
        (Type(a), Type(b)) => a.runtime_name() == b.runtime_name(),
        (Optional(None), Optional(None)) => true,
        (Optional(Some(a)), Optional(Some(b))) => equals(a, b)?,
        (List(a), List(b)) => lists_equal(a, b)?,
        (Map(a), Map(b)) => maps_equal(a, b)?,
        // A typed list or map is not compared with anything else.
        (List(a), _) if a.is_typed() => return Err(NO_SUCH_OVERLOAD),
        (Map(a), _) if a.schema().is_some() => return Err(NO_SUCH_OVERLOAD),
        (Object(a), Object(b)) => {
            a.type_name == b.type_name
                && a.fields.len() == b.fields.len()
                && all_equal(a.fields.iter().map(|(name, value)| (value, b.get(name))))?
        }
        (Opaque(a), Opaque(b)) => a.type_name() == b.type_name() && a.equals(&**b),
        (Preserved(a), b) => b.to_json().is_ok_and(|b| **a == b),
        _ => false,
    })
}

fn all_equal<'v, 'a: 'v>(
    pairs: impl Iterator<Item = (&'v Value<'a>, Option<&'v Value<'a>>)>,
) -> Result<bool, EvalError> {
    for (a, b) in pairs {
        match b {
            Some(b) if equals(a, b)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

fn lists_equal(a: &List<'_>, b: &List<'_>) -> Result<bool, EvalError> {
    if a.len() != b.len() {
        return Ok(false);
    }
    match a.list_type() {
        ListType::Atomic => {
            for (a, b) in a.iter().zip(b.iter()) {
                if !equals(&a, &b)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        ListType::Set => {
            let members: Vec<String> = a.iter().map(|item| set_key(&item)).collect();
            let members: std::collections::HashSet<String> = members.into_iter().collect();
            Ok(b.iter().all(|item| members.contains(&set_key(&item))))
        }
        ListType::Map => {
            let by_key: HashMap<String, Value<'_>> =
                a.iter().map(|item| (map_key(&item, a.map_keys()), item)).collect();
            for item in b.iter() {
                match by_key.get(&map_key(&item, a.map_keys())) {
                    Some(own) if equals(own, &item)? => {}
                    _ => return Ok(false),
                }
            }
            Ok(true)
        }
    }
}

/// A text that is the same for equal members of a set.
fn set_key(value: &Value<'_>) -> String {
    format!("{value:?}")
}

/// A text of the values of the keys of an item.
fn map_key(item: &Value<'_>, keys: &[String]) -> String {
    let Value::Map(map) = item else { return set_key(item) };
    let values = keys.iter().map(|key| match map.get_str(key) {
        Ok(Some(value)) => set_key(&value),
        _ => String::from("<nil>"),
    });
    values.collect::<Vec<_>>().join("\u{0}")
}

/// Joins lists as their type says: sets without doubles, maps by their keys.
pub(super) fn join<'a>(a: &List<'a>, b: &List<'a>) -> List<'a> {
    let mut items: Vec<Value<'a>> = a.iter().collect();
    match a.list_type() {
        ListType::Atomic => items.extend(b.iter()),
        ListType::Set => {
            let mut members: std::collections::HashSet<String> = items.iter().map(set_key).collect();
            items.extend(b.iter().filter(|item| members.insert(set_key(item))));
        }
        ListType::Map => {
            let keys = a.map_keys();
            let places: HashMap<String, usize> =
                items.iter().enumerate().map(|(at, item)| (map_key(item, keys), at)).collect();
            for item in b.iter() {
                match places.get(&map_key(&item, keys)) {
                    Some(at) => items[*at] = item,
                    None => items.push(item),
                }
            }
        }
    }
    List::new(items).with_schema_of(a)
}

fn maps_equal(a: &Map<'_>, b: &Map<'_>) -> Result<bool, EvalError> {
    if a.len() != b.len() {
        return Ok(false);
    }
    if let (Map::Json { members, schema: Some(schema) }, _) = (a, b) {
        // Members that the schema does not describe are compared as JSON.
        for (key, own) in members.iter().filter(|(key, _)| schema.property(key).is_none()) {
            let Map::Json { members: others, schema: Some(_) } = b else { return Err(NO_SUCH_OVERLOAD) };
            if others.get(key).is_some_and(|other| other != own) {
                return Ok(false);
            }
        }
    }
    for key in a.keys() {
        match (a.get(&key)?, b.get(&key)?) {
            (Some(a), Some(b)) if equals(&a, &b)? => {}
            (None, None) => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The order of two numbers of any types; `None` if one is not a number.
fn compare_numbers(a: &Value<'_>, b: &Value<'_>) -> Option<Ordering> {
    let integer = |value: &Value<'_>| match value {
        Value::Int(value) => Some(i128::from(*value)),
        Value::Uint(value) => Some(i128::from(*value)),
        _ => None,
    };
    match (a, b) {
        (Value::Double(a), Value::Double(b)) => a.partial_cmp(b),
        (Value::Double(a), b) => compare_double(*a, integer(b)?),
        (a, Value::Double(b)) => compare_double(*b, integer(a)?).map(Ordering::reverse),
        (a, b) => Some(integer(a)?.cmp(&integer(b)?)),
    }
}

fn compare_double(a: f64, b: i128) -> Option<Ordering> {
    // Beyond these bounds a double is larger or smaller than every integer.
    if a >= 2e19 {
        return Some(Ordering::Greater);
    }
    if a <= -2e19 {
        return Some(Ordering::Less);
    }
    a.partial_cmp(&(b as f64))
}

/// The order of `a` and `b`.
pub(crate) fn compare(a: &Value<'_>, b: &Value<'_>) -> Result<Ordering, EvalError> {
    use Value::*;
    match (a, b) {
        (Bool(a), Bool(b)) => Ok(a.cmp(b)),
        (Int(a), Int(b)) => Ok(a.cmp(b)),
        (Int(_) | Uint(_) | Double(_), Int(_) | Uint(_) | Double(_)) => {
            compare_numbers(a, b).ok_or(EvalError::text("NaN values cannot be ordered"))
        }
        (String(a), String(b)) => Ok((**a).cmp(&**b)),
        (Bytes(a), Bytes(b)) => Ok(a.cmp(b)),
        (Timestamp(a), Timestamp(b)) => Ok(a.cmp(b)),
        (Duration(a), Duration(b)) => Ok(a.cmp(b)),
        _ => Err(NO_SUCH_OVERLOAD),
    }
}

impl<'a> List<'a> {
    /// `a + b`.
    pub(crate) fn concat(self, other: &Self) -> Self {
        match self.list_type() {
            ListType::Atomic => self.append(other),
            ListType::Set | ListType::Map => join(&self, other),
        }
    }

    /// Is one of the items equal to `value`?
    pub(crate) fn contains(&self, value: &Value<'_>) -> Result<bool, EvalError> {
        let mut error = None;
        for item in self.iter() {
            match equals(&item, value) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(found) => error = error.or(Some(found)),
            }
        }
        error.map_or(Ok(false), Err)
    }
}
