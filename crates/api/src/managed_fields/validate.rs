//! Validation of an applied configuration against the schema, in the words of upstream's typed objects.

use super::ApplyError;
use super::PathElement;
use super::node::Node;
use crate::custom::{Additional, Schema, Type};
use crate::patch::{go_format, go_type};
use crate::schema::{Kind, TypeRef, named};
use ferrite_json::Value;
use std::collections::BTreeSet;

/// Validates an applied configuration against its type; upstream answers 500 with the text of the error.
pub fn validate(type_: TypeRef, config: &Value, api_version: &str) -> Result<(), ApplyError> {
    let mut problems = Vec::new();
    check(Node::Struct(type_), &Kind::Struct(type_), config, "", &mut problems);
    refuse(problems, config, api_version)
}

/// As [`validate`], for a custom kind.
pub fn validate_custom(schema: &Schema, config: &Value, api_version: &str) -> Result<(), ApplyError> {
    let mut problems = Vec::new();
    check_custom(Node::CustomRoot(schema), schema, true, config, "", &mut problems);
    refuse(problems, config, api_version)
}

fn refuse(problems: Vec<String>, config: &Value, api_version: &str) -> Result<(), ApplyError> {
    if problems.is_empty() {
        return Ok(());
    }
    let text = |key| crate::meta::str(config, key);
    let kind = config.get("kind").and_then(Value::as_str).unwrap_or_default();
    let group_version =
        if api_version.contains('/') { api_version.to_owned() } else { format!("/{api_version}") };
    Err(ApplyError::Typed {
        object: format!("{}/{}; {group_version}, Kind={kind}", text("namespace"), text("name")),
        problems: match problems.as_slice() {
            [only] => only.clone(),
            many => format!("errors:\n  {}", many.join("\n  ")),
        },
    })
}

/// A value as Go's `%#v` prints it.
fn go_syntax(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(go_syntax).collect();
            format!("[]interface {{}}{{{}}}", items.join(", "))
        }
        Value::Object(map) => {
            let mut members: Vec<(&str, String)> =
                map.iter().map(|(key, value)| (key.as_str(), go_syntax(value))).collect();
            members.sort_unstable();
            let members: Vec<String> =
                members.into_iter().map(|(key, value)| format!("{key:?}:{value}")).collect();
            format!("map[string]interface {{}}{{{}}}", members.join(", "))
        }
        Value::Null => "interface {}(nil)".to_owned(),
        other => go_format(other),
    }
}

/// Upstream prints each of its complaints with another verb of Go's.
fn unexpected(path: &str, what: &str, value: &Value) -> String {
    let got = match what {
        what if what.starts_with("numeric") => go_type(value).to_owned(),
        "string" => format!("&value.valueUnstructured{{Value:{}}}", go_syntax(value)),
        _ => format!("&{{{}}}", go_format(value)),
    };
    format!("{path}: expected {what}, got {got}")
}

fn check_custom(
    node: Node<'_>,
    schema: &Schema,
    root: bool,
    value: &Value,
    path: &str,
    problems: &mut Vec<String>,
) {
    let wants = |what: &str, problems: &mut Vec<String>| problems.push(unexpected(path, what, value));
    match (schema.type_, value) {
        (_, Value::Null) | (None, _) => {}
        _ if schema.int_or_string => {}
        (Some(Type::Object), Value::Object(map)) => {
            for (name, value) in map {
                let path = format!("{path}.{name}");
                match (name.as_str(), root || schema.embedded) {
                    ("metadata", true) => {
                        if let Some(type_) = named("meta.v1.ObjectMeta") {
                            check(Node::Struct(type_), &Kind::Struct(type_), value, &path, problems);
                        }
                    }
                    ("apiVersion" | "kind", true) => {}
                    _ => match schema.member(name) {
                        Some(below) => {
                            check_custom(Node::of_schema(below), below, false, value, &path, problems);
                        }
                        None if schema.preserve || matches!(schema.additional, Additional::Allowed(true)) => {
                        }
                        None => problems.push(format!("{path}: field not declared in schema")),
                    },
                }
            }
        }
        (Some(Type::Array), Value::Array(list)) => {
            let mut seen = BTreeSet::new();
            for (index, value) in list.iter().enumerate() {
                let Some(step) = step_to(node, index, value, path, &mut seen, problems) else { continue };
                if let Some(items) = &schema.items {
                    check_custom(
                        Node::of_schema(items),
                        items,
                        false,
                        value,
                        &format!("{path}{step}"),
                        problems,
                    );
                }
            }
        }
        (Some(Type::Object), _) => wants("map", problems),
        (Some(Type::Array), _) => wants("list", problems),
        (Some(Type::String), Value::String(_)) | (Some(Type::Boolean), Value::Bool(_)) => {}
        (Some(Type::Integer | Type::Number), Value::Number(_)) => {}
        (Some(Type::String), _) => wants("string", problems),
        (Some(Type::Boolean), _) => wants("boolean", problems),
        (Some(Type::Integer | Type::Number), _) => wants("numeric (int or float)", problems),
    }
}

/// The path element of a list's item: its index, or its keys where the list has some. Nothing for an item without keys
/// and for one that repeats the keys of another, both of which are reported.
fn step_to(
    node: Node<'_>,
    index: usize,
    value: &Value,
    path: &str,
    seen: &mut BTreeSet<PathElement>,
    problems: &mut Vec<String>,
) -> Option<String> {
    if !node.is_list() {
        return Some(format!("[{index}]"));
    }
    let Some(element) = node.identify(value) else {
        problems.push(format!("{path}: {}", no_keys(node, index)));
        return None;
    };
    let step = element.to_string();
    if !seen.insert(element) {
        problems.push(format!("{path}: duplicate entries for key {step}"));
        return None;
    }
    Some(step)
}

fn no_keys(node: Node<'_>, index: usize) -> String {
    let keys: Vec<String> = node.keys().into_iter().map(|key| format!("{key:?}")).collect();
    format!(
        "element {index}: associative list with keys has an element that omits all key fields [{}] (and doesn't have \
         default values for any key fields)",
        keys.join(" ")
    )
}

fn check(node: Node<'_>, kind: &Kind, value: &Value, path: &str, problems: &mut Vec<String>) {
    let mut expected = |what: &str| problems.push(unexpected(path, what, value));
    match (kind, value) {
        (_, Value::Null) | (Kind::Raw, _) => {}
        (Kind::Struct(type_), Value::Object(map)) => {
            for (name, value) in map {
                match type_.field(name) {
                    Some(field) => {
                        check(
                            Node::Struct(type_).member(name),
                            &field.kind,
                            value,
                            &format!("{path}.{name}"),
                            problems,
                        );
                    }
                    None => problems.push(format!("{path}.{name}: field not declared in schema")),
                }
            }
        }
        (Kind::Map(item), Value::Object(map)) => {
            for (name, value) in map {
                check(node.member(name), item, value, &format!("{path}.{name}"), problems);
            }
        }
        (Kind::List(item), Value::Array(list)) => {
            let mut seen = BTreeSet::new();
            for (index, value) in list.iter().enumerate() {
                let Some(step) = step_to(node, index, value, path, &mut seen, problems) else { continue };
                check(node.element(), item, value, &format!("{path}{step}"), problems);
            }
        }
        (Kind::Struct(_) | Kind::Map(_), _) => expected("map"),
        (Kind::List(_), _) => expected("list"),
        (Kind::String | Kind::Bytes | Kind::Time | Kind::MicroTime | Kind::Duration, Value::String(_)) => {}
        (Kind::String | Kind::Bytes | Kind::Time | Kind::MicroTime | Kind::Duration, _) => expected("string"),
        (Kind::Bool, Value::Bool(_)) | (Kind::Int32 | Kind::Int64 | Kind::Double, Value::Number(_)) => {}
        (Kind::Bool, _) => expected("boolean"),
        (Kind::Int32 | Kind::Int64 | Kind::Double, _) => expected("numeric (int or float)"),
        _ => {}
    }
}
