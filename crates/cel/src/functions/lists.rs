//! Lists and sets.

use std::cmp::Ordering;

use super::{Entry, Memory, NO_MATCH};
use crate::error::{EvalError, err};
use crate::time::Duration;
use crate::value::{List, Value, compare, equals};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// Levels down to which `flatten` goes.
const MAX_FLATTEN: i64 = 100;

pub(super) const TABLE: &[Entry] = &[
    ("isSorted", |_, args| is_sorted(args)),
    ("sum", |memory, args| sum(memory, args, Value::Int(0))),
    // The sum of no items is the zero of their type, which only the checker knows.
    ("list_uint_sum_uint", |memory, args| sum(memory, args, Value::Uint(0))),
    ("list_double_sum_double", |memory, args| sum(memory, args, Value::Double(0.0))),
    ("list_duration_sum_duration", |memory, args| sum(memory, args, Value::Duration(Duration { nanos: 0 }))),
    ("min", |_, args| extremum(args, "min", Ordering::Less)),
    ("max", |_, args| extremum(args, "max", Ordering::Greater)),
    ("distinct", distinct),
    ("flatten", flatten),
    ("lists.range", range),
    ("slice", slice),
    ("sort", sort),
    ("@sortByAssociatedKeys", sort_by_keys),
    ("sets.contains", |_, args| sets(args, contains_all)),
    ("sets.equivalent", |_, args| sets(args, |a, b| Ok(contains_all(a, b)? && contains_all(b, a)?))),
    ("sets.intersects", |_, args| sets(args, intersects)),
    ("includes", |_, args| includes(args)),
];

pub(super) fn index_of<'a>(items: impl Iterator<Item = (usize, Value<'a>)>, value: &Value<'a>) -> Result<'a> {
    for (at, item) in items {
        if equals(&item, value)? {
            return Ok(Value::Int(at as i64));
        }
    }
    Ok(Value::Int(-1))
}

fn is_sorted<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [Value::List(list)] = args else { return Err(NO_MATCH) };
    let mut before: Option<Value<'a>> = None;
    for item in list.iter() {
        if let Some(before) = &before
            && compare(before, &item)?.is_gt()
        {
            return Ok(Value::Bool(false));
        }
        before = Some(item);
    }
    Ok(Value::Bool(true))
}

fn sum<'a>(memory: &mut Memory, args: &mut [Value<'a>], zero: Value<'a>) -> Result<'a> {
    let [Value::List(list)] = &*args else { return Err(NO_MATCH) };
    let add = super::find("_+_").ok_or(NO_MATCH)?;
    let mut items = list.iter();
    let mut total = match items.next() {
        None => zero,
        Some(Value::Duration(first)) => Value::Duration(Duration { nanos: first.nanos }),
        Some(first @ (Value::Int(_) | Value::Uint(_) | Value::Double(_))) => first,
        Some(_) => return Err(NO_MATCH),
    };
    for item in items {
        total = add(memory, &mut [total, item])?;
    }
    Ok(total)
}

fn extremum<'a>(args: &[Value<'a>], name: &str, wanted: Ordering) -> Result<'a> {
    let [Value::List(list)] = args else { return Err(NO_MATCH) };
    let mut items = list.iter();
    let mut found = items.next().ok_or_else(|| err!("{name} called on empty list"))?;
    for item in items {
        if compare(&item, &found)? == wanted {
            found = item;
        }
    }
    Ok(found)
}

pub(super) fn reverse<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [Value::List(list)] = &*args else { return Err(NO_MATCH) };
    memory.take_values(list.len())?;
    let mut items: Vec<Value<'a>> = list.iter().collect();
    items.reverse();
    Ok(Value::list(items))
}

fn distinct<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [Value::List(list)] = &*args else { return Err(NO_MATCH) };
    memory.take_values(list.len())?;
    let mut found: Vec<Value<'a>> = Vec::new();
    for item in list.iter() {
        if !found.iter().any(|other| equals(&item, other).unwrap_or(false)) {
            found.push(item);
        }
    }
    Ok(Value::list(found))
}

fn flatten<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let (list, depth) = match &*args {
        [Value::List(list)] => (list, 1),
        [Value::List(_), Value::Int(depth)] if *depth < 0 => {
            return Err(EvalError::text("level must be non-negative"));
        }
        [Value::List(list), Value::Int(depth)] => (list, *depth),
        _ => return Err(NO_MATCH),
    };
    let mut flat = Vec::new();
    flatten_into(memory, list, depth.min(MAX_FLATTEN), &mut flat)?;
    Ok(Value::list(flat))
}

fn flatten_into<'a>(
    memory: &mut Memory,
    list: &List<'a>,
    depth: i64,
    flat: &mut Vec<Value<'a>>,
) -> std::result::Result<(), EvalError> {
    for item in list.iter() {
        match item {
            Value::List(inner) if depth > 0 => flatten_into(memory, &inner, depth - 1, flat)?,
            item => {
                memory.take_values(1)?;
                flat.push(item);
            }
        }
    }
    Ok(())
}

fn range<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [Value::Int(end)] = &*args else { return Err(NO_MATCH) };
    let count = usize::try_from(*end).unwrap_or(0);
    memory.take_values(count)?;
    Ok(Value::list((0..count as i64).map(Value::Int).collect()))
}

fn slice<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [Value::List(list), Value::Int(start), Value::Int(end)] = &*args else { return Err(NO_MATCH) };
    if *start < 0 || *end < 0 {
        return Err(err!("cannot slice({start}, {end}), negative indexes not supported"));
    }
    if start > end {
        return Err(err!(
            "cannot slice({start}, {end}), start index must be less than or equal to end index"
        ));
    }
    if list.len() < *end as usize {
        return Err(err!("cannot slice({start}, {end}), list is length {}", list.len()));
    }
    let (start, end) = (*start as usize, *end as usize);
    memory.take_values(end - start)?;
    Ok(Value::list((start..end).filter_map(|at| list.get(at)).collect()))
}

fn sort<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [Value::List(list)] = &*args else { return Err(NO_MATCH) };
    let items: Vec<Value<'a>> = list.iter().collect();
    sorted(memory, &items, &items)
}

fn sort_by_keys<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let [Value::List(list), Value::List(keys)] = &*args else { return Err(NO_MATCH) };
    if list.len() != keys.len() {
        return Err(err!(
            "@sortByAssociatedKeys() expected a list of the same size as the associated keys list, but got {} and {} \
             elements respectively",
            list.len(),
            keys.len()
        ));
    }
    let (items, keys): (Vec<Value<'a>>, Vec<Value<'a>>) = (list.iter().collect(), keys.iter().collect());
    sorted(memory, &items, &keys)
}

fn sorted<'a>(memory: &mut Memory, items: &[Value<'a>], keys: &[Value<'a>]) -> Result<'a> {
    memory.take_values(items.len())?;
    if let Some(first) = keys.first() {
        if compare(first, first).is_err() {
            return Err(EvalError::text("list elements must be comparable"));
        }
        let first = first.type_of();
        if keys.iter().any(|key| key.type_of() != first) {
            return Err(EvalError::text("list elements must have the same type"));
        }
    }
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|a, b| compare(&keys[*a], &keys[*b]).unwrap_or(Ordering::Equal));
    Ok(Value::list(order.into_iter().map(|at| items[at].clone()).collect()))
}

fn sets<'a>(
    args: &[Value<'a>],
    test: fn(&List<'_>, &List<'_>) -> std::result::Result<bool, EvalError>,
) -> Result<'a> {
    match args {
        [Value::List(a), Value::List(b)] => test(a, b).map(Value::Bool),
        _ => Err(NO_MATCH),
    }
}

fn contains_all(list: &List<'_>, sublist: &List<'_>) -> std::result::Result<bool, EvalError> {
    for item in sublist.iter() {
        if !list.contains(&item)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn intersects(a: &List<'_>, b: &List<'_>) -> std::result::Result<bool, EvalError> {
    for item in a.iter() {
        if b.contains(&item)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Is a value an item of a list, or equal to a value that is no list?
fn includes<'a>(args: &[Value<'a>]) -> Result<'a> {
    /// The most values that an attribute of a device may have.
    const MAX_VALUES: usize = 48;
    match args {
        [Value::List(list), _] if list.len() > MAX_VALUES => {
            Err(err!("list has {} elements, more than the {MAX_VALUES} that are allowed", list.len()))
        }
        [Value::List(list), value] => list.contains(value).map(Value::Bool),
        [own, value] => equals(own, value).map(Value::Bool),
        _ => Err(NO_MATCH),
    }
}
