//! The field path of a rule: a JSON path such as `.spec['my-name'].x`.

use thiserror::Error;

use crate::schema::Schema;

/// A path that names no field of its schema.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum PathError {
    #[error("unexpected end of JSON path")]
    End,
    #[error("expected {0}")]
    Expected(String),
    #[error("invalid string literal: invalid escape char {0}")]
    Escape(String),
    #[error("does not refer to a valid field")]
    NoField,
}

/// The path in the form that errors have.
pub(crate) fn normalize(path: &str, schema: &Schema) -> Result<String, PathError> {
    let mut at = schema;
    let mut normalized = String::new();
    let mut rest = path;
    while !rest.is_empty() {
        let name;
        if let Some(quoted) = rest.strip_prefix('[') {
            if quoted.is_empty() {
                return Err(PathError::End);
            }
            let body = quoted
                .strip_prefix('\'')
                .ok_or_else(|| PathError::Expected(format!("single quoted string but got {quoted}")))?;
            let end = closing_quote(body).ok_or(PathError::End)?;
            name = unescape(&body[..end])?;
            let after = &body[end + 1..];
            rest = after.strip_prefix(']').ok_or_else(|| match after.is_empty() {
                true => PathError::End,
                false => PathError::Expected(format!("] but got {after}")),
            })?;
        } else if let Some(after) = rest.strip_prefix('.') {
            let end = after.find(['.', '[', ']']).unwrap_or(after.len());
            if end == 0 {
                return Err(PathError::End);
            }
            name = after[..end].to_owned();
            rest = &after[end..];
        } else {
            return Err(PathError::Expected(format!("[ or . but got: {rest}")));
        }
        match (&at.properties, &at.additional_properties) {
            (Some(properties), _) => {
                at = properties.get(&name).ok_or(PathError::NoField)?;
                if !normalized.is_empty() {
                    normalized.push('.');
                }
                normalized.push_str(&name);
            }
            (None, Some(additional)) => {
                at = additional;
                normalized.push_str(&format!("[{name}]"));
            }
            (None, None) => return Err(PathError::NoField),
        }
    }
    Ok(normalized)
}

/// The quote that ends a literal: the first that no backslash precedes.
fn closing_quote(body: &str) -> Option<usize> {
    body.char_indices().find(|(at, c)| *c == '\'' && !body[..*at].ends_with('\\')).map(|(at, _)| at)
}

fn unescape(text: &str) -> Result<String, PathError> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('a') => out.push('\u{7}'),
            Some('b') => out.push('\u{8}'),
            Some('f') => out.push('\u{c}'),
            Some('n') => out.push('\n'),
            Some('r') => out.push('\r'),
            Some('t') => out.push('\t'),
            Some('v') => out.push('\u{b}'),
            Some(c @ ('\'' | '\\')) => out.push(c),
            Some(c) => return Err(PathError::Escape(format!("\\{c}"))),
            None => return Err(PathError::End),
        }
    }
    Ok(out)
}
