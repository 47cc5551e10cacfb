//! Validation errors: which field, what kind of problem, in upstream's wording.

use serde_json::Value;
use std::fmt;

/// The path of a field, built while descending: `spec.containers[0].name`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Path(String);

impl Path {
    pub fn new(root: &str) -> Self {
        Self(root.to_owned())
    }

    pub fn child(&self, name: &str) -> Self {
        if self.0.is_empty() { Self(name.to_owned()) } else { Self([&self.0, ".", name].concat()) }
    }

    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    pub fn key(&self, key: &str) -> Self {
        Self(format!("{}[{key}]", self.0))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "<nil>" } else { &self.0 })
    }
}

/// What is wrong with a field. The variants are upstream's `field.ErrorType`s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    Required,
    Duplicate(Value),
    Invalid(Value),
    NotSupported { value: Value, supported: Vec<String> },
    Forbidden,
    TooLong { max: usize },
    TooMany { actual: usize, max: usize },
    NotFound(Value),
    TypeInvalid(Value),
    Internal,
}

/// One validation error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    pub path: Path,
    pub problem: Problem,
    /// Upstream's explanation; empty where upstream gives none.
    pub detail: String,
    /// How the value is printed when it is not as JSON with sorted keys: upstream prints structures in the
    /// order in which their fields are declared.
    pub rendered: Option<String>,
}

pub type FieldErrors = Vec<FieldError>;

impl FieldError {
    pub fn required(path: &Path, detail: impl Into<String>) -> Self {
        Self { path: path.clone(), problem: Problem::Required, detail: detail.into(), rendered: None }
    }

    pub fn invalid(path: &Path, value: impl Into<Value>, detail: impl Into<String>) -> Self {
        Self {
            path: path.clone(),
            problem: Problem::Invalid(value.into()),
            detail: detail.into(),
            rendered: None,
        }
    }

    pub fn duplicate(path: &Path, value: impl Into<Value>) -> Self {
        Self {
            path: path.clone(),
            problem: Problem::Duplicate(value.into()),
            detail: String::new(),
            rendered: None,
        }
    }

    pub fn forbidden(path: &Path, detail: impl Into<String>) -> Self {
        Self { path: path.clone(), problem: Problem::Forbidden, detail: detail.into(), rendered: None }
    }

    pub fn internal(path: &Path, detail: impl Into<String>) -> Self {
        Self { path: path.clone(), problem: Problem::Internal, detail: detail.into(), rendered: None }
    }

    pub fn not_found(path: &Path, value: impl Into<Value>) -> Self {
        Self {
            path: path.clone(),
            problem: Problem::NotFound(value.into()),
            detail: String::new(),
            rendered: None,
        }
    }

    pub fn too_long(path: &Path, max: usize) -> Self {
        Self { path: path.clone(), problem: Problem::TooLong { max }, detail: String::new(), rendered: None }
    }

    pub fn too_many(path: &Path, actual: usize, max: usize) -> Self {
        Self {
            path: path.clone(),
            problem: Problem::TooMany { actual, max },
            detail: String::new(),
            rendered: None,
        }
    }

    /// `supported` is printed in the order given, as upstream's callers sort it.
    pub fn not_supported(path: &Path, value: impl Into<Value>, supported: &[&str]) -> Self {
        Self {
            path: path.clone(),
            problem: Problem::NotSupported {
                value: value.into(),
                supported: supported.iter().map(|s| (*s).to_owned()).collect(),
            },
            detail: String::new(),
            rendered: None,
        }
    }

    /// The same error with its value printed as `text`.
    pub fn rendered_as(mut self, text: impl Into<String>) -> Self {
        self.rendered = Some(text.into());
        self
    }

    /// The same error with an explanation.
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = detail.into();
        self
    }

    /// The `reason` of the matching cause in `Status.details.causes`.
    pub fn cause_reason(&self) -> &'static str {
        match self.problem {
            Problem::Required => "FieldValueRequired",
            Problem::Duplicate(_) => "FieldValueDuplicate",
            Problem::Invalid(_) => "FieldValueInvalid",
            Problem::NotSupported { .. } => "FieldValueNotSupported",
            Problem::Forbidden => "FieldValueForbidden",
            Problem::TooLong { .. } => "FieldValueTooLong",
            Problem::TooMany { .. } => "FieldValueTooMany",
            Problem::NotFound(_) => "FieldValueNotFound",
            Problem::TypeInvalid(_) => "FieldValueTypeInvalid",
            Problem::Internal => "InternalError",
        }
    }

    /// The error without its path: `Invalid value: "x": must be …`.
    pub fn body(&self) -> String {
        let detail =
            |head: String| if self.detail.is_empty() { head } else { format!("{head}: {}", self.detail) };
        let go_value = |value: &Value| self.rendered.clone().unwrap_or_else(|| go_value(value));
        match &self.problem {
            Problem::Required => detail("Required value".into()),
            Problem::Forbidden => detail("Forbidden".into()),
            Problem::Internal => detail("Internal error".into()),
            Problem::Duplicate(v) => detail(format!("Duplicate value: {}", go_value(v))),
            // A value that is not worth printing is left out.
            Problem::Invalid(_) if self.rendered.as_deref() == Some("") => detail("Invalid value".into()),
            Problem::Invalid(v) => detail(format!("Invalid value: {}", go_value(v))),
            Problem::NotFound(v) => detail(format!("Not found: {}", go_value(v))),
            Problem::TypeInvalid(v) => detail(format!("Invalid value: {}", go_value(v))),
            Problem::NotSupported { value, supported } => {
                let listed: Vec<String> = supported.iter().map(|s| format!("{s:?}")).collect();
                let head = format!("Unsupported value: {}", go_value(value));
                if listed.is_empty() {
                    detail(head)
                } else {
                    format!("{head}: supported values: {}", listed.join(", "))
                }
            }
            Problem::TooLong { max } => detail(format!("Too long: may not be more than {max} bytes")),
            Problem::TooMany { actual, max } => {
                detail(format!("Too many: {actual}: must have at most {max} items"))
            }
        }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.body())
    }
}

/// A value as upstream prints it: strings quoted, everything else as JSON.
fn go_value(value: &Value) -> String {
    match value {
        Value::String(s) => go_quote(s),
        Value::Null => "null".into(),
        other => other.to_string(),
    }
}

/// A string in Go's quotes, which differ from Rust's in how they escape what cannot be printed.
fn go_quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\x07' => quoted.push_str("\\a"),
            '\x08' => quoted.push_str("\\b"),
            '\x0c' => quoted.push_str("\\f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\x0b' => quoted.push_str("\\v"),
            c if c.is_ascii_control() => quoted.push_str(&format!("\\x{:02x}", c as u32)),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04x}", c as u32)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_read_as_upstream_writes_them() {
        let path = Path::new("spec").child("list").index(2).key("a/b").child("name");
        for (error, text) in [
            (FieldError::required(&path, ""), "spec.list[2][a/b].name: Required value"),
            (FieldError::required(&path, "say it"), "spec.list[2][a/b].name: Required value: say it"),
            (
                FieldError::invalid(&path, "x\n\u{1}é", "bad"),
                "spec.list[2][a/b].name: Invalid value: \"x\\n\\x01é\": bad",
            ),
            (
                FieldError::invalid(&path, json!({"b": 1, "a": [2]}), "bad"),
                "spec.list[2][a/b].name: Invalid value: {\"a\":[2],\"b\":1}: bad",
            ),
            (
                FieldError::invalid(&path, 3, "bad").rendered_as("three"),
                "spec.list[2][a/b].name: Invalid value: three: bad",
            ),
            (
                FieldError::not_supported(&path, "c", &["a", "b"]),
                "spec.list[2][a/b].name: Unsupported value: \"c\": supported values: \"a\", \"b\"",
            ),
            (FieldError::duplicate(&path, 80), "spec.list[2][a/b].name: Duplicate value: 80"),
            (FieldError::not_found(&path, "v"), "spec.list[2][a/b].name: Not found: \"v\""),
            (
                FieldError::too_long(&path, 5),
                "spec.list[2][a/b].name: Too long: may not be more than 5 bytes",
            ),
            (
                FieldError::too_many(&path, 9, 5),
                "spec.list[2][a/b].name: Too many: 9: must have at most 5 items",
            ),
            (FieldError::forbidden(&Path::default(), "no"), "<nil>: Forbidden: no"),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }
}
