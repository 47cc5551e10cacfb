//! Names of properties as identifiers of expressions.

use std::borrow::Cow;

use crate::parser::RESERVED;

const ESCAPES: &[(&str, &str)] =
    &[("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__")];

/// The identifier of the property `name`; `None` if expressions cannot reach it.
pub fn escape(name: &str) -> Option<String> {
    let first = name.bytes().next()?;
    if first.is_ascii_digit() {
        return None;
    }
    if RESERVED.contains(&name) {
        return Some(format!("__{name}__"));
    }
    let mut escaped = String::with_capacity(name.len());
    let mut rest = name;
    while !rest.is_empty() {
        if let Some((from, to)) = ESCAPES.iter().find(|(from, _)| rest.starts_with(from)) {
            escaped.push_str(to);
            rest = &rest[from.len()..];
        } else {
            let c = rest.chars().next()?;
            if !c.is_ascii_alphanumeric() && c != '_' {
                return None;
            }
            escaped.push(c);
            rest = &rest[1..];
        }
    }
    Some(escaped)
}

/// The property that the identifier `escaped` stands for; `None` if it stands for none.
pub fn unescape(escaped: &str) -> Option<Cow<'_, str>> {
    if !escaped.contains("__") {
        return Some(Cow::Borrowed(escaped));
    }
    let mut name = String::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some(start) = rest.find("__") {
        // A sequence is two underscores, text without any, and two underscores.
        let inner = &rest[start + 2..];
        let len = inner.find('_').unwrap_or(inner.len());
        if len == 0 || !inner[len..].starts_with("__") {
            name.push_str(&rest[..start + 1]);
            rest = &rest[start + 1..];
            continue;
        }
        name.push_str(&rest[..start]);
        let word = &inner[..len];
        let sequence = format!("__{word}__");
        match ESCAPES.iter().find(|(_, to)| *to == sequence) {
            Some((from, _)) => name.push_str(from),
            None if RESERVED.contains(&word) && sequence.len() == escaped.len() => name.push_str(word),
            None => return None,
        }
        rest = &inner[len + 2..];
    }
    name.push_str(rest);
    Some(Cow::Owned(name))
}
