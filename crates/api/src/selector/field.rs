//! Field selectors: conditions on a few fields of an object, `metadata.name=a,status.phase!=Failed`.

use crate::resource::Resource;
use ferrite_json::Value;
use std::fmt;
use thiserror::Error;

/// Why a field selector cannot be read, in the words the API answers with.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FieldSelectorError {
    #[error("invalid selector: '{selector}'; can't understand '{part}'")]
    Syntax { selector: String, part: String },
    #[error("invalid field selector: invalid escape sequence: {0}")]
    Escape(String),
    #[error("invalid field selector: unescaped character in value: {}", *.0 as u32)]
    Unescaped(char),
}

/// One condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldTerm {
    pub field: String,
    pub value: String,
    /// True if the field must be equal to the value, false if it must differ.
    pub equal: bool,
}

/// Conditions that must all be met. The default selects everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FieldSelector {
    terms: Vec<FieldTerm>,
}

impl FieldSelector {
    pub fn parse(text: &str) -> Result<Self, FieldSelectorError> {
        let mut parts = split_terms(text);
        parts.sort_unstable();
        let mut terms = Vec::new();
        for part in parts.into_iter().filter(|p| !p.is_empty()) {
            let Some((field, equal, value)) = split_term(part) else {
                return Err(FieldSelectorError::Syntax { selector: text.to_owned(), part: part.to_owned() });
            };
            // As upstream: a term that names nothing demands nothing.
            if field.is_empty() && value.is_empty() {
                continue;
            }
            terms.push(FieldTerm { field: field.to_owned(), value: unescape(value)?, equal });
        }
        Ok(Self { terms })
    }

    pub fn terms(&self) -> &[FieldTerm] {
        &self.terms
    }

    pub fn into_terms(self) -> Vec<FieldTerm> {
        self.terms
    }

    pub fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// The value a field must have, if the selector demands one.
    pub fn exact(&self, field: &str) -> Option<&str> {
        self.terms.iter().find(|t| t.equal && t.field == field).map(|t| t.value.as_str())
    }

    /// Returns true if an object of a kind meets all conditions. Fields must have passed [`check_field`].
    pub fn matches(&self, resource: &Resource, object: &Value) -> bool {
        self.terms.iter().all(|term| {
            let equal = match term.field.as_str() {
                "metadata.name" => crate::meta::name(object) == term.value,
                "metadata.namespace" => crate::meta::namespace(object) == term.value,
                field => resource.strategy.selectable_value(object, field) == term.value,
            };
            equal == term.equal
        })
    }
}

impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, term) in self.terms.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let operator = if term.equal { "=" } else { "!=" };
            let value = term.value.replace('\\', "\\\\").replace(',', "\\,").replace('=', "\\=");
            write!(f, "{comma}{}{operator}{value}", term.field)?;
        }
        Ok(())
    }
}

/// Checks that a field selector may name a field of a kind. The error of a kind that lists its fields is
/// shorter. Such a kind has the namespace as a field only if its objects live in one.
pub fn check_field(resource: &Resource, field: &str) -> Result<(), String> {
    let own = resource.strategy.fields();
    let known = match field {
        "metadata.name" => true,
        "metadata.namespace" => own.is_empty() || resource.is_namespaced(),
        _ => own.contains(&field),
    };
    if known {
        Ok(())
    } else if own.is_empty() && resource.custom.is_none() {
        Err(format!(
            "{field:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
        ))
    } else {
        Err(resource.strategy.unknown_field(field))
    }
}

/// Parts between commas that are not escaped.
fn split_terms(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut start = 0;
    let mut escaped = false;
    for (index, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                parts.push(&text[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn split_term(term: &str) -> Option<(&str, bool, &str)> {
    term.char_indices().find_map(|(index, _)| {
        let (field, rest) = term.split_at(index);
        [("!=", false), ("==", true), ("=", true)]
            .iter()
            .find_map(|(operator, equal)| Some((field, *equal, rest.strip_prefix(operator)?)))
    })
}

fn unescape(text: &str) -> Result<String, FieldSelectorError> {
    let mut value = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some(escaped @ ('\\' | ',' | '=')) => value.push(escaped),
                Some(other) => return Err(FieldSelectorError::Escape(format!("\\{other}"))),
                None => return Err(FieldSelectorError::Escape("\\".to_owned())),
            },
            ',' | '=' => return Err(FieldSelectorError::Unescaped(c)),
            _ => value.push(c),
        }
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn resource(kind: &str) -> Resource {
        crate::kinds::built_in().into_iter().find(|r| r.kind == kind).unwrap()
    }

    #[test]
    fn reading() {
        for (input, output) in [
            ("", ""),
            ("a=b", "a=b"),
            ("a==b", "a=b"),
            ("b!=c,a=", "a=,b!=c"),
            ("a=x\\,y\\=z\\\\", "a=x\\,y\\=z\\\\"),
            (",a=b,", "a=b"),
        ] {
            assert_eq!(FieldSelector::parse(input).unwrap().to_string(), output, "{input}");
        }
        for (input, message) in [
            ("a", "invalid selector: 'a'; can't understand 'a'"),
            ("a=b=c", "invalid field selector: unescaped character in value: 61"),
            ("a=\\x", "invalid field selector: invalid escape sequence: \\x"),
            ("a=b\\", "invalid field selector: invalid escape sequence: \\"),
        ] {
            assert_eq!(FieldSelector::parse(input).unwrap_err().to_string(), message, "{input}");
        }
    }

    #[test]
    fn matching() {
        let pods = resource("Pod");
        let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"nodeName": "x"},
            "status": {"phase": "Running"}});
        for (selector, expected) in [
            ("metadata.name=p", true),
            ("metadata.name!=p", false),
            ("metadata.namespace=n,spec.nodeName=x", true),
            ("status.phase!=Running", false),
            ("spec.hostNetwork=false", true),
            ("spec.nodeName=", false),
        ] {
            assert_eq!(FieldSelector::parse(selector).unwrap().matches(&pods, &pod), expected, "{selector}");
        }
        assert_eq!(FieldSelector::parse("spec.nodeName=x").unwrap().exact("spec.nodeName"), Some("x"));
    }

    #[test]
    fn fields_of_kinds() {
        for (kind, field, answer) in [
            ("Pod", "spec.nodeName", Ok(())),
            ("Pod", "metadata.namespace", Ok(())),
            ("Pod", "spec.bogus", Err("field label not supported: spec.bogus")),
            ("Node", "metadata.namespace", Err("field label not supported: metadata.namespace")),
            ("ConfigMap", "metadata.namespace", Ok(())),
            (
                "ConfigMap",
                "data",
                Err("\"data\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\""),
            ),
        ] {
            assert_eq!(check_field(&resource(kind), field), answer.map_err(str::to_owned), "{kind} {field}");
        }
    }
}
