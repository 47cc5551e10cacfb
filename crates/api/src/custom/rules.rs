//! `x-kubernetes-validations`: rules in CEL.

use crate::field::{FieldError, FieldErrors, Path, Problem};
use ferrite_cel::{BadValue, Environment, FieldErrorKind, RuleEnvironment, RuleInput, ValidationRules};
use ferrite_json::Value;
use std::sync::LazyLock;

/// The most that one rule may cost against one object, and all rules together: upstream's.
const PER_CALL_LIMIT: u64 = 1_000_000;
const BUDGET: i64 = 10_000_000;

/// The level of the API whose libraries rules can use.
const MINOR: u32 = 36;

pub(super) static ENVIRONMENT: LazyLock<RuleEnvironment> =
    LazyLock::new(|| RuleEnvironment::new(Environment::kubernetes(MINOR), PER_CALL_LIMIT));

/// The rules of a schema, compiled.
#[derive(Debug)]
pub struct RuleSet(ValidationRules);

impl RuleSet {
    /// None when the schema has no rules. A definition with rules that cannot be compiled is refused before.
    pub fn compile(openapi: &Value, resource_root: bool) -> Option<Self> {
        if !has_rules(openapi) {
            return None;
        }
        ValidationRules::compile(openapi, resource_root, &ENVIRONMENT).ok().flatten().map(Self)
    }

    /// The rules' errors for an object, or for its change from `old`, and their warnings about parts that were as bad before.
    pub fn validate(&self, object: &Value, old: Option<&Value>, path: &str) -> (FieldErrors, Vec<String>) {
        let input = RuleInput { old_object: old, ratcheting: old.is_some(), ..RuleInput::new(path, object) };
        let outcome = self.0.validate(input, BUDGET);
        let warnings = outcome.warnings.into_iter().map(|warning| field_error(warning).to_string());
        let warnings = warnings.collect();
        (outcome.errors.into_iter().map(field_error).collect(), warnings)
    }
}

/// Does a schema have rules anywhere?
pub(super) fn has_rules(openapi: &Value) -> bool {
    match openapi {
        Value::Object(map) => map.iter().any(|(key, value)| {
            key == "x-kubernetes-validations" && value.as_array().is_some_and(|rules| !rules.is_empty())
                || has_rules(value)
        }),
        Value::Array(list) => list.iter().any(has_rules),
        _ => false,
    }
}

fn field_error(error: ferrite_cel::FieldError) -> FieldError {
    let ferrite_cel::FieldError { kind, field, value, detail } = error;
    let (value, rendered) = match value {
        BadValue::Omitted => (Value::Null, Some(String::new())),
        BadValue::Type(name) => (name.into(), None),
        BadValue::Value(value) => (value, None),
    };
    let problem = match kind {
        FieldErrorKind::Invalid => Problem::Invalid(value),
        FieldErrorKind::Forbidden => Problem::Forbidden,
        FieldErrorKind::Required => Problem::Required,
        FieldErrorKind::Duplicate => Problem::Duplicate(value),
    };
    let detail = if kind == FieldErrorKind::Duplicate { String::new() } else { detail };
    FieldError { path: Path::new(field.trim_start_matches('.')), problem, detail, rendered }
}
