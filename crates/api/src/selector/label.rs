//! Label selectors: requirements on an object's labels.

use super::parse::{self, SelectorError};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, map, strings, text};
use crate::meta_validation::{label_value, qualified_name};
use ferrite_json::{Map, Value};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// Anything labels can be looked up in.
pub trait Labels {
    fn label(&self, key: &str) -> Option<&str>;
}

impl Labels for Map {
    fn label(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }
}

impl Labels for BTreeMap<String, String> {
    fn label(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl Labels for HashMap<String, String> {
    fn label(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl<L: Labels> Labels for Option<L> {
    fn label(&self, key: &str) -> Option<&str> {
        self.as_ref()?.label(key)
    }
}

impl<L: Labels + ?Sized> Labels for &L {
    fn label(&self, key: &str) -> Option<&str> {
        (**self).label(key)
    }
}

/// The comparison of a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    Equals,
    DoubleEquals,
    NotEquals,
    In,
    NotIn,
    Exists,
    DoesNotExist,
    GreaterThan,
    LessThan,
}

/// One condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Requirement {
    pub key: String,
    pub operator: Operator,
    /// Sorted, without repetition.
    pub values: Vec<String>,
}

impl Requirement {
    /// Makes a requirement of valid parts; complaints name the part as upstream does.
    pub fn new(key: &str, operator: Operator, values: Vec<String>) -> Result<Self, SelectorError> {
        let mut values = values;
        values.sort_unstable();
        values.dedup();
        let mut errors = Vec::new();
        join_problems(&mut errors, &Path::new("key"), key, &qualified_name(key));
        let path = Path::new("values");
        let complain = |why: &str| FieldError::invalid(&path, values.clone(), why);
        match operator {
            Operator::In | Operator::NotIn if values.is_empty() => {
                errors.push(complain("for 'in', 'notin' operators, values set can't be empty"));
            }
            Operator::Equals | Operator::DoubleEquals | Operator::NotEquals if values.len() != 1 => {
                errors.push(complain("exact-match compatibility requires one single value"));
            }
            Operator::Exists | Operator::DoesNotExist if !values.is_empty() => {
                errors.push(complain("values set must be empty for exists and does not exist"));
            }
            Operator::GreaterThan | Operator::LessThan => {
                if values.len() != 1 {
                    errors.push(complain("for 'Gt', 'Lt' operators, exactly one value is required"));
                }
                for (index, value) in values.iter().enumerate().filter(|(_, v)| v.parse::<i64>().is_err()) {
                    errors.push(FieldError::invalid(
                        &path.index(index),
                        value.as_str(),
                        "for 'Gt', 'Lt' operators, the value must be an integer",
                    ));
                }
            }
            _ => {}
        }
        for (index, value) in values.iter().enumerate() {
            join_problems(&mut errors, &path.index(index).key(key), value, &label_value(value));
        }
        if errors.is_empty() {
            Ok(Self { key: key.to_owned(), operator, values })
        } else {
            Err(SelectorError::Requirement(errors))
        }
    }

    /// Returns true if labels meet the requirement.
    pub fn matches(&self, labels: &(impl Labels + ?Sized)) -> bool {
        let value = labels.label(&self.key);
        let among = |value: &str| self.values.iter().any(|v| v == value);
        match self.operator {
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::Equals | Operator::DoubleEquals | Operator::In => value.is_some_and(among),
            Operator::NotEquals | Operator::NotIn => !value.is_some_and(among),
            Operator::GreaterThan | Operator::LessThan => {
                let wanted = self.values.first().and_then(|v| v.parse::<i64>().ok());
                match (value.and_then(|v| v.parse::<i64>().ok()), wanted) {
                    (Some(value), Some(bound)) if self.operator == Operator::GreaterThan => value > bound,
                    (Some(value), Some(bound)) => value < bound,
                    _ => false,
                }
            }
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values.join(",");
        let key = &self.key;
        match self.operator {
            Operator::Exists => f.write_str(key),
            Operator::DoesNotExist => write!(f, "!{key}"),
            Operator::Equals => write!(f, "{key}={values}"),
            Operator::DoubleEquals => write!(f, "{key}=={values}"),
            Operator::NotEquals => write!(f, "{key}!={values}"),
            Operator::In => write!(f, "{key} in ({values})"),
            Operator::NotIn => write!(f, "{key} notin ({values})"),
            Operator::GreaterThan => write!(f, "{key}>{values}"),
            Operator::LessThan => write!(f, "{key}<{values}"),
        }
    }
}

fn join_problems(errors: &mut FieldErrors, path: &Path, value: &str, problems: &[String]) {
    if !problems.is_empty() {
        errors.push(FieldError::invalid(path, value, problems.join("; ")));
    }
}

/// Requirements that must all be met. The default selects everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LabelSelector {
    nothing: bool,
    requirements: Vec<Requirement>,
}

impl LabelSelector {
    /// Selects every object.
    pub fn everything() -> Self {
        Self::default()
    }

    /// Selects no object.
    pub fn nothing() -> Self {
        Self { nothing: true, requirements: Vec::new() }
    }

    pub fn from_requirements(requirements: Vec<Requirement>) -> Self {
        let mut requirements = requirements;
        requirements.sort_by(|a, b| a.key.cmp(&b.key));
        Self { nothing: false, requirements }
    }

    /// Reads the string form of a request: `a=b,c!=d,e in (x,y),!f,g>1`. Empty selects everything.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        // As upstream, whose reader takes this character for the end.
        let text = text.split('\0').next().unwrap_or_default();
        Ok(Self::from_requirements(parse::requirements(text)?))
    }

    /// Reads the structured form of an object. An absent selector selects nothing, an empty one everything.
    pub fn from_value(selector: &Value) -> Result<Self, SelectorError> {
        if selector.is_null() {
            return Ok(Self::nothing());
        }
        let mut requirements = Vec::new();
        for (key, value) in map(selector, "matchLabels").into_iter().flatten() {
            let value = value.as_str().unwrap_or_default().to_owned();
            requirements.push(Requirement::new(key, Operator::Equals, vec![value])?);
        }
        for expression in list(selector, "matchExpressions") {
            let values = strings(expression, "values").into_iter().map(str::to_owned).collect();
            let operator = structured_operator(text(expression, "operator"))?;
            requirements.push(Requirement::new(text(expression, "key"), operator, values)?);
        }
        Ok(Self::from_requirements(requirements))
    }

    /// As [`LabelSelector::from_value`], from the typed form.
    pub fn from_typed(selector: Option<&meta::LabelSelector>) -> Result<Self, SelectorError> {
        let Some(selector) = selector else { return Ok(Self::nothing()) };
        let mut requirements = Vec::new();
        for (key, value) in selector.match_labels.iter().flatten() {
            requirements.push(Requirement::new(key, Operator::Equals, vec![value.clone()])?);
        }
        for expression in selector.match_expressions.iter().flatten() {
            let values = expression.values.clone().unwrap_or_default();
            let operator = structured_operator(&expression.operator)?;
            requirements.push(Requirement::new(&expression.key, operator, values)?);
        }
        Ok(Self::from_requirements(requirements))
    }

    /// A selector of equal labels, as services and replication controllers have it. Empty selects everything.
    pub fn from_equal_labels<'a>(labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let requirements = labels
            .into_iter()
            .map(|(key, value)| Requirement {
                key: key.to_owned(),
                operator: Operator::Equals,
                values: vec![value.to_owned()],
            })
            .collect();
        Self::from_requirements(requirements)
    }

    /// Returns true if it selects everything.
    pub fn is_empty(&self) -> bool {
        !self.nothing && self.requirements.is_empty()
    }

    /// Returns true if it can select nothing.
    pub fn selects_nothing(&self) -> bool {
        self.nothing
    }

    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// Returns true if labels meet all requirements.
    pub fn matches(&self, labels: &(impl Labels + ?Sized)) -> bool {
        !self.nothing && self.requirements.iter().all(|r| r.matches(labels))
    }

    /// Returns true if the labels of an object meet all requirements.
    pub fn matches_object(&self, object: &Value) -> bool {
        self.matches(&crate::meta::labels(object))
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, requirement) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            write!(f, "{requirement}")?;
        }
        Ok(())
    }
}

fn structured_operator(operator: &str) -> Result<Operator, SelectorError> {
    match operator {
        "In" => Ok(Operator::In),
        "NotIn" => Ok(Operator::NotIn),
        "Exists" => Ok(Operator::Exists),
        "DoesNotExist" => Ok(Operator::DoesNotExist),
        other => Err(SelectorError::Operator(other.to_owned())),
    }
}

/// Validates the structured form where an object contains it.
pub fn validate_label_selector(selector: &Value, path: &Path) -> FieldErrors {
    let mut errors =
        crate::meta_validation::validate_labels(&selector["matchLabels"], &path.child("matchLabels"));
    for (index, expression) in list(selector, "matchExpressions").iter().enumerate() {
        let path = path.child("matchExpressions").index(index);
        let values = strings(expression, "values");
        match text(expression, "operator") {
            "In" | "NotIn" if values.is_empty() => errors.push(FieldError::required(
                &path.child("values"),
                "must be specified when `operator` is 'In' or 'NotIn'",
            )),
            "Exists" | "DoesNotExist" if !values.is_empty() => errors.push(FieldError::forbidden(
                &path.child("values"),
                "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
            )),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => errors.push(FieldError::invalid(
                &path.child("operator"),
                other,
                "not a valid selector operator",
            )),
        }
        let key = text(expression, "key");
        errors
            .extend(qualified_name(key).into_iter().map(|p| FieldError::invalid(&path.child("key"), key, p)));
        for (index, value) in values.iter().enumerate() {
            let path = path.child("values").index(index);
            errors.extend(label_value(value).into_iter().map(|p| FieldError::invalid(&path, *value, p)));
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn matching() {
        let labels = json!({"a": "b", "n": "5", "e": ""});
        let labels = labels.as_object().unwrap();
        for (selector, expected) in [
            ("", true),
            ("a=b", true),
            ("a==b", true),
            ("a=c", false),
            ("a!=c", true),
            ("z!=c", true),
            ("a", true),
            ("z", false),
            ("!z", true),
            ("!a", false),
            ("a in (x,b)", true),
            ("a notin (x,b)", false),
            ("z notin (x)", true),
            ("z in (x)", false),
            ("n>4", true),
            ("n>5", false),
            ("n<6", true),
            ("a>1", false),
            ("e=", true),
            ("e", true),
            ("a=b,n", true),
            ("a=b,z", false),
        ] {
            assert_eq!(LabelSelector::parse(selector).unwrap().matches(labels), expected, "{selector}");
        }
    }

    #[test]
    fn printed_sorted_by_key() {
        for (input, output) in [
            ("b=1,a", "a,b=1"),
            ("x in (b,a,b)", "x in (a,b)"),
            ("x notin (a)", "x notin (a)"),
            (" a = b , ! c ", "a=b,!c"),
            ("g>1,h<2", "g>1,h<2"),
            ("in=notin", "in=notin"),
            ("a in (,b)", "a in (,b)"),
        ] {
            assert_eq!(LabelSelector::parse(input).unwrap().to_string(), output, "{input}");
        }
    }

    #[test]
    fn structured_form() {
        let selector = |value: Value| LabelSelector::from_value(&value).map(|s| s.to_string());
        assert_eq!(
            selector(json!({"matchLabels": {"app": "a"}, "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["web", "api"]}, {"key": "x", "operator": "DoesNotExist"}]})),
            Ok("app=a,tier in (api,web),!x".to_owned())
        );
        assert!(LabelSelector::from_value(&Value::Null).unwrap().selects_nothing());
        assert!(LabelSelector::from_value(&json!({})).unwrap().is_empty());
        assert!(!LabelSelector::nothing().matches(&BTreeMap::new()));
        let error =
            LabelSelector::from_value(&json!({"matchExpressions": [{"key": "a", "operator": "Like"}]}));
        assert_eq!(error.unwrap_err().to_string(), "\"Like\" is not a valid label selector operator");
    }
}
