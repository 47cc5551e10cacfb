//! Errors of fields, as the API reports them.

use std::fmt;

use ferrite_json::Value as Json;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldErrorKind {
    Invalid,
    Forbidden,
    Required,
    Duplicate,
}

/// The value that an error shows.
#[derive(Debug, Clone, PartialEq)]
pub enum BadValue {
    /// The value is an object or a list: it is not shown.
    Omitted,
    /// The type of the schema, where no single value is wrong.
    Type(&'static str),
    Value(Json),
}

/// A problem of a field of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldError {
    pub kind: FieldErrorKind,
    /// The field, below the path that the object was given.
    pub field: String,
    pub value: BadValue,
    pub detail: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, field, value, detail } = self;
        match kind {
            FieldErrorKind::Forbidden => return write!(f, "{field}: Forbidden: {detail}"),
            FieldErrorKind::Required => return write!(f, "{field}: Required value: {detail}"),
            FieldErrorKind::Duplicate => write!(f, "{field}: Duplicate value")?,
            FieldErrorKind::Invalid => write!(f, "{field}: Invalid value")?,
        }
        match value {
            BadValue::Omitted => {}
            BadValue::Type(name) => write!(f, ": {name:?}")?,
            BadValue::Value(Json::String(text)) => write!(f, ": {:?}", text.as_str())?,
            BadValue::Value(Json::Number(number)) => match number.as_i64() {
                Some(number) => write!(f, ": {number}")?,
                None => write!(f, ": {}", crate::functions::go_float(number.as_f64().unwrap_or(f64::NAN)))?,
            },
            BadValue::Value(other) => write!(f, ": {other}")?,
        }
        match kind {
            FieldErrorKind::Duplicate => Ok(()),
            _ => write!(f, ": {detail}"),
        }
    }
}
