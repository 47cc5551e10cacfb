//! Validation errors: the field, the kind of problem, and upstream's wording.

use ferrite_json::Value;
use std::fmt;

/// The path of a field, built while descending: `spec.containers[0].name`.
///
/// Validation makes many and shows few, so that the usual ones live where they are made.
#[derive(Clone)]
pub struct Path(Text);

/// Paths are seldom longer.
const SHORT: usize = 62;

#[derive(Clone)]
enum Text {
    Short { length: u8, bytes: [u8; SHORT] },
    Long(String),
}

impl Path {
    pub fn new(root: &str) -> Self {
        Self::of(&[root])
    }

    pub fn child(&self, name: &str) -> Self {
        self.extended(if self.is_empty() { "" } else { "." }, name, "")
    }

    pub fn index(&self, index: usize) -> Self {
        let mut digits = [0; 20];
        self.extended("[", decimal(index, &mut digits), "]")
    }

    pub fn key(&self, key: &str) -> Self {
        self.extended("[", key, "]")
    }

    pub fn as_str(&self) -> &str {
        match &self.0 {
            // Only whole texts are ever put in.
            Text::Short { .. } => std::str::from_utf8(self.as_bytes()).unwrap_or_default(),
            Text::Long(text) => text,
        }
    }

    fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Text::Short { length, bytes } => bytes.get(..usize::from(*length)).unwrap_or_default(),
            Text::Long(text) => text.as_bytes(),
        }
    }

    fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    fn extended(&self, before: &str, name: &str, after: &str) -> Self {
        let Text::Short { length, mut bytes } = self.0 else {
            return Self::of(&[self.as_str(), before, name, after]);
        };
        let mut end = usize::from(length);
        for part in [before, name, after] {
            let Some(room) = bytes.get_mut(end..end + part.len()) else {
                return Self::of(&[self.as_str(), before, name, after]);
            };
            room.copy_from_slice(part.as_bytes());
            end += part.len();
        }
        // No more than SHORT, which is less than a byte holds.
        Self(Text::Short { length: end as u8, bytes })
    }

    fn of(parts: &[&str]) -> Self {
        let text = parts.concat();
        let mut bytes = [0; SHORT];
        match bytes.get_mut(..text.len()) {
            Some(room) => {
                room.copy_from_slice(text.as_bytes());
                Self(Text::Short { length: text.len() as u8, bytes })
            }
            None => Self(Text::Long(text)),
        }
    }
}

/// A number in its digits, without going through a formatter.
fn decimal(mut number: usize, digits: &mut [u8; 20]) -> &str {
    let mut at = digits.len();
    while at > 0 {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    std::str::from_utf8(&digits[at..]).unwrap_or_default()
}

impl Default for Path {
    fn default() -> Self {
        Self::new("")
    }
}

impl PartialEq for Path {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Path {}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Path").field(&self.as_str()).finish()
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "<nil>" } else { self.as_str() })
    }
}

/// The kind of error in a field. The variants are upstream's `field.ErrorType`s.
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
    /// The printed form of the value, if it is not JSON with sorted keys: upstream prints structures in the
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
            Problem::Duplicate(_) if self.rendered.as_deref() == Some("") => detail("Duplicate value".into()),
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
                let items = if *max == 1 { "item" } else { "items" };
                detail(format!("Too many: {actual}: must have at most {max} {items}"))
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

/// A string in Go's quotes, which escape unprintable characters in another way than Rust's.
pub(crate) fn go_quote(text: &str) -> String {
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
    use ferrite_json::json;

    #[test]
    fn paths_are_as_long_as_they_need_to_be() {
        let mut path = Path::default();
        let mut text = String::new();
        for step in 0..40 {
            path = path.child("spéc").index(step * step * 1000).key("a/b");
            let dot = if text.is_empty() { "" } else { "." };
            text = format!("{text}{dot}spéc[{}][a/b]", step * step * 1000);
            assert_eq!((path.as_str(), path.to_string()), (&*text, text.clone()));
        }
        assert_eq!(Path::new("a").index(usize::MAX).as_str(), format!("a[{}]", usize::MAX));
        assert_eq!(Path::new(&text), path);
        assert_ne!(Path::new("a"), Path::new("b"));
    }

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
            (FieldError::duplicate(&path, 80).rendered_as(""), "spec.list[2][a/b].name: Duplicate value"),
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
