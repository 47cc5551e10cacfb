//! Functions of templates, and the printing of values.

use std::fmt::Write as _;

use serde_json::Value;

use super::TemplateError;

pub(super) const FUNCTIONS: &[&str] = &[
    "json", "join", "index", "len", "upper", "lower", "title", "split", "println", "print", "printf", "eq",
    "ne", "lt", "le", "gt", "ge", "and", "or", "not", "truncate",
];

pub(super) fn truth(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// A value as Go prints it.
pub(super) fn print(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("<no value>"),
        Value::String(text) => out.push_str(text),
        Value::Array(list) => {
            out.push('[');
            for (index, item) in list.iter().enumerate() {
                if index > 0 {
                    out.push(' ');
                }
                print(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push_str("map[");
            for (index, (key, item)) in map.iter().enumerate() {
                let _ = write!(out, "{}{key}:", if index > 0 { " " } else { "" });
                print(item, out);
            }
            out.push(']');
        }
        other => out.push_str(&other.to_string()),
    }
}

pub(super) fn printed(value: &Value) -> String {
    let mut text = String::new();
    print(value, &mut text);
    text
}

pub(super) fn fail(at: &str, what: impl Into<String>) -> TemplateError {
    TemplateError::Execute { at: at.to_owned(), what: what.into() }
}

fn compare(name: &str, first: &Value, second: &Value) -> Result<bool, TemplateError> {
    use std::cmp::Ordering;
    let order = match (first, second) {
        (Value::Number(a), Value::Number(b)) => a.as_f64().partial_cmp(&b.as_f64()),
        (Value::String(a), Value::String(b)) => Some(a.cmp(b)),
        (a, b) if a == b => Some(Ordering::Equal),
        _ => None,
    };
    match (name, order) {
        ("eq", order) => Ok(order == Some(Ordering::Equal)),
        ("ne", order) => Ok(order != Some(Ordering::Equal)),
        (_, None) => Err(fail(name, "incompatible types for comparison")),
        ("lt", Some(order)) => Ok(order.is_lt()),
        ("le", Some(order)) => Ok(order.is_le()),
        ("gt", Some(order)) => Ok(order.is_gt()),
        (_, Some(order)) => Ok(order.is_ge()),
    }
}

pub(super) fn function(name: &str, arguments: &[Value]) -> Result<Value, TemplateError> {
    let wrong = || fail(name, format!("wrong number of args for {name}"));
    let one = || arguments.last().ok_or_else(wrong);
    let text = |change: fn(&str) -> String| Ok(Value::String(change(&printed(one()?))));
    match name {
        "json" => Ok(Value::String(without_labels(one()?).to_string())),
        "upper" => text(str::to_uppercase),
        "lower" => text(str::to_lowercase),
        "title" => text(|text| {
            let mut chars = text.chars();
            chars.next().map(|c| c.to_uppercase().chain(chars).collect()).unwrap_or_default()
        }),
        "len" => match one()? {
            Value::Array(list) => Ok(list.len().into()),
            Value::Object(map) => Ok(map.len().into()),
            Value::String(text) => Ok(text.len().into()),
            _ => Err(fail(name, "len of type that has none")),
        },
        "join" => match arguments {
            [Value::Array(list), Value::String(with)] => {
                Ok(list.iter().map(printed).collect::<Vec<_>>().join(with).into())
            }
            _ => Err(wrong()),
        },
        "split" => match arguments {
            [Value::String(text), Value::String(at)] => {
                Ok(text.split(at.as_str()).map(str::to_owned).collect::<Vec<_>>().into())
            }
            _ => Err(wrong()),
        },
        "truncate" => match arguments {
            [Value::String(text), Value::Number(length)] => {
                let length = usize::try_from(length.as_u64().unwrap_or(0)).unwrap_or(usize::MAX);
                Ok(text.chars().take(length).collect::<String>().into())
            }
            _ => Err(wrong()),
        },
        "index" => {
            let (value, keys) = arguments.split_first().ok_or_else(wrong)?;
            let mut value = value.clone();
            for key in keys {
                value = match (&value, key) {
                    (Value::Object(map), key) => map.get(&printed(key)).cloned().unwrap_or(Value::Null),
                    (Value::Array(list), Value::Number(number)) => {
                        let index = number.as_u64().and_then(|index| usize::try_from(index).ok());
                        index.and_then(|index| list.get(index)).cloned().ok_or_else(|| {
                            fail(name, format!("error calling index: index out of range: {number}"))
                        })?
                    }
                    _ => return Err(fail(name, "error calling index: index of untyped nil")),
                };
            }
            Ok(value)
        }
        "print" => Ok(arguments.iter().map(printed).collect::<String>().into()),
        "println" => Ok((arguments.iter().map(printed).collect::<Vec<_>>().join(" ") + "\n").into()),
        "printf" => {
            let (format, rest) = arguments.split_first().ok_or_else(wrong)?;
            Ok(formatted(&printed(format), rest).into())
        }
        "not" => Ok((!truth(one()?)).into()),
        "and" => {
            Ok(arguments.iter().find(|value| !truth(value)).or(arguments.last()).cloned().unwrap_or_default())
        }
        "or" => {
            Ok(arguments.iter().find(|value| truth(value)).or(arguments.last()).cloned().unwrap_or_default())
        }
        _ => match arguments {
            [first, others @ ..] if name == "eq" && !others.is_empty() => {
                for other in others {
                    if compare(name, first, other)? {
                        return Ok(true.into());
                    }
                }
                Ok(false.into())
            }
            [first, second] => compare(name, first, second).map(Value::Bool),
            _ => Err(wrong()),
        },
    }
}

/// `json .` shows the public fields, without those that serve `.Label`.
fn without_labels(value: &Value) -> Value {
    let mut value = value.clone();
    if let Value::Object(map) = &mut value {
        map.remove("__labels");
    }
    value
}

fn formatted(format: &str, arguments: &[Value]) -> String {
    let mut out = String::new();
    let mut arguments = arguments.iter();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut width = String::new();
        while let Some(c) = chars.next_if(|c| c.is_ascii_digit() || matches!(c, '-' | '.')) {
            width.push(c);
        }
        match chars.next() {
            Some('%') => out.push('%'),
            Some('q') => {
                out.push_str(&arguments.next().map(|v| format!("{:?}", printed(v))).unwrap_or_default())
            }
            Some(_) => {
                let text = arguments.next().map(printed).unwrap_or_default();
                let left = width.starts_with('-');
                let width: usize = width.trim_start_matches('-').parse().unwrap_or(0).min(1024);
                let _ = if left { write!(out, "{text:<width$}") } else { write!(out, "{text:>width$}") };
            }
            None => out.push('%'),
        }
    }
    out
}
