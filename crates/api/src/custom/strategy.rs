//! The strategy of custom kinds: the same for all, except for settings of their definitions.

use super::definition::{Custom, ScalePaths};
use super::{default, metadata, validate};
use crate::field::{FieldError, FieldErrors, Path, Problem};
use crate::kinds::common::access::{keep, text};
use crate::resource::{Column, Strategy, keep_all_but_status};
use ferrite_json::Value;
use jiff::Timestamp;

pub(super) struct CustomStrategy(pub(super) Custom);

const UNCHECKED: &str = "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation";

impl CustomStrategy {
    fn type_meta(&self, object: &Value) -> FieldErrors {
        let kind = &self.0.kind;
        let version = crate::gvk::api_version(&kind.group, &self.0.version().name);
        let mut errors = Vec::new();
        for (key, wanted) in [("kind", kind.kind.as_str()), ("apiVersion", version.as_str())] {
            let given = text(object, key);
            if given != wanted {
                errors.push(FieldError::invalid(&Path::new(key), given, format!("must be {wanted}")));
            }
        }
        errors
    }

    fn checked(&self, new: &Value, old: Option<&Value>, warnings: &mut Vec<String>) -> FieldErrors {
        let mut errors = self.type_meta(new);
        if !errors.is_empty() {
            return errors;
        }
        let version = self.0.version();
        let root = Path::default();
        errors = validate::value(new, old, &version.schema, &root);
        if let Some(scale) = &version.scale {
            errors.extend(check_replicas(new, &scale.spec_replicas));
            errors.extend(check_scale_status(new, scale));
        }
        self.finish(new, old, errors, warnings)
    }

    /// Checks that come after those of the schema.
    fn finish(
        &self,
        new: &Value,
        old: Option<&Value>,
        mut errors: FieldErrors,
        warnings: &mut Vec<String>,
    ) -> FieldErrors {
        let version = self.0.version();
        let root = Path::default();
        metadata::validate_embedded(new, &version.schema, &root, &mut errors);
        // Lists that were wrong before may stay so.
        if old.is_none_or(|old| validate::list_types(old, &version.schema, &root).is_empty()) {
            errors.extend(validate::list_types(new, &version.schema, &root));
        }
        if let Some(rules) = &version.rules {
            if errors.iter().any(blocks_rules) {
                errors.push(FieldError::invalid(&root, Value::Null, UNCHECKED).rendered_as("null"));
            } else {
                let (broken, told) = rules.validate(new, old, "");
                errors.extend(broken);
                warnings.extend(told);
            }
        }
        errors
    }
}

/// Rules are not run on an object whose shape is wrong.
fn blocks_rules(error: &FieldError) -> bool {
    matches!(
        error.problem,
        Problem::NotSupported { .. }
            | Problem::Required
            | Problem::TooLong { .. }
            | Problem::TooMany { .. }
            | Problem::TypeInvalid(_)
    )
}

/// The value at the end of a path of names.
fn at<'v>(object: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(object, |value, name| value.get(name.as_str()))
}

/// Go's name for the type of a value that is not the one wanted.
fn accessor_error(path: &[String], value: &Value, wanted: &str) -> String {
    let found = match value {
        Value::Null => "<nil>",
        Value::Bool(_) => "bool",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
        Value::Number(number) if number.is_f64() => "float64",
        Value::Number(_) => "int64",
    };
    let shown = match value {
        Value::String(text) => text.to_string(),
        Value::Null => "<nil>".to_owned(),
        other => crate::patch::go_format(other),
    };
    format!(".{} accessor error: {shown} is of the type {found}, expected {wanted}", path.join("."))
}

fn check_replicas(object: &Value, path: &[String]) -> Option<FieldError> {
    let field = Path::new(&format!(".{}", path.join(".")));
    let mut value = object;
    for name in path {
        let Some(members) = value.as_object() else {
            let why = accessor_error(path, value, "map[string]interface{}");
            return Some(FieldError::invalid(&field, 0, why));
        };
        value = members.get(name.as_str())?;
    }
    let Some(replicas) = value.as_i64() else {
        return Some(FieldError::invalid(&field, 0, accessor_error(path, value, "int64")));
    };
    if replicas < 0 {
        Some(FieldError::invalid(&field, replicas, "should be a non-negative integer"))
    } else if replicas > i64::from(i32::MAX) {
        Some(FieldError::invalid(&field, replicas, format!("should be less than or equal to {}", i32::MAX)))
    } else {
        None
    }
}

fn check_scale_status(object: &Value, scale: &ScalePaths) -> FieldErrors {
    let mut errors: FieldErrors = check_replicas(object, &scale.status_replicas).into_iter().collect();
    if let Some(path) = &scale.label_selector
        && let Some(value) = at(object, path).filter(|value| !value.is_string())
    {
        let field = Path::new(&format!(".{}", path.join(".")));
        errors.push(FieldError::invalid(&field, "", accessor_error(path, value, "string")));
    }
    errors
}

impl Strategy for CustomStrategy {
    fn default(&self, object: &mut Value) {
        default::fill(object, &self.0.version().schema);
    }

    fn prepare_create(&self, object: &mut Value) {
        if self.0.version().has_status
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if self.0.version().has_status {
            keep(new, old, "status");
        }
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep_all_but_status(new, old);
    }

    fn has_generation(&self) -> bool {
        true
    }

    /// Everything but metadata counts. Status is not here when it has an endpoint of its own.
    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        let rest = |object: &Value| {
            let map = object.as_object().cloned().unwrap_or_default();
            map.into_iter().filter(|(key, _)| key != "metadata").collect::<Vec<_>>()
        };
        rest(new) != rest(old)
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        self.checked(object, None, &mut Vec::new())
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        self.checked(new, Some(old), &mut Vec::new())
    }

    fn validate_change(&self, new: &Value, old: &Value, warnings: &mut Vec<String>) -> FieldErrors {
        self.checked(new, Some(old), warnings)
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.type_meta(new);
        if !errors.is_empty() {
            return errors;
        }
        let version = self.0.version();
        if let (Some(schema), Some(status)) = (version.schema.property("status"), new.get("status")) {
            errors.extend(validate::value(status, old.get("status"), schema, &Path::new("status")));
        }
        if let Some(scale) = &version.scale {
            errors.extend(check_scale_status(new, scale));
        }
        self.finish(new, Some(old), errors, &mut Vec::new())
    }

    fn validate_subresource_update(&self, _: &str, new: &Value, old: &Value) -> FieldErrors {
        self.checked(new, Some(old), &mut Vec::new())
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        crate::meta::finalizers(object).flat_map(finalizer_warnings).collect()
    }

    fn warnings_on_update(&self, new: &Value, old: &Value) -> Vec<String> {
        let had: Vec<&str> = crate::meta::finalizers(old).collect();
        crate::meta::finalizers(new).filter(|f| !had.contains(f)).flat_map(finalizer_warnings).collect()
    }

    fn fields(&self) -> Vec<&str> {
        self.0.version().selectable.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        let selectable = &self.0.version().selectable;
        let path = selectable.iter().find(|(name, _)| name == field).and_then(|(_, path)| path.as_ref());
        match path.and_then(|path| path.find(object).into_iter().next()) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.to_string(),
            Some(other) => other.to_string(),
        }
    }

    fn columns(&self) -> &[Column] {
        &self.0.version().columns
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let version = self.0.version();
        let mut cells = vec![crate::meta::name(object).into()];
        for (column, path) in version.columns.iter().skip(1).zip(&version.cells) {
            let found = path.as_ref().and_then(|path| path.find(object).into_iter().next());
            cells.push(found.map_or(Value::Null, |value| cell(&column.type_, value, now)));
        }
        cells
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn cell(type_: &str, value: &Value, now: Timestamp) -> Value {
    match (type_, value) {
        ("string", Value::String(text)) => text.as_str().into(),
        ("string", Value::Null) => "<no value>".into(),
        ("string", Value::Object(_) | Value::Array(_)) => value.to_string().into(),
        ("string", other) => other.to_string().into(),
        ("integer", Value::Number(number)) => {
            number.as_i64().or_else(|| number.as_f64().map(|number| number as i64)).into()
        }
        ("number", Value::Number(_)) => value.clone(),
        ("boolean", Value::Bool(_)) => value.clone(),
        ("date", Value::String(text)) => match text.parse::<Timestamp>() {
            Ok(_) => crate::table::since(text, now).into(),
            Err(_) => "<invalid>".into(),
        },
        _ => Value::Null,
    }
}

/// Finalizers that need no domain.
const STANDARD: &[&str] = &["orphan", "foregroundDeletion", "kubernetes"];

fn finalizer_warnings(name: &str) -> Vec<String> {
    let place = format!("metadata.finalizers: {name:?}");
    let mut warnings: Vec<String> = crate::meta_validation::qualified_name(name)
        .into_iter()
        .map(|why| format!("{place}: {why}"))
        .collect();
    if !name.contains('/') && !STANDARD.contains(&name) {
        let path = if name.contains('.') { " including a path (/)" } else { "" };
        warnings.push(format!(
            "{place}: prefer a domain-qualified finalizer name{path} to avoid accidental conflicts with other finalizer writers"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn cells_have_the_type_of_their_column() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().expect("a time");
        for (type_, value, shown) in [
            ("string", json!("a"), json!("a")),
            ("string", json!(null), json!("<no value>")),
            ("string", json!({"a": [1]}), json!("{\"a\":[1]}")),
            ("integer", json!(1.5), json!(1)),
            ("boolean", json!("true"), json!(null)),
            ("date", json!("2026-01-01T00:00:00Z"), json!("60s")),
            ("date", json!("never"), json!("<invalid>")),
        ] {
            assert_eq!(cell(type_, &value, now), shown, "{type_} {value}");
        }
    }
}
