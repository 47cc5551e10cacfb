//! Rules for each node of a definition's schema.

use super::expressions::{self, TotalCost};
use super::field_path;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, list, present, strings, text};
use ferrite_json::Value;

const TYPES: &[&str] = &["array", "boolean", "integer", "number", "object", "string"];
const META: &[&str] = &["metadata", "kind", "apiVersion"];
const REASONS: &[&str] =
    &["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"];

/// The surroundings of a node.
#[derive(Clone)]
pub(super) struct Context {
    is_root: bool,
    /// Why there may be no default here.
    no_default: Option<String>,
    in_meta: bool,
    /// The nearest part of the schema whose values cannot be compared with their former ones.
    uncorrelatable: Option<Path>,
    /// Most values that this node can have; none if nothing limits it.
    cardinality: Option<u64>,
    /// Rules are compiled here: the node is no part of a condition.
    compiles: bool,
    unchanged: bool,
}

impl Context {
    pub(super) fn root(unchanged: bool) -> Self {
        Self {
            is_root: true,
            no_default: None,
            in_meta: false,
            uncorrelatable: None,
            cardinality: Some(1),
            compiles: true,
            unchanged,
        }
    }

    fn below(&self, schema: &Value) -> Self {
        let most = |key: &str| schema[key].as_i64().map(|most| u64::try_from(most).unwrap_or_default());
        let elements = match text(schema, "type") {
            "object" if present(schema, "additionalProperties") => most("maxProperties"),
            "array" => most("maxItems"),
            _ => Some(1),
        };
        let cardinality = self.cardinality.zip(elements).map(|(a, b)| a.saturating_mul(b));
        Self { is_root: false, cardinality, ..self.clone() }
    }

    fn without_rules(&self) -> Self {
        Self { is_root: false, compiles: false, ..self.clone() }
    }

    fn uncorrelatable(mut self, path: &Path) -> Self {
        self.uncorrelatable.get_or_insert_with(|| path.clone());
        self
    }
}

/// The errors of the schema, and separately those of its rules.
#[derive(Default)]
pub(super) struct Found {
    pub(super) schema: FieldErrors,
    pub(super) rules: FieldErrors,
}

impl Found {
    fn merge(&mut self, other: Self) {
        self.schema.extend(other.schema);
        self.rules.extend(other.rules);
    }
}

pub(super) fn validate(
    schema: &Value,
    path: &Path,
    context: &Context,
    mut total: Option<&mut TotalCost>,
) -> Found {
    let mut found = Found { schema: plain(schema, path, context), rules: Vec::new() };
    if flag(schema, "uniqueItems") {
        let why = "uniqueItems cannot be set to true since the runtime complexity becomes quadratic";
        found.schema.push(FieldError::forbidden(&path.child("uniqueItems"), why));
    }
    let embedded = flag(schema, "x-kubernetes-embedded-resource");
    let has_properties = schema.get("properties").and_then(Value::as_object).is_some_and(|p| !p.is_empty());
    if let Some(additional) = schema.get("additionalProperties").filter(|a| !a.is_null()) {
        let path = path.child("additionalProperties");
        if has_properties && *additional != true {
            let why = "additionalProperties and properties are mutual exclusive";
            found.schema.push(FieldError::forbidden(&path, why));
        }
        if additional.is_object() {
            let mut below = context.below(schema);
            if context.in_meta {
                below.no_default = Some("inside additionalProperties applying to object metadata".into());
            }
            found.merge(validate(additional, &path, &below, total.as_deref_mut()));
        }
    }
    for (name, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let mut below = context.below(schema);
        if text(schema, "x-kubernetes-map-type") == "atomic" {
            below = below.uncorrelatable(path);
        }
        if (context.is_root || embedded) && META.contains(&name.as_str()) {
            below.in_meta = true;
            if context.is_root {
                below.no_default = Some(format!("in top-level {name}"));
            }
        }
        found.merge(validate(property, &path.child("properties").key(name), &below, total.as_deref_mut()));
    }
    if let Some(not) = schema.get("not").filter(|not| not.is_object()) {
        found.merge(validate(not, &path.child("not"), &context.without_rules(), None));
    }
    for key in ["allOf", "oneOf", "anyOf"] {
        for (index, part) in list(schema, key).iter().enumerate() {
            found.merge(validate(part, &path.child(key).index(index), &context.without_rules(), None));
        }
    }
    match schema.get("items") {
        Some(items @ Value::Object(_)) => {
            let mut below = context.below(schema);
            if text(schema, "x-kubernetes-list-type") != "map" {
                below = below.uncorrelatable(path);
            }
            found.merge(validate(items, &path.child("items"), &below, total.as_deref_mut()));
        }
        Some(Value::Array(many)) => {
            for (index, items) in many.iter().enumerate() {
                let path = path.child("items").index(index);
                found.merge(validate(items, &path, &context.without_rules(), None));
            }
        }
        _ => {}
    }
    extensions(schema, path, &mut found.schema);
    rules(schema, path, &mut found.schema);
    let has_rules = !list(schema, "x-kubernetes-validations").is_empty();
    if has_rules && found.schema.is_empty() && context.compiles {
        let place = expressions::Place {
            resource: context.is_root || embedded,
            cardinality: context.cardinality,
            uncorrelatable: context.uncorrelatable.as_ref(),
            unchanged: context.unchanged,
        };
        if let Some(total) = total {
            found.rules.extend(expressions::validate(schema, path, &place, total));
        }
    }
    found
}

fn plain(schema: &Value, path: &Path, context: &Context) -> FieldErrors {
    let mut errors = Vec::new();
    let type_ = text(schema, "type");
    if !type_.is_empty() && !TYPES.contains(&type_) {
        errors.push(FieldError::not_supported(&path.child("type"), type_, TYPES));
    }
    if present(schema, "default")
        && let Some(reason) = &context.no_default
    {
        errors.push(FieldError::forbidden(&path.child("default"), format!("must not be set {reason}")));
    }
    for key in ["id", "additionalItems", "patternProperties", "definitions", "dependencies", "$ref"] {
        if present(schema, key) && schema[key] != "" {
            errors.push(FieldError::forbidden(&path.child(key), format!("{key} is not supported")));
        }
    }
    if type_ == "null" {
        let why = "type cannot be set to null, use nullable as an alternative";
        errors.push(FieldError::forbidden(&path.child("type"), why));
    }
    if schema.get("items").is_some_and(Value::is_array) {
        let why = "items must be a schema object and not an array";
        errors.push(FieldError::forbidden(&path.child("items"), why));
    }
    if context.in_meta && flag(schema, "x-kubernetes-embedded-resource") {
        let why = "must not be used inside of resource meta";
        errors.push(FieldError::forbidden(&path.child("x-kubernetes-embedded-resource"), why));
    }
    errors
}

/// An extension that only a type has.
fn wants_type(type_: &str, key: &str, wanted: &str, path: &Path) -> Option<FieldError> {
    let why = format!("must be {wanted} if {key} is specified");
    match type_ {
        type_ if type_ == wanted => None,
        "" => Some(FieldError::required(&path.child("type"), why)),
        type_ => Some(FieldError::invalid(&path.child("type"), type_, why)),
    }
}

/// Kubernetes' extensions of lists and maps.
fn extensions(schema: &Value, path: &Path, errors: &mut FieldErrors) {
    let type_ = text(schema, "type");
    if schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(false)) {
        let path = path.child("x-kubernetes-preserve-unknown-fields");
        errors.push(FieldError::invalid(&path, false, "must be true or undefined"));
    }
    let (map_type, list_type) =
        (text(schema, "x-kubernetes-map-type"), text(schema, "x-kubernetes-list-type"));
    if present(schema, "x-kubernetes-map-type") {
        errors.extend(wants_type(type_, "x-kubernetes-map-type", "object", path));
        if !matches!(map_type, "atomic" | "granular") {
            let path = path.child("x-kubernetes-map-type");
            errors.push(FieldError::not_supported(&path, map_type, &["atomic", "granular"]));
        }
    }
    let items = schema.get("items").filter(|items| items.is_object());
    if present(schema, "x-kubernetes-list-type") {
        let wrong = wants_type(type_, "x-kubernetes-list-type", "array", path);
        let is_array = wrong.is_none();
        errors.extend(wrong);
        if is_array
            && list_type == "set"
            && let Some(items) = items
        {
            let why = "must be atomic as item of a list with x-kubernetes-list-type=set";
            let path = path.child("items");
            let shown = |key: &str| items.get(key).cloned().unwrap_or_default();
            match text(items, "type") {
                "array" if !matches!(text(items, "x-kubernetes-list-type"), "" | "atomic") => {
                    let path = path.child("x-kubernetes-list-type");
                    errors.push(FieldError::invalid(&path, shown("x-kubernetes-list-type"), why));
                }
                "object" if text(items, "x-kubernetes-map-type") != "atomic" => {
                    let path = path.child("x-kubernetes-map-type");
                    errors.push(FieldError::invalid(&path, shown("x-kubernetes-list-type"), why));
                }
                _ => {}
            }
        }
        if !matches!(list_type, "atomic" | "set" | "map") {
            let path = path.child("x-kubernetes-list-type");
            errors.push(FieldError::not_supported(&path, list_type, &["atomic", "set", "map"]));
        }
    }
    let keys = strings(schema, "x-kubernetes-list-map-keys");
    if !keys.is_empty() && list_type != "map" {
        let path = path.child("x-kubernetes-list-type");
        let why = "must be map if x-kubernetes-list-map-keys is non-empty";
        errors.push(match list_type {
            "" => FieldError::required(&path, why),
            list_type => FieldError::invalid(&path, list_type, why),
        });
    }
    if list_type == "map" {
        list_map(schema, items, &keys, path, errors);
    }
    if let Some(items) = items.filter(|_| matches!(list_type, "set" | "map")) {
        if flag(items, "nullable") {
            let why = format!("cannot be nullable when x-kubernetes-list-type is {list_type}");
            errors.push(FieldError::forbidden(&path.child("items").child("nullable"), why));
        }
        let required = strings(items, "required");
        for key in keys.iter().filter(|_| list_type == "map") {
            let Some(property) = items.get("properties").and_then(|p| p.get(*key)) else { continue };
            let path = path.child("items").child("properties").key(key);
            let this = "this property is in x-kubernetes-list-map-keys, so it";
            if !required.contains(key) && !present(property, "default") {
                let why = format!("{this} must have a default or be a required property");
                errors.push(FieldError::required(&path.child("default"), why));
            }
            if flag(property, "nullable") {
                errors.push(FieldError::forbidden(
                    &path.child("nullable"),
                    format!("{this} cannot be nullable"),
                ));
            }
        }
    }
}

fn list_map(schema: &Value, items: Option<&Value>, keys: &[&str], path: &Path, errors: &mut FieldErrors) {
    let keys_path = path.child("x-kubernetes-list-map-keys");
    if keys.is_empty() {
        errors.push(FieldError::required(&keys_path, "must not be empty if x-kubernetes-list-type is map"));
    }
    let Some(items) = items else {
        let path = path.child("items");
        errors.push(match schema.get("items").filter(|items| items.is_array()) {
            None => FieldError::required(&path, "must have a schema if x-kubernetes-list-type is map"),
            Some(items) => FieldError::invalid(
                &path,
                items.clone(),
                "must only have a single schema if x-kubernetes-list-type is map",
            ),
        });
        return;
    };
    let type_ = text(items, "type");
    if type_ != "object" {
        let why = "must be object if parent array's x-kubernetes-list-type is map";
        errors.push(FieldError::invalid(&path.child("items").child("type"), type_, why));
        return;
    }
    let shown = || Value::from(keys.to_vec());
    for (index, key) in keys.iter().enumerate() {
        match items.get("properties").and_then(|properties| properties.get(*key)) {
            Some(property) if matches!(text(property, "type"), "array" | "object") => {
                let path = path.child("items").child("properties").key(key).child("type");
                let why = "must be a scalar type if parent array's x-kubernetes-list-type is map";
                errors.push(FieldError::invalid(&path, type_, why));
            }
            Some(_) => {}
            None => {
                let why = "entries must all be names of item properties";
                errors.push(FieldError::invalid(&keys_path, shown(), why));
            }
        }
        if keys.iter().take(index).any(|before| before == key) {
            errors.push(FieldError::invalid(&keys_path, shown(), "must not contain duplicate entries"));
        }
    }
}

/// The parts of rules that are no expressions.
fn rules(schema: &Value, path: &Path, errors: &mut FieldErrors) {
    let breaks = |text: &str| text.contains(['\n', '\r']);
    for (index, rule) in list(schema, "x-kubernetes-validations").iter().enumerate() {
        let path = path.child("x-kubernetes-validations").index(index);
        let (source, message) = (text(rule, "rule").trim(), text(rule, "message"));
        let message_path = path.child("message");
        if source.is_empty() {
            errors.push(FieldError::required(&path.child("rule"), "rule is not specified"));
        } else if !message.is_empty() && message.trim().is_empty() {
            errors.push(FieldError::invalid(&message_path, message, "must be non-empty if specified"));
        } else if breaks(message.trim()) {
            errors.push(FieldError::invalid(&message_path, message, "must not contain line breaks"));
        } else if breaks(source) && message.trim().is_empty() {
            let why = "message must be specified if rule contains line breaks";
            errors.push(FieldError::required(&message_path, why));
        }
        let expression = text(rule, "messageExpression");
        if !expression.is_empty() && expression.trim().is_empty() {
            let why = "messageExpression must be non-empty if specified";
            errors.push(FieldError::required(&path.child("messageExpression"), why));
        }
        if present(rule, "reason") && !REASONS.contains(&text(rule, "reason")) {
            errors.push(FieldError::not_supported(&path.child("reason"), text(rule, "reason"), REASONS));
        }
        let field = text(rule, "fieldPath");
        let field_at = path.child("fieldPath");
        if !field.is_empty() && field.trim().is_empty() {
            errors.push(FieldError::invalid(&field_at, field, "must be non-empty if specified"));
        }
        if breaks(field) {
            errors.push(FieldError::invalid(&field_at, field, "must not contain line breaks"));
        }
        if !field.is_empty() && field_path::find(field, schema, true).is_err() {
            errors.push(FieldError::invalid(&field_at, field, "must be a valid path"));
        }
    }
}
