//! Strings.

use super::{Entry, Memory, NO_MATCH, lists};
use crate::error::{EvalError, err};
use crate::value::Value;

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

pub(super) const TABLE: &[Entry] = &[
    ("contains", |_, args| test(args, |text, other| text.contains(other))),
    ("startsWith", |_, args| test(args, |text, other| text.starts_with(other))),
    ("endsWith", |_, args| test(args, |text, other| text.ends_with(other))),
    ("charAt", |_, args| char_at(args)),
    ("indexOf", |_, args| index_of(args)),
    ("lastIndexOf", |_, args| last_index_of(args)),
    ("lowerAscii", |memory, args| convert(memory, args, |text| text.to_ascii_lowercase())),
    ("upperAscii", |memory, args| convert(memory, args, |text| text.to_ascii_uppercase())),
    ("trim", |memory, args| convert(memory, args, |text| text.trim().to_owned())),
    ("reverse", |memory, args| match args {
        [Value::List(_)] => lists::reverse(memory, args),
        _ => convert(memory, args, |text| text.chars().rev().collect()),
    }),
    ("replace", replace),
    ("split", split),
    ("substring", |memory, args| substring(memory, args)),
    ("join", join),
    ("strings.quote", |memory, args| convert(memory, args, quote)),
    ("jsonpatch.escapeKey", |memory, args| {
        convert(memory, args, |key| key.replace('~', "~0").replace('/', "~1"))
    }),
];

fn test<'a>(args: &[Value<'a>], holds: fn(&str, &str) -> bool) -> Result<'a> {
    match args {
        [Value::String(text), Value::String(other)] => Ok(Value::Bool(holds(text, other))),
        _ => Err(NO_MATCH),
    }
}

fn convert<'a>(memory: &mut Memory, args: &mut [Value<'a>], by: fn(&str) -> String) -> Result<'a> {
    match args {
        [Value::String(text)] => {
            memory.take(2 * text.len() + 2)?;
            Ok(Value::from(by(text)))
        }
        _ => Err(NO_MATCH),
    }
}

fn out_of_range(index: i64) -> EvalError {
    err!("index out of range: {index}")
}

/// The byte at which the code point `index` of `text` begins; the end counts as one.
fn offset(text: &str, index: i64) -> Option<usize> {
    let index = usize::try_from(index).ok()?;
    if text.is_ascii() {
        return (index <= text.len()).then_some(index);
    }
    text.char_indices().map(|(at, _)| at).chain([text.len()]).nth(index)
}

fn char_at<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [Value::String(text), Value::Int(index)] = args else { return Err(NO_MATCH) };
    let start = offset(text, *index).ok_or_else(|| out_of_range(*index))?;
    Ok(Value::from(text[start..].chars().next().map(String::from).unwrap_or_default()))
}

fn index_of<'a>(args: &[Value<'a>]) -> Result<'a> {
    let (text, sought, from) = match args {
        [Value::String(text), Value::String(sought)] => (text, sought, 0),
        [Value::String(text), Value::String(sought), Value::Int(from)] => (text, sought, *from),
        [Value::List(list), value] => return lists::index_of(list.iter().enumerate(), value),
        _ => return Err(NO_MATCH),
    };
    if sought.is_empty() {
        return Ok(Value::Int(from));
    }
    if from < 0 {
        return Err(out_of_range(from));
    }
    let found = offset(text, from).and_then(|start| Some(start + text[start..].find(&**sought)?));
    Ok(Value::Int(found.map_or(-1, |at| text[..at].chars().count() as i64)))
}

fn last_index_of<'a>(args: &[Value<'a>]) -> Result<'a> {
    let (text, sought, until) = match args {
        [Value::String(text), Value::String(sought)] => (text, sought, None),
        [Value::String(text), Value::String(sought), Value::Int(until)] => (text, sought, Some(*until)),
        [Value::List(list), value] => {
            let items: Vec<_> = list.iter().enumerate().collect();
            return lists::index_of(items.into_iter().rev(), value);
        }
        _ => return Err(NO_MATCH),
    };
    let length = text.chars().count() as i64;
    if sought.is_empty() {
        return Ok(Value::Int(until.unwrap_or(length)));
    }
    if let Some(until) = until {
        if until < 0 {
            return Err(out_of_range(until));
        }
        if until >= length {
            return Ok(Value::Int(-1));
        }
    }
    // The last match that begins at `until` or before it.
    let end = match until.and_then(|until| offset(text, until)) {
        Some(start) => (start + sought.len()).min(text.len()),
        None => text.len(),
    };
    let end = (0..=end).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let found = text[..end].rfind(&**sought);
    Ok(Value::Int(found.map_or(-1, |at| text[..at].chars().count() as i64)))
}

fn replace<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let (text, from, to, count) = match &*args {
        [Value::String(text), Value::String(from), Value::String(to)] => (text, from, to, -1),
        [Value::String(text), Value::String(from), Value::String(to), Value::Int(count)] => {
            (text, from, to, *count)
        }
        _ => return Err(NO_MATCH),
    };
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let matches = text.matches(&**from).take(limit).count();
    memory.take(text.len().saturating_add(matches.saturating_mul(to.len())))?;
    Ok(Value::from(text.replacen(&**from, to, limit)))
}

fn split<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let (text, separator, count) = match &*args {
        [Value::String(text), Value::String(separator)] => (text, separator, -1),
        [Value::String(text), Value::String(separator), Value::Int(count)] => (text, separator, *count),
        _ => return Err(NO_MATCH),
    };
    if count == 0 {
        return Ok(Value::list(Vec::new()));
    }
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    memory.take(text.len())?;
    let mut parts: Vec<&str> = Vec::new();
    if separator.is_empty() {
        // An empty separator splits after each code point.
        let mut rest: &str = text;
        while !rest.is_empty() {
            let end = if parts.len() + 1 >= limit {
                rest.len()
            } else {
                rest.chars().next().map_or(0, char::len_utf8)
            };
            memory.take_values(1)?;
            parts.push(&rest[..end]);
            rest = &rest[end..];
        }
    } else {
        for part in text.splitn(limit, &**separator) {
            memory.take_values(1)?;
            parts.push(part);
        }
    }
    Ok(Value::list(parts.into_iter().map(Value::string).collect()))
}

fn substring<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let (text, start, end) = match &*args {
        [Value::String(text), Value::Int(start)] => (text, *start, None),
        [Value::String(text), Value::Int(start), Value::Int(end)] => (text, *start, Some(*end)),
        _ => return Err(NO_MATCH),
    };
    if let Some(end) = end
        && start > end
    {
        return Err(err!("invalid substring range. start: {start}, end: {end}"));
    }
    let from = offset(text, start).ok_or_else(|| out_of_range(start))?;
    let to = match end {
        Some(end) => offset(text, end).ok_or_else(|| out_of_range(end))?,
        None => text.len(),
    };
    memory.take(to - from)?;
    Ok(Value::string(&text[from..to]))
}

fn join<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<'a> {
    let (list, separator) = match &*args {
        [Value::List(list)] => (list, ""),
        [Value::List(list), Value::String(separator)] => (list, &**separator),
        _ => return Err(NO_MATCH),
    };
    let mut joined = String::new();
    for (at, item) in list.iter().enumerate() {
        let Value::String(text) = &item else {
            return Err(err!("join: invalid input: {}", super::display(&item)));
        };
        memory.take(text.len() + separator.len())?;
        if at > 0 {
            joined.push_str(separator);
        }
        joined.push_str(text);
    }
    Ok(Value::from(joined))
}

/// A text in quotes, with escapes for characters that would end it or its line.
fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{c}' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{b}' => quoted.push_str("\\v"),
            '\\' => quoted.push_str("\\\\"),
            '"' => quoted.push_str("\\\""),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
