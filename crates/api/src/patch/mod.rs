//! Patches: JSON Patch, merge patch, and upstream's strategic merge patch.
//!
//! Each takes the current object and answers the patched one; bringing the outcome under its type again
//! ([`crate::codec::json::conform`]) is the caller's next step. Apply patches live in
//! [`crate::managed_fields`].

mod json;
mod merge;
mod strategic;
#[cfg(test)]
mod tests;

pub use json::{MAX_COPIED, MAX_OPERATIONS, json_patch, json_patch_explained};
pub use merge::merge_patch;
pub use strategic::strategic_merge;

use ferrite_json::Value;
use std::fmt::Write as _;
use thiserror::Error;

/// Why a patch cannot be applied, with the text and (by [`PatchError::code`]) the HTTP status of upstream.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PatchError {
    /// The patch itself cannot be read.
    #[error("{0}")]
    Malformed(String),
    #[error(
        "Request entity too large: The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {0}"
    )]
    TooManyOperations(usize),
    #[error(
        "Unable to complete the copy, the accumulated size increase of copy is {0}, exceeding the limit {MAX_COPIED}"
    )]
    CopiesTooMuch(usize),
    /// Moves and copies that walk through the same values over and over.
    #[error("the operations of the JSON patch move and copy too much")]
    TooMuchWork,
    #[error("exceeded max depth")]
    TooDeep,
    /// A JSON patch that does not fit the object: a missing path, a failed test. Upstream hides the detail.
    #[error("the server rejected our request due to an error in our request")]
    Rejected,
    /// A strategic merge patch with a directive that makes no sense.
    #[error("{0}")]
    Directive(String),
}

impl PatchError {
    /// The HTTP status upstream answers.
    pub fn code(&self) -> u16 {
        match self {
            Self::Malformed(_) | Self::TooDeep => 400,
            Self::TooManyOperations(_) | Self::CopiesTooMuch(_) | Self::TooMuchWork => 413,
            Self::Rejected => 422,
            Self::Directive(_) => 500,
        }
    }
}

/// Go's name for a JSON value that it cannot take.
pub fn json_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The type Go gives a value it reads from JSON.
pub(crate) fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "<nil>",
        Value::Bool(_) => "bool",
        Value::Number(number) if number.as_i64().is_some() => "int64",
        Value::Number(_) => "float64",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}

/// A value as Go's `%v` prints it (`map[a:1 b:[x y]]`): upstream quotes patches so in its messages.
pub fn go_format(value: &Value) -> String {
    let mut out = String::new();
    go_format_into(value, &mut out);
    out
}

/// A number as Go's `%v` prints it: with an exponent unless that is small.
fn go_float(number: f64) -> String {
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..6).contains(&exponent) {
        return number.to_string();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

fn go_format_into(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("<nil>"),
        Value::String(text) => out.push_str(text),
        Value::Number(number) if number.as_i64().is_none() => {
            out.push_str(&go_float(number.as_f64().unwrap_or(0.0)))
        }
        Value::Bool(_) | Value::Number(_) => {
            let _ = write!(out, "{value}");
        }
        Value::Array(list) => {
            out.push('[');
            for (index, value) in list.iter().enumerate() {
                if index > 0 {
                    out.push(' ');
                }
                go_format_into(value, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push_str("map[");
            for (index, (key, value)) in map.iter().enumerate() {
                if index > 0 {
                    out.push(' ');
                }
                out.push_str(key);
                out.push(':');
                go_format_into(value, out);
            }
            out.push(']');
        }
    }
}
