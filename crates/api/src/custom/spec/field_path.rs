//! Paths to fields that a schema describes: of rules and of selectable fields.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::text;
use ferrite_json::Value;
use thiserror::Error;

/// Why a path leads nowhere, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PathProblem {
    #[error("does not refer to a valid field")]
    NoField,
    #[error("array notation is not allowed")]
    NoBrackets,
    #[error("unexpected end of JSON path")]
    End,
    #[error("expected single quoted string but got {0}")]
    NotQuoted(String),
    #[error("expected ] but got {0}")]
    NotClosed(String),
    #[error("expected [ or . but got: {0}")]
    NoStep(String),
}

/// The fields that selectors can name, at most.
const MAX_SELECTABLE: usize = 8;

/// The schema at the end of a path, and its first name.
pub(super) fn find<'s>(
    path: &str,
    schema: &'s Value,
    brackets: bool,
) -> Result<(String, &'s Value), PathProblem> {
    let mut tokens = tokens(path).into_iter();
    let (mut schema, mut first) = (schema, None::<String>);
    while let Some(token) = tokens.next() {
        let name = match token {
            "[" if !brackets => return Err(PathProblem::NoBrackets),
            "[" => {
                let quoted = tokens.next().ok_or(PathProblem::End)?;
                let inner = quoted.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
                let inner = inner.ok_or_else(|| PathProblem::NotQuoted(quoted.to_owned()))?;
                match tokens.next() {
                    Some("]") => inner.replace("\\'", "'").replace("\\\\", "\\"),
                    Some(other) => return Err(PathProblem::NotClosed(other.to_owned())),
                    None => return Err(PathProblem::End),
                }
            }
            "." => tokens.next().ok_or(PathProblem::End)?.to_owned(),
            other => return Err(PathProblem::NoStep(other.to_owned())),
        };
        let properties = schema.get("properties").and_then(Value::as_object).filter(|p| !p.is_empty());
        let additional = schema.get("additionalProperties").filter(|additional| additional.is_object());
        schema = match (properties, additional) {
            (Some(properties), _) => properties.get(&name).ok_or(PathProblem::NoField)?,
            (None, Some(additional)) => additional,
            (None, None) => return Err(PathProblem::NoField),
        };
        first.get_or_insert(name);
    }
    Ok((first.unwrap_or_default(), schema))
}

/// A path in its parts: names, texts in quotes, dots and brackets.
fn tokens(path: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = path;
    while !rest.is_empty() {
        let end = match rest.as_bytes()[0] {
            b'.' | b'[' | b']' => 1,
            b'\'' => {
                let close = rest
                    .char_indices()
                    .skip(1)
                    .find(|(at, c)| *c == '\'' && rest.as_bytes()[at - 1] != b'\\');
                close.map_or(rest.len(), |(at, _)| at + 1)
            }
            _ => rest.find(['.', '[', ']']).unwrap_or(rest.len()),
        };
        let (token, left) = rest.split_at(end);
        tokens.push(token);
        rest = left;
    }
    tokens
}

/// The errors in the selectable fields of a version.
pub fn validate_selectable(fields: &[Value], schema: &Value, path: &Path) -> FieldErrors {
    if !fields.is_empty() && schema.is_null() {
        return vec![FieldError::invalid(path, "", "may only be set when validations.schema is included")];
    }
    let mut errors = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for (index, field) in fields.iter().enumerate() {
        let path = path.index(index).child("jsonPath");
        let given = text(field, "jsonPath");
        if given.is_empty() {
            errors.push(FieldError::required(&path, ""));
            continue;
        }
        let (first, found) = match find(given, schema, false) {
            Ok(found) => found,
            Err(why) => {
                errors.push(FieldError::invalid(&path, given, format!("is an invalid path: {why}")));
                continue;
            }
        };
        if first == "metadata" {
            errors.push(FieldError::invalid(&path, given, "must not point to fields in metadata"));
        }
        if !matches!(text(found, "type"), "string" | "boolean" | "integer") {
            let why = "must point to a field of type string, boolean or integer. Enum string fields and strings with formats are allowed.";
            errors.push(FieldError::invalid(&path, given, why));
        }
        if seen.contains(&given) {
            errors.push(FieldError::duplicate(&path, given));
        } else {
            seen.push(given);
        }
    }
    if seen.len() > MAX_SELECTABLE {
        errors.push(FieldError::too_many(path, seen.len(), MAX_SELECTABLE));
    }
    errors
}
